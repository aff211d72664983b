# SPDX-License-Identifier: Apache-2.0
"""Admission webhooks: selects those that match a request, calls them, applies their responses.

Mutating webhooks run one at a time, in the order of their configurations' names, and a second time
if `reinvocationPolicy: IfNeeded` requires it; validating webhooks run concurrently. Matching
checks rule, namespaceSelector, objectSelector and matchConditions in this order, as in
``staging/src/k8s.io/apiserver/pkg/admission/plugin/webhook`` (Kubernetes 1.34). A webhook is called
over HTTPS and trusted through its `caBundle` only.

The caller supplies objects in full (with kind and apiVersion) and gets full objects back.
"""

from __future__ import annotations

import base64
import binascii
import ssl
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import aiohttp
import anyio
import msgspec
from yarl import URL

from hami_sim.apiserver.cel import CelError, Program
from hami_sim.apiserver.errors import ApiError, Obj, bad_value, internal
from hami_sim.apiserver.errors import Cause as Cause  # noqa: PLC0414 - part of validate()'s type
from hami_sim.apiserver.patches import json_patch
from hami_sim.apiserver.selectors import selector_from_object
from hami_sim.apiserver.store import encode

if TYPE_CHECKING:
    from hami_sim.apiserver.auth import User
    from hami_sim.apiserver.resources import Resource
    from hami_sim.apiserver.store import Store

MUTATING: Final = "mutatingwebhookconfigurations.admissionregistration.k8s.io"
VALIDATING: Final = "validatingwebhookconfigurations.admissionregistration.k8s.io"
VARIABLES: Final = frozenset({"object", "oldObject", "request", "authorizer"})
_EXEMPT_GROUP: Final = "admissionregistration.k8s.io"
_OK_CODES: Final = range(200, 300)
_BAD_REQUEST: Final = 400


class Attributes(msgspec.Struct, kw_only=True):
    """Attributes of one request under admission; `obj` changes as webhooks mutate it."""

    resource: Resource
    subresource: str = ""
    kind: str
    kind_group: str = ""
    kind_version: str = "v1"
    operation: str
    namespace: str = ""
    name: str = ""
    obj: Obj | None = None
    old: Obj | None = None
    user: User
    dry_run: bool = False
    options: Obj | None = None
    warnings: list[str] = msgspec.field(default_factory=list)


class WebhookCall(msgspec.Struct, frozen=True, kw_only=True):
    """A record of one call, for tests to read."""

    webhook: str
    operation: str
    resource: str
    namespace: str
    name: str
    outcome: str
    """`allowed`, `denied` or `failed`."""


