# SPDX-License-Identifier: Apache-2.0
"""HTTP in front of the operations: paths, media types, lists, watches and Status answers.

One handler serves every path. Per request: authenticate → parse the path → injected faults →
authorize → dispatch; whatever is refused below becomes a Status. Bodies are JSON or YAML, and
protobuf for a few kinds (see `protobuf`); answers are JSON, whatever else a client would accept.
Obeys https://kubernetes.io/docs/reference/using-api/api-concepts/ (1.34).
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal

import anyio
import msgspec
import yaml
from aiohttp import web

from hami_sim.apiserver import apply, errors, protobuf, subresources, tables
from hami_sim.apiserver.auth import ADMIN_GROUP, ANONYMOUS, AuditEntry, RequestInfo, User, admin
from hami_sim.apiserver.discovery import AGGREGATED, Discovery
from hami_sim.apiserver.errors import ApiError, Obj
from hami_sim.apiserver.faults import Fault, Match
from hami_sim.apiserver.operations import Call, DeleteOptions, Operations
from hami_sim.apiserver.patches import json_patch, merge_patch, strategic_merge
from hami_sim.apiserver.resources import Resource, Subresource
from hami_sim.apiserver.selectors import (
    FieldSelector,
    FieldTerm,
    LabelSelector,
    parse_fields,
    parse_labels,
)
from hami_sim.apiserver.store import Delivery, Filter, Stored, Subscription, encode

if TYPE_CHECKING:
    from hami_sim.apiserver.server import ApiServer

_LOG: Final = logging.getLogger(__name__)
_JSON: Final = "application/json"
_YAML: Final = "application/yaml"
_PROTOBUF: Final = "application/vnd.kubernetes.protobuf"
_CBOR: Final = "application/cbor"
_PATCH_TYPES: Final = (
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
)
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/livez", "/version"})
_BOOKMARK_END: Final = "k8s.io/initial-events-end"
_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FAULT_PATH: Final = "/hami-sim/faults"
_WATCH_PATH: Final = "/hami-sim/drop-watches"
_HISTORY_PATH: Final = "/hami-sim/forget-history"
_AUDIT_PATH: Final = "/hami-sim/audit"

TableMode = Literal["", "table", "partial"]


class ListOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list or watch."""

    wanted: Filter
    limit: int = 0
    continue_: str = ""
    resource_version: str = ""
    match: str = ""
    watch: bool = False
    bookmarks: bool = False
    initial_events: bool = False
    timeout_s: float | None = None
    selects: bool = False


class OpenWatch(msgspec.Struct, frozen=True, kw_only=True):
    """A watch in progress, so that tests may end it."""

    info: RequestInfo
    subscription: Subscription
    abort: Callable[[], None]


