# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin: whole XPUs, and vXPUs of a quarter or half a device, one size per device.

Several devices are 1, 2, 4 or 8 that are linked (shape ``wings``). Memory of a vXPU is rounded up
to the next size; more than the half is a whole device. Memory in MiB.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.device import Profile
from hami_common.model.request import DeviceRequest, DeviceSelector
from hami_common.vendors.handles import handle_of
from hami_common.vendors.protocol import Capability, RenderContext
from hami_common.vendors.shapes import COUNTS
from hami_common.vendors.sharing import (
    FULL_PCT,
    Asked,
    Description,
    Family,
    Given,
    Plan,
    SelectorKeys,
    ShareVendor,
    mount,
    node,
    number_of,
    words_of,
)

NAME = "kunlunxin"
_ALLOW = ("baidu.com/use-gpuuuid", "hami.io/use-xpu-uuid")
_DENY = ("baidu.com/nouse-gpuuuid", "hami.io/no-use-xpu-uuid")
_NO_DEVICE = "-"
"""Names no device."""


class KunlunxinSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``kunlunxin`` of the vendor configuration."""

    resource_count_name: str = "kunlunxin.com/xpu"
    resource_v_count_name: str = "kunlunxin.com/vxpu"
    resource_v_memory_name: str = "kunlunxin.com/vxpu-memory"
    resource_aliases: dict[str, str] = {}
    device_memory_mib: int = 98304
    """Memory of a device; parts of it are the sizes of vXPUs."""
    parts_per_device: tuple[int, ...] = (4, 2)
    """Numbers of vXPUs into which a device can be divided."""
    runtime_class: str = ""


_PARTS = (4, 2)
"""Numbers of vXPUs into which the hardware divides a device."""


def partitions_of(memory_mib: int) -> tuple[Profile, ...]:
    """Sizes of vXPUs of a device, the whole device last; sizes on one device do not mix."""
    if memory_mib < max(_PARTS):
        return ()
    parts = tuple(
        Profile(
            name=name_of(parts),
            memory_mib=memory_mib // parts,
            core_pct=FULL_PCT // parts,
            kind=name_of(parts),
            limit=parts,
        )
        for parts in _PARTS
    )
    return (*parts, Profile(memory_mib=memory_mib, core_pct=FULL_PCT))


def name_of(parts: int) -> str:
    """Size of one of ``parts`` vXPUs, as in ``Share.kind``; empty when it does not exist."""
    return f"1/{parts}" if parts in _PARTS else ""


def parts_of(name: str) -> int:
    """The opposite of ``name_of``."""
    return next((parts for parts in _PARTS if name_of(parts) == name), 0)


class Kunlunxin(ShareVendor):
    """Pure half of the vendor Kunlunxin."""

    def __init__(self, settings: KunlunxinSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = self._settings = settings or KunlunxinSettings()
        super().__init__(
            Description(
                name=NAME,
                families=(
                    Family(count=s.resource_count_name, counts=COUNTS["wings"], shape="wings"),
                    Family(
                        count=s.resource_v_count_name,
                        memory=s.resource_v_memory_name,
                        counts=COUNTS["wings"],
                        shape="wings",
                    ),
                ),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(allow_uuids=_ALLOW, deny_uuids=_DENY),
                runtime_class=s.runtime_class,
                node_env=("XPU_VISIBLE_DEVICES",),
                capability=Capability(
                    memory_enforced="vXPU",
                    compute_enforced="vXPU",
                    partitioned="the agent, through XPUML or xpu-smi (vXPU)",
                ),
            )
        )

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """Take the smallest size that fits the memory."""
        del annotations
        request, s = asked.request, self._settings
        for parts in sorted(s.parts_per_device, reverse=True):
            size = s.device_memory_mib // parts
            if 0 < request.memory_mib <= size:
                return replace(
                    request,
                    memory_mib=size,
                    core_pct=FULL_PCT // parts,
                    exclusive=False,
                    kind=f"1/{parts}",
                    shape=request.shape if request.count > 1 else "",
                )
        return replace(
            request, memory_mib=0, memory_pct=FULL_PCT, core_pct=FULL_PCT, exclusive=True
        )

    def parse_selector(self, annotations: Mapping[str, str]) -> DeviceSelector:
        """A device must be in both lists where both are given."""
        first, second = (words_of(annotations, (key,)) for key in _ALLOW)
        allowed = first or second
        if first and second:
            allowed = tuple(word for word in first if word in second) or (_NO_DEVICE,)
        return replace(super().parse_selector(annotations), allow_uuids=allowed)

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """A vXPU is a device node of its own.

        ``handles``: ``number``, N of the vXPU's ``/dev/xpuN``.
        """
        found = []
        for share, device in given:
            found.append(handle_of(share, device, context, "number") or str(number_of(device)))
        return Plan(
            env={"XPU_VISIBLE_DEVICES": ",".join(found)},
            nodes=(*(node(f"/dev/xpu{number}") for number in found), node("/dev/xpuctrl")),
            mounts=(mount("/usr/local/xpu"),),
            annotations={
                "BAIDU_COM_DEVICE_IDX": ",".join(str(device.index) for _, device in given)
            },
        )
