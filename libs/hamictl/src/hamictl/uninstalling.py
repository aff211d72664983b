# SPDX-License-Identifier: Apache-2.0
"""Prepares a cluster for the removal of HAMi's manifests, for ``hamictl uninstall``.

Steps, each idempotent, so that an interrupted run is repeated from the beginning:

1. Refuse while pods hold shares, unless they may stay; their limits stay in force until they end.
   Pods with claims may not: without the agent's plugin, kubelet cannot end them.
2. Delete the scheduler, so that no pod is placed, and the agents. A ConfigMap keeps the
   settings of the removal pods until everything is done.
3. Run a removal pod on each node with an agent (``hami_nodeagent remove``). Files that running
   containers have mapped stay. Delete the node's ResourceSlices.
4. Remove this project's annotations and labels from nodes, and the totals of memory and compute
   that the agents advertised in node status.
5. Remove the resources of the agents' device plugins from node status, once kubelet reports none:
   five minutes after a plugin ended. Kubelet itself leaves them with the amount 0.

Manifests are left to ``kubectl delete``. Times in seconds.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.compat import hamiformat, volcano
from hami_common.dra.claims import ResourceClaim
from hami_common.dra.names import DRIVER, GROUP, VERSION, node_of_any_pool
from hami_common.errors import Conflict, HamiError, NotFound
from hami_common.events.codec import decode
from hami_common.pods import annotations
from hami_common.ports import Clock, KubeApi
from hami_common.skus.expansion import ACCELERATORS
from hami_common.vendors.catalog import Catalog
from hamictl import installation
from hamictl.installation import Document

AGENT_DEVICES: Final = "hami-agent-devices"
AGENT_DEVICES_RESOURCE: Final = "hami.io/agent-devices"
SCHEDULER: Final = "hami-scheduler"
PLAN: Final = "hami-uninstall"
"""ConfigMap of the agents' namespace with what the removal pods need."""
HOST: Final = "/host"
CONFIG: Final = "/etc/hami-agent/config"
ANNOTATIONS: Final = (
    annotations.CAPACITY_RETURNED,
    annotations.TAKEN_OVER,
    annotations.DEVICE_CORDON,
    annotations.DEVICE_CORDON_REASONS,
    *(word.register for word in hamiformat.WORDS if word.register),
)
"""Annotations that the services and hamictl write on nodes."""
POLL_S: Final = 1.0
STEADY_S: Final = 25.0
"""Kubelet compares node status every 10 s: what stays the same this long will not change."""
PARALLEL: Final = 50


class Program(Struct, frozen=True, kw_only=True):
    """Needs of the removal pods on one agent's nodes."""

    vendor: str
    image: str
    nodes: tuple[str, ...]
    pull_policy: str = ""
    pull_secrets: tuple[str, ...] = ()
    config_map: str = ""
    env: tuple[dict[str, Any], ...] = ()
    security: dict[str, Any] = {}
    """Security context of the agent's pods, with their SELinux type."""


class HeldPod(Struct, frozen=True, kw_only=True):
    """A pod that holds a share."""

    namespace: str
    pod: str
    node: str
    claim: str = ""
    """Its ResourceClaim with devices of ours; empty: it has them by the device plugin."""


class NodeResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Things removed from one node, and those left."""

    node: str
    files_removed: tuple[str, ...] = ()
    files_kept: tuple[str, ...] = ()
    keys_removed: tuple[str, ...] = ()
    resources_removed: tuple[str, ...] = ()
    resources_left: tuple[str, ...] = ()
    slices_removed: tuple[str, ...] = ()
    problem: str = ""


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of a run; of a dry run, what it would do."""

    pods: tuple[HeldPod, ...]
    deleted: tuple[str, ...]
    nodes: tuple[NodeResult, ...]

    @property
    def pods_by_claim(self) -> tuple[HeldPod, ...]:
        """The pods that have to be deleted before the agents are."""
        return tuple(one for one in self.pods if one.claim)

    @property
    def is_complete(self) -> bool:
        """True when nothing failed; files of running pods do not count."""
        return not any(one.problem or one.resources_left for one in self.nodes)


