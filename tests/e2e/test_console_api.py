# SPDX-License-Identifier: Apache-2.0
"""The console's side of the registry in a running cluster: files, session, scheduler, cordon."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from hami_common.pods.annotations import DEVICE_CORDON
from hami_sim.certs import CertificateAuthority
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]
NODE = "gpu-t4"
HOST = "127.0.0.1"
INDEX = "<!doctype html><title>console</title>"


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    console = tmp_path_factory.mktemp("console")
    (console / "index.html").write_text(INDEX)
    cert, key, ca = CertificateAuthority().issue_files(tmp_path_factory.mktemp("tls"), [HOST])
    port = free_port()
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        console=str(console),
        injection="devices",
        settings={
            "scheduler": {
                "api.enabled": "true",
                "api.port": str(port),
                "api.tls_cert_file": str(cert),
                "api.tls_key_file": str(key),
            },
            "registry": {
                "scheduler_url": f"https://{HOST}:{port}",
                "scheduler_ca_file": str(ca),
            },
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("cluster")) as running:
        yield running


async def send(cluster: Cluster, method: str, path: str, body: object = None, **more: Any) -> Any:
    """Call the registry; returns the document."""
    url = f"{cluster.url('registry')}{path}"
    async with cluster.session.request(method, url, json=body, **more) as answer:
        document = await answer.json()
        assert answer.status == 200, document
        return document


async def test_console_is_served(cluster: Cluster) -> None:
    url = cluster.url("registry")
    async with cluster.session.get(f"{url}/") as answer:
        assert str(answer.url) == f"{url}/console/"
        assert await answer.text() == INDEX
    session = await send(cluster, "GET", "/v1/session")
    assert (session["login"], session["user"], session["sees_everything"]) == ("none", "", True)
    assert "POST /v1/cordon" in session["routes"]


async def test_scheduler_answers_through_the_registry(cluster: Cluster) -> None:
    direct = cluster.url("scheduler")
    mine = {"Authorization": f"Bearer {cluster.plane.access().token}"}
    for path in ("/v1/queues", "/v1/quotas"):
        async with cluster.session.get(f"{direct}{path}") as answer:
            assert await send(cluster, "GET", path, headers=mine) == await answer.json()
    drained = await send(cluster, "POST", "/v1/whatif/drain", {"node": NODE}, headers=mine)
    assert drained["node"] == NODE
    url = f"{cluster.url('registry')}/v1/resize"
    body = {"namespace": "default"}
    async with cluster.session.post(url, json=body, headers=mine) as answer:
        assert answer.status == 400
        assert "pod" in (await answer.json())["error"]["message"]
    for headers in ({}, {"Authorization": "Bearer forged"}):
        async with cluster.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 401


async def test_cordon_of_a_node_reaches_the_scheduler(cluster: Cluster) -> None:
    async def cordoned() -> set[bool]:
        listed = await send(cluster, "GET", f"/v1/devices?node={NODE}")
        return {device["cordoned"] for device in listed["items"]}

    wanted = {"node": NODE, "cordoned": True, "reason": "fans"}
    done = await send(cluster, "POST", "/v1/cordon", wanted)
    assert len(done["items"]) == 4
    node = await cluster.request("GET", f"/api/v1/nodes/{NODE}")
    assert len(node["metadata"]["annotations"][DEVICE_CORDON].split(",")) == 4
    with anyio.fail_after(20):
        while await cordoned() != {True}:
            await anyio.sleep(0.1)
    url = f"{cluster.url('registry')}/v1/cordon"
    foreign = {"Origin": "http://evil.example"}
    async with cluster.session.post(
        url, json={**wanted, "cordoned": False}, headers=foreign
    ) as answer:
        assert answer.status == 403
    await send(cluster, "POST", "/v1/cordon", {**wanted, "cordoned": False})
    with anyio.fail_after(20):
        while await cordoned() != {False}:
            await anyio.sleep(0.1)
