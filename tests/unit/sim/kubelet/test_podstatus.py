# SPDX-License-Identifier: Apache-2.0
"""Phase, conditions and container statuses from what is known of containers."""

import pytest

from hami_sim.kubelet.objects import Obj
from hami_sim.kubelet.podstatus import (
    ContainerFacts,
    Ended,
    PodFacts,
    Running,
    pod_status,
    rejected_status,
    start_time_s,
)

RUNS = ContainerFacts(running=Running(container_id="sim://7", started_s=1000.0))
WAITS = ContainerFacts()


def ended(code: int, **more: object) -> ContainerFacts:
    run = Ended(exit_code=code, container_id="sim://7", started_s=1000.0, finished_s=1010.0)
    return ContainerFacts(ended=run, **more)  # type: ignore[arg-type]  # table cases


def crashed(code: int) -> ContainerFacts:
    """Ended, and waiting to run again."""
    run = Ended(exit_code=code, container_id="sim://7", started_s=1000.0, finished_s=1010.0)
    return ContainerFacts(
        previous=run, waiting_reason="CrashLoopBackOff", waiting_message="back-off", restart_count=1
    )


def status(
    apps: list[ContainerFacts],
    inits: list[ContainerFacts] | None = None,
    sidecars: list[ContainerFacts] | None = None,
    *,
    policy: str = "Always",
    terminal: bool = False,
    before: Obj | None = None,
) -> Obj:
    specs = {
        "app": [{"name": f"app{i}", "image": "img"} for i, _ in enumerate(apps)],
        "init": [{"name": f"init{i}"} for i, _ in enumerate(inits or [])],
        "side": [
            {"name": f"side{i}", "restartPolicy": "Always"} for i, _ in enumerate(sidecars or [])
        ],
    }
    known = {
        **{f"app{i}": facts for i, facts in enumerate(apps)},
        **{f"init{i}": facts for i, facts in enumerate(inits or [])},
        **{f"side{i}": facts for i, facts in enumerate(sidecars or [])},
    }
    pod: Obj = {
        "metadata": {"name": "p"},
        "spec": {
            "containers": specs["app"],
            "initContainers": specs["init"] + specs["side"],
            "restartPolicy": policy,
        },
        "status": before or {},
    }
    return pod_status(
        pod,
        PodFacts(
            containers=known,
            has_sandbox=True,
            host_ip="192.0.2.1",
            pod_ip="10.0.0.1",
            start_s=990.0,
            now_s=1020.0,
            is_terminal=terminal,
        ),
    )


@pytest.mark.parametrize(
    ("apps", "policy", "terminal", "want"),
    [
        ([WAITS], "Always", False, "Pending"),
        ([RUNS], "Always", False, "Running"),
        ([RUNS, WAITS], "Always", False, "Pending"),
        ([RUNS, ended(0)], "Never", False, "Running"),
        ([ended(0)], "Always", False, "Running"),
        ([crashed(1)], "Always", False, "Running"),
        ([ended(0)], "OnFailure", False, "Succeeded"),
        ([ended(1)], "OnFailure", False, "Running"),
        ([ended(0), ended(0)], "Never", False, "Succeeded"),
        ([ended(0), ended(1)], "Never", False, "Failed"),
        ([ended(0)], "Always", True, "Succeeded"),
        ([ended(143)], "Always", True, "Failed"),
    ],
)
def test_phase_of_application_containers(
    apps: list[ContainerFacts],
    policy: str,
    terminal: bool,  # noqa: FBT001 - table case
    want: str,
) -> None:
    assert status(apps, policy=policy, terminal=terminal)["phase"] == want


@pytest.mark.parametrize(
    ("inits", "sidecars", "apps", "policy", "want"),
    [
        ([RUNS], [], [WAITS], "Always", "Pending"),
        ([ended(1)], [], [WAITS], "Always", "Pending"),
        ([ended(1)], [], [WAITS], "Never", "Failed"),
        ([ended(0)], [], [RUNS], "Always", "Running"),
        ([], [WAITS], [WAITS], "Always", "Pending"),
        ([], [RUNS], [RUNS], "Always", "Running"),
        ([], [RUNS], [ended(0)], "Never", "Running"),
        ([], [ended(0)], [ended(0)], "Never", "Succeeded"),
    ],
)
def test_phase_with_init_containers_and_sidecars(
    inits: list[ContainerFacts],
    sidecars: list[ContainerFacts],
    apps: list[ContainerFacts],
    policy: str,
    want: str,
) -> None:
    assert status(apps, inits, sidecars, policy=policy)["phase"] == want


def conditions(made: Obj) -> dict[str, str]:
    return {c["type"]: c["status"] for c in made["conditions"]}


def test_running_pod_is_ready() -> None:
    assert set(conditions(status([RUNS])).values()) == {"True"}


def test_pod_is_not_ready_while_a_sidecar_is_down() -> None:
    made = status([RUNS], sidecars=[crashed(1)])
    assert conditions(made)["Ready"] == "False"
    ready = next(c for c in made["conditions"] if c["type"] == "Ready")
    assert ready["message"] == "containers with unready status: [side0]"


def test_pod_is_initialized_once_its_init_containers_succeeded() -> None:
    assert conditions(status([WAITS], [RUNS]))["Initialized"] == "False"
    assert conditions(status([WAITS], [ended(0)]))["Initialized"] == "True"


def test_condition_keeps_its_transition_time_while_it_holds() -> None:
    first = status([RUNS])
    old = "1970-01-01T00:00:05Z"
    for condition in first["conditions"]:
        condition["lastTransitionTime"] = old
    again = status([RUNS], before=first)
    assert {c["lastTransitionTime"] for c in again["conditions"]} == {old}
    changed = status([WAITS], before=first)
    moved = {c["type"] for c in changed["conditions"] if c["lastTransitionTime"] != old}
    assert moved == {"Ready", "ContainersReady"}


def test_container_statuses_show_state_and_restarts() -> None:
    made = status([crashed(3)])["containerStatuses"][0]
    assert made["state"]["waiting"] == {"reason": "CrashLoopBackOff", "message": "back-off"}
    assert made["lastState"]["terminated"]["exitCode"] == 3
    assert (made["restartCount"], made["ready"], made["containerID"]) == (1, False, "sim://7")


def test_waiting_container_of_a_pod_with_init_containers_is_initializing() -> None:
    waiting = status([WAITS], [RUNS])["containerStatuses"][0]["state"]["waiting"]
    assert waiting["reason"] == "PodInitializing"


def test_refused_pod_fails_with_kubelets_words() -> None:
    pod: Obj = {"metadata": {}, "spec": {"containers": []}}
    made = rejected_status(pod, reason="OutOfcpu", message="no CPU", now_s=0.0)
    assert (made["phase"], made["reason"]) == ("Failed", "OutOfcpu")
    assert made["message"] == "Pod was rejected: no CPU"


def test_start_time_survives_a_restart() -> None:
    made = status([RUNS])
    assert start_time_s({"status": made}) == 990.0
    assert start_time_s({}) is None
