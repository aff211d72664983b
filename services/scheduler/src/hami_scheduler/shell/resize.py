# SPDX-License-Identifier: Apache-2.0
"""Changes the shares of a running container or a claim: ledger, annotations, limits file, ledger.

Order (``hami_core.planning.resizing``):

1. The ledger books the larger of old and new on the node's fence, within capacity and quotas.
2. The pod's annotations are written with uid and resourceVersion as preconditions.
3. The node's agent is polled until the container's limits file has the new shares.
4. Freed capacity is released.

A ResourceClaim that a user wrote has no annotations: the agent follows its ledger record. While it
shrinks, the record has the new shares as ``limits`` and books the old ones.

If a resize is interrupted, the ledger is the source of truth, and ``align`` writes the annotations
that belong to it: the comparison of ledger and pods requests that after a crash. A shrink that the
node does not apply in time is rolled back the same way. Seconds throughout.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.errors import (
    Conflict,
    HamiError,
    NotFound,
    RequestInvalid,
    Unavailable,
    WireInvalid,
)
from hami_common.events import codec
from hami_common.events.allocation import is_of_claim
from hami_common.events.asking import ShareNow, UsageAnswer
from hami_common.events.codec import UNDECODABLE
from hami_common.model.placement import ContainerShares, Placement
from hami_common.pods.signing import Signer
from hami_common.ports import KubeApi
from hami_common.runtime.httpd import Handler, Request, Response, error_response, json_response
from hami_core.ledger import binding
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import Append, ResizePlanned
from hami_core.placement.reasons import NodeRefusal
from hami_core.planning.resizing import ResizeRequest, larger, resized, shrinks
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.keylocks import KeyLocks
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.quota import QuotaKeeper
from hami_scheduler.shell.settling import is_prepared
from hami_scheduler.shell.state import State


class Ask(Protocol):
    """Sends a request to an agent: subject and body."""

    async def __call__(self, subject: str, data: bytes = b"") -> bytes:
        """Return the answer; ``Unavailable`` without one."""
        ...


REFUSED = 409
_LOOK_S = 0.25
_ANNOTATE_TRIES = 6
_SHRINK_WAITS = 3
"""Number of ``resize_confirm_s`` after which a claim's shrink has been interrupted."""

_log = logging.getLogger(__name__)
_decoder = msgspec.json.Decoder(ResizeRequest)
_encoder = msgspec.json.Encoder()


async def no_agent(subject: str, data: bytes = b"") -> bytes:
    """Raise ``Unavailable``: no agent can be reached."""
    del data
    raise Unavailable(peer="agent", detail=f"no agent answers on {subject}")


