# SPDX-License-Identifier: Apache-2.0
"""Simulation: places pods one after the other on a copy, and finds changes that let a pod in.

Uses the same filter, quotas, scores and picks as the live scheduler, on ledgers that the caller may
modify. Quotas apply where ``Governed`` is given. ``changes`` searches for the smallest single
change of a request that some node would take and, where none helps, for the smallest change of one
container's memory and compute together. Memory in MiB, compute in percent of one device, shares of
a whole as fractions 0..1.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.placement import ContainerShares
from hami_common.model.request import DeviceSelector, PodRequest
from hami_common.pods.annotations import DEVICE_POLICY, MIN_ISOLATION
from hami_common.vendors.remedies import one_of, remedies_of
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import Accepted, Reuse
from hami_core.placement.reasons import ClosestNode, NodeRefusal
from hami_core.placement.verdicts import Filtered, Verdicts
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.resourcequota import NOBODY_SPECIAL, Asker, amounts_of
from hami_core.quota.verdicts import Allowed, QuotaVerdicts

SELECTOR_COST: Final = 0.5
"""Cost of dropping a constraint, relative to the fraction of an amount that is given up."""
_FULL_PCT: Final = 100
_NodeFor = Callable[[PodRequest], str]
Excluded = Mapping[str, Mapping[str, str]]
"""By uid of a pod: the nodes that kube-scheduler does not offer it, with the constraint."""
NONE_EXCLUDED: Final[Excluded] = MappingProxyType({})


class Governed(NamedTuple):
    """Quotas, and the pod attributes they use besides namespaces and requests."""

    quota: QuotaLedger
    askers: Mapping[str, Asker] = MappingProxyType({})
    """By the uid of the pod; an absent pod has no special attributes."""


class Refusal(Struct, frozen=True, kw_only=True):
    """Nodes that refuse for one reason."""

    text: str
    nodes: int


class Change(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change of a request after which it fits."""

    container: str
    """Empty where the change is of the whole pod."""
    vendor: str
    what: str
    """``memory_mib``, ``memory_pct``, ``core_pct``, ``count``, two of these with `` and ``, or the
    key of the pod's annotation.
    """
    asked: str
    fits: str
    node: str
    """The node that would be chosen."""
    cost: float
    """Fraction of the request that is given up, 0..1."""

    def __str__(self) -> str:
        """Return one sentence for people."""
        where = f"container {self.container}: " if self.container else ""
        return f"{where}{self.what} {self.fits} instead of {self.asked} would fit on {self.node}"


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one pod."""

    namespace: str
    pod: str
    node: str = ""
    """The chosen node; empty: no node takes it."""
    fitting: tuple[str, ...] = ()
    """All nodes that take it, by name, where they were asked for."""
    containers: tuple[ContainerShares, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    """Largest group first."""
    by_quota: bool = False
    """Devices of some node fit, and a quota or queue refuses them."""
    closest: tuple[Change, ...] = ()
    """Cheapest first; at most one for each amount and constraint."""


def simulate(
    ledger: Ledger,
    requests: Iterable[PodRequest],
    *,
    now_s: float,
    explain: bool = True,
    fitting: bool = False,
    governed: Governed | None = None,
    excluded: Excluded = NONE_EXCLUDED,
) -> Iterator[Outcome]:
    """Place each pod where the scheduler would, booking it before the next one is placed.

    A pod that is refused for its queue's turn or for its borrowing limit keeps waiting for it, as
    seen by the pods after it. With ``fitting``, each outcome lists all nodes that take the pod.
    """
    scene = Scene(ledger, governed, excluded=excluded)
    for number, request in enumerate(requests):
        node, filtered = scene.best(request, waits=True)
        known = Outcome(
            namespace=request.namespace,
            pod=request.name,
            fitting=tuple(sorted(filtered.left.strings())) if fitting else (),
        )
        by_quota = isinstance(filtered, Allowed) and bool(filtered.refused)
        chosen: tuple[Refusal, ...] = ()
        if node:
            placed = scene.place(request, node, allocation_id=f"whatif-{number}", now_s=now_s)
            if isinstance(placed, tuple):
                yield replace(known, node=node, containers=placed)
                continue
            chosen = (Refusal(text=f"node {node}: {placed.text}", nodes=1),)
            by_quota = True
        yield replace(
            known,
            refusals=(*chosen, *scene.refusals(request, filtered)),
            by_quota=by_quota,
            closest=changes(scene, request) if explain else (),
        )


class Scene:
    """A scheduler's core on a copy of a ledger."""

    def __init__(
        self, ledger: Ledger, governed: Governed | None, excluded: Excluded = NONE_EXCLUDED
    ) -> None:
        self._ledger = ledger
        self._excluded = excluded
        self._verdicts = Verdicts(ledger.table)
        self._quota, self._askers = governed or Governed(QuotaLedger())
        self._quotas = QuotaVerdicts(ledger.table, self._quota)

    def best(self, request: PodRequest, *, waits: bool = False) -> tuple[str, Filtered | Allowed]:
        """Return (the node that would be chosen, empty when none fits; filter's answer).

        With ``waits`` the scene records whether the pod now waits for its queue.
        """
        filtered = self._verdicts.filter(request, self._offered(request))
        asker = self._askers.get(request.uid, NOBODY_SPECIAL)
        waiting = tuple(self._quota.claims())
        answer: Filtered | Allowed
        if waits:
            answer = self._quotas.allowed(request, filtered, asker, waiting=waiting)
        else:
            answer, _ = self._quotas.look(request, filtered, asker, waiting=waiting)
        if not len(answer.left):
            return "", answer
        return self._verdicts.prioritize(request, answer.left).best(1)[0][0], answer

    def _offered(self, request: PodRequest) -> list[str]:
        """Return the nodes that kube-scheduler offers the pod."""
        excluded = self._excluded.get(request.uid, ())
        return [name for name in self._ledger.table.nodes() if name not in excluded]

    def nearest(self, request: PodRequest, count: int) -> list[ClosestNode]:
        """Return up to ``count`` nodes whose devices are closest to taking the pod."""
        return self._verdicts.filter(request, self._offered(request)).closest(count)

    def refusals(self, request: PodRequest, filtered: Filtered | Allowed) -> tuple[Refusal, ...]:
        """Return the refusals of devices and quotas first, then nodes that kube-scheduler excludes.

        The largest group of each is first.
        """
        excluded = self._excluded.get(request.uid, {})
        others = Counter(why for name, why in excluded.items() if name in self._ledger.table)
        return (
            *_refusals(filtered),
            *(Refusal(text=f"excluded by {why}", nodes=n) for why, n in others.most_common()),
        )

    def place(
        self, request: PodRequest, node: str, *, allocation_id: str, now_s: float
    ) -> tuple[ContainerShares, ...] | NodeRefusal:
        """Book the pod; ``NodeRefusal`` when the picked devices exceed a quota."""
        plan = self._ledger.plan_bind(request, node, allocation_id=allocation_id, now_s=now_s)
        if isinstance(plan, NodeRefusal):
            return plan
        if isinstance(plan, Reuse):
            return plan.holding.record.containers
        account = self._askers.get(request.uid, NOBODY_SPECIAL).account
        plan = plan.under(account)
        refusal = self._quota.first_look(
            request.namespace, account, amounts_of(plan.record.containers, account)
        )
        if refusal is not None:
            return refusal
        seq = self._ledger.fence(node) + 1
        self._ledger.handle(Accepted(append=plan, seq=seq, now_s=now_s))
        self._quota.fold(self._quota.seq + 1, plan.record)
        return plan.record.containers


