# SPDX-License-Identifier: Apache-2.0
"""``hamictl usage`` and ``hamictl idle``: what is asked, and how it is shown."""

import csv
import io
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from hamictl import client
from hamictl.cli import main

GOLDEN = Path(__file__).parents[2] / "golden"


def row(name: str, hours: float, *, cost: float | None = None) -> dict[str, Any]:
    seconds = hours * 3600
    return {
        "name": name,
        "allocations": 2,
        "reserved_s": seconds,
        "used_s": seconds / 4,
        "wasted_s": seconds / 2,
        "unmeasured_s": seconds / 4,
        "idle_s": seconds / 8,
        "whole_s": seconds * 4,
        "saved_s": seconds * 3,
        "overcommitted_s": seconds / 8,
        "occupied_s": seconds,
        "memory_mib_s": seconds * 100,
        "used_mib_s": 0.0,
        "core_pct_s": 0.0,
        "device_time_s": 1.0,
        "throttled_s": 2.5,
        "refusals": 3,
        "cost": cost,
        "wasted_cost": None if cost is None else cost / 2,
        "whole_cost": None if cost is None else cost * 4,
    }


def answer(currency: str = "EUR", **more: Any) -> dict[str, Any]:
    return {
        "from_s": 1_800_000_000.0,
        "to_s": 1_800_086_400.0,
        "complete_since_s": 1_700_000_000.0,
        "unknown": 0,
        "cut": "",
        "by": "namespace",
        "label": "",
        "namespace": "",
        "currency": currency,
        "unpriced": [],
        "items": [row("team-a", 2, cost=3.0 if currency else None), row("team-b", 0.000001)],
        "total": row("", 2.000001),
        "fleet": {
            "capacity_s": 36000.0,
            "free_s": 28800.0,
            "overlap_s": 0.0,
            "capacity_mib_s": 0.0,
            "free_mib_s": 0.0,
            "capacity_core_pct_s": 0.0,
            "free_core_pct_s": 0.0,
        },
        **more,
    }


IDLE: dict[str, Any] = {
    "minutes": 30,
    "to_s": 10_000.0,
    "measured_since_s": 0.0,
    "namespace": "",
    "currency": "EUR",
    "cut": "",
    "items": [
        {
            "namespace": "team-a",
            "pod": "train-0",
            "pod_uid": "u",
            "queue": "",
            "node": "gpu-1",
            "uuid": "GPU-1",
            "index": 3,
            "model": "NVIDIA H200",
            "memory_mib": 500,
            "core_pct": 0,
            "exclusive": False,
            "since_s": 2_800.0,
            "is_since_known": False,
            "measured_by": "driver",
            "lost_s": 3_600.0,
            "cost": 1.5,
        }
    ],
}


class Asked(list[Any]):
    """Requests that were sent; ``answer`` is what they get."""

    answer: Any = None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    found.answer = answer()

    def read(kind: type[Any], base: str, path: str, **query: str) -> Any:
        del base
        found.append((path, {name: value for name, value in query.items() if value}))
        return msgspec.convert(found.answer, kind)

    monkeypatch.setattr(client, "read", read)
    return found


def run(*words: str) -> Result:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result


