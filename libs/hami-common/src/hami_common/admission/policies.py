# SPDX-License-Identifier: Apache-2.0
"""Decides which requests the API server itself refuses: the ValidatingAdmissionPolicies.

Rules that also hold while the webhook is unavailable or a request bypasses it (design D7):

* Only the writers named here add, change or remove allocation annotations, through any verb or
  subresource that can write a pod's metadata, the Binding among them. Bindings of other schedulers
  bring the annotations that bind admission has put into them (ADR 0029).
* A container gets no device by an environment variable or a mount that the vendors' runtime hooks
  read, unless it requests devices of the same vendor. Namespaces that need it carry
  ``hami.io/device-environment=allowed``. ``kube-system`` is exempt by name, because vendors'
  monitors, HAMi's among them, run there with such a variable. Variables from ``envFrom`` of a pod
  that is not ours cannot be seen at admission: the vendor's toolkit must not take the variable from
  containers.
* A pod of ours cannot be labeled past the webhook, is within the bounds of ``bounds``, and neither
  mounts over the limiter nor takes device variables by ``envFrom`` (``mounts``, ``visibility``).
  These rules hold where the webhook does: exempt namespaces are the same. Paths are judged as
  written, so one that is not in normal form is refused.

Obeys ``admissionregistration.k8s.io/v1`` as of Kubernetes 1.30; CEL as in
https://kubernetes.io/docs/reference/using-api/cel/.
"""

from collections.abc import Iterable
from typing import Any, Final

from hami_common.admission import mounts
from hami_common.admission.configuration import (
    bind_by,
    container_list,
    is_claimed,
    is_managed,
    names_our_resources,
    names_resource,
    namespace_selector,
    reserved_key,
    size_bounds,
    text,
    words,
)
from hami_common.dra.podclaims import POD_CLAIM, claims_profile
from hami_common.pods import annotations as keys
from hami_common.pods import limits
from hami_common.pods import mounts as paths
from hami_common.pods.visibility import DEVICE_VARIABLES, HARMLESS, VARIABLE_BY_VENDOR
from hami_common.vendors.catalog import Catalog

Document = dict[str, Any]
SCHEDULER_ACCOUNT: Final = "system:serviceaccount:hami-system:hami-scheduler"
ENVIRONMENT_LABEL: Final = "hami.io/device-environment"
ENVIRONMENT_ALLOWED: Final = "allowed"
ENVIRONMENT_EXEMPT: Final = ("kube-system",)
"""Namespaces whose pods may select devices by variable without the label."""
SCHEDULER_NAME: Final = "hami-scheduler"

_LABELS: Final = {"app.kubernetes.io/part-of": "hami"}
_API: Final = "admissionregistration.k8s.io/v1"


def admission_policies(
    catalog: Catalog,
    *,
    scheduler_name: str = SCHEDULER_NAME,
    writers: Iterable[str] = (SCHEDULER_ACCOUNT,),
    binders: str = "",
) -> list[Document]:
    """Return every policy, each with its binding, ready to be applied.

    ``writers`` are user names; while pods of HAMi are taken over, HAMi's scheduler is one of them.
    ``binders``: users whose Bindings the scheduler completes at bind admission, separated by
    commas; the annotations in their Bindings are its own.
    """
    by_label = namespace_selector(
        ENVIRONMENT_LABEL, ENVIRONMENT_ALLOWED, exempt_namespaces=ENVIRONMENT_EXEMPT
    )
    as_webhook = namespace_selector()
    ours = _is_ours(catalog, scheduler_name)
    allocation = _allocation(writers, binders)
    bound: list[tuple[Document, Document]] = [
        (_environment(catalog), by_label),
        (_opt_out(catalog, scheduler_name), as_webhook),
        (_size(ours), as_webhook),
        (_limiter(catalog, ours), as_webhook),
    ]
    return [
        allocation,
        _binding(allocation, {}),
        *(
            document
            for policy, selector in bound
            for document in (policy, _binding(policy, {"namespaceSelector": selector}))
        ),
    ]


