# SPDX-License-Identifier: Apache-2.0
"""Common code of vendors: requests, admission, selection and rendering from a description.

A vendor is a ``Description``: its count resources (``Family``), each with its names, units and
defaults, its selection annotations and the needs of its containers. A module of a vendor adds code
only where that vendor differs, in ``refine`` and ``plan``.

One container asks for one family of a vendor. An invalid quantity is refused with the field and the
fix, never read as "no device". Memory in MiB, compute in percent of one device.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import DeviceRequest, DeviceSelector
from hami_common.pods.podview import ContainerView
from hami_common.units import (
    INT32_MAX,
    MIB_BYTES,
    parse_count,
    parse_percent,
    parse_quantity,
    shown,
)
from hami_common.vendors.protocol import (
    NO_ANNOTATIONS,
    BindMount,
    Capability,
    ContainerChanges,
    ContainerEdits,
    DeviceNode,
    RenderContext,
    ResourceNames,
)

MAX_DEVICES: Final = 64
FULL_PCT: Final = 100
GIB_MIB: Final = 1024
_NUMBERED: Final = re.compile(
    r".+-(?:cambricon-mlu|mthreads|metax|GCU|enflame-drs|kunlun)-\d+|card_\d+"
)
"""HAMi's names of devices that it numbers by node, where this project's are others."""


class Family(Struct, frozen=True, kw_only=True):
    """One count resource with its names, units and defaults."""

    count: str
    memory: str = ""
    memory_percentage: str = ""
    cores: str = ""
    unit_mib: int = 1
    """MiB in one unit of memory."""
    takes_bytes: bool = False
    """A quantity with letters (``4Gi``) is in bytes."""
    memory_as_percent: bool = False
    """The number given for memory is a percentage of the device."""
    memory_sizes: tuple[int, ...] = ()
    """The only numbers of units that are valid; empty: any."""
    core_units: int = FULL_PCT
    """Units of compute in one device."""
    default_core_pct: int = 0
    """Compute for a request with only a part of the memory."""
    default_count: int = 0
    """Devices for a container that gives only memory or compute; 0: such a container is refused."""
    refuses_zero: bool = False
    """A count of 0 is refused, as HAMi does for this name; else it requests no device."""
    counts: tuple[int, ...] = ()
    """The only numbers of devices that are valid; empty: any."""
    types: tuple[str, ...] = ()
    """Device types that the name selects, exactly; empty: every type."""
    part_modes: tuple[str, ...] = ()
    """Modes of devices that parts may come from; empty: any in which a part is possible."""
    shape: str = ""
    """Shape of the sets of several devices."""
    several_are_whole: bool = False
    """More than one device means whole devices, whatever else is requested."""

    def names(self) -> tuple[str, ...]:
        """Every resource name of the family."""
        names = (self.count, self.memory, self.memory_percentage, self.cores)
        return tuple(name for name in names if name)

    def unit(self) -> str:
        """The unit of memory, for people."""
        if self.memory_as_percent:
            return "percent of one device"
        if self.unit_mib == GIB_MIB:
            return "GiB"
        return "MiB" if self.unit_mib == 1 else f"units of {self.unit_mib} MiB"


class SelectorKeys(Struct, frozen=True, kw_only=True):
    """Annotations with which a pod chooses devices. Several keys for one list are joined."""

    allow_types: tuple[str, ...] = ()
    deny_types: tuple[str, ...] = ()
    allow_uuids: tuple[str, ...] = ()
    deny_uuids: tuple[str, ...] = ()


class Description(Struct, frozen=True, kw_only=True):
    """One vendor."""

    name: str
    families: tuple[Family, ...]
    aliases: dict[str, str] = {}
    """Accepted other name → the canonical name."""
    selectors: SelectorKeys = SelectorKeys()
    runtime_class: str = ""
    node_env: tuple[str, ...] = ()
    """Variables that only the node may set: removed from containers that ask for devices."""
    runtime_reads_env: bool = True
    """The vendor's container runtime can bring in devices by variables; else nodes are given."""
    cdi_kind: str = ""
    """CDI vendor and class of the vendor's toolkit; empty: it has none."""
    capability: Capability = Capability()