def test_usage_asks_for_the_last_day_by_namespace(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hami_common.runtime.clock.SystemClock.now_s", lambda _: 100_000.0)
    run("usage")
    run("usage", "--from", "2d", "--to", "2026-05-01T00:00:00Z", "--by", "node", "-n", "ns")
    assert asked == [
        ("/v1/consumption", {"from": "13600.000", "by": "namespace"}),
        (
            "/v1/consumption",
            {
                "from": "-72800.000",
                "to": "2026-05-01T00:00:00Z",
                "by": "node",
                "namespace": "ns",
            },
        ),
    ]


def test_usage_shows_hours_money_and_capacity(asked: Asked) -> None:
    lines = run("usage").stdout.splitlines()
    assert lines[0].split("   ")[0] == "NAMESPACE"
    assert lines[1].split() == [
        *("team-a", "2.00", "0.50", "1.00", "0.50", "0.25", "8.00", "75%"),
        *("3.00", "EUR", "1.50", "EUR"),
    ]
    assert lines[3].startswith("total")
    assert lines[4] == "All devices: 10.00 device hours, 8.00 free."


def test_usage_without_prices_has_no_money(asked: Asked) -> None:
    asked.answer = answer(currency="")
    result = run("usage")
    assert "COST" not in result.stdout
    assert "No prices are configured" in result.stderr


def test_usage_says_what_it_lacks(asked: Asked) -> None:
    asked.answer = answer(
        complete_since_s=1_800_000_001.5, unknown=2, cut="reading stopped", unpriced=["T4"]
    )
    text = run("usage").stderr
    assert "Complete since 2027-01-15T08:00:01.500Z: older events are not stored." in text
    assert "2 allocations are only partly known." in text
    assert "Incomplete: reading stopped." in text
    assert "No price is configured for T4." in text


def test_csv_and_json_lines_have_columns_of_focus(asked: Asked) -> None:
    text = run("usage", "-o", "csv").stdout_bytes.decode()
    assert text.count("\r\n") == 3
    first, second = csv.DictReader(io.StringIO(text))
    assert first["BilledCost"] == "3"
    assert first["BillingCurrency"] == "EUR"
    assert first["ChargePeriodStart"] == "2027-01-15T08:00:00.000Z"
    assert first["ChargePeriodEnd"] == "2027-01-16T08:00:00.000Z"
    assert (first["ConsumedQuantity"], first["ConsumedUnit"]) == ("2", "Device-Hours")
    assert (first["SubAccountId"], first["ResourceId"]) == ("team-a", "")
    assert (first["x_WastedHours"], first["x_ThrottledSeconds"]) == ("1", "2.5")
    assert (second["ConsumedQuantity"], second["BilledCost"]) == ("0.000001", "")
    lines = [json.loads(line) for line in run("usage", "-o", "jsonl").stdout.splitlines()]
    assert [line["SubAccountId"] for line in lines] == ["team-a", "team-b"]
    assert list(lines[0]) == list(first)
    assert lines[1]["BilledCost"] is None


@pytest.mark.parametrize(
    ("by", "name", "columns"),
    [
        ("pod", "ns/p", {"SubAccountId": "ns", "ResourceId": "ns/p", "ResourceType": "Pod"}),
        ("node", "n1", {"ResourceId": "n1", "ResourceType": "Node"}),
        ("queue", "gold", {"x_Queue": "gold"}),
        ("queue", "", {"x_Queue": None}),
        ("model", "T4", {"x_Model": "T4"}),
        ("sku", "s-8g@3", {"SkuId": "s-8g", "SkuPriceId": "s-8g@3"}),
        ("sku", "", {"SkuId": None, "SkuPriceId": None}),
        ("class", "spot", {"x_Class": "spot"}),
        ("label:team", "vision", {"Tags": '{"team": "vision"}', "SubAccountId": None}),
        ("label:team", "", {"Tags": None}),
    ],
)
def test_rows_name_what_they_sum_up(
    asked: Asked, by: str, name: str, columns: dict[str, Any]
) -> None:
    attribute, _, label = by.partition(":")
    asked.answer = answer(by=attribute, label=label, items=[row(name, 1)])
    (line,) = map(json.loads, run("usage", "--by", by, "-o", "jsonl").stdout.splitlines())
    assert {key: line[key] for key in columns} == columns
    assert asked[0][1]["by"] == attribute
    assert asked[0][1].get("label", "") == label


@pytest.mark.parametrize("by", ["label", "label:", "colour"])
def test_usage_refuses_an_attribute_that_is_none(asked: Asked, by: str) -> None:
    result = CliRunner().invoke(main, ["usage", "--by", by])
    assert result.exit_code == 2
    assert f"--by: {by!r} is no attribute: give one of namespace, queue" in result.output
    assert asked == []


# --- OpenCost -----------------------------------------------------------------------------------

MESSAGES = json.loads((GOLDEN / "opencost" / "messages.json").read_text(encoding="utf-8"))
KINDS: dict[str, Any] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and math.isfinite(value),
    "list": lambda value: isinstance(value, list),
    "map": lambda value: all(isinstance(one, str) for pair in value.items() for one in pair),
    "message": lambda value: isinstance(value, dict),
    "time": lambda value: datetime.fromisoformat(value).tzinfo,
}