def _is_ours(catalog: Catalog, scheduler_name: str) -> str:
    """CEL: a container names one of our resources, and HAMi gives the pod its devices.

    The label is that of pods that the webhook has prepared for another scheduler. Of a pod that
    gets its devices by a claim, the resources are in the annotation.
    """
    given = f"({_goes_to(scheduler_name)} || {is_managed('object')})"
    names = names_our_resources(catalog.resource_names())
    return f"{given} && ({names} || {is_claimed('object')})"


def _goes_to(scheduler_name: str) -> str:
    own = words((scheduler_name, claims_profile(scheduler_name)))
    return f"(has(object.spec.schedulerName) && object.spec.schedulerName in {own})"


def binders_exception(binders: str) -> Document:
    """Return the match condition that leaves out Bindings which bind admission has completed."""
    return {"name": "is-not-of-a-binder", "expression": f"!({bind_by(binders)})"}


def _allocation(writers: Iterable[str], binders: str) -> Document:
    document = _policy(
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
            _validation(
                _unchanged(keys.CLAIMED_RESOURCES),
                f"annotation {keys.CLAIMED_RESOURCES} is settled by the creation of the pod: leave "
                "it as it is in metadata.annotations",
            ),
        ],
    )
    if binders:
        document["spec"]["matchConditions"].append(binders_exception(binders))
    return document


def _unchanged(key: str) -> str:
    """CEL: the request creates a pod, or leaves the annotation as it is."""
    own = text(key)
    return (
        "(request.operation == 'CREATE' && request.kind.kind == 'Pod') || "
        f"({own} in variables.new ? "
        f"{own} in variables.old && variables.old[{own}] == variables.new[{own}] : "
        f"!({own} in variables.old))"
    )


def _environment(catalog: Catalog) -> Document:
    is_harmless = f"!has(e.valueFrom) && (!has(e.value) || e.value in {words(HARMLESS)})"
    own = " || ".join(
        f"(e.name == '{name}' && {_asks_of('c', catalog, vendor)})"
        for vendor, name in VARIABLE_BY_VENDOR.items()
    )
    gives_nothing = f"!(e.name in {words(DEVICE_VARIABLES)}) || ({is_harmless}) || {own}"
    exempt = f"or label the namespace {ENVIRONMENT_LABEL}={ENVIRONMENT_ALLOWED}"
    return _policy(
        "device-environment.hami.io",
        rules=[
            _rule(["CREATE"], ["pods"]),
            _rule(["UPDATE"], ["pods/ephemeralcontainers"]),
        ],
        conditions=[],
        variables=[("containers", container_list())],
        validations=[
            _validation(
                f"variables.containers.all(c, !has(c.env) || c.env.all(e, {gives_nothing}))",
                "a container sets a variable that gives it devices but asks for none of that "
                "vendor: ask for more than 0 in its resources.limits, " + exempt,
            ),
            _validation(
                "variables.containers.all(c, !has(c.volumeMounts) || c.volumeMounts.all(m, "
                f"!m.mountPath.contains('{paths.DEVICE_LIST}')))",
                f"a container mounts {paths.DEVICE_LIST}, which gives it devices: ask for a share "
                "in its resources.limits, " + exempt,
            ),
        ],
    )


def _asks_of(container: str, catalog: Catalog, vendor: str) -> str:
    """CEL: the container requests more than 0 devices of the vendor."""
    counts = words({family.count for family in catalog.vendor(vendor).families})
    limits_of = f"{container}.resources.limits"
    return (
        f"has({container}.resources) && has({limits_of}) && "
        f"{limits_of}.exists(name, name in {counts} && string({limits_of}[name]) != '0')"
    )


