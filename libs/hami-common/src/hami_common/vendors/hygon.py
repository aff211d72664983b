# SPDX-License-Identifier: Apache-2.0
"""Hygon DCU: whole cards, and parts as virtual DCUs described by a configuration file.

A request without memory or compute gets the whole card's. Differences from HAMi v2.10: a part of
several cards is refused, because a container can have one virtual DCU and the limits of several
could not be enforced; a memory that is not a number is refused, not ignored. Memory in MiB.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hami_common.model.request import DeviceRequest
from hami_common.vendors.handles import handle_of
from hami_common.vendors.protocol import BindMount, Capability, RenderContext
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
    one_part_only,
    render_node,
)

NAME = "hygon"


class HygonSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``hygon`` of the vendor configuration."""

    resource_count_name: str = "hygon.com/dcunum"
    resource_memory_name: str = "hygon.com/dcumem"
    resource_core_name: str = "hygon.com/dcucores"
    resource_aliases: dict[str, str] = {}
    memory_factor: int = 1
    """Multiplies the number the user writes for memory."""
    runtime_class: str = ""


class Hygon(ShareVendor):
    """Pure half of the vendor Hygon."""

    def __init__(self, settings: HygonSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = settings or HygonSettings()
        super().__init__(
            Description(
                name=NAME,
                families=(
                    Family(
                        count=s.resource_count_name,
                        memory=s.resource_memory_name,
                        cores=s.resource_core_name,
                        unit_mib=max(1, s.memory_factor),
                        default_core_pct=FULL_PCT,
                    ),
                ),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_types=("hygon.com/use-dcutype",),
                    deny_types=("hygon.com/nouse-dcutype",),
                    allow_uuids=("hygon.com/use-gpuuuid",),
                    deny_uuids=("hygon.com/nouse-gpuuuid",),
                ),
                runtime_class=s.runtime_class,
                node_env=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
                runtime_reads_env=False,
                capability=Capability(
                    memory_enforced="vDCU",
                    compute_enforced="vDCU",
                    partitioned="the agent, by files (vDCU)",
                ),
            )
        )

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """One virtual DCU per container."""
        del annotations
        return one_part_only(asked, "virtual DCU")

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """A part is described by files that the driver wrote.

        ``handles``: ``config_directory``, the host directory with ``vdev0.conf``.
        """
        nodes = [node("/dev/kfd", permissions="rwm"), node("/dev/mkfd", permissions="rwm")]
        mounts = [mount("/opt/hyhal")]
        for share, device in given:
            nodes += [node(f"/dev/dri/card{number_of(device)}"), render_node(device)]
            config = handle_of(share, device, context, "config_directory")
            if config:
                mounts.append(
                    BindMount(host_path=config, container_path="/etc/vdev/docker", read_only=False)
                )
        return Plan(nodes=tuple(nodes), mounts=tuple(mounts))
