# SPDX-License-Identifier: Apache-2.0
"""Objects that AI operators create from a user's object, as far as pods depend on them.

Kubernetes' own controllers create the pods of Deployments, StatefulSets and Jobs; KubeRay and
Volcano create pods themselves. Written from the documented behavior of each operator: KubeRay 1.5,
KServe 0.16 (raw deployment), Kubeflow Trainer 2.1 with JobSet 0.10, LeaderWorkerSet 0.7, Volcano
1.13. ``runnable`` then replaces what a simulated node cannot run: images, commands and probes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

Obj = dict[str, Any]

TELL = "cat /etc/hami/limits; trap 'exit 0' TERM; while :; do sleep 0.2; done"
HAMI = "hami-scheduler"
_INDEX = "batch.kubernetes.io/job-completion-index"


class Kind(Struct, frozen=True, kw_only=True):
    """A custom resource, which the API server stores without a schema."""

    group: str
    version: str
    kind: str
    plural: str

    def definition(self) -> Obj:
        """Return the CustomResourceDefinition."""
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{self.plural}.{self.group}"},
            "spec": {
                "group": self.group,
                "scope": "Namespaced",
                "names": {
                    "kind": self.kind,
                    "plural": self.plural,
                    "singular": self.kind.lower(),
                },
                "versions": [
                    {
                        "name": self.version,
                        "served": True,
                        "storage": True,
                        "schema": {
                            "openAPIV3Schema": {
                                "type": "object",
                                "x-kubernetes-preserve-unknown-fields": True,
                            }
                        },
                    }
                ],
            },
        }


KINDS = tuple(
    Kind(group=group, version=version, kind=kind, plural=plural)
    for group, version, kind, plural in (
        ("ray.io", "v1", "RayCluster", "rayclusters"),
        ("serving.kserve.io", "v1beta1", "InferenceService", "inferenceservices"),
        ("trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs"),
        ("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets"),
        ("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets"),
        ("batch.volcano.sh", "v1alpha1", "Job", "jobs"),
        ("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups"),
        ("scheduling.x-k8s.io", "v1alpha1", "PodGroup", "podgroups"),
    )
)


def ray(cluster: Obj) -> Iterator[Obj]:
    """KubeRay: the head's pod, and as many pods of each worker group as it has replicas."""
    name = cluster["metadata"]["name"]
    spec = cluster["spec"]
    groups = [("headgroup", "head", 1, spec["headGroupSpec"])] + [
        (group["groupName"], "worker", group["replicas"], group)
        for group in spec["workerGroupSpecs"]
    ]
    for group, node_type, replicas, of_group in groups:
        for number in range(replicas):
            template = copy.deepcopy(of_group["template"])
            labels = {
                "ray.io/cluster": name,
                "ray.io/group": group,
                "ray.io/node-type": node_type,
                "ray.io/is-ray-node": "yes",
            }
            container = template["spec"]["containers"][0]
            container.setdefault("env", []).append({"name": "RAY_CLUSTER_NAME", "value": name})
            container.setdefault("volumeMounts", []).append(
                {"name": "shared-mem", "mountPath": "/dev/shm"}
            )
            template["spec"].setdefault("volumes", []).append(
                {"name": "shared-mem", "emptyDir": {"medium": "Memory"}}
            )
            if node_type == "worker":
                template["spec"]["initContainers"] = [
                    {
                        "name": "wait-gcs-ready",
                        "image": container["image"],
                        "resources": {"limits": {"cpu": "200m", "memory": "256Mi"}},
                    }
                ]
            yield _pod(f"{name}-{group}-{number}", template, labels)


def kserve(service: Obj) -> Iterator[Obj]:
    """KServe's raw deployment: a Deployment that names the default scheduler."""
    name = service["metadata"]["name"]
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    labels = {"serving.kserve.io/inferenceservice": name, "component": "predictor"}
    spec = {
        "schedulerName": "default-scheduler",
        "initContainers": [
            {
                "name": "storage-initializer",
                "image": "kserve/storage-initializer:v0.16.0",
                "args": [model["storageUri"], "/mnt/models"],
                "volumeMounts": [{"name": "kserve-provision-location", "mountPath": "/mnt/models"}],
            }
        ],
        "containers": [
            {
                "name": "kserve-container",
                "image": "kserve/huggingfaceserver:v0.16.0-gpu",
                "args": [f"--model_name={name}", *model["args"]],
                "resources": {
                    "limits": model["resources"]["limits"],
                    # KServe's defaults for requests that the user leaves out.
                    "requests": {"cpu": "1", "memory": "2Gi"},
                },
                "volumeMounts": [
                    {
                        "name": "kserve-provision-location",
                        "mountPath": "/mnt/models",
                        "readOnly": True,
                    }
                ],
            }
        ],
        "volumes": [{"name": "kserve-provision-location", "emptyDir": {}}],
    }
    yield {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{name}-predictor"},
        "spec": {
            "replicas": predictor["minReplicas"],
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def trainer(job: Obj) -> Iterator[Obj]:
    """Kubeflow Trainer with the runtime torch-distributed: a JobSet, as its controller makes it."""
    name = job["metadata"]["name"]
    wanted = job["spec"]["trainer"]
    environment = {
        "PET_NNODES": wanted["numNodes"],
        "PET_NPROC_PER_NODE": wanted["numProcPerNode"],
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": 29400,
    }
    container = {
        "name": "node",
        "image": wanted["image"],
        "command": wanted["command"],
        "resources": wanted["resourcesPerNode"],
        "env": [
            *({"name": key, "value": str(value)} for key, value in environment.items()),
            {
                "name": "PET_NODE_RANK",
                "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}},
            },
        ],
        "ports": [{"containerPort": 29400}],
    }
    replicated = {
        "name": "node",
        "replicas": 1,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "parallelism": wanted["numNodes"],
                "completions": wanted["numNodes"],
                "template": {"spec": {"containers": [container]}},
            },
        },
    }
    yield from jobset({"metadata": {"name": name}, "spec": {"replicatedJobs": [replicated]}})


