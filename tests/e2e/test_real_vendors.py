# SPDX-License-Identifier: Apache-2.0
"""Device plugins of vendors beside NVIDIA's on a real node: kubelet, containerd and runc.

One node has devices of several vendors; hardware and partitions are simulated, the device nodes in
/dev have no driver behind them. The pods are those of ``examples/<vendor>``.
"""

import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common.pods import limits
from hami_sim.cluster import ClusterSpec, NodeSpec
from hami_sim.hardware import profile as hardware
from tests.cluster.node.cluster import NodeCluster, run_node_cluster
from tests.cluster.node.image import APP
from tests.cluster.node.needs import programs_or_skip
from tests.cluster.node.node import base
from tests.support.checker import lasting_problems, ledger_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(300),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODE = "real-mixed"
LIMIT_S = 120.0
PROFILES: Mapping[str, tuple[str, str, str, tuple[str, ...]]] = {
    "enflame": ("4xS60", "shares.yaml", "gcu{}", ("gcuctl",)),
    "mthreads": ("8xMTT-S4000", "shares.yaml", "mtgpu.{}", ()),
    "awsneuron": ("16xTrainium", "shares.yaml", "neuron{}", ()),
    "vastai": ("4xVA16", "whole.yaml", "va{}", ()),
}
"""By vendor: hardware, pods, name of a device's node, names of nodes that all containers get.

Vendors whose containers get files of the host are left out: containerd would create them on this
machine, where the drivers' tests look for the vendors' libraries.
"""
SHOW = "ls /dev; echo ---; cat /etc/hami/limits; echo ---; trap 'exit 0' TERM; sleep 100000 & wait"


def device_nodes() -> tuple[str, ...]:
    return tuple(
        name
        for profile, _, pattern, common in PROFILES.values()
        for name in (
            *(pattern.format(number) for number in range(len(hardware.load(profile).devices))),
            *common,
        )
    )


def manifests(vendor: str) -> list[dict[str, Any]]:
    """The vendor's pods with an image of the node, and without what the demo's pods print."""
    found = []
    for pod in yaml.safe_load_all((EXAMPLES / vendor / PROFILES[vendor][1]).read_text()):
        pod["spec"] |= {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1}
        for container in pod["spec"]["containers"]:
            container |= {"image": APP, "command": ["sh", "-c", SHOW]}
        found.append(pod)
    return found


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeCluster]:
    programs = programs_or_skip()
    others = tuple(profile for profile, *_ in PROFILES.values())
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="8xA100-40", others=others),),
        injection="devices",
        backoff_s=0.2,
    )
    with tempfile.TemporaryDirectory(prefix="hv-", dir=base()) as disk:
        async with run_node_cluster(
            spec,
            programs,
            tmp_path_factory.mktemp("vendors"),
            Path(disk),
            device_nodes=device_nodes(),
        ) as cluster:
            yield cluster


async def test_container_gets_the_device_nodes_and_limits_of_its_record(
    cluster: NodeCluster,
) -> None:
    """Of all vendors at once: one node, one kubelet, one plugin per vendor."""
    vendor_by_pod: dict[str, str] = {}
    for vendor in PROFILES:
        for pod in manifests(vendor):
            vendor_by_pod[pod["metadata"]["name"]] = vendor
            await cluster.create_pod(pod)

    async def has_shown(name: str) -> bool:
        if not await cluster.pod_is(name, "Running"):
            return False
        return (await cluster.container_log(name, "main")).count("---\n") == 2

    for name in vendor_by_pod:
        await cluster.until(f"{name} shows what it has", partial(has_shown, name), limit_s=LIMIT_S)
    records = {record.pod: record for record in (await ledger_of(cluster)).values()}
    assert records.keys() == vendor_by_pod.keys()
    index_by_uuid = {
        hardware.load(profile).uuid_of(NODE, index): index
        for profile, *_ in PROFILES.values()
        for index in range(len(hardware.load(profile).devices))
    }
    wrong = []
    for name, vendor in vendor_by_pod.items():
        _, _, pattern, common = PROFILES[vendor]
        [shares] = records[name].containers
        text = await cluster.container_log(name, "main")
        listed, file, *_ = text.split("---\n")
        found = set(listed.split()) & set(device_nodes())
        expected = {pattern.format(index_by_uuid[share.uuid]) for share in shares.shares}
        if found != expected | set(common):
            wrong.append(f"{name} has {sorted(found)} in /dev, its record says {sorted(expected)}")
        told = limits.decode(file)
        if told != limits.limits_of(shares, allocation_id=records[name].allocation_id):
            wrong.append(f"{name} has the limits {told}, its record says {shares}")
        if {share.vendor for share in shares.shares} != {vendor}:
            wrong.append(f"{name} has shares of {shares}")
    assert wrong == []
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []
    for name in vendor_by_pod:
        await cluster.delete_pod(name)

    async def is_released() -> bool:
        return all(record.op == "release" for record in (await ledger_of(cluster)).values())

    await cluster.until("all shares are released", is_released, limit_s=LIMIT_S)
