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