class Webhooks:
    """The two admission phases of one API server."""

    def __init__(
        self,
        store: Store,
        services: Mapping[tuple[str, str], str],
        *,
        default: Callable[[Resource, Obj], None],
    ) -> None:
        """Take the store that holds configurations, and `host:port` per (namespace, service)."""
        self._store = store
        self._services = services
        self._default = default
        self._programs: dict[str, Program] = {}
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._client: aiohttp.ClientSession | None = None
        self.calls: list[WebhookCall] = []

    async def close(self) -> None:
        """Close pooled connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    # -- phases

    async def mutate(self, attributes: Attributes) -> None:
        """Run mutating webhooks; `attributes.obj` becomes the changed object."""
        if attributes.resource.group == _EXEMPT_GROUP:
            return
        webhooks = self._registered(MUTATING)
        if not webhooks:
            return
        ran: list[tuple[Obj, int]] = []
        changes = 0
        for webhook in webhooks:
            if await self._wanted(webhook, attributes):
                changes += await self._mutate_with(webhook, attributes)
                ran.append((webhook, changes))
        for webhook, seen in ran:
            again = webhook.get("reinvocationPolicy") == "IfNeeded" and changes > seen
            if again and await self._wanted(webhook, attributes):
                changes += await self._mutate_with(webhook, attributes)

    async def _mutate_with(self, webhook: Obj, attributes: Attributes) -> int:
        response = await self._ask(webhook, attributes)
        if response is None or not response.get("patch"):
            return 0
        name = webhook["name"]
        try:
            changed = json_patch(attributes.obj, _patch_of(response))
        except (ValueError, binascii.Error, msgspec.DecodeError, ApiError) as error:
            return self._failed(webhook, f"failed to apply patch of {name}: {error}")
        if not isinstance(changed, dict):
            return self._failed(webhook, f"patch of {name} leaves no object")
        body = {key: value for key, value in changed.items() if key not in ("kind", "apiVersion")}
        self._default(attributes.resource, body)
        changed = {"kind": attributes.kind, "apiVersion": changed["apiVersion"], **body}
        if changed == attributes.obj:
            return 0
        attributes.obj = changed
        return 1

    async def validate(self, attributes: Attributes) -> None:
        """Run validating webhooks together; the first refusal in order counts."""
        if attributes.resource.group == _EXEMPT_GROUP:
            return
        webhooks = [
            webhook
            for webhook in self._registered(VALIDATING)
            if await self._wanted(webhook, attributes)
        ]
        refusals: dict[int, ApiError] = {}

        async def run(position: int, webhook: Obj) -> None:
            try:
                await self._ask(webhook, attributes)
            except ApiError as error:
                refusals[position] = error

        async with anyio.create_task_group() as group:
            for position, webhook in enumerate(webhooks):
                group.start_soon(run, position, webhook)
        if refusals:
            raise refusals[min(refusals)]

    # -- matching

    def _registered(self, key: str) -> list[Obj]:
        table = self._store.tables.get(key)
        if table is None:
            return []
        return [
            webhook
            for name in table.names()
            for webhook in table.rows[name].obj.get("webhooks") or ()
        ]

    async def _wanted(self, webhook: Obj, attributes: Attributes) -> bool:
        if not any(_rule_matches(rule, attributes) for rule in webhook.get("rules") or ()):
            return False
        if not self._namespace_selected(webhook, attributes):
            return False
        selector = selector_from_object(webhook.get("objectSelector") or {})
        if selector is not None and selector.terms:
            candidates = [
                (side.get("metadata") or {}).get("labels")
                for side in (attributes.obj, attributes.old)
                if side is not None
            ]
            if not any(selector.matches(labels) for labels in candidates):
                return False
        return self._conditions_hold(webhook, attributes)

    def _namespace_selected(self, webhook: Obj, attributes: Attributes) -> bool:
        selector = selector_from_object(webhook.get("namespaceSelector") or {})
        if selector is None or not selector.terms:
            return True
        if attributes.resource.key == "namespaces":
            source = attributes.obj or attributes.old or {}
            return selector.matches((source.get("metadata") or {}).get("labels"))
        if not attributes.namespace:
            return True
        namespace = self._store.get("namespaces", "", attributes.namespace)
        labels = namespace.obj["metadata"].get("labels") if namespace else {}
        return selector.matches(labels)

    def _conditions_hold(self, webhook: Obj, attributes: Attributes) -> bool:
        conditions = webhook.get("matchConditions") or ()
        if not conditions:
            return True
        env = {
            "object": attributes.obj,
            "oldObject": attributes.old,
            "request": _request(attributes, "", with_objects=False),
        }
        problem: str | None = None
        for condition in conditions:
            try:
                if not self._program(condition["expression"]).decide(env):
                    return False
            except CelError as error:
                problem = problem or f"expression '{condition['expression']}': {error}"
        if problem is None:
            return True
        if webhook.get("failurePolicy") == "Ignore":
            return False
        msg = f"failed evaluating match conditions of webhook {webhook['name']!r}: {problem}"
        raise ApiError(403, msg)

    def _program(self, expression: str) -> Program:
        if expression not in self._programs:
            self._programs[expression] = Program(expression, VARIABLES)
        return self._programs[expression]

    # -- calling

    async def _ask(self, webhook: Obj, attributes: Attributes) -> Obj | None:
        """Call one webhook; returns its response, or None when a failure is to be ignored."""
        name = webhook["name"]
        if attributes.dry_run and webhook.get("sideEffects") not in ("None", "NoneOnDryRun"):
            msg = f'admission webhook "{name}" does not support dry run'
            raise ApiError(400, msg)
        uid = str(uuid.uuid4())
        review = {
            "kind": "AdmissionReview",
            "apiVersion": "admission.k8s.io/v1",
            "request": _request(attributes, uid, with_objects=True),
        }
        try:
            answer = await self._post(webhook, encode(review))
            response = _response(answer, uid)
        except (aiohttp.ClientError, OSError, ssl.SSLError, TimeoutError, ValueError) as error:
            self._note(webhook, attributes, "failed")
            text = str(error) or "context deadline exceeded"
            if isinstance(error, TimeoutError):
                text = "context deadline exceeded"
            self._failed(webhook, f"failed to call webhook: {text}")
            return None
        attributes.warnings += [str(text) for text in response.get("warnings") or ()]
        if response.get("allowed") is True:
            self._note(webhook, attributes, "allowed")
            return response
        self._note(webhook, attributes, "denied")
        raise _denial(name, response.get("status") or {})

    def _note(self, webhook: Obj, attributes: Attributes, outcome: str) -> None:
        sub = f"/{attributes.subresource}" if attributes.subresource else ""
        self.calls.append(
            WebhookCall(
                webhook=webhook["name"],
                operation=attributes.operation,
                resource=attributes.resource.plural + sub,
                namespace=attributes.namespace,
                name=attributes.name,
                outcome=outcome,
            )
        )

    @staticmethod
    def _failed(webhook: Obj, why: str) -> int:
        if webhook.get("failurePolicy", "Fail") == "Ignore":
            return 0
        msg = f'failed calling webhook "{webhook["name"]}": {why}'
        raise internal(msg)

    async def _post(self, webhook: Obj, body: bytes) -> bytes:
        config = webhook["clientConfig"]
        timeout_s = webhook.get("timeoutSeconds", 10)
        url, server_name = self._address(config)
        url = url.update_query(timeout=f"{timeout_s}s")
        if self._client is None:
            self._client = aiohttp.ClientSession()
        with anyio.fail_after(timeout_s):
            async with self._client.post(
                url,
                data=body,
                headers={"Content-Type": "application/json", "Accept": "application/json"},
                ssl=self._context(config.get("caBundle") or ""),
                server_hostname=server_name,
            ) as reply:
                if reply.status not in _OK_CODES:
                    msg = f"unexpected status code {reply.status}: {await reply.text()}"
                    raise ValueError(msg)
                return await reply.read()

    def _address(self, config: Obj) -> tuple[URL, str | None]:
        if config.get("url"):
            return URL(config["url"]), None
        service = config["service"]
        namespace, name = service["namespace"], service["name"]
        target = self._services.get((namespace, name))
        if target is None:
            msg = f'service "{name}" not found'
            raise ValueError(msg)
        path = service.get("path") or "/"
        return URL(f"https://{target}{path}"), f"{name}.{namespace}.svc"

    def _context(self, bundle: str) -> ssl.SSLContext:
        if bundle not in self._contexts:
            context = ssl.create_default_context()
            if bundle:
                context = ssl.create_default_context(
                    cadata=base64.b64decode(bundle).decode("ascii")
                )
            self._contexts[bundle] = context
        return self._contexts[bundle]


def _rule_matches(rule: Obj, attributes: Attributes) -> bool:
    def listed(field: str, value: str) -> bool:
        return "*" in rule.get(field, ()) or value in rule.get(field, ())

    resource = attributes.resource
    scope = rule.get("scope") or "*"
    namespaced = resource.namespaced and resource.key != "namespaces"
    if scope != "*" and (scope == "Namespaced") != namespaced:
        return False
    return (
        listed("operations", attributes.operation)
        and listed("apiGroups", resource.group)
        and listed("apiVersions", resource.version)
        and any(
            _resource_matches(pattern, resource.plural, attributes.subresource)
            for pattern in rule.get("resources", ())
        )
    )


def _resource_matches(pattern: str, plural: str, subresource: str) -> bool:
    wanted, _, wanted_sub = pattern.partition("/")
    if wanted not in ("*", plural):
        return False
    if "/" not in pattern:
        return not subresource
    return wanted_sub in ("*", subresource)


def _request(attributes: Attributes, uid: str, *, with_objects: bool) -> Obj:
    resource = attributes.resource
    kind = {
        "group": attributes.kind_group,
        "version": attributes.kind_version,
        "kind": attributes.kind,
    }
    plural = {"group": resource.group, "version": resource.version, "resource": resource.plural}
    request: Obj = {
        "uid": uid,
        "kind": kind,
        "resource": plural,
        "requestKind": kind,
        "requestResource": plural,
        "operation": attributes.operation,
        "userInfo": attributes.user.to_json(),
        "dryRun": attributes.dry_run,
        "options": attributes.options,
    }
    if attributes.subresource:
        request["subResource"] = request["requestSubResource"] = attributes.subresource
    if attributes.name:
        request["name"] = attributes.name
    if attributes.namespace:
        request["namespace"] = attributes.namespace
    if with_objects:
        request["object"] = attributes.obj
        request["oldObject"] = attributes.old
    return request


def _patch_of(response: Obj) -> object:
    if response.get("patchType") != "JSONPatch":
        msg = f"unknown patch type {response.get('patchType')!r}"
        raise ValueError(msg)
    return msgspec.json.decode(base64.b64decode(response["patch"], validate=True))


def _response(answer: bytes, uid: str) -> Obj:
    try:
        review = msgspec.json.decode(answer)
    except msgspec.DecodeError as error:
        msg = f"couldn't get version/kind; json parse error: {error}"
        raise ValueError(msg) from error
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview":
        msg = (
            f"expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got {review}"
        )
        raise ValueError(msg)
    if review.get("apiVersion") != "admission.k8s.io/v1":
        msg = (
            "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got "
            f"{review.get('apiVersion')}, Kind=AdmissionReview"
        )
        raise ValueError(msg)
    response = review.get("response")
    if not response or not isinstance(response, dict):
        raise ValueError("webhook response was absent")
    if response.get("uid") != uid:
        msg = f'expected response.uid="{uid}", got "{response.get("uid", "")}"'
        raise ValueError(msg)
    return response


def _denial(name: str, status: Obj) -> ApiError:
    denied = f'admission webhook "{name}" denied the request'
    if status.get("message"):
        text = f"{denied}: {status['message']}"
    elif status.get("reason"):
        text = f"{denied}: {status['reason']}"
    else:
        text = f"{denied} without explanation"
    code = status.get("code") or 0
    return ApiError(
        max(code, _BAD_REQUEST),
        text,
        reason=status.get("reason", ""),
        details=status.get("details"),
    )


def check_configuration(config: Obj) -> list[Cause]:
    """Check what the server checks of a webhook configuration when it is written."""
    found: list[Cause] = []
    names: set[str] = set()
    for position, webhook in enumerate(config.get("webhooks") or ()):
        path = f"webhooks[{position}]"
        name = webhook.get("name", "")
        if name.count(".") < 2:  # noqa: PLR2004 - host, domain, top level
            found.append(
                bad_value(
                    f"{path}.name",
                    name,
                    "should be a domain with at least three segments separated by dots",
                )
            )
        if name in names:
            found.append(bad_value(f"{path}.name", name, "must be unique"))
        names.add(name)
        found += _check_webhook(path, webhook)
    return found


def _check_webhook(path: str, webhook: Obj) -> list[Cause]:
    found: list[Cause] = []
    config = webhook.get("clientConfig") or {}
    if bool(config.get("url")) == bool(config.get("service")):
        found.append(
            bad_value(f"{path}.clientConfig", "", "exactly one of url or service is required")
        )
    if config.get("url") and not str(config["url"]).startswith("https://"):
        found.append(
            bad_value(
                f"{path}.clientConfig.url",
                config["url"],
                "'https' is the only allowed URL scheme; desired format: https://host[/path]",
            )
        )
    if webhook.get("sideEffects") not in ("None", "NoneOnDryRun"):
        found.append(
            bad_value(
                f"{path}.sideEffects",
                webhook.get("sideEffects", ""),
                "must specify a known side effect policy: None or NoneOnDryRun",
            )
        )
    if not webhook.get("admissionReviewVersions"):
        found.append(
            bad_value(f"{path}.admissionReviewVersions", "", "must specify one of v1, v1beta1")
        )
    timeout_s = webhook.get("timeoutSeconds", 10)
    if not 1 <= timeout_s <= 30:  # noqa: PLR2004 - the API's range
        found.append(
            bad_value(
                f"{path}.timeoutSeconds",
                timeout_s,
                "the timeout value must be between 1 and 30 seconds",
            )
        )
    for number, condition in enumerate(webhook.get("matchConditions") or ()):
        try:
            Program(condition.get("expression", ""), VARIABLES)
        except CelError as error:
            found.append(
                bad_value(
                    f"{path}.matchConditions[{number}].expression",
                    condition.get("expression", ""),
                    f"compilation failed: ERROR: {error}",
                )
            )
    return found


def default_configuration(config: Obj, *, mutating: bool) -> None:
    """Fill in what the server fills in for a webhook configuration."""
    for webhook in config.get("webhooks") or ():
        for field, value in (
            ("failurePolicy", "Fail"),
            ("matchPolicy", "Equivalent"),
            ("timeoutSeconds", 10),
            ("namespaceSelector", {}),
            ("objectSelector", {}),
        ):
            webhook.setdefault(field, value)
        if mutating:
            webhook.setdefault("reinvocationPolicy", "Never")
        for rule in webhook.get("rules") or ():
            rule.setdefault("scope", "*")
        service = (webhook.get("clientConfig") or {}).get("service")
        if service:
            service.setdefault("port", 443)
