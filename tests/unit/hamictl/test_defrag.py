# SPDX-License-Identifier: Apache-2.0
"""``hamictl defrag`` from files to text: plans, who stays and why, mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_core.ledger.holding import Holding
from hami_core.replay.snapshot import Snapshot
from hamictl.cli import main
from tests.support import builders

NOW_S = 1000.0


def holding(name: str, uuid: str, mib: int, *, state: bool = True) -> Holding:
    node = uuid.partition("-")[0]
    shared: dict[str, Any] = {
        "allocation_id": f"a-{name}",
        "node": node,
        "pod_uid": f"uid-{name}",
        "namespace": "team",
        "pod": name,
    }
    return Holding(
        record=AllocationRecord(
            op="reserve", containers=(builders.held(builders.share(uuid, mib)),), **shared
        ),
        revision=len(name),
        state=StateRecord(state="running", ledger_seq=1, **shared) if state else None,
    )


def pod(name: str, mib: int, **metadata: Any) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(mib)}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", **metadata},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
    }


def site(tmp_path: Path, *pods: dict[str, Any]) -> list[str]:
    """Three devices of 10,000 MiB on two nodes, each about half full; words for the command."""
    known = Snapshot(
        snapshot_id="9.1",
        time_s=NOW_S,
        devices=tuple(
            builders.node_devices(
                node, [builders.device(f"{node}-{i}", index=i, memory_mib=10_000) for i in some]
            )
            for node, some in (("a", (0, 1)), ("b", (0,)))
        ),
        holdings=(
            holding("one", "a-0", 6000),
            holding("two", "a-1", 5000),
            holding("three", "b-0", 4000),
        ),
    )
    (tmp_path / "snapshot.json").write_bytes(codec.encode(known))
    (tmp_path / "pods.json").write_text(json.dumps({"kind": "List", "items": pods}))
    words = ["--snapshot", str(tmp_path / "snapshot.json"), "--pods", str(tmp_path / "pods.json")]
    return ["defrag", *words]


def run(words: list[str], tmp_path: Path, mib: int, *more: str) -> Result:
    (tmp_path / "shape.json").write_text(json.dumps(pod("wanted", mib)))
    return CliRunner().invoke(main, [*words, "--shape", str(tmp_path / "shape.json"), *more])


ALL = (pod("one", 6000), pod("two", 5000), pod("three", 4000))


def test_plan_names_steps_devices_and_memory(tmp_path: Path) -> None:
    result = run(site(tmp_path, *ALL), tmp_path, 9000)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[0] == "STEP POD FROM TO MEMORY MIB"
    assert lines[1] in ("1 team/three b: b-0 a: a-0 4000", "1 team/three b: b-0 a: a-1 4000")
    assert lines[2] == "Then team/wanted fits on b: b-0"
    assert "4000 MiB move, the least of plans with so few moves." in lines
    assert "3 pods can be moved, 0 stay." in lines


def test_json_has_the_plan(tmp_path: Path) -> None:
    answer = json.loads(run(site(tmp_path, *ALL), tmp_path, 9000, "-o", "json").output)
    assert answer["plan"]["outcome"] == "found"
    assert [move["pod"] for move in answer["plan"]["moves"]] == ["three"]
    assert answer["plan"]["memory_mib"] == 4000


def test_pods_that_must_stay_are_listed_with_the_reason(tmp_path: Path) -> None:
    pods = (
        pod("one", 6000, annotations={"hami.io/no-move": "true"}),
        pod("two", 5000),
        pod("three", 4000, annotations={"hami.io/min-runtime-s": "3600"}),
    )
    result = run(site(tmp_path, *pods), tmp_path, 9000, "-o", "wide")
    assert "Then team/wanted fits on a: a-1" in result.output
    assert "annotation hami.io/no-move" in result.output
    assert "hami.io/min-runtime-s asks for 3600" in result.output
    gang = pod("two", 5000, annotations={"hami.io/gang": "g", "hami.io/gang-size": "2"})
    daemon = pod("three", 4000, ownerReferences=[{"kind": "DaemonSet", "name": "d", "uid": "x"}])
    result = run(site(tmp_path, gang, daemon), tmp_path, 9000, "-o", "wide")
    assert result.exit_code == 1
    assert "No 4 moves or fewer make team/wanted fit" in result.output
    for why in ("is a member of a gang", "belongs to a DaemonSet", "is not known, see --pods"):
        assert why in result.output


def test_pod_with_rules_of_its_own_stays_on_its_node(tmp_path: Path) -> None:
    tied = [json.loads(json.dumps(one)) for one in ALL]
    for one in tied:
        one["spec"]["nodeSelector"] = {"zone": "x"}
    result = run(site(tmp_path, *tied), tmp_path, 9000)
    assert result.exit_code == 1
    tied[1]["spec"].pop("nodeSelector")
    result = run(site(tmp_path, *tied), tmp_path, 9000)
    assert "Then team/wanted fits on a: a-1" in result.output


def test_nothing_moves_where_the_pod_fits(tmp_path: Path) -> None:
    result = run(site(tmp_path, *ALL), tmp_path, 5500)
    assert "team/wanted fits on b as it is" in result.output


def test_honest_where_the_trials_end(tmp_path: Path) -> None:
    result = run(site(tmp_path, *ALL), tmp_path, 9000, "--trials", "2")
    assert result.exit_code == 1
    assert "Not found within" in result.output
    assert "no 0 moves or fewer" in result.output


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"kind": "List", "items": []}, "--shape takes a manifest of one pod"),
        ({"kind": "Pod", "metadata": {"name": "x"}, "spec": {}}, "requests no device"),
        (pod("x", -5), "gpumem"),
    ],
)
def test_shape_that_is_none(tmp_path: Path, shape: dict[str, Any], text: str) -> None:
    words = site(tmp_path, *ALL)
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    result = CliRunner().invoke(main, [*words, "--shape", str(tmp_path / "shape.json")])
    assert result.exit_code == 2
    assert text in result.output
