# SPDX-License-Identifier: Apache-2.0
"""Decides which requests the API server sends to the webhook: the MutatingWebhookConfiguration.

Two webhooks, both ``failurePolicy: Fail`` (design D7): new pods that name one of our resources or
carry an annotation only we may write, and changes of our pods. Every other pod passes without a
call, so it never depends on us. A new pod of ours that is too large is refused by its match
condition, so it costs the webhook no time. The label ``hami.io/webhook=ignore`` exempts a
namespace, not a pod, because tenants may label pods. No namespace is exempt by its name, not even
``kube-system`` (ADR 20). ``pods/status`` is left out on purpose: a kubelet must be able to report
while the webhook is unavailable, and a forged annotation would not verify anyway. Obeys
``admissionregistration.k8s.io/v1`` as of Kubernetes 1.34; CEL as in
https://kubernetes.io/docs/reference/using-api/cel/.
"""

from collections.abc import Iterable
from typing import Any, Final, get_args

from msgspec import Struct
from msgspec.structs import replace

from hami_common.admission import bounds
from hami_common.dra.podclaims import AllocationMode
from hami_common.pods import annotations as keys
from hami_common.skus.expansion import SKU_PREFIX

Document = dict[str, Any]
_CREATE: Final = "create.pods.hami.io"
_MODES: Final[tuple[AllocationMode, ...]] = get_args(AllocationMode)


class Client(Struct, frozen=True, kw_only=True):
    """Address of the webhook for the API server: a Service, or a URL if ``url`` is set."""

    namespace: str = ""
    service: str = ""
    port: int = 443
    path: str = "/mutate"
    url: str = ""
    ca_bundle: str = ""
    """PEM certificates, base64-encoded again."""

    def document(self) -> Document:
        """Return the ``clientConfig``."""
        where: Document
        if self.url:
            where = {"url": self.url}
        else:
            where = {
                "service": {
                    "namespace": self.namespace,
                    "name": self.service,
                    "path": self.path,
                    "port": self.port,
                }
            }
        return {**where, "caBundle": self.ca_bundle} if self.ca_bundle else where


def mutate_path(mode: AllocationMode) -> str:
    """Return the webhook's path for new pods of namespaces whose label names this mode."""
    return f"/mutate/{mode}"


def text(word: str) -> str:
    """Return ``word`` as a CEL string literal."""
    return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"


def words(texts: Iterable[str]) -> str:
    """Return ``texts`` as a CEL list literal, in order."""
    return "[" + ", ".join(text(word) for word in sorted(texts)) + "]"


def names_our_resources(resource_names: Iterable[str]) -> str:
    """CEL: a container of any kind has one of the names in its limits or requests."""
    return f"({container_list()}).exists(c, {names_resource('c', resource_names)})"


def names_resource(container: str, resource_names: Iterable[str]) -> str:
    """CEL: the container in the variable has one of the names in its limits or requests."""
    names = words(resource_names)
    part = " || ".join(
        f"(has({container}.resources.{group}) && "
        f"{container}.resources.{group}.exists(name, name in {names}))"
        for group in ("limits", "requests")
    )
    return f"has({container}.resources) && ({part})"


def names_sku() -> str:
    """CEL: the pod names a SKU by annotation, or a container of it does by resource."""
    annotations, prefix = "object.metadata.annotations", text(SKU_PREFIX)
    part = " || ".join(
        f"(has(c.resources.{group}) && c.resources.{group}.exists(name, name.startsWith({prefix})))"
        for group in ("limits", "requests")
    )
    return (
        f"(has({annotations}) && {text(keys.SKU)} in {annotations}) || "
        f"({container_list()}).exists(c, has(c.resources) && ({part}))"
    )


def reserved_key(variable: str) -> str:
    """CEL: the annotation key in the variable is one that only our scheduler may write."""
    suffixes = " || ".join(
        f"{variable}.endsWith({text(suffix)})" for suffix in keys.RESERVED_SUFFIXES
    )
    return (
        f"{variable} in {words(keys.RESERVED)} || "
        f"{variable}.contains({text(keys.LIMITS_PREFIX_SUFFIX)}) || "
        f"({variable}.startsWith('hami.io/') && ({suffixes}))"
    )


