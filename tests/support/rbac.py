# SPDX-License-Identifier: Apache-2.0
"""Finds the requests that need each rule of a role: rules as single rights, requests of an audit
log.

A ``Right`` is one verb on one resource of one role, the smallest unit that a role can lose. It is
needed when there is a request that no other right allows. The rules have no wildcards. Outside
document: Kubernetes, "Using RBAC Authorization" (``rbac.authorization.k8s.io/v1``).
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

Document = dict[str, Any]
ACCOUNT = "system:serviceaccount"
GROUP = "rbac.authorization.k8s.io"
COLLECTIONS = {
    "Role": f"roles.{GROUP}",
    "ClusterRole": f"clusterroles.{GROUP}",
    "RoleBinding": f"rolebindings.{GROUP}",
    "ClusterRoleBinding": f"clusterrolebindings.{GROUP}",
}


class Request(Struct, frozen=True, kw_only=True, order=True):
    """One request to the API server."""

    user: str
    verb: str
    group: str
    resource: str
    """With its subresource: ``pods/binding``."""
    namespace: str = ""
    name: str = ""

    def review(self) -> Document:
        """The same as a question to the API server."""
        resource, _, subresource = self.resource.partition("/")
        _, _, namespace, _ = self.user.split(":")
        attributes = {
            "verb": self.verb,
            "group": self.group,
            "resource": resource,
            "subresource": subresource,
            "namespace": self.namespace,
            "name": self.name,
        }
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": self.user,
                "groups": [*groups, "system:authenticated"],
                "resourceAttributes": {key: value for key, value in attributes.items() if value},
            },
        }


class RoleRef(Struct, frozen=True, kw_only=True, order=True):
    """One role, as the API names it."""

    kind: str
    name: str
    namespace: str = ""


class Right(Struct, frozen=True, kw_only=True, order=True):
    """One verb on one resource, and on one object of it if the rule names objects."""

    role: RoleRef
    verb: str
    group: str
    resource: str
    name: str = ""

    def rule(self) -> Document:
        """The rule that grants exactly this right."""
        found: Document = {
            "apiGroups": [self.group],
            "resources": [self.resource],
            "verbs": [self.verb],
        }
        return {**found, "resourceNames": [self.name]} if self.name else found


class Binding(Struct, frozen=True, kw_only=True, order=True):
    """Subject and namespace of a role."""

    role: RoleRef
    user: str
    namespace: str = ""
    """Empty: everywhere."""
    name: str = ""
    kind: str = ""


class Policy:
    """Roles and bindings together."""

    def __init__(self, documents: Iterable[Document]) -> None:
        """``documents`` of all kinds; those that are no role or binding are skipped."""
        self.rules: dict[RoleRef, Sequence[Document]] = {}
        self.bindings: list[Binding] = []
        for document in documents:
            metadata = document["metadata"]
            namespace = metadata.get("namespace", "")
            if document["kind"] in ("Role", "ClusterRole"):
                role = RoleRef(kind=document["kind"], name=metadata["name"], namespace=namespace)
                self.rules[role] = document.get("rules") or []
            elif document["kind"] in ("RoleBinding", "ClusterRoleBinding"):
                self.bindings += _bindings(document)

    def rights(self, role: RoleRef) -> list[Right]:
        """All rights of a role."""
        return sorted(
            {
                Right(role=role, verb=verb, group=group, resource=resource, name=name)
                for rule in self.rules[role]
                for verb, group, resource, name in itertools.product(
                    rule["verbs"],
                    rule.get("apiGroups", ()),
                    rule.get("resources", ()),
                    rule.get("resourceNames") or ("",),
                )
            }
        )

    def givers(self, request: Request) -> set[tuple[Binding, Right]]:
        """All binding and right pairs that allow a request."""
        return {
            (binding, right)
            for binding in self.bindings
            if binding.user == request.user
            and binding.namespace in ("", request.namespace)
            and binding.role in self.rules
            for right in self.rights(binding.role)
            if _allows(right, request)
        }


def _bindings(document: Document) -> list[Binding]:
    metadata, ref = document["metadata"], document["roleRef"]
    namespace = metadata.get("namespace", "") if document["kind"] == "RoleBinding" else ""
    role = RoleRef(
        kind=ref["kind"],
        name=ref["name"],
        namespace=namespace if ref["kind"] == "Role" else "",
    )
    return [
        Binding(
            role=role,
            user=f"{ACCOUNT}:{subject['namespace']}:{subject['name']}",
            namespace=namespace,
            name=metadata["name"],
            kind=document["kind"],
        )
        for subject in document.get("subjects", ())
        if subject["kind"] == "ServiceAccount"
    ]


def _allows(right: Right, request: Request) -> bool:
    # A new object has no name yet: a rule with names never allows its creation.
    name = "" if request.verb == "create" and "/" not in request.resource else request.name
    return (
        right.verb in ("*", request.verb)
        and right.group in ("*", request.group)
        and right.resource in ("*", request.resource)
        and right.name in ("", name)
    )


class Finding(Struct, kw_only=True):
    """Result of judging roles by requests."""

    need: dict[Right, Request] = {}
    """By right: a request that only this right allows."""
    need_binding: dict[Binding, Request] = {}
    """The same for bindings of roles that are not ours."""
    refused: list[Request] = []
    """Requests that no right allows."""
    idle: list[Right] = []
    """Rights that no request needs."""
    idle_bindings: list[Binding] = []


def judge(policy: Policy, ours: Iterable[RoleRef], requests: Iterable[Request]) -> Finding:
    """Judge roles by requests; ``ours`` are to be as small as possible."""
    found = Finding()
    own = set(ours)
    for request in sorted(set(requests)):
        givers = policy.givers(request)
        if not givers:
            found.refused.append(request)
        elif len(givers) == 1:
            ((_, right),) = givers
            found.need.setdefault(right, request)
        bindings = {binding for binding, _ in givers}
        if len(bindings) == 1:
            found.need_binding.setdefault(bindings.pop(), request)
    users = {binding.role for binding in policy.bindings}
    rights = {right for role in own & users for right in policy.rights(role)}
    found.idle = sorted(rights - found.need.keys())
    found.idle_bindings = sorted(set(policy.bindings) - found.need_binding.keys())
    return found


class _Object(Struct):
    resource: str = ""
    namespace: str = ""
    name: str = ""
    apiGroup: str = ""  # noqa: N815 - the document's own name
    subresource: str = ""


class _Entry(Struct):
    verb: str
    user: dict[str, Any]
    objectRef: _Object | None = None  # noqa: N815 - the document's own name
    annotations: dict[str, str] = {}


class Audited(Struct, frozen=True, kw_only=True):
    """Requests of service accounts, as the API server judged them."""

    allowed: frozenset[Request]
    forbidden: frozenset[Request]


def audited(log: Path, *, namespaces: Sequence[str]) -> Audited:
    """Read an audit log for the requests of some namespaces' accounts about objects."""
    prefixes = tuple(f"{ACCOUNT}:{namespace}:" for namespace in namespaces)
    by_decision: dict[str, set[Request]] = {"allow": set(), "forbid": set()}
    decoder = msgspec.json.Decoder(_Entry)
    for line in log.read_bytes().splitlines():
        entry = decoder.decode(line)
        user = entry.user.get("username", "")
        if entry.objectRef is None or not user.startswith(prefixes):
            continue
        decision = entry.annotations.get("authorization.k8s.io/decision", "")
        about = entry.objectRef
        parts = [about.resource, about.subresource]
        by_decision.setdefault(decision, set()).add(
            Request(
                user=user,
                verb=entry.verb,
                group=about.apiGroup,
                resource="/".join(part for part in parts if part),
                namespace=about.namespace,
                name=about.name,
            )
        )
    return Audited(
        allowed=frozenset(by_decision["allow"]), forbidden=frozenset(by_decision["forbid"])
    )
