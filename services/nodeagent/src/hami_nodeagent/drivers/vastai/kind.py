# SPDX-License-Identifier: Apache-2.0
"""Signs of this vendor's hardware, and its reader.

The reader is imported when it is built, so that other nodes do not hold it in memory.
"""

from hami_nodeagent.drivers.reader import Reader, Signs, ToolSettings

SIGNS = Signs(pci_vendors=("1ec6", "1edb"), pci_classes=("12", "03"), tool="vasmi")


def make_reader(settings: ToolSettings) -> Reader:
    """Build the reader."""
    from hami_nodeagent.drivers.vastai.reader import VastaiReader

    return VastaiReader(settings)
