# SPDX-License-Identifier: Apache-2.0
"""Evicts pods through policy/v1 by their uid, within their PodDisruptionBudgets.

The API server decides on each eviction. The budgets are read before, so that no pod is chosen whose
eviction it would refuse; a pod whose eviction failed is spared for a while. Seconds throughout.
"""

from collections.abc import Mapping
from functools import partial

import msgspec
from msgspec import Struct

from hami_common.bounds import SignedInt32
from hami_common.errors import Conflict, Denied, NotFound, Unavailable, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.pods.podview import MetadataView, PodListView
from hami_common.ports import KubeApi
from hami_common.runtime.kubeio.recorder import ObjectRef
from hami_core.ledger.podfacts import PodFacts, pod_path
from hami_core.planning.preempt import Rules
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.isolation import BUDGET
from hami_scheduler.shell.podapi import MANAGED, PODS, PodApi, bare_pod
from hami_scheduler.shell.state import State

BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
SPARED_S = 30.0
"""Time for which a pod whose eviction failed is not tried again."""

_encoder = msgspec.json.Encoder()
_pods_decoder = msgspec.json.Decoder(PodListView)


class _Expression(Struct, frozen=True, kw_only=True):
    key: str
    operator: str
    values: list[str] | None = None


class _Selector(Struct, frozen=True, kw_only=True, rename="camel"):
    match_labels: dict[str, str] | None = None
    match_expressions: list[_Expression] | None = None

    def text(self) -> str:
        """Return the selector as a query of the Kubernetes API."""
        parts = [f"{key}={value}" for key, value in (self.match_labels or {}).items()]
        for one in self.match_expressions or []:
            values = ",".join(one.values or [])
            parts.append(
                {
                    "In": f"{one.key} in ({values})",
                    "NotIn": f"{one.key} notin ({values})",
                    "Exists": one.key,
                }.get(one.operator, f"!{one.key}")
            )
        return ",".join(parts)


class _BudgetSpec(Struct, frozen=True, kw_only=True):
    selector: _Selector | None = None


class _BudgetStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    disruptions_allowed: SignedInt32 = 0


