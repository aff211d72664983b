# SPDX-License-Identifier: Apache-2.0
"""Lists kubelet's pods: with PodResources ``List`` over its socket, or falls back to ``/pods``.

``List`` returns sidecars and application containers with their device ids; since Kubernetes 1.34 it
returns active pods only. ``/pods`` (if an address is set) returns pods with uid but without device
ids; then only the agent's own grants show which containers are served. Kubelet answers at most 100
requests per second and rejects the rest at once, so such a rejection is retried within the
deadline. Seconds throughout.
"""

import logging
import ssl

import aiohttp
import anyio
import grpc
import grpc.aio
import msgspec

from hami_common.errors import Unavailable
from hami_common.kubeletapi import podresources as api
from hami_common.kubeletapi import podresources_grpc
from hami_common.pods.podview import PodListView
from hami_nodeagent.core.claims import ListedPod
from hami_nodeagent.shell.site import Site

PEER = "kubelet"
_BUSY_WAIT_S = 0.02
_MESSAGE_LIMIT = 16 << 20
"""Kubelet's own limit for responses of this service, in bytes."""
_OPTIONS = [
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MESSAGE_LIMIT),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]

_log = logging.getLogger(__name__)
_pods_decoder = msgspec.json.Decoder(PodListView)


class PodsPage:
    """Reads kubelet's ``/pods`` over HTTP(S)."""

    def __init__(self, url: str, *, token_file: str = "", ca_file: str = "") -> None:
        self._url = url
        self._token_file = token_file
        self._ca_file = ca_file

    async def read(self, timeout_s: float) -> tuple[ListedPod, ...]:
        """Return kubelet's pods; ``Unavailable`` if kubelet does not answer."""
        headers = {}
        try:
            if self._token_file:
                token = await anyio.Path(self._token_file).read_text(encoding="ascii")
                headers["Authorization"] = f"Bearer {token.strip()}"
            tls = ssl.create_default_context(cafile=self._ca_file or None)
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._url, headers=headers, ssl=tls) as answer,
            ):
                answer.raise_for_status()
                pods = _pods_decoder.decode(await answer.read()).items
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise Unavailable(peer=PEER, detail=f"/pods: {str(error) or 'no answer'}") from error
        return tuple(
            ListedPod(
                namespace=pod.metadata.namespace, name=pod.metadata.name, uid=pod.metadata.uid
            )
            for pod in pods
        )


class PodResources:
    """Client of kubelet's list of pods. ``aclose`` ends the connection."""

    def __init__(self, *, site: Site, fallback: PodsPage | None = None) -> None:
        self._timeout_s = site.settings.list_timeout_s
        self._settle_s = site.settings.settle_s
        self._clock = site.clock
        self._metrics = site.metrics
        self._fallback = fallback
        self._first_seen_s: dict[tuple[str, str], float] = {}
        self._channel = grpc.aio.insecure_channel(
            f"unix:{site.settings.pod_resources_socket}", options=_OPTIONS
        )
        self._stub = podresources_grpc.PodResourcesListerStub(self._channel)

    async def aclose(self) -> None:
        """Close the connection to kubelet."""
        with anyio.CancelScope(shield=True):
            await self._channel.close()

    async def list(self, *, timeout_s: float | None = None) -> tuple[ListedPod, ...]:
        """Return kubelet's pods; ``Unavailable`` if neither source answers."""
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        begun_s = self._clock.monotonic_s()
        try:
            listed = _listed(await self.answer(timeout_s=limit_s))
        except Unavailable:
            self._metrics.list_failures.inc()
            if self._fallback is None:
                raise
            listed = await self._fallback.read(limit_s)
        self._metrics.list_seconds.observe(self._clock.monotonic_s() - begun_s)
        return self._settled(listed)

    async def healthy_ids(self, resource: str, *, timeout_s: float) -> frozenset[str] | None:
        """Return healthy ids of ``resource`` in kubelet; ``None`` if kubelet does not answer."""
        try:
            answer = await self._stub.GetAllocatableResources(
                api.AllocatableResourcesRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            _log.debug("allocatable resources unknown", extra={"problem": error.details()})
            return None
        return frozenset(
            one
            for entry in answer.devices
            if entry.resource_name == resource
            for one in entry.device_ids
        )

    async def serves_get(self, *, timeout_s: float) -> bool:
        """Return whether kubelet serves ``Get``; ``Unavailable`` if it does not answer."""
        # No pod has this name: kubelet would have to look it up only to miss it.
        absent = api.GetPodResourcesRequest(pod_name="-", pod_namespace="-")
        try:
            await self._stub.Get(absent, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.NOT_FOUND):
                return "not found" in (error.details() or "")  # else: "… method disabled"
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            raise Unavailable(
                peer=PEER, detail=f"PodResources Get: {error.code().name} {error.details()}"
            ) from error
        return True

    async def answer(self, *, timeout_s: float) -> api.ListPodResourcesResponse:
        """Return kubelet's own answer to ``List``; ``Unavailable`` if it does not answer."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while True:
            left_s = max(0.05, deadline_s - self._clock.monotonic_s())
            try:
                return await self._stub.List(api.ListPodResourcesRequest(), timeout=left_s)
            except grpc.aio.AioRpcError as error:
                retryable = error.code() in (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.UNAVAILABLE,
                )
                if not retryable or self._clock.monotonic_s() + _BUSY_WAIT_S >= deadline_s:
                    raise Unavailable(
                        peer=PEER,
                        detail=f"PodResources List: {error.code().name} {error.details()}",
                    ) from error
                await anyio.sleep(_BUSY_WAIT_S)

    def _settled(self, listed: tuple[ListedPod, ...]) -> tuple[ListedPod, ...]:
        now_s = self._clock.monotonic_s()
        names = {(pod.namespace, pod.name) for pod in listed}
        self._first_seen_s = {name: self._first_seen_s.get(name, now_s) for name in names}
        return tuple(
            msgspec.structs.replace(pod, settled=True)
            if now_s - self._first_seen_s[pod.namespace, pod.name] >= self._settle_s
            else pod
            for pod in listed
        )

    def forget_settled(self) -> None:
        """Forget which pods are settled: kubelet restarted and admits all its pods again."""
        self._first_seen_s.clear()


def _listed(answer: api.ListPodResourcesResponse) -> tuple[ListedPod, ...]:
    return tuple(
        ListedPod(
            namespace=pod.namespace,
            name=pod.name,
            ids_by_container={container.name: _ids(container) for container in pod.containers},
        )
        for pod in answer.pod_resources
    )


def _ids(container: api.ContainerResources) -> dict[str, frozenset[str]]:
    """Return the ids by resource; kubelet repeats a resource once per id and NUMA node."""
    ids: dict[str, set[str]] = {}
    for entry in container.devices:
        ids.setdefault(entry.resource_name, set()).update(entry.device_ids)
    return {resource: frozenset(found) for resource, found in ids.items() if found}
