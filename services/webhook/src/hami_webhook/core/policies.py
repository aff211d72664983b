# SPDX-License-Identifier: Apache-2.0
"""Decides what the API server itself refuses, without us: the ValidatingAdmissionPolicies.

Two laws, which hold also while the webhook is away or a request goes around it (design D7):

* Only the writers named here put, change or take away allocation annotations, through whichever
  verb or subresource a pod's metadata can be written with, the Binding among them.
* A container that asks for no device does not grab one by an environment variable that the vendors'
  runtime hooks read. Namespaces that need it carry ``hami.io/device-environment=allowed``.
  What ``envFrom`` brings cannot be seen at admission.

Obeys ``admissionregistration.k8s.io/v1`` as of Kubernetes 1.30; CEL as in
https://kubernetes.io/docs/reference/using-api/cel/.
"""

from collections.abc import Iterable
from typing import Any, Final

from hami_common import annotations as keys
from hami_webhook.core.configuration import names_resource, reserved_key, words
from hami_webhook.core.visibility import DEVICE_VARIABLES, HARMLESS

Document = dict[str, Any]
SCHEDULER_ACCOUNT: Final = "system:serviceaccount:hami-system:hami-scheduler"
ENVIRONMENT_LABEL: Final = "hami.io/device-environment"
ENVIRONMENT_ALLOWED: Final = "allowed"

_LABELS: Final = {"app.kubernetes.io/part-of": "hami"}
_API: Final = "admissionregistration.k8s.io/v1"


def admission_policies(
    resource_names: Iterable[str],
    *,
    device_variables: Iterable[str] = DEVICE_VARIABLES,
    writers: Iterable[str] = (SCHEDULER_ACCOUNT,),
    exempt_namespaces: Iterable[str] = ("kube-system",),
) -> list[Document]:
    """Both policies, each with its binding, ready to be applied.

    ``writers`` are user names; while pods of HAMi are taken over, HAMi's scheduler is one of them.
    """
    allocation = _policy(
        "allocation-annotations.hami.io",
        rules=[
            _rule(["CREATE", "UPDATE"], ["pods"]),
            _rule(["UPDATE"], ["pods/ephemeralcontainers", "pods/resize", "pods/status"]),
            _rule(["CREATE"], ["bindings", "pods/binding"]),
        ],
        conditions=[("is-not-a-writer", f"!(request.userInfo.username in {words(writers)})")],
        variables=[("old", _annotations("oldObject")), ("new", _annotations("object"))],
        validations=[
            _validation(
                f"variables.new.all(key, !({reserved_key('key')}) || "
                "(key in variables.old && variables.old[key] == variables.new[key]))",
                "annotations of HAMi's allocations are written by its scheduler alone: take "
                f"{keys.ALLOCATION} and its like out of metadata.annotations",
            ),
            _validation(
                f"request.operation != 'UPDATE' || variables.old.all(key, "
                f"!({reserved_key('key')}) || key in variables.new)",
                "annotations of HAMi's allocations are taken away by its scheduler alone: put them "
                "back into metadata.annotations",
            ),
        ],
    )
    harmless = words(HARMLESS)
    grabs = (
        f"e.name in {words(device_variables)} && "
        f"(has(e.valueFrom) || (has(e.value) && !(e.value in {harmless})))"
    )
    environment = _policy(
        "device-environment.hami.io",
        rules=[
            _rule(["CREATE"], ["pods"]),
            _rule(["UPDATE"], ["pods/ephemeralcontainers"]),
        ],
        conditions=[],
        variables=[("containers", _containers())],
        validations=[
            _validation(
                f"variables.containers.all(c, {names_resource('c', resource_names)} || "
                f"!has(c.env) || !c.env.exists(e, {grabs}))",
                "a container sets a variable that gives it devices but asks for none: ask for a "
                "share in its resources.limits, or label the namespace "
                f"{ENVIRONMENT_LABEL}={ENVIRONMENT_ALLOWED}",
            )
        ],
    )
    exempt = {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": sorted(exempt_namespaces),
    }
    if_allowed = {
        "key": ENVIRONMENT_LABEL,
        "operator": "NotIn",
        "values": [ENVIRONMENT_ALLOWED],
    }
    return [
        allocation,
        _binding(allocation, {}),
        environment,
        _binding(environment, {"namespaceSelector": {"matchExpressions": [exempt, if_allowed]}}),
    ]


def _annotations(variable: str) -> str:
    has = f"has({variable}.metadata.annotations)"
    return f"{variable} != null && {has} ? {variable}.metadata.annotations : {{}}"


def _containers() -> str:
    return " + ".join(
        f"(has(object.spec.{group}) ? object.spec.{group} : [])"
        for group in ("containers", "initContainers")
    ) + (
        # Those of another type: only what they have in common is kept.
        " + (has(object.spec.ephemeralContainers) ? object.spec.ephemeralContainers : [])"
    )


def _policy(
    name: str,
    *,
    rules: list[Document],
    conditions: list[tuple[str, str]],
    variables: list[tuple[str, str]],
    validations: list[Document],
) -> Document:
    spec: Document = {
        "failurePolicy": "Fail",
        "matchConstraints": {"matchPolicy": "Equivalent", "resourceRules": rules},
    }
    if conditions:
        spec["matchConditions"] = [{"name": word, "expression": cel} for word, cel in conditions]
    spec["variables"] = [{"name": word, "expression": cel} for word, cel in variables]
    spec["validations"] = validations
    return {
        "apiVersion": _API,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name, "labels": dict(_LABELS)},
        "spec": spec,
    }


def _binding(policy: Document, match: Document) -> Document:
    name = policy["metadata"]["name"]
    spec: Document = {"policyName": name, "validationActions": ["Deny"]}
    if match:
        spec["matchResources"] = match
    return {
        "apiVersion": _API,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name, "labels": dict(_LABELS)},
        "spec": spec,
    }


def _validation(expression: str, message: str) -> Document:
    return {"expression": expression, "message": message, "reason": "Forbidden"}


def _rule(operations: list[str], resources: list[str]) -> Document:
    return {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": operations,
        "resources": resources,
        "scope": "Namespaced",
    }