def fits(message: dict[str, Any], name: str) -> bool:
    """Every field is one of the message, with a value of its type."""
    kinds = MESSAGES[name]
    return all(field in kinds and KINDS[kinds[field]](value) for field, value in message.items())


def test_opencost_gets_the_documented_message(asked: Asked) -> None:
    asked.answer = answer(cut="reading stopped")
    document = json.loads(run("usage", "-o", "opencost").stdout)
    assert fits(document, "CustomCostResponse")
    assert document["currency"] == "EUR"
    assert (document["start"], document["end"]) == (
        "2027-01-15T08:00:00.000Z",
        "2027-01-16T08:00:00.000Z",
    )
    assert document["errors"] == ["Incomplete: reading stopped."]
    first, second = document["costs"]
    assert all(fits(cost, "CustomCost") for cost in (first, second))
    assert all(
        fits(cost["extended_attributes"], "CustomCostExtendedAttributes")
        for cost in (first, second)
    )
    assert (first["billed_cost"], first["usage_quantity"], first["usage_unit"]) == (
        3.0,
        2.0,
        "Device-Hours",
    )
    assert first["list_unit_price"] == 1.5
    assert first["labels"] == {"namespace": "team-a"}
    assert first["extended_attributes"]["sub_account_id"] == "team-a"
    assert len({first["id"], second["id"]}) == 2


def test_opencost_gets_a_window_without_any_use(asked: Asked) -> None:
    asked.answer = {**answer(), "items": []}
    document = json.loads(run("usage", "-o", "opencost").stdout)
    assert fits(document, "CustomCostResponse")
    assert (document["costs"], document["end"]) == ([], "2027-01-16T08:00:00.000Z")


def test_opencost_gets_no_costs_without_prices(asked: Asked) -> None:
    asked.answer = answer(currency="")
    result = CliRunner().invoke(main, ["usage", "-o", "opencost"])
    assert result.exit_code == 2
    assert "needs prices" in result.output


def test_usage_refuses_a_time_that_is_none(asked: Asked) -> None:
    result = CliRunner().invoke(main, ["usage", "--from", "yesterday"])
    assert result.exit_code == 2
    assert "'yesterday' is no time: give RFC 3339" in result.output
    assert asked == []


def test_idle_shows_the_holder_and_the_lost_time(asked: Asked) -> None:
    asked.answer = IDLE
    lines = run("idle", "--minutes", "45", "-n", "team-a").stdout.splitlines()
    assert asked == [("/v1/idle", {"minutes": "45", "namespace": "team-a"})]
    assert lines[1].split() == [
        *("team-a", "train-0", "gpu-1", "3", "NVIDIA", "H200", "500", "-", ">2h", "1.00"),
        *("1.50", "EUR", "-", "-"),
    ]
    assert json.loads(run("idle", "-o", "json").stdout)["items"][0]["measured_by"] == "driver"


@pytest.mark.parametrize(
    ("action", "shown"),
    [
        ({"outcome": "done", "reason": "evicted"}, ["evict", "done,", "10m", "ago"]),
        (
            {"outcome": "refused", "code": "min-runtime"},
            ["evict", "refused:", "min-runtime,", "10m", "ago"],
        ),
        ({"outcome": "waiting", "after_s": 1200.0}, ["evict", "due", "in", "20m"]),
    ],
)
def test_idle_shows_the_policy_and_its_last_action(
    asked: Asked, action: dict[str, Any], shown: list[str]
) -> None:
    to_s = IDLE["to_s"]
    whole = {
        "policy": "evict",
        "code": "",
        "reason": "",
        "time_s": to_s - 600,
        "due_s": to_s + action.pop("after_s", 0.0),
        **action,
    }
    asked.answer = {**IDLE, "items": [{**IDLE["items"][0], "action": whole}]}
    line = run("idle").stdout.splitlines()[1].split()
    assert line[-len(shown) :] == shown
    assert str(action.get("reason", "")) in run("idle", "-o", "wide").stdout


def test_idle_says_that_nothing_is(asked: Asked) -> None:
    asked.answer = {**IDLE, "items": [], "cut": "reading stopped"}
    text = run("idle").stderr
    assert "No share was idle for 30 minutes." in text
    assert "Incomplete: reading stopped." in text
