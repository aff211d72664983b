# SPDX-License-Identifier: Apache-2.0
"""Counts the moves of containers' device memory to the host, by the container that waited for it.

A container that stays idle may be moved for any number of others, one after the other. The pairs
are bounded, so that a usage message stays small; a pair that is dropped counts from 0 again, as
after a restart of the agent. Memory in MiB.
"""

from collections.abc import Collection
from typing import Final

from hami_common.events.usage import RecallUse
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.priorities import ContainerKey, key_of

PAIRS_MOST: Final = 256
"""Pairs of moved and waiting containers: at most 256 KiB of a message."""


class RecallUses:
    """Moves since the start of the agent; the newest ``PAIRS_MOST`` pairs are kept."""

    def __init__(self) -> None:
        self._uses: dict[tuple[ContainerKey, ContainerKey | None], RecallUse] = {}
        """By moved and waiting container; the pair that moved last is the last one."""

    def moved(self, moved: Holder, cause: Holder | None, *, moved_mib: int) -> None:
        """Count one move; ``cause``: the container that waited, ``None`` where none did."""
        pair = key_of(moved), None if cause is None else key_of(cause)
        known = self._uses.pop(pair, None)
        self._uses[pair] = RecallUse(
            namespace=moved.namespace,
            pod=moved.pod,
            pod_uid=moved.pod_uid,
            container=moved.container,
            for_namespace=cause.namespace if cause is not None else "",
            for_pod=cause.pod if cause is not None else "",
            for_pod_uid=cause.pod_uid if cause is not None else "",
            for_container=cause.container if cause is not None else "",
            moves=(known.moves if known is not None else 0) + 1,
            moved_mib=(known.moved_mib if known is not None else 0) + moved_mib,
        )
        if len(self._uses) > PAIRS_MOST:
            del self._uses[next(iter(self._uses))]

    def keep(self, keys: Collection[ContainerKey]) -> None:
        """Drop the moves of all containers but these."""
        self._uses = {pair: use for pair, use in self._uses.items() if pair[0] in keys}

    def all(self) -> tuple[RecallUse, ...]:
        """Return all pairs, the one that moved last as the last."""
        return tuple(self._uses.values())
