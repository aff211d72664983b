# SPDX-License-Identifier: Apache-2.0
"""Signs of this vendor's hardware, and its reader.

The reader is imported when it is built, so that other nodes do not hold it in memory.
"""

from hami_nodeagent.drivers.reader import Reader, Signs, ToolSettings

SIGNS = Signs(
    pci_vendors=("1d94",),
    pci_classes=("0380", "0302", "12"),
    paths=("module/hycu", "module/hydcu"),
)


def make_reader(settings: ToolSettings) -> Reader:
    """Build the reader."""
    from hami_nodeagent.drivers.hygon.reader import HygonReader

    return HygonReader(settings)
