# SPDX-License-Identifier: Apache-2.0
"""Builds the kustomize component of an imported HAMi configuration.

The component replaces the settings of the services, and patches what the base installs for the
default names: kube-scheduler's configuration, the webhook configuration, the admission policies,
and the workloads. Objects that equal those of the base are left out. Reads and writes no files.
"""

from typing import Any, Final

import tomli_w
import yaml
from msgspec import Struct

from hami_common import namespaces
from hami_common.admission.configuration import Client, mutating_webhook_configuration
from hami_common.admission.policies import admission_policies
from hami_common.vendors.catalog import Catalog
from hamictl.hamiconfig import SERVICES, Cluster, Imported, Tree

HEAD: Final = """# SPDX-License-Identifier: Apache-2.0
# Generated from the configuration of HAMi by hamictl import-config.
"""
WORKLOADS: Final = {
    "scheduler": ("Deployment", "hami-scheduler"),
    "control": ("Deployment", "hami-(scheduler|webhook|registry)"),
    "agent": ("DaemonSet", "hami-nodeagent-nvidia"),
    "agents": ("DaemonSet", "hami-nodeagent-.*"),
    "devices": ("DaemonSet", "hami-agent-devices-.*"),
}
"""Kind, and regular expression of the name, of the objects of each patch."""
_NEW_PODS: Final = "create.pods.hami.io"
_WITH_THE_WEBHOOK: Final = ("webhook-opt-out.hami.io", "pod-bounds.hami.io", "limiter.hami.io")
"""Policies that hold in the namespaces of the webhook."""


class Base(Struct, frozen=True, kw_only=True):
    """Files of ``deploy/kustomize`` that the component changes."""

    settings: dict[str, Tree]
    """By service, and ``devices``."""
    kube_scheduler: Tree
    """KubeSchedulerConfiguration."""
    command: list[str]
    """Command of the container ``kube-scheduler``."""
    components: str
    """Directory of the components, relative to the one that is written."""


def files(imported: Imported, base: Base) -> dict[str, str]:
    """Return the content of each file of the component, by path."""
    trees: dict[str, Tree] = {**imported.settings, "devices": imported.devices}
    made = {
        f"config/{name}.toml": HEAD + tomli_w.dumps(merged(base.settings[name], tree))
        for name, tree in trees.items()
    }
    scheduler = kube_scheduler_configuration(imported, base.kube_scheduler)
    if scheduler != base.kube_scheduler:
        made["config/kube-scheduler.yaml"] = HEAD + _yaml(scheduler)
    if imported.cluster.runtime_class:
        made["runtime-class.yaml"] = HEAD + _yaml(
            {
                "apiVersion": "node.k8s.io/v1",
                "kind": "RuntimeClass",
                "metadata": {"name": imported.cluster.runtime_class},
                "handler": "nvidia",
            }
        )
    made["kustomization.yaml"] = HEAD + _yaml(_kustomization(imported, base, made))
    return made


