# SPDX-License-Identifier: Apache-2.0
"""POSTs that are actions rather than objects: binding, eviction, tokens and reviews.

Each takes the decoded call and body and returns the object or Status that the client sees.
Binding and eviction texts follow ``pkg/registry/core/pod/{storage,rest}`` (Kubernetes 1.34).
"""

from __future__ import annotations

import secrets
from typing import Final

from hami_sim.apiserver import disruption, errors, pods
from hami_sim.apiserver.admission import Attributes
from hami_sim.apiserver.auth import Authorizer, RequestInfo, User, service_account
from hami_sim.apiserver.calls import Call, DeleteOptions, rfc3339
from hami_sim.apiserver.errors import Obj, clone
from hami_sim.apiserver.operations import Operations
from hami_sim.apiserver.resources import Subresource

_TOKEN_S: Final = 3600


async def _admit(operations: Operations, call: Call, sub: Subresource, body: Obj) -> Obj:
    """Run the webhooks on the body of an action."""
    api_version = f"{sub.group}/{sub.version}" if sub.group else sub.version
    attributes = Attributes(
        resource=call.resource,
        subresource=sub.name,
        kind=sub.kind,
        kind_group=sub.group,
        kind_version=sub.version,
        operation="CREATE",
        namespace=call.namespace,
        name=call.name,
        obj={"kind": sub.kind, "apiVersion": api_version, **body},
        user=call.user,
        dry_run=call.dry_run,
        options={"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        warnings=call.warnings,
    )
    await operations.webhooks.mutate(attributes)
    await operations.webhooks.validate(attributes)
    return operations.decode(call, attributes.obj, sub)


async def bind(operations: Operations, call: Call, sub: Subresource, body: object) -> Obj:
    """Assign a pod to a node and merge the Binding's annotations, in one transaction."""
    binding = operations.decode(call, body, sub)
    if binding["metadata"].setdefault("name", call.name) != call.name:
        raise errors.bad_request("name in URL does not match name in Binding object")
    binding = await _admit(operations, call, sub, binding)
    target = binding.get("target") or {}
    causes = []
    if target.get("kind") not in (None, "", "Node"):
        causes.append(errors.unsupported("target.kind", target["kind"], ("Node", "<empty>")))
    if not target.get("name"):
        causes.append(errors.required("target.name"))
    if causes:
        raise errors.invalid("Binding", call.name, causes)
    current = operations.get(call)
    metadata = binding["metadata"]
    _check_binding(call, metadata, current.obj)
    pod = clone(current.obj)
    pod["spec"]["nodeName"] = target["name"]
    if metadata.get("annotations"):
        pod["metadata"].setdefault("annotations", {}).update(metadata["annotations"])
    if operations.settings.binding_labels and metadata.get("labels"):
        pod["metadata"].setdefault("labels", {}).update(metadata["labels"])
    pod["status"].pop("nominatedNodeName", None)
    pods.set_condition(pod["status"], "PodScheduled", "True", operations.now())
    if not call.dry_run:
        operations.store.put("pods", pod)
    return errors.success_status(code=201)


def _check_binding(call: Call, metadata: Obj, pod: Obj) -> None:
    held = pod["metadata"]
    for what, wanted, found in (
        ("UID", metadata.get("uid"), held["uid"]),
        ("ResourceVersion", metadata.get("resourceVersion"), held["resourceVersion"]),
    ):
        if wanted and wanted != found:
            why = (
                f"Precondition failed: {what} in precondition: {wanted}, {what} in object meta: "
                f"{found}"
            )
            raise errors.conflict("pods", call.name, why)
    why = ""
    if held.get("deletionTimestamp"):
        why = f"pod {call.name} is being deleted, cannot be assigned to a host"
    elif pod["spec"].get("nodeName"):
        why = f'pod {call.name} is already assigned to node "{pod["spec"]["nodeName"]}"'
    elif pod["spec"].get("schedulingGates"):
        why = f"pod {call.name} has non-empty .spec.schedulingGates"
    if why:
        raise errors.conflict("pods/binding", call.name, why)


async def evict(operations: Operations, call: Call, sub: Subresource, body: object) -> Obj:
    """Delete a pod unless its disruption budget is used up."""
    eviction = operations.decode(call, body, sub)
    if eviction["metadata"].setdefault("name", call.name) != call.name:
        raise errors.bad_request("name in URL does not match name in Eviction object")
    eviction = await _admit(operations, call, sub, eviction)
    options = read_delete_options(eviction.get("deleteOptions") or {})
    current = operations.get(call)
    metadata, phase = current.obj["metadata"], current.obj["status"].get("phase")
    exempt = metadata.get("deletionTimestamp") or phase in ("Succeeded", "Failed", "Pending")
    if not exempt:
        disruption.spend(operations.store, current.obj, operations.now(), dry_run=call.dry_run)
    await operations.delete(
        Call(
            resource=call.resource,
            namespace=call.namespace,
            name=call.name,
            user=call.user,
            dry_run=call.dry_run,
            warnings=call.warnings,
        ),
        options,
    )
    return errors.success_status(code=201)


def read_delete_options(body: Obj) -> DeleteOptions:
    """Read DeleteOptions from JSON."""
    preconditions = body.get("preconditions") or {}
    grace_s = body.get("gracePeriodSeconds")
    if grace_s is not None and (isinstance(grace_s, bool) or not isinstance(grace_s, int)):
        raise errors.bad_request("gracePeriodSeconds is not an integer")
    propagation = body.get("propagationPolicy")
    if propagation is None and body.get("orphanDependents") is not None:
        propagation = "Orphan" if body["orphanDependents"] else "Background"
    return DeleteOptions(
        grace_s=grace_s,
        propagation=propagation,
        uid=preconditions.get("uid"),
        resource_version=preconditions.get("resourceVersion"),
    )


class Tokens:
    """Bearer tokens: the static ones and those issued for service accounts."""

    def __init__(self, static: dict[str, User]) -> None:
        self._users = static

    def user(self, token: str) -> User | None:
        """Find the identity behind a token."""
        return self._users.get(token)

    def issue(self, operations: Operations, call: Call, body: object) -> Obj:
        """Serve a TokenRequest for a service account."""
        account = operations.get(call)
        request = body if isinstance(body, dict) else {}
        spec = request.get("spec") or {}
        token = f"sa.{secrets.token_urlsafe(24)}"
        self._users[token] = service_account(
            call.namespace, call.name, account.obj["metadata"]["uid"]
        )
        lifetime_s = spec.get("expirationSeconds") or _TOKEN_S
        end = rfc3339(operations.settings.clock() + lifetime_s)
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": call.name, "namespace": call.namespace},
            "spec": {"audiences": [], "expirationSeconds": lifetime_s, **spec},
            "status": {"token": token, "expirationTimestamp": end},
        }


