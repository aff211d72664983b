# SPDX-License-Identifier: Apache-2.0
"""Finds containers that were given the in-container library but did not load it, such as musl's.

Looks at the processes of a new container until one has loaded the library, or for ``MOST_LOOKS``
looks; afterwards the container costs nothing. A container whose processes run without the
library is reported as an Event on the pod and in the metric of shares that are not enforced, its
state record says ``enforcement: none``, and its pod is evicted where breaches are.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import anyio.to_thread

from hami_nodeagent.core.holders import LIMITED_VENDORS, Holder
from hami_nodeagent.core.loaders import REASON_BY_LOADER, Judgment, Loader, loader_of
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.core.usage import ContainerKey
from hami_nodeagent.shell.owners import find_owners
from hami_nodeagent.shell.site import Site

MOST_LOOKS = 20
"""A container that starts no dynamic program within as many looks is not looked at again."""


class LoaderWatch:
    """Judges the containers of one agent."""

    def __init__(self, *, site: Site, report: Callable[[PodFacts, str], Awaitable[None]]) -> None:
        """``report`` takes a pod and the reason why it is not limited."""
        self._site = site
        self._report = report
        self._proc = Path(site.settings.host_proc)
        self._judgments: dict[str, Judgment] = {}
        """By the runtime's container id: a restarted container is judged again."""

    async def look(self, holders: Sequence[Holder]) -> None:
        """Take one look at the containers that are not judged yet."""
        containers = self._unjudged(holders)
        if not containers:
            return
        loaders = await anyio.to_thread.run_sync(self._read, containers)
        for container_id, key in containers.items():
            judgment = self._judgments.setdefault(container_id, Judgment())
            verdict = judgment.look(loaders.get(key, {}))
            if verdict is not None and verdict in REASON_BY_LOADER:
                await self._note(key, REASON_BY_LOADER[verdict], holders)

    def _unjudged(self, holders: Sequence[Holder]) -> dict[str, ContainerKey]:
        """Return the running containers to look at, by id, and forget those that are gone."""
        picture = self._site.picture
        granted = {(grant.pod_uid, grant.container) for grant in picture.grants if grant.library}
        given = {
            (holder.pod_uid, holder.container)
            for holder in holders
            if holder.vendor in LIMITED_VENDORS and holder.needs_grant and not holder.is_whole
            if holder.owner in granted
        }
        running = {
            container_id: (pod.uid, container)
            for pod in picture.pods
            for container_id, container in pod.container_by_id.items()
            if (pod.uid, container) in given
        }
        for gone in self._judgments.keys() - running.keys():
            del self._judgments[gone]
        for uid in picture.unlimited_by_uid.keys() - {uid for uid, _ in given}:
            del picture.unlimited_by_uid[uid]
        return {
            container_id: key
            for container_id, key in running.items()
            if (known := self._judgments.get(container_id)) is None
            or (known.verdict is None and known.looks < MOST_LOOKS)
        }

    def _read(
        self, containers: Mapping[str, ContainerKey]
    ) -> dict[ContainerKey, dict[int, Loader]]:
        """Return the loaders of the processes of some containers, by pid."""
        pids = [int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit()]
        by = self._site.settings.usage.owners
        found: dict[ContainerKey, dict[int, Loader]] = {}
        for pid, owner in find_owners(self._proc, pids, containers, by=by).items():
            key = (owner.pod_uid, owner.container)
            if key in containers.values():
                try:
                    maps = (self._proc / str(pid) / "maps").read_text(errors="replace")
                except OSError:
                    continue  # it has ended
                if maps:  # empty for a process that is ending
                    found.setdefault(key, {})[pid] = loader_of(maps)
        return found

    async def _note(self, key: ContainerKey, reason: str, holders: Sequence[Holder]) -> None:
        uid, container = key
        pod = self._site.picture.pods.find(uid)
        if pod is None:
            return
        problem = f"container {container}: {reason}"
        for vendor in {one.vendor for one in holders if (one.pod_uid, one.container) == key}:
            self._site.metrics.unheld.labels(vendor=vendor).inc()
        self._site.picture.unlimited_by_uid[uid] = problem
        self._site.picture.note_change()
        await self._report(pod, problem)