class Routes:
    """The one HTTP handler of a server."""

    def __init__(self, server: ApiServer, operations: Operations, discovery: Discovery) -> None:
        self._server = server
        self._operations = operations
        self._discovery = discovery
        self._watches: dict[int, OpenWatch] = {}

    # -- one request

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request and note it in the audit log."""
        info = RequestInfo(verb=request.method.lower(), path=request.path)
        warnings: list[str] = []
        try:
            user = self._authenticate(request)
            info, resource = self._parse(request, user)
            fault = self._server.faults.take(info)
            if fault is not None:
                refused = await _before(fault, request)
                if refused is not None:
                    self._audit(info, request, fault.code)
                    return refused
            self._authorize(user, info)
            response = await self._dispatch(request, info, resource, user, warnings)
            if fault is not None and fault.action == "lose-response":
                _abort(request)
        except ApiError as error:
            response = _status_response(error)
        except Exception as error:  # noqa: BLE001 - the loop's top: one request must not end all
            _LOG.exception("request failed", extra={"path": request.path})
            response = _status_response(errors.internal(repr(error)))
        for warning in dict.fromkeys(warnings):
            if not response.prepared:
                escaped = warning.replace("\\", "\\\\").replace('"', '\\"')
                response.headers.add("Warning", f'299 - "{escaped}"')
        self._audit(info, request, response.status)
        return response

    def _audit(self, info: RequestInfo, request: web.Request, code: int) -> None:
        self._server.audit.append(
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
            user = self._server.tokens.user(header[len("Bearer ") :].strip())
            if user is None:
                raise errors.unauthorized()
            return user
        settings = self._server.settings
        if settings.anonymous or request.path in _OPEN_PATHS:
            return ANONYMOUS
        if settings.open_http and not settings.tls:
            return admin()
        raise errors.unauthorized()

    def _authorize(self, user: User, info: RequestInfo) -> None:
        if info.path in _OPEN_PATHS:
            return
        verdict = self._server.settings.authorize(user, info)
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
        resource = self._server.table.at_path(group, version, rest[0])
        if resource is None or len(rest) > 3:  # noqa: PLR2004 - plural/name/subresource
            raise errors.path_not_found()
        if namespace and not resource.namespaced:
            raise errors.path_not_found()
        name = rest[1] if len(rest) > 1 else ""
        verb = _verb(request, named=bool(name))
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
            force=request.query.get("force", "") in _TRUE,
            warnings=warnings,
        )
        mode = _accepted(request)
        if info.subresource:
            return await self._dispatch_sub(request, call, mode)
        across = info.verb in ("list", "watch") or bool(info.namespace)
        if info.verb not in resource.verbs or (resource.namespaced and not across):
            raise errors.method_not_allowed()
        return await self._dispatch_verb(request, call, info, mode)

    async def _dispatch_verb(
        self, request: web.Request, call: Call, info: RequestInfo, mode: TableMode
    ) -> web.StreamResponse:
        match info.verb:
            case "get":
                return self._answer(request, call, self._operations.get(call), mode)
            case "list":
                return self._list(request, call, mode)
            case "watch":
                return await self._watch(request, call, info, mode)
            case "create":
                return await self._create(request, call, mode)
            case "update":
                body = await self._body(request)
                stored, created = await self._operations.replace(call, body)
                return self._answer(request, call, stored, mode, code=201 if created else 200)
            case "patch":
                return await self._patch(request, call, mode)
            case "delete":
                return await self._delete(request, call, mode)
            case _:
                return await self._delete_collection(request, call)

    async def _dispatch_sub(
        self, request: web.Request, call: Call, mode: TableMode
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
            return self._answer(request, call, self._operations.get(call), mode)
        if verb == "patch":
            return await self._patch(request, call, mode)
        stored, _ = await self._operations.replace(call, await self._body(request))
        return self._answer(request, call, stored, mode)

    async def _act(self, request: web.Request, call: Call, sub: Subresource) -> web.Response:
        body = await self._body(request)
        if sub.name == "binding":
            answer = await subresources.bind(self._operations, call, sub, body)
        elif sub.name == "eviction":
            answer = await subresources.evict(self._operations, call, sub, body)
        else:
            answer = self._server.tokens.issue(self._operations, call, body)
        return _json(answer, code=201)

    async def _create(
        self, request: web.Request, call: Call, mode: TableMode
    ) -> web.StreamResponse:
        body = await self._body(request)
        if call.resource.key == "bindings":
            return await self._old_binding(call, body)
        if call.resource.verbs == ("create",):
            answer = subresources.review(
                call, body, self._server.tokens, self._server.settings.authorize
            )
            return _json(answer, code=201)
        stored = await self._operations.create(call, body)
        return self._answer(request, call, stored, mode, code=201)

    async def _old_binding(self, call: Call, body: object) -> web.Response:
        pods = self._server.table.by_key("pods")
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
        return _json(await subresources.bind(self._operations, target, sub, body), code=201)

    async def _patch(self, request: web.Request, call: Call, mode: TableMode) -> web.Response:
        kind = request.content_type
        if kind not in _PATCH_TYPES:
            raise errors.unsupported_media_type(_PATCH_TYPES)
        body = await self._body(request)
        if kind == "application/apply-patch+yaml":
            stored, created = await apply.apply(self._operations, call, body)
            return self._answer(request, call, stored, mode, code=201 if created else 200)

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
        return self._answer(request, call, stored, mode)

    async def _delete(self, request: web.Request, call: Call, mode: TableMode) -> web.Response:
        options = await self._delete_options(request, call)
        stored, gone = await self._operations.delete(call, options)
        if call.key in ("pods", "namespaces") or not gone:
            return self._answer(request, call, stored, mode)
        details = {"name": call.name, "kind": call.resource.plural}
        if call.resource.group:
            details["group"] = call.resource.group
        details["uid"] = stored.obj["metadata"]["uid"]
        return _json(errors.success_status(details=details))

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
        options = self._list_options(request, call)
        delete_options = await self._delete_options(request, call)
        gone = await self._operations.delete_collection(call, options.wanted, delete_options)
        return self._list_response(call, gone, {"resourceVersion": str(self._revision)})

    @property
    def _revision(self) -> int:
        return self._server.store.revision

    # -- bodies and answers

    async def _body(self, request: web.Request, *, optional: bool = False) -> object:
        kind = request.content_type
        if kind == _CBOR:
            raise errors.unsupported_media_type((_JSON, _YAML, *_PATCH_TYPES))
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise errors.too_large(self._server.settings.max_body_bytes) from error
        if not raw:
            if optional:
                return None
            raise errors.bad_request("the request has no body")
        if kind == _PROTOBUF:
            return _from_protobuf(raw)
        try:
            if kind.endswith("yaml"):
                return msgspec.yaml.decode(raw)
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, yaml.YAMLError) as error:
            raise errors.bad_request(
                f"couldn't get version/kind; json parse error: {error}"
            ) from error

    def _answer(
        self,
        request: web.Request,
        call: Call,
        stored: Stored,
        mode: TableMode,
        *,
        code: int = 200,
    ) -> web.Response:
        if mode:
            metadata = {"resourceVersion": stored.obj["metadata"].get("resourceVersion", "")}
            return _json(self._as_mode(request, call, [stored.obj], mode, metadata), code=code)
        return web.Response(
            body=self._object_bytes(call.resource, stored), status=code, content_type=_JSON
        )

    def _object_bytes(self, resource: Resource, stored: Stored) -> bytes:
        if resource.renames:
            return encode(self._operations.full(resource, stored.obj))
        head = f'{{"kind":"{resource.kind}","apiVersion":"{resource.api_version}",'
        return head.encode() + stored.body[1:]

    def _as_mode(
        self,
        request: web.Request,
        call: Call,
        objects: list[Obj],
        mode: TableMode,
        metadata: Obj,
        *,
        with_columns: bool = True,
    ) -> Obj:
        resource = call.resource

        def full(obj: Obj) -> Obj:
            return self._operations.full(resource, obj)

        if mode == "table":
            return tables.render(
                call.key,
                objects,
                now=self._server.settings.clock(),
                metadata=metadata,
                include=request.query.get("includeObject", "Metadata"),
                full=full,
                with_columns=with_columns,
            )
        kind = "PartialObjectMetadata"
        return {
            "kind": kind,
            "apiVersion": "meta.k8s.io/v1",
            "metadata": objects[0]["metadata"],
        }

    # -- lists

    def _list_options(self, request: web.Request, call: Call) -> ListOptions:
        query = request.query
        try:
            limit = int(query.get("limit") or 0)
            timeout_s = float(query["timeoutSeconds"]) if query.get("timeoutSeconds") else None
        except ValueError as error:
            raise errors.bad_request(str(error)) from error
        labels = query.get("labelSelector", "")
        fields = query.get("fieldSelector", "")
        return ListOptions(
            wanted=Filter(
                namespace=call.namespace if call.resource.namespaced else "",
                labels=parse_labels(labels) if labels else LabelSelector(),
                fields=self._fields(call, fields) if fields else FieldSelector(),
            ),
            limit=limit,
            continue_=query.get("continue", ""),
            resource_version=query.get("resourceVersion", ""),
            match=query.get("resourceVersionMatch", ""),
            watch=query.get("watch", "") in _TRUE,
            bookmarks=query.get("allowWatchBookmarks", "") in _TRUE,
            initial_events=query.get("sendInitialEvents", "") in _TRUE,
            timeout_s=timeout_s,
            selects=bool(labels or fields),
        )

    def _fields(self, call: Call, text: str) -> FieldSelector:
        resource = call.resource
        selector = parse_fields(text)
        shown_to_stored = {view: stored for stored, view in resource.renames.items()}
        terms = []
        for term in selector.terms:
            if term.path not in resource.all_selectable_fields:
                group_version = f"{resource.group}/{resource.version}"
                raise errors.bad_request(
                    f'Unable to find "{group_version}, Resource={resource.plural}" that match '
                    f'label selector "", field selector "{text}": field label not supported: '
                    f"{term.path}"
                )
            first, dot, rest = term.path.partition(".")
            path = shown_to_stored.get(first, first) + dot + rest
            terms.append(FieldTerm(path, term.value, term.negated))
        return FieldSelector(tuple(terms))

    def _list(self, request: web.Request, call: Call, mode: TableMode) -> web.Response:
        options = self._list_options(request, call)
        table = self._server.store.tables[call.key]
        revision, after, rows = self._snapshot(options, call)
        names = table.names() if rows is table.rows else sorted(rows)
        found: list[Stored] = []
        left = 0
        last = ("", "")
        for name in names:
            if after is not None and name <= after:
                continue
            stored = rows[name]
            if not options.wanted.matches(stored.obj):
                continue
            if options.limit and len(found) >= options.limit:
                left += 1
                continue
            found.append(stored)
            last = name
        metadata: Obj = {"resourceVersion": str(revision)}
        if left:
            metadata["continue"] = _continue_token(revision, last)
            if not options.selects:
                metadata["remainingItemCount"] = left
        if mode == "table":
            objects = [stored.obj for stored in found]
            return _json(self._as_mode(request, call, objects, mode, metadata))
        if mode == "partial":
            items = [self._as_mode(request, call, [row.obj], mode, metadata) for row in found]
            kind = "PartialObjectMetadataList"
            return _json(
                {
                    "kind": kind,
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": metadata,
                    "items": items,
                }
            )
        return self._list_response(call, found, metadata)

    def _snapshot(
        self, options: ListOptions, call: Call
    ) -> tuple[int, tuple[str, str] | None, dict[tuple[str, str], Stored]]:
        """Pick the revision to list at; returns it, where to go on, and the rows then."""
        table = self._server.store.tables[call.key]
        current = self._revision
        if options.continue_:
            revision, after = _read_token(options.continue_)
            if revision < 0:
                return current, after, table.rows
            rows = table.rows if revision == current else table.at(revision)
            if rows is None:
                raise errors.expired_continue(_continue_token(-1, after))
            return revision, after, rows
        text = options.resource_version
        if text in ("", "0"):
            if options.match == "Exact":
                raise errors.bad_request(
                    'resourceVersionMatch: Forbidden: resourceVersionMatch "Exact" is forbidden '
                    'for resourceVersion "0"'
                )
            return current, None, table.rows
        revision = _revision(text)
        if revision > current:
            raise errors.too_large_revision(revision, current)
        if options.match == "Exact" or (options.limit and not options.match):
            rows = table.rows if revision == current else table.at(revision)
            if rows is None:
                raise errors.too_old(revision, table.compacted)
            return revision, None, rows
        return current, None, table.rows

    def _list_response(self, call: Call, found: list[Stored], metadata: Obj) -> web.Response:
        resource = call.resource
        if resource.renames:
            bodies = [encode(self._shown(resource, stored.obj)) for stored in found]
        else:
            bodies = [stored.body for stored in found]
        head = (
            f'{{"kind":"{resource.kind}List","apiVersion":"{resource.api_version}","metadata":'
        ).encode()
        body = head + encode(metadata) + b',"items":[' + b",".join(bodies) + b"]}"
        return web.Response(body=body, content_type=_JSON)

    def _shown(self, resource: Resource, obj: Obj) -> Obj:
        full = self._operations.full(resource, obj)
        return {key: value for key, value in full.items() if key not in ("kind", "apiVersion")}

    # -- watches

    async def _watch(
        self, request: web.Request, call: Call, info: RequestInfo, mode: TableMode
    ) -> web.StreamResponse:
        options = self._list_options(request, call)
        if options.initial_events and options.match != "NotOlderThan":
            raise errors.bad_request(
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            )
        text = options.resource_version
        since = None if text in ("", "0") or options.initial_events else _revision(text)
        response = web.StreamResponse(headers={"Content-Type": _JSON})
        try:
            subscription = self._server.store.subscribe(call.key, options.wanted, since)
        except ApiError as error:
            if error.code != 410:  # noqa: PLR2004 - Gone
                raise
            await response.prepare(request)
            await response.write(_line("ERROR", encode(error.to_status())))
            return response
        async with self._open(request, call, info, subscription):
            await response.prepare(request)
            start = self._revision
            writer = _WatchWriter(self, request, call, response, mode)
            pending = list(subscription.pending()) if options.initial_events else []
            if options.initial_events:
                await writer.write(pending)
                await writer.bookmark(start, annotations={_BOOKMARK_END: "true"})
            await self._pump(writer, subscription, options)
        return response

    async def _pump(
        self, writer: _WatchWriter, subscription: Subscription, options: ListOptions
    ) -> None:
        limit_s = options.timeout_s or self._server.settings.max_watch_s
        interval_s = self._server.settings.bookmark_interval_s
        end = anyio.current_time() + limit_s
        while (left_s := end - anyio.current_time()) > 0:
            deliveries: list[Delivery] | None = None
            with anyio.move_on_after(min(left_s, interval_s)):
                deliveries = await subscription.drain()
            if deliveries is None:
                if options.bookmarks:
                    await writer.bookmark(self._revision)
            elif deliveries:
                await writer.write(deliveries)
            else:
                return

    @asynccontextmanager
    async def _open(
        self, request: web.Request, call: Call, info: RequestInfo, subscription: Subscription
    ) -> AsyncIterator[None]:
        key = id(subscription)
        self._watches[key] = OpenWatch(
            info=info, subscription=subscription, abort=lambda: _abort(request)
        )
        try:
            yield
        finally:
            del self._watches[key]
            self._server.store.unsubscribe(call.key, subscription)

    def drop_watches(self, match: Match, *, cut: bool) -> int:
        """End the watches that match; `cut` tears the connection instead of ending the body."""
        dropped = 0
        for watch in list(self._watches.values()):
            if match(watch.info):
                dropped += 1
                if cut:
                    watch.abort()
                watch.subscription.close()
        return dropped

    @property
    def watch_count(self) -> int:
        """Count the watches in progress."""
        return len(self._watches)

    def render(
        self,
        request: web.Request,
        call: Call,
        mode: TableMode,
        delivery: Delivery,
        *,
        with_columns: bool,
    ) -> bytes:
        """Encode one watch event; plain ones are encoded once for all watches."""
        resource, change = call.resource, delivery.change
        if mode:
            metadata = {"resourceVersion": delivery.stored.obj["metadata"]["resourceVersion"]}
            table = self._as_mode(
                request, call, [delivery.stored.obj], mode, metadata, with_columns=with_columns
            )
            return _line(delivery.type, encode(table))
        if change is None:
            return _line(delivery.type, self._object_bytes(resource, delivery.stored))
        key = (resource.key, delivery.type)
        line = change.lines.get(key)
        if line is None:
            line = _line(delivery.type, self._object_bytes(resource, delivery.stored))
            change.lines[key] = line
        return line

    # -- paths that are not resources

    async def _plain(self, request: web.Request, user: User) -> web.Response:
        path = request.path.rstrip("/") or "/"
        if path in ("/healthz", "/readyz", "/livez"):
            return web.Response(text="ok")
        if path.startswith("/hami-sim/"):
            return await self._control(request, user)
        if request.method != "GET":
            raise errors.method_not_allowed()
        if path == "/":
            return _json({"paths": ["/api", "/apis", "/healthz", "/openapi/v3", "/version"]})
        if AGGREGATED.split(";")[1] in request.headers.get("Accept", "").replace(" ", ""):
            aggregated = self._discovery.aggregated(path)
            if aggregated is not None:
                return web.Response(body=encode(aggregated), headers={"Content-Type": AGGREGATED})
        document = self._discovery.document(path)
        if document is None:
            raise errors.path_not_found()
        return _json(document)

    async def _control(self, request: web.Request, user: User) -> web.Response:
        """Serve faults and the audit log to tests in another process."""
        if ADMIN_GROUP not in user.groups:
            raise errors.forbidden(request.path, "", "only the admin controls the simulation")
        server = self._server
        if request.path == _AUDIT_PATH:
            return _json({"items": [msgspec.to_builtins(entry) for entry in server.audit]})
        if request.method == "DELETE" and request.path == _FAULT_PATH:
            server.faults.clear()
            return _json(errors.success_status())
        if request.method != "POST":
            raise errors.method_not_allowed()
        body = await self._body(request, optional=True) or {}
        try:
            if request.path == _FAULT_PATH:
                server.faults.add(msgspec.convert(body, _WireFault).to_fault())
                return _json(errors.success_status(), code=201)
            if request.path == _WATCH_PATH:
                wish = msgspec.convert(body, _WireDrop)
                count = self.drop_watches(wish.match, cut=wish.cut)
                return _json({"dropped": count})
        except msgspec.ValidationError as error:
            raise errors.bad_request(str(error)) from error
        if request.path == _HISTORY_PATH:
            server.store.forget_history()
            return _json(errors.success_status())
        raise errors.path_not_found()


class _WireFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault as another process sends it."""

    action: Literal["delay", "deny", "cut", "lose-response"]
    match: Match = Match()
    delay_s: float = 0.0
    code: int = 503
    message: str = "injected fault"
    retry_after_s: int | None = None
    times: int = 1

    def to_fault(self) -> Fault:
        return Fault(
            action=self.action,
            match=self.match,
            delay_s=self.delay_s,
            code=self.code,
            message=self.message,
            retry_after_s=self.retry_after_s,
            times=self.times,
        )


