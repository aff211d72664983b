# SPDX-License-Identifier: Apache-2.0
"""JSON documents that kube-scheduler and its HTTP extenders exchange, as narrow Structs.

Obeys k8s.io/kube-scheduler/extender/v1 (v1.34): field names are Go's, because the types carry no
JSON tags; ``null`` and absent mean the same. A pod is decoded as ``PodView``, the rest of it is
skipped without being built. Nodes that come as whole objects are kept as raw bytes and only named.
Knows nothing of devices or decisions.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from hami_common.errors import WireInvalid
from hami_common.podview import PodView

T = TypeVar("T")

MAX_PRIORITY = 10
"""``MaxExtenderPriority``: the highest score an extender may give to a node."""


class NodeItems(Struct, frozen=True, kw_only=True):
    """A ``v1.NodeList`` whose nodes stay raw."""

    items: list[Raw] = []


class ExtenderArgs(Struct, frozen=True, kw_only=True, rename="pascal"):
    """Body of filter and prioritize: a pod, and nodes either by name or as objects."""

    pod: PodView
    nodes: NodeItems | None = None
    node_names: list[str] | None = None


class BindArgs(Struct, frozen=True, kw_only=True, rename="pascal"):
    """Body of bind."""

    pod_name: str
    pod_namespace: str
    pod_uid: str = msgspec.field(name="PodUID")
    node: str


class _NodeMetadata(Struct, frozen=True, kw_only=True):
    name: str = ""


class _NodeName(Struct, frozen=True, kw_only=True):
    metadata: _NodeMetadata = _NodeMetadata()


class _FilterReply(Struct, frozen=True, kw_only=True, rename="pascal"):
    nodes: NodeItems | None
    node_names: Sequence[str] | None
    failed_nodes: Mapping[str, str]
    failed_and_unresolvable_nodes: Mapping[str, str]
    error: str


class _HostPriority(Struct, frozen=True, kw_only=True, rename="pascal"):
    host: str
    score: int


class _BindReply(Struct, frozen=True, kw_only=True, rename="pascal"):
    error: str


_args_decoder = msgspec.json.Decoder(ExtenderArgs)
_bind_decoder = msgspec.json.Decoder(BindArgs)
_name_decoder = msgspec.json.Decoder(_NodeName)
_encoder = msgspec.json.Encoder()


class Candidates(Struct, frozen=True, kw_only=True):
    """The nodes of one request, in the order in which they came."""

    names: Sequence[str]
    raw_by_name: Mapping[str, Raw] | None = None
    """Whole node objects, when the caller sent such and so expects them back."""


def decode_args(body: bytes) -> tuple[PodView, Candidates]:
    """Pod and candidate nodes of a filter or prioritize call, else ``WireInvalid``."""
    args = _decode(_args_decoder, body, what="ExtenderArgs")
    if args.node_names is not None:
        return args.pod, Candidates(names=args.node_names)
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
    return args.pod, Candidates(names=list(raw_by_name), raw_by_name=raw_by_name)


def decode_bind(body: bytes) -> BindArgs:
    """Arguments of a bind call; ``WireInvalid`` names what is wrong."""
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
    feasible: Sequence[str],
    failed: Mapping[str, str],
    *,
    unresolvable: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Reply to filter, in the form the request had: names for names, objects for objects.

    ``unresolvable`` are nodes that no preemption can make fit.
    """
    raw_by_name = candidates.raw_by_name
    return _encoder.encode(
        _FilterReply(
            nodes=None
            if raw_by_name is None
            else NodeItems(items=[raw_by_name[name] for name in feasible]),
            node_names=feasible if raw_by_name is None else None,
            failed_nodes=failed,
            failed_and_unresolvable_nodes=dict(unresolvable),
            error="",
        )
    )


def encode_filter_error(error: str) -> bytes:
    """Reply to filter when no verdict was possible; kube-scheduler tries the pod again later."""
    return _encoder.encode(
        _FilterReply(
            nodes=None,
            node_names=None,
            failed_nodes={},
            failed_and_unresolvable_nodes={},
            error=error,
        )
    )


def encode_priorities(scores: Iterable[tuple[str, int]]) -> bytes:
    """Reply to prioritize: (node, 0..``MAX_PRIORITY``)."""
    return _encoder.encode([_HostPriority(host=node, score=score) for node, score in scores])


def encode_bind(error: str = "") -> bytes:
    """Reply to bind; an empty ``error`` says that the pod is bound."""
    return _encoder.encode(_BindReply(error=error))


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | Raw, *, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireInvalid(what=what, problem=str(error)) from error
