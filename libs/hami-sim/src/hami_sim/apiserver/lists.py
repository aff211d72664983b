# SPDX-License-Identifier: Apache-2.0
"""Lists: what a query selects, at which revision, and one page of it.

All pages of one list show the revision of the first, rebuilt from history; where the history no
longer reaches back the client gets 410 with a token to go on inconsistently. A continue token holds
the revision (-1: whatever is current) and the last key shown.
"""

from __future__ import annotations

import base64
import binascii
from typing import TypeAlias

import msgspec
from aiohttp import web

from hami_sim.apiserver import errors
from hami_sim.apiserver.calls import Call
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.forms import is_true
from hami_sim.apiserver.selectors import (
    FieldSelector,
    FieldTerm,
    LabelSelector,
    parse_fields,
    parse_labels,
)
from hami_sim.apiserver.store import Filter, Name, Store, Stored, encode

Snapshot: TypeAlias = tuple[int, Name | None, dict[Name, Stored]]
"""Revision, key to go on after, and the rows at that revision."""


class ListOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list or watch."""

    wanted: Filter
    selects: bool = False
    """True if a selector narrows the list."""
    limit: int = 0
    continue_: str = ""
    resource_version: str = ""
    match: str = ""
    bookmarks: bool = False
    initial_events: bool = False
    timeout_s: float | None = None


def read_options(request: web.Request, call: Call) -> ListOptions:
    """Read the query of a list or watch."""
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
            fields=_fields(call, fields) if fields else FieldSelector(),
        ),
        selects=bool(labels or fields),
        limit=limit,
        continue_=query.get("continue", ""),
        resource_version=query.get("resourceVersion", ""),
        match=query.get("resourceVersionMatch", ""),
        bookmarks=is_true(query.get("allowWatchBookmarks", "")),
        initial_events=is_true(query.get("sendInitialEvents", "")),
        timeout_s=timeout_s,
    )


def _fields(call: Call, text: str) -> FieldSelector:
    """Parse a field selector, refuse fields that are not served, and name them as stored."""
    resource = call.resource
    stored_by_shown = {shown: stored for stored, shown in resource.renames.items()}
    terms = []
    for term in parse_fields(text).terms:
        if term.path not in resource.all_selectable_fields:
            group_version = f"{resource.group}/{resource.version}"
            raise errors.bad_request(
                f'Unable to find "{group_version}, Resource={resource.plural}" that match label '
                f'selector "", field selector "{text}": field label not supported: {term.path}'
            )
        first, dot, rest = term.path.partition(".")
        path = stored_by_shown.get(first, first) + dot + rest
        terms.append(FieldTerm(path, term.value, term.negated))
    return FieldSelector(tuple(terms))


def page(store: Store, call: Call, options: ListOptions) -> tuple[list[Stored], Obj]:
    """Return one page and the list's metadata."""
    table = store.tables[call.key]
    revision, after, rows = _snapshot(store, call, options)
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
        metadata["continue"] = _token(revision, last)
        if not options.selects:
            metadata["remainingItemCount"] = left
    return found, metadata


def _snapshot(store: Store, call: Call, options: ListOptions) -> Snapshot:
    table = store.tables[call.key]
    current = store.revision
    if options.continue_:
        revision, after = _read_token(options.continue_)
        if revision < 0:
            return current, after, table.rows
        rows = table.rows if revision == current else table.at(revision)
        if rows is None:
            raise errors.expired_continue(_token(-1, after))
        return revision, after, rows
    text = options.resource_version
    if text in ("", "0"):
        if options.match == "Exact":
            raise errors.bad_request(
                'resourceVersionMatch: Forbidden: resourceVersionMatch "Exact" is forbidden for '
                'resourceVersion "0"'
            )
        return current, None, table.rows
    revision = read_revision(text)
    if revision > current:
        raise errors.too_large_revision(revision, current)
    if options.match == "Exact" or (options.limit and not options.match):
        rows = table.rows if revision == current else table.at(revision)
        if rows is None:
            raise errors.too_old(revision, table.compacted)
        return revision, None, rows
    return current, None, table.rows


def read_revision(text: str) -> int:
    """Read a resourceVersion of the query."""
    if not (text.isascii() and text.isdigit()):
        raise errors.bad_request(
            f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": '
            "invalid syntax"
        )
    return int(text)


def _token(revision: int, after: Name) -> str:
    raw = encode({"v": "meta.k8s.io/v1", "rv": revision, "after": list(after)})
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, Name]:
    try:
        raw = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(raw["rv"]), (raw["after"][0], raw["after"][1])
    except (
        binascii.Error,
        ValueError,
        msgspec.DecodeError,
        KeyError,
        TypeError,
        IndexError,
    ) as error:
        raise errors.bad_request(f"continue key is not valid: {error}") from error
