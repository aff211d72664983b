# SPDX-License-Identifier: Apache-2.0
"""Many pods at once: order, refusals, ownership of ids, and duration."""

from __future__ import annotations

import time
from collections.abc import Sequence

import anyio
import pytest

from hami_common.kubeletapi import deviceplugin as api
from hami_sim.kubelet import Refusal
from hami_sim.kubelet.objects import Obj
from tests.contract.kubelet.support import Node, asks, ids_in, until
from tests.integration.sim.kubelet.conftest import Bench

pytestmark = pytest.mark.anyio


async def phases(node: Node) -> dict[str, int]:
    found: dict[str, int] = {}
    for pod in (await node.client.list("pods", node.namespace))["items"]:
        phase = pod["status"].get("phase", "Pending")
        found[phase] = found.get(phase, 0) + 1
    return found


async def test_shuffled_pods_with_a_fifth_refused_each_own_their_ids(bench: Bench) -> None:
    def refuse(pod: Obj) -> Refusal | None:
        is_fifth = int(pod["metadata"]["annotations"]["number"]) % 5 == 0
        return Refusal(reason="OutOfcpu", message="test") if is_fifth else None

    async with bench() as (node, kubelet), node.plugin([f"d{i}" for i in range(64)]) as plugin:
        claimed: dict[str, list[str]] = {}

        async def look(ids: Sequence[str]) -> api.ContainerAllocateResponse:
            listed = await node.listed()
            [name] = [n for n, pod in listed.items() if not ids_in(pod, plugin.resource)]
            claimed[name] = list(ids)
            return api.ContainerAllocateResponse(envs={"OWNER": name})

        plugin.answer = look
        await node.joined(plugin, 64)
        kubelet.faults.refuse(refuse)
        kubelet.faults.shuffle_admissions(7)
        kubelet.faults.hold_admissions()
        names = [
            await node.run(
                [asks(plugin.resource, script='echo "owner=$OWNER"; exec sleep 1000')],
                metadata={"annotations": {"number": str(number)}},
            )
            for number in range(50)
        ]
        kubelet.faults.release_admissions()
        await until(lambda: phases(node), {"Running": 40, "Failed": 10}.__eq__)
        assert list(claimed) != names  # the order was another one
        assert set(claimed) == set(names)
        for number, name in enumerate(names):
            if number % 5:
                assert await node.ids(name, plugin.resource) == set(claimed[name])
                await node.prints(name, f"owner={name}\n")


async def test_pod_refused_before_allocation_makes_no_call(bench: Bench) -> None:
    async with bench() as (node, kubelet), node.plugin(["a"]) as plugin:
        await node.joined(plugin, 1)
        kubelet.faults.refuse(
            lambda _: Refusal(reason="Evicted", message="The node was low on resource"),
            moment="before",
        )
        pod = await node.run([asks(plugin.resource)])
        failed = await node.in_phase(pod, "Failed")
        assert failed["status"]["reason"] == "Evicted"
        assert plugin.allocated == []


async def test_lost_plugin_makes_new_pods_fail_until_it_registers_again(bench: Bench) -> None:
    async with bench() as (node, kubelet), node.plugin(["a"]) as plugin:
        await node.joined(plugin, 1)
        await kubelet.drop_plugin(plugin.resource)
        await node.shows(plugin.resource, 1, 0)
        pod = await node.run([asks(plugin.resource)])
        failed = await node.in_phase(pod, "Failed")
        assert "no healthy devices present" in failed["status"]["message"]
        await node.joined(plugin, 1)
        following = await node.run([asks(plugin.resource)])
        await node.in_phase(following, "Running")


async def test_pods_whose_containers_ended_while_kubelet_was_down_need_the_plugin_again(
    bench: Bench,
) -> None:
    async with bench() as (node, kubelet), node.plugin(["a"]) as plugin:
        await node.joined(plugin, 1)
        pod = await node.run([asks(plugin.resource)], restartPolicy="Always")
        await node.in_phase(pod, "Running")
        container = kubelet.containers(pod)["main"]
        kubelet.faults.hold_admissions()
        await kubelet.restart()
        container_gone = anyio.Path(f"/proc/{container.pid}")
        await (await anyio.open_process(["kill", "-9", str(container.pid)])).wait()

        async def is_gone() -> bool:
            return not await container_gone.exists()

        await until(is_gone, bool)
        kubelet.faults.release_admissions()
        # Kubelet saw the container running when it started, so it takes the pod; the plugin is
        # asked only when the container is made again.
        await plugin.close()
        await plugin.serve()
        await node.joined(plugin, 1)
        found = await node.in_phase(pod, "Running")
        assert found["metadata"]["name"] == pod
        assert len(plugin.allocated) == 1


async def test_hundred_pods_run_within_seconds_and_go_again(bench: Bench) -> None:
    async with bench() as (node, _), node.plugin([f"d{i}" for i in range(100)]) as plugin:
        await node.joined(plugin, 100)
        begin_s = time.monotonic()
        names = [await node.run([asks(plugin.resource)]) for _ in range(100)]
        await until(lambda: phases(node), {"Running": 100}.__eq__, within_s=45.0)
        took_s = time.monotonic() - begin_s
        for name in names:
            await node.delete(name)
        await until(lambda: phases(node), {}.__eq__, within_s=45.0)
        print(f"100 pods ran after {took_s:.2f} s")
        assert sorted(id_ for ids in plugin.allocated for id_ in ids) == sorted(
            f"d{i}" for i in range(100)
        )


async def test_pod_for_a_label_is_admitted_although_no_status_was_reported_since(
    bench: Bench,
) -> None:
    async with bench(node_status_s=600.0) as (node, _):
        await node.client.patch("nodes", node.name, {"metadata": {"labels": {"gpu": "on"}}})

        async def phase() -> str:
            # Kubelet's watch of the node may be later than its watch of pods: retry as a DaemonSet.
            pod = await node.run([asks()], nodeSelector={"gpu": "on"})
            found: str = (await node.in_phase(pod, "Running", "Failed"))["status"]["phase"]
            return found

        await until(phase, "Running".__eq__)
