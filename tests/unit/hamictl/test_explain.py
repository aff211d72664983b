# SPDX-License-Identifier: Apache-2.0
"""``hamictl explain pod`` of a pod that waits: what is true now, and what would let it in."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from hami_common.events import codec
from hami_common.events.allocation import Account, AllocationRecord, StateRecord
from hami_common.events.decision import (
    Amounts,
    DecisionRecord,
    DeviceHolder,
    DeviceTerms,
    NodeTerms,
    RefusedDevice,
    RefusedNode,
    ScoreDetail,
)
from hami_core.ledger.holding import Holding
from hami_core.quota.documents import Quotas
from hami_core.quota.queues import QueueConfig
from hami_core.quota.resourcequota import Asker
from hami_core.replay.snapshot import Snapshot
from hamictl import client
from hamictl.cli import main
from hamictl.client import Explanation
from hamictl.errors import Refused
from tests.support import builders

HOLDERS = (
    DeviceHolder(kind="claim", namespace="team-b", name="big", memory_mib=200, exclusive=True),
    DeviceHolder(kind="", memory_mib=50, core_pct=5),
)
CLOSEST = (
    RefusedNode(
        node="n0",
        code="CardInsufficientMemory",
        devices=(
            RefusedDevice(
                uuid="d0",
                code="CardInsufficientMemory",
                wanted=Amounts(memory_mib=900, slots=1),
                free=Amounts(memory_mib=700, core_pct=20, slots=3),
                holders=HOLDERS,
                holders_left_out=2,
            ),
        ),
    ),
    RefusedNode(node="n1", code="NodeUnregistered"),
    RefusedNode(
        node="n2",
        code="CardCordoned",
        devices=(RefusedDevice(uuid="d2", wanted=Amounts(), free=Amounts()),),
        devices_left_out=7,
    ),
    RefusedNode(node="n3", code="NodeUnregistered"),
)
SCORES = ScoreDetail(
    node_policy="binpack",
    device_policy="spread",
    decided_by="fill",
    nodes=(
        NodeTerms(node="a", score=62.5, slot=0.25, core=0.5, memory=0.75),
        NodeTerms(node="b", score=20),
    ),
    container="main",
    devices=(DeviceTerms(uuid="a-0", slot=0.1), DeviceTerms(uuid="a-1", slot=0.1)),
)
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Two nodes with a device each, and three pods that wait."""
    big = builders.node_devices("big", [builders.device("big-0", memory_mib=16_000)])
    small = builders.node_devices("small", [builders.device("small-0", memory_mib=8000)])
    known = Snapshot(
        snapshot_id="7.1",
        time_s=0.0,
        devices=(big, small),
        waiting=(
            builders.pod(builders.ask(mib=20_000), uid="u1", name="huge"),
            builders.pod(builders.ask(mib=10_000), uid="u2", name="fitting"),
            builders.pod(builders.ask(3, mib=20_000), uid="u3", name="hopeless"),
        ),
    )
    path = tmp_path / "snapshot.json"
    path.write_bytes(codec.encode(known))
    return path


def decided(verb: Any, verdict: Any = "placed", **more: Any) -> DecisionRecord:
    return DecisionRecord(
        verb=verb,
        namespace="default",
        pod="huge",
        pod_uid="u1",
        time_s=0.0,
        verdict=verdict,
        snapshot_id="1.1",
        **more,
    )


def explain(snapshot: Path, name: str, *more: str) -> Result:
    words = ["explain", "pod", name, "--snapshot", str(snapshot), "--registry", NOWHERE, *more]
    return CliRunner().invoke(main, words)


def test_explanation_of_a_device_names_the_memory_that_no_share_books(tmp_path: Path) -> None:
    used = builders.device("d", memory_mib=8000, foreign_mib=1000, bursts={"p": 3000, "q": 500})
    known = Snapshot(
        snapshot_id="7.1",
        time_s=0.0,
        devices=(builders.node_devices("n", [used]),),
        waiting=(builders.pod(builders.ask(mib=4000), uid="u1", name="huge"),),
    )
    path = tmp_path / "snapshot.json"
    path.write_bytes(codec.encode(known))
    text = explain(path, "huge", "--node", "n").output
    assert "4000 MiB wanted, 3500 free, 3500 used by pods beyond their requests (n)" in text
    uses = "1000 MiB used by processes outside HAMi, 3500 MiB used by pods beyond their requests"
    assert f"CardBurstUse: 4000 wanted, 3500 free, {uses}" in text


