# SPDX-License-Identifier: Apache-2.0
"""JSON documents of Volcano's plugin ``extender``, as narrow Structs.

Obeys ``pkg/scheduler/plugins/extender`` of Volcano 1.14.1. The outer fields have JSON tags; tasks,
nodes and jobs have none, so their fields have Go's names. A predicate call carries the node with
all its pods, of which only the name is decoded. The task's pod stays raw until its fields are
needed. Independent of devices and decisions.
"""

from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from hami_common.bounds import OBJECT_LIST_MOST, Count, Label, Name, SignedInt64, Uid
from hami_common.errors import WireInvalid
from hami_common.events.codec import UNDECODABLE, problem_of
from hami_common.pods.podview import MetadataView, PodView

T = TypeVar("T")

PENDING: Final = 1
ALLOCATED: Final = 2
"""Values of a task's status, of which this module needs two (``pkg/scheduler/api/types.go``)."""
FITS: Final = 0
ERROR: Final = 1
UNSCHEDULABLE: Final = 2
UNRESOLVABLE: Final = 3
"""Codes of a predicate's answer; preemption is tried for ``UNSCHEDULABLE`` alone."""
PERMIT: Final = 1
ABSTAIN: Final = 0
REJECT: Final = -1
"""Votes on whether a job may leave the state Pending."""


class _PodHead(Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()


class Task(Struct, frozen=True, kw_only=True, rename="pascal"):
    """A pod as Volcano sees it."""

    name: Name
    namespace: Label
    node_name: Name = ""
    """Node that the session chose."""
    status: SignedInt64 = 0
    pod: Raw = Raw(b"{}")

    def metadata(self) -> MetadataView:
        """Decode the pod's metadata; ``WireInvalid`` unless it has the task's name and a uid."""
        metadata = _decode(_head_decoder, self.pod, what="task.Pod").metadata
        if not metadata.uid:
            raise WireInvalid(what="task.Pod.metadata.uid", problem="is empty")
        if (metadata.namespace, metadata.name) != (self.namespace, self.name):
            raise WireInvalid(what="task.Pod.metadata", problem="has another name than the task")
        return metadata

    def pod_view(self) -> PodView:
        """Decode the pod, without the node: Volcano writes the one that its session chose."""
        pod = _decode(_pod_decoder, self.pod, what="task.Pod")
        return replace(pod, spec=replace(pod.spec, node_name=""))


class _Node(Struct, frozen=True, kw_only=True, rename="pascal"):
    name: Name


class Job(Struct, frozen=True, kw_only=True, rename="pascal"):
    """A PodGroup with its pods."""

    name: Name
    namespace: Label
    min_available: Count = 0
    tasks: Annotated[dict[Uid, Task], Meta(max_length=OBJECT_LIST_MOST)] | None = None

    @property
    def key(self) -> str:
        """Name in logs."""
        return f"{self.namespace}/{self.name}"


class PredicateArgs(Struct, frozen=True, kw_only=True):
    """Body of predicate."""

    task: Task
    node: _Node


class PrioritizeArgs(Struct, frozen=True, kw_only=True):
    """Body of prioritize."""

    task: Task
    nodes: Annotated[list[_Node], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class _JobArgs(Struct, frozen=True, kw_only=True):
    job: Job


class _EventArgs(Struct, frozen=True, kw_only=True):
    task: Task


class _PredicateReply(Struct, frozen=True, kw_only=True):
    status: str
    code: int


class _PrioritizeReply(Struct, frozen=True, kw_only=True, rename="camel"):
    node_score: Mapping[str, float]
    error_message: str = ""


class _JobReply(Struct, frozen=True, kw_only=True):
    status: int


class _EventReply(Struct, frozen=True, kw_only=True, rename="camel"):
    error_message: str


_head_decoder = msgspec.json.Decoder(_PodHead)
_pod_decoder = msgspec.json.Decoder(PodView)
_predicate_decoder = msgspec.json.Decoder(PredicateArgs)
_prioritize_decoder = msgspec.json.Decoder(PrioritizeArgs)
_job_decoder = msgspec.json.Decoder(_JobArgs)
_event_decoder = msgspec.json.Decoder(_EventArgs)
_encoder = msgspec.json.Encoder()


def decode_predicate(body: bytes) -> PredicateArgs:
    """Decode the arguments of predicate; ``WireInvalid`` names the error, as in all of these."""
    return _decode(_predicate_decoder, body, what="PredicateRequest")


def decode_prioritize(body: bytes) -> PrioritizeArgs:
    """Decode the arguments of prioritize."""
    return _decode(_prioritize_decoder, body, what="PrioritizeRequest")


def decode_job(body: bytes) -> Job:
    """Decode the argument of jobEnqueueable."""
    return _decode(_job_decoder, body, what="JobEnqueueableRequest").job


def decode_event(body: bytes) -> Task:
    """Decode the argument of allocate and deallocate."""
    return _decode(_event_decoder, body, what="EventHandlerRequest").task


def encode_predicate(text: str = "", code: int = FITS) -> bytes:
    """Encode the reply to predicate; without text the node fits, whatever the code."""
    return _encoder.encode(_PredicateReply(status=text, code=code))


def encode_scores(score_by_node: Mapping[str, float]) -> bytes:
    """Encode the reply to prioritize; Volcano takes a missing map as an error."""
    return _encoder.encode(_PrioritizeReply(node_score=score_by_node))


def encode_vote(vote: int) -> bytes:
    """Encode the reply to jobEnqueueable."""
    return _encoder.encode(_JobReply(status=vote))


def encode_event(error: str = "") -> bytes:
    """Encode the reply to allocate and deallocate; with a text Volcano rolls the task back."""
    return _encoder.encode(_EventReply(error_message=error))


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | Raw, *, what: str) -> T:
    try:
        return decoder.decode(data)
    except UNDECODABLE as error:
        raise WireInvalid(what=what, problem=problem_of(error)) from error
