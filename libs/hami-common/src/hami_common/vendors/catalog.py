# SPDX-License-Identifier: Apache-2.0
"""All vendors in one explicit tuple, and the parsing of a whole pod through them.

Adding a vendor is one module and one entry here (and one in ``hami_nodeagent.drivers.catalog``).
Nothing registers itself on import.
"""

from collections.abc import Collection, Mapping
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from hami_common.bounds import POD_CONTAINERS_MOST, WEIGHT_MOST
from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.model.device import DeviceFacts, Profile
from hami_common.model.isolation import parse_least
from hami_common.model.request import (
    Choice,
    ContainerRequest,
    DevicePolicy,
    DeviceSelector,
    NodePolicy,
    PlacementPolicy,
    PodRequest,
    ScoringWeights,
)
from hami_common.pods import annotations as keys
from hami_common.pods.podview import ContainerView, PodView
from hami_common.skus import expansion
from hami_common.units import shown, whole
from hami_common.vendors import awsneuron, bursts
from hami_common.vendors.amd import Amd, AmdSettings
from hami_common.vendors.ascend import Ascend, AscendSettings
from hami_common.vendors.awsneuron import Awsneuron, AwsneuronSettings
from hami_common.vendors.biren import Biren, BirenSettings
from hami_common.vendors.cambricon import Cambricon, CambriconSettings
from hami_common.vendors.enflame import Enflame, EnflameSettings
from hami_common.vendors.hygon import Hygon, HygonSettings
from hami_common.vendors.iluvatar import Iluvatar, IluvatarSettings
from hami_common.vendors.kunlunxin import Kunlunxin, KunlunxinSettings
from hami_common.vendors.metax import Metax, MetaxSettings
from hami_common.vendors.mthreads import Mthreads, MthreadsSettings
from hami_common.vendors.nvidia import Nvidia, NvidiaSettings
from hami_common.vendors.protocol import Vendor
from hami_common.vendors.vastai import Vastai, VastaiSettings


class VendorSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Configuration of all vendors: one section each."""

    ignored: tuple[str, ...] = ()
    """Vendors whose resources are left to other device plugins and schedulers, by name."""
    nvidia: NvidiaSettings = NvidiaSettings()
    ascend: AscendSettings = AscendSettings()
    cambricon: CambriconSettings = CambriconSettings()
    hygon: HygonSettings = HygonSettings()
    iluvatar: IluvatarSettings = IluvatarSettings()
    mthreads: MthreadsSettings = MthreadsSettings()
    metax: MetaxSettings = MetaxSettings()
    enflame: EnflameSettings = EnflameSettings()
    kunlunxin: KunlunxinSettings = KunlunxinSettings()
    awsneuron: AwsneuronSettings = AwsneuronSettings()
    amd: AmdSettings = AmdSettings()
    biren: BirenSettings = BirenSettings()
    vastai: VastaiSettings = VastaiSettings()


class Catalog:
    """The vendors of this installation."""

    def __init__(
        self,
        vendors: tuple[Vendor, ...],
        *,
        ignored: Collection[str] = (),
        dialects: Collection[str] = (),
    ) -> None:
        """Hold ``vendors``; see ``from_settings`` for the shipped ones.

        ``ignored``: names of vendors whose resources pods request from others. An unknown name
        raises ``SettingsInvalid``. ``dialects``: of NVIDIA's resource names.
        """
        self.vendors = vendors
        self.dialects = frozenset(dialects)
        self._by_name = {vendor.name: vendor for vendor in vendors}
        for name in ignored:
            if name not in self._by_name:
                raise SettingsInvalid(
                    field="vendors.ignored",
                    problem=f"{shown(name)} is not a vendor",
                    fix=f"write names of {', '.join(sorted(self._by_name))}",
                )
        self._names = {
            vendor.name: frozenset() if vendor.name in ignored else vendor.resources.all()
            for vendor in vendors
        }
        self._vendors_names = frozenset[str]().union(*self._names.values())

    @classmethod
    def from_settings(cls, settings: VendorSettings | None = None) -> "Catalog":
        """Every vendor of this project, configured."""
        settings = settings or VendorSettings()
        return cls(
            (
                Nvidia(settings.nvidia),
                Ascend(settings.ascend),
                Cambricon(settings.cambricon),
                Hygon(settings.hygon),
                Iluvatar(settings.iluvatar),
                Mthreads(settings.mthreads),
                Metax(settings.metax),
                Enflame(settings.enflame),
                Kunlunxin(settings.kunlunxin),
                Awsneuron(settings.awsneuron),
                Amd(settings.amd),
                Biren(settings.biren),
                Vastai(settings.vastai),
            ),
            ignored=settings.ignored,
            dialects=settings.nvidia.dialects,
        )

    def vendor(self, name: str) -> Vendor:
        """The vendor called ``name``; ``KeyError`` when there is none."""
        return self._by_name[name]

    def resource_names(self) -> frozenset[str]:
        """Every resource name of every vendor that is not ignored, and the neutral names."""
        return self._vendors_names | expansion.NAMES

    def asked(self, container: ContainerView) -> tuple[Vendor, ...]:
        """The vendors whose resources the container names, whatever their values."""
        named = self._vendors_names & (container.limits().keys() | container.requests().keys())
        if not named:
            return ()
        return tuple(vendor for vendor in self.vendors if self._names[vendor.name] & named)

    def mentions(self, pod: PodView) -> bool:
        """True when any container names one of our resources, whatever its value."""
        return any(
            self.asked(container) or expansion.is_neutral(container)
            for _, container in pod.containers_in_order()
        )

    def parse_pod(
        self, pod: PodView, *, defaults: PlacementPolicy | None = None
    ) -> PodRequest | None:
        """The pod's whole request, ``None`` when it asks for no device.

        A vendor-neutral pod is read once per alternative. ``RequestInvalid`` names the field that
        is wrong.
        """
        defaults = defaults or PlacementPolicy()
        expanded = expansion.expansion_of(pod)
        if expanded is None:
            return self._parse(pod, defaults, is_alternative=False)
        found: list[PodRequest] = []
        for alternative in expanded.alternatives:
            if not self._names.get(alternative.vendor):
                continue
            written = expansion.as_alternative(pod, alternative)
            request = self._parse(written, defaults, is_alternative=True)
            if request is None or [one.name for one in request.containers] != [
                one.name for one in (found[0] if found else request).containers
            ]:
                raise RequestInvalid(
                    field=f"annotation {keys.ALTERNATIVES}",
                    problem=f"alternative {alternative.vendor} asks for no device",
                    fix="remove the alternative from the catalog of SKUs",
                )
            selectors = {
                vendor: expansion.selector_of(selector, expanded, alternative)
                for vendor, selector in request.selectors.items()
            }
            found.append(
                replace(
                    request,
                    selectors=selectors,
                    policy=expansion.policy_of(request.policy, expanded),
                )
            )
        if not found:
            raise RequestInvalid(
                field=f"annotation {keys.ALTERNATIVES}",
                problem="names no vendor of this installation",
                fix="update HAMi's services to one version",
            )
        others = tuple(
            Choice(containers=one.containers, selectors=one.selectors) for one in found[1:]
        )
        return replace(found[0], others=others)

    def _parse(
        self, pod: PodView, defaults: PlacementPolicy, *, is_alternative: bool
    ) -> PodRequest | None:
        """Read a pod that names resources of vendors, perhaps as one of its alternatives."""
        containers: list[ContainerRequest] = []
        ordered = pod.containers_in_order()
        if len(ordered) > POD_CONTAINERS_MOST and self.mentions(pod):
            raise RequestInvalid(
                field="spec.containers",
                problem=f"{len(ordered)} containers, init containers included, ask for devices",
                fix=f"write at most {POD_CONTAINERS_MOST}, or divide the pod",
            )
        for kind, container in ordered:
            vendors = self.asked(container)
            requests = tuple(
                request
                for vendor in vendors
                if (request := vendor.parse_request(container, pod.annotations())) is not None
            )
            if requests:
                priority = next(
                    (
                        p
                        for vendor in vendors
                        if (p := vendor.parse_priority(container)) is not None
                    ),
                    None,
                )
                containers.append(
                    ContainerRequest(
                        name=container.name, kind=kind, requests=requests, priority=priority
                    )
                )
        if not containers:
            return None
        asked = {request.vendor for container in containers for request in container.requests}
        selectors = {
            vendor.name: _of_any_vendor(vendor.parse_selector(pod.annotations()), pod.annotations())
            for vendor in self.vendors
            if vendor.name in asked
        }
        return PodRequest(
            uid=pod.metadata.uid,
            namespace=pod.metadata.namespace or "default",
            name=pod.metadata.name,
            containers=bursts.with_limits(
                pod, tuple(containers), selectors, is_alternative=is_alternative
            ),
            selectors=selectors,
            policy=parse_policy(pod.annotations(), defaults=defaults),
        )


def partitions_of(facts: DeviceFacts) -> tuple[Profile, ...]:
    """Sizes in which a device can be divided: the driver's list, else the vendor's own."""
    if facts.partitions or facts.vendor != awsneuron.NAME:
        return facts.partitions
    return awsneuron.partitions_of(facts)


def resources_of(facts: DeviceFacts) -> dict[str, int]:
    """Totals that partitions share: the driver's, else those of the largest partition."""
    if facts.resources:
        return facts.resources
    totals: dict[str, int] = {}
    for profile in partitions_of(facts):
        for name, amount in profile.resources.items():
            totals[name] = max(amount, totals.get(name, 0))
    return totals


