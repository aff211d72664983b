# SPDX-License-Identifier: Apache-2.0
"""``hamictl get pressure`` and ``get workload``: what the registry reads from the event stream.

The Structs declare the fields that are printed. Memory in MiB, compute in percent of one device.
"""

from typing import Final

import click
import msgspec

from hami_common.apipath import api_path
from hami_common.runtime.clock import SystemClock
from hamictl import client, options, output

CAUSES: Final = {
    "": "-",
    "limit": "own compute limit",
    "priority": "higher priority on the device",
    "both": "limit or higher priority",
}
_CLOCK = SystemClock()
hours_option = click.option(
    "--hours",
    default="",
    help="Length of the time until now; at most 168.",
)


class Neighbor(msgspec.Struct, frozen=True, kw_only=True):
    """Another container with a share of the same device."""

    namespace: str
    pod: str
    container: str
    device_time_s: float
    core_pct: float

    def __str__(self) -> str:
        name = f"{self.namespace}/{self.pod}" if self.pod else "another tenant"
        return f"{name} ({self.device_time_s:.0f} s)"


class DevicePressure(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a container."""

    uuid: str
    limit_core_pct: int
    core_pct: float
    starved_s: float
    neighbors: tuple[Neighbor, ...]


class Recalled(msgspec.Struct, frozen=True, kw_only=True):
    """Moves of a container's device memory to the host for one reason."""

    is_requested: bool
    namespace: str
    pod: str
    container: str
    moves: int
    moved_mib: int

    def __str__(self) -> str:
        name = f"{self.namespace}/{self.pod}" if self.pod else "another tenant"
        name = "a request" if self.is_requested else name
        return f"{name} ({self.moves} x, {self.moved_mib} MiB)"


class ContainerPressure(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting, refusals and moves of one container."""

    namespace: str
    pod: str
    container: str
    node: str
    waited_s: float
    refusals: int
    device_time_s: float
    cause: str
    devices: tuple[DevicePressure, ...]
    recalls: int = 0
    recalled_for: tuple[Recalled, ...] = ()

    @property
    def busiest(self) -> str:
        """Neighbor with the most device time."""
        found = [one for device in self.devices for one in device.neighbors]
        return str(max(found, key=lambda one: one.device_time_s)) if found else "-"


class Pressure(msgspec.Struct, frozen=True):
    """Response of ``/v1/pressure``."""

    items: tuple[ContainerPressure, ...]
    cut: str = ""


class DeviceWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """One container on one device."""

    uuid: str
    limit_mib: int
    limit_core_pct: int
    used_mib: int
    core_pct: int
    peak_mib: int
    peak_s: float
    p95_core_pct: int


class RightSize(msgspec.Struct, frozen=True, kw_only=True):
    """Recommended request."""

    memory_mib: int
    core_pct: int
    profile: str
    margin_pct: int
    hours: float


class ContainerWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """One container of the pod."""

    name: str
    devices: tuple[DeviceWorkload, ...]
    pressure: ContainerPressure | None = None
    right_size: tuple[RightSize, ...] = ()


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Response of ``/v1/workloads``."""

    namespace: str
    pod: str
    allocation: client.Allocation
    containers: tuple[ContainerWorkload, ...]
    cut: str = ""


@click.command()
@options.only_namespace_option
@options.only_node_option
@hours_option
@options.registry_option
@options.format_option
def pressure(namespace: str, node: str, hours: str, registry: str, format_: str) -> None:
    """List containers that waited, were refused memory or parked."""
    answer = client.read(
        Pressure, registry, "/v1/pressure", namespace=namespace, node=node, hours=hours
    )
    if output.structured(answer, format_):
        return
    _note_cut(answer.cut)
    headings = [
        "NAMESPACE",
        "POD",
        "CONTAINER",
        "NODE",
        "WAITED S",
        "REFUSALS",
        "CAUSE",
        "NEIGHBOR",
        "RECALLS",
        "RECALLED FOR",
    ]
    rows = [
        [
            one.namespace,
            one.pod,
            one.container,
            one.node,
            f"{one.waited_s:.1f}",
            one.refusals,
            CAUSES.get(one.cause, one.cause),
            one.busiest,
            one.recalls,
            ", ".join(map(str, one.recalled_for)) or "-",
        ]
        for one in answer.items
    ]
    output.table(
        headings,
        rows,
        empty="No container waited or was refused memory, and none was moved to the host.",
    )


@click.command()
@click.argument("name")
@options.pod_namespace_option
@hours_option
@options.registry_option
@options.format_option
def workload(name: str, namespace: str, hours: str, registry: str, format_: str) -> None:
    """Show a pod's limits, use, peak and recommended request."""
    path = api_path("v1", "workloads", namespace, name)
    answer = client.read(Workload, registry, path, hours=hours)
    if output.structured(answer, format_):
        return
    _note_cut(answer.cut)
    one = answer.allocation
    click.echo(f"Pod {answer.namespace}/{answer.pod} on {one.node}: {one.state}")
    headings = ["CONTAINER", "DEVICE", "MEMORY MIB", "PEAK MIB", "PEAK AGE", "CORES %", "P95 %"]
    rows = [
        [
            container.name,
            device.uuid,
            output.part(device.used_mib, device.limit_mib),
            device.peak_mib if device.peak_s else "-",
            output.age(_CLOCK.now_s() - device.peak_s) if device.peak_s else "-",
            f"{device.core_pct}/{device.limit_core_pct or 100}",
            device.p95_core_pct if device.peak_s else "-",
        ]
        for container in answer.containers
        for device in container.devices
    ]
    output.table(headings, rows, empty="The pod has no shares.")
    for container in answer.containers:
        waits = container.pressure
        if waits is not None:
            click.echo(
                f"{container.name}: waited {waits.waited_s:.1f} s "
                f"({CAUSES.get(waits.cause, waits.cause)}), {waits.refusals} memory refusals, "
                f"busiest neighbor {waits.busiest}"
            )
        for size in container.right_size:
            profile = f"{size.profile}, " if size.profile else ""
            click.echo(
                f"{container.name}: recommended request {profile}{size.memory_mib} MiB, "
                f"{size.core_pct} % (use of {size.hours:g} h plus {size.margin_pct} %)"
            )


def _note_cut(cut: str) -> None:
    if cut:
        click.echo(f"The answer is incomplete: {cut}", err=True)
