# SPDX-License-Identifier: Apache-2.0
"""The HTTP extender protocol, as kube-scheduler speaks it.

Bodies have the Go field names of ``k8s.io/kube-scheduler/extender/v1`` (v0.34), pods and nodes are
whole v1 objects, and an answer other than 200 is an error whatever its body says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import anyio
import msgspec

from hami_sim.apiserver.errors import Obj
from hami_sim.kubescheduler.fit import MAX_NODE_SCORE, NodeRefusal
from hami_sim.kubescheduler.settings import ExtenderSettings

MAX_EXTENDER_PRIORITY: Final = 10
_OK: Final = 200


class ExtenderFailed(Exception):
    """The extender could not be asked, or answered with an error."""


class _FilterResult(msgspec.Struct, kw_only=True, rename="pascal"):
    nodes: Obj | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] | None = None
    failed_and_unresolvable_nodes: dict[str, str] | None = None
    error: str = ""


class _HostPriority(msgspec.Struct, kw_only=True, rename="pascal"):
    host: str
    score: int


class _BindResult(msgspec.Struct, kw_only=True, rename="pascal"):
    error: str = ""


class Extender:
    """One configured extender."""

    def __init__(self, settings: ExtenderSettings, session: aiohttp.ClientSession) -> None:
        self.settings = settings
        self._session = session
        self._managed = frozenset(resource.name for resource in settings.managed)

    def wants(self, pod: Obj) -> bool:
        """Say whether the pod asks for a resource that this extender manages."""
        if not self._managed:
            return True
        return any(
            name in self._managed
            for kind in ("containers", "initContainers")
            for container in pod["spec"].get(kind) or ()
            for part in ("requests", "limits")
            for name in (container.get("resources") or {}).get(part) or {}
        )

    @property
    def binds(self) -> bool:
        """Say whether this extender binds the pods it wants."""
        return bool(self.settings.bind_verb)

    async def _send(self, verb: str, body: object) -> bytes:
        url = f"{self.settings.url.rstrip('/')}/{verb}"
        try:
            with anyio.fail_after(self.settings.timeout_s):
                async with self._session.post(
                    url,
                    data=msgspec.json.encode(body),
                    headers={"Content-Type": "application/json"},
                ) as reply:
                    if reply.status != _OK:
                        msg = f"failed {verb} with extender at URL {url}, code {reply.status}"
                        raise ExtenderFailed(msg)
                    return await reply.read()
        except TimeoutError as error:
            msg = (
                f'Post "{url}": context deadline exceeded '
                "(Client.Timeout exceeded while awaiting headers)"
            )
            raise ExtenderFailed(msg) from error
        except (aiohttp.ClientError, OSError) as error:
            msg = f'Post "{url}": {error}'
            raise ExtenderFailed(msg) from error

    def _args(self, pod: Obj, nodes: Mapping[str, Obj]) -> Obj:
        if self.settings.node_cache_capable:
            return {"Pod": pod, "Nodes": None, "NodeNames": list(nodes)}
        listed = {"metadata": {}, "items": list(nodes.values())}
        return {"Pod": pod, "Nodes": listed, "NodeNames": None}

    async def filter(
        self, pod: Obj, nodes: Mapping[str, Obj]
    ) -> tuple[list[str], dict[str, NodeRefusal]]:
        """Ask which nodes fit; returns them and why others do not."""
        if not self.settings.filter_verb:
            return list(nodes), {}
        raw = await self._send(self.settings.filter_verb, self._args(pod, nodes))
        result = _decode(raw, _FilterResult)
        if result.error:
            raise ExtenderFailed(result.error)
        fitting: list[str] = []
        if self.settings.node_cache_capable and result.node_names is not None:
            fitting = result.node_names
        elif result.nodes is not None:
            fitting = [item["metadata"]["name"] for item in result.nodes.get("items") or ()]
        for name in fitting:
            if name not in nodes:
                msg = (
                    f'extender "{self.settings.url}" claims a filtered node "{name}" which is not '
                    "found in the input node list"
                )
                raise ExtenderFailed(msg)
        refusals = {
            name: NodeRefusal((reason,)) for name, reason in (result.failed_nodes or {}).items()
        }
        for name, reason in (result.failed_and_unresolvable_nodes or {}).items():
            refusals[name] = NodeRefusal((reason,), resolvable=False)
        return fitting, refusals

    async def prioritize(self, pod: Obj, nodes: Mapping[str, Obj]) -> dict[str, int]:
        """Ask for scores; returned on the scheduler's scale, weight applied."""
        if not self.settings.prioritize_verb:
            return {}
        raw = await self._send(self.settings.prioritize_verb, self._args(pod, nodes))
        scale = self.settings.weight * (MAX_NODE_SCORE // MAX_EXTENDER_PRIORITY)
        return {item.host: item.score * scale for item in _decode(raw, list[_HostPriority])}

    async def bind(self, pod: Obj, node: str) -> None:
        """Have the extender bind the pod."""
        metadata = pod["metadata"]
        body = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"],
            "Node": node,
        }
        result = _decode(await self._send(self.settings.bind_verb, body), _BindResult)
        if result.error:
            raise ExtenderFailed(result.error)


def _decode(raw: bytes, kind: Any) -> Any:  # noqa: ANN401 - generic over the reply types
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        msg = f"cannot read the extender's answer: {error}"
        raise ExtenderFailed(msg) from error
