# SPDX-License-Identifier: Apache-2.0
"""Builders of slices, claims and classes for the contract of Dynamic Resource Allocation."""

from typing import Any
from uuid import uuid4

from tests.contract.kubescheduler.support import NAMESPACE, Site, until
from tests.support.kubeclient import KubeClient

Obj = dict[str, Any]
DRIVER = "gpu.example"
GROUP = "resource.k8s.io"
SLICES = f"resourceslices.{GROUP}"
CLAIMS = f"resourceclaims.{GROUP}"
TEMPLATES = f"resourceclaimtemplates.{GROUP}"
CLASSES = f"deviceclasses.{GROUP}"
FINALIZER = "resource.kubernetes.io/delete-protection"


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid4().hex[:8]}"


def gpu(number: int = 0, *, memory: str = "80Gi", **more: Any) -> Obj:
    """A card that any number of claims may share, as long as its memory lasts."""
    policy = {"default": memory, "validRange": {"min": "1Mi", "step": "1Mi"}}
    return {
        "name": f"gpu-{number}",
        "allowMultipleAllocations": True,
        "attributes": {
            "uuid": {"string": f"GPU-{number}"},
            "index": {"int": number},
            "driverVersion": {"version": "570.1.0"},
            "resource.kubernetes.io/pcieRoot": {"string": f"pci0000:{number // 2}0"},
        },
        "capacity": {"memory": {"value": memory, "requestPolicy": policy}},
        **more,
    }


def slice_of(node: str, *devices: Obj, name: str = "", **pool: Any) -> Obj:
    return {
        "metadata": {"name": name or unique("slice")},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {
                "name": f"{node}/test",
                "generation": 1,
                "resourceSliceCount": 1,
                **pool,
            },
            "devices": list(devices),
        },
    }


def exactly(device_class: str, memory: str = "", **more: Any) -> Obj:
    capacity = {"capacity": {"requests": {"memory": memory}}} if memory else {}
    return {"deviceClassName": device_class, **capacity, **more}


def claim_spec(*requests: Obj, **more: Any) -> Obj:
    named = [
        {"name": f"r{number}", **(request if "firstAvailable" in request else {"exactly": request})}
        for number, request in enumerate(requests)
    ]
    return {"devices": {"requests": named, **more}}


def claim(name: str, *requests: Obj, **more: Any) -> Obj:
    return {"metadata": {"name": name}, "spec": claim_spec(*requests, **more)}


def selector(expression: str) -> Obj:
    return {"cel": {"expression": expression}}


async def make_class(client: KubeClient, **spec: Any) -> str:
    """Create a class of our driver's devices; returns its name."""
    selectors = [selector(f'device.driver == "{DRIVER}"')]
    name = unique("class")
    await client.create(
        CLASSES, {"metadata": {"name": name}, "spec": {"selectors": selectors, **spec}}
    )
    return name


def allocation_on(node: str, *devices: str, request: str = "r0") -> Obj:
    """An allocation as a scheduler writes it."""
    term = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "devices": {
            "results": [
                {"request": request, "driver": DRIVER, "pool": f"{node}/test", "device": device}
                for device in devices
            ]
        },
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [term]}]},
        "allocationTimestamp": "2026-01-01T00:00:00Z",
    }


def consumer() -> Obj:
    """A consumer of a kind that the claim controller leaves alone."""
    return {
        "apiGroup": "example.com",
        "resource": "things",
        "name": "x",
        "uid": str(uuid4()),
    }


class Devices:
    """A node with one slice, on a plane with a kube-scheduler."""

    def __init__(self, site: Site, node: str, device_class: str) -> None:
        self.site = site
        self.client = site.client
        self.node = node
        self.device_class = device_class

    async def publish(self, *devices: Obj, **pool: Any) -> str:
        """Create a slice of the node; returns its name."""
        made = await self.client.create(SLICES, slice_of(self.node, *devices, **pool))
        return str(made["metadata"]["name"])

    async def claim(self, *requests: Obj, **more: Any) -> str:
        """Create a claim; returns its name."""
        name = unique("claim")
        await self.client.create(CLAIMS, claim(name, *requests, **more), NAMESPACE)
        return name

    async def template(self, *requests: Obj, **more: Any) -> str:
        name = unique("template")
        spec = {"spec": claim_spec(*requests, **more)}
        await self.client.create(TEMPLATES, {"metadata": {"name": name}, "spec": spec}, NAMESPACE)
        return name

    async def pod(
        self, *, of: str = "", template: str = "", scheduler: str = "default-scheduler"
    ) -> Obj:
        """Create a pod with this claim, or one from this template."""
        source = {"resourceClaimName": of} if of else {"resourceClaimTemplateName": template}
        name = unique("pod")
        manifest = {
            "metadata": {"name": name},
            "spec": {
                "schedulerName": scheduler,
                "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}],
                "resourceClaims": [{"name": "gpu", **source}],
                "containers": [
                    {"name": "c", "image": "i:1", "resources": {"claims": [{"name": "gpu"}]}}
                ],
            },
        }
        made: Obj = await self.client.create("pods", manifest, NAMESPACE)
        return made

    async def share(self, memory: str = "", **more: Any) -> tuple[Obj, str]:
        """Create a pod with a claim of its own; returns the pod and the claim's name."""
        name = await self.claim(exactly(self.device_class, memory), **more)
        return await self.pod(of=name), name

    async def get_claim(self, name: str) -> Obj:
        found: Obj = await self.client.get(CLAIMS, name, NAMESPACE)
        return found

    async def results(self, name: str) -> list[Obj]:
        """Results of the claim's allocation."""
        status = (await self.get_claim(name)).get("status") or {}
        return list(((status.get("allocation") or {}).get("devices") or {}).get("results") or ())

    async def devices(self, name: str) -> list[str]:
        return [result["device"] for result in await self.results(name)]

    async def placed(self, *requests: Obj, **more: Any) -> list[str]:
        """Devices of a new claim with these requests, after its pod was bound."""
        name = await self.claim(*requests, **more)
        await self.site.bound(await self.pod(of=name))
        return await self.devices(name)

    async def refused(self, *requests: Obj, **more: Any) -> str:
        """Message of the pod of a new claim that no node can serve."""
        name = await self.claim(*requests, **more)
        return await self.site.condition(await self.pod(of=name), "Unschedulable")

    async def delete_pod(self, pod: Obj) -> None:
        name = pod["metadata"]["name"]
        await self.client.delete("pods", name, NAMESPACE, gracePeriodSeconds="0")

    async def until_gone(self, resource: str, name: str) -> None:
        async def is_gone() -> bool:
            listed = await self.client.list(resource, NAMESPACE)
            return name not in {item["metadata"]["name"] for item in listed["items"]}

        await until(is_gone)

    async def clear(self) -> None:
        """Remove the objects of a test; pods and nodes are removed by the site."""
        for pod in (await self.client.list("pods", NAMESPACE))["items"]:
            await self.delete_pod(pod)
        for resource in (CLAIMS, TEMPLATES):
            for item in (await self.client.list(resource, NAMESPACE))["items"]:
                await self.client.delete(resource, item["metadata"]["name"], NAMESPACE)
        for resource in (SLICES, CLASSES):
            for item in (await self.client.list(resource))["items"]:
                await self.client.delete(resource, item["metadata"]["name"])
