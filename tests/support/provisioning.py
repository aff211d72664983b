# SPDX-License-Identifier: Apache-2.0
"""The kind ProvisioningRequest on a real API server, and objects of it.

The definition is written from the fields of cluster-autoscaler's API (v1, and v1beta1 with the same
fields); its own module is not available to tests.
"""

from typing import Any

from tests.support.installed import Installed
from tests.support.kubeclient import StatusError

Obj = dict[str, Any]
GROUP = "autoscaling.x-k8s.io"
CLASS = "placement.hami.io"
NAMESPACE = "default"
_NAME: Obj = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_FIXED = [{"rule": "self == oldSelf", "message": "Value is immutable"}]
_CONDITION: Obj = {
    "type": "object",
    "required": ["type", "status", "lastTransitionTime", "reason", "message"],
    "properties": {
        "type": {"type": "string", "maxLength": 316},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "reason": {
            "type": "string",
            "minLength": 1,
            "maxLength": 1024,
            "pattern": r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        },
        "message": {"type": "string", "maxLength": 32768},
    },
}
_POD_SET: Obj = {
    "type": "object",
    "required": ["count", "podTemplateRef"],
    "properties": {
        "count": {"type": "integer", "format": "int32", "minimum": 1},
        "podTemplateRef": {"type": "object", "properties": {"name": _NAME}},
    },
}
_SCHEMA: Obj = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["podSets", "provisioningClassName"],
            "properties": {
                "provisioningClassName": {**_NAME, "x-kubernetes-validations": _FIXED},
                "parameters": {
                    "type": "object",
                    "maxProperties": 100,
                    "additionalProperties": {"type": "string", "maxLength": 255},
                    "x-kubernetes-validations": _FIXED,
                },
                "podSets": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 32,
                    "items": _POD_SET,
                    "x-kubernetes-validations": _FIXED,
                },
            },
        },
        "status": {
            "type": "object",
            "properties": {
                "conditions": {
                    "type": "array",
                    "items": _CONDITION,
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["type"],
                },
                "provisioningClassDetails": {
                    "type": "object",
                    "maxProperties": 64,
                    "additionalProperties": {"type": "string", "maxLength": 32768},
                },
            },
        },
    },
}


def definition() -> Obj:
    """The CustomResourceDefinition."""
    version = {
        "served": True,
        "schema": {"openAPIV3Schema": _SCHEMA},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"provisioningrequests.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": "ProvisioningRequest",
                "listKind": "ProvisioningRequestList",
                "plural": "provisioningrequests",
                "singular": "provisioningrequest",
            },
            "versions": [
                {"name": "v1", "storage": True, **version},
                {"name": "v1beta1", "storage": False, **version},
            ],
        },
    }


class Requests:
    """The ProvisioningRequests of one installation, and the PodTemplates that they name."""

    def __init__(self, site: Installed) -> None:
        """Call the API server of ``site``."""
        self._site = site
        self._base = f"/apis/{GROUP}/v1/namespaces/{NAMESPACE}/provisioningrequests"

    async def install(self) -> None:
        """Create the kind."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        await self._site.client.call("POST", path, body=definition())

        async def is_served() -> bool:
            try:
                await self.all()
            except StatusError:
                return False
            return True

        await self._site.until("ProvisioningRequests are served", is_served)

    async def all(self) -> list[Obj]:
        """All requests."""
        found: list[Obj] = (await self._site.client.call("GET", self._base))["items"]
        return found

    async def get(self, name: str) -> Obj:
        """One request."""
        found: Obj = await self._site.client.call("GET", f"{self._base}/{name}")
        return found

    async def delete(self, name: str) -> None:
        """Delete a request."""
        await self._site.client.call("DELETE", f"{self._base}/{name}")

    async def make(self, name: str, template: Obj, count: int, **parameters: str) -> None:
        """Create a request for pods of a template, which gets the name of the request."""
        path = f"/api/v1/namespaces/{NAMESPACE}/podtemplates"
        document = {"metadata": {"name": name}, "template": template}
        await self._site.client.call("POST", path, body=document)
        spec = {
            "provisioningClassName": CLASS,
            "podSets": [{"count": count, "podTemplateRef": {"name": name}}],
            "parameters": parameters,
        }
        kind = {"apiVersion": f"{GROUP}/v1", "kind": "ProvisioningRequest"}
        await self._site.client.call(
            "POST", self._base, body={**kind, "metadata": {"name": name}, "spec": spec}
        )


def reason_of(request: Obj, condition: str) -> str:
    """Reason of a condition that is True; empty otherwise."""
    found = (request.get("status") or {}).get("conditions") or ()
    return next((o["reason"] for o in found if (o["type"], o["status"]) == (condition, "True")), "")


def text_of(request: Obj, condition: str) -> str:
    """Message of a condition; empty without it."""
    found = (request.get("status") or {}).get("conditions") or ()
    return next((one["message"] for one in found if one["type"] == condition), "")
