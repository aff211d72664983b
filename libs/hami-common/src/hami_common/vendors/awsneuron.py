# SPDX-License-Identifier: Apache-2.0
"""AWS Neuron: whole devices, and neighboring NeuronCores of one device.

``neuroncore`` is a total: up to one device's cores, or a multiple of them, which is whole devices.
Several devices are neighbors; on Trainium 1, 4, 8 or 16 aligned to their number. A request for one
device or for cores takes a device in use, then one whose aligned sets are broken already, so that
sets stay whole; this goes before the policy. Differences from
HAMi v2.10: devices with more than two cores are served; the cores of a device are a setting, not
the report of the first node. Memory in MiB.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.device import DeviceFacts, Profile
from hami_common.model.request import DeviceRequest
from hami_common.pods.podview import ContainerView
from hami_common.units import whole
from hami_common.vendors.protocol import RenderContext
from hami_common.vendors.shapes import COUNTS
from hami_common.vendors.sharing import (
    FULL_PCT,
    MAX_DEVICES,
    Asked,
    Description,
    Family,
    Given,
    Plan,
    SelectorKeys,
    ShareVendor,
    node,
    number_of,
)

NAME = "awsneuron"
CORES = "neuroncores"


class AwsneuronSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``awsneuron`` of the vendor configuration."""

    resource_count_name: str = "aws.amazon.com/neuron"
    resource_core_name: str = "aws.amazon.com/neuroncore"
    resource_aliases: dict[str, str] = {}
    cores_per_device: int = 2
    """Cores beyond which a request is for whole devices."""
    run_types: tuple[str, ...] = ("inferentia", "inferentia1", "inferentia2")
    """Device types of which any number of neighbors may work together."""
    runtime_class: str = ""


def partitions_of(facts: DeviceFacts) -> tuple[Profile, ...]:
    """Runs of neighboring cores, from the number that the driver saw; the whole device last."""
    cores = whole(facts.attributes.get("cores", "")) or 0
    if not 1 < cores <= _CORES_MOST:
        return ()
    return tuple(
        Profile(
            name=f"{n}nc" if n < cores else "",
            memory_mib=facts.memory_mib * n // cores,
            core_pct=FULL_PCT * n // cores,
            resources={CORES: n},
            size=n,
            starts=tuple(range(cores - n + 1)),
        )
        for n in range(1, cores + 1)
    )


_CORES_MOST = 16


class Awsneuron(ShareVendor):
    """Pure half of the vendor AWS Neuron."""

    def __init__(self, settings: AwsneuronSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = self._settings = settings or AwsneuronSettings()
        self._devices = Family(count=s.resource_count_name, refuses_zero=True)
        self._cores_family = Family(count=s.resource_core_name, refuses_zero=True)
        super().__init__(
            Description(
                name=NAME,
                families=(self._devices, self._cores_family),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_uuids=("aws.amazon.com/use-neuron-uuid",),
                    deny_uuids=("aws.amazon.com/nouse-neuron-uuid",),
                ),
                runtime_class=s.runtime_class,
                node_env=(
                    "NEURON_RT_VISIBLE_CORES",
                    "NEURON_RT_NUM_CORES",
                    "AWS_NEURON_VISIBLE_DEVICES",
                ),
            )
        )

    def _family(self, container: ContainerView) -> Family | None:
        """Whole devices take precedence over cores."""
        mentioned = self._mentioned(container)
        return mentioned[0] if mentioned else None

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """Cores of one device, or neighboring devices."""
        del annotations
        request, per_device = asked.request, self._settings.cores_per_device
        if asked.family is self._cores_family:
            cores = request.count
            if cores < per_device:
                return replace(
                    request,
                    count=1,
                    memory_pct=0,
                    core_pct=0,
                    exclusive=False,
                    exact=((CORES, cores),),
                    keeps="aligned",
                )
            if cores % per_device or cores > MAX_DEVICES * per_device:
                raise RequestInvalid(
                    field=asked.field(asked.family.count),
                    problem=f"{cores} cores are not whole devices of {per_device}",
                    fix=f"write up to {per_device}, or a multiple of it",
                )
            request = replace(request, count=cores // per_device)
        if request.count == 1:
            return replace(request, keeps="aligned")
        if request.count in COUNTS["aligned"]:
            return replace(request, shape="aligned")
        return replace(request, shape="run", types=self._settings.run_types)

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Cores are numbered inside the container, device after device."""
        del context
        cores: list[str] = []
        before = 0
        for share, device in given:
            here = whole(device.attributes.get("cores", "")) or self._settings.cores_per_device
            size = here
            if share.start is not None:
                size = next(p.size for p in device.partitions if p.name == share.profile)
            first = before + (share.start or 0)
            cores.append(str(first) if size == 1 else f"{first}-{first + size - 1}")
            before += here
        numbers = [str(number_of(device)) for _, device in given]
        return Plan(
            env={
                "NEURON_RT_VISIBLE_CORES": ",".join(cores),
                "AWS_NEURON_VISIBLE_DEVICES": ",".join(numbers),
            },
            nodes=tuple(node(f"/dev/neuron{number}") for number in numbers),
            annotations={"AWS_NEURON_IDS": ",".join(numbers)},
        )
