# SPDX-License-Identifier: Apache-2.0
"""Enflame GCU: whole cards, slices by number, and shares by memory and compute.

``drs-gcu`` is the size of one slice and must be a size that the card has; ``gcu-memory``,
``gcu-core`` and the older ``vgcu`` with its percentage get the smallest slice that fits them.
Memory is in GiB; a number above ``memory_gib_most`` is in MiB. Differences from HAMi v2.10: that
limit is a setting, not twice the largest profile of some node; a container that gives only memory
or compute gets a count of ``vgcu``, so that kubelet calls us for it. Memory in MiB.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.device import Profile
from hami_common.model.request import DeviceRequest
from hami_common.pods.podview import ContainerView
from hami_common.vendors.handles import handle_of
from hami_common.vendors.protocol import Capability, RenderContext
from hami_common.vendors.sharing import (
    FULL_PCT,
    GIB_MIB,
    Asked,
    Description,
    Family,
    Given,
    Plan,
    SelectorKeys,
    ShareVendor,
    node,
    number_of,
    numbers,
)

NAME = "enflame"
PART_MODE = "drs"
SLICES = "slices"


class EnflameSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``enflame`` of the vendor configuration."""

    resource_gcu_name: str = "enflame.com/gcu"
    resource_drs_name: str = "enflame.com/drs-gcu"
    resource_vgcu_name: str = "enflame.com/vgcu"
    resource_vgcu_percentage_name: str = "enflame.com/vgcu-percentage"
    resource_memory_name: str = "enflame.com/gcu-memory"
    resource_core_name: str = "enflame.com/gcu-core"
    resource_aliases: dict[str, str] = {}
    memory_gib_most: int = 96
    """Numbers of memory up to here are GiB, larger ones MiB."""
    runtime_class: str = ""


def partitions_of(sizes: Mapping[str, tuple[int, int]]) -> tuple[Profile, ...]:
    """Profiles from ``name: (slices, GiB)``; compute is the part of the largest, rounded down."""
    most = max((slices for slices, _ in sizes.values()), default=1)
    return tuple(
        Profile(
            name=name,
            memory_mib=gib * GIB_MIB,
            core_pct=FULL_PCT * slices // most,
            resources={SLICES: slices},
        )
        for name, (slices, gib) in sizes.items()
    )


class Enflame(ShareVendor):
    """Pure half of the vendor Enflame."""

    def __init__(self, settings: EnflameSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = self._settings = settings or EnflameSettings()
        self._drs = Family(count=s.resource_drs_name, refuses_zero=True)
        super().__init__(
            Description(
                name=NAME,
                families=(
                    Family(count=s.resource_gcu_name),
                    self._drs,
                    Family(
                        count=s.resource_vgcu_name,
                        memory=s.resource_memory_name,
                        memory_percentage=s.resource_vgcu_percentage_name,
                        cores=s.resource_core_name,
                        default_count=1,
                    ),
                ),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_uuids=("enflame.com/use-gpuuuid",),
                    deny_uuids=("enflame.com/nouse-gpuuuid",),
                ),
                runtime_class=s.runtime_class,
                node_env=("ENFLAME_VISIBLE_DEVICES", "TOPS_VISIBLE_DEVICES"),
                capability=Capability(
                    memory_enforced="DRS",
                    compute_enforced="DRS",
                    partitioned="the agent, through efsmi (DRS)",
                ),
            )
        )

    def _family(self, container: ContainerView) -> Family | None:
        """The number of slices takes precedence over memory and compute."""
        mentioned = self._mentioned(container)
        counted = [f for f in mentioned if self._value(container, f.count) is not None]
        return self._drs if counted == [self._drs] else super()._family(container)

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """Slices by size, or the smallest that fits memory and compute."""
        del annotations
        request, family, s = asked.request, asked.family, self._settings
        if family is self._drs:
            return replace(
                request,
                count=1,
                memory_pct=0,
                core_pct=0,
                exclusive=False,
                exact=((SLICES, request.count),),
                modes=(PART_MODE,),
            )
        if family.count == s.resource_gcu_name:
            return request
        for name, value in ((family.memory, asked.memory_mib), (family.cores, asked.cores)):
            if value == 0:
                raise RequestInvalid(
                    field=asked.field(name), problem="0 is no share", fix="write 1 or more"
                )
        memory = asked.memory_mib or 0
        in_mib = memory > s.memory_gib_most
        memory_mib = -(-memory // GIB_MIB) * GIB_MIB if in_mib else memory * GIB_MIB
        core_pct = asked.cores or 0
        if not memory:
            percent = request.memory_pct if request.memory_pct < FULL_PCT else 0
            if not percent and not core_pct:
                return request
            core_pct = core_pct or percent
            return replace(
                request,
                memory_pct=percent,
                core_pct=core_pct,
                exclusive=False,
                modes=(PART_MODE,),
            )
        return replace(
            request,
            memory_mib=memory_mib,
            core_pct=core_pct,
            exclusive=False,
            modes=(PART_MODE,),
        )

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Slices by the UUID the driver gave them.

        ``handles``: ``instance_uuid`` of a slice.
        """
        env = {"ENFLAME_VISIBLE_DEVICES": numbers(given)}
        slices = [
            uuid
            for share, device in given
            if (uuid := handle_of(share, device, context, "instance_uuid"))
        ]
        if slices:
            env["TOPS_VISIBLE_DEVICES"] = ",".join(f"DRS-{uuid}" for uuid in slices)
        nodes = [node(f"/dev/gcu{number_of(device)}") for _, device in given]
        return Plan(env=env, nodes=(*nodes, node("/dev/gcuctl", optional=True)))
