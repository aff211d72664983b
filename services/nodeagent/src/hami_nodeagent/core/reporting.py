# SPDX-License-Identifier: Apache-2.0
"""Decides the next state of an allocation to write (design D5, D6).

States and their writers::

    reserved  (no state record)      the ledger record itself
    bound                            the scheduler; this agent when it finds a proven, assigned pod
                                     without it, so that states are always in order
    prepared                         every container with shares has its grants, and every hardware
                                     partition that they need was read back
    running                          the containers with shares run, or ran to their end; written
                                     again when a container turns out not to be limited
    failed                           the agent: kubelet's books contradict a grant; the scheduler:
                                     the share was lost
    released                         the ledger's ``release`` record; never written here

A ResourceClaim (a record with the origin ``claim``) has no pod of its own and is never ``running``:
it is ``prepared`` from kubelet's first call for it to the last, and then ``prepared`` with the code
``unprepared``: no container of the node uses it any more.

One step is decided at a time, from facts alone, so the same facts after a restart give the same
step. A state of another reservation of the same pod counts as none. ``failed`` is final for its
reservation. Uses no bus and no clock.
"""

from collections.abc import Mapping

from msgspec import Struct

from hami_common.dra.claims import UNPREPARED
from hami_common.errors import InvariantBroken
from hami_common.events.allocation import (
    AllocationRecord,
    ReportedState,
    StateRecord,
    is_of_claim,
)
from hami_common.model.placement import ContainerShares
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.podfacts import PodFacts

TRANSITIONS: Mapping[ReportedState | None, frozenset[ReportedState]] = {
    None: frozenset({"bound", "failed"}),
    "bound": frozenset({"prepared", "failed"}),
    "prepared": frozenset({"prepared", "running", "failed"}),
    "running": frozenset({"running", "failed"}),
    "failed": frozenset(),
}


class Failure(Struct, frozen=True, kw_only=True):
    """Reason for marking an allocation as failed."""

    code: str
    reason: str


class Step(Struct, frozen=True, kw_only=True):
    """The next state to write."""

    state: ReportedState
    containers: tuple[str, ...] = ()
    """Containers that have reached the state."""
    code: str = ""
    reason: str = ""


def standing(record: AllocationRecord, state: StateRecord | None) -> ReportedState | None:
    """Return the state of this reservation; ``None`` if none was written for it."""
    if state is None or state.allocation_id != record.allocation_id:
        return None
    return state.state


def next_step(
    entry: Entry,
    state: StateRecord | None,
    pod: PodFacts | None,
    grants: GrantBook,
    *,
    failure: Failure | None = None,
    is_divided: bool = True,
    is_unlimited: bool = False,
) -> Step | None:
    """Return the state to write now; ``None`` if the written state matches the facts.

    ``is_divided``: all hardware partitions of the pod exist, as read back. ``is_unlimited``: a
    container of it did not load the in-container library.
    """
    record = entry.record
    now = standing(record, state)
    if record.op == "release" or now == "failed":
        return None
    if failure is not None:
        return _step(record, now, Step(state="failed", code=failure.code, reason=failure.reason))
    if is_of_claim(record):
        return _step_of_claim(record, state, grants)
    if pod is None or pod.signed is None or pod.signed.allocation_id != record.allocation_id:
        return None
    containers = tuple(shares.name for shares in record.containers)
    if now is None:
        return Step(state="bound", containers=containers)
    if (
        now == "bound"
        and is_divided
        and all(_has_grants(pod, shares, grants) for shares in record.containers)
    ):
        return _step(record, now, Step(state="prepared", containers=containers))
    if now == "prepared" and (reached := _running(pod, record)):
        return _step(record, now, Step(state="running", containers=reached))
    if now == "running" and is_unlimited and state is not None and state.enforcement != "none":
        return _step(record, now, Step(state="running", containers=state.containers))
    return None


def _step_of_claim(
    record: AllocationRecord, state: StateRecord | None, grants: GrantBook
) -> Step | None:
    """Return the next state of a claim by its grants, which end when it is unprepared."""
    now = standing(record, state)
    containers = tuple(shares.name for shares in record.containers)
    is_prepared = any(
        grant.allocation_id == record.allocation_id for grant in grants.of_pod(record.pod_uid)
    )
    if now is None:
        return Step(state="bound", containers=containers) if is_prepared else None
    code = state.code if state is not None else ""
    if is_prepared and (now == "bound" or code == UNPREPARED):
        return _step(record, now, Step(state="prepared", containers=containers))
    if not is_prepared and now == "prepared" and code != UNPREPARED:
        reason = "no container of the node uses the claim any more"
        return _step(record, now, Step(state="prepared", code=UNPREPARED, reason=reason))
    return None


def _step(record: AllocationRecord, now: ReportedState | None, step: Step) -> Step:
    if step.state not in TRANSITIONS[now]:
        raise InvariantBroken(
            what=f"allocation {record.allocation_id} cannot go from {now} to {step.state}",
            history=(f"pod {record.namespace}/{record.pod}", f"op {record.op}"),
        )
    return step


def _has_grants(pod: PodFacts, shares: ContainerShares, grants: GrantBook) -> bool:
    held = {grant.vendor for grant in grants.of_pod(pod.uid) if grant.container == shares.name}
    return {share.vendor for share in shares.shares} <= held


def _running(pod: PodFacts, record: AllocationRecord) -> tuple[str, ...]:
    """Return the containers that run or ran, once all lasting ones with shares do; else nothing."""
    lasting = {shares.name for shares in record.containers if shares.kind != "init"}
    if not lasting <= pod.started:
        return ()
    return tuple(shares.name for shares in record.containers if shares.name in pod.started)
