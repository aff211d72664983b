# SPDX-License-Identifier: Apache-2.0
"""Every described route for every kind of person: the gate, with the shipped ClusterRoles as RBAC.

``tests/support/people.py`` has the expected access; in ``tests/e2e/people.py`` a real API server
decides.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from multidict import CIMultiDict

from hami_common import roles
from hami_common.errors import RequestInvalid, Unauthenticated
from hami_common.runtime import gate, httpd
from hami_common.runtime.kubeauth import KubeAuth
from tests.support.manualclock import ManualClock
from tests.support.people import (
    ALL,
    ONE,
    OWN,
    SUBJECTS,
    Route,
    check,
    described,
    guarded_by,
    may,
)
from tests.support.rbac import ACCOUNT, Policy, Request

pytestmark = pytest.mark.anyio
BASE = Path(__file__).resolve().parents[3] / "deploy" / "kustomize" / "base"


class Cluster:
    """An API server that evaluates the shipped roles; a token is the name of its account."""

    def __init__(self) -> None:
        documents: list[dict[str, Any]] = []
        for name in ("roles.yaml", "rbac.yaml", "queue-admin.yaml"):
            documents += yaml.safe_load_all((BASE / name).read_text("utf-8"))
        for account, (role, is_everywhere) in SUBJECTS.items():
            scope = {} if is_everywhere else {"namespace": OWN}
            documents.append(
                {
                    "kind": "ClusterRoleBinding" if is_everywhere else "RoleBinding",
                    "metadata": {"name": account, **scope},
                    "roleRef": {"kind": "ClusterRole", "name": role},
                    "subjects": [{"kind": "ServiceAccount", "namespace": OWN, "name": account}],
                }
            )
        self._policy = Policy(documents)

    async def create(self, path: str, body: bytes) -> bytes:
        spec = msgspec.json.decode(body)["spec"]
        if path.endswith("tokenreviews"):
            known = spec["token"] in SUBJECTS
            user = {"username": f"{ACCOUNT}:{OWN}:{spec['token']}"} if known else {}
            return msgspec.json.encode({"status": {"authenticated": known, "user": user}})
        about = spec["resourceAttributes"]
        resource = "/".join(filter(None, (about["resource"], about.get("subresource", ""))))
        request = Request(
            user=spec["user"],
            verb=about["verb"],
            group=about.get("group", ""),
            resource=resource,
            namespace=about.get("namespace", ""),
        )
        return msgspec.json.encode({"status": {"allowed": bool(self._policy.givers(request))}})


@pytest.fixture
def guarded() -> dict[Route, httpd.Handler]:
    kube: Any = Cluster()
    auth = KubeAuth(lambda: kube, clock=ManualClock())
    return guarded_by(auth)


async def test_each_route_admits_the_roles_that_may_call_it(
    guarded: Mapping[Route, httpd.Handler],
) -> None:
    assert await check(guarded, {account: account for account in SUBJECTS}) > 400


@pytest.mark.parametrize("flag", [{"execute": True}, {"stop": True}, {"execute": "x"}])
async def test_readers_plan_a_defragmentation_and_execute_none(
    guarded: Mapping[Route, httpd.Handler], flag: dict[str, object]
) -> None:
    route = ("POST", "/v1/defrag")
    for account in ("viewer", "developer", "queue-admin"):
        assert await may(guarded, route, account, "", execute=False), account
        assert not await may(guarded, route, account, "", **flag), account
    assert await may(guarded, route, "platform-admin", "", **flag)
    assert not await may(guarded, route, "tenant-platform-admin", "", execute=False)


async def test_session_lists_the_routes_that_the_gate_admits(
    guarded: Mapping[Route, httpd.Handler],
) -> None:
    kube: Any = Cluster()
    closed = gate.Gate(KubeAuth(lambda: kube, clock=ManualClock()))
    for account in SUBJECTS:
        caller = await closed.caller(
            httpd.Request(
                method="GET",
                path="/v1/session",
                query={},
                headers=CIMultiDict({"Authorization": f"Bearer {account}"}),
                body=b"",
                params={},
            )
        )
        for namespace, known in ((OWN, ONE.keys() | ALL.keys()), ("", ALL.keys())):
            listed = set(await closed.routes_of(caller, namespace)) - roles.OPEN
            admitted = {
                route
                for route in guarded
                if route[1] in known and await may(guarded, route, account, namespace)
            }
            assert {route for route in listed if route[1] in known} == admitted, account


async def test_caller_without_a_valid_token_is_refused_everywhere(
    guarded: Mapping[Route, httpd.Handler],
) -> None:
    for route in guarded:
        for token in ("", "forged"):
            with pytest.raises(Unauthenticated):
                await may(guarded, route, token, OWN)


async def test_namespace_that_a_route_does_not_take_narrows_no_right(
    guarded: Mapping[Route, httpd.Handler],
) -> None:
    """A tenant that adds its namespace to a question about the cluster is still refused."""
    for route in guarded:
        if route[1] not in ONE and roles.ROUTES[route].rights:
            for account in ("tenant-viewer", "tenant-platform-admin"):
                assert not await may(guarded, route, account, OWN), (route, account)


async def test_resize_without_a_namespace_is_invalid(
    guarded: Mapping[Route, httpd.Handler],
) -> None:
    with pytest.raises(RequestInvalid):
        await may(guarded, ("POST", "/v1/resize"), "platform-admin", "")


def test_table_lists_the_described_routes_and_no_other() -> None:
    assert roles.ROUTES.keys() | roles.OPEN == described().keys()


def test_routes_with_rights_of_a_namespace_take_one() -> None:
    for (method, path), rule in roles.ROUTES.items():
        if rule.is_namespace_in_body or all(right.is_clusterwide for right in rule.rights):
            continue
        names = {one["name"] for one in described()[method, path]["parameters"]}
        assert "namespace" in names, path


async def test_unlisted_route_is_the_platform_administrators_alone() -> None:
    kube: Any = Cluster()
    unlisted = ("GET", "/v1/unlisted")
    handler = guarded_by(KubeAuth(lambda: kube, clock=ManualClock()))["GET", "/v1/nodes"]
    guarded = gate.Gate(KubeAuth(lambda: kube, clock=ManualClock())).guarded({unlisted: handler})
    admitted = {account for account in SUBJECTS if await may(guarded, unlisted, account, "")}
    assert admitted == {"platform-admin"}


def test_no_role_of_people_grants_events_of_the_bus_or_secrets() -> None:
    for role in roles.ROLES:
        for grant in role.grants:
            assert not {"events", "*"} & set(grant.resources) or "hami.io" not in grant.groups
            assert not {"secrets", "*", "serviceaccounts/token"} & set(grant.resources)
            assert "*" not in (*grant.verbs, *grant.groups)