def _opt_out(catalog: Catalog, scheduler_name: str) -> Document:
    labels = "object.metadata.labels"
    names = names_resource("c", catalog.resource_names())
    asks = f"(variables.containers.exists(c, {names}) || {is_claimed('object')})"
    is_labelled = (
        f"has({labels}) && '{keys.WEBHOOK_LABEL}' in {labels} && "
        f"{labels}['{keys.WEBHOOK_LABEL}'] == '{keys.WEBHOOK_IGNORE}'"
    )
    return _policy(
        "webhook-opt-out.hami.io",
        rules=[_rule(["CREATE"], ["pods"])],
        conditions=[("is-labelled", is_labelled)],
        variables=[("containers", container_list())],
        validations=[
            _validation(
                f"!{_goes_to(scheduler_name)} && !{asks}",
                f"a pod with the label {keys.WEBHOOK_LABEL}={keys.WEBHOOK_IGNORE} asks for devices "
                "or for HAMi's scheduler: take the label off; a namespace may be exempt, by the "
                "same label on it",
            )
        ],
    )


def _size(ours: str) -> Document:
    return _policy(
        "pod-bounds.hami.io",
        rules=[_rule(["CREATE"], ["pods"]), _rule(["UPDATE"], ["pods/ephemeralcontainers"])],
        conditions=[("asks-for-devices", ours)],
        variables=[("containers", container_list())],
        validations=[
            _validation(condition, message)
            for _, condition, message in size_bounds("variables.containers")
        ],
    )


def _limiter(catalog: Catalog, ours: str) -> Document:
    """Return the policy of the rules in ``mounts`` and ``visibility`` that CEL can express."""
    names_ours = f"({names_resource('c', catalog.resource_names())}) || {_uses_claim('c')}"
    asking = f"({container_list()}).filter(c, {names_ours}).map(c, c.name)"
    owner = "(has(c.targetContainerName) ? c.targetContainerName : c.name)"
    return _policy(
        "limiter.hami.io",
        rules=[_rule(["CREATE"], ["pods"]), _rule(["UPDATE"], ["pods/ephemeralcontainers"])],
        conditions=[("asks-for-devices", ours)],
        variables=[("asking", asking)],
        validations=[
            _validation(
                _of_containers(_mounts_apart("c.name"), _mounts_apart(owner)),
                "a container mounts over what limits its device share, or at a path with '//', "
                "'/./' or '/../', or in /proc or /dev/fd: mount it elsewhere; "
                f"{', '.join(paths.RESERVED)} are reserved, and in a container with a share "
                f"{', '.join(paths.PARENTS)} too",
            ),
            _validation(
                _of_containers(_own_mounts("c.name"), _own_mounts(owner)),
                "a volume named like those that HAMi's webhook adds is mounted otherwise than the "
                "webhook does: leave the mount out, or give a volume of yours another name",
            ),
            _validation(
                f"request.operation == 'UPDATE' || ({_own_volumes()})",
                f"a volume is named {mounts.LIMITS_PREFIX}… or {mounts.REGION_PREFIX}… and is none "
                "that HAMi's webhook adds: give it another name",
            ),
            _validation(
                _of_containers(_pinned_variables(), _pinned_variables()),
                "envFrom could set a variable that gives devices: name the variables under env "
                "with valueFrom, or give envFrom a prefix",
            ),
        ],
    )


def _uses_claim(container: str) -> str:
    """CEL: the container uses the claim for the pod's resource limits."""
    claims = f"{container}.resources.claims"
    return (
        f"(has({container}.resources) && has({claims}) && "
        f"{claims}.exists(u, u.name == {text(POD_CLAIM)}))"
    )


def _of_containers(condition: str, of_debugger: str) -> str:
    """CEL: the condition on ``c`` holds for all containers; of old pods for ephemeral ones only."""

    def each(group: str, what: str) -> str:
        return f"(!has(object.spec.{group}) || object.spec.{group}.all(c, {what}))"

    whole = f"{each('containers', condition)} && {each('initContainers', condition)}"
    return (
        f"(request.operation == 'UPDATE' || ({whole})) && "
        f"{each('ephemeralContainers', of_debugger)}"
    )


def _mounts_apart(owner: str) -> str:
    """CEL: no mount of ``c``, with the limits of ``owner``, hides the files that limit a share."""
    has_share = f"{owner} in variables.asking"
    own = " || ".join(f"m.name.startsWith('{prefix}')" for prefix in mounts.PATH_BY_PREFIX)
    return (
        f"(!has(c.volumeMounts) || c.volumeMounts.all(m, {own} || "
        f"{_path_apart('m.mountPath', has_share)})) && "
        "(!has(c.volumeDevices) || c.volumeDevices.all(d, "
        f"{_path_apart('d.devicePath', has_share)}))"
    )


