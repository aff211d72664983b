# SPDX-License-Identifier: Apache-2.0
"""Tracks device ids, their health and their owners, as kubelet's device manager does.

Rules: ``pkg/kubelet/cm/devicemanager`` of kubelet 1.34, including the surprising ones:

- ids are allocated before any other check of the pod, init containers first; later containers reuse
  the ids of an ordinary init container, but not those of a sidecar;
- each container and resource gets one Allocate call; no lock is held during the call, so
  PodResources keeps answering;
- ids of inactive pods are freed lazily, at the next allocation or List;
- after a restart, ids come from the checkpoint; until the plugin registers again, capacity is zero
  and a pod whose containers have ended is rejected.

NUMA nodes that a plugin reports are passed on to PodResources; no topology policy is applied
(policy "none"). Times are monotonic seconds, given by the caller's clock. Device ids are taken in
random order, as from Go's maps.
"""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from hami_common.kubeletapi import deviceplugin as api
from hami_sim.kubelet.objects import (
    Obj,
    app_containers,
    init_containers,
    is_sidecar,
    limits_of,
    uid_of,
)

CHECKPOINT = "kubelet_internal_checkpoint"
NO_NUMA = -1


class DeviceError(Exception):
    """Failure to allocate devices; the text is kubelet's."""


class Plugin(Protocol):
    """One plugin's calls, as the manager makes them; failures arrive as DeviceError."""

    async def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Ask which ids the plugin would like to give."""
        ...

    async def allocate(self, ids: Sequence[str]) -> Sequence[api.ContainerAllocateResponse]:
        """Call Allocate with the ids that a container gets."""
        ...

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Notify the plugin that the container is about to start."""
        ...


class Endpoint:
    """A registered resource: plugin (None: from the checkpoint), options, when it vanished."""

    def __init__(
        self,
        plugin: Plugin | None,
        options: api.DevicePluginOptions,
        *,
        stopped_s: float | None = None,
    ) -> None:
        self.plugin = plugin
        self.options = options
        self.stopped_s = stopped_s

    def call(self, resource: str) -> Plugin:
        """Return the plugin for a call."""
        if self.plugin is None or self.stopped_s is not None:
            raise DeviceError(f"endpoint {resource} has been stopped")
        return self.plugin


class Held(Struct, frozen=True, kw_only=True):
    """Ids of one resource that one container holds, with the plugin's answer."""

    ids_by_numa: Mapping[int, tuple[str, ...]]
    response: bytes
    """ContainerAllocateResponse, serialised."""

    @property
    def ids(self) -> frozenset[str]:
        """All ids."""
        return frozenset(id_ for ids in self.ids_by_numa.values() for id_ in ids)


class RunOptions(Struct, frozen=True, kw_only=True):
    """Edits that a container's devices apply to it; on a conflict the first answer wins."""

    envs: Mapping[str, str] = {}
    mounts: tuple[tuple[str, str, bool], ...] = ()
    """(container path, host path, read-only)."""
    devices: tuple[tuple[str, str, str], ...] = ()
    """(container path, host path, permissions)."""
    cdi_devices: tuple[str, ...] = ()
    annotations: Mapping[str, str] = {}


class Capacity(Struct, frozen=True, kw_only=True):
    """Units of each resource for the node's status."""

    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]
    removed: frozenset[str]


class _Entry(Struct, rename="pascal", kw_only=True):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str]] = msgspec.field(name="DeviceIDs")
    alloc_resp: str


class _Data(Struct, rename="pascal", kw_only=True):
    pod_device_entries: list[_Entry] = []
    registered_devices: dict[str, list[str]] = {}


class _Checkpoint(Struct, rename="pascal", kw_only=True):
    data: _Data
    checksum: int


