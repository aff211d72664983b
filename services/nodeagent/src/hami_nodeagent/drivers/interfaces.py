# SPDX-License-Identifier: Apache-2.0
"""The default interface to each vendor's devices, library or tool, and why.

No interface has a verified run on hardware. The default is the one with a published specification;
the other one is experimental. With ``interface = "auto"`` the agent uses the default. It falls back
from a library to the tool only if the library is missing or unusable, and never from a tool to a
library.

``docs/drivers.md`` shows this table; ``tools.gen_drivers`` writes it there.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

Way = Literal["library", "tool"]


class Interface(Struct, frozen=True, kw_only=True):
    """Interface through which one vendor's devices are read."""

    default: Way
    reason: str
    """Reason for the choice, as the end of "because …"."""
    library: str = ""
    """Name of the vendor's library; empty: the agent uses none."""
    tool: str = ""
    """Name of the vendor's tool; empty: the agent uses none."""

    @property
    def experimental(self) -> Way | None:
        """The other interface; ``None`` if there is only one."""
        if not (self.library and self.tool):
            return None
        return "tool" if self.default == "library" else "library"


INTERFACES: Mapping[str, Interface] = {
    "nvidia": Interface(
        default="library",
        library="NVML",
        reason="NVIDIA documents NVML",
    ),
    "ascend": Interface(
        default="library",
        library="DCMI",
        tool="npu-smi",
        reason="the header is published, faults are pushed, and npu-smi asks for confirmation "
        "before it changes device-share",
    ),
    "cambricon": Interface(
        default="library",
        library="CNDEV",
        tool="cnmon",
        reason="the header is published; cnmon's commands for sMLU are not, and it reports no "
        "links",
    ),
    "hygon": Interface(
        default="library",
        library="RSMI and DMI",
        tool="hy-smi",
        reason="the headers are published; hy-smi reports neither links nor processes, and the "
        "name of its health option is unverified",
    ),
    "iluvatar": Interface(
        default="library",
        library="IXML",
        tool="ixsmi",
        reason="the header is published; ixsmi reports neither health nor memory bandwidth",
    ),
    "mthreads": Interface(
        default="library",
        library="MTML",
        tool="mthreads-gmi",
        reason="the header is published; mthreads-gmi reports neither ECC errors nor power",
    ),
    "metax": Interface(
        default="library",
        library="MXSML",
        tool="mx-smi",
        reason="the header is published; mx-smi's list of sGPUs is not",
    ),
    "enflame": Interface(
        default="library",
        library="EFML",
        tool="efsmi",
        reason="the header is published; efsmi reports no links. Only efsmi reports DRS, so the "
        "agent also runs it for cards in DRS mode",
    ),
    "kunlunxin": Interface(
        default="library",
        library="XPUML",
        tool="xpu-smi",
        reason="the header is published; xpu-smi reports neither the state of a card nor memory "
        "bandwidth",
    ),
    "awsneuron": Interface(
        default="tool",
        tool="neuron-ls",
        reason="AWS publishes no library for monitoring",
    ),
    "amd": Interface(
        default="library",
        library="AMD SMI",
        tool="amd-smi",
        reason="the header is published for each release; amd-smi reports no links",
    ),
    "biren": Interface(
        default="library",
        library="BRML",
        tool="brsmi",
        reason="the header is published; brsmi calls the same library and reports less",
    ),
    "vastai": Interface(
        default="tool",
        tool="vasmi",
        reason="no header of Vastai's library is public",
    ),
}


def uses_library(vendor: str) -> bool:
    """Return true if ``interface = "auto"`` looks for the vendor's library."""
    return INTERFACES[vendor].default == "library"
