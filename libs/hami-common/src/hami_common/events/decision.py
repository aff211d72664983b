# SPDX-License-Identifier: Apache-2.0
"""Decision and admission messages: why a pod was placed, refused or changed.

Published on ``hami.v1.event.{decision,admission}.<namespace>.<pod>``.

A decision is compact (designs D14 and D57): refused nodes are grouped into classes with one reason
text each, and a class lists its nodes only up to ``NODES_LISTED``. The ``NODES_DETAILED`` refused
nodes that are closest to taking the pod are recorded device by device, in at most
``DETAIL_BYTES_MOST`` bytes of JSON; for other nodes this is computed again from the snapshot on
request. All decisions of one attempt to place a pod travel in one message: the bind carries the
filter and the prioritize before it. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import (
    BEFORE_MOST,
    CONTAINERS_MOST,
    LIST_MOST,
    OBJECT_LIST_MOST,
    Count,
    DeviceId,
    Duration,
    Fraction,
    Label,
    MemoryMib,
    Name,
    Score,
    Sequence,
    SignedInt32,
    SignedInt64,
    Strength,
    Text,
    Uid,
    UnixS,
    Vendor,
    Word,
)
from hami_common.model.placement import ContainerShares
from hami_common.model.request import PodRequest

NODES_LISTED = 64
NODES_DETAILED = 16
"""Refused nodes that a decision records device by device."""
DEVICES_DETAILED = 32
"""Devices that are recorded of one node."""
HOLDERS_LISTED = 4
"""Holders that are recorded of one device."""
DETAIL_BYTES_MOST = 48 << 10
"""Bytes of JSON for the details of all refused nodes of one decision together."""
NODES_COMPARED = 2
"""Nodes, and devices, of which a decision records the terms of the score: the best and the next."""


class RefusalClass(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Nodes that refused the pod for the same reason."""

    code: Word
    """Stable word from ``hami_core.placement.reasons``."""
    text: Text
    """Requested amount and best free value among these nodes, as kube-scheduler shows it."""
    count: Count
    nodes: Annotated[tuple[Name, ...], Meta(max_length=NODES_LISTED)] = ()
    """At most ``NODES_LISTED`` of them, sorted."""