class Uninstaller:
    """Removes what HAMi left on nodes."""

    def __init__(
        self,
        kube: KubeApi,
        *,
        namespace: str,
        agents_namespace: str,
        clock: Clock,
        node_limit_s: float,
        kubelet_limit_s: float,
        report: Callable[[str], None],
    ) -> None:
        """``kubelet_limit_s``: longest wait for kubelet to forget the device plugins; 0: none."""
        self._kube = kube
        self._namespace = namespace
        self._agents = agents_namespace
        self._clock = clock
        self._node_limit_s = node_limit_s
        self._kubelet_limit_s = kubelet_limit_s
        self._report = report

    async def pods(self) -> tuple[HeldPod, ...]:
        """Return the pods on nodes that hold shares."""
        found = await installation.items(
            self._kube, "/api/v1/pods", label_selector=f"{annotations.MANAGED_LABEL}=true"
        )
        by_claim = {(one.namespace, one.pod): one for one in await self._pods_by_claim()}
        by_plugin = [
            HeldPod(
                namespace=pod["metadata"]["namespace"],
                pod=pod["metadata"]["name"],
                node=pod["spec"]["nodeName"],
            )
            for pod in found
            if pod["spec"].get("nodeName")
            and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        ]
        others = [one for one in by_plugin if (one.namespace, one.pod) not in by_claim]
        return (*others, *by_claim.values())

    async def _pods_by_claim(self) -> list[HeldPod]:
        """Return the pods for which claims with devices of ours are reserved.

        Kubernetes takes a reservation back once the pod has finished.
        """
        return [
            HeldPod(
                namespace=claim.namespace,
                pod=consumer.name,
                node=nodes[0],
                claim=claim.metadata.name,
            )
            for claim in map(
                _claim_of, filter(_has_our_devices, await self._dra_objects("resourceclaims"))
            )
            if (nodes := _nodes_of(claim))
            for consumer in claim.consumers()
        ]

    async def _dra_objects(self, plural: str) -> list[Document]:
        """Return all objects of a kind; none where the API server does not serve it."""
        try:
            return await installation.items(self._kube, f"/apis/{GROUP}/{VERSION}/{plural}")
        except NotFound:
            return []

    async def _slices(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the ResourceSlices of our driver, by node."""
        found: dict[str, tuple[str, ...]] = {}
        for one in await self._dra_objects("resourceslices"):
            if one["spec"].get("driver") == DRIVER:
                node = str(one["spec"].get("nodeName", ""))
                found[node] = (*found.get(node, ()), one["metadata"]["name"])
        return found

    async def plan(self) -> Outcome:
        """Return what a run would do, without a change."""
        programs = await self._programs()
        kinds = await self._workloads()
        nodes = await installation.items(self._kube, "/api/v1/nodes")
        resources = await self._resources()
        served = {name for program in programs for name in program.nodes}
        slices = await self._slices()
        results = []
        for node in nodes:
            name = node["metadata"]["name"]
            keys, left = _keys(node), tuple(_present(node, resources | _advertised(node)))
            own = slices.get(name, ())
            if name in served or keys or left or own:
                results.append(
                    NodeResult(
                        node=name, keys_removed=keys, resources_removed=left, slices_removed=own
                    )
                )
        return Outcome(
            pods=await self.pods(), deleted=tuple(path for path, _ in kinds), nodes=tuple(results)
        )

    async def run(self) -> Outcome:
        """Do everything; the pods with shares are those that are left to end by themselves."""
        programs = await self._programs()
        await self._save(programs)
        deleted = await self._delete_workloads()
        files: dict[str, NodeResult] = {}
        limiter = anyio.CapacityLimiter(PARALLEL)

        async def one(program: Program, node: str) -> None:
            async with limiter:
                files[node] = await self._remove_files(program, node)

        async with anyio.create_task_group() as group:
            for program in programs:
                for node in program.nodes:
                    group.start_soon(one, program, node)
        slices = await self._slices()
        for name in (name for own in slices.values() for name in own):
            await self._delete(api_path("apis", GROUP, VERSION, "resourceslices", name))
        advertised = await self._remove_advertised()
        keys = await self._remove_keys()
        resources = await self._remove_resources()
        results = [
            msgspec.structs.replace(
                files.get(name, NodeResult(node=name)),
                keys_removed=keys.get(name, ()),
                resources_removed=(
                    *advertised.get(name, ()),
                    *resources.get(name, ((), ()))[0],
                ),
                resources_left=resources.get(name, ((), ()))[1],
                slices_removed=slices.get(name, ()),
            )
            for name in sorted({*files, *keys, *advertised, *resources, *slices})
        ]
        outcome = Outcome(pods=await self.pods(), deleted=tuple(deleted), nodes=tuple(results))
        if outcome.is_complete and not any(one.files_kept for one in results):
            await self._delete(self._plan_path())
        return outcome

    # --- what is there ---------------------------------------------------------------------------

    def _plan_path(self) -> str:
        return api_path("api", "v1", "namespaces", self._agents, "configmaps", PLAN)

    async def _programs(self) -> list[Program]:
        """Return the removal programs: of the agents' DaemonSets, else of an interrupted run."""
        agents = await installation.agents(self._kube, self._agents)
        if not agents:
            try:
                saved = await installation.get(self._kube, self._plan_path())
            except NotFound:
                return []
            return msgspec.json.decode(saved["data"]["programs"], type=list[Program])
        nodes = await installation.items(self._kube, "/api/v1/nodes")
        return [
            Program(
                vendor=agent.vendor,
                image=str(agent.container.get("image", "")),
                nodes=tuple(
                    sorted(node["metadata"]["name"] for node in nodes if agent.selects(node))
                ),
                pull_policy=str(agent.container.get("imagePullPolicy", "")),
                pull_secrets=tuple(one["name"] for one in agent.pod.get("imagePullSecrets") or ()),
                config_map=next(
                    (
                        volume["configMap"]["name"]
                        for volume in agent.pod.get("volumes") or ()
                        if volume["name"] == "config"
                    ),
                    "",
                ),
                security=agent.pod.get("securityContext") or {},
                env=tuple(
                    one
                    for one in agent.container.get("env") or ()
                    if one["name"].startswith("HAMI_NODEAGENT_")
                ),
            )
            for agent in agents
        ]

    async def _save(self, programs: Sequence[Program]) -> None:
        if not programs:
            return
        document = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": PLAN, "namespace": self._agents},
            "data": {"programs": msgspec.json.encode(programs).decode()},
        }
        body = json.dumps(document).encode()
        path = api_path("api", "v1", "namespaces", self._agents, "configmaps")
        try:
            await self._kube.create(path, body)
        except Conflict:
            await self._kube.patch(self._plan_path(), body)

    async def _workloads(self) -> list[tuple[str, str]]:
        """Return the paths of scheduler and agents, with the selector of their pods."""
        found = []
        for namespace, kind, names in (
            (self._namespace, "deployments", (SCHEDULER,)),
            (self._agents, "daemonsets", (installation.AGENT, AGENT_DEVICES)),
        ):
            for name in names:
                selector = f"{installation.NAME_LABEL}={name}"
                path = api_path("apis", "apps", "v1", "namespaces", namespace, kind)
                found += [
                    (f"{path}/{item['metadata']['name']}", selector)
                    for item in await installation.items(self._kube, path, label_selector=selector)
                ]
        return found

    async def _resources(self) -> frozenset[str]:
        """Return the resources that the agents' device plugins advertise."""
        webhook = await installation.webhook_settings(self._kube, self._namespace)
        catalog = Catalog.from_settings(webhook.vendors)
        counts = {family.count for vendor in catalog.vendors for family in vendor.families}
        return frozenset(counts | {ACCELERATORS, AGENT_DEVICES_RESOURCE})

    # --- steps -----------------------------------------------------------------------------------

    async def _delete_workloads(self) -> list[str]:
        deleted = []
        for path, _ in await self._workloads():
            self._report(f"deleting {path.rpartition('/')[2]}")
            await self._delete(path, propagation="Foreground")
            deleted.append(path)
        with anyio.move_on_after(self._node_limit_s):
            while True:
                if not await self._agent_pods():
                    break
                await anyio.sleep(POLL_S)
        return deleted

    async def _agent_pods(self) -> list[Document]:
        names = f"({installation.AGENT}, {AGENT_DEVICES})"
        return await installation.items(
            self._kube,
            api_path("api", "v1", "namespaces", self._agents, "pods"),
            label_selector=f"{installation.NAME_LABEL} in {names}",
        )

    async def _delete(self, path: str, *, propagation: str = "Background") -> None:
        try:
            await self._kube.delete(
                path, body=json.dumps({"propagationPolicy": propagation}).encode()
            )
        except NotFound:
            return

    async def _remove_files(self, program: Program, node: str) -> NodeResult:
        """Run the removal pod of one node."""
        name = f"{PLAN}-{secrets.token_hex(4)}"
        pods = api_path("api", "v1", "namespaces", self._agents, "pods")
        self._report(f"removing files on {node}")
        try:
            manifest = removal_pod(program, node, name=name, limit_s=self._node_limit_s)
            await self._kube.create(pods, json.dumps(manifest).encode())
            return await self._result(f"{pods}/{name}", node)
        except HamiError as error:
            return NodeResult(node=node, problem=str(error))
        finally:
            with anyio.move_on_after(POLL_S * 10, shield=True):
                await self._delete(f"{pods}/{name}")

    async def _result(self, path: str, node: str) -> NodeResult:
        pod: Document = {}
        with anyio.move_on_after(self._node_limit_s):
            while (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                await anyio.sleep(POLL_S / 4)
                pod = await installation.get(self._kube, path)
        status = pod.get("status") or {}
        states = (status.get("containerStatuses") or [{}])[0].get("state") or {}
        message = (states.get("terminated") or {}).get("message", "")
        try:
            found = msgspec.json.decode(message, type=dict[str, list[str]])
        except msgspec.DecodeError:
            waiting = (states.get("waiting") or {}).get("reason", "")
            why = message or status.get("message") or waiting or "the node does not answer"
            return NodeResult(
                node=node, problem=f"its files were not removed: {why}; run the command again"
            )
        return NodeResult(
            node=node,
            files_removed=tuple(found.get("removed", ())),
            files_kept=tuple(found.get("kept", ())),
            problem="; ".join(found.get("problems", ())),
        )

    async def _remove_advertised(self) -> dict[str, tuple[str, ...]]:
        """Return by node the totals removed from its status: those that its annotations name."""
        done = {}
        for node in await installation.items(self._kube, "/api/v1/nodes"):
            present = _present(node, _advertised(node))
            if present:
                name = node["metadata"]["name"]
                await self._remove_amounts(name, node, present)
                done[name] = tuple(present)
        return done

    async def _remove_keys(self) -> dict[str, tuple[str, ...]]:
        done = {}
        for node in await installation.items(self._kube, "/api/v1/nodes"):
            keys = _keys(node)
            if not keys:
                continue
            notes = {key: None for key in keys if _is_annotation(key)}
            labels = {key: None for key in keys if not _is_annotation(key)}
            body = json.dumps({"metadata": {"annotations": notes, "labels": labels}}).encode()
            name = node["metadata"]["name"]
            await self._kube.patch(api_path("api", "v1", "nodes", name), body)
            done[name] = keys
        return done

    async def _remove_resources(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return by node the resources removed from its status, and those left."""
        resources = await self._resources()
        removed: dict[str, set[str]] = {}
        is_needed = False
        deadline_s = self._clock.monotonic_s() + self._kubelet_limit_s
        steady_since_s: float | None = None
        while True:
            left: dict[str, list[str]] = {}
            for node in await installation.items(self._kube, "/api/v1/nodes"):
                name = node["metadata"]["name"]
                present = _present(node, resources)
                is_needed = is_needed or bool(present)
                gone = [one for one in present if _amounts(node, one) == ("0", "0")]
                if gone:
                    await self._remove_amounts(name, node, gone)
                    removed.setdefault(name, set()).update(gone)
                    steady_since_s = None
                # A positive amount to allocate is of another device plugin.
                waiting = [
                    one for one in present if one not in gone and _amounts(node, one)[1] == "0"
                ]
                if waiting:
                    left[name] = waiting
            now_s = self._clock.monotonic_s()
            if left:
                steady_since_s = None
                nodes = ", ".join(sorted(left))
                self._report(f"waiting for kubelet to forget the device plugins on {nodes}")
            elif steady_since_s is None:
                steady_since_s = now_s
            is_steady = steady_since_s is not None and now_s - steady_since_s >= STEADY_S
            if is_steady or not is_needed or now_s >= deadline_s:
                return {
                    name: (tuple(sorted(removed.get(name, ()))), tuple(left.get(name, ())))
                    for name in {*removed, *left}
                }
            await self._clock.sleep(POLL_S)

    async def _remove_amounts(self, name: str, node: Document, gone: Sequence[str]) -> None:
        operations = [
            {"op": "remove", "path": f"/status/{part}/{one.replace('~', '~0').replace('/', '~1')}"}
            for part in ("capacity", "allocatable")
            for one in gone
            if one in (node["status"].get(part) or {})
        ]
        path = f"{api_path('api', 'v1', 'nodes', name)}/status"
        body = json.dumps(operations).encode()
        await self._kube.patch(path, body, content_type="application/json-patch+json")


def removal_pod(program: Program, node: str, *, name: str, limit_s: float) -> Document:
    """Return the manifest of the pod that removes the agent's files from a node.

    It sees the host's root file system and processes, as root without other privileges.
    """
    container: Document = {
        "name": "remove",
        "image": program.image,
        "args": ["remove", "--host", HOST],
        "env": list(program.env),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {
                "drop": ["ALL"],
                "add": ["DAC_READ_SEARCH", "DAC_OVERRIDE", "SYS_PTRACE"],
            },
        },
        "volumeMounts": [{"name": "host", "mountPath": HOST}],
    }
    volumes: list[Document] = [{"name": "host", "hostPath": {"path": "/", "type": "Directory"}}]
    if program.pull_policy:
        container["imagePullPolicy"] = program.pull_policy
    if program.config_map:
        container["args"] += ["--config", f"{CONFIG}/{installation.AGENT_FILE}"]
        mount = {"name": "config", "mountPath": CONFIG, "readOnly": True}
        container["volumeMounts"].append(mount)
        volumes.append({"name": "config", "configMap": {"name": program.config_map}})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {installation.NAME_LABEL: PLAN}},
        "spec": {
            "nodeName": node,
            "hostPID": True,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(1, int(limit_s)),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"operator": "Exists"}],
            "imagePullSecrets": [{"name": one} for one in program.pull_secrets],
            "securityContext": program.security or {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": volumes,
        },
    }


def _has_our_devices(claim: Document) -> bool:
    """Return whether a claim has devices of our driver; those of others are not decoded."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    return any(one.get("driver") == DRIVER for one in results)


def _claim_of(document: Document) -> ResourceClaim:
    metadata = document["metadata"]
    what = f"ResourceClaim {metadata.get('namespace')}/{metadata.get('name')}"
    # As JSON: the status of a device is any document, which the type keeps as it is.
    return decode(msgspec.json.encode(document), ResourceClaim, what=what)


def _nodes_of(claim: ResourceClaim) -> list[str]:
    """Return the nodes of the claim's devices of ours, the monitor's included."""
    return [node_of_any_pool(one.pool) for one in (*claim.results(), *claim.monitors())]


def _keys(node: Document) -> tuple[str, ...]:
    """Return this project's annotations and labels on a node."""
    metadata: Mapping[str, Any] = node["metadata"]
    labels = metadata.get("labels") or {}
    ours = [f"hami.io/{vendor.name}" for vendor in Catalog.from_settings().vendors]
    notes = metadata.get("annotations") or {}
    # Volcano's own device plugin writes the same keys.
    for_volcano = volcano.OF_NODE if volcano.is_ours(notes) else ()
    return (
        *(key for key in notes if key in for_volcano or _is_ours(key)),
        *(key for key in ours if key in labels),
    )


def _is_annotation(key: str) -> bool:
    """Return whether a key of ``_keys`` is an annotation and not a label."""
    return key in volcano.OF_NODE or _is_ours(key)


def _is_ours(key: str) -> bool:
    """Return whether only the services and hamictl write this annotation of a node."""
    return key in ANNOTATIONS or key.startswith(annotations.ADVERTISED_AMOUNTS)


def _advertised(node: Document) -> frozenset[str]:
    """Return the resources whose totals agents advertise on a node, by its annotations."""
    notes: Mapping[str, str] = node["metadata"].get("annotations") or {}
    return frozenset(
        name
        for key, text in notes.items()
        if key.startswith(annotations.ADVERTISED_AMOUNTS)
        for name in text.split(",")
        if "/" in name
    )


def _present(node: Document, resources: frozenset[str]) -> list[str]:
    status = node.get("status") or {}
    names = {*(status.get("capacity") or {}), *(status.get("allocatable") or {})}
    return sorted(names & resources)


def _amounts(node: Document, resource: str) -> tuple[str, str]:
    status = node.get("status") or {}
    return (
        str((status.get("capacity") or {}).get(resource, "0")),
        str((status.get("allocatable") or {}).get(resource, "0")),
    )
