# SPDX-License-Identifier: Apache-2.0
"""Prints queues and quotas of namespaces as tables."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hamictl import client, output

if TYPE_CHECKING:
    from hami_core.quota.accounts import QueueRow, QuotaRow


def queues(items: "Iterable[client.Queue | QueueRow]") -> None:
    """Print queues, those above first."""
    headings = ["QUEUE", "RESOURCE", "USED", "GUARANTEED", "BORROWED", "LIMIT", "WEIGHT", "WAITING"]
    rows = [
        [
            "  " * (one.depth - 1) + one.queue,
            one.resource,
            one.used,
            one.guaranteed,
            one.borrowed,
            "-" if one.limit is None else one.limit,
            one.borrow_weight,
            one.waiting,
        ]
        for one in items
    ]
    output.table(headings, rows, empty="No queues found.")


def quotas(items: "Iterable[client.Quota | QuotaRow]") -> None:
    """Print the limits of ResourceQuotas."""
    headings = ["NAMESPACE", "QUOTA", "KEY", "USED", "LIMIT"]
    rows = [
        [one.namespace, one.quota, one.key, one.used, one.problem or one.limit] for one in items
    ]
    output.table(headings, rows, empty="No ResourceQuota limits a device.")


_NO_ESTIMATE = {
    "few-starts": "unknown: few pods of the queue started lately",
    "none-as-large": "unknown: no pod as large started lately",
    "never": "never: the request exceeds a limit",
}


def waiting(items: "Iterable[client.WaitingPod]", *, now_s: float) -> None:
    """Print the pods that wait, by queue and position."""
    headings = ["QUEUE", "POSITION", "POD", "AGE", "AHEAD", "REASON", "ESTIMATED WAIT"]
    rows = [
        [
            one.queue or "-",
            one.position,
            f"{one.namespace}/{one.pod}",
            output.age(now_s - one.created_s) if one.created_s else "-",
            f"{one.ahead.get('memory_mib', 0)} MiB" if one.ahead else "-",
            one.reason or "-",
            _NO_ESTIMATE.get(one.estimate.basis, "unknown")
            if one.estimate.wait_s is None
            else f"about {output.age(one.estimate.wait_s)}",
        ]
        for one in items
    ]
    output.table(headings, rows, empty="No pod waits.")


def headroom(items: "Iterable[client.Headroom]") -> None:
    """Print what a namespace may still use, of each resource alone."""
    rows = [
        [one.resource, "no limit" if one.amount is None else one.amount, one.text] for one in items
    ]
    output.table(["RESOURCE", "STILL ALLOWED", "FIRST REFUSAL"], rows, empty="No limit applies.")
