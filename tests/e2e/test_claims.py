# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims beside requests of pods: kube-scheduler, ledger, agent and kubelet together."""

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common.dra.names import device_name
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod
from tests.e2e.test_hamictl import hamictl
from tests.support.claims import use_claim

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

GROUP = "/apis/resource.k8s.io/v1"
COMPONENTS = Path(__file__).parents[2] / "deploy" / "kustomize" / "components"
CLAIMS = f"{GROUP}/namespaces/default/resourceclaims"
NODE = "gpu-t4"
Obj = dict[str, Any]


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        backoff_s=0.2,
        injection="devices",
        plane="sim",
        settings={
            "scheduler": {"dra.enabled": "true", "tick_s": "0.2"},
            "nodeagent": {"dra.enabled": "true", "dra.write_s": "0.1", "dra.monitor": "true"},
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("claims")) as running:
        for component in ("dra", "dra-monitor"):
            text = (COMPONENTS / component / "device-class.yaml").read_text()
            for document in yaml.safe_load_all(text):
                await running.create(f"{GROUP}/deviceclasses", document)
        yield running


async def is_listed(cluster: Cluster, uid: str, device: str) -> None:
    """Check what ``hamictl`` shows of claim c, which its pod uses."""
    found: dict[str, Any] = {}

    async def is_shown_as_prepared() -> bool:
        """The registry follows the states of agents, a moment after the container runs."""
        done = await hamictl(cluster, "get", "claims", "-o", "json")
        (shown,) = json.loads(done.stdout)["items"]
        found.update(shown)
        return bool(shown["state"] == "Prepared")

    await cluster.until("claim c is shown as prepared", is_shown_as_prepared)
    assert (found["claim"], found["uid"]) == ("c", uid)
    assert (found["pods"], found["node"], found["memory_mib"]) == (["c"], NODE, 4000)
    assert found["devices"] == [device_name(device)]
    explained = (await hamictl(cluster, "explain", "claim", "c")).stdout.decode()
    assert f"bind: placed on {NODE}" in explained
    assert "now: Prepared" in explained


async def test_claim_is_booked_prepared_limited_and_released(cluster: Cluster) -> None:
    capacity = {"requests": {"memory": "4000Mi", "cores": "30"}}
    part = {"deviceClassName": "hami-share", "capacity": capacity}
    uid = await use_claim(cluster, "c", part)
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
    whole = await use_claim(cluster, "whole", {"deviceClassName": "hami-whole"})
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
    states = [(one.state, one.code) for one in await cluster.states_of(NODE, uid)]
    # The agent writes no state of a record that is released before it has seen the end of its use.
    assert states[-2:] == [("prepared", ""), ("prepared", "unprepared")] or (
        states[-1] == ("prepared", "")
    )

    async def is_cleared() -> bool:
        return not list(cluster.cdi_directory.iterdir())

    await cluster.until("CDI files are removed", is_cleared)


async def test_admin_access_gives_all_devices_while_they_are_full(cluster: Cluster) -> None:
    for number in range(4):
        name = f"whole-{number}"
        await use_claim(cluster, name, {"deviceClassName": "hami-whole"})
        await cluster.until(f"pod {name} runs", partial(cluster.pod_is, name, "Running"))
    admin = {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}
    merge = "application/merge-patch+json"
    await cluster.request("PATCH", "/api/v1/namespaces/default", admin, content_type=merge)
    watch = {"deviceClassName": "hami-monitor", "adminAccess": True}
    uid = await use_claim(cluster, "watch", watch)
    await cluster.until("pod watch runs", lambda: cluster.pod_is("watch", "Running"))
    assert await cluster.ledger_of(NODE, uid) == []
    text = (cluster.cdi_directory / f"hami-{uid}.json").read_text()
    (device,) = json.loads(text)["devices"]
    variables = dict(one.split("=", 1) for one in device["containerEdits"]["env"])
    assert len(set(variables["NVIDIA_VISIBLE_DEVICES"].split(","))) == 4
    assert not [name for name in variables if "LIMIT" in name]
    await cluster.delete_pod("watch")
