# SPDX-License-Identifier: Apache-2.0
"""A fenced log in memory, as strict as the bus: one sequence, conditions checked atomically."""

from typing import Generic, TypeVar

from hami_common.bus import subjects
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.ports import Expect

R = TypeVar("R", AllocationRecord, StateRecord)


class FencedLog(Generic[R]):
    """Every accepted record in order. Conditions name a key's subject or a node's fence."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self.entries: list[tuple[int, str, R]] = []
        """(sequence, node, record), in order."""
        self.latest: dict[tuple[str, str], tuple[int, R]] = {}
        self._last_by_subject: dict[str, int] = {}

    def append(self, record: R, expect: Expect) -> int | None:
        """The new sequence; ``None`` when the condition does not hold."""
        if self._last_by_subject.get(expect.subject, 0) != expect.sequence:
            return None
        seq = len(self.entries) + 1
        self.entries.append((seq, record.node, record))
        self.latest[record.node, record.pod_uid] = (seq, record)
        key = subjects.allocation_key(record.node, record.pod_uid)
        self._last_by_subject[subjects.kv_subject(self._bucket, key)] = seq
        self._last_by_subject[subjects.node_fence(record.node)] = seq
        return seq

    def of_node(self, node: str) -> tuple[tuple[int, R], ...]:
        """The newest record of every key of a node."""
        return tuple(entry for (name, _), entry in self.latest.items() if name == node)
