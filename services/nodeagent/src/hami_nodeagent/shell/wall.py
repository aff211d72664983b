# SPDX-License-Identifier: Apache-2.0
"""Sets the driver's own memory limits on the cgroups of containers (ADR 27); rules: ``core.wall``.

- A device offers the limit when the driver accepts one on the agent's own cgroup: none, which
  changes nothing. Older drivers, missing rights and an invisible cgroup file system therefore leave
  the devices as they are.
- A container's limit is set when the pod's status names the container, follows a resize, and is set
  again every ``_AGAIN_S``, because a reset of the device loses it.
- The soft limit is always 0: the driver adds soft limits up in the groups above and does not
  subtract that of a group which is removed. A removed group needs no action.

A limit that cannot be set is reported as an Event of the pod and retried. Memory in MiB, times in
seconds.
"""

import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import anyio.to_thread
from msgspec.structs import replace

from hami_common.model.device import DeviceFacts
from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_nodeagent.core.holders import holders_of
from hami_nodeagent.core.wall import Wall, walls_of
from hami_nodeagent.drivers.errors import DriverDenied, DriverError, NotSupported
from hami_nodeagent.drivers.protocol import Inventory, MemoryCap
from hami_nodeagent.shell.cgroupfs import groups_of, own_group
from hami_nodeagent.shell.site import Site

REASON = "MemoryCapNotSet"
_LOOK_S = 5.0
_AGAIN_S = 60.0
_SHARED_MODES = ("soft", "timeslice")
"""A service of its own reads soft limits as a reason to end clients, so it gets no limits."""

_log = logging.getLogger(__name__)


