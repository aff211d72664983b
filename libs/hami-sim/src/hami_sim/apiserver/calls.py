# SPDX-License-Identifier: Apache-2.0
"""The request of an operation, its delete options, and times in API objects.

Times are RFC 3339 in UTC, whole seconds.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from hami_sim.apiserver.auth import User
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.resources import Resource


class Call(msgspec.Struct, kw_only=True):
    """One request on a resource, already authenticated and authorized."""

    resource: Resource
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    user: User
    dry_run: bool = False
    field_manager: str = ""
    force: bool = False
    warnings: list[str] = msgspec.field(default_factory=list)

    @property
    def key(self) -> str:
        """Name the table that holds the objects."""
        return self.resource.storage_key


class DeleteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a delete request; None leaves the choice to the kind."""

    grace_s: int | None = None
    propagation: str | None = None
    uid: str | None = None
    resource_version: str | None = None

    def to_json(self) -> Obj:
        """Render for webhooks."""
        options: Obj = {"kind": "DeleteOptions", "apiVersion": "meta.k8s.io/v1"}
        if self.grace_s is not None:
            options["gracePeriodSeconds"] = self.grace_s
        if self.propagation:
            options["propagationPolicy"] = self.propagation
        return options


def rfc3339(seconds: float) -> str:
    """Write a time the way metav1.Time does."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_rfc3339(text: str) -> float:
    """Read a time written by a client or by `rfc3339`."""
    return datetime.fromisoformat(text).timestamp()
