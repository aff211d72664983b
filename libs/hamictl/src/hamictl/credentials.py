# SPDX-License-Identifier: Apache-2.0
"""Authenticates to the HTTP APIs with the kubeconfig's token, over TLS or the loopback only.

In order: ``HAMICTL_TOKEN``, then the token of the current context of ``KUBECONFIG`` (its first
file) or of ``~/.kube/config``. A login by client certificate has no token; ``kubectl create token``
issues one. A token is sent over HTTPS or to this machine only.
"""

import os
import ssl
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from hami_common.errors import HamiError
from hami_common.runtime.kubeio.login import log_in

TOKEN_VARIABLE = "HAMICTL_TOKEN"  # noqa: S105 - the name of a variable
CA_VARIABLE = "HAMICTL_CA_FILE"
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


async def headers(base: str) -> dict[str, str]:
    """Return authentication headers for ``base``; empty without a token or over plain HTTP."""
    address = urlsplit(base)
    if address.scheme != "https" and address.hostname not in _LOCAL:
        return {}
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        return {"Authorization": f"Bearer {token}"}
    kubeconfig = _kubeconfig()
    if not kubeconfig:
        return {}
    with tempfile.TemporaryDirectory(prefix="hamictl-") as directory:
        try:
            value = await (await log_in(kubeconfig, "", Path(directory))).authorization()
        except HamiError:
            return {}  # the service reports it if it requires a token
    return {"Authorization": value} if value else {}


def tls(base: str) -> ssl.SSLContext | bool:
    """Return the trusted CAs for HTTPS: those of ``HAMICTL_CA_FILE``, else the system's."""
    ca_file = os.environ.get(CA_VARIABLE, "")
    if not ca_file or not base.startswith("https:"):
        return True
    return ssl.create_default_context(cafile=ca_file)


def _kubeconfig() -> str:
    named = os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    usual = Path.home() / ".kube" / "config"
    return named or (str(usual) if usual.is_file() else "")
