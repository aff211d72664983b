# SPDX-License-Identifier: Apache-2.0
"""Authenticates tokens and checks permissions at the API server; caches the answers briefly.

TokenReview (authentication.k8s.io/v1) and SubjectAccessReview (authorization.k8s.io/v1). Answers
are cached for ``ttl_s``, refusals for ``refused_ttl_s``, both bounded in number: a changed
permission takes effect within that time. When the API server does not answer, every caller is
rejected (``Unavailable``). Tokens are cached as digests only and are never logged. Times in
seconds.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from hami_common.errors import Denied, Unavailable, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.ports import Clock, KubeApi

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 - a path of the API
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
NODE_NAME = "authentication.kubernetes.io/node-name"
"""Extra of the caller with a token that is bound to a pod: the pod's node (Kubernetes 1.30)."""
_ACCOUNT_PREFIX = "system:serviceaccount:"
_LONGEST_TOKEN = 16_384
_REMEMBERED = 4096

_encoder = msgspec.json.Encoder()


class Caller(Struct, frozen=True, kw_only=True):
    """Owner of a token, in the API server's words."""

    username: str = ""
    """Empty in the review of an invalid token."""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = {}

    @property
    def account(self) -> tuple[str, str] | None:
        """(namespace, name) of a ServiceAccount; ``None`` for any other user."""
        namespace, separator, name = self.username.removeprefix(_ACCOUNT_PREFIX).partition(":")
        is_account = self.username.startswith(_ACCOUNT_PREFIX) and separator
        return (namespace, name) if is_account else None


class Access(Struct, frozen=True, kw_only=True):
    """An operation on the Kubernetes API that needs permission."""

    verb: str
    resource: str
    group: str = ""
    subresource: str = ""
    namespace: str = ""
    """Empty: in all namespaces, or of a resource that has none."""


class _TokenStatus(Struct, frozen=True):
    authenticated: bool = False
    user: Caller | None = None
    audiences: tuple[str, ...] = ()


class _TokenReview(Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessStatus(Struct, frozen=True):
    allowed: bool = False
    denied: bool = False


class _AccessReview(Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


V = TypeVar("V")


class _Memory(Generic[V]):
    """Cached answers; the oldest is evicted for a new one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: OrderedDict[object, tuple[float, V]] = OrderedDict()

    def find(self, key: object) -> tuple[V] | None:
        found = self._known.get(key)
        if found is None or found[0] < self._clock.monotonic_s():
            return None
        return (found[1],)

    def keep(self, key: object, value: V, ttl_s: float) -> V:
        self._known.pop(key, None)
        if len(self._known) >= _REMEMBERED:
            self._known.popitem(last=False)
        self._known[key] = (self._clock.monotonic_s() + ttl_s, value)
        return value


class KubeAuth:
    """Authenticates tokens and authorizes their owners."""

    def __init__(
        self,
        kube: Callable[[], KubeApi | None],
        *,
        clock: Clock,
        audiences: Sequence[str] = (),
        ttl_s: float = 10.0,
        refused_ttl_s: float = 2.0,
    ) -> None:
        """Accept tokens made for one of ``audiences``, empty: those of the API server itself.

        ``kube`` returns the API server once it was reached.
        """
        self._kube = kube
        self._audiences = tuple(audiences)
        self._ttl_s = ttl_s
        self._refused_ttl_s = refused_ttl_s
        self._callers: _Memory[Caller | None] = _Memory(clock)
        self._access: _Memory[bool] = _Memory(clock)
        self._granted: _Memory[frozenset[Access]] = _Memory(clock)

    async def caller(self, token: str) -> Caller | None:
        """Return the owner of the token; ``None`` when the token is invalid or expired."""
        if not token or len(token) > _LONGEST_TOKEN:
            return None
        key = hashlib.sha256(token.encode()).digest()
        if (known := self._callers.find(key)) is not None:
            return known[0]
        spec: dict[str, object] = {"token": token}
        if self._audiences:
            spec["audiences"] = self._audiences
        raw = await self._ask(TOKEN_REVIEWS, "authentication.k8s.io/v1", "TokenReview", spec)
        status = _decode(raw, _TokenReview).status
        # An API server without support for audiences answers without any: then ours was not
        # checked.
        meant = not self._audiences or bool(set(self._audiences) & set(status.audiences))
        user = status.user
        found = user if status.authenticated and meant and user and user.username else None
        return self._callers.keep(key, found, self._ttl_s if found else self._refused_ttl_s)

    async def may(self, caller: Caller, access: Access) -> bool:
        """Return True when the cluster's rules allow the caller this access."""
        key = (caller.username, caller.uid, caller.groups, access)
        if (known := self._access.find(key)) is not None:
            return known[0]
        attributes = {
            "verb": access.verb,
            "group": access.group,
            "resource": access.resource,
            "subresource": access.subresource,
            "namespace": access.namespace,
        }
        spec = {
            "user": caller.username,
            "uid": caller.uid,
            "groups": caller.groups,
            "extra": caller.extra,
            "resourceAttributes": {name: value for name, value in attributes.items() if value},
        }
        raw = await self._ask(
            ACCESS_REVIEWS, "authorization.k8s.io/v1", "SubjectAccessReview", spec
        )
        status = _decode(raw, _AccessReview).status
        allowed = status.allowed and not status.denied
        return self._access.keep(key, allowed, self._ttl_s if allowed else self._refused_ttl_s)

    async def granted(self, caller: Caller, accesses: Collection[Access]) -> frozenset[Access]:
        """Return the accesses that the cluster's rules allow the caller.

        The whole answer is cached for ``ttl_s``, its refusals too, so it may be twice as old: use
        it to list permissions, not to admit a request.
        """
        key = (caller.username, caller.uid, caller.groups, frozenset(accesses))
        if (known := self._granted.find(key)) is not None:
            return known[0]
        found = [access for access in accesses if await self.may(caller, access)]
        return self._granted.keep(key, frozenset(found), self._ttl_s)

    async def _ask(self, path: str, version: str, kind: str, spec: Mapping[str, object]) -> bytes:
        kube = self._kube()
        if kube is None:
            raise Unavailable(peer="API server", detail="not reached yet")
        body = _encoder.encode({"apiVersion": version, "kind": kind, "spec": spec})
        try:
            return await kube.create(path, body)
        except Denied as error:
            # Our own permissions are missing: reject every caller, and report it as our error.
            raise Unavailable(peer="API server", detail=f"{kind} refused to us") from error


T = TypeVar("T")


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNDECODABLE as error:
        raise WireInvalid(what=kind.__name__, problem="answer does not decode") from error
