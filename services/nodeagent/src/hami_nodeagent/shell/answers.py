# SPDX-License-Identifier: Apache-2.0
"""Answers requests on the bus: current usage of this node, and findings about it.

Only the bus identifies the requester; it allows only this project's services to publish on
``hami.v1.ask``. Usage is the regions' current content, joined with each container's limits file. An
unknown request gets no answer, so the requester times out.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import anyio.to_thread

from hami_common.bus import subjects
from hami_common.events.asking import CheckAnswer, Finding, ShareNow, UsageAnswer
from hami_common.events.codec import encode
from hami_common.pods.limits import DeviceLimit
from hami_common.runtime.natsio import Bus
from hami_nodeagent.core.usage import ContainerKey, Row
from hami_nodeagent.shell.relimit import limits_path, read_all
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.usage import UsageWatch

MIB_SHIFT = 20

_log = logging.getLogger(__name__)


async def _answer(bus: Bus, reply: str, answer: Callable[[], Awaitable[bytes]]) -> None:
    await bus.publish(reply, await answer())


class Answers:
    """Request handlers of one agent."""

    def __init__(
        self,
        *,
        site: Site,
        usage: UsageWatch,
        holding: Callable[[str], str],
        check: Callable[[], Awaitable[tuple[Finding, ...]]],
        version: str,
    ) -> None:
        """Create the handlers; ``holding`` returns a vendor's memory enforcement, empty: none."""
        self._site = site
        self._usage = usage
        self._holding = holding
        self._check = check
        self._version = version

    async def serve(self, bus: Bus) -> None:
        """Answer requests until cancelled."""
        answer_by_subject: Mapping[str, Callable[[], Awaitable[bytes]]] = {
            subjects.ask(self._site.node, "usage"): self.usage,
            subjects.ask(self._site.node, "check"): self.check,
        }
        async with bus.subscribe(subjects.ask(self._site.node, "*")) as questions:
            async for question in questions:
                answer = answer_by_subject.get(question.subject)
                if answer is None or not question.reply:
                    _log.debug("question not known", extra={"subject": question.subject})
                    continue
                await self._site.quarantine.once(
                    "question", partial(_answer, bus, question.reply, answer)
                )

    async def usage(self) -> bytes:
        """Return every share of the node with its usage."""
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

    async def check(self) -> bytes:
        """Return the findings about the node."""
        return encode(
            CheckAnswer(
                node=self._site.node,
                time_s=self._site.clock.now_s(),
                version=self._version,
                findings=await self._check(),
            )
        )