def review(call: Call, body: object, tokens: Tokens, authorize: Authorizer) -> Obj:
    """Answer the review kinds, which are asked and never stored."""
    asked = body if isinstance(body, dict) else {}
    spec = asked.get("spec") or {}
    answer: Obj = {
        "kind": call.resource.kind,
        "apiVersion": call.resource.api_version,
        "metadata": {},
        "spec": spec,
    }
    match call.resource.kind:
        case "TokenReview":
            user = tokens.user(spec.get("token", ""))
            answer["status"] = (
                {"authenticated": True, "user": user.to_json()}
                if user
                else {"error": "[invalid bearer token, unknown]"}
            )
        case "SelfSubjectReview":
            del answer["spec"]
            answer["status"] = {"userInfo": call.user.to_json()}
        case kind:
            user = call.user
            if kind == "SubjectAccessReview":
                user = User(name=spec.get("user", ""), groups=tuple(spec.get("groups") or ()))
            verdict = authorize(user, _asked_for(spec))
            answer["status"] = {"allowed": verdict is True}
            if isinstance(verdict, str):
                answer["status"]["reason"] = verdict
    return answer


def _asked_for(spec: Obj) -> RequestInfo:
    attributes = spec.get("resourceAttributes") or {}
    plain = spec.get("nonResourceAttributes") or {}
    return RequestInfo(
        verb=attributes.get("verb") or plain.get("verb", ""),
        group=attributes.get("group", ""),
        version=attributes.get("version", ""),
        resource=attributes.get("resource", ""),
        subresource=attributes.get("subresource", ""),
        namespace=attributes.get("namespace", ""),
        name=attributes.get("name", ""),
        path=plain.get("path", ""),
        user=spec.get("user", ""),
    )
