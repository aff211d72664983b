# SPDX-License-Identifier: Apache-2.0
"""Who we are to the HTTP APIs: the token of the kubeconfig, sent only where nobody can read it.

In order: ``HAMICTL_TOKEN``, then what the current context of ``KUBECONFIG`` (its first file) or of
``~/.kube/config`` logs in with. A login by client certificate has no token; ``kubectl create
token`` makes one. A token leaves this program over HTTPS or to this machine alone.
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
    """Headers that tell the service at ``base`` who we are; none where we cannot or may not."""
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
            return {}  # whoever needs it says so
    return {"Authorization": value} if value else {}


def tls(base: str) -> ssl.SSLContext | bool:
    """Whom to believe over HTTPS: the authority in ``HAMICTL_CA_FILE``, else the system's."""
    ca_file = os.environ.get(CA_VARIABLE, "")
    if not ca_file or not base.startswith("https:"):
        return True
    return ssl.create_default_context(cafile=ca_file)


def _kubeconfig() -> str:
    named = os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    usual = Path.home() / ".kube" / "config"
    return named or (str(usual) if usual.is_file() else "")
