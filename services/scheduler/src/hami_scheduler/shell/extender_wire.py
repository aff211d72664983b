# SPDX-License-Identifier: Apache-2.0
"""JSON documents that kube-scheduler and its HTTP extenders exchange, as narrow Structs.

Obeys k8s.io/kube-scheduler/extender/v1 (v1.34): field names are Go's, because the types carry no
JSON tags; ``null`` and absent mean the same. A pod is decoded as ``PodView``; its other fields are
skipped. Nodes that come as whole objects are kept as raw bytes and only named. Independent of
devices and decisions.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from hami_common.bounds import OBJECT_LIST_MOST, Label, Name, SignedInt64, Uid
from hami_common.errors import WireInvalid
from hami_common.events.codec import UNDECODABLE, problem_of
from hami_common.pods.podview import PodView
from hami_core.placement.nodenames import Lines, NodeNames, joined
from hami_core.table.block import Columns, Ints

T = TypeVar("T")

MAX_PRIORITY = 10
"""``MaxExtenderPriority``: the highest score an extender may give to a node."""


class NodeItems(Struct, frozen=True, kw_only=True):
    """A ``v1.NodeList`` whose nodes stay raw."""

    items: Annotated[list[Raw], Meta(max_length=OBJECT_LIST_MOST)] = []


class ExtenderArgs(Struct, frozen=True, kw_only=True, rename="pascal"):
    """Body of filter and prioritize: a pod, and nodes either by name or as objects."""

    pod: PodView
    nodes: NodeItems | None = None
    node_names: Annotated[list[Name], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class _ArgsWithoutNames(Struct, frozen=True, kw_only=True, rename="pascal"):
    pod: PodView
    node_names: Raw = Raw(b"")


class BindArgs(Struct, frozen=True, kw_only=True, rename="pascal"):
    """Body of bind."""

    pod_name: Name
    pod_namespace: Label
    pod_uid: Uid = msgspec.field(name="PodUID")
    node: Name


class MetaPod(Struct, frozen=True, kw_only=True):
    """A victim by uid."""

    uid: Uid = msgspec.field(name="UID")


class MetaVictims(Struct, frozen=True, kw_only=True, rename="pascal"):
    """Victims on one node."""

    pods: Annotated[list[MetaPod], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    num_violations: SignedInt64 = msgspec.field(name="NumPDBViolations", default=0)


class WholeVictims(Struct, frozen=True, kw_only=True, rename="pascal"):
    """Victims as whole pods, as a caller sends them that assumes we cache no pods."""

    pods: Annotated[list[PodView], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    num_violations: SignedInt64 = msgspec.field(name="NumPDBViolations", default=0)


class PreemptionArgs(Struct, frozen=True, kw_only=True, rename="pascal"):
    """Body of preempt."""

    pod: PodView
    node_name_to_victims: (
        Annotated[dict[Name, WholeVictims], Meta(max_length=OBJECT_LIST_MOST)] | None
    ) = None
    node_name_to_meta_victims: (
        Annotated[dict[Name, MetaVictims], Meta(max_length=OBJECT_LIST_MOST)] | None
    ) = None

    def victims(self) -> dict[str, MetaVictims]:
        """Return the victims by node, by uid."""
        if self.node_name_to_meta_victims is not None:
            return self.node_name_to_meta_victims
        return {
            node: MetaVictims(
                pods=[MetaPod(uid=pod.metadata.uid) for pod in whole.pods or []],
                num_violations=whole.num_violations,
            )
            for node, whole in (self.node_name_to_victims or {}).items()
        }


class _PreemptionReply(Struct, frozen=True, kw_only=True, rename="pascal"):
    node_name_to_meta_victims: dict[str, MetaVictims]


class _NodeMetadata(Struct, frozen=True, kw_only=True):
    name: Name = ""


class _NodeName(Struct, frozen=True, kw_only=True):
    metadata: _NodeMetadata = _NodeMetadata()


class _BindReply(Struct, frozen=True, kw_only=True, rename="pascal"):
    error: str


_args_decoder = msgspec.json.Decoder(ExtenderArgs)
_shortened_decoder = msgspec.json.Decoder(_ArgsWithoutNames)
_SCORES = [b',"Score":%2d},' % number for number in range(MAX_PRIORITY + 1)]
_bind_decoder = msgspec.json.Decoder(BindArgs)
_preemption_decoder = msgspec.json.Decoder(PreemptionArgs)
_name_decoder = msgspec.json.Decoder(_NodeName)
_encoder = msgspec.json.Encoder()
_NAMES_BEGIN = b'"NodeNames":['
_NAMES_STAND_IN = b'"@"'


class Candidates(Struct, frozen=True, kw_only=True):
    """The nodes of one request, in the order in which they came."""

    names: NodeNames
    raw_by_name: Mapping[str, Raw] | None = None
    """Whole node objects, when the caller sent them and so expects them in the reply."""


class ArgsDecoder:
    """Reads filter and prioritize calls, which come in pairs about one pod."""

    def __init__(self) -> None:
        """Start without a cached pod."""
        self._last: tuple[bytes, PodView] | None = None

    def decode(self, body: bytes) -> tuple[PodView, Candidates]:
        """Decode pod and candidate nodes of a filter or prioritize call, else ``WireInvalid``.

        Names are not decoded here: in a large cluster they are nearly the whole body. A pod that
        equals the one of the last call byte for byte is returned as the same object.
        """
        return self._without_names(body) or _decode_whole(body)

    def _without_names(self, body: bytes) -> tuple[PodView, Candidates] | None:
        """Decode a body as Go writes it, with the text of the names cut out.

        ``None`` when the cut text is not certainly the whole value of the document's own NodeNames:
        a placeholder replaces it, and must be found there.
        """
        begin = body.find(_NAMES_BEGIN)
        end = body.find(b"]", begin) + 1
        if begin < 0 or not end:
            return None
        start = begin + len(_NAMES_BEGIN)
        rest = body[: start - 1] + _NAMES_STAND_IN + body[end:]
        candidates = Candidates(names=NodeNames(body[start:end]))
        if self._last is not None and self._last[0] == rest:
            return self._last[1], candidates
        try:
            args = _shortened_decoder.decode(rest)
        except UNDECODABLE:
            return None
        if bytes(args.node_names) != _NAMES_STAND_IN:
            return None
        self._last = (rest, args.pod)
        return args.pod, candidates


def _decode_whole(body: bytes) -> tuple[PodView, Candidates]:
    args = _decode(_args_decoder, body, what="ExtenderArgs")
    if args.node_names is not None:
        return args.pod, Candidates(names=NodeNames.of(args.node_names))
    if args.nodes is None:
        raise WireInvalid(
            what="ExtenderArgs",
            problem="has neither NodeNames nor Nodes, so there is nothing to choose from",
        )
    raw_by_name: dict[str, Raw] = {}
    for item in args.nodes.items:
        name = _decode(_name_decoder, item, what="ExtenderArgs.Nodes.items[]").metadata.name
        if not name:
            raise WireInvalid(what="ExtenderArgs.Nodes.items[]", problem="has no metadata.name")
        raw_by_name[name] = item
    return args.pod, Candidates(names=NodeNames.of(raw_by_name), raw_by_name=raw_by_name)


def decode_bind(body: bytes) -> BindArgs:
    """Decode the arguments of a bind call; ``WireInvalid`` names the error."""
    args = _decode(_bind_decoder, body, what="ExtenderBindingArgs")
    for field, value in (
        ("PodName", args.pod_name),
        ("PodNamespace", args.pod_namespace),
        ("PodUID", args.pod_uid),
        ("Node", args.node),
    ):
        if not value:
            raise WireInvalid(what="ExtenderBindingArgs", problem=f"{field} is empty")
    return args


def encode_filter(
    candidates: Candidates,
    left: NodeNames,
    failed: Iterable[tuple[str, Columns]] = (),
    *,
    unresolvable: Iterable[tuple[str, Columns]] = (),
) -> bytes | bytearray:
    """Encode the reply to filter in the form of the request: names for names, objects for objects.

    ``failed`` are the nodes that do not fit, by text, as places among the candidates;
    ``unresolvable`` are those that no preemption can make fit.
    """
    raw_by_name = candidates.raw_by_name
    if raw_by_name is None:
        before: list[bytes] = [b'{"Nodes":null,"NodeNames":', *left.pieces()]
    else:
        nodes = _encoder.encode(NodeItems(items=[raw_by_name[name] for name in left.strings()]))
        before = [b'{"Nodes":', nodes, b',"NodeNames":null']
    parts: list[bytes | Lines] = [*before, b',"FailedNodes":{', *_texts(candidates, failed)]
    parts += [b'},"FailedAndUnresolvableNodes":{', *_texts(candidates, unresolvable)]
    return joined([*parts, b'},"Error":""}'])


def _texts(candidates: Candidates, groups: Iterable[tuple[str, Columns]]) -> list[Lines]:
    """Encode fields of a JSON object from the nodes at some places to their texts."""
    return [
        candidates.names.wrapped(places, b"", b":%b," % _encoder.encode(text))
        for text, places in groups
        if len(places)
    ]


def encode_filter_error(error: str) -> bytes:
    """Encode the reply to filter when no verdict was possible.

    The pod is retried later by kube-scheduler.
    """
    return (
        b'{"Nodes":null,"NodeNames":null,"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":%b}'
        % _encoder.encode(error)
    )


def encode_priorities(names: NodeNames, priorities: Ints) -> bytes:
    """Encode the reply to prioritize: numbers 0..``MAX_PRIORITY``, without the lowest ones.

    kube-scheduler adds the numbers to its own, so that only differences count, and a node that is
    not named gets 0. Reading 1,000 numbers costs it more than finding them costs us. Where all have
    the same number one is named, so that logs show that there was an answer.
    """
    over = priorities - priorities.min(initial=MAX_PRIORITY)
    places = over.nonzero()[0] if over.any() else names.places()[:1]
    text = names.labelled(places, b'{"Host":', over.take(places), _SCORES)
    return b"".join((b"[", text[:-1], b"]"))


def decode_preemption(body: bytes) -> PreemptionArgs:
    """Decode the arguments of a preempt call; ``WireInvalid`` names the error."""
    return _decode(_preemption_decoder, body, what="ExtenderPreemptionArgs")


def encode_preemption(victims: Mapping[str, MetaVictims]) -> bytes:
    """Encode the reply to preempt: the nodes on which evicting helps, and the victims."""
    return _encoder.encode(_PreemptionReply(node_name_to_meta_victims=dict(victims)))


def encode_bind(error: str = "") -> bytes:
    """Encode the reply to bind; an empty ``error`` means that the pod is bound."""
    return _encoder.encode(_BindReply(error=error))


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | Raw, *, what: str) -> T:
    try:
        return decoder.decode(data)
    except UNDECODABLE as error:
        raise WireInvalid(what=what, problem=problem_of(error)) from error