class Given(NamedTuple):
    """One share and the device that it is on."""

    share: Share
    device: Device


class Asked(NamedTuple):
    """Quantities of a container, before the vendor's own rules."""

    container: ContainerView
    family: Family
    request: DeviceRequest
    memory_mib: int | None
    """``None`` when the container sets none."""
    cores: int | None
    """In the family's units; ``None`` when the container sets none."""

    def field(self, name: str) -> str:
        """Path of the resource ``name``, for errors."""
        return field_of(self.container, name)


class Plan(Struct, frozen=True, kw_only=True):
    """Devices and limits as a container sees them."""

    env: dict[str, str] = {}
    """Names of devices, and limits."""
    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[BindMount, ...] = ()
    annotations: dict[str, str] = {}
    only_nodes: bool = False
    """Give device nodes only: CDI and the vendor's runtime would give more than the share."""


def field_of(container: ContainerView, name: str) -> str:
    """Path of a resource, for errors."""
    return f"container {container.name}: resources.limits[{name}]"


def without_count(container: ContainerView, name: str) -> RequestInvalid:
    """Error for memory or compute of no device: the container would run without one."""
    return RequestInvalid(
        field=field_of(container, name),
        problem="memory or compute is given without a number of devices",
        fix=f"add {name}: 1",
    )


def clamped(container: ContainerView, name: str, cores: int | None, full: int) -> list[str]:
    """Warnings for compute above one device, which is read as the whole device's."""
    if cores is None or cores <= full:
        return []
    where = f"container {container.name}"
    return [f"{where}: {name} {cores} is more than one device has, read as {full}"]


def both_memories(container: ContainerView, memory: str, percentage: str) -> str:
    """Warning for memory that is given twice."""
    return f"container {container.name}: {memory} and {percentage} are both given; {memory} wins"


def words_of(annotations: Mapping[str, str], keys: Iterable[str]) -> tuple[str, ...]:
    """The words of comma separated lists."""
    texts = [annotations.get(key, "") for key in keys]
    words = (word.strip() for text in texts for word in text.split(","))
    return tuple(dict.fromkeys(word for word in words if word))


def node(path: str, *, optional: bool = False, permissions: str = "rw") -> DeviceNode:
    """A device node at the same path inside and outside."""
    return DeviceNode(
        host_path=path, container_path=path, optional=optional, permissions=permissions
    )


def mount(path: str) -> BindMount:
    """A path mounted read-only at the same place."""
    return BindMount(host_path=path, container_path=path)


def numbers(pairs: Iterable[Given]) -> str:
    """The devices' node numbers as a comma list."""
    return ",".join(str(number_of(pair.device)) for pair in pairs)


def number_of(device: Device) -> int:
    """N of the device's node; its index where the vendor has no other number."""
    return device.index if device.minor is None else device.minor


