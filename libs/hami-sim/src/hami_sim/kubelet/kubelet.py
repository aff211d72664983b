# SPDX-License-Identifier: Apache-2.0
"""A simulated kubelet: one node, real sockets, real container processes.

`SimKubelet` is what tests hold; each start or restart of it is a `_Life`, which knows only what a
real kubelet knows after a start: its directory, the API server, and the processes it finds. Layout
below the node's directory::

    device-plugins/kubelet.sock, kubelet_internal_checkpoint     Registration, device manager
    plugins_registry/…  dra_manager_state                        DRA plugins, DRA manager
    pod-resources/kubelet.sock                                   PodResources
    pods/UID/volumes/…  pods/UID/containers/NAME/ATTEMPT/        volumes and container runs
    logs/NAMESPACE_POD_UID/NAME/ATTEMPT.log                      what containers print

Pods go through one loop, one at a time: each is added to the pod manager, then admitted (devices
first, then CPU, memory and count), then given to its worker. Rules: kubelet 1.34; of DRA, 1.37.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import zlib
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Final, Literal

import anyio
from anyio.abc import TaskGroup, TaskStatus
from msgspec.structs import replace

from hami_common.errors import HamiError, NotFound
from hami_common.runtime.clock import SystemClock
from hami_sim.kube import Access, Objects
from hami_sim.kubelet import draplugins
from hami_sim.kubelet.admission import Refusal, allocate_failed, check_fit
from hami_sim.kubelet.claims import ClaimError, ClaimManager
from hami_sim.kubelet.devices import DeviceError, DeviceManager
from hami_sim.kubelet.draplugins import DraPlugins, NodeSlices
from hami_sim.kubelet.environ import FieldError, NodeFacts
from hami_sim.kubelet.faults import Faults
from hami_sim.kubelet.httpapi import HttpApi
from hami_sim.kubelet.launcher import launcher, permits_namespaces
from hami_sim.kubelet.node import NodeKeeper
from hami_sim.kubelet.objects import (
    TERMINAL,
    Amounts,
    Obj,
    is_deleting,
    key_of,
    phase_of,
    pod_requests,
    uid_of,
)
from hami_sim.kubelet.plugins import Registration
from hami_sim.kubelet.podresources import PodResources, TokenBucket
from hami_sim.kubelet.podstatus import rejected_status
from hami_sim.kubelet.podworker import PodWorker
from hami_sim.kubelet.runtime import Container, Runtime, shims_below
from hami_sim.kubelet.settings import KubeletSettings
from hami_sim.kubelet.statuses import StatusManager
from hami_sim.kubelet.toolkit import Toolkit
from hami_sim.kubelet.volumes import decode_data, unmount_below

_LOG = logging.getLogger(__name__)
_CLOCK = SystemClock()
_END_S: Final = 5.0
_POLL_S: Final = 0.01
_RESOURCES: Final = {"configMap": "configmaps", "secret": "secrets"}

Operation = Literal["ADD", "UPDATE", "REMOVE", "SYNCED"]


class SimKubelet:
    """One node's kubelet. Its containers outlive `run`; `stop` ends them."""

    def __init__(
        self,
        node: str,
        root: Path,
        access: Access,
        settings: KubeletSettings | None = None,
    ) -> None:
        self.name = node
        self.directory = root.resolve() / node
        self.settings = settings or KubeletSettings()
        self.faults = Faults()
        self._access = access
        self._life: _Life | None = None
        self._scope: anyio.CancelScope | None = None
        self._is_restarting = False
        self._is_rebooting = False
        self._started = anyio.Event()

    @property
    def plugin_directory(self) -> Path:
        """Return where plugins put their sockets and find kubelet.sock."""
        return self.directory / "device-plugins"

    @property
    def plugins_registry(self) -> Path:
        """Return where plugins of DRA drivers put their registration sockets."""
        return self.directory / draplugins.DIRECTORY

    @property
    def pod_resources_socket(self) -> Path:
        """Return the PodResources socket."""
        return self.directory / "pod-resources" / "kubelet.sock"

    @property
    def url(self) -> str:
        """Return the address of kubelet's HTTP server while it runs."""
        return f"http://{self.settings.host}:{self._living().keeper.port}"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Be a kubelet until cancelled; reports started when the node is registered and listens."""
        while True:
            life = _Life(self.name, self.directory, self._access, self.settings, self.faults)
            life.is_after_reboot, self._is_rebooting = self._is_rebooting, False
            async with Objects(self._access, user_agent="kubelet") as client:
                with anyio.CancelScope() as self._scope:
                    async with anyio.create_task_group() as tasks:
                        await tasks.start(life.run, client)
                        self._life = life
                        self._is_restarting = False
                        self._started.set()
                        task_status.started()
                        task_status = anyio.TASK_STATUS_IGNORED
            self._life = None
            if not self._is_restarting:
                return
            if self._is_rebooting:
                await _kill_containers(self.directory)

    async def reboot(self) -> None:
        """End all containers at once and restart this kubelet, as after a power cut.

        Files stay, those in memory too; return when the new kubelet listens.
        """
        self._is_rebooting = True
        await self.restart()

    async def restart(self) -> None:
        """Restart this kubelet, not its containers; return when the new one listens."""
        if self._scope is None:
            msg = "the kubelet does not run"
            raise RuntimeError(msg)
        self._started = anyio.Event()
        self._is_restarting = True
        self._scope.cancel()
        await self._started.wait()

    async def stop(self) -> None:
        """End all containers of this node, also of earlier kubelets, and remove its directory."""
        await clean_up(self.directory)

    # -- looking inside

    def _living(self) -> _Life:
        if self._life is None:
            msg = "the kubelet does not run"
            raise RuntimeError(msg)
        return self._life

    def logs(self, pod: str, container: str, *, namespace: str = "default") -> str:
        """Return what the newest run of a container has printed."""
        paths = self._living().log_paths(namespace, pod, container)
        return paths[-1].read_text(errors="replace") if paths else ""

    def containers(self, pod: str, *, namespace: str = "default") -> dict[str, Container]:
        """Return the newest run of each container of a pod."""
        worker = self._living().find_worker(namespace, pod)
        return {c.name: c for c in worker.containers()} if worker is not None else {}

    def volume_path(self, pod: str, volume: str, *, namespace: str = "default") -> Path:
        """Return where a pod's volume lies on the host."""
        worker = self._living().find_worker(namespace, pod)
        if worker is None:
            msg = f"pod {namespace}/{pod} is not on node {self.name}"
            raise LookupError(msg)
        return worker.volume_path(volume)

    @property
    def devices(self) -> DeviceManager:
        """Return the device manager."""
        return self._living().devices

    async def drop_plugin(self, resource: str) -> None:
        """Lose the connection to a resource's plugin, as if its process had died."""
        await self._living().registration.drop(resource)


