# SPDX-License-Identifier: Apache-2.0
"""AMD Instinct: memory in MiB and compute in percent of one device's compute units.

A request without compute gets the whole device's. Compute needs a mask of units that no other
container has; a container whose mask is not known sees all units. Memory in MiB.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hami_common.errors import RequestInvalid
from hami_common.model.request import DeviceRequest
from hami_common.vendors.handles import handle_of
from hami_common.vendors.protocol import Capability, RenderContext
from hami_common.vendors.sharing import (
    FULL_PCT,
    Asked,
    Description,
    Family,
    Given,
    Plan,
    SelectorKeys,
    ShareVendor,
    node,
    number_of,
    render_node,
)

NAME = "amd"


class AmdSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``amd`` of the vendor configuration."""

    resource_count_name: str = "amd.com/gpu"
    resource_memory_name: str = "amd.com/gpumem"
    resource_core_name: str = "amd.com/gpucores"
    resource_aliases: dict[str, str] = {}
    runtime_class: str = ""


class Amd(ShareVendor):
    """Pure half of the vendor AMD."""

    def __init__(self, settings: AmdSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = settings or AmdSettings()
        super().__init__(
            Description(
                name=NAME,
                families=(
                    Family(
                        count=s.resource_count_name,
                        memory=s.resource_memory_name,
                        cores=s.resource_core_name,
                        default_core_pct=FULL_PCT,
                    ),
                ),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_types=("amd.com/use-gputype",),
                    deny_types=("amd.com/nouse-gputype",),
                    allow_uuids=("amd.com/use-gpu-uuid",),
                    deny_uuids=("amd.com/nouse-gpu-uuid",),
                ),
                runtime_class=s.runtime_class,
                node_env=(
                    "ROCR_VISIBLE_DEVICES",
                    "HIP_VISIBLE_DEVICES",
                    "AMD_VISIBLE_DEVICES",
                    "HSA_CU_MASK",
                    "HIP_DEVICE_MEMORY_LIMIT",
                ),
                cdi_kind="amd.com/gpu",
                capability=Capability(
                    compute_enforced="mask of compute units",
                    partitioned="the agent, by masks of compute units",
                ),
            )
        )

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """At least one percent."""
        del annotations
        if asked.cores == 0:
            raise RequestInvalid(
                field=asked.field(asked.family.cores),
                problem="0 is no share of compute",
                fix=f"write 1 to {FULL_PCT}, or leave it out for the whole device",
            )
        return asked.request

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Devices by UUID; limits where a container has a part.

        ``handles``: ``cu_mask``, the compute units of the share as ranges (``0-75``).
        """
        env = {"ROCR_VISIBLE_DEVICES": ",".join(device.uuid for _, device in given)}
        masks = [
            f"{place}:{mask}"
            for place, (share, device) in enumerate(given)
            if (mask := handle_of(share, device, context, "cu_mask"))
        ]
        if masks:
            env["HSA_CU_MASK"] = ";".join(masks)
        if given and context.is_limited and given[0].share.memory_mib < given[0].device.memory_mib:
            env["HIP_DEVICE_MEMORY_LIMIT"] = f"{given[0].share.memory_mib}m"
        nodes = [node("/dev/kfd")]
        for _, device in given:
            nodes += [node(f"/dev/dri/card{number_of(device)}"), render_node(device)]
        return Plan(env=env, nodes=tuple(nodes))
