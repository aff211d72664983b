# SPDX-License-Identifier: Apache-2.0
"""Evicts pods through the API server, so that disruption budgets and grace periods apply."""

import json

from hami_common.apipath import api_path
from hami_common.ports import KubeApi
from hami_nodeagent.core.podfacts import PodFacts


async def evict(kube: KubeApi, pod: PodFacts) -> None:
    """Request the eviction of this very pod, by its uid.

    ``NotFound`` if it is gone; other ``HamiError`` if the request was not accepted: repeat it.
    """
    await kube.create(
        api_path("api", "v1", "namespaces", pod.namespace, "pods", pod.name, "eviction"),
        _eviction(pod),
    )


def _eviction(pod: PodFacts) -> bytes:
    return json.dumps(
        {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
    ).encode()
