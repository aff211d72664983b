# SPDX-License-Identifier: Apache-2.0
"""Reads an installation from its objects in the Kubernetes API: agents, settings, trusted keys.

Of several versions of a ConfigMap, which kustomize leaves behind, the newest counts.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from hami_common import documents
from hami_common.errors import NotFound, SettingsInvalid
from hami_common.pods.signing import Verifier
from hami_common.ports import KubeApi
from hami_common.vendors.catalog import VendorSettings
from hamictl.nodeselection import selects

Document = dict[str, Any]

AGENT: Final = "hami-nodeagent"
"""Label ``app.kubernetes.io/name`` of the agents' DaemonSets."""
NAME_LABEL: Final = "app.kubernetes.io/name"
VENDOR_LABEL: Final = "hami.io/vendor"
SCHEDULER_NAME: Final = "hami-scheduler"
KUBE_SCHEDULER_CONFIG: Final = "hami-kube-scheduler-config"
"""Beginning of the names of ConfigMaps with kube-scheduler's configuration."""
TRUSTED_KEYS: Final = "hami-trusted-keys"
WEBHOOK_FILE: Final = "webhook.toml"
AGENT_FILE: Final = "nodeagent.toml"


class Agent(Struct, frozen=True, kw_only=True):
    """The DaemonSet of one vendor's agents."""

    name: str
    vendor: str
    pod: Document
    """Its pod specification."""

    @property
    def container(self) -> Document:
        """The agent's own container."""
        containers: list[Document] = self.pod.get("containers") or [{}]
        return containers[0]

    def selects(self, node: Document) -> bool:
        """Return whether the agent runs on a node."""
        return selects(self.pod, node["metadata"].get("labels") or {})


class WebhookSettings(Struct, frozen=True, kw_only=True):
    """Settings of the webhook that pods depend on."""

    scheduler_name: str = SCHEDULER_NAME
    vendors: VendorSettings = VendorSettings()


async def get(kube: KubeApi, path: str) -> Document:
    """Return one object."""
    document: Document = msgspec.json.decode(await kube.get(path))
    return document


async def items(kube: KubeApi, path: str, *, label_selector: str = "") -> list[Document]:
    """Return all objects of a list."""
    pages = await kube.list_pages(path, label_selector=label_selector)
    return [item for page in pages for item in msgspec.json.decode(page).get("items") or []]


def creation(item: Document) -> str:
    """Return the creation time of an object, for comparison."""
    return str(item["metadata"].get("creationTimestamp", ""))


async def agents(kube: KubeApi, namespace: str) -> list[Agent]:
    """Return the agents' DaemonSets by vendor."""
    found = await items(
        kube,
        f"/apis/apps/v1/namespaces/{namespace}/daemonsets",
        label_selector=f"{NAME_LABEL}={AGENT}",
    )
    return sorted(
        (
            Agent(
                name=item["metadata"]["name"],
                vendor=(item["metadata"].get("labels") or {}).get(VENDOR_LABEL, ""),
                pod=item["spec"]["template"]["spec"],
            )
            for item in found
        ),
        key=lambda agent: agent.name,
    )


async def settings(kube: KubeApi, namespace: str, file: str) -> Mapping[str, Any]:
    """Return the newest settings file of this name in a ConfigMap; empty if there is none."""
    found = [
        item
        for item in await items(kube, f"/api/v1/namespaces/{namespace}/configmaps")
        if file in (item.get("data") or {})
    ]
    if not found:
        return {}
    try:
        return documents.toml(max(found, key=creation)["data"][file], field=file)
    except SettingsInvalid:
        return {}


async def kube_scheduler_texts(kube: KubeApi, namespace: str) -> list[str]:
    """Return each KubeSchedulerConfiguration in a ConfigMap; of ours, the newest.

    kustomize leaves those of earlier settings.
    """
    found = await items(kube, f"/api/v1/namespaces/{namespace}/configmaps")
    ours = [one for one in found if one["metadata"]["name"].startswith(KUBE_SCHEDULER_CONFIG)]
    old = sorted(ours, key=creation)[:-1]
    return [
        text
        for item in found
        if item not in old
        for text in (item.get("data") or {}).values()
        if "KubeSchedulerConfiguration" in str(text)
    ]


async def webhook_settings(kube: KubeApi, namespace: str) -> WebhookSettings:
    """Return the settings of the webhook, or the defaults where they cannot be read."""
    tree = await settings(kube, namespace, WEBHOOK_FILE)
    try:
        vendors = msgspec.convert(tree.get("vendors", {}), VendorSettings)
    except msgspec.ValidationError:
        return WebhookSettings()
    name = tree.get("policy", {}).get("scheduler_name", SCHEDULER_NAME)
    return WebhookSettings(scheduler_name=name, vendors=vendors)


async def verifier(kube: KubeApi, namespace: str) -> Verifier | None:
    """Return the keys that may sign allocations; ``None`` if they cannot be read."""
    try:
        found = await get(kube, f"/api/v1/namespaces/{namespace}/configmaps/{TRUSTED_KEYS}")
    except NotFound:
        return None
    try:
        return Verifier.from_pems(text.encode() for text in (found.get("data") or {}).values())
    except SettingsInvalid:
        return None
