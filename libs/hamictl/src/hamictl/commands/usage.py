# SPDX-License-Identifier: Apache-2.0
"""``hamictl usage`` and ``hamictl idle``: device time, its price, and shares that do no work.

CSV and JSON lines have columns of the FinOps Open Cost and Usage Specification (FOCUS 1.2,
https://focus.finops.org/focus-specification/): those of that name mean what it says, those with the
prefix ``x_`` are ours. The console writes the same CSV.
"""

import csv
import io
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import click

from hami_common.runtime.clock import SystemClock
from hamictl import client, opencost, options, output
from hamictl.errors import InputRefused

BYS: Final = ("namespace", "queue", "model", "node", "pod", "sku", "class")
LABEL: Final = "label:"
FORMATS: Final = ("table", "csv", "jsonl", "opencost", "json", "yaml")
HOUR_S: Final = 3600.0
DIGITS: Final = 6
_AGO: Final = re.compile(r"([0-9]{1,6})([mhd])")
_UNIT_S: Final = {"m": 60.0, "h": HOUR_S, "d": 24 * HOUR_S}
_WEEK_MINUTES: Final = 7 * 24 * 60


@click.command()
@click.option(
    "--from",
    "from_",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Begin: RFC 3339, or a time before now such as 90m, 24h or 7d.",
)
@click.option("--to", default="", metavar="TIME", help="End, likewise; default: now.")
@click.option(
    "--by",
    default="namespace",
    show_default=True,
    metavar="ATTRIBUTE",
    help="Attribute by which time is summed up: namespace, queue, model, node, pod, sku, class, or"
    " label:KEY.",
)
@options.only_namespace_option
@options.registry_option
@click.option(
    "-o",
    "--output",
    "format_",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="Output format; csv and jsonl have columns of FOCUS, opencost is a CustomCostResponse.",
)
def usage(*, from_: str, to: str, by: str, namespace: str, registry: str, format_: str) -> None:
    """Show device hours reserved, used and wasted, and their price.

    Also shows what sharing saves against whole devices. A share counts with the larger of its
    parts of memory and compute of the device.
    """
    now_s = SystemClock().now_s()
    answer = client.read(
        client.Consumption,
        registry,
        "/v1/consumption",
        **{"from": _time(from_, now_s), "to": _time(to, now_s)},
        **_attribute(by),
        namespace=namespace,
    )
    if output.structured(answer, format_):
        return
    problems = problems_of(answer)
    if format_ == "opencost":
        click.echo(json.dumps(_opencost(answer, problems), indent=1))
        return
    for problem in problems:
        click.echo(problem, err=True)
    if format_ == "csv":
        click.echo(as_csv(answer), nl=False)
    elif format_ == "jsonl":
        for row in answer.items:
            click.echo(json.dumps(focus_row(answer, row)))
    else:
        _print_usage(answer)


@click.command()
@click.option(
    "--minutes",
    type=click.IntRange(1, _WEEK_MINUTES),
    default=30,
    show_default=True,
    help="Least idle time.",
)
@options.only_namespace_option
@options.registry_option
@options.format_option
def idle(minutes: int, namespace: str, registry: str, format_: str) -> None:
    """Show idle shares and the device time that they cost.

    An idle share is reserved and did no work on its device. Time counts as in hamictl usage. The
    policy and the last action are the scheduler's, where policies for idle allocations are on.
    """
    answer = client.read(
        client.IdleShares, registry, "/v1/idle", minutes=str(minutes), namespace=namespace
    )
    if output.structured(answer, format_):
        return
    if answer.cut:
        click.echo(f"Incomplete: {answer.cut}.", err=True)
    headings = ["NAMESPACE", "POD", "NODE", "DEVICE", "MODEL", "MEMORY MIB", "CORES %", "IDLE"]
    headings += ["DEVICE HOURS LOST", *(["COST"] if answer.currency else [])]
    headings += ["POLICY", "ACTION"]
    headings += ["UUID", "MEASURED BY", "REASON"] if format_ == "wide" else []
    output.table(
        headings,
        [
            [
                one.namespace,
                one.pod,
                one.node,
                one.index,
                one.model,
                one.memory_mib,
                one.core_pct or "-",
                ("" if one.is_since_known else ">") + output.age(answer.to_s - one.since_s),
                f"{one.lost_s / HOUR_S:.2f}",
                *([_money(one.cost, answer.currency)] if answer.currency else []),
                one.action.policy if one.action else "-",
                _action(one.action, answer.to_s),
                *(
                    [one.uuid, one.measured_by, one.action.reason if one.action else ""]
                    if format_ == "wide"
                    else []
                ),
            ]
            for one in answer.items
        ],
        empty=f"No share was idle for {minutes} minutes.",
    )


def _action(action: client.IdleAction | None, now_s: float) -> str:
    """Return the outcome of the newest action, with its reason or time."""
    if action is None:
        return "-"
    if action.outcome == "waiting":
        return f"due in {output.age(max(0.0, action.due_s - now_s))}"
    ago = f"{output.age(max(0.0, now_s - action.time_s))} ago"
    return f"{action.outcome}: {action.code}, {ago}" if action.code else f"{action.outcome}, {ago}"


