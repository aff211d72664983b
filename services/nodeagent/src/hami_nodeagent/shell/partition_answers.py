# SPDX-License-Identifier: Apache-2.0
"""Answers kubelet for containers whose shares are hardware partitions (design D24).

``Allocate`` returns the name of a CDI spec at once; ``PreStartContainer`` waits, with a limit,
until the partitions exist, and writes the spec. Where devices are injected without CDI, or kubelet
does not call ``PreStartContainer``, the response of ``Allocate`` must contain the partitions' own
names: it then waits for the partitions, as for every other update, for at most ``allocate_wait_s``.
A container that was given such names starts only while its partitions still have them.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec.structs import replace

from hami_common.errors import NotFound
from hami_common.kubeletapi import deviceplugin as api
from hami_common.vendors.protocol import BindMount, ContainerEdits
from hami_nodeagent.core.board import ContainerStarted
from hami_nodeagent.core.claims import Claim, Code, Refuse
from hami_nodeagent.core.grants import Grant
from hami_nodeagent.core.partition_specs import KIND, Rendering, cdi_name, spec_name, spec_of
from hami_nodeagent.core.partitions import Owner
from hami_nodeagent.core.reporting import Failure
from hami_nodeagent.shell.partitions import Partitions
from hami_nodeagent.shell.render import Renderer
from hami_nodeagent.shell.site import Site

CHANGED = "partition-changed"
"""Failure code: the name of a partition differs from the one that its container was given."""
_FILE = "hami-"

_log = logging.getLogger(__name__)


class PartitionAnswers:
    """Handles the part of kubelet's calls that concerns partitions."""

    def __init__(self, *, site: Site, renderer: Renderer, partitions: Partitions) -> None:
        self._site = site
        self._picture = site.picture
        self._board = site.picture.partitions
        self._renderer = renderer
        self._partitions = partitions
        self._by_spec = site.settings.injection == "cdi" and site.settings.pre_start
        self._specs = Path(site.settings.partitions.cdi_dir)
        self._renderings = {one.name: one for one in site.checkpoint.load_renderings()}
        for one in self._renderings.values():
            for number, instance_id in one.instances.items():
                owner = Owner(
                    pod_uid=one.pod_uid,
                    allocation_id=one.allocation_id,
                    container=one.container,
                    number=int(number),
                )
                partitions.given[owner] = instance_id

    def owners(self, claim: Claim, vendor: str) -> dict[Owner, str]:
        """Return the claim's shares that need a partition, with their device."""
        return self._board.owners(claim.entry, claim.container, vendor)

    def lacking(self, claims: Sequence[Claim], vendors: Sequence[str]) -> str:
        """Return the reason for which a call cannot be answered yet; empty if it can."""
        if self._by_spec:
            return ""
        for claim, vendor in zip(claims, vendors, strict=True):
            lack = self._board.lacking(self.owners(claim, vendor))
            if lack:
                return (
                    f"the hardware partition for container {claim.container} of pod "
                    f"{claim.pod.title} is not there: {lack}"
                )
        return ""

    async def answer(
        self,
        claim: Claim,
        *,
        vendor: str,
        owners: Mapping[Owner, str],
        limits_directory: Path | None,
        library_mounts: Sequence[BindMount],
    ) -> api.ContainerAllocateResponse:
        """Return the response for one container and vendor.

        ``NotFound`` if one of the partitions was removed in the meantime.
        """
        context = self._renderer.context(claim, library_mounts)
        handles = {} if self._by_spec else self._board.handles(owners, claim.own)
        rendering = Rendering(
            pod_uid=claim.pod.uid,
            container=claim.container,
            vendor=vendor,
            allocation_id=claim.entry.record.allocation_id,
            shares=claim.shares,
            devices=claim.devices,
            context=replace(context, mode="devices") if self._by_spec else context,
            by_spec=self._by_spec,
            handles=handles,
            instances=self._instances(() if self._by_spec else owners),
        )
        if self._by_spec:
            # Edits that do not depend on the partitions: a spec cannot contain annotations.
            early = self._edits(rendering, handles, is_final=False)
            edits = ContainerEdits(
                annotations=early.annotations, cdi_devices=(cdi_name(rendering.name),)
            )
        else:
            edits = self._edits(rendering, handles, is_final=True)
        await self._store(rendering)
        return self._renderer.response(edits, limits_directory=limits_directory)

    async def prepare(self, grants: Collection[Grant]) -> Refuse | None:
        """Wait until the containers' partitions exist, and write their CDI specs.

        Return a refusal if a partition is missing, or if its name differs from the one that the
        container was given.
        """
        concerned = [one for one in self._youngest(grants) if self._partitions.owners_of(one)]
        if not concerned:
            return None
        problem = await self._partitions.ensure(concerned)
        if problem:
            return Refuse(
                code=Code.PARTITION_NOT_READY,
                text=f"the hardware partition for container {concerned[0].container} of pod "
                f"{concerned[0].namespace}/{concerned[0].pod} is not there: {problem}",
            )
        for grant in concerned:
            refusal = await self._prepare_one(grant)
            if refusal is not None:
                return refusal
        return None

    async def tidy(self) -> None:
        """Remove the renderings of pods without grants, and the CDI specs of ended pods."""
        grants, pods = self._picture.grants, self._picture.pods
        for name, one in list(self._renderings.items()):
            if not grants.of_pod(one.pod_uid):
                del self._renderings[name]

        def is_kept(uid: str) -> bool:
            return bool(grants.of_pod(uid))

        await anyio.to_thread.run_sync(self._site.checkpoint.remove_renderings, is_kept)
        if self._by_spec and self._picture.pods_known:
            await anyio.to_thread.run_sync(
                self._remove_specs, lambda uid: is_kept(uid) or pods.is_alive(uid)
            )

    def _remove_specs(self, is_kept: Callable[[str], bool]) -> None:
        for path in self._specs.glob(f"{_FILE}*.*.*.json"):
            if not is_kept(path.name.removeprefix(_FILE).partition(".")[0]):
                path.unlink(missing_ok=True)

    def _youngest(self, grants: Collection[Grant]) -> list[Grant]:
        """Return the grants of the pod that got these ids last, because kubelet reuses ids."""
        newest = max(grants, key=lambda grant: grant.time_s, default=None)
        return [one for one in grants if newest is not None and one.pod_uid == newest.pod_uid]

    async def _prepare_one(self, grant: Grant) -> Refuse | None:
        name = spec_name(grant.pod_uid, grant.container, grant.vendor)
        owners = self._partitions.owners_of(grant)
        rendering = self._renderings.get(name)
        title = f"container {grant.container} of pod {grant.namespace}/{grant.pod}"
        if rendering is None or rendering.allocation_id != grant.allocation_id:
            if self._spec_file(name).exists():
                return None  # the agent lost its state; the existing spec stays valid
            return Refuse(
                code=Code.PARTITION_NOT_READY,
                text=f"what {title} was given is not known any more; delete the pod",
            )
        handles = self._board.handles(owners, rendering.shares.shares)
        if not rendering.by_spec and rendering.handles != handles:
            text = f"the hardware partition of {title} was re-created under another name"
            self._picture.failures_by_uid.setdefault(
                grant.pod_uid, Failure(code=CHANGED, reason=text)
            )
            self._picture.note_change()
            return Refuse(code=Code.PARTITION_CHANGED, text=f"{text}; delete the pod")
        try:
            if rendering.by_spec:
                edits = self._edits(rendering, handles, is_final=True)
                await anyio.to_thread.run_sync(self._write_spec, name, edits)
            await self._store(
                replace(rendering, handles=handles, instances=self._instances(owners))
            )
        except NotFound as error:
            return Refuse(code=Code.PARTITION_NOT_READY, text=f"{title}: {error}")
        except OSError as error:
            _log.exception("host not writable")
            return Refuse(
                code=Code.HOST_FAILED,
                text=f"the agent cannot write on this node: {error.strerror or error}",
            )
        self._board.apply(ContainerStarted(owners=tuple(owners)))
        return None

    def _instances(self, owners: Collection[Owner]) -> dict[str, str]:
        carried = self._board.carried
        return {
            str(owner.number): carried[owner].instance_id for owner in owners if owner in carried
        }

    def _edits(
        self, rendering: Rendering, handles: Mapping[str, Mapping[str, str]], *, is_final: bool
    ) -> ContainerEdits:
        context = replace(
            rendering.context,
            handles={uuid: dict(words) for uuid, words in handles.items()},
            divides=is_final,
        )
        return self._renderer.edits(rendering.vendor, rendering.shares, rendering.devices, context)

    async def _store(self, rendering: Rendering) -> None:
        if self._renderings.get(rendering.name) != rendering:
            self._renderings[rendering.name] = rendering
            await anyio.to_thread.run_sync(self._site.checkpoint.save_rendering, rendering)

    def _write_spec(self, name: str, edits: ContainerEdits) -> None:
        data = spec_of(KIND, {name: edits}, lambda path: Path(path).exists())
        self._site.checkpoint.write_spec(self._spec_file(name), data)

    def _spec_file(self, name: str) -> Path:
        return self._specs / f"{_FILE}{name}.json"
