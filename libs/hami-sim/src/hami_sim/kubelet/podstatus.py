# SPDX-License-Identifier: Apache-2.0
"""Makes a pod's status from what is known of its containers: phase, conditions, container statuses.

Rules: `getPhase` and `pkg/kubelet/status/generate.go` of kubelet 1.34. Times in Unix seconds,
written as RFC 3339. Pure. Restart backoff shows as Waiting with the last termination kept; a
terminal phase is final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from hami_sim.kubelet.objects import (
    TERMINAL,
    Obj,
    app_containers,
    init_containers,
    is_sidecar,
    qos_class,
    restart_policy,
)

OWNED = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
"""Conditions that kubelet writes; all others stay as they are."""


class Ended(Struct, frozen=True, kw_only=True):
    """One finished run of a container."""

    exit_code: int
    container_id: str
    started_s: float
    finished_s: float
    reason: str = ""
    message: str = ""


class Running(Struct, frozen=True, kw_only=True):
    """The present run of a container."""

    container_id: str
    started_s: float


class ContainerFacts(Struct, frozen=True, kw_only=True):
    """The known state of one container; with neither `running` nor `ended` it waits."""

    running: Running | None = None
    ended: Ended | None = None
    """The newest run, when it has finished and nothing is about to follow."""
    previous: Ended | None = None
    restart_count: int = 0
    waiting_reason: str = ""
    waiting_message: str = ""
    resources: Sequence[Obj] = ()
    """Health of its devices, as in `allocatedResourcesStatus`."""

    @property
    def last(self) -> Ended | None:
        """Return the newest finished run."""
        return self.ended or self.previous

    @property
    def has_begun(self) -> bool:
        """Return True when the container runs or has run."""
        return self.running is not None or self.last is not None


class PodFacts(Struct, frozen=True, kw_only=True):
    """The known state of a pod on its node."""

    containers: Mapping[str, ContainerFacts]
    has_sandbox: bool
    host_ip: str
    pod_ip: str
    start_s: float
    now_s: float
    is_terminal: bool = False
    """No container will run again, whatever the restart policy says."""
    reason: str = ""
    message: str = ""


def timestamp(moment_s: float) -> str:
    """Write a time as Kubernetes does."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def start_time_s(pod: Obj) -> float | None:
    """Read when a kubelet first saw the pod, None when none did."""
    text = (pod.get("status") or {}).get("startTime")
    return datetime.fromisoformat(text).timestamp() if text else None


def rejected_status(pod: Obj, *, reason: str, message: str, now_s: float) -> Obj:
    """Make the status of a pod that was not admitted."""
    return {
        "phase": "Failed",
        "reason": reason,
        "message": f"Pod was rejected: {message}",
        "qosClass": qos_class(pod),
        "startTime": timestamp(now_s),
    }


def pod_status(pod: Obj, facts: PodFacts) -> Obj:
    """Make the whole status, conditions of other owners left out."""
    phase = _phase(pod, facts)
    before = {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or ()}
    conditions = _conditions(pod, facts, phase)
    for condition in conditions:
        old = before.get(condition["type"])
        same = old is not None and old["status"] == condition["status"]
        condition["lastTransitionTime"] = (
            old["lastTransitionTime"]
            if same and old is not None and old.get("lastTransitionTime")
            else timestamp(facts.now_s)
        )
    status: Obj = {
        "phase": phase,
        "conditions": conditions,
        "hostIP": facts.host_ip,
        "hostIPs": [{"ip": facts.host_ip}],
        "qosClass": qos_class(pod),
        "startTime": timestamp(facts.start_s),
        "containerStatuses": [_container_status(c, pod, facts) for c in app_containers(pod)],
    }
    if facts.has_sandbox:
        status |= {"podIP": facts.pod_ip, "podIPs": [{"ip": facts.pod_ip}]}
    if init_containers(pod):
        status["initContainerStatuses"] = [
            _container_status(c, pod, facts) for c in init_containers(pod)
        ]
    if facts.reason:
        status["reason"] = facts.reason
    if facts.message:
        status["message"] = facts.message
    return status


def _facts_of(facts: PodFacts, container: Obj) -> ContainerFacts:
    return facts.containers.get(container["name"], ContainerFacts())