class _Budget(Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()
    spec: _BudgetSpec = _BudgetSpec()
    status: _BudgetStatus = _BudgetStatus()


class _RawBudgets(Struct, frozen=True, kw_only=True):
    items: list[msgspec.Raw] = []


_raw_budgets_decoder = msgspec.json.Decoder(_RawBudgets)
_budget_decoder = msgspec.json.Decoder(_Budget)


class Covered(Struct, frozen=True, kw_only=True):
    """Disruptions that PodDisruptionBudgets allow now."""

    allowed: Mapping[str, int] = {}
    by_uid: Mapping[str, tuple[str, ...]] = {}


def pod_reference(pod: PodFacts) -> ObjectRef:
    """Return the object that an Event about the pod names."""
    return ObjectRef(kind="Pod", name=pod.name, namespace=pod.namespace, uid=pod.uid)


class Evictions:
    """Evictions by one scheduler."""

    def __init__(self, *, state: State, pods: PodApi, kube: KubeApi, settings: Settings) -> None:
        """Read pods whose eviction failed with ``pods``."""
        self._state = state
        self._pods = pods
        self._kube = kube
        self._settings = settings
        self._spared_until_s: dict[str, float] = {}

    def use(self, settings: Settings) -> None:
        """Apply changed settings."""
        self._settings = settings

    def rules(self, budgets: Mapping[str, tuple[str, ...]]) -> Rules:
        """Return the protection of pods now; ``budgets`` by uid of the pods that they cover."""
        now_s = self._state.clock.monotonic_s()
        for uid in [uid for uid, until_s in self._spared_until_s.items() if until_s <= now_s]:
            del self._spared_until_s[uid]
        return Rules(
            now_s=self._state.clock.now_s(),
            min_runtime_s=self._settings.min_runtime_s,
            min_runtime_most_s=self._settings.min_runtime_most_s,
            budgets=budgets,
            spared=frozenset(self._spared_until_s),
        )

    async def covered(self) -> Covered:
        """Read the PodDisruptionBudgets of namespaces with our pods, and the pods they cover."""
        namespaces = {pod.namespace for pod in self._state.pods if pod.node}
        allowed: dict[str, int] = {}
        by_uid: dict[str, tuple[str, ...]] = {}
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            pages = await self._kube.list_pages(BUDGETS)
        try:
            budgets = [raw for page in pages for raw in _raw_budgets_decoder.decode(page).items]
        except UNDECODABLE as error:
            raise WireInvalid(what="PodDisruptionBudgets", problem=str(error)) from error
        closed: set[str] = set()
        for raw in budgets:
            who = bare_pod(raw)
            if who.metadata.namespace not in namespaces:
                continue
            if not await self._state.quarantine.run(
                BUDGET,
                "/".join(who.names()),
                partial(self._cover, raw, allowed, by_uid),
                passes=(Unavailable,),
                name=who.names(),
                is_retried=False,  # the next attempt reads it again
            ):
                closed.add(who.metadata.namespace)
        for pod in self._state.pods:
            if pod.namespace in closed:  # its budget cannot be read: no pod there is evicted
                name = f"{pod.namespace}/"
                allowed[name] = 0
                by_uid[pod.uid] = (*by_uid.get(pod.uid, ()), name)
        return Covered(allowed=allowed, by_uid=by_uid)

    async def _cover(
        self, raw: msgspec.Raw, allowed: dict[str, int], by_uid: dict[str, tuple[str, ...]]
    ) -> None:
        """Record the disruptions that one budget allows, and the pods it covers."""
        budget = _budget_decoder.decode(raw)
        namespace, selector = budget.metadata.namespace, budget.spec.selector
        if selector is None:
            return
        name = f"{namespace}/{budget.metadata.name}"
        text = ",".join(part for part in (MANAGED, selector.text()) if part)
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            found = await self._kube.list_pages(
                PODS.replace("/pods", f"/namespaces/{namespace}/pods"), label_selector=text
            )
        covered = [item.metadata.uid for page in found for item in _pods_decoder.decode(page).items]
        allowed[name] = budget.status.disruptions_allowed
        for uid in covered:
            by_uid[uid] = (*by_uid.get(uid, ()), name)

    async def evict(self, victim: PodFacts) -> str:
        """Evict the pod; returns why not, empty when it terminates or is gone.

        After a failure the pod is spared for ``SPARED_S``.
        """
        document = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": victim.name, "namespace": victim.namespace},
            "deleteOptions": {"preconditions": {"uid": victim.uid}},
        }
        path = f"{pod_path(victim.namespace, victim.name)}/eviction"
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                await self._kube.create(path, _encoder.encode(document))
        except NotFound:
            return ""
        except (Unavailable, Conflict, Denied) as error:
            # Refused by a budget (429), or lost in transit: the pod itself shows which.
            pod = await self._pods.get(victim.namespace, victim.name)
            if pod is None or pod.uid != victim.uid or pod.is_deleting or pod.is_finished:
                return ""
            self._spared_until_s[victim.uid] = self._state.clock.monotonic_s() + SPARED_S
            return str(error)
        return ""

    async def delete(self, victim: PodFacts) -> str:
        """Delete the pod against its budgets; returns why not, empty when it terminates or is gone.

        For a pod whose use takes memory that another pod has booked. Its grace period applies.
        """
        document = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": victim.uid},
        }
        path = pod_path(victim.namespace, victim.name)
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                await self._kube.delete(path, body=_encoder.encode(document))
        except (NotFound, Conflict):
            return ""  # gone, or another pod of this name
        except (Unavailable, Denied) as error:
            return str(error)
        return ""
