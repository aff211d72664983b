# SPDX-License-Identifier: Apache-2.0
"""Claims from template to container on the simulated API server, kube-scheduler and kubelet."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hami_sim.kube import Access
from hami_sim.kubescheduler import SchedulerSettings, SimScheduler
from tests.contract.dra.support import (
    CLAIMS,
    DRIVER,
    SLICES,
    TEMPLATES,
    claim_spec,
    exactly,
    gpu,
    make_class,
    slice_of,
)
from tests.contract.kubelet.dradriver import TestDriver
from tests.contract.kubelet.suite_dra import SHOW, uses
from tests.contract.kubelet.support import Node, Obj, until
from tests.integration.sim.kubelet.conftest import Bench
from tests.support.kubeclient import KubeClient

pytestmark = pytest.mark.anyio


@pytest.fixture
async def node(
    access: Access, client: KubeClient, bench: Bench, short_path: Path
) -> AsyncIterator[Node]:
    """A node whose pods the simulated kube-scheduler binds; kubelet has removed its slices."""
    await client.create(SLICES, slice_of("node-a", gpu()))

    async def slices() -> list[Obj]:
        return list((await client.list(SLICES))["items"])

    cdi = short_path / "cdi"
    cdi.mkdir()
    settings = SchedulerSettings(initial_backoff_s=0.05, max_backoff_s=0.1)
    async with (
        SimScheduler(access, settings),
        bench(cdi_directories=(str(cdi),)) as (node, _),
    ):
        await until(slices, lambda found: not found)
        yield node


@pytest.fixture
async def driver(node: Node) -> AsyncIterator[TestDriver]:
    driver = TestDriver(node.kubelet_directory, node.cdi_directory, name=DRIVER)
    await driver.serve()
    yield driver
    await driver.close()


async def test_pods_of_a_template_share_a_card_until_it_is_full_and_leave_no_claim(
    node: Node, driver: TestDriver
) -> None:
    client = node.client
    device_class = await make_class(client)
    spec = claim_spec(exactly(device_class, "40Gi"))
    template = {"metadata": {"name": "half"}, "spec": {"spec": spec}}
    await client.create(TEMPLATES, template, node.namespace)

    async def registered() -> bool:
        return bool(driver.statuses)

    await until(registered, bool)
    await client.create(SLICES, slice_of(node.name, gpu(memory="80Gi")))
    pods = [
        await node.run(
            [uses("gpu", script=SHOW)],
            nodeName="",
            resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "half"}],
        )
        for _ in range(3)
    ]

    async def running() -> list[str]:
        found = [await node.pod(pod) for pod in pods]
        return [pod["metadata"]["name"] for pod in found if pod and is_running(pod)]

    first = await until(running, lambda names: len(names) == 2)
    names = {claim["metadata"]["name"] for claim in await claims_of(node)}
    given = {(await node.prints(pod, "end")).split("\n")[0] for pod in first}
    assert len(given) == 2
    assert given < {f"GIVEN_R0={name}" for name in names}
    await node.delete(first[0])
    await node.gone(first[0])
    second = await until(running, lambda names: len(names) == 2)
    assert {*first, *second} == set(pods)
    for pod in second:
        await node.delete(pod)
        await node.gone(pod)
    await until(lambda: claims_of(node), lambda claims: not claims)
    assert len(driver.prepared) == len(driver.unprepared) == 3


def is_running(pod: Obj) -> bool:
    return bool(pod["status"]["phase"] == "Running")


async def claims_of(node: Node) -> list[Obj]:
    return list((await node.client.list(CLAIMS, node.namespace))["items"])
