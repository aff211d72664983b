# SPDX-License-Identifier: Apache-2.0
"""``hamictl explain pod`` of a pod that waits: what is true now, and what would let it in."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from hami_common.events import codec
from hami_common.events.allocation import Account
from hami_common.events.decision import DecisionRecord
from hami_core.quota.documents import Quotas
from hami_core.quota.queues import QueueConfig
from hami_core.quota.resourcequota import Asker
from hami_core.replay.snapshot import Snapshot
from hamictl import client
from hamictl.cli import main
from hamictl.client import Explanation
from tests.support import builders

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


def test_pod_without_a_closest_fit_is_reported(snapshot: Path) -> None:
    assert "no single change of the request would let the pod fit" in (
        explain(snapshot, "hopeless").output
    )


def test_json_has_the_same(snapshot: Path) -> None:
    now = json.loads(explain(snapshot, "huge", "-o", "json").output)["now"]
    assert (now["nodes"], now["feasible"]) == (2, 0)
    assert now["closest"][0]["fits"] == "16000"


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
