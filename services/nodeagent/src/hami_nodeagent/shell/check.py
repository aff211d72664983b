# SPDX-License-Identifier: Apache-2.0
"""Compares grants with kubelet's list and removes obsolete state, every ``check_s`` (design D9).

A mismatch that two lists in a row show fails the allocations concerned, because two containers then
run with each other's devices. Containers with ids in kubelet's list but without a grant, after the
grant file was lost, are adopted if a live ledger record names them. State of pods that ended is
dropped: grants, limits files, release records, old versions of the library. The check also detects
slow changes: trusted keys, and kubelet's version.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import anyio.to_thread
from anyio.lowlevel import checkpoint

from hami_common.errors import Unavailable
from hami_common.runtime.trustedkeys import TrustedKeys
from hami_nodeagent.core.claims import ListedPod
from hami_nodeagent.core.grants import Comparison, Grant, Shown, compare
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.core.reporting import Failure
from hami_nodeagent.shell.allocate import GrantKeeper
from hami_nodeagent.shell.limiter import Limiter
from hami_nodeagent.shell.podresources import PodResources
from hami_nodeagent.shell.pods import PodSource
from hami_nodeagent.shell.site import Site

MISMATCH = "device-mismatch"
_LOOK_TWICE_S = 0.5

_log = logging.getLogger(__name__)


class SelfCheck:
    """The periodic check of one agent."""

    def __init__(
        self,
        *,
        site: Site,
        kubelet: PodResources,
        pods: PodSource,
        keys: TrustedKeys,
        keeper: GrantKeeper,
        limiter: Limiter,
        vendor_by_resource: Mapping[str, str],
        tidy: Callable[[], Awaitable[None]] = checkpoint,
    ) -> None:
        """Create the check; ``tidy`` drops further state of pods without grants."""
        self._tidy_more = tidy
        self._site = site
        self._picture = site.picture
        self._kubelet = kubelet
        self._pods = pods
        self._keys = keys
        self._keeper = keeper
        self._limiter = limiter
        self._vendor_by_resource = vendor_by_resource

    async def run(self) -> None:
        """Check periodically until cancelled."""
        while True:
            await self.check()
            await self._site.clock.sleep(self._site.settings.check_s)

    async def check(self) -> None:
        """Run one check. Peers that do not answer are queried again next time.

        A failing part of the check is put in quarantine; the other parts still run.
        """
        await self._part("keys", self._check_keys)
        await self._part("version", self._pods.learn_list_kind)
        try:
            listing = await self._kubelet.list()
        except Unavailable as error:
            _log.debug("grants not checked", extra={"problem": str(error)})
            return
        await self._part("grants", partial(self._check_grants, listing))
        await self._part("pods-over", partial(self._check_over, listing))
        await self._part("memory", self._tidy)
        await self._part("limits-files", self._tidy_limits)
        await self._part("partitions", self._tidy_more)
        await self._part("library", self._limiter.collect)

    async def _part(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        await self._site.quarantine.run("check", name, part, is_retried=False)

    async def _check_keys(self) -> None:
        if await anyio.to_thread.run_sync(self._keys.reload_if_changed):
            self._pods.judge_again()

    async def _check_grants(self, listing: Sequence[ListedPod]) -> None:
        comparison = self._compare(listing)
        if comparison.mismatches:
            await self._fail(comparison)
        self._site.metrics.unconfirmed.set(len(comparison.unconfirmed))
        if self._adopt(comparison.unknown):
            await self._save()
            self._picture.note_change()

    async def _check_over(self, listing: Sequence[ListedPod]) -> None:
        if self._drop(listing):
            await self._save()
            self._picture.note_change()

    def _compare(self, listing: Sequence[ListedPod]) -> Comparison:
        return compare(self._picture.grants, self._shown(listing), self._vendor_by_resource)

    def _shown(self, listing: Sequence[ListedPod]) -> list[Shown]:
        """Return listed containers with our resources; pods with an uncertain uid are omitted."""
        shown = []
        for listed in listing:
            pods = self._picture.view.pods_by_name.get((listed.namespace, listed.name), ())
            if len(pods) != 1:
                continue
            for resource, asks in pods[0].asks_by_resource.items():
                for ask in asks:
                    ids = listed.ids_by_container.get(ask.container)
                    if ids is not None:
                        shown.append(
                            Shown(
                                pod_uid=pods[0].uid,
                                container=ask.container,
                                resource=resource,
                                ids=ids.get(resource, frozenset()),
                            )
                        )
        return shown

    async def _fail(self, first: Comparison) -> None:
        """Fail mismatches that a second list confirms; an answer may have left in between."""
        await self._site.clock.sleep(_LOOK_TWICE_S)
        try:
            second = self._compare(await self._kubelet.list())
        except Unavailable as error:
            _log.debug("mismatch not confirmed", extra={"problem": str(error)})
            return
        for mismatch in second.mismatches:
            if mismatch not in first.mismatches:
                continue
            if mismatch.pod_uid not in self._picture.failures_by_uid:
                self._site.metrics.mismatches.inc()
                _log.error(
                    "container holds what was granted to another",
                    extra={
                        "pod_uid": mismatch.pod_uid,
                        "container": mismatch.container,
                        "reason": mismatch.text,
                    },
                )
                self._picture.failures_by_uid[mismatch.pod_uid] = Failure(
                    code=MISMATCH, reason=f"container {mismatch.container}: {mismatch.text}"
                )
                self._picture.note_change()

    def _adopt(self, unknown: Sequence[Shown]) -> bool:
        adopted: list[Grant] = []
        for shown in unknown:
            self._site.quarantine.call(
                "grant",
                f"{shown.pod_uid}/{shown.container}",
                partial(self._adopt_one, shown, adopted),
            )
        return bool(adopted)

    def _adopt_one(self, shown: Shown, adopted: list[Grant]) -> None:
        grant = self._grant_for(shown, self._picture.pods.find(shown.pod_uid))
        if grant is not None:
            self._picture.grants.add(grant)
            adopted.append(grant)
            _log.warning(
                "grant learnt from kubelet",
                extra={"pod": f"{grant.namespace}/{grant.pod}", "container": grant.container},
            )

    def _grant_for(self, shown: Shown, pod: PodFacts | None) -> Grant | None:
        entry = self._picture.entries_by_uid.get(shown.pod_uid)
        vendor = self._vendor_by_resource[shown.resource]
        if pod is None or entry is None or entry.record.op == "release" or entry.record.claim:
            return None
        for shares in entry.record.containers:
            own = [share for share in shares.shares if vendor in ("", share.vendor)]
            # HAMi's grants may count more devices than were given, see hami_common.compat.adoption.
            # The neutral resource may count others than the alternative that was chosen.
            is_any = bool(entry.record.origin) or not vendor
            is_all = bool(own) and (len(own) == len(shown.ids) or is_any)
            if shares.name == shown.container and is_all:
                return Grant(
                    pod_uid=pod.uid,
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=shown.container,
                    kind=shares.kind,
                    vendor=own[0].vendor,
                    resource=shown.resource,
                    allocation_id=entry.record.allocation_id,
                    ids=tuple(sorted(shown.ids)),
                    uuids=tuple(share.uuid for share in own),
                    time_s=self._site.clock.now_s(),
                    adopted=True,
                )
        return None

    def _drop(self, listing: Sequence[ListedPod]) -> bool:
        """Drop the grants of pods that ended."""
        listed = {
            (pod.namespace, pod.name): frozenset(
                one
                for held in pod.ids_by_container.values()
                for ids in held.values()
                for one in ids
            )
            for pod in listing
        }
        over = [
            uid
            for uid in self._picture.grants.pod_uids()
            if not self._picture.grants.is_by_claim(uid)  # kubelet unprepares claims
            and self._is_over(uid, self._picture.grants.of_pod(uid), listed)
        ]
        for uid in over:
            count = self._picture.grants.drop_pod(uid)
            self._picture.pods.note_over(uid)
            _log.info("grants ended", extra={"pod_uid": uid, "count": count})
        return bool(over)

    def _is_over(
        self, uid: str, grants: Sequence[Grant], listed: Mapping[tuple[str, str], frozenset[str]]
    ) -> bool:
        """Return whether the pod ended; ``listed``: the ids of each listed pod.

        A listed pod without these ids is a later one of the same name, as StatefulSets have it.
        """
        pod = self._picture.pods.find(uid)
        if pod is not None and pod.finished:
            return True
        if pod is not None and not pod.gone:
            return False
        before_s = self._site.clock.now_s() - self._site.settings.check_s
        for grant in grants:
            ids = listed.get((grant.namespace, grant.pod))
            # Kubelet may list the ids of a grant a little later than it got them.
            if ids is not None and (grant.time_s > before_s or not ids.isdisjoint(grant.ids)):
                return False
        return True

    async def _tidy(self) -> None:
        now_s = self._site.clock.monotonic_s()
        self._pods.forget(gone_before_s=now_s - self._site.settings.remember_gone_s)
        picture = self._picture
        for uid, entry in list(picture.entries_by_uid.items()):
            is_over = picture.pods.find(uid) is None and not picture.grants.is_by_claim(uid)
            if entry.record.op == "release" and is_over:
                del picture.entries_by_uid[uid]
                picture.states_by_uid.pop(uid, None)
                picture.failures_by_uid.pop(uid, None)
                for what in ("record", "state"):
                    picture.note_unreadable(uid, what, "")

    async def _tidy_limits(self) -> None:
        # A grant is entered before its limits are written, so a late check cannot miss a new one.
        picture = self._picture
        await anyio.to_thread.run_sync(
            self._site.checkpoint.remove_limits, lambda uid: bool(picture.grants.of_pod(uid))
        )

    async def _save(self) -> None:
        try:
            await self._keeper.save()
        except OSError as error:
            _log.warning("grants not kept on disk", extra={"problem": str(error)})