def _print_usage(answer: client.Consumption) -> None:
    headings = [
        (answer.label or answer.by).upper(),
        "RESERVED H",
        "USED H",
        "WASTED H",
        "UNMEASURED H",
        "IDLE H",
    ]
    headings += ["WHOLE DEVICES H", "SAVED"]
    headings += ["COST", "WASTED"] if answer.currency else []
    rows = [*answer.items, answer.total] if len(answer.items) > 1 else answer.items
    output.table(
        headings,
        [
            [
                "total" if row is answer.total else row.name or "-",
                *(
                    f"{seconds / HOUR_S:.2f}"
                    for seconds in (
                        row.reserved_s,
                        row.used_s,
                        row.wasted_s,
                        row.unmeasured_s,
                        row.idle_s,
                        row.whole_s,
                    )
                ),
                f"{100 * row.saved_s / row.whole_s:.0f}%" if row.whole_s else "-",
                *(
                    [_money(row.cost, answer.currency), _money(row.wasted_cost, answer.currency)]
                    if answer.currency
                    else []
                ),
            ]
            for row in rows
        ],
        empty="No pod held a device in this time.",
    )
    if answer.fleet is not None:
        capacity, free = answer.fleet.capacity_s / HOUR_S, answer.fleet.free_s / HOUR_S
        click.echo(f"All devices: {capacity:.2f} device hours, {free:.2f} free.")
    if not answer.currency:
        click.echo("No prices are configured: see docs/usage.md.", err=True)


def problems_of(answer: client.Consumption) -> list[str]:
    """Return what the answer lacks, in sentences."""
    found: list[str] = []
    if answer.complete_since_s > answer.from_s:
        since = _rfc3339(answer.complete_since_s)
        found.append(f"Complete since {since}: older events are not stored.")
    if answer.unknown:
        found.append(f"{answer.unknown} allocations are only partly known.")
    if answer.cut:
        found.append(f"Incomplete: {answer.cut}.")
    if answer.unpriced:
        found.append(f"No price is configured for {', '.join(answer.unpriced)}.")
    return found


def _attribute(by: str) -> Mapping[str, str]:
    """Return the query parameters of an attribute."""
    if by.startswith(LABEL) and by != LABEL:
        return {"by": "label", "label": by.removeprefix(LABEL)}
    if by in BYS:
        return {"by": by}
    message = f"--by: {by!r} is no attribute: give one of {', '.join(BYS)}, or label:KEY"
    raise InputRefused(message)


def _opencost(answer: client.Consumption, problems: list[str]) -> Mapping[str, object]:
    if not answer.currency:
        message = "-o opencost needs prices: set them in the registry, see docs/usage.md"
        raise InputRefused(message)
    rows = [focus_row(answer, row) for row in answer.items]
    return opencost.response_of(
        answer,
        rows,
        start=_rfc3339(answer.from_s),
        end=_rfc3339(answer.to_s),
        problems=problems,
    )


def focus_row(answer: client.Consumption, row: client.ConsumptionRow) -> Mapping[str, object]:
    """Return one row with columns of FOCUS; numbers have ``DIGITS`` digits, money may be absent."""
    by, name = answer.by, row.name
    namespace = name.partition("/")[0] if by in ("namespace", "pod") else answer.namespace
    resource = name if by in ("pod", "node") else ""
    return {
        "BilledCost": _rounded(row.cost),
        "BillingCurrency": answer.currency or None,
        "ChargeCategory": "Usage",
        "ChargePeriodStart": _rfc3339(answer.from_s),
        "ChargePeriodEnd": _rfc3339(answer.to_s),
        "ConsumedQuantity": _hours(row.reserved_s),
        "ConsumedUnit": "Device-Hours",
        "ResourceId": resource or None,
        "ResourceType": {"pod": "Pod", "node": "Node"}.get(by),
        "ServiceCategory": "Compute",
        "ServiceName": "HAMi",
        "SkuId": (name.partition("@")[0] or None) if by == "sku" else None,
        "SkuPriceId": (name or None) if by == "sku" else None,
        "SubAccountId": namespace or None,
        "Tags": json.dumps({answer.label: name}) if answer.label and name else None,
        "x_Queue": (name or None) if by == "queue" else None,
        "x_Model": name if by == "model" else None,
        "x_Class": (name or None) if by == "class" else None,
        "x_UsedHours": _hours(row.used_s),
        "x_WastedHours": _hours(row.wasted_s),
        "x_UnmeasuredHours": _hours(row.unmeasured_s),
        "x_IdleHours": _hours(row.idle_s),
        "x_OvercommittedHours": _hours(row.overcommitted_s),
        "x_WholeDeviceHours": _hours(row.whole_s),
        "x_WastedCost": _rounded(row.wasted_cost),
        "x_WholeDeviceCost": _rounded(row.whole_cost),
        "x_MemoryMiBHours": _hours(row.memory_mib_s),
        "x_CorePercentHours": _hours(row.core_pct_s),
        "x_ThrottledSeconds": _rounded(row.throttled_s),
        "x_MemoryRefusals": row.refusals,
        "x_Allocations": row.allocations,
    }


def as_csv(answer: client.Consumption) -> str:
    """Return CSV (RFC 4180, with a header) of all rows."""
    rows = [focus_row(answer, row) for row in answer.items]
    names = list(focus_row(answer, answer.total))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _text(value: object) -> object:
    """Return a number without exponent and without zeros at its end, as the console writes it."""
    if not isinstance(value, float):
        return value
    return f"{value:.{DIGITS}f}".rstrip("0").rstrip(".")


def _time(text: str, now_s: float) -> str:
    """Return a time as a query parameter: one before now as Unix seconds, other text as it is."""
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return f"{now_s - int(ago[1]) * _UNIT_S[ago[2]]:.3f}"
    if text and "T" not in text:
        message = f"{text!r} is no time: give RFC 3339 such as 2026-05-01T00:00:00Z, or 24h"
        raise InputRefused(message)
    return text


def _rfc3339(time_s: float) -> str:
    return (
        datetime.fromtimestamp(time_s, tz=UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _hours(seconds: float) -> float:
    return round(seconds / HOUR_S, DIGITS)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _money(value: float | None, currency: str) -> str:
    return "-" if value is None else f"{value:.2f} {currency}"
