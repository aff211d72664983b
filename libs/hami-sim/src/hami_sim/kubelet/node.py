# SPDX-License-Identifier: Apache-2.0
"""Keeps the node's object and lease: registration, capacity with plugins, Ready, heartbeats.

Times in Unix seconds. A resource whose plugin stayed disconnected is shown as 0, not removed: this
distinguishes it from resources that no plugin ever offered.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal

import anyio

from hami_common.errors import Conflict, HamiError, NotFound
from hami_sim.apiserver.quantity import canonical, parse_quantity
from hami_sim.kube import STRATEGIC, Objects
from hami_sim.kubelet.devices import DeviceManager
from hami_sim.kubelet.environ import NodeFacts
from hami_sim.kubelet.objects import Obj
from hami_sim.kubelet.podstatus import timestamp
from hami_sim.kubelet.settings import KubeletSettings

_LOG = logging.getLogger(__name__)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_RETRY_S = 0.5
_LEASES = "kube-node-lease"
VERSION = "v1.34.2+sim"


class NodeKeeper:
    """The node as the API server shows it."""

    def __init__(
        self,
        client: Objects,
        settings: KubeletSettings,
        devices: DeviceManager,
        *,
        name: str,
        now_s: Callable[[], float],
    ) -> None:
        self.name = name
        self.port = 0
        """Of kubelet's HTTP server."""
        self.node: Obj = {}
        """The newest version known."""
        self._client = client
        self._settings = settings
        self._devices = devices
        self._now_s = now_s
        self._changed = anyio.Event()
        self._lease: Obj | None = None

    def facts(self) -> NodeFacts:
        """Return the facts that downward-API fields can expose."""
        return NodeFacts(host_ip=self._settings.host, allocatable=self.allocatable())

    def allocatable(self) -> dict[str, Decimal]:
        """Return the amounts pods may use."""
        amounts = (self.node.get("status") or {}).get("allocatable") or {}
        return {name: parse_quantity(text).amount for name, text in amounts.items()}

    def note_change(self) -> None:
        """Report the status soon."""
        self._changed.set()

    async def register(self) -> None:
        """Create the node, or take over the one that exists; waits for the API server."""
        architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": architecture,
            "beta.kubernetes.io/os": "linux",
            "beta.kubernetes.io/arch": architecture,
            **self._settings.labels,
        }
        node: Obj = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
            "spec": {"taints": [dict(taint) for taint in self._settings.taints]},
        }
        while True:
            try:
                self.node = await self._create(node)
            except HamiError as error:
                _LOG.info("node not registered yet", extra={"node": self.name, "error": str(error)})
                await anyio.sleep(_RETRY_S)
            else:
                return

    async def _create(self, node: Obj) -> Obj:
        try:
            return await self._client.create("nodes", node)
        except Conflict:
            labels = {"metadata": {"labels": node["metadata"]["labels"]}}
            return await self._client.patch("nodes", self.name, labels)

    async def report(self) -> None:
        """Send the node's status once."""
        status = self._status()
        patch: Obj = {"status": status}
        self.node = await self._client.patch(
            "nodes", self.name, patch, kind=STRATEGIC, subresource="status"
        )

    async def keep_status(self) -> None:
        """Send the status when it changes and every period."""
        while True:
            self._changed = anyio.Event()
            try:
                await self.report()
            except HamiError as error:
                _LOG.info("node status not sent", extra={"node": self.name, "error": str(error)})
                await anyio.sleep(_RETRY_S)
                continue
            with anyio.move_on_after(self._settings.node_status_s):
                await self._changed.wait()

    async def watch(self) -> None:
        """Follow the node's labels, taints and amounts, which decide the admission of pods."""

        def seen(_: Obj | None, new: Obj | None) -> None:
            if new is not None and _revision(new) >= _revision(self.node):
                self.node = new

        selector = f"metadata.name={self.name}"
        await self._client.follow("nodes", seen, field_selector=selector, synced=lambda: None)

    def _status(self) -> Obj:
        old = self.node.get("status") or {}
        counts = self._devices.capacity()
        capacity = {
            "cpu": canonical(self._settings.cpu),
            "memory": canonical(self._settings.memory),
            "pods": str(self._settings.pods),
            "ephemeral-storage": "100Gi",
            **{name: str(count) for name, count in counts.capacity.items()},
        }
        allocatable = {**capacity, **{n: str(count) for n, count in counts.allocatable.items()}}
        for name in counts.removed:
            capacity[name] = allocatable[name] = "0"
        # Resources that no device plugin owns are left alone; all that they have is allocatable.
        known = old.get("capacity") or {}
        offered: dict[str, str | None] = {**allocatable}
        for name in (old.get("allocatable") or {}).keys() - known.keys() - capacity.keys():
            offered[name] = None
        for name in known.keys() - capacity.keys():
            if (old.get("allocatable") or {}).get(name) != known[name]:
                offered[name] = known[name]
        return {
            "capacity": capacity,
            "allocatable": offered,
            "conditions": self._conditions(old),
            "addresses": [
                {"type": "InternalIP", "address": self._settings.host},
                {"type": "Hostname", "address": self.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            "nodeInfo": {
                "machineID": self.name,
                "systemUUID": self.name,
                "bootID": self.name,
                "kernelVersion": platform.release(),
                "osImage": "simulated",
                "containerRuntimeVersion": "sim://1",
                "kubeletVersion": VERSION,
                "kubeProxyVersion": "",
                "operatingSystem": "linux",
                "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            },
        }

    def _conditions(self, old: Obj) -> list[Obj]:
        before = {c["type"]: c for c in old.get("conditions") or ()}
        moment = timestamp(self._now_s())
        conditions = []
        for kind, status, reason, message in (
            ("MemoryPressure", "False", "KubeletHasSufficientMemory", "enough memory"),
            ("DiskPressure", "False", "KubeletHasNoDiskPressure", "no disk pressure"),
            ("PIDPressure", "False", "KubeletHasSufficientPID", "enough process ids"),
            ("Ready", "True", "KubeletReady", "simulated kubelet is posting ready status"),
        ):
            known = before.get(kind)
            is_same = known is not None and known["status"] == status
            since = known["lastTransitionTime"] if known is not None and is_same else moment
            conditions.append(
                {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "message": message,
                    "lastHeartbeatTime": moment,
                    "lastTransitionTime": since,
                }
            )
        return conditions

    async def keep_lease(self) -> None:
        """Renew the node's lease every period."""
        while True:
            try:
                await self._renew()
            except HamiError as error:
                _LOG.info("lease not renewed", extra={"node": self.name, "error": str(error)})
                self._lease = None
            await anyio.sleep(self._settings.lease_s)

    async def _renew(self) -> None:
        moment = datetime.fromtimestamp(self._now_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if self._lease is None:
            try:
                self._lease = await self._client.get(
                    "leases.coordination.k8s.io", self.name, _LEASES
                )
            except NotFound:
                self._lease = await self._create_lease(moment)
                return
        self._lease["spec"]["renewTime"] = moment
        self._lease["spec"]["holderIdentity"] = self.name
        self._lease = await self._client.replace("leases.coordination.k8s.io", self._lease)

    async def _create_lease(self, moment: str) -> Obj:
        lease: Obj = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": _LEASES},
            "spec": {
                "holderIdentity": self.name,
                "leaseDurationSeconds": max(1, int(4 * self._settings.lease_s)),
                "renewTime": moment,
            },
        }
        with suppress(NotFound):
            return await self._client.create("leases.coordination.k8s.io", lease)
        namespace: Obj = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _LEASES}}
        with suppress(Conflict):
            await self._client.create("namespaces", namespace)
        return await self._client.create("leases.coordination.k8s.io", lease)


def _revision(node: Obj) -> int:
    return int((node.get("metadata") or {}).get("resourceVersion") or 0)
