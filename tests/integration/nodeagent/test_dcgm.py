# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's DCGM exporter attributes shares, whole devices and MIG instances to their pods.

The exporter's rules are those of ``tests/support/dcgm.py``. It asks kubelet, or the agent's
PodResources view, which also knows what kubelet cannot: MIG instances, and granted devices that
differ from kubelet's choice.
"""

from pathlib import Path

import grpc.aio
import pytest

from hami_common.kubeletapi import podresources as api
from hami_common.kubeletapi import podresources_grpc
from hami_sim.natsd import NatsServer
from tests.integration.nodeagent.plane import NODE, Ask, Plane, run_plane, until
from tests.integration.nodeagent.test_agent_partitions import Machine
from tests.support.dcgm import Attribution, attributions

pytestmark = pytest.mark.anyio


async def listed(socket: Path) -> api.ListPodResourcesResponse:
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub = podresources_grpc.PodResourcesListerStub(channel)
        answer: api.ListPodResourcesResponse = await stub.List(
            api.ListPodResourcesRequest(), timeout=30.0, wait_for_ready=True
        )
        return answer


def holders(found: list[Attribution]) -> list[tuple[str, str]]:
    return sorted((one.pod, one.container) for one in found)


async def test_shares_and_whole_devices_are_attributed_from_kubelets_own_list(
    plane: Plane,
) -> None:
    first, second, third = plane.devices[:3]
    async with plane.agent():
        await plane.place("one", Ask(shares=((0, 1000),)))
        await plane.place("two", Ask(shares=((0, 2000),)))
        await plane.place("whole", Ask(shares=((1, second.memory_mib),)))
        for pod in ("one", "two", "whole"):
            await plane.until_phase(pod, "Running")
        answer = await listed(plane.kubelet.pod_resources_socket)
    found = attributions(answer, virtual_gpus=True)
    assert holders(found[first.uuid]) == [("one", "main"), ("two", "main")]
    assert holders(found[second.uuid]) == [("whole", "main")]
    assert third.uuid not in found
    assert len({one.vgpu for one in found[first.uuid]}) == 2
    assert holders(attributions(answer, virtual_gpus=False)[second.uuid]) == [("whole", "main")]


async def test_view_names_the_granted_device_where_kubelet_chose_another_one(
    plane: Plane, short_path: Path
) -> None:
    """Kubelet gives the application container the ids of its pod's init container."""
    view = short_path / "view.sock"
    of_init, granted = plane.devices[0], plane.devices[3]
    async with plane.agent(pod_resources_view=str(view)):
        await plane.place(
            "one",
            Ask(name="fetch", kind="init", shares=((0, 1000),), command="true"),
            Ask(shares=((3, 1000),)),
        )
        await plane.until_phase("one", "Running")
        answer = await listed(plane.kubelet.pod_resources_socket)
        of_kubelet = attributions(answer, virtual_gpus=True)
        assert granted.uuid not in of_kubelet
        assert holders(of_kubelet[of_init.uuid]) == [("one", "main")]
        found = attributions(await listed(view), virtual_gpus=True)
        assert [device for device in found if "::" not in device] == [granted.uuid]
        assert holders(found[granted.uuid]) == [("one", "main")]
    assert not view.exists()


async def test_view_names_mig_instances(short_path: Path, nats_server: NatsServer) -> None:
    view = short_path / "view.sock"
    cdi = (str(short_path / "cdi"),)
    async with run_plane(short_path, nats_server, cdi_directories=cdi) as plane:
        machine = Machine(plane)
        await plane.publish_devices()
        settings = machine.settings({f"{NODE}/0": "off", f"{NODE}/1": "off"})
        async with plane.agent(**settings, pod_resources_view=str(view)):
            record, sequence = await machine.reserve("web", "3g.20gb", 0, 4)
            await plane.bind(record, sequence)
            await plane.until_state(record.pod_uid, "running")
            instances = {
                f"MIG-{part.uuid}-{part.number}": f"0-{part.number}" for part in machine.parts()
            }

            async def is_attributed() -> bool:
                found = attributions(await listed(view), virtual_gpus=True, instances=instances)
                return all(
                    holders(found.get(instance, [])) == [("web", "main")]
                    for instance in instances.values()
                )

            assert len(instances) == 2
            await until(is_attributed)
