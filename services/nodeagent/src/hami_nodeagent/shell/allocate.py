# SPDX-License-Identifier: Apache-2.0
"""Answers kubelet's calls: collects facts, applies ``core.claims``, stores the grant.

A call takes one list from kubelet (about a millisecond), one read of the pod at the API server, one
read of its state on the bus, a decision with its entry into the grants between two awaits, so that
no lock is needed, and a write to disk. If no decision is possible yet, the call waits for an update
for at most ``allocate_wait_s``, because kubelet admits no other pod meanwhile, and is then refused
with the reason. Data missing because of a bus or API server outage gets the longer wait
``outage_wait_s``, and a record that did not arrive is read directly, because kubelet never retries
a pod. While the bus is unavailable, the last known records and states are used; see
``core.claims``.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
from msgspec.structs import replace

from hami_common.errors import HamiError, NotFound, Unavailable
from hami_common.kubeletapi import deviceplugin as api
from hami_common.pods import limits
from hami_common.ports import Clock
from hami_common.vendors import ascend
from hami_common.vendors.protocol import BindMount
from hami_nodeagent.core.claims import (
    OUTAGES,
    TRUST_ALL,
    Claim,
    Code,
    Confirmed,
    ListedPod,
    Refuse,
    Request,
    Wait,
    decide_all,
    grant_of,
)
from hami_nodeagent.core.grants import Grant
from hami_nodeagent.core.holders import hindrance_of, is_recalled, may_thrash, needs_library
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.settings import Settings
from hami_nodeagent.shell.install import Installed
from hami_nodeagent.shell.limiter import Limiter
from hami_nodeagent.shell.partition_answers import PartitionAnswers
from hami_nodeagent.shell.podresources import PodResources
from hami_nodeagent.shell.render import Renderer
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.vnpucore import VNPU_CORE, VnpuCore

_LOOK_AGAIN_S = 0.1
"""Interval at which kubelet's list is re-read while a call waits."""
_READ_STATE_S = 0.5
_READ_RECORD_S = 0.5
"""Timeout of a record read, and the minimum interval between two of them in one call."""
_ROUNDS = 8
"""Reads of single pods per list; each read can reveal at most one further pod."""

_log = logging.getLogger(__name__)


class PodReads(Protocol):
    """Consistent reads of pods; ``shell.pods.PodSource``."""

    async def learn_list_kind(self, *, reads: int) -> None: ...

    async def confirm(self, facts: PodFacts) -> None: ...

    async def confirm_all(self) -> None: ...


class RecordReads(Protocol):
    """Reads of ledger records; ``shell.feed.LedgerFeed``."""

    async def read_one(self, uid: str, *, timeout_s: float) -> None: ...


class StateReads(Protocol):
    """Reads of states; ``shell.states.States``."""

    async def read_one(self, uid: str, *, timeout_s: float) -> None: ...


class GrantKeeper:
    """Stores the grants on disk; writes are serialized, each with the newest grants."""

    def __init__(self, site: Site) -> None:
        self._picture = site.picture
        self._checkpoint = site.checkpoint
        self._metrics = site.metrics
        self._turn = anyio.Lock()

    async def save(self) -> None:
        """Store the grants; ``OSError`` when that is not possible."""
        async with self._turn:
            file = self._picture.grants.to_file()
            self._metrics.grants.set(len(file.grants))
            try:
                await anyio.to_thread.run_sync(self._checkpoint.save_grants, file)
            except OSError:
                self._metrics.checkpoint_failures.inc()
                raise

    async def write_limits(self, grant: Grant, text: str) -> Path:
        """Store a container's limits file; ``OSError`` when that is not possible."""
        return await anyio.to_thread.run_sync(self._checkpoint.write_limits, grant, text)


class _Patience:
    """Remaining wait of one call, by reason."""

    def __init__(self, clock: Clock, settings: Settings) -> None:
        now_s = clock.monotonic_s()
        self._clock = clock
        self._wait_s = settings.allocate_wait_s
        self._longest_s = now_s + max(settings.allocate_wait_s, settings.outage_wait_s)
        self._deadline_s = now_s + self._wait_s
        self._read_at_s = now_s
        self.until_s = self._deadline_s

    def left_s(self) -> float:
        return self.until_s - self._clock.monotonic_s()

    def adapt(self, code: Code) -> None:
        """Set the reason for the wait; waits caused by an outage have a separate limit."""
        if code in OUTAGES:
            self.until_s = self._longest_s
            self._deadline_s = min(self._longest_s, self._clock.monotonic_s() + self._wait_s)
        else:
            self.until_s = self._deadline_s

    def may_read_record(self) -> bool:
        """Return whether the last record read is old enough for another."""
        now_s = self._clock.monotonic_s()
        if now_s < self._read_at_s:
            return False
        self._read_at_s = now_s + _READ_RECORD_S
        return True


