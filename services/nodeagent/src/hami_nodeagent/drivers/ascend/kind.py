# SPDX-License-Identifier: Apache-2.0
"""Signs of this vendor's hardware, and its reader.

The reader is imported when it is built, so that other nodes do not hold it in memory.
"""

from hami_nodeagent.drivers.reader import Reader, Signs, ToolSettings

SIGNS = Signs(pci_vendors=("19e5",), pci_classes=("12",), paths=("class/davinci_manager",))


def make_reader(settings: ToolSettings) -> Reader:
    """Build the reader."""
    from hami_nodeagent.drivers.ascend.reader import AscendReader

    return AscendReader(settings)
