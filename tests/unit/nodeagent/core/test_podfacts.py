# SPDX-License-Identifier: Apache-2.0
"""Facts read from a pod's API object."""

from typing import Any

import msgspec
import pytest

from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.pods.signing import SignedPlacement, Signer, Verifier
from hami_nodeagent.core.podfacts import Ask, PodFacts, facts_of
from tests.unit.nodeagent.core.builders import GPU, NODE, NPU

SIGNER = Signer.generate()
VERIFIER = Verifier.from_pems([SIGNER.public_pem()])


def facts(*, status: Any = None, metadata: Any = None, **spec: Any) -> PodFacts:
    pod = {
        "metadata": {"name": "web", "namespace": "default", "uid": "u1", **(metadata or {})},
        "spec": {"containers": [{"name": "main"}], **spec},
        "status": status or {},
    }
    view = msgspec.json.decode(msgspec.json.encode(pod), type=PodView)
    return facts_of(view, node=NODE, resources={GPU, NPU}, verifier=VERIFIER)


def asking(name: str, **limits: object) -> dict[str, Any]:
    resources = {"gpu": GPU, "npu": NPU}
    return {
        "name": name,
        "resources": {"limits": {resources.get(key, key): value for key, value in limits.items()}},
    }


def test_label_shows_that_the_webhook_prepared_the_pod() -> None:
    assert facts(metadata={"labels": {annotations.MANAGED_LABEL: "true"}}).is_prepared
    for labels in ({}, {annotations.MANAGED_LABEL: "false"}):
        assert not facts(metadata={"labels": labels}).is_prepared


def test_requests_follow_the_order_of_admission() -> None:
    found = facts(
        initContainers=[
            asking("fetch", gpu=1),
            {**asking("log", gpu="2"), "restartPolicy": "Always"},
            asking("warm", npu="1"),
        ],
        containers=[asking("main", gpu=1, npu=1), asking("idle", gpu=0)],
    )
    assert found.asks_by_resource == {
        GPU: (
            Ask(container="fetch", kind="init", count=1),
            Ask(container="log", kind="sidecar", count=2),
            Ask(container="main", kind="app", count=1),
        ),
        NPU: (
            Ask(container="warm", kind="init", count=1),
            Ask(container="main", kind="app", count=1),
        ),
    }
    assert found.kind_by_container == {
        "fetch": "init",
        "log": "sidecar",
        "warm": "init",
        "main": "app",
        "idle": "app",
    }


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("1500m", 2), ("1k", 1000), ("x", 0), ("-1", 0), ("9E", 0)]
)
def test_amount_is_parsed_as_kubelet_does(text: str, count: int) -> None:
    asks = facts(containers=[asking("main", gpu=text)]).asks_by_resource
    assert (asks[GPU][0].count if asks else 0) == count


def test_resource_requests_and_other_resources_are_ignored() -> None:
    container = {
        "name": "main",
        "resources": {"requests": {GPU: "1"}, "limits": {"cpu": "1", "nvidia.com/gpumem": "10"}},
    }
    assert facts(containers=[container]).asks_by_resource == {}


@pytest.mark.parametrize(
    ("status", "admitted"),
    [
        ({}, False),
        ({"phase": "Pending"}, False),
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}, False),
        ({"phase": "Pending", "conditions": [{"type": "Initialized", "status": "False"}]}, True),
        ({"phase": "Pending", "initContainerStatuses": [{"name": "a"}]}, True),
        ({"phase": "Pending", "containerStatuses": [{"name": "a"}]}, True),
        ({"phase": "Running"}, True),
        ({"phase": "Failed"}, True),
    ],
)
def test_status_that_only_an_admitted_pod_has(status: dict[str, Any], *, admitted: bool) -> None:
    assert facts(status=status).admitted is admitted


def test_started_containers_run_or_ran() -> None:
    statuses = [
        {"name": "runs", "state": {"running": {}}},
        {"name": "ran", "state": {"terminated": {"exitCode": 0}}},
        {"name": "crashes", "state": {"waiting": {}}, "restartCount": 3},
        {"name": "waits", "state": {"waiting": {}}},
        {"name": "unknown"},
    ]
    found = facts(status={"phase": "Running", "containerStatuses": statuses})
    assert found.started == {"runs", "ran", "crashes"}
    assert not found.finished
    assert facts(status={"phase": "Succeeded"}).finished


