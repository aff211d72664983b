# SPDX-License-Identifier: Apache-2.0
"""Expected access of people to every described route, and a gate that is asked for it.

The rows are written here, and not taken from the table that the gate reads.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from multidict import CIMultiDict

from hami_common import roles
from hami_common.errors import Denied
from hami_common.runtime import gate, httpd
from hami_common.runtime.kubeauth import KubeAuth
from hami_registry.shell import openapi as registry_document
from hami_scheduler.shell import openapi as scheduler_document

OWN, OTHER = "team-a", "team-b"

Route = tuple[str, str]

SUBJECTS: Mapping[str, tuple[str, bool]] = {
    "stranger": ("", False),
    "tenant-viewer": ("hami-viewer", False),
    "tenant-developer": ("hami-developer", False),
    "tenant-queue-admin": ("hami-queue-admin", False),
    "tenant-platform-admin": ("hami-platform-admin", False),
    "viewer": ("hami-viewer", True),
    "developer": ("hami-developer", True),
    "queue-admin": ("hami-queue-admin", True),
    "platform-admin": ("hami-platform-admin", True),
    "integration": ("hami-integration", True),
}
"""ServiceAccount: its ClusterRole, and whether it has it in all namespaces or in ``OWN``."""

_TENANTS = {"tenant-viewer", "tenant-developer", "tenant-queue-admin", "tenant-platform-admin"}
_READERS = {"viewer", "developer", "queue-admin", "platform-admin"}
_PLANNERS = {"developer", "queue-admin", "platform-admin"}
_RESIZERS = {"tenant-developer", "tenant-platform-admin", "developer", "platform-admin"}

ONE: Mapping[str, set[str]] = {
    "/v1/allocations": _TENANTS | _READERS,
    "/v1/allocations/{namespace}/{pod}": _TENANTS | _READERS,
    "/v1/explain/{namespace}/{pod}": _TENANTS | _READERS,
    "/v1/waiting": _TENANTS | _READERS,
    "/v1/workloads/{namespace}/{pod}": _TENANTS | _READERS,
    "/v1/whatif/pods/{namespace}/{pod}": _TENANTS | _READERS,
    "/v1/whatif/moments/{namespace}/{pod}": _TENANTS | _READERS,
    "/v1/quarantine": _TENANTS | _READERS,
    "/v1/watch": _TENANTS | _READERS,
    "/v1/events": _TENANTS | _READERS,
    "/v1/pressure": _TENANTS | _READERS,
    "/v1/consumption": _TENANTS | _READERS,
    "/v1/idle": _TENANTS | _READERS,
    "/v1/queues": _TENANTS | _READERS,
    "/v1/quotas": _TENANTS | _READERS,
    "/v1/fleet": _READERS,
    "/v1/fleet/events": _READERS,
    "/v1/capacity": _READERS,
    "/v1/timeline": _READERS,
    "/v1/resize": _RESIZERS,
}
"""Route: who may call it about ``OWN``."""
_LISTS = ("/v1/nodes", "/v1/nodes/{node}", "/v1/devices", "/v1/config", "/v1/usage")
_REGIONS = [f"/v1/regions{one}" for one in ("", "/nodes", "/allocations", "/capacity", "/events")]
_WHOLE = [path for path in ONE if "{" not in path and path != "/v1/resize"]
ALL: Mapping[str, set[str]] = {
    **dict.fromkeys((*_LISTS, *_REGIONS, *_WHOLE), _READERS),
    "/v1/skus": set(SUBJECTS),
    "/v1/system": {"platform-admin"},
    "/v1/checks": {"platform-admin"},
    "/v1/policies": {"platform-admin"},
    "/v1/cordon": {"platform-admin"},
    "/v1/defrag": _READERS,
    "/v1/snapshot": _PLANNERS,
    "/v1/whatif/simulate": _PLANNERS,
    "/v1/whatif/scale": _PLANNERS,
    "/v1/whatif/drain": _PLANNERS,
    "/v1/whatif/policy": _PLANNERS,
}
"""Route: who may call it about all namespaces."""


def described() -> dict[Route, dict[str, Any]]:
    """All operations of both documents, by method and path."""
    found = {}
    for document in (registry_document.document(), scheduler_document.document()):
        for path, item in document["paths"].items():
            for method in ("get", "post", "put", "delete", "patch"):
                if method in item:
                    found[method.upper(), path] = item[method]
    return found


async def _served(request: httpd.Request) -> httpd.Response:
    return httpd.json_response({"at": request.path})


def guarded_by(auth: KubeAuth) -> dict[Route, httpd.Handler]:
    """Every described route that needs a right, behind the gate."""
    routes = dict.fromkeys(described().keys() - roles.OPEN, _served)
    return gate.Gate(auth).guarded(routes)


async def may(
    guarded: Mapping[Route, httpd.Handler],
    route: Route,
    token: str,
    namespace: str,
    **more: object,
) -> bool:
    """Return whether the gate admits the bearer's request about a namespace, empty: about all.

    ``more``: further fields of the body.
    """
    method, path = route
    in_path = "{namespace}" in path
    request = httpd.Request(
        method=method,
        path=path,
        query={"namespace": namespace} if namespace and not in_path else {},
        headers=CIMultiDict({"Authorization": f"Bearer {token}"}),
        body=msgspec.json.encode({"namespace": namespace, "pod": "p", **more}),
        params={"namespace": namespace} if in_path else {},
    )
    try:
        await guarded[route](request)
    except Denied:
        return False
    return True


async def check(
    guarded: Mapping[Route, httpd.Handler],
    token_by_account: Mapping[str, str],
    *,
    like: Mapping[str, str] | None = None,
) -> int:
    """Compare every route and account with the rows, for both namespaces and for all.

    ``like``: accounts with the access of another one, with roles of Kubernetes. Returns the number
    of comparisons.
    """
    compared = 0
    for route in guarded:
        path = route[1]
        assert path in ONE or path in ALL, f"{path} is missing in the expected matrix"
        for account, token in token_by_account.items():
            row = (like or {}).get(account, account)
            is_everywhere = SUBJECTS[row][1]
            if path in ONE:
                expected = row in ONE[path]
                assert await may(guarded, route, token, OWN) == expected, (route, account)
                other = expected and is_everywhere
                assert await may(guarded, route, token, OTHER) == other, (route, account)
                compared += 2
            if path in ALL:
                expected = row in ALL[path]
                assert await may(guarded, route, token, "") == expected, (route, account)
                compared += 1
    return compared