def _refusals(filtered: Filtered | Allowed) -> tuple[Refusal, ...]:
    found = [Refusal(text=refusal.text, nodes=len(places)) for refusal, places in filtered.groups()]
    return tuple(sorted(found, key=lambda group: (-group.nodes, group.text)))


# --- the closest fit ------------------------------------------------------------------------------


def changes(scene: Scene, request: PodRequest) -> tuple[Change, ...]:
    """Return changes after which some node takes the pod, cheapest first.

    Empty: none was found.
    """

    def node_for(changed: PodRequest) -> str:
        return scene.best(changed)[0]

    found = [
        change
        for index, container in enumerate(request.containers)
        for wanted in range(len(container.requests))
        for change in _smaller(request, index, wanted, node_for)
    ]
    found += _unselected(request, node_for)
    constraints = {change.what for change in found}
    found += [c for c in _in_another_mode(request, node_for) if c.what not in constraints]
    found += _unmixed(request, node_for)
    if not found:
        found = [
            change
            for index, container in enumerate(request.containers)
            for wanted in range(len(container.requests))
            for change in _smaller_both(request, index, wanted, node_for)
        ]
    return tuple(sorted(found, key=lambda change: (change.cost, change.what, change.container)))


def _smaller(request: PodRequest, index: int, wanted: int, node_for: _NodeFor) -> Iterator[Change]:
    """Yield the largest amount of each kind, below the requested one, that fits."""
    container = request.containers[index]
    asked = container.requests[wanted]
    amounts = {
        "memory_mib": asked.memory_mib,
        "memory_pct": 0 if asked.memory_mib else asked.memory_pct,
        "core_pct": asked.core_pct,
        "count": asked.count,
    }
    for what, amount in amounts.items():

        def with_amount(value: int, what: str = what) -> PodRequest:
            return _with(request, index, wanted, **{what: value})

        value, node = _largest(amount, lambda value: node_for(with_amount(value)))
        if node:
            yield Change(
                container=container.name,
                vendor=asked.vendor,
                what=what,
                asked=str(amount),
                fits=str(value),
                node=node,
                cost=round(1 - value / amount, 4),
            )