def should_restart(policy: str, exit_code: int) -> bool:
    """Return true if an ended application container runs again under a restart policy."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def _phase(pod: Obj, facts: PodFacts) -> str:
    policy = restart_policy(pod)
    inits = [_facts_of(facts, c) for c in init_containers(pod) if not is_sidecar(c)]
    sidecars = [_facts_of(facts, c) for c in init_containers(pod) if is_sidecar(c)]
    apps = [_facts_of(facts, c) for c in app_containers(pod)]
    long_lived = [*apps, *sidecars]
    is_final = facts.is_terminal or policy == "Never"
    if is_final and any(_has_failed(init) for init in inits):
        return "Failed"
    if _is_initializing(inits) or not all(known.has_begun for known in long_lived):
        return "Failed" if facts.is_terminal else "Pending"
    if any(known.running for known in long_lived):
        return "Running"
    ended = [known.last for known in apps if known.last is not None]
    return _phase_of_ended(ended, policy, is_terminal=facts.is_terminal)


def _has_failed(known: ContainerFacts) -> bool:
    return known.last is not None and known.last.exit_code != 0


def _is_initializing(inits: Sequence[ContainerFacts]) -> bool:
    return any(known.running or known.last is None for known in inits)


def _phase_of_ended(ended: Sequence[Ended], policy: str, *, is_terminal: bool) -> str:
    """Return the phase of a pod of which no container runs and none waits for its first run."""
    if not ended:
        return "Pending"
    if not is_terminal and any(should_restart(policy, run.exit_code) for run in ended):
        return "Running"
    return "Failed" if any(run.exit_code for run in ended) else "Succeeded"


def _is_ready(container: Obj, facts: PodFacts, *, is_init: bool) -> bool:
    known = _facts_of(facts, container)
    if is_init and not is_sidecar(container):
        return known.ended is not None and known.ended.exit_code == 0
    return known.running is not None


def _conditions(pod: Obj, facts: PodFacts, phase: str) -> list[Obj]:
    inits, apps = init_containers(pod), app_containers(pod)
    incomplete = [c["name"] for c in inits if not _is_ready(c, facts, is_init=True)]
    begun = any(_facts_of(facts, c).has_begun for c in apps)
    long_lived = [c for c in inits if is_sidecar(c)] + apps
    unready = [c["name"] for c in long_lived if not _is_ready(c, facts, is_init=False)]
    if phase == "Succeeded":
        initialized = _condition("Initialized", holds=True, reason="PodCompleted")
    elif incomplete and not begun:
        initialized = _condition(
            "Initialized",
            holds=False,
            reason="ContainersNotInitialized",
            message=f"containers with incomplete status: [{' '.join(incomplete)}]",
        )
    else:
        initialized = _condition("Initialized", holds=True)
    ready = {"holds": True, "reason": "", "message": ""}
    if phase in TERMINAL:
        ready = {"holds": False, "reason": "PodCompleted" if phase == "Succeeded" else "PodFailed"}
    elif unready:
        ready = {
            "holds": False,
            "reason": "ContainersNotReady",
            "message": f"containers with unready status: [{' '.join(unready)}]",
        }
    return [
        _condition("PodReadyToStartContainers", holds=facts.has_sandbox and not facts.is_terminal),
        initialized,
        _ready_condition("Ready", ready),
        _ready_condition("ContainersReady", ready),
        _condition("PodScheduled", holds=True),
    ]


def _ready_condition(kind: str, ready: Obj) -> Obj:
    return _condition(
        kind,
        holds=ready["holds"],
        reason=ready.get("reason", ""),
        message=ready.get("message", ""),
    )


def _condition(kind: str, *, holds: bool, reason: str = "", message: str = "") -> Obj:
    condition: Obj = {"type": kind, "status": "True" if holds else "False", "lastProbeTime": None}
    if reason:
        condition["reason"] = reason
    if message:
        condition["message"] = message
    return condition


def _terminated(ended: Ended) -> Obj:
    state: Obj = {
        "exitCode": ended.exit_code,
        "reason": ended.reason or ("Completed" if ended.exit_code == 0 else "Error"),
        "startedAt": timestamp(ended.started_s),
        "finishedAt": timestamp(ended.finished_s),
        "containerID": ended.container_id,
    }
    if ended.message:
        state["message"] = ended.message
    return {"terminated": state}


def _container_status(container: Obj, pod: Obj, facts: PodFacts) -> Obj:
    known = _facts_of(facts, container)
    is_init = container in init_containers(pod)
    image = str(container.get("image", ""))
    status: Obj = {
        "name": container["name"],
        "image": image,
        "imageID": f"sim://{image}" if known.has_begun else "",
        "restartCount": known.restart_count,
        "ready": _is_ready(container, facts, is_init=is_init),
        "started": known.running is not None,
        "state": {},
        "lastState": _terminated(known.previous) if known.previous else {},
    }
    if known.resources:
        status["allocatedResourcesStatus"] = list(known.resources)
    if known.running is not None:
        status["containerID"] = known.running.container_id
        status["state"] = {"running": {"startedAt": timestamp(known.running.started_s)}}
    elif known.ended is not None:
        status["containerID"] = known.ended.container_id
        status["state"] = _terminated(known.ended)
    else:
        default = "PodInitializing" if init_containers(pod) else "ContainerCreating"
        waiting = {"reason": known.waiting_reason or default}
        if known.waiting_message:
            waiting["message"] = known.waiting_message
        if known.previous is not None:
            status["containerID"] = known.previous.container_id
        status["state"] = {"waiting": waiting}
    return status