class NodeScore(Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """A node that fits, with its score 0..100."""

    node: Name
    score: Score


class Amounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capacity of one device. Free amounts are negative on a device over its capacity."""

    memory_mib: SignedInt64 = 0
    core_pct: SignedInt32 = 0
    slots: SignedInt32 = 0


class DeviceHolder(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holder of shares of a device, with the amounts that it holds there."""

    kind: Word = "pod"
    """``pod``, ``claim`` for a ResourceClaim, or the kind of the object for whose pods the shares
    are held: ``workload`` or ``provisioningrequest``. Empty together with namespace and name: the
    holder is of another namespace, whose pods the reader may not read.
    """
    namespace: Label = ""
    name: Name = ""
    memory_mib: Count = 0
    core_pct: Count = 0
    slots: Count = 0
    exclusive: bool = False


class RefusedDevice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device of a node that refused the pod."""

    uuid: DeviceId
    code: Word = ""
    """First constraint that stops it, from ``hami_core.placement.reasons``; empty: it fits."""
    wanted: Amounts
    """Amounts that the pod requests of this device."""
    free: Amounts
    holders: Annotated[tuple[DeviceHolder, ...], Meta(max_length=HOLDERS_LISTED)] = ()
    """Most memory first, then most compute, then by name."""
    holders_left_out: Count = 0
    foreign_mib: MemoryMib = 0
    """Memory that processes outside HAMi use; it is not part of ``free``."""
    burst_mib: MemoryMib = 0
    """Memory that pods use beyond their requests; it is not part of ``free``."""


class RefusedNode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that refused the pod, by its devices for the request that failed there."""

    node: Name
    code: Word
    """Code of the refusal, as in ``RefusalClass``."""
    container: Label = ""
    """Container whose request failed."""
    vendor: Vendor = ""
    count: Count = 0
    """Number of devices that the container requests of the vendor."""
    devices: Annotated[tuple[RefusedDevice, ...], Meta(max_length=DEVICES_DETAILED)] = ()
    """The vendor's devices, those that meet the most constraints first."""
    devices_left_out: Count = 0


class NodeTerms(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Terms of a node's score, as if the pod were placed there."""

    node: Name
    score: Score = 0.0
    slot: Fraction = 0.0
    """Fraction of the node's slots in use; of compute and memory below likewise."""
    core: Fraction = 0.0
    memory: Fraction = 0.0
    topology: Strength = 0.0
    """Levels of the network that the node shares with placed members of the pod's gang."""
    excess: Strength = 0.0
    """Amount by which the shares exceed the request; 0 where shares have any size."""


class DeviceTerms(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Terms that order the devices of the best node, with the pod's share on the device."""

    uuid: DeviceId
    slot: Fraction = 0.0
    """Fraction of the device's slots in use; of compute and memory below likewise."""
    core: Fraction = 0.0
    memory: Fraction = 0.0
    topology: Strength = 0.0
    """With ``topology-aware``: the sum of the strengths of its links to the devices that fit."""


class ScoreDetail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Comparison of the best node and its device with the next ones."""

    node_policy: Word
    """``binpack``: the fullest node first; ``spread``: the emptiest first."""
    device_policy: Text
    """Words that order devices, separated by commas."""
    decided_by: Word = ""
    """Term that puts the best node before the next: ``topology``, ``excess``, ``fill`` (slot, core
    and memory under ``node_policy``) or ``name``; empty if there is only one node.
    """
    nodes: Annotated[tuple[NodeTerms, ...], Meta(max_length=NODES_COMPARED)] = ()
    """The best node, then the next."""
    container: Label = ""
    """Container of ``devices``: the first that requests devices."""
    devices: Annotated[tuple[DeviceTerms, ...], Meta(max_length=NODES_COMPARED)] = ()
    """A device that the container would get on the best node, then the best one it would not get.
    """


class Victim(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pod that was evicted, or selected for eviction, for another one."""

    namespace: Label
    pod: Name
    pod_uid: Uid
    node: Name
    priority: SignedInt32 = 0
    burst_mib: MemoryMib = 0
    """Memory of the node's devices that it used beyond its request."""


class DecisionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision of the scheduler about one pod."""

    verb: Literal["filter", "prioritize", "bind", "preempt", "gang"]
    namespace: Label
    pod: Name
    pod_uid: Uid
    time_s: UnixS
    verdict: Literal["placed", "feasible", "refused", "error"]
    snapshot_id: Word
    """Names the table the decision was made on: ``<ledger sequence>.<inventory revision>``."""
    nodes_considered: Count = 0
    nodes_feasible: Count = 0
    nodes_named: Count = 0
    """For ``filter``: number of these nodes returned to kube-scheduler; 0 if all were returned."""
    feasible: Annotated[tuple[NodeScore, ...], Meta(max_length=NODES_LISTED)] = ()
    """Best nodes first, at most ``NODES_LISTED``."""
    refusals: Annotated[tuple[RefusalClass, ...], Meta(max_length=LIST_MOST)] = ()
    closest: Annotated[tuple[RefusedNode, ...], Meta(max_length=NODES_DETAILED)] = ()
    """For a refused ``filter``: the nodes closest to taking the pod, the closest first."""
    scores: ScoreDetail | None = None
    """For ``prioritize``: reason for the order of the best nodes and devices."""
    request: PodRequest | None = None
    """For ``filter``: the devices that the pod requests, with its policy, as the scheduler read it.
    """
    node: Name = ""
    allocation_id: Uid = ""
    ledger_seq: Sequence = 0
    containers: Annotated[tuple[ContainerShares, ...], Meta(max_length=CONTAINERS_MOST)] = ()
    victims: Annotated[tuple[Victim, ...], Meta(max_length=LIST_MOST)] = ()
    """Pods that ``preempt`` selected for eviction, by uid."""
    error: Text = ""
    duration_ms: Duration = 0.0
    writer: Word = ""
    created_s: UnixS = 0.0
    """For a refused ``filter``: creation time of the pod; 0: not known."""
    attempts: Count = 0
    """For a refused ``filter``: consecutive refusals by this replica, this one included."""
    ended: bool = False
    """The pod was deleted, or ended, before it was placed: nothing waits any more."""
    before: Annotated[tuple["DecisionRecord", ...], Meta(max_length=BEFORE_MOST)] = ()
    """Decisions of the same attempt that led to this one, oldest first: the filter and the
    prioritize before a bind. They have no message of their own."""

    def unfolded(self) -> Iterator["DecisionRecord"]:
        """Return every decision in the message, oldest first, each as a record of its own."""
        yield from self.before
        yield replace(self, before=()) if self.before else self

    def for_namespace(self) -> "DecisionRecord":
        """Return the decision for readers who may read only the pods of the pod's own namespace.

        Holders of other namespaces keep their amounts and lose kind, namespace and name. Itself
        where there are none.
        """
        before = tuple(one.for_namespace() for one in self.before)
        closest = tuple(_for_namespace(node, self.namespace) for node in self.closest)
        if before == self.before and closest == self.closest:
            return self
        return replace(self, before=before, closest=closest)


class Moment(Struct, frozen=True, kw_only=True):
    """All nodes at the time of a recorded filter, computed again from stored events."""

    decision: DecisionRecord
    """The newest filter recorded at or before the requested time."""
    nodes: Annotated[tuple[RefusedNode, ...], Meta(max_length=OBJECT_LIST_MOST)]
    """Refused nodes, the closest first, then those that fit, with an empty ``code``."""
    nodes_feasible: Count
    compared: Count
    """Nodes that the record names with a verdict."""
    differing: Annotated[tuple[Name, ...], Meta(max_length=OBJECT_LIST_MOST)]
    """Compared nodes whose verdict or devices differ: stored events contain neither silent agents,
    faults between two reports nor withheld nodes.
    """
    assumed: Count
    """Nodes and allocations whose state then is not stored: the next known one is used."""

    def for_namespace(self) -> "Moment":
        """Return it for readers of the pod's namespace only, see ``DecisionRecord``."""
        namespace = self.decision.namespace
        return replace(
            self,
            decision=self.decision.for_namespace(),
            nodes=tuple(_for_namespace(node, namespace) for node in self.nodes),
        )


def _for_namespace(node: RefusedNode, namespace: str) -> RefusedNode:
    return replace(
        node,
        devices=tuple(
            replace(
                device,
                holders=tuple(
                    one
                    if one.namespace == namespace
                    else replace(one, kind="", namespace="", name="")
                    for one in device.holders
                ),
            )
            for device in node.devices
        ),
    )


class AdmissionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Outcome of the webhook for a pod that requests resources of HAMi."""

    namespace: Label
    pod: Name
    """Name, or the generateName prefix when the API server has not made the name yet."""
    operation: Word
    request_uid: Uid
    time_s: UnixS
    allowed: bool
    message: Text = ""
    warnings: Annotated[tuple[Text, ...], Meta(max_length=LIST_MOST)] = ()
    patch_operations: Count = 0
    dry_run: bool = False
