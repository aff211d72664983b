# SPDX-License-Identifier: Apache-2.0
"""Permissions that HTTP routes require, and the shipped roles of people that grant them.

``ROUTES`` is the one table of the registry's and the scheduler's routes: their gate reads it
(``runtime.gate``), tools/gen_deploy.py writes the ClusterRoles from ``ROLES``, and
tools/gen_roles.py writes the tables of docs/roles.md. Resources of the group ``hami.io`` are
virtual: no API serves them, the API server only answers whether RBAC grants them. Changes that
kubectl can make as well require its permission: ``patch pods/resize`` and ``patch nodes``.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

GROUP: Final = "hami.io"

Route = tuple[str, str]
"""Method and path, with ``{name}`` for the parts that vary."""


class Right(Struct, frozen=True, kw_only=True, order=True):
    """One verb on one resource."""

    verb: str
    resource: str
    group: str = GROUP
    subresource: str = ""
    is_clusterwide: bool = False
    """Required in all namespaces, also for a request about one of them."""

    @property
    def text(self) -> str:
        """Words of refusals and documentation: ``get allocations.hami.io``."""
        path = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} {path}.{self.group}" if self.group else f"{self.verb} {path}"


ALLOCATIONS: Final = Right(verb="get", resource="allocations")
"""Pods with devices or waiting for them: shares, use, decisions and events of a namespace."""
ALL_ALLOCATIONS: Final = Right(verb="get", resource="allocations", is_clusterwide=True)
"""The same right in all namespaces, of routes whose answers cannot be limited to one."""
DEVICES: Final = Right(verb="get", resource="devices", is_clusterwide=True)
"""Nodes and devices with booked and free amounts, without the pods that hold them."""
QUEUES: Final = Right(verb="get", resource="queues")
"""Queues and quotas with their use."""
SIMULATIONS: Final = Right(verb="create", resource="simulations", is_clusterwide=True)
"""Simulations of the whole cluster, whose answers name pods of all namespaces."""
SYSTEM: Final = Right(verb="get", resource="system", is_clusterwide=True)
"""State of HAMi's own services and agents."""
RESIZE: Final = Right(verb="patch", resource="pods", group="", subresource="resize")
EVICT: Final = Right(
    verb="create", resource="pods", group="", subresource="eviction", is_clusterwide=True
)
CORDON: Final = Right(verb="patch", resource="nodes", group="", is_clusterwide=True)

EVERYTHING: Final = (ALL_ALLOCATIONS, DEVICES)
"""Rights, in all namespaces, of callers who see the names of all pods."""


class Rule(Struct, frozen=True, kw_only=True):
    """Rights that a route requires: in the namespace that the request names, else in all."""

    rights: tuple[Right, ...]
    if_clusterwide: tuple[Right, ...] = ()
    """Required in addition when the request names no namespace."""
    is_namespace_in_body: bool = False
    if_changing: tuple[Right, ...] = ()
    """Required in addition when a flag of ``changes`` in the body is not false."""
    changes: tuple[str, ...] = ()
    """Boolean fields of the body; without them the request only reads."""


_CALLERS = Rule(rights=())
"""Every caller with a valid token."""
_DEVICES = Rule(rights=(DEVICES,))
_ALLOCATIONS = Rule(rights=(ALLOCATIONS,))
_ALL_NAMESPACES = Rule(rights=(ALLOCATIONS,), if_clusterwide=(DEVICES,))
_FLEET = Rule(rights=(DEVICES, ALLOCATIONS))
_EVERYTHING = Rule(rights=EVERYTHING)
_QUEUES = Rule(rights=(QUEUES,))
_SIMULATIONS = Rule(rights=(SIMULATIONS,))
_SYSTEM = Rule(rights=(SYSTEM,))

