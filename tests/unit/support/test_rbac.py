# SPDX-License-Identifier: Apache-2.0
"""Findings of the RBAC checker: unused rights, and requests that no role allows."""

import json
from pathlib import Path
from typing import Any

from tests.support.rbac import Finding, Policy, Request, RoleRef, audited, judge

ROLE = RoleRef(kind="ClusterRole", name="reader")
OTHER = RoleRef(kind="ClusterRole", name="system:other")
USER = "system:serviceaccount:hami-system:hami-x"


def role(ref: RoleRef, *rules: dict[str, Any]) -> dict[str, Any]:
    return {"kind": ref.kind, "metadata": {"name": ref.name}, "rules": list(rules)}


def binding(ref: RoleRef, name: str, namespace: str = "") -> dict[str, Any]:
    kind = "RoleBinding" if namespace else "ClusterRoleBinding"
    return {
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "roleRef": {"kind": ref.kind, "name": ref.name},
        "subjects": [
            {"kind": "ServiceAccount", "name": "hami-x", "namespace": "hami-system"},
            {"kind": "Group", "name": "everybody"},
        ],
    }


def rule(*verbs: str, resource: str = "pods", names: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"apiGroups": [""], "resources": [resource], "verbs": list(verbs)}
    return {**found, "resourceNames": list(names)} if names else found


def ask(verb: str, resource: str = "pods", **more: str) -> Request:
    return Request(user=USER, verb=verb, group="", resource=resource, **more)


def found(documents: list[dict[str, Any]], *requests: Request) -> Finding:
    return judge(Policy(documents), [ROLE], requests)


def test_right_that_a_request_needs_is_not_idle() -> None:
    told = found([role(ROLE, rule("get", "list")), binding(ROLE, "b")], ask("get"), ask("list"))
    assert (told.idle, told.refused, told.idle_bindings) == ([], [], [])
    assert {right.verb: request for right, request in told.need.items()} == {
        "get": ask("get"),
        "list": ask("list"),
    }


def test_right_without_a_request_is_idle() -> None:
    told = found([role(ROLE, rule("get", "delete")), binding(ROLE, "b")], ask("get"))
    assert [right.verb for right in told.idle] == ["delete"]


def test_request_without_a_right_is_refused() -> None:
    asked = (ask("get"), ask("get", "pods/log"), ask("watch"))
    told = found([role(ROLE, rule("get")), binding(ROLE, "b")], *asked)
    assert told.refused == [ask("get", "pods/log"), ask("watch")]


def test_right_that_another_role_gives_as_well_is_idle() -> None:
    documents = [
        role(ROLE, rule("get")),
        role(OTHER, rule("*", resource="*")),
        binding(ROLE, "b"),
        binding(OTHER, "c"),
    ]
    told = found(documents, ask("get"), ask("patch"))
    assert [right.verb for right in told.idle] == ["get"]
    assert [binding.name for binding in told.idle_bindings] == ["b"]


def test_names_and_namespaces_limit_a_right() -> None:
    documents = [
        role(ROLE, rule("get", "create", resource="secrets", names=("a",))),
        binding(ROLE, "b", namespace="here"),
    ]
    allowed = ask("get", "secrets", namespace="here", name="a")
    refused = (
        ask("create", "secrets", namespace="here", name="a"),
        ask("get", "secrets", namespace="here", name="b"),
        ask("get", "secrets", namespace="there", name="a"),
    )
    told = found(documents, allowed, *refused)
    assert told.refused == sorted(refused)
    assert list(told.need.values()) == [allowed]


def test_audit_log_is_read_for_the_projects_accounts_only(tmp_path: Path) -> None:
    def entry(user: str, decision: str) -> str:
        about = {"resource": "pods", "subresource": "binding", "namespace": "n", "name": "p"}
        return json.dumps(
            {
                "verb": "create",
                "user": {"username": user},
                "objectRef": about,
                "annotations": {"authorization.k8s.io/decision": decision},
            }
        )

    log = tmp_path / "audit.log"
    no_object = {"verb": "get", "user": {"username": USER}}
    entries = [entry(USER, "allow"), entry(USER, "forbid"), entry("admin", "allow")]
    log.write_text("\n".join([*entries, json.dumps(no_object)]))
    told = audited(log, namespaces=["hami-system"])
    bound = ask("create", "pods/binding", namespace="n", name="p")
    assert told.allowed == told.forbidden == frozenset({bound})
    review = bound.review()["spec"]
    assert review["user"] == USER
    assert review["resourceAttributes"]["subresource"] == "binding"