class _WireDrop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which watches another process wants ended."""

    match: Match = Match()
    cut: bool = False


class _WatchWriter:
    """Writes deliveries and bookmarks of one watch."""

    def __init__(
        self,
        routes: Routes,
        request: web.Request,
        call: Call,
        response: web.StreamResponse,
        mode: TableMode,
    ) -> None:
        self._routes = routes
        self._request = request
        self._call = call
        self._response = response
        self._mode: TableMode = mode
        self._first = True

    async def write(self, deliveries: list[Delivery]) -> None:
        lines = []
        for delivery in deliveries:
            lines.append(
                self._routes.render(
                    self._request, self._call, self._mode, delivery, with_columns=self._first
                )
            )
            self._first = False
        if lines:
            await self._response.write(b"".join(lines))

    async def bookmark(self, revision: int, annotations: Obj | None = None) -> None:
        resource = self._call.resource
        metadata: Obj = {"resourceVersion": str(revision)}
        if annotations:
            metadata["annotations"] = annotations
        obj: Obj = {
            "kind": resource.kind,
            "apiVersion": resource.api_version,
            "metadata": metadata,
        }
        if self._mode == "table":
            obj = {
                "kind": "Table",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": metadata,
                "columnDefinitions": None,
                "rows": [],
            }
        await self._response.write(_line("BOOKMARK", encode(obj)))


def _line(type_: str, obj: bytes) -> bytes:
    return b'{"type":"' + type_.encode() + b'","object":' + obj + b"}\n"


def _json(obj: object, *, code: int = 200) -> web.Response:
    return web.Response(body=encode(obj), status=code, content_type=_JSON)


def _status_response(error: ApiError) -> web.Response:
    response = _json(error.to_status(), code=error.code)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def _from_protobuf(raw: bytes) -> object:
    try:
        found = protobuf.decode(raw)
    except ValueError as error:
        raise errors.bad_request(f"couldn't decode the protobuf body: {error}") from error
    if found is None:
        raise errors.unsupported_media_type((_JSON, _YAML, *_PATCH_TYPES))
    return found


def _as_object(value: object) -> Obj:
    if not isinstance(value, dict):
        raise errors.bad_request("the patch leaves no object")
    return value


def _verb(request: web.Request, *, named: bool) -> str:
    match request.method:
        case "GET" | "HEAD":
            if named:
                return "get"
            return "watch" if request.query.get("watch", "") in _TRUE else "list"
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


def _accepted(request: web.Request) -> TableMode:
    """Pick the first acceptable form of the answer."""
    header = request.headers.get("Accept", "*/*")
    for item in header.split(","):
        media, *parameters = (part.strip() for part in item.split(";"))
        if media in (_JSON, "*/*", "application/*"):
            if "as=Table" in parameters and "g=meta.k8s.io" in parameters:
                return "table"
            if any(part.startswith("as=PartialObjectMetadata") for part in parameters):
                return "partial"
            if not any(part.startswith("as=") for part in parameters):
                return ""
        elif media in (_YAML, "text/plain"):
            return ""
    raise errors.not_acceptable((_JSON,))


def _revision(text: str) -> int:
    try:
        revision = int(text)
    except ValueError as error:
        raise errors.bad_request(
            f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": '
            "invalid syntax"
        ) from error
    if revision < 0:
        raise errors.bad_request(f'resourceVersion: Invalid value: "{text}"')
    return revision


def _continue_token(revision: int, after: tuple[str, str]) -> str:
    raw = encode({"v": "meta.k8s.io/v1", "rv": revision, "after": list(after)})
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, tuple[str, str]]:
    try:
        raw = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(raw["rv"]), (raw["after"][0], raw["after"][1])
    except (binascii.Error, ValueError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise errors.bad_request(f"continue key is not valid: {error}") from error


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _before(fault: Fault, request: web.Request) -> web.Response | None:
    """Apply a fault before the request is served; None lets it go on."""
    if fault.delay_s:
        await anyio.sleep(fault.delay_s)
    if fault.action == "cut":
        _abort(request)
        return web.Response(status=fault.code)
    if fault.action == "deny":
        return _status_response(
            ApiError(fault.code, fault.message, retry_after_s=fault.retry_after_s)
        )
    return None