class ResizeRefused(HamiError):
    """The shares stay unchanged. ``code`` is a stable word."""

    def __init__(self, *, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return self.text


class Resized(Struct, frozen=True, kw_only=True):
    """The container's present shares."""

    namespace: str
    pod: str
    """Name of the pod, or of the ResourceClaim."""
    node: str
    allocation_id: str
    ledger_seq: int
    container: ContainerShares
    before: ContainerShares
    in_force: bool
    """True when the container's limits file has the shares; else the node will write them later."""


class Resizer:
    """Executes resizes, one at a time for each pod."""

    def __init__(
        self,
        *,
        state: State,
        effects: Effects,
        quota: QuotaKeeper,
        kube: KubeApi,
        signer: Signer,
        ask: Ask,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.on_claim: Callable[[str], None] | None = None
        """Called with the uid of a claim that was resized."""
        self._state = state
        self._effects = effects
        self._quota = quota
        self._kube = kube
        self._signer = signer
        self._ask = ask
        self._settings = settings
        self._metrics = metrics
        self._pods = KeyLocks("pod")

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {("POST", "/v1/resize"): self.serve}

    async def serve(self, request: Request) -> Response:
        """Answer ``POST /v1/resize``."""
        try:
            wish = _decoder.decode(request.body)
        except UNDECODABLE as error:
            raise WireInvalid(what="resize request", problem=str(error)) from error
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        try:
            return json_response(await self.resize(wish))
        except ResizeRefused as refused:
            return error_response(status=REFUSED, code=refused.code, message=refused.text)

    async def resize(self, wish: ResizeRequest) -> Resized:
        """Resize.

        ``ResizeRefused``, ``RequestInvalid`` and ``NotFound`` have the reason otherwise.
        """
        try:
            if bool(wish.pod) == bool(wish.claim):
                raise RequestInvalid(
                    field="pod",
                    problem="a resize is of one pod or of one claim",
                    fix="name either of them",
                )
            uid = self._claimed(wish).record.pod_uid if wish.claim else self._find(wish).uid
            async with self._pods.hold(uid, wait_s=self._settings.bind_wait_s):
                done = await (self._resize_claim(wish) if wish.claim else self._resize(wish))
        except HamiError as error:
            outcome = error.code if isinstance(error, ResizeRefused) else type(error).__name__
            self._metrics.resizes.labels(outcome=outcome).inc()
            raise
        self._metrics.resizes.labels(outcome="resized").inc()
        _log.info(
            "shares resized",
            extra={
                "namespace": done.namespace,
                "pod": done.pod,
                "node": done.node,
                "container": done.container.name,
                "ledger_seq": done.ledger_seq,
                "in_force": done.in_force,
            },
        )
        return done

    def _find(self, wish: ResizeRequest) -> PodFacts:
        for pod in self._state.pods:
            if (pod.namespace, pod.name) == (wish.namespace, wish.pod) and pod.node:
                return pod
        if self._of_claim(wish.namespace, wish.pod) is not None:
            raise RequestInvalid(
                field="pod", problem=f"{wish.pod} is a ResourceClaim", fix="name it as claim"
            )
        raise NotFound(what=f"running pod {wish.namespace}/{wish.pod} with shares of ours")

    def _claimed(self, wish: ResizeRequest) -> Holding:
        holding = self._of_claim(wish.namespace, wish.claim)
        if holding is None:
            raise NotFound(what=f"claim {wish.namespace}/{wish.claim} that holds shares of its own")
        return holding

    def _of_claim(self, namespace: str, name: str) -> Holding | None:
        for holding in self._state.ledger.holdings():
            record = holding.record
            if is_of_claim(record) and (record.namespace, record.pod) == (namespace, name):
                return holding
        return None

    async def _resize_claim(self, wish: ResizeRequest) -> Resized:
        holding = self._claimed(wish)
        state = "prepared" if is_prepared(holding) else "not prepared on its node"
        done = await self._apply(holding, wish, state=state, pod=None)
        if self.on_claim is not None:
            self.on_claim(holding.record.pod_uid)
        return done

    async def _resize(self, wish: ResizeRequest) -> Resized:
        pod = await self._effects.pods.get(wish.namespace, wish.pod)
        if pod is None or not pod.node or pod.is_finished or pod.is_deleting:
            raise NotFound(what=f"running pod {wish.namespace}/{wish.pod}")
        holding = self._state.ledger.holding(pod.node, pod.uid)
        state = self._state.ledger.state_of(pod.node, pod.uid)
        if holding is None or state is None:
            raise NotFound(what=f"an allocation of pod {wish.namespace}/{wish.pod}")
        if pod.signed is None or pod.signed.allocation_id != holding.record.allocation_id:
            raise ResizeRefused(
                code="not-settled",
                text="the pod does not carry this allocation: "
                + (pod.mistrust or "it is still being settled; try again"),
            )
        if pod.signed.placement.containers != holding.record.containers:
            await self.align(holding)  # an earlier resize was interrupted
            pod = await self._effects.pods.get(wish.namespace, wish.pod)
            if pod is None:
                raise NotFound(what=f"running pod {wish.namespace}/{wish.pod}")
        return await self._apply(holding, wish, state=state, pod=pod)

    async def _apply(
        self, holding: Holding, wish: ResizeRequest, *, state: str, pod: PodFacts | None
    ) -> Resized:
        """Change the shares of a pod, or of a claim that a user wrote if ``pod`` is ``None``."""
        before = holding.record.containers
        changed, containers = resized(holding, wish, state=state)
        was = next(one for one in before if one.name == changed.name)
        if shrinks(before, containers) and not wish.force:
            await self._require_unused(holding, changed)
        upper = larger(before, containers)
        if holding.record.sku and upper != before:
            raise ResizeRefused(
                code="sku",
                text=f"the pod has SKU {holding.record.sku}; create it with a larger SKU",
            )
        text = f"{'container' if pod is not None else 'request'} {changed.name} resized"
        limits = containers if pod is None and upper != containers else ()
        booked = await self._book(holding, upper, reason=text, limits=limits)
        try:
            if pod is not None:
                await self._annotate(pod, booked, containers)
            in_force = await self._until_in_force(booked, changed)
            if upper != containers:
                if not in_force:
                    raise Unavailable(
                        peer=f"node {holding.record.node}",
                        detail=f"the container's limits did not change in"
                        f" {self._settings.resize_confirm_s:g} s, so they stay as they were",
                    )
                booked = await self._book(booked, containers, reason=text)
        except HamiError:
            if upper != containers:
                await self._undo(booked, before)
            raise
        return Resized(
            namespace=booked.record.namespace,
            pod=booked.record.pod,
            node=booked.record.node,
            allocation_id=booked.record.allocation_id,
            ledger_seq=booked.revision,
            container=changed,
            before=was,
            in_force=in_force,
        )

    async def _undo(self, booked: Holding, before: tuple[ContainerShares, ...]) -> None:
        """Roll back a shrink that the node did not apply: restore the container's former shares."""
        try:
            if booked.record.containers != before or booked.record.limits:
                booked = await self._book(booked, before, reason="resize rolled back")
            await self.align(booked)
        except HamiError as error:
            # The next comparison of ledger and pods reconciles them.
            _log.warning("resize not rolled back yet", extra={"problem": str(error)})

    # --- use -------------------------------------------------------------------------------------

    async def _usage(self, node: str) -> UsageAnswer:
        subject = subjects.ask(node, "usage")
        return codec.decode_on(subject, await self._ask(subject), UsageAnswer)

    async def _require_unused(self, holding: Holding, wanted: ContainerShares) -> None:
        """Raise ``ResizeRefused`` when the container uses more now than its new shares allow."""
        try:
            usage = await self._usage(holding.record.node)
        except (Unavailable, WireInvalid) as error:
            raise Unavailable(
                peer=f"agent of node {holding.record.node}",
                detail=f"the container's usage is unknown ({error}); --force skips this check",
            ) from error
        own = _own(usage.shares, holding, wanted.name)
        for share in wanted.shares:
            # Containers with one share together have one usage region, whose sum each shows.
            users = own.get(share.uuid, ())
            now = max(users, key=lambda one: one.used_mib, default=None)
            most_mib = max(share.memory_mib, share.memory_limit_mib)
            if now is not None and now.used_mib > most_mib:
                raise ResizeRefused(
                    code="in-use",
                    text=f"container {wanted.name} uses {now.used_mib} MiB of {share.uuid}, more"
                    f" than {most_mib}; free memory first, or force it: no memory is"
                    " taken away, but nothing new is given until use is below the limit",
                )

    async def _until_in_force(self, holding: Holding, wanted: ContainerShares) -> bool:
        """Poll until the container's limits file has the shares; returns whether it does."""
        clock = self._state.clock
        deadline_s = clock.monotonic_s() + self._settings.resize_confirm_s
        while True:
            try:
                own = _own((await self._usage(holding.record.node)).shares, holding, wanted.name)
            except (Unavailable, WireInvalid) as error:
                _log.debug("limits not confirmed", extra={"problem": str(error)})
                own = {}
            if all(
                own.get(share.uuid)
                and all(
                    (shown.file_mib, shown.file_core_pct) == (share.memory_mib, share.core_pct)
                    for shown in own[share.uuid]
                )
                for share in wanted.shares
            ):
                return True
            if clock.monotonic_s() >= deadline_s:
                return False
            await clock.sleep(_LOOK_S)

    # --- ledger ----------------------------------------------------------------------------------

    async def _book(
        self,
        holding: Holding,
        containers: tuple[ContainerShares, ...],
        *,
        reason: str,
        limits: tuple[ContainerShares, ...] = (),
    ) -> Holding:
        """Book these shares instead of those of ``holding``, within capacity and quotas.

        ``limits``: smaller ones, which the limits files of a claim are to have already.
        """
        record = holding.record
        grows = larger(record.containers, containers) != record.containers
        if grows and self._is_withheld(record.node, containers):
            raise ResizeRefused(
                code="node-withheld",
                text=f"node {record.node}: NodeWithheld: a record of the node cannot be read, so"
                " nothing more is given there; see GET /v1/quarantine",
            )
        generation = self._quota.ledger.generation
        try:
            async with self._effects.ledger.planning(record.node):
                booked = await self._append(
                    holding, containers, grows=grows, reason=reason, limits=limits
                )
            if not grows or not self._quota.ledger.governs(record.namespace, record.account):
                return booked
            refusal: NodeRefusal | None = None
            try:
                refusal = await self._quota.verdict(booked.revision, generation=generation)
            except Unavailable as error:
                await self._book(booked, record.containers, reason="quota not known")
                raise ResizeRefused(code="unavailable", text=str(error)) from error
        finally:
            self._quota.stop_expecting(record.allocation_id)
        if refusal is not None:
            await self._book(booked, record.containers, reason="beyond a quota")
            raise ResizeRefused(code="no-quota", text=refusal.text)
        return booked

    def _is_withheld(self, node: str, containers: Sequence[ContainerShares]) -> bool:
        """Return whether any vendor of the containers' shares is withheld on the node."""
        vendors = {share.vendor for container in containers for share in container.shares}
        return any(self._state.table.is_withheld(node, vendor) for vendor in vendors)

    async def _append(
        self,
        holding: Holding,
        containers: tuple[ContainerShares, ...],
        *,
        grows: bool,
        reason: str,
        limits: tuple[ContainerShares, ...],
    ) -> Holding:
        record, ledger = holding.record, self._state.ledger
        for _ in range(self._settings.fence_tries):
            self._state.require_complete()
            now = ledger.holding(record.node, record.pod_uid)
            if now is None or now.record.allocation_id != record.allocation_id:
                raise NotFound(what=f"an allocation of {record.namespace}/{record.pod}")
            if now.record.containers != record.containers:
                raise ResizeRefused(
                    code="changed", text="the shares were changed meanwhile; try again"
                )
            plan = self._state.core.answer(
                ResizePlanned(
                    holding=now,
                    placement=Placement(node=record.node, containers=containers),
                    now_s=self._state.clock.now_s(),
                    reason=reason,
                    limits=limits,
                )
            )
            if isinstance(plan, NodeRefusal):
                raise ResizeRefused(code="no-room", text=f"node {record.node}: {plan.text}")
            if grows:
                self._expect(plan, record.pod_uid)
            booked = await self._store(plan)
            if booked is not None:
                return booked
        raise ResizeRefused(
            code="contended",
            text=f"node {record.node} changed {self._settings.fence_tries} times; try again",
        )

    def _expect(self, plan: Append, pod_uid: str) -> None:
        """Refuse a record that exceeds a quota before it is written; else count it."""
        if refusal := self._quota.expect(plan.record, own=[(plan.record.node, pod_uid)]):
            raise ResizeRefused(code="no-quota", text=refusal)

    async def _store(self, plan: Append) -> Holding | None:
        """Append the plan; returns the new holding, ``None`` when it was not stored."""
        record = plan.record
        try:
            await self._effects.ledger.append(plan)
        except Conflict:
            self._metrics.fence_conflicts.inc()
            await self._effects.ledger.read_node(record.node)
        except Unavailable:
            await self._effects.ledger.read_node(record.node)  # it may or may not be stored
        now = self._state.ledger.holding(record.node, record.pod_uid)
        return now if now is not None and now.record == record else None

    # --- pod -------------------------------------------------------------------------------------

    async def align(self, holding: Holding) -> str:
        """Write the annotations that belong to the ledger's record; end a claim's broken shrink.

        Returns the action in one word.
        """
        record = holding.record
        if is_of_claim(record):
            return await self._end_shrink(holding)
        async with self._effects.ledger.planning(record.node):
            await self._effects.ledger.read_node(record.node)
        now = self._state.ledger.holding(record.node, record.pod_uid)
        if now is None or now.record.allocation_id != record.allocation_id:
            return "obsolete"
        pod = await self._effects.pods.get(record.namespace, record.pod)
        if pod is None or pod.uid != record.pod_uid or pod.node != record.node or pod.is_finished:
            return "obsolete"
        signed = pod.signed
        if signed is None or signed.allocation_id != now.record.allocation_id:
            return "obsolete"
        if signed.placement.containers == now.record.containers:
            return "present"
        await self._annotate(pod, now, now.record.containers)
        _log.warning(
            "annotations brought in line with the ledger",
            extra={"namespace": record.namespace, "pod": record.pod, "node": record.node},
        )
        return "aligned"

    async def _end_shrink(self, holding: Holding) -> str:
        """Roll back the shrink of a claim whose resize ended without a result."""
        record = holding.record
        if self._state.clock.now_s() - record.time_s < _SHRINK_WAITS * (
            self._settings.resize_confirm_s
        ):
            return "present"  # in progress, perhaps on another replica
        async with self._pods.hold(record.pod_uid, wait_s=self._settings.bind_wait_s):
            now = self._state.ledger.holding(record.node, record.pod_uid)
            if now is None or now.revision != holding.revision:
                return "obsolete"
            await self._book(now, record.containers, reason="resize rolled back")
        return "aligned"

    async def _annotate(
        self, pod: PodFacts, holding: Holding, containers: Sequence[ContainerShares]
    ) -> None:
        """Write these shares to the pod's annotations, while ``holding`` is its newest record."""
        record = replace(holding.record, containers=tuple(containers))
        current: PodFacts | None = pod
        for _ in range(_ANNOTATE_TRIES):
            now = self._state.ledger.holding(record.node, record.pod_uid)
            if now is None or now.revision != holding.revision:
                raise ResizeRefused(
                    code="changed", text="the pod's shares were changed meanwhile; try again"
                )
            if current is None or current.uid != record.pod_uid or current.is_finished:
                raise NotFound(what=f"running pod {record.namespace}/{record.pod}")
            document = {
                "metadata": {
                    "uid": current.uid,
                    "resourceVersion": current.resource_version,
                    "annotations": binding.allocation_annotations(
                        record,
                        ledger_seq=holding.revision,
                        signer=self._signer,
                        core_policy=self._settings.vendors.nvidia.core_policy,
                    ),
                }
            }
            try:
                with answer_within(self._settings.api_timeout_s, peer="API server"):
                    await self._kube.patch(current.path(), _encoder.encode(document))
            except Conflict:
                current = await self._effects.pods.get(record.namespace, record.pod)
                await self._effects.ledger.read_node(record.node)
            else:
                return
        raise Unavailable(peer="API server", detail=f"pod {record.pod} kept changing")


def _own(
    shares: Sequence[ShareNow], holding: Holding, container: str
) -> Mapping[str, Sequence[ShareNow]]:
    """Return the uses of the container's or request's shares, by device.

    A container that names several requests of a claim has them under the name of the first.
    """
    own = [one for one in shares if (one.owner_uid or one.pod_uid) == holding.record.pod_uid]
    named = [one for one in own if (one.owner_container or one.container) == container]
    found: dict[str, list[ShareNow]] = {}
    for share in named or (own if is_of_claim(holding.record) else ()):
        found.setdefault(share.uuid, []).append(share)
    return found
