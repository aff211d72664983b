# SPDX-License-Identifier: Apache-2.0
"""``hamictl events`` accepts and summarizes every kind of event that is published."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from hami_common.events.catalog import FAMILIES
from hamictl.cli import main
from hamictl.eventstream import KINDS, Event, Filter, summary

GOLDEN = Path(__file__).parents[2] / "golden" / "events"


@pytest.mark.parametrize("kind", [family.word for family in FAMILIES])
def test_kind_of_the_catalog_is_selected_and_summarized(kind: str) -> None:
    for payload in sorted((GOLDEN / f"{kind}.v1").glob("*.json")):
        event = Event(
            sequence=1,
            time_s=0.0,
            kind=kind,
            subject=f"hami.v1.event.{kind}.n.v",
            node="n",
            namespace="",
            pod="",
            record=msgspec.json.decode(payload.read_bytes()),
        )
        assert Filter(kinds=frozenset({kind})).matches(event)
        text = summary(event)
        assert text or kind == "partition"
        assert "None" not in text


def test_summary_of_a_quarantined_object_has_its_service_and_problem() -> None:
    record = msgspec.json.decode((GOLDEN / "quarantine.v1" / "entered.json").read_bytes())
    event = Event(
        sequence=1,
        time_s=0.0,
        kind="quarantine",
        subject="hami.v1.event.quarantine.scheduler.r",
        node="",
        namespace="",
        pod="",
        record=record,
    )
    assert summary(event).startswith("scheduler: pod, 3 failures: ValueError: Exceeds the limit")
    event.record["is_over"] = True
    assert summary(event).startswith("scheduler: pod, released: ")


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    result = CliRunner().invoke(main, ["events", "--kind", "nothing"])
    assert result.exit_code != 0
    assert all(f"'{kind}'" in result.output for kind in KINDS)