def jobset(jobs: Obj) -> Iterator[Obj]:
    """JobSet: indexed Jobs whose pods have a stable host name."""
    name = jobs["metadata"]["name"]
    for replicated in jobs["spec"]["replicatedJobs"]:
        for number in range(replicated["replicas"]):
            spec = copy.deepcopy(replicated["template"]["spec"])
            template = spec["template"]
            template.setdefault("metadata", {})["labels"] = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                "jobset.sigs.k8s.io/job-index": str(number),
            }
            template["spec"] |= {"restartPolicy": "Never", "subdomain": name}
            yield {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": f"{name}-{replicated['name']}-{number}"},
                "spec": {**spec, "completionMode": "Indexed", "backoffLimit": 0},
            }


def leader_worker_set(group: Obj) -> Iterator[Obj]:
    """LeaderWorkerSet: a StatefulSet of leaders, and one of workers for each leader."""
    name = group["metadata"]["name"]
    wanted = group["spec"]["leaderWorkerTemplate"]
    replicas, size = group["spec"]["replicas"], wanted["size"]
    word = "leaderworkerset.sigs.k8s.io"
    leader = wanted.get("leaderTemplate", wanted["workerTemplate"])
    yield _stateful_set(name, replicas, leader, {f"{word}/name": name, f"{word}/worker-index": "0"})
    for number in range(replicas):
        labels = {f"{word}/name": name, f"{word}/group-index": str(number)}
        yield _stateful_set(f"{name}-{number}", size - 1, wanted["workerTemplate"], labels, first=1)


def _stateful_set(
    name: str, replicas: int, template: Obj, labels: dict[str, str], *, first: int = 0
) -> Obj:
    template = copy.deepcopy(template)
    template.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    for container in template["spec"]["containers"]:
        container.setdefault("env", []).append({"name": "LWS_GROUP_SIZE", "value": "2"})
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "serviceName": name,
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "ordinals": {"start": first},
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }


def volcano(job: Obj) -> Iterator[Obj]:
    """Volcano's job controller: a PodGroup, and the pods of each task, which name it."""
    name = job["metadata"]["name"]
    group = f"{name}-f3b6c2b0"
    yield {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": group},
        "spec": {"minMember": job["spec"]["minAvailable"], "queue": "default"},
    }
    for task in job["spec"]["tasks"]:
        for number in range(task["replicas"]):
            template = copy.deepcopy(task["template"])
            template["spec"] |= {
                "schedulerName": job["spec"]["schedulerName"],
                "hostname": f"{name}-{task['name']}-{number}",
                "subdomain": name,
                "restartPolicy": "OnFailure",
            }
            annotations = {
                "scheduling.k8s.io/group-name": group,
                "volcano.sh/task-spec": task["name"],
                "volcano.sh/job-name": name,
            }
            template.setdefault("metadata", {})["annotations"] = annotations
            pod = f"{name}-{task['name']}-{number}"
            yield _pod(pod, template, {"volcano.sh/job-name": name})


def unchanged(document: Obj) -> Iterator[Obj]:
    """No operator: an object that Kubernetes itself knows."""
    yield document


def _pod(name: str, template: Obj, labels: dict[str, str]) -> Obj:
    metadata = template.get("metadata", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**metadata.get("labels", {}), **labels},
            "annotations": metadata.get("annotations", {}),
        },
        "spec": template["spec"],
    }


def runnable(document: Obj, case: str) -> Obj:
    """Return a copy whose containers print their limits, with the label ``case`` on its pods."""
    changed = copy.deepcopy(document)
    for template in _templates(changed):
        template.setdefault("metadata", {}).setdefault("labels", {})["case"] = case
        spec = template["spec"]
        spec["terminationGracePeriodSeconds"] = 1
        for container in spec.get("initContainers", []):
            container.update(image="app", command=["true"])
            container.pop("args", None)
        for container in spec["containers"]:
            has_share = "nvidia.com/gpu" in container.get("resources", {}).get("limits", {})
            script = TELL if has_share else TELL.partition("; ")[2]
            container.update(image="app", command=["sh", "-c", script])
            for key in ("args", "livenessProbe", "readinessProbe", "ports"):
                container.pop(key, None)
    return changed


def _templates(document: Obj) -> Iterator[Obj]:
    if document["kind"] == "Pod":
        yield document
    elif template := document["spec"].get("template"):
        yield template


Operator = Callable[[Obj], Iterator[Obj]]
