# SPDX-License-Identifier: Apache-2.0
"""Compares the ledger with the pods and plans a step for each difference (design D6).

Pods are what really runs, the ledger assigns the shares. A committed allocation (assigned pod with
a valid signature) without a live record is restored; a record whose pod can no longer use it is
released; a record whose pod was not found is doubted, because a label can vanish while the pod
runs. An unbound reservation is left to its lease. Decides only; revisions are JetStream sequences.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from hami_common.events.allocation import is_of_claim
from hami_common.pods.signing import SignedPlacement
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import PodFacts

Judgement = Literal["keep", "confirm", "release", "replace", "undecided", "align"]
"""``confirm``: committed, but no state record reports it.

``replace``: another allocation of the same pod on the same node is committed. ``undecided``: not
bound yet. ``align``: committed, and resized since in the ledger only.
"""


class Release(Struct, frozen=True, kw_only=True):
    """Release the share, unless the record has moved past the holding's revision."""

    holding: Holding
    reason: str


class Doubt(Struct, frozen=True, kw_only=True):
    """Ask the API server whether the pod is really gone."""

    holding: Holding


class Confirm(Struct, frozen=True, kw_only=True):
    """Write the state ``bound``."""

    holding: Holding


class Restore(Struct, frozen=True, kw_only=True):
    """Restore a committed allocation in the ledger."""

    signed: SignedPlacement
    must: bool = False
    """The pod's containers exist, so it wins over arithmetic."""
    replaces: Holding | None = None


class Align(Struct, frozen=True, kw_only=True):
    """Write the annotations that belong to the record: a resize was interrupted."""

    holding: Holding


Step = Release | Doubt | Confirm | Restore | Align


def judge(holding: Holding, pod: PodFacts) -> tuple[Judgement, str]:
    """Judge the holding by ``pod`` (of the same uid); includes the reason of a release."""
    if pod.is_finished:
        return "release", "pod-finished"
    if not pod.node:
        return "undecided", ""
    if pod.node != holding.record.node:
        return "release", "bound-elsewhere"
    if pod.signed is None:
        if pod.mistrust or holding.containers_exist() or holding.record.origin:
            # The annotation cannot be verified with the present keys, or a pod of HAMi's has none
            # yet: only the record is known.
            return "keep", ""
        return "release", "bound-without-allocation"
    if pod.signed.allocation_id != holding.record.allocation_id:
        return "replace", ""
    state = holding.state
    if state is None or state.allocation_id != holding.record.allocation_id:
        return "confirm", ""
    if (
        holding.record.op == "resize"
        and pod.signed.placement.containers != holding.record.containers
    ):
        return "align", ""
    return "keep", ""


def compare(holdings: Iterable[Holding], pods: Mapping[str, PodFacts]) -> list[Step]:
    """Return the steps that reconcile the ledger with ``pods`` (by uid), releases first.

    Restores come in the order of their ledger sequence, pods whose containers exist before others,
    so that the older commitment wins when two claim one share and every replica decides alike.
    """
    releases: list[Step] = []
    others: list[Step] = []
    restores: list[Restore] = []
    held: set[tuple[str, str]] = set()
    for holding in holdings:
        record = holding.record
        held.add((record.node, record.pod_uid))
        if is_of_claim(record):  # compared with its claim: no pod has its uid
            others.append(Doubt(holding=holding))
            if record.limits:
                others.append(Align(holding=holding))
            continue
        pod = pods.get(record.pod_uid)
        if pod is None:
            others.append(Doubt(holding=holding))
            continue
        judgement, reason = judge(holding, pod)
        if judgement == "release":
            releases.append(Release(holding=holding, reason=reason))
        elif judgement == "confirm":
            others.append(Confirm(holding=holding))
        elif judgement == "align":
            others.append(Align(holding=holding))
        elif judgement == "replace" and pod.signed is not None:
            restores.append(Restore(signed=pod.signed, must=pod.is_started, replaces=holding))
    restores.extend(
        Restore(signed=pod.signed, must=pod.is_started)
        for pod in pods.values()
        if pod.signed is not None and not pod.is_finished and (pod.node, pod.uid) not in held
    )
    restores.sort(
        key=lambda restore: (
            not restore.must,
            restore.signed.ledger_seq,
            restore.signed.allocation_id,
        )
    )
    return [*releases, *others, *restores]
