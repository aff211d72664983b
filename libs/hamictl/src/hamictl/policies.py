# SPDX-License-Identifier: Apache-2.0
"""Parses placement policies, and compares them by the pods that a scheduler placed before."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
import msgspec

from hami_common import documents
from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.model.prices import Prices
from hami_common.model.request import PlacementPolicy, ScoringWeights
from hami_common.vendors.catalog import parse_policy
from hami_core.replay.compare import (
    HOURS_MOST,
    ComparedPolicy,
    PolicyChoice,
    PolicyComparison,
    PolicyQuestion,
    PolicyResult,
)
from hami_core.replay.compare import compare as compare_policies
from hami_core.replay.loghistory import LogHistory
from hamictl import client, output
from hamictl.errors import InputRefused
from hamictl.inputs import read

_HOURS_OF: Final = {"m": 1 / 60, "h": 1.0, "d": 24.0}


def compare(
    scheduler: str, since: str, words: tuple[str, ...], prices_file: Path | None, format_: str
) -> int:
    """Print recorded arrivals under each policy; return how many pods the worst never placed."""
    question = PolicyQuestion(hours=_hours(since), prices=prices_of(prices_file))
    if words:
        question = msgspec.structs.replace(question, policies=choices_of(words))
    compared = client.send(PolicyComparison, scheduler, "/v1/whatif/policy", question)
    if not output.structured(compared, format_):
        _show(compared)
    return max(one.never_placed for one in compared.results)


def compare_log(
    log: LogHistory, words: tuple[str, ...], prices_file: Path | None, format_: str
) -> None:
    """Print the pods of a stimulus log under each policy."""
    compared = compare_policies(
        log.history,
        policies_of(words, log.policy),
        check=lambda: None,
        prices=prices_of(prices_file),
    )
    if log.gaps:
        click.echo(f"The log has {log.gaps} gaps; pods that arrived there are missing.", err=True)
    if not output.structured(compared, format_):
        _show(compared)


def prices_of(path: Path | None) -> Prices:
    """Read the prices of a TOML file; without a file there are none."""
    if path is None:
        return Prices()
    content = read(path)
    try:
        document = documents.toml(content, field=str(path))
        prices = msgspec.convert(document["prices"], Prices)
        prices.check()
    except KeyError as error:
        message = f"{path}: no table [prices]; give a file such as registry.toml"
        raise InputRefused(message) from error
    except (msgspec.ValidationError, SettingsInvalid) as error:
        message = f"{path}: {error}"
        raise InputRefused(message) from error
    return prices


def _show(compared: PolicyComparison) -> None:
    rows = [
        [
            "as recorded" if one.policy is None else policy_text(_full(one.policy)),
            one.placed_at_once,
            one.waited,
            one.never_placed,
            f"{one.wait_p95_s:.0f} s" if one.waited else "-",
            f"{one.used_devices_full_mean:.0%}",
            f"{one.devices_free_mean:.1f}/{compared.devices}",
            f"{one.stranded_mean:.0%}",
            f"{one.device_hours:.1f}",
            *([_cost(one, compared)] if compared.currency else []),
        ]
        for one in (compared.recorded, *compared.results)
    ]
    headings = [
        "POLICY",
        "AT ONCE",
        "WAITED",
        "NEVER",
        "P95 WAIT",
        "USED DEVICES FULL",
        "DEVICES FREE",
        "FREE MEMORY STRANDED",
        "DEVICE HOURS",
        *(["COST"] if compared.currency else []),
    ]
    output.table(headings, rows, empty="")
    begin = datetime.fromtimestamp(compared.from_s, tz=UTC)
    click.echo(
        f"\n{compared.arrivals} pods arrived since {begin:%Y-%m-%dT%H:%M:%SZ}, "
        f"{compared.running} ran already"
    )
    if compared.unpriced:
        click.echo(f"no price, in no cost: {', '.join(compared.unpriced)}")
    if compared.left_out:
        click.echo(
            f"{compared.left_out} earlier arrivals are left out; fewer policies include more"
        )
    if compared.without_begin:
        click.echo(
            f"{compared.without_begin} pods are missing: their reservation is no longer stored"
        )


def _cost(one: PolicyResult, compared: PolicyComparison) -> str:
    """Format the cost, with the difference from the record."""
    cost, recorded = one.cost or 0.0, compared.recorded.cost or 0.0
    text = f"{cost:.2f} {compared.currency}"
    if one.policy is not None and recorded:
        text += f" ({(cost - recorded) / recorded:+.0%})"
    return text


def _full(policy: ComparedPolicy) -> PlacementPolicy:
    return PlacementPolicy(
        node=policy.node_policy, device=policy.device_policy, weights=policy.weights
    )


def _hours(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text)
    hours = float(found[1]) * _HOURS_OF[found[2]] if found else 0.0
    if not 0 < hours <= HOURS_MOST:
        message = f"--since {text}: write a duration up to 7d, such as 90m, 24h or 7d"
        raise InputRefused(message)
    return hours


def choices_of(words: tuple[str, ...]) -> tuple[PolicyChoice, ...]:
    """Parse the policies to compare; parts that a word omits stay as the scheduler has them."""
    found = []
    for parts in _policies(words):
        named = {part.partition("=")[0] for part in parts}
        policy = policy_of(parts, PlacementPolicy())
        found.append(
            PolicyChoice(
                node_policy=policy.node if "node" in named else None,
                device_policy=policy.device if "device" in named else None,
                weights=policy.weights if "weights" in named else None,
            )
        )
    return tuple(found)


def policies_of(words: tuple[str, ...], default: PlacementPolicy) -> list[PlacementPolicy]:
    """Parse the policies to compare, each ``node=…;device=…;weights=…`` over the default.

    Words without a semicolon that each set a different part are joined to one policy.
    """
    return [policy_of(some, default) for some in _policies(words)]


def _policies(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the parts of each policy."""
    parts = [tuple(filter(None, word.split(";"))) for word in words]
    named = [part.partition("=")[0] for some in parts for part in some]
    if all(len(some) == 1 for some in parts) and len(set(named)) == len(named):
        return [tuple(part for some in parts for part in some)]
    return parts


def policy_of(words: tuple[str, ...], default: PlacementPolicy) -> PlacementPolicy:
    """Parse a policy from ``node=…``, ``device=…``, ``weights=…`` words over the default."""
    keys = {
        "node": "hami.io/node-scheduler-policy",
        "device": "hami.io/gpu-scheduler-policy",
        "weights": "hami.io/device-scoring-weights",
    }
    annotations = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in keys:
            message = f"--policy {word}: write node=…, device=… or weights=…"
            raise InputRefused(message)
        annotations[keys[name]] = value
    try:
        return parse_policy(annotations, defaults=default)
    except RequestInvalid as error:
        raise InputRefused(str(error)) from error


def policy_text(policy: PlacementPolicy) -> str:
    """Format the policy as a value of ``--policy``."""
    weights = policy.weights
    text = f"node={policy.node};device={','.join(policy.device)}"
    if weights != ScoringWeights():
        text += f";weights=slot={weights.slot},core={weights.core},memory={weights.memory}"
    return text