def _smaller_both(
    request: PodRequest, index: int, wanted: int, node_for: _NodeFor
) -> Iterator[Change]:
    """Yield the pair of memory and compute that fits and gives up least."""
    container = request.containers[index]
    asked = container.requests[wanted]
    what = "memory_mib" if asked.memory_mib else "memory_pct"
    amount = asked.memory_mib or asked.memory_pct
    best: tuple[float, int, int, str] | None = None
    for core_pct in range(asked.core_pct - 1, 0, -1):

        def with_memory(value: int, core_pct: int = core_pct) -> PodRequest:
            return _with(request, index, wanted, core_pct=core_pct, **{what: value})

        given_up = 1 - core_pct / asked.core_pct
        if best is not None and given_up >= best[0]:
            break
        value, node = _largest(amount, lambda value: node_for(with_memory(value)))
        cost = 1 - value / amount * core_pct / asked.core_pct
        if node and (best is None or cost < best[0]):
            best = (cost, value, core_pct, node)
    if best is not None:
        cost, value, core_pct, node = best
        yield Change(
            container=container.name,
            vendor=asked.vendor,
            what=f"{what} and core_pct",
            asked=f"{amount} and {asked.core_pct}",
            fits=f"{value} and {core_pct}",
            node=node,
            cost=round(cost, 4),
        )


def _largest(below: int, node_for: Callable[[int], str]) -> tuple[int, str]:
    """Return the largest value in 1 … ``below`` - 1 that some node takes, by halving.

    0 when no node takes any.
    """
    low, found = 0, ""
    high = below
    while high - low > 1:
        middle = (low + high) // 2
        node = node_for(middle)
        if node:
            low, found = middle, node
        else:
            high = middle
    return low, found


def _with(request: PodRequest, index: int, wanted: int, **amounts: int) -> PodRequest:
    """Return the pod with other amounts in one request.

    A request for less compute shares the device.
    """
    container = request.containers[index]
    smaller = replace(container.requests[wanted], **amounts)
    if smaller.core_pct < _FULL_PCT:
        smaller = replace(smaller, exclusive=False)
    requests = list(container.requests)
    requests[wanted] = smaller
    containers = list(request.containers)
    containers[index] = replace(container, requests=tuple(requests))
    return replace(request, containers=tuple(containers))


