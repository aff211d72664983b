# SPDX-License-Identifier: Apache-2.0
"""``hamictl simulate`` from files to text, with the mistakes that people make."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_core.quota.documents import Quotas, WrittenLimit, WrittenQuota
from hami_core.quota.queues import QueueConfig
from hami_core.replay.snapshot import Snapshot
from hamictl import policies
from hamictl.cli import main
from tests.support import builders

DEVICES = NodeDevices(
    node="gpu-a",
    vendor="nvidia",
    boot_id="",
    seq=1,
    time_s=0,
    config_generation=1,
    devices=tuple(
        Device(
            uuid=f"GPU-{number}",
            vendor="nvidia",
            index=number,
            type="Tesla T4",
            memory_mib=15360,
            capacity_mib=15360,
        )
        for number in range(2)
    ),
)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.json"
    known = Snapshot(snapshot_id="1.1", time_s=0.0, devices=(DEVICES,))
    path.write_bytes(msgspec.json.encode(known))
    return path


def deployment(name: str, replicas: object, **limits: str) -> dict[str, Any]:
    names = {key.replace("_", "/", 1): value for key, value in limits.items()}
    resources = {f"nvidia.com/{key.partition('/')[2]}": value for key, value in names.items()}
    containers = [{"name": "main", "image": "app", "resources": {"limits": resources}}]
    return {
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": containers}}},
    }


def run(snapshot: Path, documents: list[Any], *more: str) -> Result:
    pods = snapshot.parent / "pods.yaml"
    pods.write_text(yaml.safe_dump_all(documents))
    words = ["simulate", "--snapshot", str(snapshot), "--pods", str(pods), *more]
    return CliRunner().invoke(main, words)


def test_replicas_are_placed_and_the_refused_one_shows_the_closest_fit(snapshot: Path) -> None:
    result = run(snapshot, [deployment("web", 3, x_gpu="1", x_gpumem="10000")])
    assert result.exit_code == 0, result.output
    assert "web-0" in result.output
    assert "2 placed, 1 refused, 0 without devices" in result.output
    assert "memory_mib 5360 instead of 10000 would fit on gpu-a" in result.output


def test_json_says_the_same_and_strict_is_an_exit_code(snapshot: Path) -> None:
    result = run(
        snapshot, [deployment("web", 3, x_gpu="1", x_gpumem="10000")], "-o", "json", "--strict"
    )
    assert result.exit_code == 1
    answer = json.loads(result.output)
    assert (answer["placed"], answer["refused"]) == (2, 1)
    assert [pod["node"] for pod in answer["pods"] if pod.get("node")] == ["gpu-a", "gpu-a"]
    assert answer["after"]["devices_used"] == 2


def test_policy_changes_the_outcome(snapshot: Path) -> None:
    documents = [deployment("web", 2, x_gpu="1", x_gpumem="1000")]
    used = {
        word: json.loads(
            run(snapshot, documents, "-o", "json", "--policy", f"device={word}").output
        )["after"]["devices_used"]
        for word in ("binpack", "spread")
    }
    assert used == {"binpack": 1, "spread": 2}


def test_policies_are_compared_side_by_side(snapshot: Path) -> None:
    documents = [deployment("web", 2, x_gpu="1", x_gpumem="1000")]
    flags = ["--policy", "device=binpack", "--policy", "node=spread;device=spread"]
    text = " ".join(run(snapshot, documents, *flags).output.split())
    assert "node=binpack;device=binpack 2 0 1/2" in text
    assert "node=spread;device=spread 2 0 2/2" in text
    answer = json.loads(run(snapshot, documents, *flags, "-o", "json").output)
    assert [result["after"]["devices_used"] for result in answer["results"]] == [1, 2]


def test_words_about_different_parts_are_one_policy(snapshot: Path) -> None:
    documents = [deployment("web", 2, x_gpu="1", x_gpumem="1000")]
    flags = ["--policy", "device=binpack", "--policy", "node=spread", "-o", "json"]
    policy = json.loads(run(snapshot, documents, *flags).output)["policy"]
    assert (policy["node"], policy["device"]) == ("spread", ["binpack"])


def test_pod_that_admission_denies_is_reported(snapshot: Path) -> None:
    result = run(snapshot, [deployment("web", 1, x_gpu="1", x_gpumem="3Gi")])
    assert "would be refused" in result.output
    assert "3072" in result.output


@pytest.mark.parametrize(
    ("documents", "more", "text"),
    [
        ([deployment("web", "many", x_gpu="1")], (), "spec.replicas is 'many'"),
        (["text"], (), "not a Kubernetes object"),
        ([deployment("web", 1, x_gpu="1")], ("--policy", "device=pile"), "'pile' is not a policy"),
        ([deployment("web", 1, x_gpu="1")], ("--policy", "nodes=spread"), "write node="),
    ],
)
def test_mistakes_are_named(
    snapshot: Path, documents: list[Any], more: tuple[str, ...], text: str
) -> None:
    result = run(snapshot, documents, *more)
    assert result.exit_code == 2
    assert text in result.output


QUEUES = """
[[queue]]
name = "web"
limit = { memory_mib = 2000 }
namespaces = ["team"]
"""


def quota(most: object) -> dict[str, Any]:
    return {
        "kind": "ResourceQuota",
        "metadata": {"name": "gpu", "namespace": "team"},
        "spec": {"hard": {"limits.nvidia.com/gpumem": most}},
    }


def test_quotas_and_queues_of_the_snapshot_hold(snapshot: Path) -> None:
    known = msgspec.json.decode(snapshot.read_bytes(), type=Snapshot)
    limit = WrittenLimit(resource="nvidia/memory_mib", key="limits.nvidia.com/gpumem", most=3000)
    known = msgspec.structs.replace(
        known,
        quotas=Quotas(
            objects=(WrittenQuota(namespace="team", name="gpu", limits=(limit,)),),
            queues=(QueueConfig(name="web", limit={"memory_mib": 2000}, namespaces=("team",)),),
        ),
    )
    snapshot.write_bytes(msgspec.json.encode(known))
    documents = [deployment("web", 3, x_gpu="1", x_gpumem="1000")]
    text = " ".join(run(snapshot, documents).output.split())
    assert "2 placed, 1 refused" in text
    assert "1 nodes: QueueOverLimit: queue web memory_mib: 1000 MiB wanted, 2000 used" in text
    assert "team gpu limits.nvidia.com/gpumem 2000 3000" in text
    assert "web memory_mib 2000 0 0 2000 1 0" in text
    other = [*documents, deployment("more", 1, x_gpu="1", x_gpumem="1001")]
    answer = json.loads(run(snapshot, other, "-o", "json").output)
    assert (answer["placed"], answer["quotas"][0]["used"]) == (2, 2000)


def test_other_quotas_and_queues_are_tried(snapshot: Path, tmp_path: Path) -> None:
    documents = [deployment("web", 3, x_gpu="1", x_gpumem="1000")]
    queues, quotas = tmp_path / "queues.toml", tmp_path / "quotas.yaml"
    queues.write_text(QUEUES)
    quotas.write_text(yaml.safe_dump_all([quota(1500)]))
    placed = {
        name: json.loads(run(snapshot, documents, *flags, "-o", "json").output)["placed"]
        for name, flags in {
            "none": (),
            "queues": ("--queues", str(queues)),
            "quotas": ("--quotas", str(quotas)),
            "both": ("--queues", str(queues), "--quotas", str(quotas)),
        }.items()
    }
    assert placed == {"none": 3, "queues": 2, "quotas": 1, "both": 1}


def test_pod_without_cpu_and_memory_is_best_effort_for_a_quotas_scope(
    snapshot: Path, tmp_path: Path
) -> None:
    quotas = tmp_path / "quotas.yaml"
    scoped = quota(1000)
    scoped["spec"]["scopes"] = ["NotBestEffort"]
    quotas.write_text(yaml.safe_dump(scoped))
    plain = deployment("web", 1, x_gpu="1", x_gpumem="2000")
    burstable = deployment("api", 1, x_gpu="1", x_gpumem="2000")
    burstable["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
    answer = run(snapshot, [plain, burstable], "--quotas", str(quotas), "-o", "json").output
    pods = json.loads(answer)["pods"]
    assert [bool(one.get("node")) for one in pods] == [True, False]


@pytest.mark.parametrize(
    ("flag", "content", "text"),
    [
        ("--queues", "[[queue]]\nname = 'a'\nweight = 1", "queue a: weight"),
        ("--queues", "[[", "queues.toml"),
        ("--quotas", "kind: Pod", "no ResourceQuota that limits a device"),
        ("--quotas", "[1]", "not a Kubernetes object"),
    ],
)
def test_wrong_quotas_and_queues_are_named(
    snapshot: Path, tmp_path: Path, flag: str, content: str, text: str
) -> None:
    file = tmp_path / "queues.toml"
    file.write_text(content)
    result = run(snapshot, [deployment("web", 1, x_gpu="1")], flag, str(file))
    assert result.exit_code == 2
    assert text in result.output


def test_snapshot_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"snapshot_id": 7}')
    result = CliRunner().invoke(
        main, ["simulate", "--snapshot", str(tmp_path / "broken.json"), "--pods", "none.yaml"]
    )
    assert result.exit_code == 2
    assert "broken.json" in result.output


TEMPLATE = {
    "name": "pool",
    "devices": [msgspec.to_builtins(DEVICES)],
    "taints": [{"key": "gpu", "effect": "NoSchedule"}],
}


def grown(snapshot: Path, documents: list[Any], added: str) -> dict[str, Any]:
    result = run(snapshot, documents, "--add-nodes", added, "-o", "json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.output)
    return answer


def test_least_number_of_added_nodes(snapshot: Path) -> None:
    documents = [deployment("web", 7, x_gpu="1", x_gpumem="10000")]
    answer = grown(snapshot, documents, "gpu-a")
    assert answer["growth"] == {"template": "gpu-a", "nodes": 3, "searched": 3, "unhelped": []}
    assert (answer["placed"], answer["refused"]) == (7, 0)
    assert (answer["before"]["devices"], answer["after"]["devices"]) == (2, 8)
    result = run(snapshot, documents, "--add-nodes", "gpu-a")
    assert "Nodes like gpu-a to add: 3" in result.output


def test_given_number_of_added_nodes(snapshot: Path) -> None:
    documents = [deployment("web", 7, x_gpu="1", x_gpumem="10000")]
    answer = grown(snapshot, documents, "gpu-ax2")
    assert answer["growth"]["nodes"] == 2
    assert (answer["placed"], answer["refused"]) == (6, 1)


def test_node_whose_name_ends_like_a_number_is_a_template(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    devices = msgspec.structs.replace(DEVICES, node="gpux4")
    known = Snapshot(snapshot_id="1.1", time_s=0.0, devices=(devices,))
    path.write_bytes(msgspec.json.encode(known))
    documents = [deployment("web", 5, x_gpu="1", x_gpumem="10000")]
    assert grown(path, documents, "gpux4")["growth"]["nodes"] == 2
    assert grown(path, documents, "gpux4x1")["growth"]["nodes"] == 1


def test_template_file_with_a_taint(snapshot: Path) -> None:
    file = snapshot.parent / "pool.yaml"
    file.write_text(yaml.safe_dump(TEMPLATE))
    tolerating = deployment("web", 4, x_gpu="1", x_gpumem="10000")
    tolerating["spec"]["template"]["spec"]["tolerations"] = [{"operator": "Exists"}]
    other = deployment("other", 1, x_gpu="1", x_gpumem="10000")
    answer = grown(snapshot, [tolerating, other], str(file))
    assert answer["growth"]["nodes"] == 1
    assert [(one["pod"], one["reason"]) for one in answer["growth"]["unhelped"]] == [
        ("other-0", "excluded by taint gpu without a toleration of the pod")
    ]


def test_without_pods_those_that_wait_are_placed(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    requests = tuple(
        builders.pod(builders.ask(mib=10_000), uid=f"u{n}", name=f"w{n}") for n in range(3)
    )
    known = Snapshot(snapshot_id="1.1", time_s=0.0, devices=(DEVICES,), waiting=requests)
    path.write_bytes(msgspec.json.encode(known))
    words = ["simulate", "--snapshot", str(path), "--add-nodes", "gpu-a", "-o", "json"]
    answer = json.loads(CliRunner().invoke(main, words).output)
    assert (answer["growth"]["nodes"], answer["placed"]) == (1, 3)


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ("absent", "template: no node absent has devices"),
        ("gpu-ax1001", "write at most 1000 nodes"),
    ],
)
def test_mistakes_about_nodes_are_named(snapshot: Path, added: str, text: str) -> None:
    result = run(snapshot, [deployment("web", 1, x_gpu="1")], "--add-nodes", added)
    assert result.exit_code == 2
    assert text in result.output


def test_live_state_has_its_own_policy_and_quotas(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["simulate", "--policy", "node=spread"])
    assert result.exit_code == 2
    assert "need --snapshot" in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("node=spread",), [("spread", None, False)]),
        (("node=spread", "device=numa,binpack"), [("spread", ("numa", "binpack"), False)]),
        (
            ("node=spread", "node=binpack;weights=slot=1,core=1,memory=2"),
            [("spread", None, False), ("binpack", None, True)],
        ),
    ],
)
def test_parts_of_a_policy_that_are_not_named_are_left_to_the_scheduler(
    words: tuple[str, ...], expected: list[tuple[str, tuple[str, ...] | None, bool]]
) -> None:
    found = [
        (one.node_policy, one.device_policy, one.weights is not None)
        for one in policies.choices_of(words)
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--since", "8d"), "up to 7d"),
        (("--since", "0h"), "such as 90m, 24h or 7d"),
        (("--since", "1w"), "such as 90m, 24h or 7d"),
        (("--since", "1d", "--add-nodes", "n1"), "give no other input"),
        (("--since", "1d", "--drain", "n1"), "give no other input"),
        (("--drain", "n1", "--policy", "node=spread"), "--policy with --since only"),
        (("--since", "1d", "--policy", "node=heap"), "'heap'"),
    ],
)
def test_mistakes_about_recorded_pods_are_named(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(main, ["simulate", *arguments])
    assert result.exit_code == 2
    assert text in result.output