class ShareVendor(ABC):
    """The pure half of a vendor, from its description."""

    def __init__(self, about: Description) -> None:
        """Serve the vendor that ``about`` describes."""
        self.about = about
        self.name = about.name
        rest = about.families[1:]
        self._families = tuple(
            ResourceNames(
                count=family.count,
                memory=family.memory,
                memory_percentage=family.memory_percentage,
                cores=family.cores,
                memory_unit_mib=0 if family.memory_as_percent else family.unit_mib,
                memory_takes_bytes=family.takes_bytes,
                core_units=family.core_units,
            )
            for family in about.families
        )
        self._spellings = {
            name: (name, *(alias for alias, target in about.aliases.items() if target == name))
            for family in about.families
            for name in family.names()
        }
        self._family_names = tuple(
            (family, frozenset(s for name in family.names() for s in self._spellings[name]))
            for family in about.families
        )
        self._resources = replace(
            self._families[0],
            aliases=dict(about.aliases),
            others=tuple(name for family in rest for name in family.names()),
        )

    @property
    def resources(self) -> ResourceNames:
        """Names of the resources."""
        return self._resources

    @property
    def families(self) -> tuple[ResourceNames, ...]:
        """The names by count resource."""
        return self._families

    @property
    def capability(self) -> Capability:
        """Supported features of this vendor."""
        return self.about.capability

    def advertised(self, device: Device) -> tuple[str, ...]:
        """Count resources whose types the device is of."""
        if device.vendor != self.name:
            return ()
        return tuple(
            family.count
            for family in self.about.families
            if not family.types or device.type in family.types
        )

    # --- requests --------------------------------------------------------------------------------

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:  # noqa: ARG002
        """The vendor's own rules on a request that is otherwise complete."""
        return asked.request

    def _value(self, container: ContainerView, name: str) -> str | None:
        for wanted in self._spellings.get(name, (name,)):
            text = container.quantity(wanted)
            if text is not None:
                return text
        return None

    def _mentioned(self, container: ContainerView) -> list[Family]:
        resources = container.resources
        if resources is None:
            return []
        named = (resources.limits or {}).keys() | (resources.requests or {}).keys()
        return [family for family, names in self._family_names if not named.isdisjoint(names)]

    def _family(self, container: ContainerView) -> Family | None:
        """The one family that the container asks for."""
        mentioned = self._mentioned(container)
        if len(mentioned) > 1:
            first, second = mentioned[0].count, mentioned[1].count
            raise RequestInvalid(
                field=field_of(container, second),
                problem=f"a container can have either {first} or {second}",
                fix="ask for one of them, or for each in a container of its own",
            )
        return mentioned[0] if mentioned else None

    def _count(self, container: ContainerView, family: Family) -> int | None:
        text = self._value(container, family.count)
        if text is None:
            return family.default_count or None
        where = field_of(container, family.count)
        count = parse_count(text, field=where, unit="devices", at_most=MAX_DEVICES)
        if not count and family.refuses_zero:
            raise RequestInvalid(
                field=where, problem="0 is no request", fix="write 1 or more, or remove it"
            )
        if count and family.counts and count not in family.counts:
            raise RequestInvalid(
                field=where,
                problem=f"{count} devices cannot be connected",
                fix=f"write {_or(family.counts)}",
            )
        return count

    def _memory(self, container: ContainerView, family: Family) -> tuple[int | None, int]:
        """(MiB, percent) of the request: ``None`` or 0 where it sets none."""
        percent = 0
        if family.memory_percentage:
            text = self._value(container, family.memory_percentage)
            if text is not None:
                where = field_of(container, family.memory_percentage)
                percent = parse_percent(text, field=where)
        text = self._value(container, family.memory) if family.memory else None
        if text is None:
            return None, percent
        where = field_of(container, family.memory)
        if family.memory_as_percent:
            return None, parse_percent(text, field=where)
        if family.takes_bytes and not text.strip().isdigit():
            return _mib_of_bytes(text, where), percent
        units = parse_count(
            text,
            field=where,
            unit=family.unit(),
            at_most=INT32_MAX // family.unit_mib,
            unit_mib=family.unit_mib,
        )
        if units and family.memory_sizes and units not in family.memory_sizes:
            raise RequestInvalid(
                field=where,
                problem=f"{units} is not a size that the hardware has",
                fix=f"write {_or(family.memory_sizes)} ({family.unit()})",
            )
        return units * family.unit_mib, percent

    def _cores(self, container: ContainerView, family: Family) -> int | None:
        """Units of compute as written, which may be more than one device has."""
        text = self._value(container, family.cores) if family.cores else None
        if text is None:
            return None
        full = family.core_units
        unit = "percent of one device" if full == FULL_PCT else f"1/{full} of one device"
        return parse_count(text, field=field_of(container, family.cores), unit=unit)

    def parse_request(
        self, container: ContainerView, annotations: Mapping[str, str] = NO_ANNOTATIONS
    ) -> DeviceRequest | None:
        """Request of the container, ``None`` when it requests no device."""
        family = self._family(container)
        if family is None:
            return None
        count = self._count(container, family)
        memory_mib, memory_pct, cores = None, 0, None
        if (count or 0) <= 1 or not family.several_are_whole:
            memory_mib, memory_pct = self._memory(container, family)
            cores = self._cores(container, family)
        if count is None and (memory_mib or memory_pct or cores):
            raise without_count(container, family.count)
        if not count:
            return None
        whole = not memory_mib and memory_pct in (0, FULL_PCT)
        core_pct = family.default_core_pct
        if cores is not None:
            cores = min(cores, family.core_units)
            core_pct = -(-cores * FULL_PCT // family.core_units)
        elif whole:
            core_pct = FULL_PCT
        request = DeviceRequest(
            vendor=self.name,
            count=count,
            memory_mib=memory_mib or 0,
            memory_pct=0 if memory_mib else memory_pct or FULL_PCT,
            core_pct=core_pct,
            exclusive=core_pct == FULL_PCT,
            types=family.types,
            shape=family.shape,
        )
        asked = Asked(container, family, request, memory_mib, cores)
        request = self.refine(asked, annotations)
        if family.part_modes and is_part(request) and not request.modes:
            request = replace(request, modes=family.part_modes)
        return request

    def parse_priority(self, container: ContainerView) -> int | None:  # noqa: ARG002
        """Return ``None``: the vendor has no name for task priorities."""
        return None

    def admit(
        self, container: ContainerView, annotations: Mapping[str, str] = NO_ANNOTATIONS
    ) -> ContainerChanges | None:
        """Rename aliases, add a missing count, and remove variables that only the node may set."""
        request = self.parse_request(container, annotations)
        family = self._family(container)
        if family is None:
            return None
        self._refuse_numbers(annotations)
        where = f"container {container.name}"
        if request is None:
            warning = f"{where} mentions {family.count} resources but asks for no device"
            return ContainerChanges(warnings=(f"{warning}, so it gets none",))
        limits, requests = container.limits(), container.requests()
        set_limits: dict[str, str] = {}
        warnings: list[str] = []
        renamed = tuple(a for a in self.about.aliases if a in limits or a in requests)
        for alias in renamed:
            target = self.about.aliases[alias]
            if target in limits or target in requests:
                warnings.append(f"{where}: {alias} is ignored because {target} is given too")
            else:
                set_limits[target] = limits.get(alias, requests.get(alias, ""))
                warnings.append(f"{where}: {alias} is read as {target}; please write {target}")
        if not (request.count > 1 and family.several_are_whole):
            warnings += self._remarks(container, family)
        if self._value(container, family.count) is None:
            set_limits[family.count] = str(request.count)
        removed = tuple(v.name for v in container.env or [] if v.name in self.about.node_env)
        warnings.extend(
            f"{where}: env {name} is set by the node and was removed" for name in removed
        )
        changes = ContainerChanges(
            set_limits=set_limits,
            remove_resources=renamed,
            remove_env=removed,
            runtime_class=self.about.runtime_class,
            warnings=tuple(warnings),
        )
        return self.change(changes, container, request)

    def _refuse_numbers(self, annotations: Mapping[str, str]) -> None:
        """Refuse HAMi's numbers of devices: as UUIDs they match nothing, so a deny list fails open.

        Only admission refuses them: pods that HAMi placed by these names are adopted with them.
        """
        keys = self.about.selectors
        for key in (*keys.allow_uuids, *keys.deny_uuids):
            for word in words_of(annotations, (key,)):
                if _NUMBERED.fullmatch(word):
                    raise RequestInvalid(
                        field=f"annotation {key}",
                        problem=f"{shown(word)} is a number that HAMi gave to a device",
                        fix="write the UUID that hamictl get devices shows",
                    )

    def _remarks(self, container: ContainerView, family: Family) -> list[str]:
        """Warnings for amounts that are read as other ones."""
        remarks = clamped(
            container, family.cores, self._cores(container, family), family.core_units
        )
        memory_mib, memory_pct = self._memory(container, family)
        if memory_mib and memory_pct:
            remarks.append(both_memories(container, family.memory, family.memory_percentage))
        return remarks

    def change(
        self,
        changes: ContainerChanges,
        container: ContainerView,  # noqa: ARG002 - for those who override
        request: DeviceRequest,  # noqa: ARG002 - for those who override
    ) -> ContainerChanges:
        """Apply the vendor's own changes at admission."""
        return changes

    def parse_selector(self, annotations: Mapping[str, str]) -> DeviceSelector:
        """Types and UUIDs that the pod accepts or excludes."""
        keys = self.about.selectors
        return DeviceSelector(
            allow_types=words_of(annotations, keys.allow_types),
            deny_types=words_of(annotations, keys.deny_types),
            allow_uuids=words_of(annotations, keys.allow_uuids),
            deny_uuids=words_of(annotations, keys.deny_uuids),
        )

    # --- rendering -------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Plan the container's view of its devices; the same in every injection mode."""

    def render(
        self, shares: ContainerShares, devices: Sequence[Device], context: RenderContext
    ) -> ContainerEdits:
        """Device nodes and mounts, unless the vendor's runtime or CDI brings them."""
        device_by_uuid = {device.uuid: device for device in devices}
        own = [share for share in shares.shares if share.vendor == self.name]
        given = [
            Given(share, device_by_uuid[share.uuid])
            for share in own
            if share.uuid in device_by_uuid
        ]
        plan = self.plan(given, context)
        cdi = context.mode == "cdi" and bool(self.about.cdi_kind) and not plan.only_nodes
        by_env = context.mode == "env" and self.about.runtime_reads_env and not plan.only_nodes
        by_nodes = not cdi and not by_env
        return ContainerEdits(
            env=plan.env,
            devices=plan.nodes if by_nodes else (),
            mounts=(*context.library_mounts, *(plan.mounts if by_nodes else ())),
            cdi_devices=tuple(
                f"{self.about.cdi_kind}={self.cdi_name(pair)}" for pair in given if cdi
            ),
            annotations=plan.annotations,
        )

    def cdi_name(self, pair: Given) -> str:
        """The device's name under ``cdi_kind``."""
        return pair.device.uuid


def _or(values: Sequence[int]) -> str:
    return (
        ", ".join(map(str, values[:-1])) + f" or {values[-1]}" if len(values) > 1 else str(*values)
    )


def _mib_of_bytes(text: str, where: str) -> int:
    """MiB in a quantity of bytes, rounded up."""
    value = parse_quantity(text)
    if value is None or value < 0 or value > INT32_MAX * MIB_BYTES:
        raise RequestInvalid(
            field=where,
            problem=f"{shown(text)} is not an amount of memory",
            fix="write a whole number of GiB, or an amount such as 512Mi or 4Gi",
        )
    return int(-(-value // MIB_BYTES))


def is_part(request: DeviceRequest) -> bool:
    """True when less than a whole device is requested."""
    return bool(request.memory_mib) or request.memory_pct < FULL_PCT or not request.exclusive


def one_part_only(asked: Asked, what: str) -> DeviceRequest:
    """The request; refused when it needs parts of several devices and a container can have one."""
    request = asked.request
    if request.count > 1 and is_part(request):
        raise RequestInvalid(
            field=asked.field(asked.family.count),
            problem=f"a container can have one {what} only",
            fix="write 1, or leave memory and compute out for whole devices",
        )
    return request


def render_node(device: Device) -> DeviceNode:
    """``/dev/dri/renderD<M>``: M as the driver reported it, else by the usual rule."""
    number = device.attributes.get("render", str(128 + number_of(device)))
    return node(f"/dev/dri/renderD{number}")
