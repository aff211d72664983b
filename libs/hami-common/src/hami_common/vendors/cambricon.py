# SPDX-License-Identifier: Apache-2.0
"""Cambricon MLU: whole cards, and parts as sMLU instances of one card.

Memory is in blocks of 256 MiB as in HAMi, or in percent of the card as the vendor's own plugin
counts it (``memory_unit``, or the name that ends in ``-percentage``). A request without compute
gets the whole card's. Differences from HAMi v2.10: a part of several cards is refused (there is one
instance per container), and parts come only from cards in sMLU mode. Memory in MiB.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

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
    mount,
    node,
    number_of,
    numbers,
    one_part_only,
)

NAME = "cambricon"
BLOCK_MIB = 256
PART_MODE = "smlu"
_CONTROL_NODES = ("/dev/cambricon_ctl", "/dev/cambricon_gdr")


class CambriconSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``cambricon`` of the vendor configuration."""

    resource_count_name: str = "cambricon.com/vmlu"
    resource_memory_name: str = "cambricon.com/mlu.smlu.vmemory"
    resource_memory_percentage_name: str = "cambricon.com/mlu.smlu.vmemory-percentage"
    """Memory in percent of a card, whatever ``memory_unit`` says."""
    resource_core_name: str = "cambricon.com/mlu.smlu.vcore"
    resource_aliases: dict[str, str] = field(
        default_factory=lambda: {
            "cambricon.com/mlunum": "cambricon.com/vmlu",
            "cambricon.com/mlu370.smlu.vmemory": "cambricon.com/mlu.smlu.vmemory",
            "cambricon.com/mlu370.smlu.vcore": "cambricon.com/mlu.smlu.vcore",
        }
    )
    memory_unit: Literal["256MiB", "percent"] = "256MiB"
    """Unit of ``resource_memory_name``: HAMi's blocks of 256 MiB, or percent of a card."""
    runtime_class: str = ""


class Cambricon(ShareVendor):
    """Pure half of the vendor Cambricon."""

    def __init__(self, settings: CambriconSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = settings or CambriconSettings()
        percent = s.memory_unit == "percent"
        super().__init__(
            Description(
                name=NAME,
                families=(
                    Family(
                        count=s.resource_count_name,
                        memory=s.resource_memory_name,
                        memory_percentage=s.resource_memory_percentage_name,
                        cores=s.resource_core_name,
                        unit_mib=1 if percent else BLOCK_MIB,
                        memory_as_percent=percent,
                        default_core_pct=FULL_PCT,
                        part_modes=(PART_MODE,),
                    ),
                ),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_types=("cambricon.com/use-mlutype",),
                    deny_types=("cambricon.com/nouse-mlutype",),
                    allow_uuids=("cambricon.com/use-gpuuuid",),
                    deny_uuids=("cambricon.com/nouse-gpuuuid",),
                ),
                runtime_class=s.runtime_class,
                node_env=("CAMBRICON_VISIBLE_DEVICES", "VIRTUAL_DEVICES"),
                cdi_kind="cambricon.com/mlu",
                capability=Capability(
                    memory_enforced="sMLU",
                    compute_enforced="sMLU",
                    partitioned="the agent, through CNDEV (sMLU)",
                ),
            )
        )

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """One instance per container."""
        del annotations
        return one_part_only(asked, "sMLU instance")

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """An instance is seen through its capability node; the card's name would give the card.

        ``handles``: ``cap_node``, the device node of the instance.
        """
        nodes = [node(path) for path in _CONTROL_NODES]
        caps: list[str] = []
        for share, device in given:
            number = number_of(device)
            nodes += [node(f"/dev/cambricon_dev{number}"), node(f"/dev/cambricon_ipcm{number}")]
            cap = handle_of(share, device, context, "cap_node")
            caps += [cap] if cap else []
        first = given[0] if given else None
        annotations = {}
        if first is not None and first.share.memory_mib < first.device.memory_mib:
            share = first.share
            annotations["CAMBRICON_DSMLU_PROFILE"] = (
                f"{number_of(first.device)}_{share.core_pct}_{share.memory_mib // BLOCK_MIB}"
            )
        return Plan(
            env={} if caps else {"CAMBRICON_VISIBLE_DEVICES": numbers(given)},
            nodes=(*nodes, *map(node, caps)),
            only_nodes=bool(caps),
            mounts=(mount("/usr/bin/cnmon"),),
            annotations=annotations,
        )

    def cdi_name(self, pair: Given) -> str:
        """The card's number."""
        return str(number_of(pair.device))
