# SPDX-License-Identifier: Apache-2.0
"""``hamictl defrag``: plans from files, who stays and why, mistakes; runs within a budget."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_core.ledger.holding import Holding
from hami_core.planning.defrag import Move
from hami_core.replay.snapshot import Snapshot
from hamictl import client
from hamictl.cli import main
from hamictl.defragmenting import Budget, Run, Step
from hamictl.errors import Unreachable
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


MOVE = Move(
    namespace="team",
    pod="p",
    uid="u",
    source="a",
    target="b",
    gives=(),
    takes=(),
    memory_mib=1,
)


class Scheduler:
    """Answers ``POST /v1/defrag`` as a scheduler with ``moves`` moves before the pod starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
        self.left, self.now_s = moves, 0.0
        self.asked: list[dict[str, Any]] = []
        self.evicted_s: list[float] = []
        self.at: dict[int, Callable[[], None]] = {}
        """Side effects of calls, by number."""
        monkeypatch.setattr(client, "send", self.send)

    def send(self, kind: type[Step], base: str, path: str, body: dict[str, Any]) -> Step:
        assert (kind, base, path) == (Step, "http://s", "/v1/defrag")
        self.asked.append(body)
        if at := self.at.get(len(self.asked)):
            at()
        if body.get("stop"):
            return Step(outcome="stopped", text="")
        if not body.get("execute"):
            return Step(outcome="planned", text=f"{self.left} moves")
        if not self.left:
            return Step(outcome="placed", text="runs", node="n1")
        if not body["evict"]:
            return Step(outcome="held", text="", staying=self.left)
        self.left -= 1
        self.evicted_s.append(self.now_s)
        return Step(outcome="evicted", text="", evicted=f"team/p{self.left}", staying=self.left)

    def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s

    def run(self, **budget: Any) -> Run:
        given = {"pods": 4, "evictions": 1, "interval_s": 10.0, "time_s": 600.0} | budget
        return Run(
            "http://s",
            "team",
            "big",
            Budget(**given),
            now_s=lambda: self.now_s,
            sleep=self.sleep,
        )


def test_waiting_pod_is_planned_without_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, moves=2)
    result = CliRunner().invoke(main, ["defrag", "big", "-n", "team", "--scheduler", "http://s"])
    assert (result.exit_code, result.output) == (0, "planned: 2 moves\n")
    assert scheduler.asked == [{"namespace": "team", "pod": "big", "moves": 4}]


def test_evictions_keep_the_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = Scheduler(monkeypatch, moves=3)
    assert scheduler.run(evictions=2).execute("table") == 0
    first, second, third = scheduler.evicted_s
    assert second - first < 1.0
    assert third - first >= 10.0
    assert "placed: runs; 3 pods moved" in capsys.readouterr().out


def test_no_more_pods_are_evicted_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, moves=3)
    assert scheduler.run(pods=2, evictions=9, time_s=60.0).execute("json") == 1
    assert len(scheduler.evicted_s) == 2
    assert scheduler.asked[0]["moves"] == 2
    assert scheduler.asked[-1]["stop"]


def test_interrupt_stops_after_the_step_and_releases_what_is_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = Scheduler(monkeypatch, moves=3)
    before = signal.getsignal(signal.SIGINT)
    scheduler.at[1] = lambda: signal.raise_signal(signal.SIGINT)
    assert scheduler.run().execute("table") == 1
    assert [bool(one.get("stop")) for one in scheduler.asked] == [False, True]
    assert len(scheduler.evicted_s) == 1
    assert "stopped after the current step" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


def test_stop_by_another_caller_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, moves=1)
    monkeypatch.setattr(client, "send", lambda *_: Step(outcome="stopped", text="as asked"))
    assert scheduler.run().execute("json") == 1


def test_calls_go_on_while_the_scheduler_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, moves=1)

    def away() -> None:
        message = "http://s does not answer"
        raise Unreachable(message)

    scheduler.at = dict.fromkeys(range(2, 8), away)
    assert scheduler.run().execute("json") == 0
    assert len(scheduler.evicted_s) == 1


def test_evictions_whose_answer_was_lost_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = Scheduler(monkeypatch, moves=3)
    run = scheduler.run(pods=2, evictions=9, time_s=60.0)
    answers = iter(
        [
            Step(outcome="held", text="", moves=(MOVE, MOVE), staying=2),
            None,  # evicted, and the scheduler was killed
            Step(outcome="waiting", text="", staying=1),
            Step(outcome="evicted", text="", evicted="team/p", staying=0),
            Step(outcome="placed", text="runs"),
        ]
    )

    def send(kind: type[Step], base: str, path: str, body: dict[str, Any]) -> Step:
        del kind, base, path
        scheduler.asked.append(body)
        answer = next(answers)
        if answer is None:
            message = "http://s does not answer"
            raise Unreachable(message)
        return answer

    monkeypatch.setattr(client, "send", send)
    assert run.execute("json") == 0
    assert json.loads(capsys.readouterr().out)["evicted"] == ["unknown", "team/p"]
    assert [body["evict"] for body in scheduler.asked] == [True, True, True, True, False]


@pytest.mark.parametrize(
    "words", [["defrag"], ["defrag", "big", "--shape", "x"], ["defrag", "--shape", "x"]]
)
def test_pod_or_shape_is_required(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "--shape" in result.output
