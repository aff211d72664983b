# SPDX-License-Identifier: Apache-2.0
"""Prepares ResourceClaims for kubelet: applies ``core.resourceclaims``, writes the CDI file.

A call reads the claim at the API server, waits a bounded time until the ledger's record confirms
the claim's allocation, enters the shares into the grants, and then writes limits file, usage
region, CDI file (from which the container runtime makes containers) and its own book.
Every step can be repeated: after a restart of the agent or of kubelet, and after a reboot, which
loses the CDI file and the regions, the same call gives the same answer and the same file.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from opentelemetry.trace import SpanKind

from hami_common.apipath import api_path, is_label
from hami_common.dra import names
from hami_common.dra.claims import ResourceClaim
from hami_common.dra.podclaims import owner_pod
from hami_common.errors import HamiError, NotFound, Unavailable
from hami_common.events.allocation import CLAIM, AllocationRecord, is_by_claim
from hami_common.events.codec import decode
from hami_common.model.device import Device
from hami_common.model.placement import Booked, ContainerShares, Share
from hami_common.pods import limits
from hami_common.ports import KubeApi
from hami_common.vendors.protocol import BindMount, ContainerEdits
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.grants import Grant
from hami_nodeagent.core.holders import needs_library, uses_managed_memory
from hami_nodeagent.core.partition_specs import spec_of
from hami_nodeagent.core.resourceclaims import (
    Code,
    Facts,
    Given,
    Prepared,
    Refuse,
    Wait,
    decide,
    given_shares,
    monitor_refusal,
    own_of,
    prepared_devices,
    record_owner,
    request_of,
)
from hami_nodeagent.shell.allocate import RecordReads, StateReads
from hami_nodeagent.shell.claimpartitions import ClaimPartitions, Hardware
from hami_nodeagent.shell.install import Installed
from hami_nodeagent.shell.limiter import Limiter
from hami_nodeagent.shell.podresources import PodResources
from hami_nodeagent.shell.render import Renderer
from hami_nodeagent.shell.site import Site

_READ_S = 0.5
"""Timeout of a read on the bus, and the minimum interval between two of them in one call."""
_LOOK_S = 1.0
"""Longest wait for a change before the ledger is read again."""

_log = logging.getLogger(__name__)


class Preparer:
    """The prepared claims of one node."""

    def __init__(
        self,
        *,
        site: Site,
        renderer: Renderer,
        limiter: Limiter,
        partitions: Hardware,
        kube: Callable[[], KubeApi | None],
    ) -> None:
        """Take over the claims that an earlier run prepared.

        ``kube`` returns the API, ``None`` before it was reached.
        """
        self._site = site
        self._picture = site.picture
        self._settings = site.settings.dra
        self._clock = site.clock
        self._checkpoint = site.checkpoint
        self._renderer = renderer
        self._limiter = limiter
        self._parts = ClaimPartitions(site, partitions)
        self._kube = kube
        self._specs = Path(self._settings.cdi_dir)
        self._regions = Path(self._settings.region_dir)
        self.records: RecordReads | None = None
        """Set after the first connection to the bus, as are the states."""
        self.states: StateReads | None = None
        self._locks: dict[str, anyio.Lock] = {}
        """By claim, while it is being prepared: kubelet asks at once for all pods that share it."""
        self._prepared = {one.uid: one for one in self._checkpoint.load_claims()}
        for one in self._prepared.values():
            for grant in one.grants:
                self._picture.grants.add(grant)
        self._note()

    # -- prepare

    async def prepare(self, *, namespace: str, name: str, uid: str) -> Prepared | Refuse:
        """Prepare one claim, or refuse it with the reason; kubelet retries."""
        begun_s = self._clock.monotonic_s()
        lock = self._locks.setdefault(uid, anyio.Lock())
        try:
            async with lock:
                outcome = await self._prepare(namespace, name, uid)
        except Exception:  # noqa: BLE001 - the top of a call; logged, answered with the code
            _log.exception("claim not prepared", extra={"claim": f"{namespace}/{name}"})
            outcome = Refuse(code=Code.INTERNAL, text="internal error, see the agent's log")
        finally:
            if not lock.locked():
                self._locks.pop(uid, None)
        metrics, took_s = self._site.metrics.claims, self._clock.monotonic_s() - begun_s
        metrics.seconds.observe(took_s)
        self._trace(namespace, name, uid, took_s, outcome)
        extra = {"claim": f"{namespace}/{name}", "uid": uid, "took_s": round(took_s, 3)}
        if isinstance(outcome, Refuse):
            metrics.prepares.labels(outcome=outcome.code).inc()
            _log.warning("claim refused", extra={**extra, "reason": outcome.message})
        else:
            metrics.prepares.labels(outcome="ok").inc()
            _log.info("claim prepared", extra=extra)
        return outcome

    def _trace(
        self, namespace: str, name: str, uid: str, took_s: float, outcome: Prepared | Refuse
    ) -> None:
        """Record a span below the one that wrote the ledger record, as for ``Allocate``."""
        tracing, owner = self._site.tracing, self._holder(namespace, name, uid)
        entry = self._picture.entries_by_uid.get(owner)
        if not tracing.is_recording or entry is None:
            return
        pod = self._picture.pods.find(owner)
        of_pod = {"k8s.pod.name": entry.record.pod, "k8s.pod.uid": owner} if pod else {}
        end_s = self._clock.now_s()
        tracing.record(
            "prepare",
            traceparent=entry.traceparent or (pod.traceparent if pod is not None else ""),
            begin_s=end_s - took_s,
            end_s=end_s,
            kind=SpanKind.SERVER,
            attributes={
                "k8s.node.name": self._picture.node,
                "k8s.namespace.name": namespace,
                "hami.claim": name,
                "hami.allocation.id": entry.record.allocation_id,
                **of_pod,
            },
            problem=outcome.message if isinstance(outcome, Refuse) else "",
        )

    async def _prepare(self, namespace: str, name: str, uid: str) -> Prepared | Refuse:
        installed: Installed | None = None
        holder = self._holder(namespace, name, uid)

        async def find_library() -> None:
            nonlocal installed
            installed = await self._limiter.current()

        async with anyio.create_task_group() as group:
            group.start_soon(find_library)
            if self.states is not None and holder:
                group.start_soon(partial(self.states.read_one, holder, timeout_s=_READ_S))
            claim = await self._read(namespace, name, uid)
        if isinstance(claim, Refuse):
            return claim
        if claim.monitors():
            return await self._prepare_monitor(claim)
        given = await self._decided(claim, is_state_read=record_owner(claim) == holder)
        if isinstance(given, Refuse):
            return given
        # Nothing was awaited since the decision: two calls cannot be given the same memory.
        known = self._prepared.get(uid)
        is_again = known is not None and known.is_of(given.record, given.groups)
        grants = known.grants if known is not None and is_again else self._grants(given, installed)
        if isinstance(grants, Refuse):
            return grants
        for grant in grants:
            self._picture.grants.add(grant)
        try:
            # A partition that was created again since, as after a reboot, has other names.
            is_same = is_again and not self._parts.owners_of(given.record)
            return await self._write(claim, given, grants, installed, known if is_same else None)
        except (OSError, NotFound) as error:
            for grant in grants:
                self._picture.grants.remove(grant)
            for grant in known.grants if known is not None else ():
                self._picture.grants.add(grant)
            if isinstance(error, NotFound):
                return Refuse(code=Code.PARTITION_NOT_READY, text=f"claim {name}: {error}")
            return _unwritable(error)

    async def _prepare_monitor(self, claim: ResourceClaim) -> Prepared | Refuse:
        """Give all devices of the node, without a share and without limits."""
        refusal = monitor_refusal(claim, self._picture.node, is_on=self._settings.monitor)
        if refusal is not None:
            return refusal
        edits = monitor_edits(self._renderer, self._picture.view.devices_by_uuid.values())
        requests = dict.fromkeys(one.request.partition("/")[0] for one in claim.monitors())
        cdi_ids, spec = _cdi_of(claim.uid, dict.fromkeys(requests, edits))
        prepared = Prepared(
            uid=claim.uid,
            namespace=claim.namespace,
            name=claim.metadata.name,
            allocation_id="",
            containers=(),
            devices=prepared_devices(claim, cdi_ids),
            grants=(),
            spec=spec,
        )
        try:
            return await self._keep(prepared)
        except OSError as error:
            return _unwritable(error)

    async def _read(self, namespace: str, name: str, uid: str) -> ResourceClaim | Refuse:
        kube, title = self._kube(), f"{namespace}/{name}"
        unknown = Refuse(code=Code.CLAIM_UNKNOWN, text=f"claim {title} ({uid}) does not exist")
        if not is_label(uid):
            return unknown
        if kube is None:
            return Refuse(code=Code.API_UNAVAILABLE, text="the API server was not reached yet")
        path = api_path(
            "apis", names.GROUP, names.VERSION, "namespaces", namespace, "resourceclaims", name
        )
        try:
            claim = decode(await kube.get(path), ResourceClaim, what=f"claim {title}")
        except NotFound:
            return unknown
        except HamiError as error:
            return Refuse(code=Code.API_UNAVAILABLE, text=f"claim {title} is not read: {error}")
        if not is_label(record_owner(claim)):
            return Refuse(
                code=Code.ALLOCATION_INVALID,
                text=f"claim {title}: metadata.ownerReferences: the uid of its pod is no uid",
            )
        return claim if claim.uid == uid else unknown

    def _holder(self, namespace: str, name: str, uid: str) -> str:
        """Return the uid under which the ledger has the claim, if its record has arrived."""
        entries = self._picture.entries_by_uid
        if uid in entries:
            return uid
        for owner, entry in entries.items():
            if (entry.record.claim, entry.record.namespace) == (name, namespace):
                return owner
        return ""

    async def _decided(self, claim: ResourceClaim, *, is_state_read: bool) -> Given | Refuse:
        """Decide, and wait a bounded time while an update may allow the claim.

        ``is_state_read``: this call has read the newest state of the claim's record.
        """
        uid = record_owner(claim)
        deadline_s = self._clock.monotonic_s() + self._settings.prepare_wait_s
        read_at_s = self._clock.monotonic_s()
        is_divided = False
        while True:
            changed = self._picture.changed
            decision = decide(claim, self._facts(claim))
            if isinstance(decision, Given) and not is_state_read and self.states is not None:
                is_state_read = True
                await self.states.read_one(uid, timeout_s=_READ_S)
                continue
            if isinstance(decision, Given) and not is_divided:
                is_divided = True
                if self._parts.owners_of(decision.record):
                    if refusal := await self._parts.ensure(decision.record):
                        return refusal
                    continue
            if not isinstance(decision, Wait):
                return decision
            now_s = self._clock.monotonic_s()
            if now_s >= deadline_s:
                return Refuse(code=decision.code, text=decision.text)
            if now_s >= read_at_s and self.records is not None:
                read_at_s = now_s + _READ_S
                await self.records.read_one(uid, timeout_s=_READ_S)
            await self._picture.wait_change(changed, min(_LOOK_S, deadline_s - now_s))

    def _facts(self, claim: ResourceClaim) -> Facts:
        picture, view, uid = self._picture, self._picture.view, record_owner(claim)
        entry, known = picture.entries_by_uid.get(uid), self._prepared.get(claim.uid)
        if entry is None and known is not None and not picture.ledger_known:
            entry = _proved(known, picture.node)
        pods = picture.pods
        return Facts(
            node=picture.node,
            entry=entry,
            state=picture.states_by_uid.get(uid),
            unreadable=picture.unreadable_of(uid),
            devices=tuple(view.devices_by_uuid.values()),
            faulty=view.faulty,
            sound=view.sound,
            pods=[pod for pod in pods if pods.is_alive(pod.uid)],
            claims=self._claims_of(claim.namespace),
            given=partial(self._given_to_others, uid),
            prepared_id=known.allocation_id if known is not None else "",
        )

    def _claims_of(self, namespace: str) -> set[str]:
        """Return the claims of a namespace with shares on this node, by name."""
        records = (entry.record for entry in self._picture.entries_by_uid.values())
        return {
            record.claim or record.pod
            for record in records
            if is_by_claim(record) and record.namespace == namespace and record.op != "release"
        }

    def _given_to_others(self, uid: str) -> dict[str, Booked]:
        prepared = {one.record_owner: one for one in self._prepared.values()}
        return given_shares(
            self._containers(other, prepared.get(other))
            for other in self._picture.grants.pod_uids()
            if other != uid
        )

    def _containers(self, uid: str, prepared: Prepared | None) -> tuple[ContainerShares, ...]:
        """Return the shares that were given to a pod or claim."""
        entry, pod = self._picture.entries_by_uid.get(uid), self._picture.pods.find(uid)
        shown: tuple[ContainerShares, ...] = ()
        if prepared is not None and not (entry and entry.record.op == "resize"):
            return prepared.containers
        if entry is not None and entry.record.op != "release":
            shown = entry.record.containers
        elif pod is not None and pod.signed is not None:
            shown = pod.signed.placement.containers
        given = {
            name
            for grant in self._picture.grants.of_pod(uid)
            for name in grant.requests or (grant.container,)
        }
        return tuple(one for one in shown if one.name in given)

    def _grants(self, given: Given, installed: Installed | None) -> tuple[Grant, ...] | Refuse:
        record, found = given.record, []
        groups = {group[0]: group for group in given.groups}
        for container in given.containers():
            for vendor in dict.fromkeys(share.vendor for share in container.shares):
                own = own_of(container, vendor)
                devices = [given.devices_by_uuid[share.uuid] for share in own]
                is_limited = self._limiter.is_wanted and needs_library(own, devices)
                if is_limited and installed is None:
                    return Refuse(code=Code.LIMITER_MISSING, text=self._limiter.problem)
                found.append(
                    Grant(
                        pod_uid=record.pod_uid,
                        namespace=record.namespace,
                        pod=record.pod,
                        container=container.name,
                        kind=container.kind,
                        vendor=vendor,
                        resource=f"{names.DRIVER}/{vendor}",
                        allocation_id=record.allocation_id,
                        ids=(),
                        uuids=tuple(share.uuid for share in own),
                        time_s=self._clock.now_s(),
                        library=installed.library.name if installed and is_limited else "",
                        is_claim=not record.claim,
                        claim=record.claim,
                        requests=groups.get(container.name, ()),
                    )
                )
        return tuple(found)

    async def _write(
        self,
        claim: ResourceClaim,
        given: Given,
        grants: tuple[Grant, ...],
        installed: Installed | None,
        known: Prepared | None,
    ) -> Prepared:
        """Write all files of the claim, the book of claims last; ``OSError`` if one cannot be."""
        edits: dict[str, ContainerEdits] = {}
        mounted: list[Callable[[], object]] = []
        for container in given.containers():
            edits |= self._edits(container, given, grants, installed, mounted)
        prepared = known or self._described(claim, given, grants, edits)
        return await self._keep(prepared, mounted)

    async def _keep(
        self, prepared: Prepared, mounted: Iterable[Callable[[], object]] = ()
    ) -> Prepared:
        """Write what containers mount, the CDI file, and last the book of claims.

        The book alone has to survive a failure of the host: kubelet then prepares claims again.
        """
        spec = partial(
            self._checkpoint.write_spec,
            self._spec_file(prepared.uid),
            prepared.spec.encode(),
            is_synced=False,
        )
        book = partial(self._checkpoint.save_claim, prepared)
        writes: list[Callable[[], object]] = [*mounted, spec, book]
        await anyio.to_thread.run_sync(_run_all, writes)
        self._prepared[prepared.uid] = prepared
        self._note()
        self._picture.note_change()
        return prepared

    def _edits(
        self,
        container: ContainerShares,
        given: Given,
        grants: Sequence[Grant],
        installed: Installed | None,
        mounted: list[Callable[[], object]],
    ) -> dict[str, ContainerEdits]:
        """Return what a container gets by each request.

        Requests of one container repeat the mount of its limits file, which the runtime does once.
        ``mounted`` gets the writers of the files that it mounts.
        """
        own_grants = [grant for grant in grants if grant.container == container.name]
        text = limits.encode(
            limits.limits_of(
                container,
                allocation_id=given.record.allocation_id,
                core_policy=self._site.settings.core_policy,
            )
        )
        write = partial(self._checkpoint.write_limits, own_grants[0], text, is_synced=False)
        mounted.append(write)
        directory = str(self._checkpoint.limits_directory(own_grants[0]))
        mount = BindMount(host_path=directory, container_path=limits.DIRECTORY)
        common = ContainerEdits(mounts=(mount,))
        found: dict[str, ContainerEdits] = {}
        for grant in own_grants:
            request = request_of(container.name, grant.vendor, is_of_pod=bool(grant.claim))
            own = self._edits_of(container, given, grant, installed, mounted)
            found[request] = _joined(found.get(request, common), own)
        for name in own_grants[0].requests:  # a container with several gets the same by each
            found[name] = found[container.name]
        return found

    def _edits_of(
        self,
        container: ContainerShares,
        given: Given,
        grant: Grant,
        installed: Installed | None,
        mounted: list[Callable[[], object]],
    ) -> ContainerEdits:
        own = own_of(container, grant.vendor)
        devices: list[Device] = [given.devices_by_uuid[share.uuid] for share in own]
        mounts: tuple[BindMount, ...] = ()
        if grant.library:
            mounts = self._limiter.mounts(
                installed,
                grant.pod_uid,
                grant.container,
                is_recalled=False,
                may_thrash=uses_managed_memory(devices),
            )
        has_region = needs_library(own, devices)
        context = self._renderer.context_of(own, devices, mounts, has_region=has_region)
        context = self._parts.context_of(given.record, grant, own, context)
        edits = self._renderer.edits(grant.vendor, container, devices, context)
        if not has_region:
            return edits
        region = self._regions / grant.pod_uid / grant.container
        mounted.append(partial(_make_region, self._regions, region))
        mount = BindMount(
            host_path=str(region), container_path=limits.REGION_DIRECTORY, read_only=False
        )
        return _joined(edits, ContainerEdits(mounts=(mount,)))

    def _described(
        self,
        claim: ResourceClaim,
        given: Given,
        grants: tuple[Grant, ...],
        edits_by_request: dict[str, ContainerEdits],
    ) -> Prepared:
        uid, record = claim.uid, given.record
        cdi_ids, spec = _cdi_of(uid, edits_by_request)
        return Prepared(
            uid=uid,
            namespace=claim.namespace,
            name=claim.metadata.name,
            owner=owner_pod(claim.metadata),
            allocation_id=record.allocation_id,
            containers=record.containers,
            allocated=given.allocated,
            devices=prepared_devices(claim, cdi_ids),
            grants=grants,
            spec=spec,
        )

    # -- unprepare

    async def unprepare(self, *, uid: str) -> Refuse | None:
        """Remove everything of a claim; a claim that is not known is no error."""
        if not is_label(uid):
            return None
        known = self._prepared.get(uid)
        owner = known.record_owner if known is not None else uid
        try:
            await anyio.to_thread.run_sync(partial(self._remove, uid, owner))
        except OSError as error:
            _log.exception("host not writable")
            return Refuse(
                code=Code.HOST_FAILED,
                text=f"the agent cannot remove files on this node: {error.strerror or error}",
            )
        self._prepared.pop(uid, None)
        self._picture.grants.drop_pod(owner)
        self._note()
        self._picture.note_change()
        if known is not None:
            _log.info("claim unprepared", extra={"claim": f"{known.namespace}/{known.name}"})
        return None

    # -- leftovers

    async def tidy(self, kubelet: PodResources) -> None:
        """Remove what kubelet will never unprepare, because it lost its own state.

        These are claims that no known pod uses, that kubelet does not list, and that the API server
        does not have any more; and usage regions without a claim.
        """
        await anyio.to_thread.run_sync(self._tidy_regions)
        unused = [one for one in self._prepared.values() if not self._is_used(one)]
        if not unused or not self._picture.pods_known:
            return
        try:
            answer = await kubelet.answer(timeout_s=self._site.settings.list_timeout_s)
        except Unavailable as error:
            _log.debug("claims not checked", extra={"problem": str(error)})
            return
        listed = {
            (resource.claim_namespace, resource.claim_name)
            for pod in answer.pod_resources
            for container in pod.containers
            for resource in container.dynamic_resources
        }
        for one in unused:
            if (one.namespace, one.name) in listed:
                continue
            claim = await self._read(one.namespace, one.name, one.uid)
            if isinstance(claim, Refuse) and claim.code == Code.CLAIM_UNKNOWN:
                _log.warning(
                    "claim orphaned, unpreparing it",
                    extra={"claim": f"{one.namespace}/{one.name}", "uid": one.uid},
                )
                await self.unprepare(uid=one.uid)

    def _is_used(self, prepared: Prepared) -> bool:
        """Return whether a pod uses the claim, also a deleted one that is still remembered."""
        return any(
            use.claim == prepared.name
            for pod in self._picture.pods
            if pod.namespace == prepared.namespace
            for uses in pod.claims_by_container.values()
            for use in uses
        )

    def _tidy_regions(self) -> None:
        if self._regions.is_dir():
            for region in self._regions.iterdir():
                if not self._picture.grants.of_pod(region.name):
                    shutil.rmtree(region, ignore_errors=True)

    def _remove(self, uid: str, owner: str) -> None:
        self._checkpoint.remove_spec(self._spec_file(uid))
        shutil.rmtree(self._regions / owner, ignore_errors=True)
        self._checkpoint.remove_claim(uid, owner)

    def _spec_file(self, uid: str) -> Path:
        return self._specs / f"hami-{uid}.json"

    def _note(self) -> None:
        self._picture.allocated_by_uid = {
            one.record_owner: one.allocated or one.containers for one in self._prepared.values()
        }
        self._site.metrics.claims.prepared.set(len(self._prepared))


def _cdi_of(
    uid: str, edits_by_request: dict[str, ContainerEdits]
) -> tuple[dict[str, tuple[str, ...]], str]:
    """Return the CDI ids of each request, and the text of the claim's CDI file."""
    by_name = {names.share_name(uid, name): edits for name, edits in edits_by_request.items()}
    cdi_ids = {
        request: (f"{names.CDI_KIND}={names.share_name(uid, request)}", *edits.cdi_devices)
        for request, edits in edits_by_request.items()
    }
    return cdi_ids, spec_of(names.CDI_KIND, by_name, lambda path: Path(path).exists()).decode()