def _unmixed(request: PodRequest, node_for: _NodeFor) -> Iterator[Change]:
    """Yield the change that drops the constraint to be alone on its devices."""
    if "mutex" not in request.policy.device:
        return
    words = tuple(word for word in request.policy.device if word != "mutex") or ("spread",)
    node = node_for(replace(request, policy=replace(request.policy, device=words)))
    if node:
        yield Change(
            container="",
            vendor="",
            what=DEVICE_POLICY,
            asked=",".join(request.policy.device),
            fits=",".join(words),
            node=node,
            cost=SELECTOR_COST,
        )


def _unselected(request: PodRequest, node_for: _NodeFor) -> Iterator[Change]:
    """Yield each constraint of the pod that alone prevents placement."""
    for vendor, selector in request.selectors.items():
        nothing = DeviceSelector()
        for what in selector.__struct_fields__:
            asked, none = getattr(selector, what), getattr(nothing, what)
            if asked == none:
                continue
            free = replace(selector, **{what: none})
            changed = replace(request, selectors={**request.selectors, vendor: free})
            node = node_for(changed)
            if node:
                yield Change(
                    container="",
                    vendor=vendor,
                    what=_annotation(request, vendor, what),
                    asked=_text_of(asked),
                    fits="any",
                    node=node,
                    cost=SELECTOR_COST,
                )


def _text_of(asked: object) -> str:
    """Return a selector's value as its annotation has it."""
    if not isinstance(asked, tuple):
        return str(asked).lower()
    return ",".join(one if isinstance(one, str) else "=".join(one) for one in asked)


def _annotation(request: PodRequest, vendor: str, what: str) -> str:
    """Return the key of the annotation that sets a selector's field; the field where none does."""
    keys = remedies_of(vendor)
    found = {
        "allow_types": keys.allow_types,
        "deny_types": keys.deny_types,
        "allow_uuids": keys.allow_uuids,
        "deny_uuids": keys.deny_uuids,
        "modes": (keys.mode,),
        "numa_bind": (keys.numa_bind,),
        "min_isolation": (MIN_ISOLATION,),
    }.get(what, ())
    asked = [r for c in request.containers for r in c.requests if r.vendor == vendor]
    return next((key for r in asked if (key := one_of(found, r))), what)


def _in_another_mode(request: PodRequest, node_for: _NodeFor) -> Iterator[Change]:
    """Yield for each vendor the first mode of sharing whose naming alone lets the pod in."""
    for vendor in dict.fromkeys(r.vendor for c in request.containers for r in c.requests):
        keys, selector = remedies_of(vendor), request.selectors.get(vendor, DeviceSelector())
        asked = selector.modes or _modes(request, vendor)
        for mode, word in keys.modes:
            if not word or mode in asked:
                continue
            node = node_for(_in_mode(request, vendor, selector, mode))
            if node:
                words = dict(keys.modes)
                yield Change(
                    container="",
                    vendor=vendor,
                    what=keys.mode,
                    asked=",".join(words.get(one) or "none" for one in asked) or "none",
                    fits=word,
                    node=node,
                    cost=SELECTOR_COST,
                )
                break


def _modes(request: PodRequest, vendor: str) -> tuple[str, ...]:
    asked = (r for c in request.containers for r in c.requests if r.vendor == vendor)
    return next((one.modes for one in asked if one.modes), ())


def _in_mode(request: PodRequest, vendor: str, selector: DeviceSelector, mode: str) -> PodRequest:
    """Return the pod as if it named the mode; a partition named by its profile keeps its own."""
    containers = tuple(
        replace(
            container,
            requests=tuple(
                replace(one, modes=()) if one.vendor == vendor and not one.profile else one
                for one in container.requests
            ),
        )
        for container in request.containers
    )
    named = replace(selector, modes=(mode,))
    return replace(request, containers=containers, selectors={**request.selectors, vendor: named})
