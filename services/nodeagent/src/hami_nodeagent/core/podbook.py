# SPDX-License-Identifier: Apache-2.0
"""Stores this node's pods, by name and uid, from the API server's watch and from direct reads.

A direct read may overtake the watch, so updates are ordered by ``revision`` (the number in
``resourceVersion``; 0 when it has none, which then always counts as newer). A deleted pod never
returns: only one pod of a name exists at a time, so another uid under the name shows that the first
pod is gone. Deleted pods are kept for a while, because kubelet may list them longer than the API
server does. Times are seconds of the caller's clock.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hami_nodeagent.core.podfacts import PodFacts

Name = tuple[str, str]


class _Known(Struct, kw_only=True):
    facts: PodFacts
    revision: int
    gone_since_s: float | None = None


class PodBook:
    """Pods of one node. ``by_name`` is kept up to date in place."""

    def __init__(self) -> None:
        self.by_name: dict[Name, tuple[PodFacts, ...]] = {}
        """Pods by (namespace, name), the live pod last."""
        self._known: dict[str, _Known] = {}

    def __iter__(self) -> Iterator[PodFacts]:
        return iter([known.facts for known in self._known.values()])

    def __len__(self) -> int:
        return len(self._known)

    def find(self, uid: str) -> PodFacts | None:
        """Return the facts of a pod, including deleted pods that were not dropped yet."""
        known = self._known.get(uid)
        return known.facts if known is not None else None

    def is_alive(self, uid: str) -> bool:
        """Return whether containers of the pod may run: it exists and has not finished."""
        known = self._known.get(uid)
        return known is not None and not known.facts.gone and not known.facts.finished

    def put(self, facts: PodFacts, *, revision: int, now_s: float) -> bool:
        """Store a pod; return whether anything changed."""
        known = self._known.get(facts.uid)
        if known is not None and known.facts.gone:
            return self._recall(known, facts)
        if known is not None and (0 < revision < known.revision or known.facts == facts):
            known.revision = max(known.revision, revision)
            return False
        for other in self.by_name.get((facts.namespace, facts.name), ()):
            if other.uid == facts.uid or other.gone:
                continue
            if 0 < revision < self._known[other.uid].revision:
                return False  # stale update of a predecessor that was never seen alive
            self._end(other.uid, now_s)
        if known is not None:
            revision = max(known.revision, revision)
        self._known[facts.uid] = _Known(facts=facts, revision=revision)
        self._index(facts)
        return True

    def end(self, uid: str, *, now_s: float) -> bool:
        """Mark the pod as deleted; return whether that is a change."""
        known = self._known.get(uid)
        if known is None or known.facts.gone:
            return False
        self._end(uid, now_s)
        return True

    def end_name(self, namespace: str, name: str, *, now_s: float) -> bool:
        """Mark all pods of this name as deleted; return whether that is a change."""
        live = [pod for pod in self.by_name.get((namespace, name), ()) if not pod.gone]
        for pod in live:
            self._end(pod.uid, now_s)
        return bool(live)

    def put_all(self, pods: Sequence[tuple[PodFacts, int]], *, revision: int, now_s: float) -> None:
        """Store the full list as of ``revision``; older pods that it lacks are deleted."""
        for facts, own_revision in pods:
            self.put(facts, revision=own_revision, now_s=now_s)
        named = {facts.uid for facts, _ in pods}
        for uid, known in list(self._known.items()):
            if uid not in named and not known.facts.gone and known.revision <= revision:
                self._end(uid, now_s)

    def forget(self, *, gone_before_s: float) -> None:
        """Drop pods that were deleted before this time."""
        for uid, known in list(self._known.items()):
            if known.gone_since_s is not None and known.gone_since_s < gone_before_s:
                del self._known[uid]
                self._index(known.facts, remove=True)

    def note_over(self, uid: str) -> None:
        """Note that kubelet has ended a deleted pod: a later one of its name is another."""
        known = self._known.get(uid)
        if known is not None and known.facts.gone:
            self._recall(known, replace(known.facts, finished=True))

    def _recall(self, known: _Known, facts: PodFacts) -> bool:
        """Apply a late update of a deleted pod: whether it had finished still matters."""
        if known.facts.finished or not facts.finished:
            return False
        known.facts = replace(known.facts, finished=True)
        self._index(known.facts)
        return True

    def _end(self, uid: str, now_s: float) -> None:
        known = self._known[uid]
        known.facts = replace(known.facts, gone=True)
        known.gone_since_s = now_s
        self._index(known.facts)

    def _index(self, facts: PodFacts, *, remove: bool = False) -> None:
        name = (facts.namespace, facts.name)
        others = [pod for pod in self.by_name.get(name, ()) if pod.uid != facts.uid]
        pods = others if remove else [*others, facts]
        if pods:
            self.by_name[name] = tuple(sorted(pods, key=lambda pod: not pod.gone))
        else:
            del self.by_name[name]
