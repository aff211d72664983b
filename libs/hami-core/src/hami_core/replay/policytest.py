# SPDX-License-Identifier: Apache-2.0
"""Evaluates the tests of a policies file: figures of a comparison against their bounds.

The figures are those of ``compare`` for a history, and those of ``hamictl simulate`` for one
moment, which knows neither waits nor time. Golden placements are lines ``NAMESPACE/POD NODE
UUID,UUID`` in order of arrival, ``NAMESPACE/POD -`` for a pod without devices.
"""

import difflib
from collections.abc import Sequence
from math import ceil
from typing import Final

from msgspec import Struct

from hami_common.errors import RequestInvalid
from hami_core.planning.packing import Packing
from hami_core.replay.compare import PodOutcome, PolicyResult
from hami_core.replay.policies import Expectation, PolicyTest

_P95: Final = 0.95
_DIFFERENCES_SHOWN: Final = 20


class Trial(Struct, frozen=True, kw_only=True):
    """One policy on one trace."""

    pods: tuple[PodOutcome, ...]
    """In order of arrival."""
    figures: dict[str, float]
    """Measures of devices; those that the trace does not have are absent."""
    has_time: bool = True
    """False for one moment."""


class Checked(Struct, frozen=True, kw_only=True):
    """One expectation with its outcome."""

    text: str
    passed: bool
    value: float | None = None
    problem: str = ""
    """Reason of a failure."""


class Tested(Struct, frozen=True, kw_only=True):
    """One test with its outcome."""

    name: str
    policy: str
    trace: tuple[str, ...]
    passed: bool
    checks: tuple[Checked, ...]


def of_result(result: PolicyResult, pods: tuple[PodOutcome, ...]) -> Trial:
    """Return the trial of a history under one policy."""
    figures = {
        "packing_pct": 100 * result.used_devices_full_mean,
        "stranded_pct": 100 * result.stranded_mean,
        "devices_used_peak": float(result.devices_used_peak),
        "device_hours": result.device_hours,
    }
    if result.cost is not None:
        figures["cost"] = result.cost
    return Trial(pods=pods, figures=figures)


def of_moment(after: Packing, pods: tuple[PodOutcome, ...]) -> Trial:
    """Return the trial of a snapshot under one policy."""
    return Trial(
        pods=pods,
        figures={
            "packing_pct": 100 * after.used_devices_full,
            "stranded_pct": 100 * after.stranded,
            "devices_used_peak": float(after.devices_used),
        },
        has_time=False,
    )


def evaluate(
    test: PolicyTest, trial: Trial, *, recorded: Trial | None, golden: Sequence[str] | None
) -> tuple[Checked, ...]:
    """Return each expectation with its outcome; ``golden``: expected lines, ``None``: no file."""
    checks = [_checked(one, trial, recorded) for one in test.expect]
    if test.golden:
        checks.append(_golden(test.golden, golden, lines_of(trial.pods)))
    return tuple(checks)


def lines_of(pods: Sequence[PodOutcome]) -> list[str]:
    """Return the placements as a golden file has them."""
    return [
        f"{one.namespace}/{one.pod} {one.node} {','.join(one.devices)}"
        if one.node
        else f"{one.namespace}/{one.pod} -"
        for one in pods
    ]


def _golden(name: str, expected: Sequence[str] | None, got: Sequence[str]) -> Checked:
    text = f"placements as in {name}"
    if expected is None:
        return Checked(text=text, passed=False, problem="no such file; --update writes it")
    if list(expected) == list(got):
        return Checked(text=text, passed=True)
    lines = [
        line
        for line in difflib.unified_diff(expected, got, lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if len(lines) > _DIFFERENCES_SHOWN:
        more = f"and {len(lines) - _DIFFERENCES_SHOWN} more lines"
        lines = [*lines[:_DIFFERENCES_SHOWN], more]
    return Checked(text=text, passed=False, problem="\n".join(lines))


def _checked(one: Expectation, trial: Trial, recorded: Trial | None) -> Checked:
    value = _value(one, trial)
    bounds = [(one.least, True, ""), (one.most, False, "")]
    if one.is_relative:
        if recorded is None:
            raise RequestInvalid(
                field=f"{one.measure}: percent of the record",
                problem="a snapshot has no record to compare with",
                fix="give least or most, or a stimulus log or events as trace",
            )
        whole = _value(one, recorded)
        bounds += [
            (whole * part / 100, is_least, f", {part:g} % of recorded")
            for part, is_least in (
                (one.least_pct_of_recorded, True),
                (one.most_pct_of_recorded, False),
            )
            if part is not None
        ]
    named = f"{one.measure} of {one.namespace}" if one.namespace else one.measure
    stated = [
        (bound, is_least, f"{'≥' if is_least else '≤'} {bound:g}{note}")
        for bound, is_least, note in bounds
        if bound is not None
    ]
    broken = [
        text for bound, is_least, text in stated if (value < bound if is_least else value > bound)
    ]
    return Checked(
        text=f"{named} {' and '.join(text for _, _, text in stated)}",
        passed=not broken,
        value=round(value, 4),
        problem=f"is {value:g}, expected {' and '.join(broken)}" if broken else "",
    )


def _value(one: Expectation, trial: Trial) -> float:
    """Return the figure; ``RequestInvalid`` if the trace does not have it."""
    pods = [pod for pod in trial.pods if one.namespace in ("", pod.namespace)]
    if one.namespace and not pods:
        raise RequestInvalid(
            field=f"{one.measure}: namespace",
            problem=f"no pod of {one.namespace} arrives in the trace",
            fix="name a namespace of the trace",
        )
    waits_s = sorted(pod.wait_s for pod in pods if pod.wait_s > 0 or not pod.node)
    match one.measure:
        case "placed":
            return float(sum(bool(pod.node) for pod in pods))
        case "never_placed":
            return float(sum(not pod.node for pod in pods))
        case "waited" if trial.has_time:
            return float(len(waits_s))
        case "wait_p95_s" if trial.has_time:
            return waits_s[ceil(_P95 * len(waits_s)) - 1] if waits_s else 0.0
        case "wait_most_s" if trial.has_time:
            return max(waits_s, default=0.0)
        case "wait_total_s" if trial.has_time:
            return sum(waits_s)
        case measure if measure in trial.figures:
            return trial.figures[measure]
    raise RequestInvalid(
        field=one.measure,
        problem="a snapshot is one moment and does not have it",
        fix="give a stimulus log, or events with a snapshot, as trace",
    )