def _unwritable(error: OSError) -> Refuse:
    _log.error("host not writable", exc_info=error)
    return Refuse(
        code=Code.HOST_FAILED,
        text=f"the agent cannot write on this node: {error.strerror or error}",
    )


def monitor_edits(renderer: Renderer, devices: Iterable[Device]) -> ContainerEdits:
    """Return what shows a container all devices as whole ones."""
    total = ContainerEdits()
    by_vendor: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda one: (one.vendor, one.index, one.uuid)):
        if device.vendor not in names.VENDORS_BY_ANNOTATION:
            by_vendor.setdefault(device.vendor, []).append(device)
    for vendor, own in by_vendor.items():
        shares = tuple(
            Share(
                vendor=vendor,
                uuid=device.uuid,
                memory_mib=device.memory_mib,
                core_pct=device.capacity_core_pct,
                exclusive=True,
            )
            for device in own
        )
        container = ContainerShares(name=names.MONITOR, kind="app", shares=shares)
        context = renderer.context_of(shares, own, (), has_region=False)
        total = _joined(total, renderer.edits(vendor, container, own, context))
    return total


def _proved(known: Prepared, node: str) -> Entry:
    """Return the record by which a claim was prepared, for a node that has not read the ledger."""
    record = AllocationRecord(
        op="reserve",
        allocation_id=known.allocation_id,
        node=node,
        pod_uid=known.record_owner,
        namespace=known.namespace,
        pod=known.grants[0].pod,
        containers=known.containers,
        origin="" if known.owner else CLAIM,
        claim=known.name if known.owner else "",
    )
    return Entry(record=record, sequence=0)


def _joined(a: ContainerEdits, b: ContainerEdits) -> ContainerEdits:
    return ContainerEdits(
        env=a.env | b.env,
        devices=tuple(dict.fromkeys((*a.devices, *b.devices))),
        mounts=tuple(dict.fromkeys((*a.mounts, *b.mounts))),
        cdi_devices=tuple(dict.fromkeys((*a.cdi_devices, *b.cdi_devices))),
    )


def _run_all(writes: Sequence[Callable[[], object]]) -> None:
    for write in writes:
        write()


def _make_region(root: Path, region: Path) -> None:
    """Create the directory of a usage region, in which every user of a container may write."""
    region.mkdir(parents=True, exist_ok=True)
    for part in (root, region.parent):
        part.chmod(0o755)
    region.chmod(0o1777)
