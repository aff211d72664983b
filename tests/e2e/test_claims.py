# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims beside requests of pods: kube-scheduler, ledger, agent and kubelet together."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hami_common.dra.names import DRIVER, device_name
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod
from tests.e2e.test_hamictl import hamictl

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

GROUP = "/apis/resource.k8s.io/v1"
CLAIMS = f"{GROUP}/namespaces/default/resourceclaims"
NODE = "gpu-t4"
Obj = dict[str, Any]


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        backoff_s=0.2,
        plane="sim",
        settings={
            "scheduler": {"dra.enabled": "true", "tick_s": "0.2"},
            "nodeagent": {"dra.enabled": "true", "dra.write_s": "0.1"},
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("claims")) as running:
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        await running.create(
            f"{GROUP}/deviceclasses",
            {"metadata": {"name": "hami-share"}, "spec": {"selectors": [selector]}},
        )
        yield running


async def use_claim(cluster: Cluster, name: str, memory: str) -> str:
    """Create a claim and a pod that uses it; return the claim's uid."""
    exactly: Obj = {"deviceClassName": "hami-share"}
    if memory:
        exactly["capacity"] = {"requests": {"memory": memory, "cores": "30"}}
    spec = {"devices": {"requests": [{"name": "main", "exactly": exactly}]}}
    claim = await cluster.create(CLAIMS, {"metadata": {"name": name}, "spec": spec})
    await cluster.create_pod(
        {
            "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                "containers": [
                    {
                        "name": "main",
                        "image": "simulated",
                        "resources": {"claims": [{"name": "gpu", "request": "main"}]},
                    }
                ],
            },
        }
    )
    return str(claim["metadata"]["uid"])


async def is_listed(cluster: Cluster, uid: str, device: str) -> None:
    """Check what ``hamictl`` shows of claim c, which its pod uses."""
    done = await hamictl(cluster, "get", "claims", "-o", "json")
    (found,) = json.loads(done.stdout)["items"]
    assert (found["claim"], found["uid"], found["state"]) == ("c", uid, "Prepared")
    assert (found["pods"], found["node"], found["memory_mib"]) == (["c"], NODE, 4000)
    assert found["devices"] == [device_name(device)]
    explained = (await hamictl(cluster, "explain", "claim", "c")).stdout.decode()
    assert f"bind: placed on {NODE}" in explained
    assert "now: Prepared" in explained


async def test_claim_is_booked_prepared_limited_and_released(cluster: Cluster) -> None:
    uid = await use_claim(cluster, "c", "4000Mi")
    await cluster.until("pod c runs", lambda: cluster.pod_is("c", "Running"))

    async def shows_limits() -> bool:
        return "device.0.exclusive=" in await cluster.container_log("c", "main")

    await cluster.until("limits are shown", shows_limits)
    log = await cluster.container_log("c", "main")
    assert "container=main\n" in log
    assert "device.0.memory_mib=4000\ndevice.0.core_pct=30\n" in log
    ((_, record),) = await cluster.ledger_of(NODE, uid)
    assert (record.origin, record.pod) == ("claim", "c")
    (used,) = record.containers[0].shares
    await is_listed(cluster, uid, used.uuid)
    # The slices say what pods leave: a claim for a whole device gets another one.
    await cluster.create_pod(small_pod("web"))
    await cluster.until("pod web runs", lambda: cluster.pod_is("web", "Running"))
    whole = await use_claim(cluster, "whole", "")
    await cluster.until("pod whole runs", lambda: cluster.pod_is("whole", "Running"))
    (share,) = (await cluster.ledger_of(NODE, whole))[-1][1].containers[0].shares
    assert share.exclusive
    assert share.uuid != used.uuid
    for pod in ("c", "whole"):
        await cluster.delete_pod(pod)

    async def is_released() -> bool:
        records = [await cluster.ledger_of(NODE, one) for one in (uid, whole)]
        return all(of_claim[-1][1].op == "release" for of_claim in records)

    await cluster.until("claims are released", is_released)
    assert [(one.state, one.code) for one in await cluster.states_of(NODE, uid)][-2:] == [
        ("prepared", ""),
        ("prepared", "unprepared"),
    ]
    assert list(cluster.cdi_directory.iterdir()) == []