def _of_any_vendor(selector: DeviceSelector, annotations: Mapping[str, str]) -> DeviceSelector:
    """Return the selector with what the pod demands of the devices of any vendor.

    These are grades of isolation, and what its class does.
    """
    if expansion.class_of(annotations) == expansion.GUARANTEED:
        selector = replace(selector, no_overcommit=True)
    text = annotations.get(keys.MIN_ISOLATION, "").strip()
    if not text:
        return selector
    least = parse_least(text, field=f"annotation {keys.MIN_ISOLATION}")
    return replace(selector, min_isolation=least)


def parse_policy(annotations: Mapping[str, str], *, defaults: PlacementPolicy) -> PlacementPolicy:
    """Placement policy of a pod: its annotations over the cluster's defaults.

    An unknown word raises ``RequestInvalid``.
    """
    node = annotations.get(keys.NODE_POLICY, "").strip() or defaults.node
    if node not in get_args(NodePolicy):
        raise RequestInvalid(
            field=f"annotation {keys.NODE_POLICY}",
            problem=f"{shown(node)} is not a policy",
            fix=f"write one of {', '.join(get_args(NodePolicy))}",
        )
    device: tuple[DevicePolicy, ...] = defaults.device
    if text := annotations.get(keys.DEVICE_POLICY, "").strip():
        words = tuple(word.strip() for word in text.split(","))
        for word in words:
            if word not in get_args(DevicePolicy):
                raise RequestInvalid(
                    field=f"annotation {keys.DEVICE_POLICY}",
                    problem=f"{shown(word)} is not a policy",
                    fix=f"write a chain of {', '.join(get_args(DevicePolicy))}",
                )
        device = words  # type: ignore[assignment]  # each word was checked against the literal above
    weights = defaults.weights
    if text := annotations.get(keys.SCORING_WEIGHTS, "").strip():
        weights = _parse_weights(text)
    return PlacementPolicy(node=node, device=device, weights=weights)  # type: ignore[arg-type]  # checked above


def _parse_weights(text: str) -> ScoringWeights:
    field = f"annotation {keys.SCORING_WEIGHTS}"
    fix = f"write slot=a,core=b,memory=c with whole numbers up to {WEIGHT_MOST}, one above 0"
    values: dict[str, int] = {}
    for part in text.split(","):
        name, separator, number = (piece.strip() for piece in part.partition("="))
        if (
            not separator
            or name not in ("slot", "core", "memory")
            or name in values
            or (weight := whole(number, most=WEIGHT_MOST)) is None
        ):
            raise RequestInvalid(
                field=field, problem=f"{shown(part.strip())} is not a weight", fix=fix
            )
        values[name] = weight
    if len(values) != 3 or not any(values.values()):  # noqa: PLR2004 - slot, core, memory
        raise RequestInvalid(
            field=field, problem=f"{shown(text)} does not give all three weights", fix=fix
        )
    return ScoringWeights(slot=values["slot"], core=values["core"], memory=values["memory"])