def merged(below: Tree, above: Tree) -> Tree:
    """Merge two trees; values of ``above`` win."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def kube_scheduler_configuration(imported: Imported, base: Tree) -> Tree:
    """Return the configuration with the imported profile, leader election and resources."""
    names = Catalog.from_settings(imported.vendors).resource_names()
    managed = sorted({*names, *imported.cluster.managed_resources})
    (extender,) = base["extenders"]
    (profile,) = base["profiles"]
    return {
        **base,
        "leaderElection": {
            **base["leaderElection"],
            "leaderElect": imported.cluster.leader_elect,
        },
        "profiles": [{**profile, "schedulerName": imported.cluster.scheduler_name}],
        "extenders": [
            {
                **extender,
                "managedResources": [{"name": one, "ignoredByScheduler": True} for one in managed],
            }
        ],
    }


def webhook_configuration(imported: Imported) -> Tree:
    """Return the MutatingWebhookConfiguration for the imported names and selectors."""
    names = Catalog.from_settings(imported.vendors).resource_names()
    client = Client(namespace=namespaces.SYSTEM, service="hami-webhook")
    document = mutating_webhook_configuration(names, client)
    cluster = imported.cluster
    for webhook in document["webhooks"]:
        if webhook["name"] == _NEW_PODS:
            webhook["namespaceSelector"] = _namespaces(webhook["namespaceSelector"], cluster)
            selector = _selector({}, cluster.object_labels, cluster.object_expressions)
            if selector:
                webhook["objectSelector"] = selector
        if not cluster.selects_namespaces:
            del webhook["namespaceSelector"]
    return document


def policies(imported: Imported) -> list[Tree]:
    """Return the admission policies and their bindings for the imported names and selectors."""
    documents = admission_policies(
        Catalog.from_settings(imported.vendors), scheduler_name=imported.cluster.scheduler_name
    )
    for document in documents:
        if document["spec"].get("policyName") in _WITH_THE_WEBHOOK:
            match = document["spec"]["matchResources"]
            match["namespaceSelector"] = _namespaces(match["namespaceSelector"], imported.cluster)
    return documents


def _namespaces(selector: Tree, cluster: Cluster) -> Tree:
    expressions = list(cluster.namespace_expressions)
    if cluster.exempt_namespaces:
        expressions.append(
            {
                "key": "kubernetes.io/metadata.name",
                "operator": "NotIn",
                "values": sorted(cluster.exempt_namespaces),
            }
        )
    return _selector(selector, cluster.namespace_labels, expressions)


def _selector(selector: Tree, labels: dict[str, str], expressions: Any) -> Tree:  # noqa: ANN401 - tuple or list
    found = dict(selector)
    if labels:
        found["matchLabels"] = dict(labels)
    if expressions:
        found["matchExpressions"] = [*selector.get("matchExpressions", ()), *expressions]
    return found


def _kustomization(imported: Imported, base: Base, made: dict[str, str]) -> Tree:
    generators = [
        {
            "name": f"hami-{service}-config",
            "namespace": namespaces.AGENTS if service == "nodeagent" else namespaces.SYSTEM,
            "behavior": "merge",
            "files": [
                f"config/{service}.toml",
                *(["config/devices.toml"] if service == "registry" else []),
            ],
        }
        for service in SERVICES
    ]
    if "config/kube-scheduler.yaml" in made:
        generators.append(
            {
                "name": "hami-kube-scheduler-config",
                "namespace": namespaces.SYSTEM,
                "behavior": "merge",
                "files": ["config/kube-scheduler.yaml"],
            }
        )
    document: Tree = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
    }
    if "runtime-class.yaml" in made:
        document["resources"] = ["runtime-class.yaml"]
    if components := _components(imported):
        document["components"] = [f"{base.components}/{name}" for name in components]
    document["configMapGenerator"] = generators
    if patches := _patches(imported, base):
        document["patches"] = patches
    return document


def _components(imported: Imported) -> list[str]:
    is_by_cdi = imported.settings.get("nodeagent", {}).get("injection", "cdi") == "cdi"
    return [
        *(["prometheus-operator"] if imported.cluster.monitors else []),
        *(["nvidia-without-cdi"] if imported.cluster.nvidia_agents and not is_by_cdi else []),
    ]


def _patches(imported: Imported, base: Base) -> list[Tree]:
    default = Imported(settings={"webhook": {}}, devices={})
    patches = []
    webhook = webhook_configuration(imported)
    if webhook != webhook_configuration(default):
        patches.append(_replaced(webhook, "/webhooks", webhook["webhooks"]))
    patches += [
        _replaced(policy, "/spec", policy["spec"])
        for policy, before in zip(policies(imported), policies(default), strict=True)
        if policy != before
    ]
    workloads = merged(imported.workloads, _kube_scheduler_container(imported.cluster, base))
    for name, body in workloads.items():
        kind, pattern = WORKLOADS[name]
        head = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "any"}}
        patches.append(_patch(kind, pattern, merged(head, body)))
    absent = list(imported.vendors.ignored)
    if not imported.cluster.nvidia_agents:
        absent.append("nvidia")
    patches += [
        _patch(
            "DaemonSet",
            f"hami-(nodeagent|agent-devices)-{vendor}",
            {
                "$patch": "delete",
                "apiVersion": "apps/v1",
                "kind": "DaemonSet",
                "metadata": {"name": "any"},
            },
        )
        for vendor in absent
    ]
    return patches


def _kube_scheduler_container(cluster: Cluster, base: Base) -> Tree:
    container: Tree = {}
    if cluster.kube_scheduler_args:
        container["command"] = [*base.command, *cluster.kube_scheduler_args]
    if cluster.kube_scheduler_resources:
        container["resources"] = {"$patch": "replace", **cluster.kube_scheduler_resources}
    if not container:
        return {}
    # The patch begins with the first container of the pod, which keeps their order.
    containers = [{"name": "scheduler"}, {"name": "kube-scheduler", **container}]
    return {"scheduler": {"spec": {"template": {"spec": {"containers": containers}}}}}


def _replaced(document: Tree, path: str, value: object) -> Tree:
    operation = {"op": "replace", "path": path, "value": value}
    return _patch(document["kind"], document["metadata"]["name"], [operation])


def _patch(kind: str, name: str, body: object) -> Tree:
    return {"target": {"kind": kind, "name": name}, "patch": _yaml(body)}


class _NoAliases(yaml.SafeDumper):
    """Writes equal parts twice: a reader of the patch follows no anchors."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _yaml(document: object) -> str:
    return yaml.dump(document, Dumper=_NoAliases, sort_keys=False, width=110)