def test_pending_pod_shows_the_closest_fit(snapshot: Path) -> None:
    result = explain(snapshot, "huge")
    assert result.exit_code == 0, result.output
    assert "now: 0 of 2 nodes fit" in result.output
    assert "20000 MiB wanted, at most 16000 MiB free on a device (big)" in result.output
    assert "closest fit: container main: memory_mib 16000 instead of 20000 would fit on big" in (
        result.output
    )


def test_pod_that_fits_now_shows_the_node(snapshot: Path) -> None:
    result = explain(snapshot, "fitting", "--node", "small")
    assert "1 of 2 nodes fit" in result.output
    assert "big would be chosen" in result.output
    assert "CardInsufficientMemory: 10000 wanted, 8000 free" in result.output


@pytest.mark.parametrize(
    ("decision", "shown"),
    [
        (
            decided("filter", nodes_considered=3, nodes_feasible=1),
            "filter: placed, 1 of 3 nodes fit",
        ),
        (decided("bind", node="big"), "bind: placed on big"),
        (
            decided("bind", node="big", verdict="refused", error="node big: CardNotHealth"),
            "bind: refused on big: node big: CardNotHealth",
        ),
        (decided("preempt", verdict="refused", error="no pod may leave"), "refused: no pod may"),
    ],
)
def test_recorded_decision_has_its_numbers_or_its_node(
    decision: DecisionRecord, shown: str, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    known = Explanation(namespace="default", pod="huge", decisions=(decision,), allocations=())
    monkeypatch.setattr(client, "read", lambda *_: known)
    assert shown in explain(snapshot, "huge").output


@pytest.mark.parametrize(
    ("decision", "shown"),
    [
        (
            decided("filter", closest=CLOSEST),
            """
    NODE   DEVICE           REFUSAL                  WANTED    FREE                     HELD BY
    n0     d0               CardInsufficientMemory   900 MiB   700 MiB, 20 %, 3 slots   \
claim team-b/big 200 MiB whole, another namespace 50 MiB 5 %, 2 more
    n1                      NodeUnregistered
    n2     d2               fits                     0 MiB     0 MiB, 0 %, 0 slots      -
    n2     7 more devices
    and 1 more: see -o wide
""",
        ),
        (
            decided("prioritize", scores=SCORES),
            """
                  NAME   SCORE   SLOTS   COMPUTE   MEMORY   TOPOLOGY
    best node     a      62.5    25 %    50 %      75 %     0
    next node     b      20      0 %     0 %       0 %      0
    best device   a-0            10 %    0 %       0 %      0
    next device   a-1            10 %    0 %       0 %      0
    the best node has the better score; node policy binpack, device policy spread
""",
        ),
    ],
)
def test_details_of_a_decision_are_shown_as_tables(
    decision: DecisionRecord, shown: str, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    known = Explanation(namespace="default", pod="huge", decisions=(decision,), allocations=())
    monkeypatch.setattr(client, "read", lambda *_: known)
    assert shown in explain(snapshot, "huge").output


def test_wide_output_lists_all_closest_nodes(
    monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    decision = decided("filter", closest=CLOSEST)
    known = Explanation(namespace="default", pod="huge", decisions=(decision,), allocations=())
    monkeypatch.setattr(client, "read", lambda *_: known)
    output = explain(snapshot, "huge", "-o", "wide").output
    assert "    n3 " in output
    assert "see -o wide" not in output


def test_ways_to_start_the_pod_are_listed_the_cheapest_first(
    snapshot: Path, tmp_path: Path
) -> None:
    known = codec.decode(snapshot.read_bytes(), Snapshot, what="snapshot")
    share = builders.share("big-0", 7000)
    record = AllocationRecord(
        op="reserve",
        allocation_id="x",
        node="big",
        pod_uid="u9",
        namespace="team-b",
        pod="web",
        containers=(builders.held(share),),
        time_s=0.0,
    )
    state = StateRecord(
        state="running",
        allocation_id="x",
        node="big",
        pod_uid="u9",
        namespace="team-b",
        pod="web",
        ledger_seq=1,
    )
    holding = Holding(record=record, revision=1, state=state)
    snapshot.write_bytes(codec.encode(replace(known, time_s=7200.0, holdings=(holding,))))
    without = explain(snapshot, "fitting").output
    assert "moves of other pods not checked: a snapshot has none of them; give" in without
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "7000"}
    container = {"name": "main", "resources": {"limits": limits}}
    pod = {
        "metadata": {"name": "web", "namespace": "team-b", "uid": "u9"},
        "spec": {"containers": [container]},
    }
    pods = tmp_path / "pods.json"
    pods.write_text(json.dumps({"items": [pod]}))
    lines = explain(snapshot, "fitting", "--pods", str(pods)).output.splitlines()
    web = "team-b/web (7000 MiB, started 2h ago)"
    assert [line.strip() for line in lines if "closest fit" in line] == [
        "closest fit: container main: memory_mib 9000 instead of 10000 would fit on big",
        "closest fit: move team-b/web (7000 MiB) from big to small; the pod then fits on big",
        f"closest fit: wait until {web} ends; the pod then fits on big",
        "closest fit: add a node like big, empty and healthy; the pod fits on it",
    ]
    assert "not checked: a snapshot has none of them; give" not in "".join(lines)


def test_caller_without_permission_for_the_snapshot_reads_the_recorded_decisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decision = decided("filter", "refused", nodes_considered=3)
    known = Explanation(namespace="default", pod="huge", decisions=(decision,), allocations=())

    def refuse(*_: object) -> bytes:
        raise Refused("tenant may not get nodes in the whole cluster")

    monkeypatch.setattr(client, "read", lambda *_: known)
    monkeypatch.setattr(client, "fetch", refuse)
    result = CliRunner().invoke(main, ["explain", "pod", "huge"])
    assert result.exit_code == 0, result.output
    assert "filter: refused, 0 of 3 nodes fit" in result.output
    assert "now: tenant may not get nodes in the whole cluster" in result.output


def test_pods_belong_to_a_snapshot(tmp_path: Path) -> None:
    words = ["explain", "pod", "huge", "--pods", str(tmp_path / "pods.json")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "--pods needs --snapshot" in result.output


def test_pod_without_a_closest_fit_is_reported(snapshot: Path) -> None:
    assert "no single change of the request would let the pod fit" in (
        explain(snapshot, "hopeless").output
    )


def test_json_has_the_same(snapshot: Path) -> None:
    now = json.loads(explain(snapshot, "huge", "-o", "json").output)["now"]
    assert (now["nodes"], now["feasible"]) == (2, 0)
    assert now["closest"][0]["change"]["fits"] == "16000"


def test_pod_over_its_queue_limit_shows_the_amount_that_fits(snapshot: Path) -> None:
    known = codec.decode(snapshot.read_bytes(), Snapshot, what="snapshot")
    queue = QueueConfig(name="small", limit={"memory_mib": 4000}, allowed_namespaces=("default",))
    asker = Asker(account=Account(queue="small"), wish="small")
    quotas = Quotas(queues=(queue,), askers={"u2": asker})
    snapshot.write_bytes(codec.encode(replace(known, quotas=quotas)))
    output = explain(snapshot, "fitting").output
    assert "now: 0 of 2 nodes fit" in output
    assert "QueueOverLimit: queue small memory_mib: 10000 MiB wanted, 0 used, limit 4000" in output
    assert "closest fit: container main: memory_mib 4000 instead of 10000 would fit on" in output


def test_pod_that_is_not_pending_is_reported(snapshot: Path) -> None:
    assert "the scheduler has no such pending pod" in explain(snapshot, "unknown").output


def test_without_a_file_a_registry_must_answer() -> None:
    result = CliRunner().invoke(main, ["explain", "pod", "huge", "--registry", NOWHERE])
    assert result.exit_code == 3
    assert "does not answer" in result.output
