# SPDX-License-Identifier: Apache-2.0
"""HTTP in front of the operations: one handler for every path.

Per request: authenticate → parse the path → injected faults → authorize → dispatch; whatever is
refused below becomes a Status. Forms of bodies and answers are in `forms`, lists and watches in
their own modules. A watch is noted in the audit log when it begins, everything else when it ends.
Obeys https://kubernetes.io/docs/reference/using-api/api-concepts/ (1.34).
"""

from __future__ import annotations

import logging
from typing import Final

import anyio
from aiohttp import web

from hami_sim.apiserver import apply, control, errors, subresources
from hami_sim.apiserver.auth import ANONYMOUS, AuditEntry, RequestInfo, User, admin
from hami_sim.apiserver.calls import Call, DeleteOptions
from hami_sim.apiserver.discovery import AGGREGATED, Discovery
from hami_sim.apiserver.errors import ApiError, Obj
from hami_sim.apiserver.faults import Fault
from hami_sim.apiserver.forms import (
    PATCH_TYPES,
    Form,
    Writer,
    abort,
    accepted,
    is_true,
    json_response,
    read_body,
    status_response,
)
from hami_sim.apiserver.lists import page, read_options
from hami_sim.apiserver.patches import json_patch, merge_patch, strategic_merge
from hami_sim.apiserver.resources import Resource, Subresource
from hami_sim.apiserver.state import State
from hami_sim.apiserver.store import encode
from hami_sim.apiserver.watches import Watches

_LOG: Final = logging.getLogger(__name__)
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/livez", "/version"})


