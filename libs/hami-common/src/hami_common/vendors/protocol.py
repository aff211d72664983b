# SPDX-License-Identifier: Apache-2.0
"""What the system must know about a vendor without touching hardware.

Capacity arithmetic is common code over columns; a vendor supplies data, parsing and rendering.
Memory in MiB, compute in percent of one device.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares
from hami_common.model.request import DeviceRequest, DeviceSelector
from hami_common.pods.podview import ContainerView

InjectionMode = Literal["cdi", "devices", "env"]


class ResourceNames(Struct, frozen=True, kw_only=True):
    """Names users write in limits. All are configurable."""

    count: str
    memory: str = ""
    memory_percentage: str = ""
    cores: str = ""
    priority: str = ""
    memory_unit_mib: int = 1
    """MiB that one unit of ``memory`` stands for; 0: it is a percentage of a device."""
    core_units: int = 100
    """Units of ``cores`` in one device."""
    aliases: dict[str, str] = {}
    """Accepted other name → the name it stands for."""
    others: tuple[str, ...] = ()
    """Further names of the vendor, of its other count resources."""

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
    """What admission changes in one container."""

    set_limits: dict[str, str] = {}
    remove_resources: tuple[str, ...] = ()
    """Names to remove from limits and requests (aliases that were renamed)."""
    set_env: dict[str, str] = {}
    """Environment to add where the user has not set it."""
    remove_env: tuple[str, ...] = ()
    """Variables the user set that would override what the node gives: removed, with a warning."""
    runtime_class: str = ""
    warnings: tuple[str, ...] = ()


class DeviceNode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device node to give to a container."""

    host_path: str
    container_path: str
    permissions: str = "rw"
    optional: bool = False
    """Not every driver makes this node: it is given where the host has it."""


class BindMount(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host path to mount into a container."""

    host_path: str
    container_path: str
    read_only: bool = True


class ContainerEdits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How shares become visible inside a container: the one plan of all modes (design D10)."""

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
    """False for a container that holds only whole devices: it is told no limits (design D33)."""
    region_file: str = ""
    """Path of the usage region inside the container, empty when there is none."""
    memory_oversubscribed: bool = False
    library_log_level: str = ""
    core_policy: str = ""
    """``GPU_CORE_UTILIZATION_POLICY``; empty leaves it unset."""
    library_mounts: tuple[BindMount, ...] = ()
    """The in-container limiter and its preload file; empty where none is installed."""
    handles: dict[str, dict[str, str]] = {}
    """By device UUID: what the driver made for the container's share there.

    Words that a vendor's rendering names: an instance's id or UUID, a device node, a mask. Of a
    device that the container has several parts of, by ``handles.handle_key`` of each.
    """
    divides: bool = False
    """The node's driver makes what shares need: a share whose words are missing is an error."""


class Capability(Struct, frozen=True, kw_only=True):
    """What works for a vendor in this project; what is not said is not so."""

    placed: bool = True
    """Requests are admitted, placed and booked."""
    memory_enforced: str = ""
    """By what a container is held to its memory; empty: by nothing."""
    compute_enforced: str = ""
    partitioned: str = ""
    """By whom hardware is divided for a share; empty: by nobody, or it cannot be."""
    verified: str = ""
    """Hardware and date of the last run on it; empty: never."""


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
        """The names by count resource: most vendors have one."""
        ...

    @property
    def capability(self) -> Capability:
        """What works for this vendor here."""
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
        """What the container asks for, ``None`` when nothing.

        Equal before and after ``admit`` was applied.
        """
        ...

    def parse_priority(self, container: ContainerView) -> int | None:
        """Task priority 0 (highest) … 7, ``None`` when not given."""
        ...

    def parse_selector(self, annotations: Mapping[str, str]) -> DeviceSelector:
        """Which devices the pod accepts. ``RequestInvalid`` names the annotation that is wrong."""
        ...

    def render(
        self, shares: ContainerShares, devices: Sequence[Device], context: RenderContext
    ) -> ContainerEdits:
        """How the container sees its shares of this vendor.

        ``devices`` are those of the shares, in the same order.
        """
        ...
