# SPDX-License-Identifier: Apache-2.0
"""Answers requests on the bus: current usage of this node, and findings about it.

Only the bus identifies the requester; it allows only this project's services to publish on
``hami.v1.ask``. Usage is the regions' current content, joined with each container's limits file. An
unknown request gets no answer, so the requester times out.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread

from hami_common.bus import subjects
from hami_common.events.asking import (
    CheckAnswer,
    Finding,
    RecallAnswer,
    RecallQuestion,
    ShareNow,
    UsageAnswer,
)
from hami_common.events.codec import decode, encode
from hami_common.pods.limits import DeviceLimit
from hami_common.runtime.natsio import Bus
from hami_common.runtime.natsio.client import Message
from hami_nodeagent.core.usage import ContainerKey, Row
from hami_nodeagent.shell.relimit import limits_path, read_all
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.usage import UsageWatch

MIB_SHIFT = 20

_log = logging.getLogger(__name__)


Handle = Callable[[bytes], Awaitable[bytes]]
"""Returns the answer to a request with this body."""


async def _answer(bus: Bus, question: Message, handle: Handle) -> None:
    await bus.publish(question.reply, await handle(question.data))


class Answers:
    """Request handlers of one agent."""

    def __init__(
        self,
        *,
        site: Site,
        usage: UsageWatch,
        recall: Sequence[Callable[[str], tuple[int, int]]],
        holding: Callable[[str], str],
        check: Callable[[], Awaitable[tuple[Finding, ...]]],
        version: str,
    ) -> None:
        """Create the handlers; ``holding`` returns a vendor's memory enforcement, empty: none.

        ``recall``: for each vendor with recall, see ``Recaller.request``.
        """
        self._recall = recall
        self._site = site
        self._usage = usage
        self._holding = holding
        self._check = check
        self._version = version

    async def serve(self, bus: Bus) -> None:
        """Answer requests until cancelled."""
        handle_by_subject: Mapping[str, Handle] = {
            subjects.ask(self._site.node, "usage"): self.usage,
            subjects.ask(self._site.node, "check"): self.check,
            subjects.ask(self._site.node, "recall"): self.recall,
        }
        async with bus.subscribe(subjects.ask(self._site.node, "*")) as questions:
            async for question in questions:
                handle = handle_by_subject.get(question.subject)
                if handle is None or not question.reply:
                    _log.debug("question not known", extra={"subject": question.subject})
                    continue
                await self._site.quarantine.once(
                    "question", partial(_answer, bus, question, handle)
                )

    async def recall(self, body: bytes) -> bytes:
        """Request that the idle containers of a pod be parked; return how many will be."""
        question = decode(body, RecallQuestion, what="question recall")
        found = [request(question.pod_uid) for request in self._recall]
        return encode(
            RecallAnswer(
                node=self._site.node,
                containers=sum(count for count, _ in found),
                parked=sum(parked for _, parked in found),
            )
        )

    async def usage(self, body: bytes = b"") -> bytes:
        """Return every share of the node with its usage."""
        del body
        rows = await self._usage.rows()
        pods_dir = Path(self._site.settings.pods_dir)
        paths: dict[ContainerKey, Path] = {}
        for row in rows:
            holder = row.holder
            pod = self._site.picture.pods.find(holder.pod_uid)
            if pod is not None:
                agent_file = self._site.checkpoint.limits_file(*holder.owner)
                key = (holder.pod_uid, holder.container)
                paths[key] = (
                    agent_file
                    if holder.claimed is not None
                    else limits_path(pods_dir, agent_file, pod, holder.container)
                )
        files = await anyio.to_thread.run_sync(read_all, list(paths.items()))
        shares: list[ShareNow] = []
        for row in rows:
            holder = row.holder
            self._site.quarantine.call(
                "share",
                f"{holder.pod_uid}/{holder.container}/{holder.uuid}",
                partial(self._add_share, shares, row, files),
                name=(holder.namespace, holder.pod),
            )
        return encode(
            UsageAnswer(node=self._site.node, time_s=self._site.clock.now_s(), shares=tuple(shares))
        )

    def _add_share(
        self,
        shares: list[ShareNow],
        row: Row,
        files: Mapping[ContainerKey, Mapping[str, DeviceLimit]],
    ) -> None:
        shares.append(self._share(row, files))

    def _share(self, row: Row, files: Mapping[ContainerKey, Mapping[str, DeviceLimit]]) -> ShareNow:
        limit = files.get((row.holder.pod_uid, row.holder.container), {}).get(row.holder.uuid)
        uid, container = row.holder.owner
        return ShareNow(
            namespace=row.holder.namespace,
            pod=row.holder.pod,
            pod_uid=row.holder.pod_uid,
            container=row.holder.container,
            vendor=row.holder.vendor,
            uuid=row.holder.uuid,
            memory_mib=row.holder.limit_mib,
            core_pct=row.holder.core_pct,
            used_mib=-(-row.used_bytes >> MIB_SHIFT),
            used_core_pct=row.core_pct,
            is_whole=row.holder.is_whole,
            is_held=self._is_held(row),
            is_over=row.is_over,
            file_mib=None if limit is None else limit.memory_mib,
            file_core_pct=None if limit is None else limit.core_pct,
            owner_uid=uid if uid != row.holder.pod_uid else "",
            owner_container=container if container != row.holder.container else "",
        )

    def _is_held(self, row: Row) -> bool:
        holder = row.holder
        if holder.is_whole:
            return True
        if not holder.needs_grant:
            return bool(self._holding(holder.vendor))
        uid, container = holder.owner
        return any(
            grant.library
            for grant in self._site.picture.grants.of_pod(uid)
            if (grant.container, grant.vendor) == (container, holder.vendor)
        )

    async def check(self, body: bytes = b"") -> bytes:
        """Return the findings about the node."""
        del body
        return encode(
            CheckAnswer(
                node=self._site.node,
                time_s=self._site.clock.now_s(),
                version=self._version,
                findings=await self._check(),
            )
        )
