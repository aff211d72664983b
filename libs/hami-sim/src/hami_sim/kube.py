# SPDX-License-Identifier: Apache-2.0
"""Objects of the Kubernetes API as JSON documents, for the simulated components.

Adds to the client of ``hami_common.runtime.kubeio`` the paths of resources, named `plural` or
`plural.group`, and the encoding. Errors are those of that client.
"""

from __future__ import annotations

import base64
import ssl
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

import msgspec

from hami_common.errors import Denied, HamiError
from hami_common.runtime.kubeio import client as kubeio
from hami_common.runtime.tasks import finish_within
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.resources import ResourceTable

_TABLE: Final = ResourceTable()
_INVALID: Final = 422
MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
APPLY: Final = "application/apply-patch+yaml"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Address and credentials of a server."""

    url: str
    token: str = ""
    ca_pem: str = ""
    cert_path: str = ""
    key_path: str = ""
    insecure: bool = False

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Self:
        """Read the current context of a kubeconfig."""
        config = msgspec.yaml.decode(path.read_bytes())

        def named(section: str, name: str) -> Obj:
            return next(dict(item) for item in config[section] if item["name"] == name)

        context = named("contexts", config["current-context"])["context"]
        cluster = named("clusters", context["cluster"])["cluster"]
        user = named("users", context["user"]).get("user") or {}
        ca_pem = ""
        if cluster.get("certificate-authority-data"):
            ca_pem = base64.b64decode(cluster["certificate-authority-data"]).decode()
        elif cluster.get("certificate-authority"):
            ca_pem = Path(cluster["certificate-authority"]).read_text()
        return cls(
            url=cluster["server"],
            token=user.get("token", ""),
            ca_pem=ca_pem,
            cert_path=user.get("client-certificate", ""),
            key_path=user.get("client-key", ""),
            insecure=bool(cluster.get("insecure-skip-tls-verify")),
        )

    def kubeconfig(self) -> bytes:
        """Render as a kubeconfig; JSON, which is YAML too."""
        cluster: Obj = {"server": self.url, "insecure-skip-tls-verify": self.insecure}
        if self.ca_pem:
            ca_pem = base64.b64encode(self.ca_pem.encode()).decode()
            cluster["certificate-authority-data"] = ca_pem
        user = {"token": self.token} if self.token else {}
        if self.cert_path:
            user |= {"client-certificate": self.cert_path, "client-key": self.key_path}
        context = {"cluster": "here", "user": "me"}
        return msgspec.json.encode(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": cluster}],
                "contexts": [{"name": "here", "context": context}],
                "users": [{"name": "me", "user": user}],
            }
        )

    def ssl_context(self) -> ssl.SSLContext | bool:
        """Build the TLS context; True means the system's defaults."""
        if not self.url.startswith("https"):
            return True
        context = ssl.create_default_context(cadata=self.ca_pem or None)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_path:
            context.load_cert_chain(self.cert_path, self.key_path or None)
        return context


def path_of(resource: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Build the path of a collection, object or subresource."""
    plural, _, group = resource.partition(".")
    row = _TABLE.by_key(resource)
    base = f"/apis/{group}/{row.version}" if group else f"/api/{row.version}"
    scope = f"/namespaces/{quote(namespace)}" if namespace and row.namespaced else ""
    tail = "".join(f"/{quote(part)}" for part in (name, subresource) if part)
    return f"{base}{scope}/{plural}{tail}"


def is_invalid(error: HamiError) -> bool:
    """Return true if the server rejected the object as invalid."""
    return isinstance(error, Denied) and error.status == _INVALID


class Objects:
    """A client over one connection pool; use it as an async context manager."""

    def __init__(self, access: Access, *, user_agent: str = "hami-sim") -> None:
        self._access = access
        self._agent = user_agent
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._client: kubeio.KubeClient | None = None

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="hami-sim-login-")
        path = Path(self._folder.name) / "kubeconfig"
        path.touch(mode=0o600)
        path.write_bytes(self._access.kubeconfig())
        self._client = kubeio.KubeClient(kubeconfig=str(path), user_agent=self._agent)
        await self._client.log_in()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            with finish_within(kubeio.CLOSE_S):  # also when cancelled
                await self._client.close()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def client(self) -> kubeio.KubeClient:
        """Return the open client."""
        if self._client is None:
            msg = "the client is not open; use it as an async context manager"
            raise RuntimeError(msg)
        return self._client

    async def at(self, path: str) -> Obj:
        """Read the document at a path."""
        return _object(await self.client.get(path))

    async def get(self, resource: str, name: str, namespace: str = "") -> Obj:
        """Read one object."""
        return await self.at(path_of(resource, namespace, name))

    async def create(self, resource: str, obj: Obj) -> Obj:
        """Create an object in its own namespace."""
        path = path_of(resource, obj.get("metadata", {}).get("namespace", ""))
        return _object(await self.client.create(path, msgspec.json.encode(obj)))

    async def replace(self, resource: str, obj: Obj) -> Obj:
        """Replace an object under its own name."""
        metadata = obj["metadata"]
        path = path_of(resource, metadata.get("namespace", ""), metadata["name"])
        return _object(await self.client.replace(path, msgspec.json.encode(obj)))

    async def patch(
        self,
        resource: str,
        name: str,
        patch: object,
        *,
        namespace: str = "",
        kind: str = MERGE,
        subresource: str = "",
    ) -> Obj:
        """Patch an object."""
        path = path_of(resource, namespace, name, subresource)
        body = msgspec.json.encode(patch)
        return _object(await self.client.patch(path, body, content_type=kind))

    async def delete(self, resource: str, name: str, namespace: str, *, body: Obj) -> None:
        """Delete an object."""
        path = path_of(resource, namespace, name)
        await self.client.delete(path, body=msgspec.json.encode(body))

    async def delete_all(self, resource: str, *, field_selector: str) -> None:
        """Delete the objects of all namespaces that a field selector matches."""
        await self.client.delete(f"{path_of(resource)}?fieldSelector={quote(field_selector)}")

    async def act(
        self, resource: str, name: str, action: str, body: Obj, namespace: str = ""
    ) -> Obj:
        """POST to a subresource."""
        path = path_of(resource, namespace, name, action)
        return _object(await self.client.create(path, msgspec.json.encode(body)))

    async def bind(self, name: str, node: str, *, namespace: str, uid: str) -> Obj:
        """Bind a pod to a node."""
        binding = {
            "kind": "Binding",
            "apiVersion": "v1",
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        return await self.act("pods", name, "binding", binding, namespace)

    async def follow(
        self,
        resource: str,
        seen: Callable[[Obj | None, Obj | None], None],
        *,
        field_selector: str = "",
        synced: Callable[[], None],
    ) -> None:
        """Report changes indefinitely as (old, new), in order; new is None for a deleted object.

        ``synced`` is called when everything of a list has been reported, the first time and after
        each further list.
        """
        known: dict[tuple[str, str], Obj] = {}
        path = path_of(resource)
        async with self.client.list_watch(path, field_selector=field_selector) as events:
            async for event in events:
                if event.type == "SYNCED":
                    synced()
                    continue
                obj = _object(event.raw)
                key = _key(obj["metadata"])
                old = known.pop(key, None)
                if event.type == "DELETED":
                    seen(old or obj, None)
                else:
                    known[key] = obj
                    seen(old, obj)


def _object(raw: bytes) -> Obj:
    return dict(msgspec.json.decode(raw))


def _key(metadata: Mapping[str, str]) -> tuple[str, str]:
    return metadata.get("namespace", ""), metadata["name"]