class Routes:
    """The one HTTP handler of a server."""

    def __init__(self, state: State, discovery: Discovery) -> None:
        self._state = state
        self._operations = state.operations
        self._discovery = discovery
        self._writer = Writer(state.operations, state.settings.clock)
        self.watches = Watches(state.store, self._writer, state.settings)

    # -- one request

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request and note it in the audit log."""
        info = RequestInfo(verb=request.method.lower(), path=request.path)
        warnings: list[str] = []
        try:
            user = self._authenticate(request)
            info, resource = self._parse(request, user)
            fault = self._state.faults.take(info)
            if fault is not None:
                refused = await _before(fault, request)
                if refused is not None:
                    self._audit(info, request, fault.code)
                    return refused
            self._authorize(user, info)
            response = await self._dispatch(request, info, resource, user, warnings)
            if fault is not None and fault.action == "lose-response":
                abort(request)
        except ApiError as error:
            response = status_response(error)
        except Exception as error:  # noqa: BLE001 - the loop's top: one request must not end all
            _LOG.exception("request failed", extra={"path": request.path})
            response = status_response(errors.internal(repr(error)))
        for warning in dict.fromkeys(warnings):
            if not response.prepared:
                escaped = warning.replace("\\", "\\\\").replace('"', '\\"')
                response.headers.add("Warning", f'299 - "{escaped}"')
        if info.verb != "watch" or response.status != 200:  # noqa: PLR2004 - noted when it began
            self._audit(info, request, response.status)
        return response

    def _audit(self, info: RequestInfo, request: web.Request, code: int) -> None:
        self._state.audit.append(
            AuditEntry(
                user=info.user,
                verb=info.verb,
                resource=info.resource,
                subresource=info.subresource,
                namespace=info.namespace,
                name=info.name,
                code=code,
                user_agent=request.headers.get("User-Agent", ""),
                path=request.path,
            )
        )

    def _authenticate(self, request: web.Request) -> User:
        header = request.headers.get("Authorization", "")
        if header.startswith("Bearer "):
            user = self._state.tokens.user(header[len("Bearer ") :].strip())
            if user is None:
                raise errors.unauthorized()
            return user
        settings = self._state.settings
        if settings.anonymous or request.path in _OPEN_PATHS:
            return ANONYMOUS
        if settings.open_http and not settings.tls:
            return admin()
        raise errors.unauthorized()

    def _authorize(self, user: User, info: RequestInfo) -> None:
        if info.path in _OPEN_PATHS:
            return
        verdict = self._state.settings.authorize(user, info)
        if verdict is True:
            return
        sub = f"/{info.subresource}" if info.subresource else ""
        scope = (
            f' in the namespace "{info.namespace}"' if info.namespace else " at the cluster scope"
        )
        why = (
            f'User "{user.name}" cannot {info.verb} resource "{info.resource}{sub}" in API group '
            f'"{info.group}"{scope}'
        )
        if not info.resource:
            why = f'User "{user.name}" cannot {info.verb} path "{info.path}"'
        if isinstance(verdict, str):
            why = f"{why}: {verdict}"
        raise errors.forbidden(info.resource or info.path, info.name, why, group=info.group)

    def _parse(self, request: web.Request, user: User) -> tuple[RequestInfo, Resource | None]:
        parts = [part for part in request.path.split("/") if part]
        verb = request.method.lower()
        group, version, rest = "", "", parts
        match parts:
            case ["api", version, *rest] if rest:
                pass
            case ["apis", group, version, *rest] if rest:
                pass
            case _:
                return RequestInfo(verb=verb, path=request.path, user=user.name), None
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):  # noqa: PLR2004 - namespaces/NAME/...
            namespace, rest = rest[1], rest[2:]
        resource = self._state.table.at_path(group, version, rest[0])
        if resource is None or len(rest) > 3:  # noqa: PLR2004 - plural/name/subresource
            raise errors.path_not_found()
        if namespace and not resource.namespaced:
            raise errors.path_not_found()
        name = rest[1] if len(rest) > 1 else ""
        verb = _verb(request, named=bool(name))
        if verb == "post" and len(rest) > 2:  # noqa: PLR2004 - a subresource is created
            verb = "create"
        return (
            RequestInfo(
                verb=verb,
                group=group,
                version=version,
                resource=resource.plural,
                subresource=rest[2] if len(rest) > 2 else "",  # noqa: PLR2004 - third part
                namespace=namespace,
                name=name,
                path=request.path,
                user=user.name,
            ),
            resource,
        )

    # -- dispatch

    async def _dispatch(
        self,
        request: web.Request,
        info: RequestInfo,
        resource: Resource | None,
        user: User,
        warnings: list[str],
    ) -> web.StreamResponse:
        if resource is None:
            return await self._plain(request, user)
        dry_run = request.query.getall("dryRun", [])
        if dry_run and dry_run != ["All"]:
            raise errors.bad_request(f"Invalid value: {dry_run}: supported values: All")
        call = Call(
            resource=resource,
            subresource=info.subresource,
            namespace=info.namespace,
            name=info.name,
            user=user,
            dry_run=bool(dry_run),
            field_manager=request.query.get("fieldManager", ""),
            force=is_true(request.query.get("force", "")),
            warnings=warnings,
        )
        form = accepted(request)
        if info.subresource:
            return await self._dispatch_sub(request, call, form)
        across = info.verb in ("list", "watch") or bool(info.namespace)
        if info.verb not in resource.verbs or (resource.namespaced and not across):
            raise errors.method_not_allowed()
        return await self._dispatch_verb(request, call, info, form)

    async def _dispatch_verb(
        self, request: web.Request, call: Call, info: RequestInfo, form: Form
    ) -> web.StreamResponse:
        match info.verb:
            case "get":
                return self._writer.one(request, call, self._operations.get(call), form)
            case "list":
                return self._list(request, call, form)
            case "watch":
                return await self.watches.serve(
                    request, call, info, form, begun=lambda: self._audit(info, request, 200)
                )
            case "create":
                return await self._create(request, call, form)
            case "update":
                body = await self._body(request)
                stored, created = await self._operations.replace(call, body)
                return self._writer.one(request, call, stored, form, code=201 if created else 200)
            case "patch":
                return await self._patch(request, call, form)
            case "delete":
                return await self._delete(request, call, form)
            case _:
                return await self._delete_collection(request, call)

    async def _dispatch_sub(
        self, request: web.Request, call: Call, form: Form
    ) -> web.StreamResponse:
        sub = call.resource.subresource(call.subresource)
        if sub is None:
            raise errors.path_not_found()
        verb = _verb(request, named=True)
        if verb == "post":
            verb = "create"
        if verb not in sub.verbs:
            raise errors.method_not_allowed()
        if verb == "create":
            return await self._act(request, call, sub)
        if verb == "get":
            return self._writer.one(request, call, self._operations.get(call), form)
        if verb == "patch":
            return await self._patch(request, call, form)
        stored, _ = await self._operations.replace(call, await self._body(request))
        return self._writer.one(request, call, stored, form)

    async def _act(self, request: web.Request, call: Call, sub: Subresource) -> web.Response:
        body = await self._body(request)
        if sub.name == "binding":
            answer = await subresources.bind(self._operations, call, sub, body)
        elif sub.name == "eviction":
            answer = await subresources.evict(self._operations, call, sub, body)
        else:
            answer = self._state.tokens.issue(self._operations, call, body)
        return json_response(answer, code=201)

    async def _create(self, request: web.Request, call: Call, form: Form) -> web.StreamResponse:
        body = await self._body(request)
        if call.resource.key == "bindings":
            return await self._old_binding(call, body)
        if call.resource.verbs == ("create",):
            answer = subresources.review(
                call, body, self._state.tokens, self._state.settings.authorize
            )
            return json_response(answer, code=201)
        stored = await self._operations.create(call, body)
        return self._writer.one(request, call, stored, form, code=201)

    async def _old_binding(self, call: Call, body: object) -> web.Response:
        pods = self._state.table.by_key("pods")
        sub = pods.subresource("binding")
        name = (body.get("metadata") or {}).get("name", "") if isinstance(body, dict) else ""
        if sub is None or not name:
            raise errors.bad_request("name is required")
        target = Call(
            resource=pods,
            subresource="binding",
            namespace=call.namespace,
            name=name,
            user=call.user,
            dry_run=call.dry_run,
            warnings=call.warnings,
        )
        return json_response(await subresources.bind(self._operations, target, sub, body), code=201)

    async def _patch(self, request: web.Request, call: Call, form: Form) -> web.Response:
        kind = request.content_type
        if kind not in PATCH_TYPES:
            raise errors.unsupported_media_type(PATCH_TYPES)
        body = await self._body(request)
        if kind == "application/apply-patch+yaml":
            stored, created = await apply.apply(self._operations, call, body)
            return self._writer.one(request, call, stored, form, code=201 if created else 200)

        def produce(current: Obj) -> Obj:
            if kind == "application/json-patch+json":
                changed = json_patch(current, body)
            elif not isinstance(body, dict):
                raise errors.bad_request("a merge patch must be an object")
            elif kind == "application/merge-patch+json":
                changed = merge_patch(current, body)
            else:
                changed = strategic_merge(current, body, kind=call.resource.kind)
            return _as_object(changed)

        stored = await self._operations.update(call, produce)
        return self._writer.one(request, call, stored, form)

    async def _delete(self, request: web.Request, call: Call, form: Form) -> web.Response:
        options = await self._delete_options(request, call)
        stored, gone = await self._operations.delete(call, options)
        if call.key in ("pods", "namespaces") or not gone:
            return self._writer.one(request, call, stored, form)
        details = {"name": call.name, "kind": call.resource.plural}
        if call.resource.group:
            details["group"] = call.resource.group
        details["uid"] = stored.obj["metadata"]["uid"]
        return json_response(errors.success_status(details=details))

    async def _delete_options(self, request: web.Request, call: Call) -> DeleteOptions:
        body = await self._body(request, optional=True)
        options = dict(body) if isinstance(body, dict) else {}
        if request.query.get("gracePeriodSeconds"):
            try:
                options["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
            except ValueError as error:
                raise errors.bad_request(f"gracePeriodSeconds: {error}") from error
        if request.query.get("propagationPolicy"):
            options["propagationPolicy"] = request.query["propagationPolicy"]
        if options.get("dryRun") == ["All"]:
            call.dry_run = True
        return subresources.read_delete_options(options)

    async def _delete_collection(self, request: web.Request, call: Call) -> web.Response:
        options = read_options(request, call)
        delete_options = await self._delete_options(request, call)
        gone = await self._operations.delete_collection(call, options.wanted, delete_options)
        metadata = {"resourceVersion": str(self._state.store.revision)}
        return self._writer.many(request, call, gone, metadata, "")

    def _list(self, request: web.Request, call: Call, form: Form) -> web.Response:
        found, metadata = page(self._state.store, call, read_options(request, call))
        return self._writer.many(request, call, found, metadata, form)

    async def _body(self, request: web.Request, *, optional: bool = False) -> object:
        limit = self._state.settings.max_body_bytes
        return await read_body(request, max_bytes=limit, optional=optional)

    # -- paths that are not resources

    async def _plain(self, request: web.Request, user: User) -> web.Response:
        path = request.path.rstrip("/") or "/"
        if path in ("/healthz", "/readyz", "/livez"):
            return web.Response(text="ok")
        if path.startswith(control.PREFIX):
            return await control.serve(self._state, self.watches, request, user)
        if request.method != "GET":
            raise errors.method_not_allowed()
        if path == "/":
            listed = ["/api", "/apis", "/healthz", "/openapi/v3", "/version"]
            return json_response({"paths": listed})
        if AGGREGATED.split(";")[1] in request.headers.get("Accept", "").replace(" ", ""):
            aggregated = self._discovery.aggregated(path)
            if aggregated is not None:
                return web.Response(body=encode(aggregated), headers={"Content-Type": AGGREGATED})
        document = self._discovery.document(path)
        if document is None:
            raise errors.path_not_found()
        return json_response(document)


def _as_object(value: object) -> Obj:
    if not isinstance(value, dict):
        raise errors.bad_request("the patch leaves no object")
    return value


def _verb(request: web.Request, *, named: bool) -> str:
    match request.method:
        case "GET" | "HEAD":
            if named:
                return "get"
            return "watch" if is_true(request.query.get("watch", "")) else "list"
        case "POST":
            return "create" if not named else "post"
        case "PUT":
            return "update"
        case "PATCH":
            return "patch"
        case "DELETE":
            return "delete" if named else "deletecollection"
        case other:
            return other.lower()


async def _before(fault: Fault, request: web.Request) -> web.Response | None:
    """Apply a fault before the request is served; None lets it go on."""
    if fault.delay_s:
        await anyio.sleep(fault.delay_s)
    if fault.action == "cut":
        abort(request)
        return web.Response(status=fault.code)
    if fault.action == "deny":
        return status_response(
            ApiError(fault.code, fault.message, retry_after_s=fault.retry_after_s)
        )
    return None
