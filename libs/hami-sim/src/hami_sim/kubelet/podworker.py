# SPDX-License-Identifier: Apache-2.0
"""Brings one admitted pod to life and to its end; kubelet's pod worker.

States: syncing (claims are prepared; then containers are started and restarted as the spec says) →
terminating (deleted, or finished for good: containers are asked to end, then made to; claims are
unprepared) → terminated (status final, volumes gone, object deleted if that was asked). The pod's
changes, container exits and timers all only wake the worker, which then looks at everything again.

Not simulated: probes (a running container is ready), lifecycle hooks, image pulls, resize. Times:
Unix seconds for what is shown, monotonic seconds for waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct

from hami_sim.kubelet.cdi import CdiError, Edits, resolve
from hami_sim.kubelet.claims import ClaimError, ClaimManager
from hami_sim.kubelet.devices import DeviceError, DeviceManager
from hami_sim.kubelet.environ import (
    FieldError,
    NodeFacts,
    Sources,
    command_line,
    environment,
    referenced,
)
from hami_sim.kubelet.objects import (
    TERMINAL,
    Obj,
    all_containers,
    app_containers,
    init_containers,
    is_deleting,
    is_sidecar,
    key_of,
    phase_of,
    restart_policy,
    uid_of,
)
from hami_sim.kubelet.plan import Mount, Plan
from hami_sim.kubelet.podstatus import (
    ContainerFacts,
    Ended,
    PodFacts,
    pod_status,
    should_restart,
    start_time_s,
)
from hami_sim.kubelet.runtime import Container, Runtime, StartFailed
from hami_sim.kubelet.settings import LIMITS_COMMAND, KubeletSettings
from hami_sim.kubelet.statuses import StatusManager
from hami_sim.kubelet.volumes import VolumeError, Volumes

_LOG = logging.getLogger(__name__)
_GRACE_S = 30.0
_GRACE_MIN_S = 1.0
_SIDECAR_GRACE_S = 2.0
_ATTEMPTS_KEPT = 2
_HOST_NAME_MAX = 63


class Node(Protocol):
    """Interface of the kubelet that a worker uses."""

    name: str
    settings: KubeletSettings
    runtime: Runtime
    devices: DeviceManager
    claims: ClaimManager
    statuses: StatusManager
    now_s: Callable[[], float]
    monotonic_s: Callable[[], float]

    async def fetch(self, kind: str, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """Read a ConfigMap or Secret."""
        ...

    async def issue_token(self, pod: Obj, account: str, audience: str, length_s: int) -> bytes:
        """Get a service account token that is bound to the pod."""
        ...

    def facts(self) -> NodeFacts:
        """Return the facts of the node that downward-API fields can expose."""
        ...


class _Slot:
    """One container of the pod through all its runs."""

    def __init__(self, spec: Obj) -> None:
        self.spec = spec
        self.current: Container | None = None
        self.previous: Ended | None = None
        self.attempts = 0
        self.backoff_s = 0.0
        self.not_before_s = 0.0
        self.waiting: tuple[str, str] = ("", "")

    @property
    def is_running(self) -> bool:
        return self.current is not None and self.current.ended is None

    @property
    def ended(self) -> Ended | None:
        return self.current.ended if self.current is not None else None

    def facts(self, resources: Sequence[Obj]) -> ContainerFacts:
        return ContainerFacts(
            resources=resources,
            running=self.current.running if self.current else None,
            ended=self.ended if not self.waiting[0] else None,
            previous=(self.ended or self.previous) if self.waiting[0] else self.previous,
            restart_count=max(0, self.attempts - 1),
            waiting_reason=self.waiting[0],
            waiting_message=self.waiting[1],
        )


class _Failure(Struct, frozen=True):
    """A reason that ends the pod whatever its containers say."""

    reason: str
    message: str


class PodWorker:
    """One pod on this node, from its admission on."""

    def __init__(self, pod: Obj, node: Node, *, pod_ip: str) -> None:
        self.pod = pod
        self.uid = uid_of(pod)
        self.is_terminating = False
        self.is_terminated = False
        self._node = node
        self._pod_ip = pod_ip
        self._slots = {c["name"]: _Slot(c) for c in all_containers(pod)}
        self._volumes = Volumes(
            node.runtime.pod_directory(self.uid) / "volumes",
            facts=node.facts,
            fetch=node.fetch,
            issue_token=node.issue_token,
            now_s=node.now_s,
            mounts_tmpfs=node.settings.mounts_tmpfs,
        )
        self._has_volumes = False
        self._shown: Obj | None = None
        """The version of the pod that the volumes show."""
        self._has_sandbox = False
        self._start_s = start_time_s(pod) or node.now_s()
        self._wake = anyio.Event()
        self._failure: _Failure | None = None
        self._terminated = anyio.Event()
        self._tasks: TaskGroup | None = None

    # -- from outside

    def adopt(self, container: Container, *, has_sandbox: bool) -> None:
        """Take over a run that an earlier kubelet started; a reboot ends the pod's sandbox."""
        slot = self._slots.get(container.name)
        if slot is None:
            return
        if slot.current is not None and slot.current.attempt < container.attempt:
            slot.previous = slot.current.ended
        if slot.current is None or slot.current.attempt < container.attempt:
            slot.current = container
            slot.attempts = container.attempt + 1
        self._has_sandbox = has_sandbox

    def update(self, pod: Obj) -> None:
        """Take a newer version of the pod."""
        self.pod = pod
        self.wake()

    def wake(self) -> None:
        """Make the worker look again."""
        self._wake.set()

    async def wait_terminated(self) -> None:
        """Return when nothing of the pod runs any more."""
        await self._terminated.wait()

    def containers(self) -> list[Container]:
        """List the newest run of each container."""
        return [slot.current for slot in self._slots.values() if slot.current is not None]

    def volume_path(self, name: str) -> Path:
        """Return where a volume lies on the host."""
        return self._volumes.path_of(self.pod, name)

    async def refresh_volumes(self) -> None:
        """Bring projected volumes up to date with the pod and the API."""
        if self._has_volumes and not self.is_terminating:
            self._shown = self.pod
            try:
                await self._volumes.refresh(self.pod)
            except (FieldError, VolumeError, ValueError, OSError) as error:
                _LOG.info("volume not refreshed", extra={"pod": self.uid, "error": str(error)})

    def evict_if_full(self) -> None:
        """End the pod when an emptyDir holds more than its sizeLimit."""
        if not self._has_volumes or self.is_terminating:
            return
        full = self._volumes.overfull(self.pod)
        if full is not None:
            self._failure = _Failure("Evicted", full)
            self._node.statuses.event(self.pod, "Evicted", full, is_warning=True)
            self.wake()

    # -- life

    async def run(self) -> None:
        """Live until the pod is gone or terminated for good."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for slot in self._slots.values():
                if slot.is_running and slot.current is not None:
                    tasks.start_soon(self._follow, slot, slot.current)
            while not self._must_end():
                self._wake = anyio.Event()
                delay_s = await self._sync()
                if self._must_end():
                    break
                self._report()
                with anyio.move_on_after(delay_s):
                    await self._wake.wait()
            self.is_terminating = True
            await self._terminate()
            self.is_terminated = True
            tasks.cancel_scope.cancel()
        await self._finish()
        self._terminated.set()
        while not is_deleting(self.pod):
            self._wake = anyio.Event()
            await self._wake.wait()
        await self._node.statuses.delete(self.pod)

    def _must_end(self) -> bool:
        if is_deleting(self.pod) or phase_of(self.pod) in TERMINAL or self._failure is not None:
            return True
        deadline_s = self.pod["spec"].get("activeDeadlineSeconds")
        if deadline_s is not None and self._node.now_s() - self._start_s >= deadline_s:
            self._failure = _Failure(
                "DeadlineExceeded", "Pod was active on the node longer than the specified deadline"
            )
            return True
        return self._is_done() or self._status()["phase"] in TERMINAL

    def _is_done(self) -> bool:
        """Return true if all application containers have ended for good; sidecars then end too."""
        apps = [self._slots[container["name"]] for container in app_containers(self.pod)]
        policy = restart_policy(self.pod)
        return all(
            slot.ended is not None and not should_restart(policy, slot.ended.exit_code)
            for slot in apps
        )

    async def _sync(self) -> float | None:
        """Start what is due; returns the seconds after which to look again, None: when woken."""
        deadline_s = self.pod["spec"].get("activeDeadlineSeconds")
        latest_s = None
        if deadline_s is not None:
            latest_s = max(0.0, deadline_s - (self._node.now_s() - self._start_s))
        if not self._has_volumes:
            try:
                await self._volumes.set_up(self.pod)
            except VolumeError as error:
                self._node.statuses.event(self.pod, "FailedMount", str(error), is_warning=True)
                return self._node.settings.retry_s
            self._has_volumes = True
            self._shown = self.pod
        elif self._shown is not self.pod:
            await self.refresh_volumes()
        if not self._has_sandbox and not await self._prepare_claims():
            return self._node.settings.retry_s
        self._has_sandbox = True
        due_s = [latest_s] if latest_s is not None else []
        for slot in self._due():
            wait_s = slot.not_before_s - self._node.monotonic_s()
            if wait_s > 0:
                due_s.append(wait_s)
                continue
            if self._must_end_early():
                break
            await self._start(slot)
            if not slot.is_running:
                due_s.append(max(0.0, slot.not_before_s - self._node.monotonic_s()))
            elif is_sidecar(slot.spec):
                due_s.append(0.0)  # the next container may start now
        return min(due_s, default=None)

    async def _prepare_claims(self) -> bool:
        """Prepare the pod's claims, as kubelet does for each sandbox; False: try again later."""
        try:
            await self._node.claims.prepare(self.pod)
        except ClaimError as error:
            self._node.statuses.event(
                self.pod,
                "FailedPrepareDynamicResources",
                f"Failed to prepare dynamic resources: {error}",
                is_warning=True,
            )
            return False
        return True

    def _must_end_early(self) -> bool:
        return is_deleting(self.pod)

    def _due(self) -> list[_Slot]:
        """List the containers to start now, or once their backoff is over."""
        apps = [self._slots[c["name"]] for c in app_containers(self.pod)]
        have_begun = any(slot.current is not None for slot in apps)
        due: list[_Slot] = []
        for spec in init_containers(self.pod):
            slot = self._slots[spec["name"]]
            if slot.is_running:
                if is_sidecar(spec):
                    continue
                return due
            if is_sidecar(spec):
                due.append(slot)
                if not have_begun:
                    return due
            elif not have_begun and (slot.ended is None or slot.ended.exit_code != 0):
                if slot.ended is not None and restart_policy(self.pod) == "Never":
                    return due
                return [*due, slot]
        for slot in apps:
            ended = slot.ended
            if slot.is_running:
                continue
            if ended is None or should_restart(restart_policy(self.pod), ended.exit_code):
                due.append(slot)
        return due

    async def _start(self, slot: _Slot) -> None:
        name = slot.spec["name"]
        try:
            plan = await self._plan(slot.spec)
            container = await self._node.runtime.start(plan, slot.attempts)
        except StartFailed as error:
            self._postpone(slot, error.reason, error.message)
            return
        except (ClaimError, DeviceError, FieldError, VolumeError) as error:
            self._postpone(slot, "CreateContainerConfigError", str(error))
            return
        except OSError as error:
            self._postpone(slot, "CreateContainerError", str(error))
            return
        slot.previous = slot.ended or slot.previous
        slot.current = container
        slot.attempts += 1
        slot.waiting = ("", "")
        self._node.runtime.forget_attempts(container, keep=_ATTEMPTS_KEPT)
        if container.ended is not None:
            self._node.statuses.event(
                self.pod, "Failed", f"Error: {container.ended.message}", is_warning=True
            )
            self._note_end(slot)
            return
        self._node.statuses.event(self.pod, "Started", f"Started container {name}")
        if self._tasks is not None:
            self._tasks.start_soon(self._follow, slot, container, name=f"container {name}")

    def _postpone(self, slot: _Slot, reason: str, message: str) -> None:
        if slot.waiting != (reason, message):
            self._node.statuses.event(self.pod, "Failed", f"Error: {message}", is_warning=True)
        slot.waiting = (reason, message)
        slot.not_before_s = self._node.monotonic_s() + self._node.settings.retry_s

    async def _follow(self, slot: _Slot, container: Container) -> None:
        await self._node.runtime.wait(container)
        self._note_end(slot)
        self.wake()

    def _note_end(self, slot: _Slot) -> None:
        """Set when an ended container may run again, and what it shows until then."""
        ended = slot.ended
        if ended is None or self.is_terminating:
            return
        spec = slot.spec
        restarts = is_sidecar(spec) or should_restart(restart_policy(self.pod), ended.exit_code)
        is_plain_init = spec in init_containers(self.pod) and not is_sidecar(spec)
        if is_plain_init:
            restarts = ended.exit_code != 0 and restart_policy(self.pod) != "Never"
        if not restarts:
            return
        settings = self._node.settings
        ran_s = ended.finished_s - ended.started_s
        if ran_s > 2 * settings.backoff_max_s:
            slot.backoff_s = 0.0
        wait_s, slot.backoff_s = (
            slot.backoff_s,
            min(max(settings.backoff_s, 2 * slot.backoff_s), settings.backoff_max_s),
        )
        slot.not_before_s = self._node.monotonic_s() + wait_s
        if wait_s > 0:
            name = spec["name"]
            namespace, pod = key_of(self.pod)
            message = (
                f"back-off {wait_s:g}s restarting failed container={name} "
                f"pod={pod}_{namespace}({self.uid})"
            )
            slot.waiting = ("CrashLoopBackOff", message)
            self._node.statuses.event(self.pod, "BackOff", message, is_warning=True)

    # -- what a container is started with

    def _host_path(self, source: str) -> Path:
        """Return the path that a plugin mounts, or a stand-in if the settings simulate it."""
        path = Path(source)
        pretended = self._node.settings.pretended_paths
        if not path.exists() and any(path.is_relative_to(prefix) for prefix in pretended):
            path = self._node.runtime.pretended(source)
        return path

    async def _plan(self, spec: Obj) -> Plan:
        node, pod = self._node, self.pod
        options = await node.devices.run_options(pod, spec)
        edits = self._cdi_edits((*node.claims.cdi_devices(pod, spec), *options.cdi_devices))
        env = environment(
            pod,
            spec,
            plugin_envs=options.envs,
            sources=await self._sources(spec),
            pod_ip=self._pod_ip,
            facts=node.facts(),
        )
        env |= edits.envs
        image = str(spec.get("image", "")).partition("@")[0]
        entrypoint = node.settings.commands.get(image) or node.settings.commands.get(
            image.rpartition(":")[0] or image, ()
        )
        mounts = [
            Mount(source=self._host_path(source), target=target, is_readonly=is_readonly)
            for target, source, is_readonly in (*options.mounts, *edits.mounts)
        ]
        mounts += [self._mount(mount, env) for mount in spec.get("volumeMounts") or []]
        mounts.sort(key=lambda mount: len(Path(mount.target).parts))
        security = {
            **(pod["spec"].get("securityContext") or {}),
            **(spec.get("securityContext") or {}),
        }
        namespace, name = key_of(pod)
        return Plan(
            uid=self.uid,
            namespace=namespace,
            pod=name,
            name=spec["name"],
            argv=command_line(spec, env, entrypoint=entrypoint, fallback=LIMITS_COMMAND),
            env=env,
            mounts=mounts,
            devices=(*options.devices, *edits.devices),
            cwd=spec.get("workingDir") or "/",
            hostname=(pod["spec"].get("hostname") or name)[:_HOST_NAME_MAX],
            user=int(security.get("runAsUser") or 0),
            group=int(security.get("runAsGroup") or 0),
            groups=[
                *(security.get("supplementalGroups") or []),
                *([security["fsGroup"]] if "fsGroup" in security else []),
            ],
            is_privileged=bool(security.get("privileged")),
            shares_pids=bool(pod["spec"].get("hostPID")),
        )

    def _cdi_edits(self, names: Sequence[str]) -> Edits:
        """Resolve CDI names; their variables win over all others, as a runtime adds them last."""
        try:
            return resolve(names, map(Path, self._node.settings.cdi_directories))
        except CdiError as error:
            raise StartFailed("CreateContainerError", str(error)) from error

    def _mount(self, mount: Obj, env: Mapping[str, str]) -> Mount:
        source = self._volumes.path_of(self.pod, mount["name"])
        inner = mount.get("subPath") or ""
        if mount.get("subPathExpr"):
            inner = command_line({"command": [mount["subPathExpr"]]}, env, fallback=())[0]
        if inner:
            if inner.startswith("/") or ".." in Path(inner).parts:
                raise StartFailed("CreateContainerConfigError", f"invalid subPath {inner!r}")
            source /= inner
            if not source.exists():
                source.mkdir(parents=True)
            source = source.resolve()
        volume = next(v for v in self.pod["spec"]["volumes"] if v["name"] == mount["name"])
        is_managed = any(k in volume for k in ("downwardAPI", "configMap", "secret", "projected"))
        return Mount(
            source=source,
            target=mount["mountPath"],
            is_readonly=bool(mount.get("readOnly")) or is_managed,
        )

    async def _sources(self, spec: Obj) -> Sources:
        namespace = key_of(self.pod)[0]
        config_maps, secrets = referenced(spec)

        async def texts(kind: str, name: str) -> Mapping[str, str] | None:
            data = await self._node.fetch(kind, namespace, name)
            if data is None:
                return None
            return {key: value.decode(errors="surrogateescape") for key, value in data.items()}

        return Sources(
            config_maps={name: await texts("configMap", name) for name in config_maps},
            secrets={name: await texts("secret", name) for name in secrets},
        )

    # -- the end

    async def _terminate(self) -> None:
        """End all containers: first the applications, then the sidecars in reverse order."""
        for slot in self._slots.values():
            slot.waiting = ("", "")
        self._report()
        sidecars = [
            self._slots[c["name"]] for c in reversed(init_containers(self.pod)) if is_sidecar(c)
        ]
        others = [slot for slot in self._slots.values() if slot not in sidecars]
        begin_s = self._node.monotonic_s()
        await self._end(others, begin_s, least_s=0.0)
        for slot in sidecars:
            await self._end([slot], begin_s, least_s=_SIDECAR_GRACE_S)
        await self._unprepare_claims()

    async def _unprepare_claims(self) -> None:
        """Unprepare the pod's claims before its status becomes final; retries until it is done."""
        while True:
            try:
                await self._node.claims.unprepare(self.uid)
            except ClaimError as error:
                _LOG.info("claims not unprepared", extra={"pod": self.uid, "error": str(error)})
                await anyio.sleep(self._node.settings.retry_s)
            else:
                return

    async def _end(self, slots: list[_Slot], begin_s: float, *, least_s: float) -> None:
        running = [slot for slot in slots if slot.is_running]
        least_until_s = self._node.monotonic_s() + least_s
        for slot in running:
            if slot.current is not None:
                self._node.statuses.event(
                    self.pod, "Killing", f"Stopping container {slot.spec['name']}"
                )
                self._node.runtime.terminate(slot.current)
        was_killed = False
        while any(slot.is_running for slot in running):
            self._wake = anyio.Event()
            left_s = max(begin_s + self._grace_s(), least_until_s) - self._node.monotonic_s()
            if left_s <= 0 and not was_killed:
                was_killed = True
                for slot in running:
                    if slot.current is not None:
                        self._node.runtime.kill(slot.current)
            with anyio.move_on_after(left_s if not was_killed else None):
                await self._wake.wait()

    def _grace_s(self) -> float:
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        grace = metadata.get(
            "deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds")
        )
        return max(_GRACE_MIN_S, float(grace if grace is not None else _GRACE_S))

    async def _finish(self) -> None:
        """Remove the volumes and say the last word."""
        await self._volumes.tear_down()
        self._has_volumes = False
        self._report()

    # -- status

    def _status(self) -> Obj:
        resources = self._node.claims.allocated_resources(self.pod)
        facts = PodFacts(
            containers={
                name: slot.facts(resources.get(name, ())) for name, slot in self._slots.items()
            },
            has_sandbox=self._has_sandbox,
            host_ip=self._node.facts().host_ip,
            pod_ip=self._pod_ip,
            start_s=self._start_s,
            now_s=self._node.now_s(),
            is_terminal=self.is_terminated,
            message=""
            if self._node.runtime.uses_namespaces
            else "simulated without namespaces: not permitted on this machine",
        )
        status = pod_status(self.pod, facts)
        if self._failure is not None:
            status |= {"reason": self._failure.reason, "message": self._failure.message}
            status["phase"] = "Failed"
        api_phase = phase_of(self.pod)
        if api_phase in TERMINAL:
            status["phase"] = api_phase
        return status

    def _report(self) -> None:
        """Report to the API; a final phase only without running containers or prepared claims."""
        status = self._status()
        is_in_use = any(slot.is_running for slot in self._slots.values())
        if status["phase"] in TERMINAL and (is_in_use or self._node.claims.has_pod(self.uid)):
            last = self._node.statuses.get(self.uid)
            status["phase"] = last["phase"] if last is not None else phase_of(self.pod)
        self._node.statuses.set(self.pod, status)
