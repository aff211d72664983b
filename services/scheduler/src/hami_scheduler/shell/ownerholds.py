# SPDX-License-Identifier: Apache-2.0
"""Holds devices for pods that do not exist yet: those of a Workload or a ProvisioningRequest.

The ledger has one record per pod, under a uid of its own, all or none. Objects are judged one after
another, so two that fit alone but not together never get the same devices. Holds are renewed until
their pods took them over (``Holds``) or the owner releases them; without renewal their lease ends
them. Seconds throughout.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isinf
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import Conflict, Denied, Unavailable
from hami_common.events.allocation import OwnerKind, is_of_owner, owner_of, purpose_of
from hami_common.events.codec import decode
from hami_common.pods.podview import MetadataView
from hami_common.ports import WatchEvent
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Hold
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import FilterAsked
from hami_core.placement.nodenames import NodeNames
from hami_core.planning import demands
from hami_core.planning.demands import Demand, Verdict
from hami_core.table.table import DeviceTable
from hami_scheduler.shell.binder import REFUSALS, Binder, Refused
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.joint import reserve_all, stepwise
from hami_scheduler.shell.state import State

HOST_LABEL: Final = "kubernetes.io/hostname"
_RENEWED_PER_LEASE: Final = 3


class _Node(Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()
    spec: dict[str, Any] = {}


class OwnerHolds:
    """The holds of all objects of one kind."""

    def __init__(
        self,
        kind: OwnerKind,
        *,
        state: State,
        binder: Binder,
        effects: Effects,
        lease_s: float,
        heartbeat_timeout_s: float,
        reject_after_s: float = inf,
    ) -> None:
        """Hold shares through ``binder``.

        ``reject_after_s``: time for which pods must exceed even unused devices before the verdict
        is Rejected; infinity: never.
        """
        self._kind: OwnerKind = kind
        self._state = state
        self._binder = binder
        self._effects = effects
        self._lease_s = lease_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._reject_after_s = reject_after_s
        self._clock = state.clock
        self.forget()

    def forget(self) -> None:
        """Forget all nodes and times, because everything is listed again."""
        self._nodes: dict[str, demands.Document] = {}
        self._by_host: dict[str, dict[str, demands.Document]] = {}
        """Nodes by their host name and name: with domains, each node is asked for alone."""
        self._renewed_s: dict[tuple[str, str], float] = {}
        self._impossible_s: dict[str, float] = {}
        self._complete_s: float | None = None
        self._empty: tuple[int, DeviceTable] | None = None

    def take_node(self, event: WatchEvent) -> None:
        """Read an event of a Node."""
        node = decode(event.raw, _Node, what="Node")
        name = node.metadata.name
        labels = node.metadata.labels or {}
        known = self._nodes.pop(name, None)
        if known is not None:
            self._by_host[known["metadata"]["labels"].get(HOST_LABEL, "")].pop(name, None)
        if event.type != "DELETED":
            self._nodes[name] = {
                "metadata": {"name": name, "labels": labels},
                "spec": {key: node.spec.get(key) for key in ("taints", "unschedulable")},
            }
            self._by_host.setdefault(labels.get(HOST_LABEL, ""), {})[name] = self._nodes[name]

    def note_readiness(self) -> None:
        """Note if the ledger is complete; to be called in each round."""
        if not self._state.is_complete:
            self._complete_s = None
        elif self._complete_s is None:
            self._complete_s = self._clock.monotonic_s()

    def owners(self) -> set[str]:
        """Return the uids of the objects of this kind that have holds."""
        return {
            owner_of(one.record)
            for one in self._state.ledger.reserved()
            if is_of_owner(one.record, self._kind)
        }

    def of(self, owner: str) -> list[Holding]:
        """Return the holds of an object, see ``Ledger.holdings_of_owner``."""
        return self._state.ledger.holdings_of_owner(owner)

    # --- judge -----------------------------------------------------------------------------------

    async def judge(
        self,
        metadata: MetadataView,
        wanted: Sequence[Demand],
        *,
        is_current: Callable[[], bool],
    ) -> Verdict:
        """Hold the devices of an object if there are any.

        ``is_current``: reports if the object is still the one that was judged; else ``Conflict``.
        """
        uid = metadata.uid
        try:
            self._state.require_complete()
            if await self._hold(metadata, wanted, is_current):
                return demands.held(wanted)
        except Refused as error:
            if error.outcome in REFUSALS:
                return Verdict(state="Retry", message=str(error))
            return Verdict(state="Pending", message=f"not decided yet: {error}")
        except (Unavailable, Denied) as error:
            return Verdict(state="Pending", message=f"not decided yet: {error}")
        if not self._is_settled():
            text = "not decided yet: the scheduler waits for the heartbeats of agents"
            return Verdict(state="Pending", message=text)
        if isinf(self._reject_after_s):
            return await self._refused(uid, wanted)
        table = self._empty_table()
        pod_set = await stepwise(demands.never_fits(table, uid, wanted))
        if not pod_set:
            self._impossible_s.pop(uid, None)
            return await self._refused(uid, wanted)
        now_s = self._clock.monotonic_s()
        since_s = self._impossible_s.setdefault(uid, now_s)
        if now_s - since_s < self._reject_after_s:
            return await self._refused(uid, wanted)
        return demands.impossible(wanted, pod_set, len(table))

    async def _refused(self, uid: str, wanted: Sequence[Demand]) -> Verdict:
        """Return the refusal of an object that fits at another time."""
        reasons = self._reasons(wanted)
        fitting = {
            demand.label: await stepwise(
                demands.count_now(self._state.table, uid, demand, self._candidates(demand))
            )
            for demand in wanted
            if demand.label not in reasons
        }
        return demands.refused(wanted, reasons, fitting)

    def _is_settled(self) -> bool:
        """Return whether agents had time to report since the ledger was complete."""
        since_s = self._complete_s
        return (
            since_s is not None and self._clock.monotonic_s() - since_s >= self._heartbeat_timeout_s
        ) or not self._state.core.inventory.silent_count()

    def _empty_table(self) -> DeviceTable:
        revision = self._state.table.inventory_revision
        if self._empty is None or self._empty[0] != revision:
            devices = self._state.core.inventory.devices()
            self._empty = revision, demands.empty_table(devices)
        return self._empty[1]

    def _candidates(self, demand: Demand) -> frozenset[str]:
        selector = (demand.pod.get("spec") or {}).get("nodeSelector") or {}
        host = selector.get(HOST_LABEL)
        nodes = self._nodes if host is None else self._by_host.get(host, {})
        return demands.nodes_for(demand, self._state.table, nodes)

    def _reasons(self, wanted: Sequence[Demand]) -> dict[str, str]:
        """Return why not even one pod of a pod set fits, by pod set."""
        found: dict[str, str] = {}
        for demand in wanted:
            candidates = self._candidates(demand)
            names = NodeNames.of(sorted(candidates))
            if not candidates:
                found[demand.label] = "no node with devices is eligible"
                continue
            filtered = self._state.core.answer(FilterAsked(request=demand.request), names)
            if not len(filtered.left):
                classes = sorted(filtered.classes(), key=lambda one: -one.count)
                found[demand.label] = ", ".join(
                    f"{one.text} ({one.count} nodes)" for one in classes[:3]
                )
        return found

    # --- hold, renew, release --------------------------------------------------------------------

    async def _hold(
        self, metadata: MetadataView, wanted: Sequence[Demand], is_current: Callable[[], bool]
    ) -> bool:
        """Hold devices for all pods; returns false if there is no placement for them."""
        uid = metadata.uid
        held = {one.record.pod_uid for one in self.of(uid)}
        by_uid = {
            member.request.uid: demand
            for demand in wanted
            for member in demand.members(uid, frozenset())
        }
        if held == by_uid.keys():
            return True
        await self.release(uid, f"{self._kind}-incomplete")
        nodes = {demand.label: self._candidates(demand) for demand in wanted}
        assignment = await stepwise(demands.place(self._state.table, uid, wanted, nodes))
        if assignment is None:
            return False
        await reserve_all(
            assignment,
            partial(self._reserve, metadata, by_uid, is_current),
            release=partial(self._effects.ledger.release, reason=f"{self._kind}-incomplete"),
        )
        return True

    async def _reserve(
        self,
        metadata: MetadataView,
        wanted: Mapping[str, Demand],
        is_current: Callable[[], bool],
        uid: str,
        node: str,
    ) -> Holding:
        if not is_current():
            raise Conflict(what=f"{self._kind} {metadata.name}", detail="it changed")
        demand = wanted[uid]
        pod = PodFacts(
            uid=uid,
            namespace=metadata.namespace,
            name=metadata.name,
            resource_version="",
            request=replace(demand.request, uid=uid),
            account=demand.account,
        )
        held_for = purpose_of(self._kind, metadata.namespace, metadata.name)
        return await self._binder.hold(pod, node, Hold(held_for=held_for, lease_s=self._lease_s))

    async def renew(self, uid: str) -> None:
        """Renew the holds of an object that are due."""
        now_s = self._clock.monotonic_s()
        due_s = now_s - self._lease_s / _RENEWED_PER_LEASE
        for holding in self.of(uid):
            key = holding.record.node, holding.record.pod_uid
            if self._renewed_s.get(key, due_s) <= due_s:
                await self._effects.ledger.renew(holding)
                self._renewed_s[key] = now_s

    async def release(self, uid: str, reason: str) -> None:
        """Release all holds of an object."""
        for holding in self.of(uid):
            record = holding.record
            self._renewed_s.pop((record.node, record.pod_uid), None)
            await self._effects.ledger.release(holding, reason)

    def gone(self, uid: str) -> None:
        """Forget an object that is over."""
        self._impossible_s.pop(uid, None)