class MemoryWall:
    """The driver's memory limits of this node's containers, for one vendor."""

    def __init__(
        self, *, site: Site, cap: MemoryCap, events: Callable[[], EventRecorder | None]
    ) -> None:
        self._site = site
        self._picture = site.picture
        self._cap = cap
        self._events = events
        self._root = Path(site.settings.drivers.nvidia.cgroup_root)
        self._proc = Path(site.settings.host_proc)
        self._reason_by_uuid: dict[str, str] = {}
        """Reason why a device offers no limit; empty: it does. Kept while it does not answer."""
        self._set: dict[tuple[Path, str], tuple[int | None, float]] = {}
        """Limit by group and device, and when it was set."""
        self._reported: dict[tuple[str, str, str], str] = {}
        """Problem by pod UID, container and device."""

    async def review(self, inventory: Inventory) -> Inventory:
        """Mark the devices whose driver limits memory."""
        shared = [one for one in inventory.devices if one.mode in _SHARED_MODES]
        own = await anyio.to_thread.run_sync(own_group, self._root, self._proc) if shared else None
        capped = {one.uuid for one in shared if await self._offers(one, own)}
        return replace(
            inventory,
            devices=tuple(replace(one, memory_cap=one.uuid in capped) for one in inventory.devices),
        )

    async def _offers(self, device: DeviceFacts, own: Path | None) -> bool:
        before = self._reason_by_uuid.get(device.uuid)
        if not device.healthy:
            return before == ""  # it may not answer
        reason = f"the agent's own cgroup is not below {self._root}"
        if own is not None:
            try:
                await self._cap.cap_memory(device.uuid, own, None)
            except (NotSupported, DriverDenied) as error:
                reason = str(error)
            except DriverError as error:
                if before is not None:
                    return not before  # the device does not answer now
                reason = str(error)
            else:
                reason = ""
        if reason != before:
            self._reason_by_uuid[device.uuid] = reason
            extra = {"device": device.uuid, "offered": not reason, "reason": reason}
            _log.info("memory limit by the driver", extra=extra)
        return not reason

    async def run(self) -> None:
        """Compare and set until cancelled."""
        while True:
            changed = self._picture.changed
            devices = self._picture.view.devices_by_uuid.values()
            if not self._set and not any(one.memory_cap for one in devices):
                await self._picture.wait_change(changed, _AGAIN_S)
                continue
            await self._site.quarantine.run("wall", "look", self.look, is_retried=False)
            await self._picture.wait_change(changed, _LOOK_S)

    async def look(self) -> None:
        """Set every limit that is due."""
        walls = walls_of(
            holders_of(
                self._picture.entries_by_uid,
                self._picture.pods,
                self._picture.grants,
                self._picture.view.devices_by_uuid,
            ),
            self._picture.pods,
            self._picture.entries_by_uid,
            self._picture.view.devices_by_uuid,
            self._site.settings.usage.breach,
        )
        groups: dict[str, Path] = {}
        if walls:
            ids = frozenset(wall.container_id for wall in walls)
            groups = await anyio.to_thread.run_sync(groups_of, self._root, ids)
        self._forget(walls, groups)
        for wall in walls:
            key = f"{wall.container_id}/{wall.holder.uuid}"
            await self._site.quarantine.run(
                "wall",
                key,
                partial(self._look_at, wall, groups.get(wall.container_id)),
                name=(wall.holder.namespace, wall.holder.pod),
                is_retried=False,
            )
        self._site.metrics.memory_caps.set(
            sum(limit_mib is not None for limit_mib, _ in self._set.values())
        )

    def _forget(self, walls: Collection[Wall], groups: dict[str, Path]) -> None:
        live = {
            (groups[wall.container_id], wall.holder.uuid)
            for wall in walls
            if wall.container_id in groups
        }
        self._set = {key: one for key, one in self._set.items() if key in live}
        known = {_key(wall) for wall in walls}
        self._reported = {key: one for key, one in self._reported.items() if key in known}

    async def _look_at(self, wall: Wall, group: Path | None) -> None:
        if group is None:
            pod = self._picture.pods.find(wall.holder.pod_uid)
            if pod is not None and wall.holder.container in pod.started:
                await self._report(wall, f"it has no cgroup below {self._root}")
            return
        key = (group, wall.holder.uuid)
        limit_mib, set_s = self._set.get(key, (None, None))
        now_s = self._site.clock.monotonic_s()
        if set_s is not None and limit_mib == wall.limit_mib and now_s - set_s < _AGAIN_S:
            return
        if set_s is None and wall.limit_mib is None:
            return
        try:
            await self._cap.cap_memory(wall.holder.uuid, group, wall.limit_mib)
        except DriverError as error:
            if await anyio.Path(group).is_dir():  # otherwise the container has ended
                await self._report(wall, str(error))
            return
        self._set[key] = (wall.limit_mib, now_s)
        self._reported.pop(_key(wall), None)
        if set_s is None or limit_mib != wall.limit_mib:
            _log.info(
                "memory limit set by the driver",
                extra={
                    "pod": f"{wall.holder.namespace}/{wall.holder.pod}",
                    "container": wall.holder.container,
                    "device": wall.holder.uuid,
                    "limit_mib": wall.limit_mib,
                },
            )

    async def _report(self, wall: Wall, problem: str) -> None:
        """Report a missing limit once; the library and breach detection hold the share alone."""
        self._site.metrics.memory_cap_failures.inc()
        if self._reported.get(_key(wall)) == problem:
            return
        self._reported[_key(wall)] = problem
        holder = wall.holder
        message = (
            f"the driver does not limit the memory of container {holder.container} on device "
            f"{holder.uuid}, only the library does: {problem}"
        )
        title = f"{holder.namespace}/{holder.pod}"
        _log.warning("memory limit not set", extra={"pod": title, "problem": problem})
        recorder = self._events()
        if recorder is not None:
            pod = ObjectRef(
                kind="Pod", namespace=holder.namespace, name=holder.pod, uid=holder.pod_uid
            )
            await recorder.record(pod, reason=REASON, message=message, kind="Warning")


def _key(wall: Wall) -> tuple[str, str, str]:
    return wall.holder.pod_uid, wall.container_id, wall.holder.uuid