ROUTES: Final[Mapping[Route, Rule]] = {
    ("GET", "/v1/nodes"): _DEVICES,
    ("GET", "/v1/nodes/{node}"): _EVERYTHING,
    ("GET", "/v1/devices"): _DEVICES,
    ("GET", "/v1/config"): _DEVICES,
    ("GET", "/v1/skus"): _CALLERS,
    ("GET", "/v1/fleet"): _FLEET,
    ("GET", "/v1/fleet/events"): _FLEET,
    ("GET", "/v1/capacity"): _FLEET,
    ("GET", "/v1/timeline"): _FLEET,
    ("GET", "/v1/usage"): _EVERYTHING,
    ("GET", "/v1/regions"): _DEVICES,
    ("GET", "/v1/regions/nodes"): _DEVICES,
    ("GET", "/v1/regions/allocations"): _EVERYTHING,
    ("GET", "/v1/regions/capacity"): _EVERYTHING,
    ("GET", "/v1/regions/events"): _EVERYTHING,
    ("GET", "/v1/allocations"): _ALLOCATIONS,
    ("GET", "/v1/allocations/{namespace}/{pod}"): _ALLOCATIONS,
    ("GET", "/v1/explain/{namespace}/{pod}"): _ALLOCATIONS,
    ("GET", "/v1/waiting"): _ALLOCATIONS,
    ("GET", "/v1/workloads/{namespace}/{pod}"): _ALLOCATIONS,
    ("GET", "/v1/whatif/pods/{namespace}/{pod}"): _ALLOCATIONS,
    ("GET", "/v1/whatif/moments/{namespace}/{pod}"): _ALLOCATIONS,
    ("GET", "/v1/quarantine"): _ALL_NAMESPACES,
    ("GET", "/v1/watch"): _ALL_NAMESPACES,
    ("GET", "/v1/events"): _ALL_NAMESPACES,
    ("GET", "/v1/pressure"): _ALL_NAMESPACES,
    ("GET", "/v1/consumption"): _ALL_NAMESPACES,
    ("GET", "/v1/idle"): _ALL_NAMESPACES,
    ("GET", "/v1/queues"): _QUEUES,
    ("GET", "/v1/quotas"): _QUEUES,
    ("GET", "/v1/system"): _SYSTEM,
    ("GET", "/v1/policies"): _SYSTEM,
    ("GET", "/v1/checks"): _SYSTEM,
    ("GET", "/v1/snapshot"): _SIMULATIONS,
    ("POST", "/v1/whatif/simulate"): _SIMULATIONS,
    ("POST", "/v1/whatif/scale"): _SIMULATIONS,
    ("POST", "/v1/whatif/drain"): _SIMULATIONS,
    ("POST", "/v1/whatif/policy"): _SIMULATIONS,
    ("POST", "/v1/resize"): Rule(rights=(RESIZE,), is_namespace_in_body=True),
    ("POST", "/v1/defrag"): Rule(
        rights=EVERYTHING, if_changing=(EVICT,), changes=("execute", "stop")
    ),
    ("POST", "/v1/cordon"): Rule(rights=(CORDON,)),
}
"""Every guarded route of the registry and the scheduler; tests compare it with their OpenAPI
documents. Routes without data of the cluster need no permission (``OPEN``).
"""

UNLISTED: Final = Rule(rights=(*EVERYTHING, SIMULATIONS, SYSTEM))
"""Rule of a route that the table lacks."""

OPEN: Final[frozenset[Route]] = frozenset({("GET", "/v1/session")})
"""Described routes that need no permission."""


class Grant(Struct, frozen=True, kw_only=True):
    """A rule of a role, in RBAC's words."""

    groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


class Role(Struct, frozen=True, kw_only=True):
    """A ClusterRole for people, and its place in the documentation."""

    name: str
    text: str
    grants: tuple[Grant, ...]
    aggregates_to: str = ""
    """Kubernetes' own ClusterRole that contains this one: ``view`` or ``edit``."""


def _get(*rights: Right) -> Grant:
    (group,) = {right.group for right in rights}
    (verb,) = {right.verb for right in rights}
    resources = tuple(sorted(_path(right) for right in rights))
    return Grant(groups=(group,), resources=resources, verbs=(verb,))


def _path(right: Right) -> str:
    return f"{right.resource}/{right.subresource}" if right.subresource else right.resource


_READ = ("get", "list", "watch")
_WRITE = ("create", "delete", "get", "list", "patch", "update", "watch")
_VIEW = (_get(ALLOCATIONS, DEVICES, QUEUES),)
_PLAN = (_get(SIMULATIONS),)
_DEVELOP = (
    Grant(groups=("",), resources=("pods",), verbs=_WRITE),
    Grant(groups=("",), resources=("pods/log",), verbs=("get",)),
    _get(RESIZE),
    Grant(groups=("",), resources=("events", "resourcequotas"), verbs=_READ),
    Grant(groups=("batch",), resources=("jobs",), verbs=_WRITE),
)
_GOVERN = (Grant(groups=("",), resources=("resourcequotas",), verbs=_WRITE),)

VIEWER: Final = Role(
    name="hami-viewer",
    text="Reads shares, use, events, queues and quotas.",
    grants=_VIEW,
    aggregates_to="view",
)
DEVELOPER: Final = Role(
    name="hami-developer",
    text="Also creates pods and Jobs, resizes shares and asks what-if questions.",
    grants=(*_VIEW, *_PLAN, *_DEVELOP),
    aggregates_to="edit",
)
QUEUE_ADMIN: Final = Role(
    name="hami-queue-admin",
    text="Also asks what-if questions and writes ResourceQuotas, but creates no pods; with the "
    "Role of the same name in `hami-system` it writes the queues.",
    grants=(*_VIEW, *_PLAN, *_GOVERN),
)
PLATFORM_ADMIN: Final = Role(
    name="hami-platform-admin",
    text="All of these, except that it does not write the queues; reads the state of HAMi's "
    "services, cordons devices and defragments.",
    grants=(
        *_VIEW,
        *_PLAN,
        _get(SYSTEM),
        _get(EVICT),
        *_DEVELOP,
        *_GOVERN,
        Grant(groups=("",), resources=("nodes",), verbs=(*_READ[:2], "patch", _READ[2])),
    ),
)
ROLES: Final = (VIEWER, DEVELOPER, QUEUE_ADMIN, PLATFORM_ADMIN)


def granted(role: Role) -> Iterator[Right]:
    """Return the rights of routes that the role grants, where it is bound."""
    known = {
        right
        for rule in ROUTES.values()
        for right in (*rule.rights, *rule.if_clusterwide, *rule.if_changing)
    }
    for right in sorted(known - {ALL_ALLOCATIONS}):
        if any(
            right.group in grant.groups
            and _path(right) in grant.resources
            and right.verb in grant.verbs
            for grant in role.grants
        ):
            yield right