class Allocator:
    """Decides and answers for all vendors of this node."""

    def __init__(
        self,
        *,
        site: Site,
        kubelet: PodResources,
        renderer: Renderer,
        keeper: GrantKeeper,
        limiter: Limiter,
        vnpu_core: VnpuCore,
        partitions: PartitionAnswers | None = None,
    ) -> None:
        self._limiter = limiter
        self._vnpu_core = vnpu_core
        self._partitions = partitions
        self._picture = site.picture
        self._kubelet = kubelet
        self._renderer = renderer
        self._keeper = keeper
        self._settings = site.settings
        self._clock = site.clock
        self._metrics = site.metrics
        self.pods: PodReads | None = None
        """Set after the first connection to the API server; without it no pod can be confirmed."""
        self.records: RecordReads | None = None
        """Set after the first connection to the bus, as are the states."""
        self.states: StateReads | None = None

    async def allocate(
        self, requests: Sequence[Request], *, repeated_after_s: float | None = None
    ) -> tuple[tuple[Claim, ...], list[api.ContainerAllocateResponse]] | Refuse:
        """Answer one ``Allocate`` call.

        ``repeated_after_s``: age of a first attempt that was interrupted, perhaps after its grants
        were stored. Kubelet did not receive those grants, so they are ignored.
        """
        if repeated_after_s is not None:
            self._forget_tries(requests, since_s=self._clock.now_s() - repeated_after_s)
        installed = await self._limiter.current()
        has_npus = any(request.vendor in ("", ascend.NAME) for request in requests)
        vnpu_problem = await anyio.to_thread.run_sync(self._vnpu_core.problem) if has_npus else ""
        granted = await self._claim(requests, installed, vnpu_problem)
        if isinstance(granted, Refuse):
            return granted
        claims, grants = granted
        try:
            await self._keeper.save()
            responses = [
                await self._answer(
                    claim,
                    vendor=claim.vendor,
                    limits_directory=await self._limits_directory(claim, grant),
                    library_mounts=await self._library_mounts(claim, grant, installed),
                )
                for claim, grant in zip(claims, grants, strict=True)
            ]
        except OSError as error:
            for grant in grants:
                self._picture.grants.remove(grant)
            _log.exception("host not writable")
            return Refuse(
                code=Code.HOST_FAILED,
                text=f"the agent cannot write its state on this node: {error.strerror or error}",
            )
        except NotFound as error:
            for grant in grants:
                self._picture.grants.remove(grant)
            return Refuse(code=Code.PARTITION_NOT_READY, text=str(error))
        self._picture.note_change()
        return claims, responses

    async def _answer(
        self,
        claim: Claim,
        *,
        vendor: str,
        limits_directory: Path | None,
        library_mounts: Sequence[BindMount],
    ) -> api.ContainerAllocateResponse:
        if self._partitions is not None:
            owners = self._partitions.owners(claim, vendor)
            if owners:
                return await self._partitions.answer(
                    claim,
                    vendor=vendor,
                    owners=owners,
                    limits_directory=limits_directory,
                    library_mounts=library_mounts,
                )
        return self._renderer.render(
            claim,
            vendor=vendor,
            limits_directory=limits_directory,
            library_mounts=library_mounts,
        )

    async def _library_mounts(
        self, claim: Claim, grant: Grant, installed: Installed | None
    ) -> tuple[BindMount, ...]:
        """Return the mounts of the library that limits the container; ``OSError`` on failure."""
        if self._vnpu_core.is_for(claim.own):
            return await anyio.to_thread.run_sync(
                self._vnpu_core.mounts, claim.pod.uid, claim.container
            )
        if not grant.library:
            return ()
        return self._limiter.mounts(
            installed,
            claim.pod.uid,
            claim.container,
            is_recalled=is_recalled(claim),
            may_thrash=may_thrash(claim),
        )

    def _forget_tries(self, requests: Sequence[Request], *, since_s: float) -> None:
        for request in requests:
            for grant in self._picture.grants.of_ids(request.resource, request.ids):
                if grant.time_s >= since_s:
                    self._picture.grants.remove(grant)

    async def prefer(
        self, request: Request, *, available: Sequence[str], must: Sequence[str]
    ) -> tuple[str, ...]:
        """Return ids on the waiting container's devices; other ids would work as well."""
        deadline_s = self._clock.monotonic_s() + self._settings.allocate_wait_s / 4
        splits = self._picture.splits(request.vendor, request.resource)
        wanted: list[str] = []
        while True:
            changed = self._picture.changed
            listing = await self._list(deadline_s)
            # The ids are not chosen yet: any ids of the right number represent them.
            stand_in = replace(request, ids=tuple(available[: len(request.ids)]))
            decision = decide_all(self._picture.view, listing, [stand_in], TRUST_ALL)
            if not isinstance(decision, Wait):
                break
            if not await self._news(changed, deadline_s):
                break
        if not isinstance(decision, Wait | Refuse):
            wanted = [share.uuid for share in decision[0].own]
        return splits.prefer(available, must=must, wanted=wanted, size=len(request.ids))

    def check_start(self, resource: str, ids: Sequence[str]) -> Refuse | None:
        """Refuse the start of a container whose ids were not granted or whose check failed."""
        grants = self._picture.grants.of_ids(resource, ids)
        if not grants:
            return Refuse(
                code=Code.NOT_GRANTED,
                text=f"no container was granted {','.join(sorted(ids)) or 'nothing'}",
            )
        for grant in grants:
            state = self._picture.states_by_uid.get(grant.pod_uid)
            is_failed = (
                state is not None
                and state.state == "failed"
                and state.allocation_id == grant.allocation_id
            )
            if not is_failed and grant.pod_uid not in self._picture.failures_by_uid:
                return None
        return Refuse(
            code=Code.STATE_FAILED,
            text=f"the allocation of pod {grants[0].namespace}/{grants[0].pod} failed",
        )

    async def prepare_start(self, resource: str, ids: Sequence[str]) -> Refuse | None:
        """Wait, with a limit, until a container with these ids may start."""
        if self._partitions is None:
            return None
        return await self._partitions.prepare(self._picture.grants.of_ids(resource, ids))

    async def _claim(
        self, requests: Sequence[Request], installed: Installed | None, vnpu_problem: str
    ) -> tuple[tuple[Claim, ...], list[Grant]] | Refuse:
        patience = _Patience(self._clock, self._settings)
        while True:
            changed = self._picture.changed
            listing = await self._list(patience.until_s)
            decision, confirmed = await self._decide(listing, requests, patience.until_s)
            if isinstance(decision, tuple):
                decision = self._doubt(decision, listing, requests) or decision
            if isinstance(decision, tuple):
                if self.states is not None:
                    left_s = min(_READ_STATE_S, max(0.05, patience.left_s()))
                    await self.states.read_one(decision[0].pod.uid, timeout_s=left_s)
                # From here to the entry nothing is awaited.
                decision = decide_all(self._picture.view, listing, requests, confirmed)
            if isinstance(decision, tuple):
                decision = self._doubt(decision, listing, requests) or decision
            if isinstance(decision, tuple):
                lack = self._lacking(decision)
                if not lack:
                    return self._enter(decision, requests, installed, vnpu_problem)
                decision = Wait(code=Code.PARTITION_NOT_READY, text=lack)
            if isinstance(decision, Refuse):
                return decision
            patience.adapt(decision.code)
            if decision.record_of and patience.may_read_record():
                await self._read_record(decision.record_of)
            if not await self._news(changed, patience.until_s):
                return Refuse(code=decision.code, text=decision.text)
            self._metrics.waits.labels(code=decision.code).inc()

    def _doubt(
        self,
        claims: Sequence[Claim],
        listing: Sequence[ListedPod] | None,
        requests: Sequence[Request],
    ) -> Wait | None:
        """Return why the claims may be wrong: an object that affects them cannot be read."""
        names = {(one.namespace, one.name) for one in listing or ()}
        for request in requests:
            if text := self._picture.is_unreadable(names, request.resource):
                return Wait(code=Code.POD_UNREADABLE, text=text)
        for claim in claims:
            if text := self._picture.unreadable_of(claim.pod.uid):
                return Wait(
                    code=Code.LEDGER_UNREADABLE,
                    text=f"pod {claim.pod.title}: {text}",
                    record_of=claim.pod.uid,
                )
        return None

    async def _read_record(self, uid: str) -> None:
        if self.records is not None:
            await self.records.read_one(uid, timeout_s=_READ_RECORD_S)

    def _lacking(self, claims: Sequence[Claim]) -> str:
        """Return why hardware partitions block an answer; empty when they do not."""
        if self._partitions is None:
            return ""
        return self._partitions.lacking(claims, [claim.vendor for claim in claims])

    async def _decide(
        self, listing: Sequence[ListedPod] | None, requests: Sequence[Request], deadline_s: float
    ) -> tuple[tuple[Claim, ...] | Wait | Refuse, Confirmed]:
        """Decide on one list, with the reads that the decision requests."""
        if self.pods is not None:
            with anyio.move_on_after(max(0.05, deadline_s - self._clock.monotonic_s())):
                await self.pods.learn_list_kind(reads=1)
        confirmed = Confirmed()
        decision = decide_all(self._picture.view, listing, requests, confirmed)
        for _ in range(_ROUNDS):  # rounds of one call of kubelet, whose top isolates it
            if not isinstance(decision, Wait) or not (decision.confirm or decision.confirm_all):
                break
            try:
                with anyio.fail_after(max(0.05, deadline_s - self._clock.monotonic_s())):
                    confirmed = await self._confirm(decision, confirmed)
            except (HamiError, TimeoutError) as error:
                _log.warning("pod not confirmed", extra={"problem": str(error)})
                decision = replace(decision, code=Code.API_UNAVAILABLE)
                break
            decision = decide_all(self._picture.view, listing, requests, confirmed)
        return decision, confirmed

    async def _confirm(self, wanted: Wait, confirmed: Confirmed) -> Confirmed:
        if self.pods is None:
            raise Unavailable(peer="the Kubernetes API", detail="not reached yet")
        if wanted.confirm is None:
            await self.pods.confirm_all()
            return Confirmed(everything=True)
        await self.pods.confirm(wanted.confirm)
        name = (wanted.confirm.namespace, wanted.confirm.name)
        return replace(confirmed, names=confirmed.names | {name})

    def _enter(
        self,
        claims: tuple[Claim, ...],
        requests: Sequence[Request],
        installed: Installed | None,
        vnpu_problem: str,
    ) -> tuple[tuple[Claim, ...], list[Grant]] | Refuse:
        grants = []
        for claim, request in zip(claims, requests, strict=True):
            is_limited = self._limiter.is_wanted and needs_library(claim.own, claim.devices)
            if is_limited and installed is None:
                return Refuse(code=Code.LIMITER_MISSING, text=self._limiter.problem)
            if vnpu_problem and self._vnpu_core.is_for(claim.own):
                return Refuse(code=Code.LIMITER_MISSING, text=vnpu_problem)
            refusal = hindrance_of(claim, claim.vendor, is_limited=is_limited)
            if refusal is not None:
                return refusal
            grants.append(
                grant_of(
                    claim,
                    request,
                    self._picture.view,
                    time_s=self._clock.now_s(),
                    library=self._library_of(claim, installed if is_limited else None),
                )
            )
        for grant in grants:
            self._picture.grants.add(grant)
        return claims, grants

    def _library_of(self, claim: Claim, installed: Installed | None) -> str:
        """Return the name of the library that limits all of the claim's shares, or empty."""
        if self._vnpu_core.limits(claim.own):
            return VNPU_CORE
        return installed.library.name if installed is not None else ""

    async def _list(self, deadline_s: float) -> Sequence[ListedPod] | None:
        left_s = max(0.1, deadline_s - self._clock.monotonic_s())
        try:
            return await self._kubelet.list(timeout_s=left_s)
        except Unavailable as error:
            _log.warning("kubelet does not list its pods", extra={"problem": str(error)})
            return None

    async def _news(self, changed: anyio.Event, deadline_s: float) -> bool:
        """Wait for an update or the next check; false when the call's wait is used up."""
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            return False
        await self._picture.wait_change(changed, min(left_s, _LOOK_AGAIN_S))
        return True

    async def _limits_directory(self, claim: Claim, grant: Grant) -> Path | None:
        """Return the host directory of the limits file of a container without a volume for it."""
        if claim.container in claim.pod.limits_mounted:
            return None
        text = limits.encode(
            limits.limits_of(
                claim.shares,
                allocation_id=claim.entry.record.allocation_id,
                core_policy=self._settings.core_policy,
            )
        )
        return await self._keeper.write_limits(grant, text)
