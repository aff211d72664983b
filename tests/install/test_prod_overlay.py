# SPDX-License-Identifier: Apache-2.0
"""The overlay prod: two of each service, three NATS servers, images by digest, network policies.

One node permits it, because replicas only prefer different nodes. The patch ``LESS_CPU`` lowers
what the pods reserve of the processor, so that all fit on two cores; nothing else differs.
"""

import json
from collections.abc import Callable

import pytest

from hami_common import namespaces
from tests.install.installation import Installation, restarts
from tests.install.tenant import Tenant, share

pytestmark = [
    pytest.mark.long,
    pytest.mark.anyio,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(600),
]

REPLICAS = {"hami-webhook": 2, "hami-scheduler": 2, "hami-registry": 2, "hami-nats": 3}
NAME = "app.kubernetes.io/name"

Record = Callable[[str, object], None]


async def test_page_installs_all_replicas(
    installation: Installation, record_property: Record
) -> None:
    await installation.ensure("prod")
    record_property("prod_ready", f"{installation.site.timings_s['prod_ready']:.1f} s")
    pods = await installation.pods()
    counts = dict.fromkeys(REPLICAS, 0)
    for pod in pods:
        name = pod["metadata"].get("labels", {}).get(NAME, "")
        if name in counts:
            counts[name] += 1
    assert counts == REPLICAS
    assert {pod["metadata"]["name"]: restarts(pod) for pod in pods if restarts(pod)} == {}
    images = {c["image"] for pod in pods for c in pod["spec"]["containers"]}
    assert all("@sha256:" in image for image in images), images


async def test_network_policies_are_accepted(installation: Installation) -> None:
    await installation.ensure("prod")
    listed = await installation.site.kubectl("get", "networkpolicies", "-A", "-o", "json")
    spaces = {item["metadata"]["namespace"] for item in json.loads(listed.stdout)["items"]}
    assert spaces == {namespaces.SYSTEM, namespaces.AGENTS}


async def test_pod_with_a_share_is_limited(installation: Installation, tenant: Tenant) -> None:
    await installation.ensure("prod")
    await tenant.create(share("limited", memory_mib=2000))
    await tenant.running("limited")
    assert (await tenant.memory("limited"))[0] == 2000