def has_reserved_annotation(variable: str) -> str:
    """CEL: the object in ``variable`` has an annotation that only our scheduler may write."""
    return (
        f"(has({variable}.metadata.annotations) && "
        f"{variable}.metadata.annotations.exists(key, {reserved_key('key')}))"
    )


def is_claimed(variable: str) -> str:
    """CEL: the object in ``variable`` has the annotation with resources that a claim gives."""
    annotations = f"{variable}.metadata.annotations"
    return f"(has({annotations}) && {text(keys.CLAIMED_RESOURCES)} in {annotations})"


def bind_by(users: str) -> str:
    """CEL: the request creates a Binding, as one of these users, separated by commas.

    The list stands between the first two apostrophes of the expression, where kustomize can replace
    it (deploy/kustomize/components/bind-admission).
    """
    return (
        f"request.userInfo.username in {text(users)}.split(',') && request.kind.kind == 'Binding'"
    )


def is_managed(variable: str) -> str:
    """CEL: the object in ``variable`` is a pod that the webhook prepared."""
    label = text(keys.MANAGED_LABEL)
    labels = f"{variable}.metadata.labels"
    return f"(has({labels}) && {label} in {labels} && {labels}[{label}] == 'true')"


def container_list(*groups: str) -> str:
    """CEL: the containers of these groups of the object's specification, all kinds by default."""
    groups = groups or ("containers", "initContainers", "ephemeralContainers")
    lists = (f"(has(object.spec.{group}) ? object.spec.{group} : [])" for group in groups)
    return " + ".join(lists)


def size_bounds(containers: str = "") -> list[tuple[str, str, str]]:
    """Return name, CEL and message of each bound of ``bounds``: the pod is no larger.

    ``containers``: CEL of the list of all containers, where it has a name.
    """
    containers = containers or f"({container_list()})"
    most, volumes = bounds.MOST_CONTAINERS, "object.spec.volumes"
    found = [
        (
            "containers-within-bounds",
            f"size({containers}) <= {most}",
            _too_many("spec.containers", most, "containers, init and ephemeral ones included"),
        ),
        (
            "volumes-within-bounds",
            f"!has({volumes}) || size({volumes}) <= {bounds.VOLUMES.most(most)}",
            _too_many("spec.volumes", bounds.MOST_ENTRIES, bounds.VOLUMES.words),
        ),
    ]
    for bound in bounds.BY_CONTAINER:
        sizes = f"{containers}.map(c, has(c.{bound.field}) ? size(c.{bound.field}) : 0)"
        found.append(
            (
                f"{bound.field.lower()}-within-bounds",
                f"{sizes}.sum() <= {bound.most(most)}",
                _too_many(f"spec.containers[*].{bound.field}", bounds.MOST_ENTRIES, bound.words),
            )
        )
    return found


def _too_many(field: str, most: int, what: str) -> str:
    return f"{field}: a pod that asks for devices may have {most} {what}: split it"


def namespace_selector(
    label: str = keys.WEBHOOK_LABEL,
    value: str = keys.WEBHOOK_IGNORE,
    *,
    exempt_namespaces: Iterable[str] = (),
) -> Document:
    """Select every namespace except those with the label and the named ones."""
    expressions = [{"key": label, "operator": "NotIn", "values": [value]}]
    if named := sorted(exempt_namespaces):
        name = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": named}
        expressions.append(name)
    return {"matchExpressions": expressions}