class DeviceManager:
    """The node's devices; one caller at a time for `allocate_pod` (kubelet's sync loop)."""

    def __init__(
        self,
        directory: Path,
        *,
        active_pods: Callable[[], Collection[Obj]],
        now_s: Callable[[], float],
        grace_s: float,
        seed: int = 0,
    ) -> None:
        self._checkpoint = directory / CHECKPOINT
        self._active_pods = active_pods
        self._now_s = now_s
        self._grace_s = grace_s
        self._random = random.Random(seed)
        self._endpoints: dict[str, Endpoint] = {}
        self._devices: dict[str, dict[str, api.Device]] = {}
        self._healthy: dict[str, set[str]] = {}
        self._unhealthy: dict[str, set[str]] = {}
        self._allocated: dict[str, set[str]] = {}
        self._held: dict[str, dict[str, dict[str, Held]]] = {}
        """Pod UID → container → resource → Held."""
        self._reusable: dict[str, dict[str, set[str]]] = {}
        self.running_at_start: frozenset[tuple[str, str]] = frozenset()
        """(pod UID, container) found running when kubelet started; counts until `is_synced`."""
        self.is_synced = False
        self.on_change: Callable[[], None] = _nothing

    # -- plugins

    def connect(self, resource: str, plugin: Plugin, options: api.DevicePluginOptions) -> Endpoint:
        """Take a plugin for a resource; it replaces an earlier one."""
        endpoint = self._endpoints[resource] = Endpoint(plugin, options)
        return endpoint

    def update(self, resource: str, devices: Sequence[api.Device]) -> None:
        """Take a plugin's list of devices."""
        self._devices[resource] = {device.ID: device for device in devices}
        self._healthy[resource] = {d.ID for d in devices if d.health == "Healthy"}
        self._unhealthy[resource] = {d.ID for d in devices if d.health != "Healthy"}
        self.write_checkpoint()
        self.on_change()

    def disconnect(self, resource: str) -> None:
        """Note that a plugin is gone: its devices are unhealthy and count until the grace ends."""
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            return
        self._unhealthy.setdefault(resource, set()).update(self._healthy.get(resource, ()))
        self._healthy[resource] = set()
        endpoint.stopped_s = self._now_s()
        self.on_change()

    def capacity(self) -> Capacity:
        """Count devices for the node's status, forgetting resources whose plugin stayed away."""
        removed = {
            resource
            for resource in {*self._healthy, *self._unhealthy}
            if (endpoint := self._endpoints.get(resource)) is None
            or (
                endpoint.stopped_s is not None
                and self._now_s() - endpoint.stopped_s > self._grace_s
            )
        }
        for resource in removed:
            self._endpoints.pop(resource, None)
            self._healthy.pop(resource, None)
            self._unhealthy.pop(resource, None)
        if removed:
            self.write_checkpoint()
        allocatable = {resource: len(ids) for resource, ids in self._healthy.items()}
        capacity = {
            resource: len(ids) + len(self._unhealthy.get(resource, ()))
            for resource, ids in self._healthy.items()
        }
        return Capacity(capacity=capacity, allocatable=allocatable, removed=frozenset(removed))

    # -- allocation

    def is_plugin_resource(self, resource: str) -> bool:
        """Return true if a plugin offers or has offered the resource."""
        return resource in self._healthy or resource in self._allocated

    async def allocate_pod(self, pod: Obj) -> None:
        """Give every container of a pod its devices, in order; DeviceError refuses the pod."""
        for container in init_containers(pod) + app_containers(pod):
            await self.allocate_container(pod, container)

    async def allocate_container(self, pod: Obj, container: Obj) -> None:
        """Give one container its devices, if it asks for any and has none yet."""
        uid, name = uid_of(pod), container["name"]
        self._reusable = {uid: self._reusable.get(uid, {})}
        reusable = self._reusable[uid]
        await self._allocate_resources(pod, container, reusable)
        held = self._held.get(uid, {}).get(name, {})
        is_init = any(c["name"] == name for c in init_containers(pod))
        for resource, devices in held.items():
            if is_init and not is_sidecar(container):
                reusable.setdefault(resource, set()).update(devices.ids)
            else:
                reusable.setdefault(resource, set()).difference_update(devices.ids)

    async def _allocate_resources(
        self, pod: Obj, container: Obj, reusable: Mapping[str, set[str]]
    ) -> None:
        uid, name = uid_of(pod), container["name"]
        is_collected = False
        has_changed = False
        for resource, amount in limits_of(container).items():
            if not self.is_plugin_resource(resource):
                continue
            if not is_collected:
                self.free_inactive()
                is_collected = True
            ids = await self._choose(
                uid, name, resource, int(amount), reusable.get(resource, set())
            )
            if not ids:
                continue
            has_changed = True
            response = await self._call_allocate(resource, ids)
            self._held.setdefault(uid, {}).setdefault(name, {})[resource] = Held(
                ids_by_numa=self._by_numa(resource, ids), response=response
            )
        if has_changed:
            self.write_checkpoint()

    async def _call_allocate(self, resource: str, ids: Sequence[str]) -> bytes:
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            self._allocated = self._held_ids()
            raise DeviceError(f"unknown Device Plugin {resource}")
        try:
            responses = await endpoint.call(resource).allocate(ids)
        except DeviceError:
            self._allocated = self._held_ids()
            raise
        if not responses:
            raise DeviceError("no containers return in allocation response &AllocateResponse{}")
        return bytes(responses[0].SerializeToString())

    async def _choose(
        self, uid: str, name: str, resource: str, wanted: int, reusable: set[str]
    ) -> list[str]:
        """Pick ids and mark them taken; an empty list when there is nothing to do."""
        needed = wanted
        held = self._held.get(uid, {}).get(name, {}).get(resource)
        if held is not None:
            needed -= len(held.ids)
            if needed != 0:
                raise DeviceError(
                    f'pod "{uid}" container "{name}" changed request for resource "{resource}" '
                    f"from {len(held.ids)} to {wanted}"
                )
        if not self.is_synced and (uid, name) in self.running_at_start:
            return []
        self._check_health(resource, held)
        if needed == 0:
            return []
        chosen: list[str] = []

        def take(ids: Collection[str]) -> bool:
            taken = self._allocated.setdefault(resource, set())
            for id_ in self._shuffled(set(ids) - set(chosen)):
                taken.add(id_)
                chosen.append(id_)
                if len(chosen) == needed:
                    return True
            return False

        if take(reusable):
            return chosen
        available = self._healthy[resource] - self._allocated.get(resource, set())
        missing = needed - len(chosen)
        if len(available) < missing:
            raise DeviceError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {missing}, Available: {len(available)}"
            )
        preferred = await self._preferred(resource, available | set(chosen), chosen, wanted)
        if take(preferred & available) or take(available):
            return chosen
        raise DeviceError(
            "unexpectedly allocated less resources than required. "
            f"Requested: {wanted}, Got: {len(chosen)}"
        )

    def _check_health(self, resource: str, held: Held | None) -> None:
        if resource not in self._healthy:
            raise DeviceError(f"cannot allocate unregistered device {resource}")
        healthy = self._healthy[resource]
        if not healthy:
            raise DeviceError(
                f"no healthy devices present; cannot allocate unhealthy devices {resource}"
            )
        if held is not None and not held.ids <= healthy:
            raise DeviceError(
                "previously allocated devices are no longer healthy; "
                f"cannot allocate unhealthy devices {resource}"
            )

    async def _preferred(
        self, resource: str, available: set[str], must_include: Sequence[str], size: int
    ) -> set[str]:
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise DeviceError(f"endpoint not found in cache for a registered resource: {resource}")
        if not endpoint.options.get_preferred_allocation_available:
            return set()
        try:
            answer = await endpoint.call(resource).preferred(
                self._shuffled(available), self._shuffled(must_include), size
            )
        except DeviceError as error:
            raise DeviceError(
                f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            ) from error
        return set(answer)

    def _shuffled(self, ids: Collection[str]) -> list[str]:
        ordered = sorted(ids)
        self._random.shuffle(ordered)
        return ordered

    def _by_numa(self, resource: str, ids: Sequence[str]) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        known = self._devices.get(resource, {})
        for id_ in ids:
            nodes = [node.ID for node in known[id_].topology.nodes] if id_ in known else []
            for node in nodes or [NO_NUMA]:
                found[node] = (*found.get(node, ()), id_)
        return found

    def free_inactive(self) -> None:
        """Free the ids of pods that are no longer active."""
        if not self.is_synced:
            return
        active = {uid_of(pod) for pod in self._active_pods()}
        gone = [uid for uid in self._held if uid not in active]
        for uid in gone:
            del self._held[uid]
        if gone:
            self._allocated = self._held_ids()

    def _held_ids(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for containers in self._held.values():
            for resources in containers.values():
                for resource, held in resources.items():
                    found.setdefault(resource, set()).update(held.ids)
        return found

    # -- starting containers

    async def run_options(self, pod: Obj, container: Obj) -> RunOptions:
        """Call PreStartContainer where wanted; say what the devices bring into the container."""
        uid, name = uid_of(pod), container["name"]
        missing = False
        for resource, amount in limits_of(container).items():
            if not self.is_plugin_resource(resource) or not amount:
                continue
            await self._pre_start(uid, name, resource)
            is_active = any(uid_of(other) == uid for other in self._active_pods())
            missing = missing or (
                is_active and resource not in self._held.get(uid, {}).get(name, {})
            )
        if missing:
            await self.allocate_container(pod, container)
        return self._options_of(uid, name)

    async def _pre_start(self, uid: str, name: str, resource: str) -> None:
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise DeviceError(f"endpoint not found in cache for a registered resource: {resource}")
        if not endpoint.options.pre_start_required:
            return
        held = self._held.get(uid, {}).get(name, {}).get(resource)
        if held is None:
            raise DeviceError(
                f"no devices found allocated in local cache for pod {uid}, container {name}, "
                f"resource {resource}"
            )
        try:
            await endpoint.call(resource).pre_start(self._shuffled(held.ids))
        except DeviceError as error:
            raise DeviceError(
                f"device plugin PreStartContainer rpc failed with err: {error}"
            ) from error

    def _options_of(self, uid: str, name: str) -> RunOptions:
        envs: dict[str, str] = {}
        mounts: dict[str, tuple[str, str, bool]] = {}
        devices: dict[str, tuple[str, str, str]] = {}
        annotations: dict[str, str] = {}
        cdi_devices: dict[str, None] = {}
        for held in self._held.get(uid, {}).get(name, {}).values():
            response = api.ContainerAllocateResponse.FromString(held.response)
            for key, value in response.envs.items():
                envs.setdefault(key, value)
            for mount in response.mounts:
                mounts.setdefault(
                    mount.container_path, (mount.container_path, mount.host_path, mount.read_only)
                )
            for device in response.devices:
                devices.setdefault(
                    device.container_path,
                    (device.container_path, device.host_path, device.permissions),
                )
            for key, value in response.annotations.items():
                annotations.setdefault(key, value)
            cdi_devices.update({device.name: None for device in response.cdi_devices})
        return RunOptions(
            envs=envs,
            mounts=tuple(mounts.values()),
            devices=tuple(devices.values()),
            annotations=annotations,
            cdi_devices=tuple(cdi_devices),
        )

    # -- answers

    def devices_of(self, uid: str, container: str) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the devices of a container: resource → id → NUMA nodes."""
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for resource, held in self._held.get(uid, {}).get(container, {}).items():
            ids = found.setdefault(resource, {})
            for node, members in held.ids_by_numa.items():
                for id_ in members:
                    ids[id_] = ids.get(id_, ()) + ((node,) if node != NO_NUMA else ())
        return found

    def allocatable_devices(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return all healthy devices: resource → id → NUMA nodes."""
        return {
            resource: {
                id_: tuple(node.ID for node in self._devices[resource][id_].topology.nodes)
                for id_ in sorted(ids)
            }
            for resource, ids in self._healthy.items()
            if resource in self._devices
        }

    def allocated_counts(self) -> dict[str, int]:
        """Count taken ids per resource; a node's allocatable is never taken to be less."""
        return {resource: len(ids) for resource, ids in self._allocated.items()}

    def has_pod(self, uid: str) -> bool:
        """Return true if the pod holds devices."""
        return uid in self._held

    # -- checkpoint

    def write_checkpoint(self) -> None:
        """Write who holds what, so that a restarted kubelet need not ask again."""
        data = _Data(
            pod_device_entries=[
                _Entry(
                    pod_uid=uid,
                    container_name=container,
                    resource_name=resource,
                    device_ids={str(node): list(ids) for node, ids in held.ids_by_numa.items()},
                    alloc_resp=base64.b64encode(held.response).decode(),
                )
                for uid, containers in self._held.items()
                for container, resources in containers.items()
                for resource, held in resources.items()
            ],
            registered_devices={name: sorted(ids) for name, ids in self._healthy.items()},
        )
        checksum = zlib.crc32(msgspec.json.encode(data))
        fresh = self._checkpoint.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(_Checkpoint(data=data, checksum=checksum)))
        fresh.replace(self._checkpoint)

    def read_checkpoint(self) -> None:
        """Take over what an earlier kubelet wrote; a damaged file counts as none, as in kubelet."""
        try:
            stored = msgspec.json.decode(self._checkpoint.read_bytes(), type=_Checkpoint)
        except (FileNotFoundError, msgspec.DecodeError):
            return
        if zlib.crc32(msgspec.json.encode(stored.data)) != stored.checksum:
            return
        for entry in stored.data.pod_device_entries:
            containers = self._held.setdefault(entry.pod_uid, {})
            containers.setdefault(entry.container_name, {})[entry.resource_name] = Held(
                ids_by_numa={int(node): tuple(ids) for node, ids in entry.device_ids.items()},
                response=base64.b64decode(entry.alloc_resp),
            )
        self._allocated = self._held_ids()
        for resource in stored.data.registered_devices:
            self._healthy[resource] = set()
            self._unhealthy[resource] = set()
            self._endpoints[resource] = Endpoint(
                None, api.DevicePluginOptions(), stopped_s=self._now_s()
            )


def _nothing() -> None:
    return None
