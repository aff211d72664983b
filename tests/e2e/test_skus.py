# SPDX-License-Identifier: Apache-2.0
"""Pods that ask by SKU or without a vendor, on a cluster with NVIDIA and Ascend devices."""

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner

from hami_common.errors import Denied, RequestInvalid
from hami_common.pods import annotations as keys
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hamictl.cli import main
from tests.support.checker import lasting_problems, ledger_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180), pytest.mark.shares_cluster]

CATALOG = """
currency = "CNY"

[[sku]]
name = "s-8g"
version = 3
class = "burstable"
memory_mib = 8192
compute_pct = 25
price_hour = 1.5
[[sku.alternative]]
vendor = "nvidia"
types = ["T4"]
[[sku.alternative]]
vendor = "ascend"
resource = "huawei.com/Ascend910B4"
compute_pct = 0

[[sku]]
name = "s-npu"
class = "spot"
memory_mib = 8192
[[sku.alternative]]
vendor = "ascend"
resource = "huawei.com/Ascend910B4"

[[neutral]]
vendor = "nvidia"
[[neutral]]
vendor = "ascend"
resource = "huawei.com/Ascend910B4"
"""


@pytest.fixture(scope="module")
def catalog_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The catalog that webhook and registry read."""
    path = tmp_path_factory.mktemp("catalog") / "skus.toml"
    path.write_text(CATALOG)
    return path


@pytest.fixture(scope="module")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, catalog_file: Path
) -> AsyncIterator[Cluster]:
    """One node of each vendor; the node with Ascend devices takes every pod that NVIDIA cannot."""
    spec = ClusterSpec(
        nodes=(
            NodeSpec(name="gpu", profile="4xT4"),
            NodeSpec(name="npu", profile="8xAscend910B4"),
        ),
        backoff_s=0.2,
        pretended_paths=("/usr/local", "/etc"),
        settings={
            "webhook": {"skus_file": str(catalog_file), "config_poll_s": "0.2"},
            "registry": {"skus_file": str(catalog_file), "config_poll_s": "0.2"},
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("skus")) as cluster:
        yield cluster


def pod(name: str, *, limits: dict[str, str] | None = None, **annotations: str) -> dict[str, Any]:
    """Return a pod that prints its environment and stays."""
    command = ["sh", "-c", "env; trap 'exit 0' TERM; while :; do sleep 0.2; done"]
    container: dict[str, Any] = {"name": "main", "image": "app", "command": command}
    if limits:
        container["resources"] = {"limits": limits}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "annotations": {f"hami.io/{key}": value for key, value in annotations.items()},
        },
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
    }


async def runs(cluster: Cluster, name: str) -> None:
    await cluster.until(f"{name} runs", lambda: cluster.pod_is(name, "Running"), limit_s=40)


async def environment(cluster: Cluster, name: str) -> dict[str, str]:
    await runs(cluster, name)

    async def printed() -> bool:
        return "PATH=" in await cluster.container_log(name, "main")

    await cluster.until(f"{name} prints its environment", printed)
    lines = (await cluster.container_log(name, "main")).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


async def test_one_pod_runs_on_either_vendor_with_its_environment(cluster: Cluster) -> None:
    # Each T4 has 15 GiB: four pods of 8 GiB fill the preferred vendor, the next go to the other.
    names = [f"either-{number}" for number in range(6)]
    for number, name in enumerate(names):
        if number % 2:
            await cluster.create_pod(pod(name, limits={"sku.hami.io/s-8g": "1"}))
        else:
            await cluster.create_pod(pod(name, sku="s-8g"))
        await runs(cluster, name)
    nodes = [(await cluster.pod(name)).spec.node_name for name in names]
    assert nodes == ["gpu"] * 4 + ["npu"] * 2
    on_gpu = await environment(cluster, names[0])
    assert "NVIDIA_VISIBLE_DEVICES" in on_gpu
    assert not any(key.startswith("ASCEND") for key in on_gpu)
    on_npu = await environment(cluster, names[5])
    assert "ASCEND_VISIBLE_DEVICES" in on_npu
    assert "CUDA_DEVICE_MEMORY_LIMIT_0" not in on_npu

    document = await cluster.pod_document(names[5])
    assert document["metadata"]["annotations"][keys.SKU] == "s-8g"
    limits = document["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {
        "hami.io/accelerators": "1",
        "hami.io/memory": "8192",
        "hami.io/compute": "25",
    }
    records = [r for r in (await ledger_of(cluster)).values() if r.op == "reserve"]
    assert {(r.sku, r.service_class) for r in records} == {("s-8g@3", "burstable")}
    assert {s.vendor for r in records for c in r.containers for s in c.shares} == {
        "nvidia",
        "ascend",
    }
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []


async def hamictl(cluster: Cluster, *words: str) -> str:
    environment = {
        "HAMICTL_REGISTRY": cluster.url("registry"),
        "HAMICTL_SCHEDULER": cluster.url("scheduler"),
    }
    call = partial(CliRunner().invoke, main, words, env=environment)
    result = await anyio.to_thread.run_sync(call)
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_users_see_the_catalog_and_where_a_sku_fits(cluster: Cluster) -> None:
    catalog = json.loads(await hamictl(cluster, "get", "skus", "-o", "json"))
    assert [(one["name"], one["version"], one["price_hour"]) for one in catalog["items"]] == [
        ("s-8g", 3, 1.5),
        ("s-npu", 1, 0.0),
    ]
    assert (catalog["currency"], catalog["neutral"]) == ("CNY", ["nvidia", "ascend"])
    assert "s-8g" in await hamictl(cluster, "get", "skus")
    told = json.loads(await hamictl(cluster, "explain", "sku", "s-8g", "-o", "json"))
    nodes = {one["vendor"]: one["nodes"] for one in told["alternatives"]}
    assert nodes == {"nvidia": [], "ascend": ["npu"]}, "the pods before hold all T4"
    text = await hamictl(cluster, "explain", "sku", "s-8g")
    assert "2. ascend: fits 1 nodes" in text
    assert "huawei.com/Ascend910B4-memory: 8192" in text


async def test_neutral_resources_without_a_sku_and_beside_vendors_of_their_own(
    cluster: Cluster,
) -> None:
    await cluster.create_pod(pod("neutral", limits={"hami.io/memory": "2000"}))
    await cluster.create_pod(pod("own", limits={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "500"}))
    for name in ("neutral", "own"):
        assert "NVIDIA_VISIBLE_DEVICES" in await environment(cluster, name)
    alternatives = json.loads(
        (await cluster.pod_document("neutral"))["metadata"]["annotations"][keys.ALTERNATIVES]
    )
    assert [one["vendor"] for one in alternatives["alternatives"]] == ["nvidia", "ascend"]
    records = (await ledger_of(cluster)).values()
    assert [r.sku for r in records if r.pod == "neutral"] == [""]


async def test_catalog_is_read_again_and_a_retired_sku_refuses_new_pods_only(
    cluster: Cluster, catalog_file: Path
) -> None:
    await cluster.create_pod(pod("before", sku="s-npu"))
    await runs(cluster, "before")
    retired = CATALOG.replace(
        'name = "s-npu"', 'name = "s-npu"\nstate = "retired"\nsuccessor = "s-8g"'
    )
    catalog_file.write_text(retired)

    async def refused() -> str:
        try:
            await cluster.create_pod({**pod("after", sku="s-npu")})
        except (Denied, RequestInvalid) as error:
            return str(error)
        await cluster.delete_pod("after")
        return ""

    text = ""
    with anyio.fail_after(30):
        # A pod that the catalog of before admitted keeps its name until it has ended.
        while "retired" not in (text := await refused()):
            await anyio.sleep(0.1)
    assert "SKU s-npu@1 is retired; ask for s-8g" in text
    assert await cluster.pod_is("before", "Running")
    catalog_file.write_text(retired + "\n[[sku]]\nname = 'broken'\n")
    await anyio.sleep(1.0)
    assert "retired" in await refused()
    await cluster.processes["webhook"].kill()
    catalog_file.write_text(retired)
    cluster.processes["webhook"].start()
    await cluster.ready("webhook")
    assert "retired" in await refused()
    assert await cluster.pod_is("before", "Running")
