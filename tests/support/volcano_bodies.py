# SPDX-License-Identifier: Apache-2.0
"""Bodies that Volcano's plugin ``extender`` posts: Go's field names, whole pods (1.14.1)."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hami_scheduler.shell.volcano_wire import ALLOCATED, PENDING

Obj = dict[str, Any]
RUNNING = 32
PIPELINED = 4
POD_LABELS = 12
"""Labels of a pod as large as those of operators."""


def resource(amounts: Mapping[str, int] | None = None) -> Obj:
    """Amounts as Volcano has them: milli, memory in bytes."""
    scalars = None if amounts is None else {key: 1000 * n for key, n in amounts.items()}
    return {"MilliCPU": 4000, "Memory": 8 << 30, "ScalarResources": scalars, "MaxTaskNum": 0}


def task(pod: Obj, *, node: str = "", status: int = PENDING) -> Obj:
    """A task of a pod; the pod is written with the node, as a session does."""
    meta = pod["metadata"]
    written = {**pod, "spec": {**pod["spec"], "nodeName": node}} if node else pod
    return {
        "UID": meta["uid"],
        "Job": f"{meta['namespace']}/group",
        "Name": meta["name"],
        "Namespace": meta["namespace"],
        "TaskRole": "",
        "Resreq": resource({"nvidia.com/gpu": 1}),
        "InitResreq": resource({"nvidia.com/gpu": 1}),
        "NodeName": node,
        "EvictionOccurred": False,
        "JobAllocatedHyperNode": "",
        "Status": status,
        "LastTransaction": None,
        "Priority": 1,
        "NumaInfo": None,
        "Pod": written,
        "CustomBindErrHandlerSucceeded": False,
    }


def node_info(name: str, pods: Iterable[Obj] = ()) -> Obj:
    """A node with its pods."""
    return {
        "Name": name,
        "Node": {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}},
        "State": {"Phase": 1, "Reason": ""},
        **{
            key: resource({"nvidia.com/gpu": 20})
            for key in ("Releasing", "Pipelined", "Idle", "Used", "Allocatable", "Capacity")
        },
        "Tasks": {
            f"{pod['metadata']['namespace']}/{pod['metadata']['name']}": task(
                pod, node=name, status=RUNNING
            )
            for pod in pods
        },
        "Others": {"GpuShare": None, "hamivgpu": None},
    }


def predicate(pod: Obj, node: str, pods: Iterable[Obj] = ()) -> bytes:
    """Body of a predicate call; ``pods`` are those on the node."""
    return json.dumps({"task": task(pod), "node": node_info(node, pods)}).encode()


def prioritize(pod: Obj, nodes: Iterable[str]) -> bytes:
    """Body of a prioritize call."""
    infos = [node_info(node) for node in nodes]
    return json.dumps({"task": task(pod), "nodes": infos}).encode()


def event(pod: Obj, node: str, *, status: int = ALLOCATED) -> bytes:
    """Body of an allocate or deallocate call."""
    return json.dumps({"task": task(pod, node=node, status=status)}).encode()


def job(name: str, pods: Iterable[Obj], *, least: int, status: int = PENDING) -> bytes:
    """Body of a jobEnqueueable call."""
    tasks = {pod["metadata"]["uid"]: task(pod, status=status) for pod in pods}
    document = {
        "UID": f"default/{name}",
        "Name": name,
        "Namespace": "default",
        "Queue": "default",
        "MinAvailable": least,
        "NodesFitErrors": {},
        "TaskStatusIndex": {str(status): tasks},
        "Tasks": tasks,
        "TaskMinAvailable": {},
        "PodGroup": {"Spec": {"minMember": least}},
    }
    return json.dumps({"job": document}).encode()


def as_operators_write(pod: Obj) -> Obj:
    """The pod with what operators, kubelet and managers of fields add: some 9 kB."""
    labels = {f"app.example.com/label-{n}": "value-of-a-label" for n in range(POD_LABELS)}
    env = [{"name": f"VARIABLE_{n}", "value": "x" * 40} for n in range(20)]
    mounts = [{"name": f"volume-{n}", "mountPath": f"/mnt/data-{n}"} for n in range(8)]
    probe = {"httpGet": {"path": "/healthz", "port": 8080, "scheme": "HTTP"}, "periodSeconds": 10}
    fields: Obj = {
        f"f:{key}": {".": {}, **{f"f:field-{n}": {} for n in range(30)}}
        for key in ("metadata", "spec", "status")
    }
    managed = [
        {"manager": name, "operation": "Update", "apiVersion": "v1", "fieldsV1": fields}
        for name in ("kube-controller-manager", "kubelet")
    ]
    containers = [
        {
            **container,
            "env": env,
            "volumeMounts": [*container.get("volumeMounts", ()), *mounts],
            "livenessProbe": probe,
            "readinessProbe": probe,
        }
        for container in pod["spec"]["containers"]
    ]
    volumes = [
        {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": f"claim-{n}"}}
        for n in range(8)
    ]
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    statuses = [
        {
            "name": container["name"],
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            "ready": True,
            "restartCount": 0,
            "image": "registry.example/team/application:1.2.3",
            "imageID": "registry.example/team/application@sha256:" + "0" * 64,
            "containerID": "containerd://" + "1" * 64,
        }
        for container in containers
    ]
    return {
        **pod,
        "metadata": {
            **pod["metadata"],
            "labels": {**pod["metadata"]["labels"], **labels},
            "managedFields": managed,
        },
        "spec": {
            **pod["spec"],
            "containers": containers,
            "volumes": [*pod["spec"].get("volumes", ()), *volumes],
        },
        "status": {
            "phase": "Running",
            "conditions": conditions,
            "containerStatuses": statuses,
        },
    }
