# SPDX-License-Identifier: Apache-2.0
"""Moore Threads: memory in blocks of 512 MiB of fixed sizes, compute in sixteenths of a device.

Several devices are whole ones; a device without memory is a whole one, whatever compute is
requested. Differences from HAMi v2.10: containers of one pod may have different devices, and their
devices are not written back into the pod. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.request import DeviceRequest
from hami_common.units import MIB_BYTES
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
    numbers,
)

NAME = "mthreads"
BLOCK_MIB = 512
CORE_UNITS = 16
SIZES = (2, 4, 8, 16, 32, 64, 96)


class MthreadsSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``mthreads`` of the vendor configuration."""

    resource_count_name: str = "mthreads.com/vgpu"
    resource_memory_name: str = "mthreads.com/sgpu-memory"
    resource_core_name: str = "mthreads.com/sgpu-core"
    resource_aliases: dict[str, str] = {}
    memory_sizes: tuple[int, ...] = SIZES
    """Numbers of blocks that a share may have; empty: any."""
    runtime_class: str = ""


class Mthreads(ShareVendor):
    """Pure half of the vendor Moore Threads."""

    def __init__(self, settings: MthreadsSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = settings or MthreadsSettings()
        super().__init__(
            Description(
                name=NAME,
                families=(
                    Family(
                        count=s.resource_count_name,
                        memory=s.resource_memory_name,
                        cores=s.resource_core_name,
                        unit_mib=BLOCK_MIB,
                        memory_sizes=s.memory_sizes,
                        core_units=CORE_UNITS,
                        default_core_pct=FULL_PCT,
                        several_are_whole=True,
                        refuses_zero=True,
                    ),
                ),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_uuids=("mthreads.ai/use-gpuuuid",),
                    deny_uuids=("mthreads.ai/nouse-gpuuuid",),
                ),
                runtime_class=s.runtime_class,
                node_env=(
                    "MTHREADS_VISIBLE_DEVICES",
                    "MTHREADS_QOS_MEMORY_LIMIT",
                    "MTHREADS_QOS_COMPUTING_POWER_WEIGHT",
                ),
                capability=Capability(
                    memory_enforced="the vendor's kernel module",
                    compute_enforced="the vendor's kernel module, as a weight",
                ),
            )
        )

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """Give a whole device to requests without memory."""
        del annotations
        if asked.memory_mib:
            return asked.request
        return replace(asked.request, core_pct=FULL_PCT, exclusive=True)

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Plan the shares; the kernel module enforces the limits of a container with one share."""
        env = {"MTHREADS_VISIBLE_DEVICES": numbers(given)}
        if context.is_limited and len(given) == 1 and not given[0].share.exclusive:
            share = given[0].share
            env["MTHREADS_QOS_MEMORY_LIMIT"] = str(share.memory_mib * MIB_BYTES)
            env["MTHREADS_QOS_COMPUTING_POWER_WEIGHT"] = str(max(1, share.core_pct))
        nodes = [node(f"/dev/mtgpu.{number_of(device)}") for _, device in given]
        return Plan(env=env, nodes=tuple(nodes))
