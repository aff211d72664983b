# SPDX-License-Identifier: Apache-2.0
"""Iluvatar CoreX: one set of names per chip, memory in blocks of 256 MiB, and names for any chip.

``iluvatar.ai/gpu`` with ``vcuda-memory`` and ``vcuda-core`` are the older names, which stand for
any chip. Several devices are whole ones. Types match exactly. Memory in MiB.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.request import DeviceRequest
from hami_common.pods.podview import ContainerView
from hami_common.vendors.protocol import ContainerChanges, RenderContext
from hami_common.vendors.sharing import (
    Description,
    Family,
    Given,
    Plan,
    SelectorKeys,
    ShareVendor,
    mount,
    node,
    number_of,
)

NAME = "iluvatar"
BLOCK_MIB = 256
CHIPS = ("MR-V100", "MR-V50", "BI-V150", "BI-V100")
_NAME_ENV = "SOL_CONTINER_NAME"
"""Spelled this way by the vendor's software."""
_LIBRARIES = (
    "/usr/local/corex/bin/ixsmi",
    "/usr/local/corex/lib64/libcuda.so.1",
    "/usr/local/corex/lib64/libixml.so",
    "/usr/local/corex/lib64/libixthunk.so",
)


class ChipSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chip and the names under which pods request it."""

    word: str
    """Device type, as drivers report it."""
    resource_count_name: str
    resource_memory_name: str
    resource_core_name: str


def _chip(word: str) -> ChipSettings:
    return ChipSettings(
        word=word,
        resource_count_name=f"iluvatar.ai/{word}-vgpu",
        resource_memory_name=f"iluvatar.ai/{word}.vMem",
        resource_core_name=f"iluvatar.ai/{word}.vCore",
    )


class IluvatarSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``iluvatar`` of the vendor configuration."""

    chips: tuple[ChipSettings, ...] = tuple(_chip(word) for word in CHIPS)
    any_count_name: str = "iluvatar.ai/gpu"
    """Count of chips of any kind; empty: there is no such name."""
    any_memory_name: str = "iluvatar.ai/vcuda-memory"
    any_core_name: str = "iluvatar.ai/vcuda-core"
    resource_aliases: dict[str, str] = {}
    runtime_class: str = ""


def _family(names: tuple[str, str, str], types: tuple[str, ...]) -> Family:
    return Family(
        count=names[0],
        memory=names[1],
        cores=names[2],
        unit_mib=BLOCK_MIB,
        types=types,
        several_are_whole=True,
    )


class Iluvatar(ShareVendor):
    """Pure half of the vendor Iluvatar."""

    def __init__(self, settings: IluvatarSettings | None = None) -> None:
        """Use ``settings``, else the chips HAMi ships."""
        s = settings or IluvatarSettings()
        words = tuple(chip.word for chip in s.chips)
        families = [
            _family(
                (c.resource_count_name, c.resource_memory_name, c.resource_core_name), (c.word,)
            )
            for c in s.chips
        ]
        if s.any_count_name:
            families.append(_family((s.any_count_name, s.any_memory_name, s.any_core_name), words))
        super().__init__(
            Description(
                name=NAME,
                families=tuple(families),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_uuids=tuple(f"hami.io/use-{word}-uuid" for word in words),
                    deny_uuids=tuple(f"hami.io/no-use-{word}-uuid" for word in words),
                ),
                runtime_class=s.runtime_class,
                node_env=("IX_VISIBLE_DEVICES", "IX_REPLICA_DEVICES"),
            )
        )

    def change(
        self, changes: ContainerChanges, container: ContainerView, request: DeviceRequest
    ) -> ContainerChanges:
        """Set the container's name, by which the vendor's share manager identifies it."""
        del request
        return replace(changes, set_env={**changes.set_env, _NAME_ENV: container.name})

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Devices by UUID."""
        del context
        nodes = [node(f"/dev/iluvatar{number_of(device)}") for _, device in given]
        return Plan(
            env={"IX_VISIBLE_DEVICES": ",".join(device.uuid for _, device in given)},
            nodes=(*nodes, node("/dev/itrctl", optional=True)),
            mounts=tuple(mount(path) for path in _LIBRARIES),
        )
