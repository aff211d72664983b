# SPDX-License-Identifier: Apache-2.0
"""Keeps NVIDIA cards without partitions in the mode of sharing that the setting names (ADR 27).

``core.sharing`` decides. The present mode is that of the card's shares in the ledger, and without
any the one in the registry's record, which the agent keeps on disk; the mode follows the setting
while no container uses the card. In mode ``mps`` this module runs the card's Multi-Process Service
(``shell.mps``) and ends the clients of a container shortly before kubelet kills it. Times in
seconds.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from msgspec.structs import replace

from hami_common.model.device import DeviceFacts
from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_nodeagent.core.board import ModeNotice, ModeReported
from hami_nodeagent.core.hardware import CardMode
from hami_nodeagent.core.holders import Holder, holders_of
from hami_nodeagent.core.modes import is_held_back, users_of, wanted_of
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.core.sharing import (
    MODES,
    MPS,
    SOFT,
    SharingLook,
    SharingVerdict,
    decide_sharing,
    mode_in_use,
    mode_of,
)
from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.protocol import Inventory
from hami_nodeagent.shell.mps import MpsService
from hami_nodeagent.shell.owners import ContainerName, find_owners
from hami_nodeagent.shell.site import Site

REASON_RESTART = "MpsServiceRestarted"
REASON_FAULTS = "SharedFaultDomain"
DRAIN_S = 5.0
"""Time before kubelet kills a container at which the service ends its clients."""
_MPS_LOOK_S = 1.0
_IDLE_S = 60.0

_log = logging.getLogger(__name__)


class SharingKeeper:
    """Modes of sharing of this node's NVIDIA cards."""

    def __init__(
        self,
        *,
        site: Site,
        look_again: Callable[[], None],
        events: Callable[[], EventRecorder | None],
        service: Callable[..., MpsService] = MpsService,
    ) -> None:
        """``look_again`` lets the agent discover the vendor's devices at once."""
        self._site = site
        self._picture = site.picture
        self._look_again = look_again
        self._events = events
        self._make_service = service
        self._settings = site.settings.drivers.nvidia
        self._mode_by_uuid: dict[str, str] = {}
        self._cards: dict[str, DeviceFacts] = {}
        """Cards without partitions, as last discovered."""
        self._cordoned_at_s: dict[str, float] = {}
        self.services: dict[str, MpsService] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._warned: set[str] = set()
        """UIDs of pods that have the Event of shared faults."""

    async def review(self, inventory: Inventory) -> Inventory:
        """Give the cards without partitions their modes of sharing."""
        self._cards = {one.uuid: one for one in inventory.devices if one.mode == SOFT}
        return replace(
            inventory,
            devices=tuple(
                replace(one, mode=self._mode_of(one.uuid)) if one.mode == SOFT else one
                for one in inventory.devices
            ),
        )

    def _mode_of(self, uuid: str) -> str:
        known = self._mode_by_uuid.get(uuid)
        if known is None:
            device = self._picture.view.devices_by_uuid.get(uuid)
            known = device.mode if device is not None and device.mode in MODES else SOFT
            self._mode_by_uuid[uuid] = known
        return known

    async def run(self) -> None:
        """Compare modes and keep the services until cancelled."""
        async with anyio.create_task_group() as group:
            while True:
                changed = self._picture.changed
                if not self._is_needed():
                    await self._picture.wait_change(changed, _IDLE_S)
                    continue
                await self._site.quarantine.run(
                    "card", "sharing", partial(self.look, group), is_retried=False
                )
                wait_s = (
                    _MPS_LOOK_S if self.services else self._site.settings.partitions.mode_look_s
                )
                await self._site.clock.sleep(wait_s)

    def _is_needed(self) -> bool:
        """Return whether a card has, or should have, another mode than the library's."""
        return bool(self._settings.sharing) or any(
            self._mode_of(uuid) != SOFT for uuid in self._cards
        )

    async def look(self, group: TaskGroup) -> None:
        """Bring each card one step on; services run in ``group``."""
        for uuid, card in list(self._cards.items()):
            self._follow_ledger(uuid)
            verdict = decide_sharing(self._look_at(card))
            self._report(uuid, verdict)
            if verdict.step:
                self._mode_by_uuid[uuid] = verdict.step
                extra = {"device": uuid, "mode": verdict.step}
                _log.warning("mode of sharing changed", extra=extra)
                self._look_again()
        self._keep_services(group)
        if self.services:
            await self._look_at_clients()

    def _follow_ledger(self, uuid: str) -> None:
        """Take the mode of the card's shares, which an agent without its files does not know."""
        used = mode_in_use(self._picture.entries_by_uid.values(), uuid)
        if used is not None and used != self._mode_of(uuid):
            self._mode_by_uuid[uuid] = used
            extra = {"device": uuid, "mode": used}
            _log.warning("mode of sharing taken from the ledger", extra=extra)
            self._look_again()

    def _look_at(self, card: DeviceFacts) -> SharingLook:
        uuid, picture = card.uuid, self._picture
        now_s = self._site.clock.monotonic_s()
        mode = CardMode(uuid=uuid, is_divided=False, is_divided_next=False)
        notice = picture.partitions.sharing.get(uuid)
        is_told = notice is not None and notice.is_withheld
        is_held = "nvidia" in picture.canonical_by_vendor and is_held_back(
            mode, picture.view.devices_by_uuid
        )
        if not (is_told and is_held):
            self._cordoned_at_s.pop(uuid, None)
        begun_s = self._cordoned_at_s.setdefault(uuid, now_s) if is_told and is_held else None
        service, present = self.services.get(uuid), self._mode_of(uuid)
        problem = "" if service is None else service.problem
        if service is None and present == MPS:
            problem = "it has not started yet"
        return SharingLook(
            mode=present,
            wanted=mode_of(wanted_of(self._settings.sharing, self._site.node, card)),
            users=users_of(
                mode,
                entries=picture.entries_by_uid,
                grants=picture.grants,
                pods=picture.pods,
                instances=(),
            ),
            is_known=picture.ledger_known and picture.pods_known,
            cordoned_for_s=-1.0 if begun_s is None else now_s - begun_s,
            settle_s=self._site.settings.partitions.mode_settle_s,
            problem=problem,
        )

    def _report(self, uuid: str, verdict: SharingVerdict) -> None:
        """Let the report, and with it registry and scheduler, know."""
        notice = None
        if verdict.text:
            notice = ModeNotice(text=verdict.text, is_withheld=verdict.is_withheld)
        if self._picture.partitions.sharing.get(uuid) == notice:
            return
        event = ModeReported(uuid=uuid, notice=notice, is_sharing=True)
        self._picture.partitions.apply(event)
        extra = {"device": uuid, "text": verdict.text or "as configured"}
        _log.info("mode of sharing", extra=extra)
        self._picture.note_change()
        self._look_again()

    # ---- Multi-Process Services -----------------------------------------------------------------

    def _keep_services(self, group: TaskGroup) -> None:
        """Start the services of cards in mode ``mps``, and end those of other cards."""
        wanted = {uuid for uuid in self._cards if self._mode_of(uuid) == MPS}
        for uuid in self.services.keys() - wanted:
            self._scopes.pop(uuid).cancel()
            del self.services[uuid]
            self._site.metrics.mps_up.remove(uuid)
        for uuid in wanted - self.services.keys():
            service = self.services[uuid] = self._make_service(
                uuid,
                directory=Path(self._settings.mps_dir),
                control=self._settings.mps_control,
                clock=self._site.clock,
                on_restart=partial(self._restarted, uuid),
                check_s=self._settings.mps_check_s,
            )
            scope = self._scopes[uuid] = anyio.CancelScope()
            group.start_soon(self._serve, service, scope)
        for uuid, service in self.services.items():
            self._site.metrics.mps_up.labels(device=uuid).set(not service.problem)

    async def _serve(self, service: MpsService, scope: anyio.CancelScope) -> None:
        with scope:
            await self._site.supervisor.keep("MPS service", service.run)

    async def _restarted(self, uuid: str, reason: str) -> None:
        self._site.metrics.mps_restarts.labels(device=uuid).inc()
        message = (
            f"the Multi-Process Service of device {uuid} was restarted, which ends the programs of "
            f"all its containers: {reason}"
        )
        await self._record(self._clients_of(uuid), REASON_RESTART, message, "Warning")

    def _clients_of(self, uuid: str) -> list[Holder]:
        """Return the containers with shares of a card in mode ``mps``."""
        picture = self._picture
        return [
            holder
            for holder in holders_of(
                picture.entries_by_uid,
                picture.pods,
                picture.grants,
                picture.view.devices_by_uuid,
            )
            if holder.uuid == uuid
        ]

    async def _look_at_clients(self) -> None:
        """Report shared faults to new pods; end clients of pods that kubelet is about to kill."""
        holders_by_uuid = {uuid: self._clients_of(uuid) for uuid in self.services}
        self._warned &= {one.pod_uid for some in holders_by_uuid.values() for one in some}
        for uuid, holders in holders_by_uuid.items():
            await self._site.quarantine.run(
                "card",
                f"service of {uuid}",
                partial(self._look_at_service, self.services[uuid], holders),
                is_retried=False,
            )

    async def _look_at_service(self, service: MpsService, holders: Sequence[Holder]) -> None:
        message = (
            f"containers on device {service.uuid} share faults: a fatal error of one client of its "
            "Multi-Process Service ends the programs of all"
        )
        new = [holder for holder in holders if holder.pod_uid not in self._warned]
        if await self._record(new, REASON_FAULTS, message, "Normal"):
            self._warned |= {holder.pod_uid for holder in new}
        due_s = self._site.clock.now_s() + DRAIN_S
        ending = [
            pod
            for uid in {holder.pod_uid for holder in holders}
            if (pod := self._picture.pods.find(uid)) is not None
            and pod.killed_at_s is not None
            and pod.killed_at_s <= due_s
        ]
        if ending and not service.problem:
            await self._end_clients(service, ending)

    async def _end_clients(self, service: MpsService, pods: Collection[PodFacts]) -> None:
        try:
            pids = [pid for some in (await service.clients()).values() for pid in some]
            containers: dict[str, ContainerName] = {
                name: (pod.uid, container)
                for pod in pods
                for name, container in pod.container_by_id.items()
            }
            owners = await anyio.to_thread.run_sync(
                lambda: find_owners(
                    Path(self._site.settings.host_proc),
                    pids,
                    containers,
                    by=self._site.settings.usage.owners,
                )
            )
            uids = {pod.uid for pod in pods}
            own = [pid for pid, owner in owners.items() if owner.pod_uid in uids]
            ended = await service.terminate(own) if own else ()
        except DriverError as error:
            extra = {"device": service.uuid, "problem": str(error)}
            _log.warning("clients of the MPS service not ended", extra=extra)
        else:
            if ended:
                _log.info(
                    "clients of the MPS service ended",
                    extra={"device": service.uuid, "pids": list(ended)},
                )

    async def _record(
        self,
        holders: Iterable[Holder],
        reason: str,
        message: str,
        kind: Literal["Normal", "Warning"],
    ) -> bool:
        """Write an Event for each pod; return whether the API server was reached before."""
        recorder = self._events()
        if recorder is None:
            return False
        for one in {holder.pod_uid: holder for holder in holders}.values():
            pod = ObjectRef(kind="Pod", namespace=one.namespace, name=one.pod, uid=one.pod_uid)
            await recorder.record(pod, reason=reason, message=message, kind=kind)
        return True