def signed(**change: Any) -> str:
    given: dict[str, Any] = {
        "pod_uid": "u1",
        "namespace": "default",
        "pod": "web",
        "allocation_id": "a1",
        "ledger_seq": 7,
        "placement": Placement(
            node=NODE,
            containers=(
                ContainerShares(
                    name="main",
                    kind="app",
                    shares=(Share(vendor="nvidia", uuid="x", memory_mib=1),),
                ),
            ),
        ),
        **change,
    }
    return SIGNER.sign(SignedPlacement(**given))


def annotated(text: str) -> PodFacts:
    return facts(metadata={"annotations": {annotations.ALLOCATION: text}})


def test_verified_annotation_is_taken() -> None:
    found = annotated(signed())
    assert found.signed is not None
    assert found.signed.ledger_seq == 7
    assert found.annotation_problem == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "does not decode"),
        (signed(pod_uid="other"), "belongs to pod uid other"),
        (signed(placement=Placement(node="elsewhere", containers=())), "belongs to node elsewhere"),
        (signed().replace('"ledger_seq":7', '"ledger_seq":8'), "signature does not match"),
    ],
)
def test_annotation_that_does_not_prove_this_pod_is_not_taken(text: str, problem: str) -> None:
    found = annotated(text)
    assert found.signed is None
    assert problem in found.annotation_problem


def test_absent_annotation_is_no_problem_text() -> None:
    assert (facts().signed, facts().annotation_problem) == (None, "")


def limits_volume_of(container: str) -> dict[str, object]:
    """The volume ``l`` as admission writes it for a container."""
    field = f"metadata.annotations['{annotations.limits(container)}']"
    item = {"path": "limits", "fieldRef": {"apiVersion": "v1", "fieldPath": field}}
    return {"name": "l", "downwardAPI": {"items": [item]}}


def test_volumes_of_the_webhook_are_seen_per_container() -> None:
    found = facts(
        metadata={"annotations": {annotations.TRACEPARENT: "00-1-2-03"}},
        containers=[
            {
                "name": "a",
                "volumeMounts": [{"name": "l", "mountPath": "/etc/hami/", "readOnly": True}],
            },
            {"name": "b", "volumeMounts": [{"name": "r", "mountPath": "/run/hami"}]},
            {"name": "c", "volumeMounts": [{"name": "l", "mountPath": "/etc/hami"}]},
        ],
        volumes=[limits_volume_of("a"), {"name": "r", "emptyDir": {"medium": "Memory"}}],
    )
    assert found.limits_mounted == {"a"}
    assert found.region_volumes == {"b": "r"}
    assert set(found.hidden_limits) == {"c"}
    assert found.traceparent == "00-1-2-03"
    assert found.title == "default/web"


def test_containers_are_known_by_the_id_of_their_runtime() -> None:
    found = facts(
        containers=[{"name": "main"}, {"name": "new"}],
        ephemeralContainers=[{"name": "debug", "targetContainerName": "main"}, {"name": "shell"}],
        status={
            "initContainerStatuses": [{"name": "init", "containerID": "containerd://11"}],
            "containerStatuses": [
                {"name": "main", "containerID": "containerd://22"},
                {"name": "new"},
            ],
            "ephemeralContainerStatuses": [
                {"name": "debug", "containerID": "containerd://33"},
                {"name": "shell", "containerID": "containerd://44"},
            ],
        },
    )
    assert found.container_by_id == {
        "containerd://11": "init",
        "containerd://22": "main",
        "containerd://33": "main",
        "containerd://44": "shell",
    }


def test_variables_that_give_other_devices_are_named() -> None:
    secret = {"secretRef": {"name": "s"}}
    found = facts(
        containers=[
            {"name": "a", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
            {"name": "b", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]},
            {"name": "c", "envFrom": [secret]},
            {"name": "d", "envFrom": [{**secret, "prefix": "APP_"}]},
            {
                "name": "e",
                "envFrom": [secret],
                "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}],
            },
            {"name": "f", "envFrom": [{**secret, "prefix": "NVIDIA_"}]},
        ],
    )
    assert found.own_devices == {
        "a": "container a: env[NVIDIA_VISIBLE_DEVICES]: would give it devices of its own choice "
        "beside its share; remove the variable"
    }
    assert set(found.unseen_env) == {"c", "e", "f"}
    assert "NVIDIA_VISIBLE_DEVICES" in found.unseen_env["c"]
    assert "NVIDIA_VISIBLE_DEVICES" not in found.unseen_env["e"]
    assert found.unseen_env["f"] == {"NVIDIA_VISIBLE_DEVICES"}
