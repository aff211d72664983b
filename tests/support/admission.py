# SPDX-License-Identifier: Apache-2.0
"""Builders of AdmissionReviews, and the webhook's parts wired for a test."""

import base64
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from hami_common.runtime.clock import SystemClock
from hami_common.runtime.httpd import Request, Response
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.telemetry import Tracing
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.mutate import AdmissionPolicy
from hami_webhook.core.rates import SourceRates
from hami_webhook.shell.admission import Admission
from hami_webhook.shell.callers import Callers
from hami_webhook.shell.events import AdmissionEvents
from hami_webhook.shell.metrics import KINDS, Metrics
from tests.support.manualclock import ManualClock

Document = dict[str, Any]
EVENTS_BURST = 100
"""Events that a source without certificate publishes at once."""


def asking_pod(name: str = "train-0", **limits: str) -> Document:
    """A pod with one container and these limits, ``gpu`` meaning ``nvidia.com/gpu``."""
    named = {f"nvidia.com/{key}": value for key, value in (limits or {"gpu": "1"}).items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team-a"},
        "spec": {"containers": [{"name": "main", "image": "app", "resources": {"limits": named}}]},
    }


def review(
    pod: Document | None,
    *,
    operation: str = "CREATE",
    old: Document | None = None,
    **request: Any,
) -> Document:
    """An AdmissionReview as the API server sends it."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "11111111-2222-3333-4444-555555555555",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "name": (pod or {}).get("metadata", {}).get("name", ""),
            "namespace": "team-a",
            "operation": operation,
            "userInfo": {"username": "jane"},
            "object": pod,
            "oldObject": old,
            "dryRun": False,
            "options": {},
            **request,
        },
    }


def patch_of(answer: Document) -> list[Document]:
    """Operations in the answer's patch; none when there is no patch."""
    response = answer["response"]
    if "patch" not in response:
        assert "patchType" not in response
        return []
    assert response["patchType"] == "JSONPatch"
    operations: list[Document] = msgspec.json.decode(base64.b64decode(response["patch"]))
    return operations


class Wired:
    """The webhook's handlers with their parts, without server and bus."""

    def __init__(self, *, policy: AdmissionPolicy | None = None, limit: int = 16) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics(CollectorRegistry())
        self.events = AdmissionEvents(
            source="/webhook/test",
            limit=limit,
            metrics=self.metrics,
            quarantine=Quarantine(kinds=KINDS, clock=SystemClock(), registry=self.metrics.registry),
        )
        self.tracing = Tracing(service="webhook")
        self.admission = Admission(
            catalog=Catalog.from_settings(),
            policy=policy or AdmissionPolicy(),
            tracing=self.tracing,
            clock=self.clock,
            metrics=self.metrics,
            events=self.events,
            callers=Callers(
                clock=self.clock,
                metrics=self.metrics,
                cpu=SourceRates(per_s=1.0, burst=60.0),
                events=SourceRates(per_s=1.0, burst=EVENTS_BURST),
            ),
        )

    def count(self, name: str, **labels: str) -> float:
        """Value of one of the webhook's counters."""
        return self.metrics.registry.get_sample_value(f"{name}_total", labels) or 0.0

    async def post(self, document: Any, *, path: str = "/mutate") -> Response:
        """Answer to ``document`` (bytes are sent as they are)."""
        body = document if isinstance(document, bytes) else msgspec.json.encode(document)
        request = Request(method="POST", path=path, query={}, headers={}, body=body, params={})
        if path == "/validate":
            return await self.admission.validate(request)
        namespace_mode = path.removeprefix("/mutate").strip("/")
        return await self.admission.mutate(request, namespace_mode=namespace_mode)

    async def answer(self, document: Any, *, path: str = "/mutate") -> Document:
        """Decoded AdmissionReview that answers ``document``."""
        response = await self.post(document, path=path)
        assert response.status == 200, response.body
        answer: Document = msgspec.json.decode(response.body)
        assert answer["apiVersion"] == "admission.k8s.io/v1"
        assert answer["kind"] == "AdmissionReview"
        return answer

    def close(self) -> None:
        """End the parts."""
        self.events.close()
        self.tracing.close()
