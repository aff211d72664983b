# SPDX-License-Identifier: Apache-2.0
"""Interface of a vendor without hardware access.

Capacity arithmetic is common code over columns; a vendor supplies data, parsing and rendering.
Memory in MiB, compute in percent of one device.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

from msgspec import Struct

from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares
from hami_common.model.request import DeviceRequest, DeviceSelector
from hami_common.pods.podview import ContainerView

InjectionMode = Literal["cdi", "devices", "env"]
LIMITED_VENDORS: Final = frozenset({"nvidia"})
"""Vendors whose shares the in-container library enforces, from the container's limits file."""


class ResourceNames(Struct, frozen=True, kw_only=True):
    """Names users write in limits. All are configurable."""

    count: str
    memory: str = ""
    memory_percentage: str = ""
    cores: str = ""
    priority: str = ""
    memory_unit_mib: int = 1
    """MiB in one unit of ``memory``; 0: it is a percentage of a device."""
    memory_takes_bytes: bool = False
    """A quantity of ``memory`` with letters (``4Gi``) is in bytes, not in units."""
    core_units: int = 100
    """Units of ``cores`` in one device."""
    aliases: dict[str, str] = {}
    """Accepted other name → the canonical name."""
    others: tuple[str, ...] = ()
    """Further names of the vendor, of its other count resources."""
    dialect_of: str = ""
    """Count resource of the family that these are other names for; both count under one quota."""

    @property
    def kind(self) -> str:
        """The count resource, the same for all dialects of a family."""
        return self.dialect_of or self.count

    def all(self) -> frozenset[str]:
        """Every name, aliases included."""
        names = {
            self.count,
            self.memory,
            self.memory_percentage,
            self.cores,
            self.priority,
            *self.aliases,
            *self.others,
        }
        return frozenset(name for name in names if name)


class ContainerChanges(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of admission in one container."""

    set_limits: dict[str, str] = {}
    remove_resources: tuple[str, ...] = ()
    """Names to remove from limits and requests (aliases that were renamed)."""
    set_env: dict[str, str] = {}
    """Environment to add where the user has not set it."""
    remove_env: tuple[str, ...] = ()
    """Variables of the user that would override the node's: removed, with a warning."""
    runtime_class: str = ""
    warnings: tuple[str, ...] = ()


class DeviceNode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device node to give to a container."""

    host_path: str
    container_path: str
    permissions: str = "rw"
    optional: bool = False
    """Not every driver creates this node: it is given where the host has it."""


class BindMount(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host path to mount into a container."""

    host_path: str
    container_path: str
    read_only: bool = True


class ContainerEdits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Edits that make shares visible inside a container: the one plan of all modes (design D10)."""

    env: dict[str, str] = {}
    devices: tuple[DeviceNode, ...] = ()
    mounts: tuple[BindMount, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    """Fully qualified CDI names, ``<vendor>/<class>=<name>``."""
    annotations: dict[str, str] = {}


class RenderContext(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Node settings that rendering depends on."""

    mode: InjectionMode = "cdi"
    is_limited: bool = True
    """False for a container with whole devices only: it gets no limits (design D33)."""
    region_file: str = ""
    """Path of the usage region inside the container, empty when there is none."""
    memory_oversubscribed: bool = False
    library_log_level: str = ""
    core_policy: str = ""
    """``GPU_CORE_UTILIZATION_POLICY``; empty leaves it unset."""
    mps_dir: str = ""
    """Host directory with the Multi-Process Services of the node's devices."""
    library_mounts: tuple[BindMount, ...] = ()
    """The in-container limiter and its preload file; empty where none is installed."""
    handles: dict[str, dict[str, str]] = {}
    """By device UUID: the objects that the driver created for the container's share there.

    Words that a vendor's rendering names: an instance's id or UUID, a device node, a mask. For a
    device of which the container has several parts, by ``handles.handle_key`` of each.
    """
    divides: bool = False
    """The node's driver creates the objects that shares need: a share without its words is an
    error.
    """


NOT_TESTED = "from the vendor's documentation, not yet run"
"""Status of a vendor whose driver has not run on hardware."""


class HardwareRun(Struct, frozen=True, kw_only=True, order=True):
    """A run of this project's checks on a vendor's hardware."""

    device: str
    """Model, as the driver reports it."""
    driver: str
    """Version of the vendor's driver."""
    date: str
    """Day of the run, as ``YYYY-MM-DD``."""

    def __str__(self) -> str:
        return f"{self.device} (driver {self.driver}, {self.date})"


class Capability(Struct, frozen=True, kw_only=True):
    """Supported features of a vendor in this project; defaults are unsupported."""

    placed: bool = True
    """Requests are admitted, placed and booked."""
    memory_enforced: str = ""
    """Mechanism that enforces the memory limit; empty: none."""
    compute_enforced: str = ""
    memory_cap: str = ""
    """Vendor's driver that limits the memory of containers by their cgroups; empty: none does."""
    memory_backed: str = ""
    """Mechanism that keeps memory in the host which exceeds the device's; empty: none, so more
    memory than the device has is never offered."""
    memory_recalled: str = ""
    """Mechanism that moves all memory of an idle container to the host; empty: none."""
    partitioned: str = ""
    """Component that divides hardware for a share; empty: none, or the hardware cannot be divided.
    """
    hardware_tested: tuple[HardwareRun, ...] = ()
    """Runs on hardware; empty: never. ``docs/gpu/`` has the results of each (``tools.gen_proof``).
    """

    @property
    def hardware_status(self) -> str:
        """Last run on hardware, or that the driver follows the vendor's documentation only."""
        if not self.hardware_tested:
            return NOT_TESTED
        return str(max(self.hardware_tested, key=lambda run: run.date))


NO_ANNOTATIONS: Mapping[str, str] = {}


class Vendor(Protocol):
    """The pure half of one vendor."""

    name: str
    """Vendor word, as in ``Device.vendor``."""

    @property
    def resources(self) -> ResourceNames:
        """Names of the vendor's resources."""
        ...

    @property
    def families(self) -> tuple[ResourceNames, ...]:
        """The names by count resource; most vendors have one count resource."""
        ...

    @property
    def capability(self) -> Capability:
        """Supported features of this vendor."""
        ...

    def advertised(self, device: Device) -> tuple[str, ...]:
        """Count resources under which kubelet may give the device."""
        ...

    def admit(
        self, container: ContainerView, annotations: Mapping[str, str] = NO_ANNOTATIONS
    ) -> ContainerChanges | None:
        """Changes for a container that asks for this vendor's devices, ``None`` when it does not.

        ``annotations`` are the pod's. ``RequestInvalid`` when it cannot be served.
        """
        ...

    def parse_request(
        self, container: ContainerView, annotations: Mapping[str, str] = NO_ANNOTATIONS
    ) -> DeviceRequest | None:
        """Request of the container, ``None`` when it requests no device.

        Equal before and after ``admit`` was applied.
        """
        ...

    def parse_priority(self, container: ContainerView) -> int | None:
        """Task priority 0 (highest) … 7, ``None`` when not given."""
        ...

    def parse_selector(self, annotations: Mapping[str, str]) -> DeviceSelector:
        """Devices that the pod accepts. ``RequestInvalid`` names the annotation that is wrong."""
        ...

    def render(
        self, shares: ContainerShares, devices: Sequence[Device], context: RenderContext
    ) -> ContainerEdits:
        """Edits that show a container its shares of this vendor.

        ``devices`` are those of the shares, in the same order.
        """
        ...
