# SPDX-License-Identifier: Apache-2.0
"""Signs of this vendor's hardware, and its reader.

The reader is imported when it is built, so that other nodes do not hold it in memory.
"""

from hami_nodeagent.drivers.reader import Reader, Signs, ToolSettings

SIGNS = Signs(pci_vendors=("cabc",), pci_classes=("12",))


def make_reader(settings: ToolSettings) -> Reader:
    """Build the reader."""
    from hami_nodeagent.drivers.cambricon.reader import CambriconReader

    return CambriconReader(settings)