def mutating_webhook_configuration(
    resource_names: Iterable[str],
    client: Client,
    *,
    name: str = "hami-webhook",
    timeout_s: int = 10,
    with_modes: bool = False,
) -> Document:
    """Return the whole object, ready to be applied.

    ``with_modes``: the label of a namespace may name the allocation mode of its pods. It decides on
    the path, because the webhook does not read namespaces. Another word in the label is ignored.
    """
    names = list(resource_names)
    modes = _MODES if with_modes else ()
    our_pods = " || ".join(
        has(variable)
        for has in (is_managed, has_reserved_annotation, is_claimed)
        for variable in ("oldObject", "object")
    )
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "hami"}},
        "webhooks": [
            _create_webhook(names, client, timeout_s, others=modes),
            *(_create_webhook(names, client, timeout_s, mode=mode) for mode in modes),
            {
                "name": "update.pods.hami.io",
                **_common(client, timeout_s),
                "rules": [_rule(["UPDATE"], ["pods", "pods/ephemeralcontainers"])],
                "matchConditions": [{"name": "belongs-to-hami", "expression": our_pods}],
            },
        ],
    }


def _create_webhook(
    resource_names: Iterable[str],
    client: Client,
    timeout_s: int,
    *,
    mode: AllocationMode | None = None,
    others: tuple[AllocationMode, ...] = (),
) -> Document:
    """Return the webhook for new pods, in namespaces whose label names ``mode``, if it is set.

    ``others``: modes that have a webhook of their own.
    """
    names = names_our_resources(resource_names)
    new_pods = (
        f"{names} || {names_sku()} || {has_reserved_annotation('object')} || {is_claimed('object')}"
    )
    common = _common(client, timeout_s)
    selectors = common["namespaceSelector"]["matchExpressions"]
    if others:
        values = list(others)
        selectors.append({"key": keys.ALLOCATION_MODE, "operator": "NotIn", "values": values})
    if mode is not None:
        url = f"{client.url.removesuffix(client.path)}{mutate_path(mode)}" if client.url else ""
        common["clientConfig"] = replace(client, path=mutate_path(mode), url=url).document()
        selectors.append({"key": keys.ALLOCATION_MODE, "operator": "In", "values": [mode]})
    return {
        "name": f"{mode}.{_CREATE}" if mode else _CREATE,
        **common,
        "rules": [_rule(["CREATE"], ["pods"])],
        "matchConditions": [
            {"name": "concerns-hami", "expression": new_pods},
            *(
                {"name": bound, "expression": _or_error(condition, message)}
                for bound, condition, message in size_bounds()
            ),
        ],
    }


def _common(client: Client, timeout_s: int) -> Document:
    return {
        "admissionReviewVersions": ["v1"],
        "clientConfig": client.document(),
        "failurePolicy": "Fail",
        "matchPolicy": "Equivalent",
        "namespaceSelector": namespace_selector(),
        "reinvocationPolicy": "IfNeeded",
        "sideEffects": "NoneOnDryRun",
        "timeoutSeconds": timeout_s,
    }


def bind_webhook(client: Client, *, binders: str) -> Document:
    """Return the webhook for Bindings of other schedulers, for the list of a configuration.

    ``binders``: users, separated by commas. Bindings of all others, and so all their pods, do not
    depend on it. It is never invoked again after another webhook has changed the Binding: that
    could only change what it reserved.
    """
    return {
        "name": "bindings.hami.io",
        "admissionReviewVersions": ["v1"],
        "clientConfig": client.document(),
        "failurePolicy": "Fail",
        "matchPolicy": "Equivalent",
        "reinvocationPolicy": "Never",
        "rules": [_rule(["CREATE"], ["pods/binding", "bindings"])],
        "matchConditions": [{"name": "is-of-a-binder", "expression": bind_by(binders)}],
        "sideEffects": "NoneOnDryRun",
        "timeoutSeconds": 10,
    }


def _or_error(condition: str, message: str) -> str:
    """CEL: true, or an error with the message.

    A match condition that is false would let the pod pass without a call. An erroneous one refuses
    it, by ``failurePolicy: Fail``; the message is the key that an empty map lacks.
    """
    return f"{condition} || {{'': true}}[{text(message)}]"


def _rule(operations: list[str], resources: list[str]) -> Document:
    return {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": operations,
        "resources": resources,
        "scope": "Namespaced",
    }
