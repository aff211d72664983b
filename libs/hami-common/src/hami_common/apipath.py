# SPDX-License-Identifier: Apache-2.0
"""Builds paths of the Kubernetes API from names, the one place where names become part of a path.

A name from a pod or a message may contain any character. Each part is percent-quoted and stays one
part; a name that no object can have is rejected before.
"""

import re
from typing import Final
from urllib.parse import quote

from hami_common.bounds import LABEL_MOST, NAME_MOST
from hami_common.errors import RequestInvalid
from hami_common.units import shown

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NO_PARTS: Final = frozenset({"", ".", ".."})
_NO_OBJECT: Final = "%25"
"""Stands for a part that HTTP clients and servers would remove; no object is called ``%``."""


def api_path(*parts: str) -> str:
    """Join parts to an absolute path, each quoted: ``/`` becomes ``%2F``.

    ``api_path("api", "v1", "nodes", name)``. Group and version are parts of their own. A part that
    is empty or only dots becomes a name that no object has, so that the API answers "not found".
    """
    return "".join(f"/{_quoted(part)}" for part in parts)


def _quoted(part: str) -> str:
    return _NO_OBJECT if part in _NO_PARTS else quote(part, safe="")


def is_label(name: str) -> bool:
    """True when ``name`` is a DNS label (RFC 1123), as names of containers and volumes are."""
    return len(name) <= LABEL_MOST and _LABEL.fullmatch(name) is not None


def is_subdomain(name: str) -> bool:
    """True when ``name`` is a DNS subdomain (RFC 1123), as names of Kubernetes objects are."""
    return len(name) <= NAME_MOST and _SUBDOMAIN.fullmatch(name) is not None


def checked_name(name: str, *, field: str) -> str:
    """Return ``name``; raise ``RequestInvalid`` about ``field`` when no object can have it."""
    if not is_subdomain(name):
        raise RequestInvalid(
            field=field,
            problem=f"{shown(name)} is not a DNS subdomain",
            fix=f"write at most {NAME_MOST} lower case letters, digits, '-' and '.'",
        )
    return name