@asynccontextmanager
async def run_kubelet(
    node: str, root: Path, access: Access, settings: KubeletSettings | None = None
) -> AsyncIterator[SimKubelet]:
    """Run a kubelet for the time of the block; at its end every container ends too.

    So they do when this process is killed, unless the settings name another owner.
    """
    chosen = settings or KubeletSettings()
    if chosen.owner_pid == 0:
        chosen = replace(chosen, owner_pid=os.getpid())
    kubelet = SimKubelet(node, root, access, chosen)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            yield kubelet
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await kubelet.stop()


async def clean_up(directory: Path) -> None:
    """End all containers below a directory, regardless of owner, and remove the directory."""
    await _kill_containers(directory)
    await unmount_below(directory)
    shutil.rmtree(directory, ignore_errors=True)


async def _kill_containers(directory: Path) -> None:
    shims = shims_below(directory)
    for pid in shims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with anyio.move_on_after(_END_S):
        while shims_below(directory):
            await anyio.sleep(_POLL_S)
    for pid in shims:
        _collect(pid)


def _collect(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


class _Life:
    """A kubelet from its start to its end."""

    def __init__(
        self,
        name: str,
        directory: Path,
        access: Access,
        settings: KubeletSettings,
        faults: Faults,
    ) -> None:
        self.name = name
        self.settings = settings
        self.now_s = _CLOCK.now_s
        self.monotonic_s = _CLOCK.monotonic_s
        self.directory = directory
        self.faults = faults
        self.pods: dict[str, Obj] = {}
        """The pod manager: every pod of this node that is known, by UID."""
        self.workers: dict[str, PodWorker] = {}
        self.is_after_reboot = False
        """The sandboxes of pods are lost; their containers have ended."""
        self._access = access
        self._requests: dict[str, Amounts] = {}
        self._refused: set[str] = set()
        self._seen: dict[str, Obj] = {}
        self._queue: deque[tuple[Operation, Obj]] = deque()
        self._arrived = anyio.Event()
        self._found: dict[str, list[Container]] = {}
        self._address_count = 0

    async def run(
        self, client: Objects, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Start everything in kubelet's order and go on until cancelled."""
        settings = self.settings
        self.client = client
        uses_namespaces = settings.namespaces
        if uses_namespaces is None:
            uses_namespaces = await anyio.to_thread.run_sync(permits_namespaces)
        await anyio.to_thread.run_sync(launcher)
        plugins = self.directory / "device-plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        self.runtime = Runtime(
            self.directory,
            uses_namespaces=uses_namespaces,
            owner_pid=settings.owner_pid,
            host_paths=settings.host_paths,
            toolkit=Toolkit(self.name, settings.driver) if settings.driver else None,
            now_s=self.now_s,
        )
        self.devices = DeviceManager(
            plugins,
            active_pods=self.active_pods,
            now_s=self.monotonic_s,
            grace_s=settings.plugin_grace_s,
            seed=settings.seed,
        )
        self.dra_plugins = DraPlugins(
            self.directory / draplugins.DIRECTORY,
            slices=NodeSlices(client, self.name),
            wipe_after_s=settings.slices_wipe_s,
        )
        self.claims = ClaimManager(
            self.directory,
            fetch=self._fetch_claim,
            find_driver=self.dra_plugins.find,
            now_s=self.monotonic_s,
        )
        self.statuses = StatusManager(client, node=self.name, now_s=self.now_s)
        self.keeper = NodeKeeper(client, settings, self.devices, name=self.name, now_s=self.now_s)
        self.devices.on_change = self.keeper.note_change
        self.http = HttpApi(self, host=settings.host)
        self.pod_resources = PodResources(
            self.directory / "pod-resources",
            self.devices,
            self.claims,
            active_pods=self.active_pods,
            bucket=TokenBucket(
                settings.pod_resources_per_s, settings.pod_resources_burst, now_s=self.monotonic_s
            ),
        )
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self.registration = Registration(
                plugins, self.devices, tasks, prestart_timeout_s=settings.prestart_timeout_s
            )
            try:
                await self._start(tasks)
                task_status.started()
                await anyio.sleep_forever()
            finally:
                self.statuses.close()
                with anyio.CancelScope(shield=True):
                    await self.registration.stop()
                    await self.pod_resources.stop()
                    await self.http.stop()

    async def _start(self, tasks: TaskGroup) -> None:
        for container in await self.runtime.recover():
            self._found.setdefault(container.uid, []).append(container)
        self.devices.read_checkpoint()
        self.claims.read_checkpoint()
        self.devices.running_at_start = frozenset(
            (uid, container.name)
            for uid, containers in self._found.items()
            for container in containers
            if container.running
        )
        self.keeper.port = await self.http.start()
        await self.keeper.register()
        await self.keeper.report()
        await self.statuses.run(tasks, events=self.settings.events)
        await self.registration.start()
        await self.pod_resources.start()
        tasks.start_soon(self.keeper.keep_status, name="node status")
        tasks.start_soon(self.keeper.keep_lease, name="node lease")
        tasks.start_soon(self.keeper.watch, name="node labels")
        tasks.start_soon(self.dra_plugins.run, self.claims, self._wake, name="DRA plugins")
        tasks.start_soon(self._sync_claims, name="claims")
        tasks.start_soon(self._watch_pods, name="pod source")
        tasks.start_soon(self._loop, name="sync loop")
        tasks.start_soon(self._refresh, name="volume refresh")
        tasks.start_soon(self._evict, name="eviction")

    # -- what others ask

    def facts(self) -> NodeFacts:
        """Return the facts of the node that downward-API fields can expose."""
        return self.keeper.facts()

    def all_pods(self) -> Collection[Obj]:
        """List the pods in the pod manager."""
        return list(self.pods.values())

    def active_pods(self) -> Collection[Obj]:
        """List the pods that have, or may come to have, running containers."""
        return [pod for uid, pod in self.pods.items() if self._is_active(uid, pod)]

    def _is_active(self, uid: str, pod: Obj) -> bool:
        worker = self.workers.get(uid)
        if worker is not None and worker.is_terminated:
            return False
        is_final = phase_of(pod) in TERMINAL or self.statuses.is_terminal(uid)
        return not is_final or (worker is not None and worker.is_terminating)

    def find_worker(self, namespace: str, name: str) -> PodWorker | None:
        """Find the newest worker of a pod by name."""
        found = [w for w in self.workers.values() if key_of(w.pod) == (namespace, name)]
        return found[-1] if found else None

    def log_paths(self, namespace: str, name: str, container: str) -> list[Path]:
        """List the logs of a container's kept runs, oldest first."""
        uids = [uid for uid, pod in self.pods.items() if key_of(pod) == (namespace, name)]
        return self.runtime.log_paths(namespace, name, uids[-1], container) if uids else []

    async def fetch(self, kind: str, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """Read a ConfigMap or Secret."""
        try:
            obj = await self.client.get(_RESOURCES[kind], name, namespace)
        except NotFound:
            return None
        except HamiError as error:
            raise FieldError(f"failed to read {kind.lower()} {name}: {error}") from error
        return decode_data(obj, is_secret=kind == "secret")

    async def _fetch_claim(self, namespace: str, name: str) -> Obj:
        try:
            return await self.client.get("resourceclaims.resource.k8s.io", name, namespace)
        except NotFound as error:
            text = f'resourceclaims.resource.k8s.io "{name}" not found'
            raise ClaimError(f"fetch ResourceClaim {name}: {text}") from error
        except HamiError as error:
            raise ClaimError(f"fetch ResourceClaim {name}: {error}") from error

    async def issue_token(self, pod: Obj, account: str, audience: str, length_s: int) -> bytes:
        """Ask the API server for a service account token that is good while the pod exists."""
        namespace, name = key_of(pod)
        bound = {"kind": "Pod", "apiVersion": "v1", "name": name, "uid": uid_of(pod)}
        spec: Obj = {
            "expirationSeconds": length_s,
            "audiences": [audience] if audience else [],
            "boundObjectRef": bound,
        }
        request: Obj = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": spec,
        }
        try:
            answer = await self.client.act("serviceaccounts", account, "token", request, namespace)
        except HamiError as error:
            raise FieldError(f"failed to fetch token: {error}") from error
        return str(answer["status"]["token"]).encode()

    # -- the pods of this node, from the API server

    async def _watch_pods(self) -> None:
        first: dict[str, Obj] | None = {}

        def seen(old: Obj | None, new: Obj | None) -> None:
            if first is not None and old is not None:
                first.pop(uid_of(old), None)
            if first is not None and new is not None:
                first[uid_of(new)] = new
            elif new is not None:
                self._take(new)
            elif old is not None:
                self._take_gone(old)

        def synced() -> None:
            nonlocal first
            if first is None:
                return
            pods, first = first.values(), None
            for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
                self._take(pod)
            self._push("SYNCED", {})

        selector = f"spec.nodeName={self.name}"
        await self.client.follow("pods", seen, field_selector=selector, synced=synced)

    def _take(self, pod: Obj) -> None:
        is_new = uid_of(pod) not in self._seen
        self._seen[uid_of(pod)] = pod
        self._push("ADD" if is_new else "UPDATE", pod)

    def _take_gone(self, pod: Obj) -> None:
        if self._seen.pop(uid_of(pod), None) is not None:
            self._push("REMOVE", pod)

    def _push(self, operation: Operation, pod: Obj) -> None:
        self._queue.append((operation, pod))
        self._arrived.set()

    # -- the sync loop: one change after the other

    async def _loop(self) -> None:
        while True:
            if not self._queue:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            await self.faults.before_admission()
            index = self.faults.choose(list(self._queue))
            operation, pod = self._queue[index]
            del self._queue[index]
            if operation == "ADD":
                await self._add(pod)
            elif operation == "UPDATE":
                self._update(pod)
            elif operation == "REMOVE":
                self._remove(pod)
            else:
                self.devices.is_synced = True
                await self._remove_orphans()

    async def _add(self, pod: Obj) -> None:
        uid = uid_of(pod)
        self.pods[uid] = pod
        self._requests[uid] = pod_requests(pod)
        if phase_of(pod) in TERMINAL:
            self._refused.add(uid)
            self._delete_refused(pod)
            return
        refusal = await self._admit(pod)
        if refusal is not None:
            self._refuse(pod, refusal)
            return
        worker = PodWorker(pod, self, pod_ip=self._next_address())
        for container in self._found.pop(uid, []):
            worker.adopt(container, has_sandbox=not self.is_after_reboot)
        self.workers[uid] = worker
        self._tasks.start_soon(worker.run, name=f"pod {'/'.join(key_of(pod))}")

    async def _admit(self, pod: Obj) -> Refusal | None:
        refusal = self.faults.refusal(pod, "before")
        if refusal is not None:
            return refusal
        try:
            await self.devices.allocate_pod(pod)
        except DeviceError as error:
            return allocate_failed(str(error))
        return self.faults.refusal(pod, "after") or self._check_fit(pod)

    def _check_fit(self, pod: Obj) -> Refusal | None:
        uid = uid_of(pod)
        allocatable = self.keeper.allocatable()
        if self.devices.has_pod(uid):
            for resource, count in self.devices.allocated_counts().items():
                allocatable[resource] = max(allocatable.get(resource, Decimal(0)), Decimal(count))
        return check_fit(
            pod,
            self._requests[uid],
            node=self.keeper.node,
            allocatable=allocatable,
            others=[
                self._requests[other]
                for other, candidate in self.pods.items()
                if other != uid and self._is_active(other, candidate)
            ],
        )

    def _refuse(self, pod: Obj, refusal: Refusal) -> None:
        _LOG.info(
            "pod refused",
            extra={"pod": "/".join(key_of(pod)), "reason": refusal.reason, "text": refusal.message},
        )
        self._refused.add(uid_of(pod))
        self.statuses.event(pod, refusal.reason, refusal.message, is_warning=True)
        status = rejected_status(
            pod, reason=refusal.reason, message=refusal.message, now_s=self.now_s()
        )
        self.statuses.set(pod, status)
        self._delete_refused(pod)

    def _delete_refused(self, pod: Obj) -> None:
        """Remove the object of a pod that never ran, or has ended, once that is asked for."""
        if is_deleting(pod):
            self._tasks.start_soon(self.statuses.delete, pod, name="pod deletion")

    def _update(self, pod: Obj) -> None:
        uid = uid_of(pod)
        if uid not in self.pods:
            return
        was_deleting = is_deleting(self.pods[uid])
        self.pods[uid] = pod
        worker = self.workers.get(uid)
        if worker is not None:
            worker.update(pod)
        elif uid in self._refused and not was_deleting:
            self._delete_refused(pod)

    def _remove(self, pod: Obj) -> None:
        """The object is gone: whatever still runs has to go too."""
        uid = uid_of(pod)
        self.pods.pop(uid, None)
        self._refused.discard(uid)
        worker = self.workers.get(uid)
        if worker is None:
            self._forget(uid)
            return
        gone = {**pod, "metadata": {**pod["metadata"]}}
        gone["metadata"].setdefault("deletionTimestamp", "1970-01-01T00:00:00Z")
        worker.update(gone)
        self._tasks.start_soon(self._await_end, worker, name="pod removal")

    async def _await_end(self, worker: PodWorker) -> None:
        await worker.wait_terminated()
        self.workers.pop(worker.uid, None)
        self._forget(worker.uid)

    def _forget(self, uid: str) -> None:
        self._requests.pop(uid, None)
        self.statuses.forget(uid)
        self._tasks.start_soon(self._remove_directory, uid, name="pod removal")

    async def _remove_directory(self, uid: str) -> None:
        await unmount_below(self.runtime.pod_directory(uid))
        await anyio.to_thread.run_sync(self.runtime.remove_pod, uid)

    async def _remove_orphans(self) -> None:
        """End what an earlier kubelet started for pods that are no more."""
        for uid, containers in self._found.items():
            for container in containers:
                self.runtime.kill(container)
            for container in containers:
                if container.running:
                    await self.runtime.wait(container)
            if uid not in self.pods:
                await self._remove_directory(uid)
        self._found.clear()
        pods = self.directory / "pods"
        for directory in pods.iterdir() if pods.exists() else ():
            if directory.name not in self.pods:
                await self._remove_directory(directory.name)

    async def _refresh(self) -> None:
        while True:
            await anyio.sleep(self.settings.sync_s)
            for worker in list(self.workers.values()):
                await worker.refresh_volumes()

    async def _sync_claims(self) -> None:
        """Unprepare claims of pods that vanished while no worker had them; show aged health."""
        while True:
            await anyio.sleep(self.settings.claims_sync_s)
            if not self.devices.is_synced:
                continue
            active = {uid_of(pod) for pod in self.active_pods()}
            for uid in self.claims.inactive_pods(active):
                try:
                    await self.claims.unprepare(uid)
                except ClaimError as error:
                    _LOG.info("claims not unprepared", extra={"pod": uid, "error": str(error)})
            for uid in active:
                if self.claims.has_pod(uid):
                    self._wake(uid)

    def _wake(self, uid: str) -> None:
        if (worker := self.workers.get(uid)) is not None:
            worker.wake()

    async def _evict(self) -> None:
        while True:
            await anyio.sleep(self.settings.eviction_s)
            for worker in list(self.workers.values()):
                worker.evict_if_full()

    def _next_address(self) -> str:
        self._address_count += 1
        subnet = zlib.crc32(self.name.encode()) % 256
        return f"10.{subnet}.{self._address_count >> 8 & 255}.{self._address_count & 255}"
