# SPDX-License-Identifier: Apache-2.0
"""Authentication, authorization and the audit log.

Identity comes from a static map of bearer tokens (and tokens issued by the server itself);
authorization is a function of attributes, by default every user is allowed
everything. The audit log keeps one entry per finished request, newest last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from hami_sim.apiserver.errors import Obj

ADMIN_GROUP: Final = "system:masters"
AUTHENTICATED: Final = "system:authenticated"


class User(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated identity."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: Mapping[str, tuple[str, ...]] = {}

    def to_json(self) -> Obj:
        """Render as authentication.k8s.io/v1 UserInfo."""
        info: Obj = {"username": self.name, "groups": list(self.groups)}
        if self.uid:
            info["uid"] = self.uid
        if self.extra:
            info["extra"] = {key: list(values) for key, values in self.extra.items()}
        return info


ANONYMOUS: Final = User(name="system:anonymous", groups=("system:unauthenticated",))


def admin() -> User:
    """Build the identity of the generated kubeconfig."""
    return User(name="kubernetes-admin", groups=(ADMIN_GROUP, AUTHENTICATED))


def service_account(namespace: str, name: str, uid: str = "") -> User:
    """Build the identity that a service account's token carries."""
    return User(
        name=f"system:serviceaccount:{namespace}:{name}",
        groups=("system:serviceaccounts", f"system:serviceaccounts:{namespace}", AUTHENTICATED),
        uid=uid,
    )


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes of a request, for authorization, the audit log and faults."""

    verb: str
    """A verb of the API (get, list, watch, create …), or the method in lower case."""
    group: str = ""
    version: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""
    user: str = ""


Authorizer: TypeAlias = Callable[[User, RequestInfo], bool | str]
"""True allows; False refuses; text refuses with that reason."""


def allow_all(user: User, request: RequestInfo) -> bool:
    """Allow every authenticated request."""
    del user, request
    return True


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request."""

    user: str
    verb: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    code: int
    user_agent: str = ""
    path: str = ""