def _path_apart(path: str, has_share: str) -> str:
    """CEL: the path is written in normal form and leaves the files that limit the share visible."""
    reserved = [spelling for own in paths.RESERVED for spelling in paths.spellings(own)]
    below = words(f"{place}/" for place in reserved)
    parents = words(
        {place.rstrip("/") + end for place in paths.PARENTS for end in ("", "/")} - {""}
    )
    parts = [f"!({path} + '/').contains('{part}')" for part in ("/./", "/../")]
    return (
        f"({path}.startsWith('/') && !{path}.contains('//') && {' && '.join(parts)} && "
        f"!{path}.contains('{paths.DEVICE_LIST}') && "
        f"!({path} + '/').matches({text(paths.MAGIC_LINKS)}) && "
        f"!({path} in {words(reserved)}) && !{below}.exists(r, {path}.startsWith(r)) && "
        f"(!({path} in {parents}) || !({has_share})))"
    )


def _own_mounts(owner: str) -> str:
    """CEL: volumes of ours are mounted in ``c`` as the webhook does it."""
    terms = [
        f"(!m.name.startsWith('{prefix}') || (m.mountPath == '{path}' && !has(m.subPath) && "
        f"!has(m.subPathExpr) && (m.name == '{prefix}' + {owner} || "
        f"size('{prefix}' + {owner}) > {mounts.VOLUME_NAME_LIMIT})))"
        for prefix, path in mounts.PATH_BY_PREFIX.items()
    ]
    return f"!has(c.volumeMounts) || c.volumeMounts.all(m, {' && '.join(terms)})"


def _own_volumes() -> str:
    """CEL: volumes with names of ours equal those that the webhook adds.

    The name of the volume of a container with a long name is cut, so the two are not compared then.
    To a pod that gets its devices by a claim the webhook adds none: they would hide the agent's.
    """
    before, after = "metadata.annotations['", keys.limits("") + "']"
    item = "v.downwardAPI.items[0]"
    path = f"{item}.fieldRef.fieldPath"
    uncut = mounts.VOLUME_NAME_LIMIT - len(mounts.LIMITS_PREFIX)
    container = f"v.name.substring({len(mounts.LIMITS_PREFIX)})"
    is_limits = (
        "has(v.downwardAPI) && has(v.downwardAPI.items) && size(v.downwardAPI.items) == 1 && "
        f"{item}.path == '{limits.FILE_NAME}' && has({item}.fieldRef) && "
        f"{path}.startsWith({text(before)}) && {path}.endsWith({text(after)}) && "
        f"(size({path}) > {len(before) + uncut + len(after)} || "
        f"{path} == {text(before)} + {container} + {text(after)})"
    )
    return (
        f"(!{is_claimed('object')} || !has(object.spec.volumes) || object.spec.volumes.all(v, "
        f"!v.name.startsWith('{mounts.LIMITS_PREFIX}') && "
        f"!v.name.startsWith('{mounts.REGION_PREFIX}'))) && "
        "(!has(object.spec.volumes) || object.spec.volumes.all(v, "
        f"(!v.name.startsWith('{mounts.LIMITS_PREFIX}') || ({is_limits})) && "
        f"(!v.name.startsWith('{mounts.REGION_PREFIX}') || has(v.emptyDir))))"
    )


def _pinned_variables() -> str:
    """CEL: ``envFrom`` of ``c`` cannot bring a device variable that no literal wins over."""
    names = words(DEVICE_VARIABLES)
    return (
        "!has(c.envFrom) || c.envFrom.all(f, "
        f"!{names}.exists(name, name.startsWith(has(f.prefix) ? f.prefix : ''))) || "
        f"(has(c.env) && {names}.all(name, c.env.exists(e, e.name == name)))"
    )


def _annotations(variable: str) -> str:
    has = f"has({variable}.metadata.annotations)"
    return f"{variable} != null && {has} ? {variable}.metadata.annotations : {{}}"


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
    if variables:
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
