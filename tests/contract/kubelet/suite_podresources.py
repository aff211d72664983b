# SPDX-License-Identifier: Apache-2.0
"""The contract for PodResources v1 and for pod lifecycles as far as plugins depend on them."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from hami_common.kubeletapi import podresources
from tests.contract.kubelet.support import SLEEP, Node, asks, ids_in, until

pytestmark = pytest.mark.anyio


class PodResourcesContract:
    """List, Get, GetAllocatableResources."""

    async def test_ordinary_init_containers_are_left_out_and_sidecars_are_not(
        self, node: Node
    ) -> None:
        pod = await node.run(
            [asks(name="one"), asks(name="two")],
            inits=[
                asks(name="first", script="exit 0"),
                asks(name="side", restartPolicy="Always"),
            ],
        )
        await node.in_phase(pod, "Running")
        found = (await node.listed())[pod]
        assert [entry.name for entry in found.containers] == ["side", "one", "two"]

    async def test_each_device_has_an_entry_of_its_own_with_its_numa_node(self, node: Node) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            plugin.set_numa({"a": 0})
            await node.joined(plugin, 2)
            pod = await node.run([asks(plugin.resource, 2)])
            await node.in_phase(pod, "Running")
            [entry] = (await node.listed())[pod].containers
            numa_by_id = {
                id_: [n.ID for n in devices.topology.nodes]
                for devices in entry.devices
                for id_ in devices.device_ids
            }
            assert numa_by_id == {"a": [0], "b": []}
            assert len(entry.devices) == 2

    async def test_ids_with_two_colons_are_held_and_listed_unchanged(self, node: Node) -> None:
        """The form that NVIDIA's plugin and the agent use for shared devices."""
        ids = [f"GPU-0fd1a5b6-5a0c-4b8e-9d3c-2f5e7a9b1c3d::{number}" for number in range(2)]
        async with node.plugin(ids) as plugin:
            await node.joined(plugin, 2)
            pods = [await node.run([asks(plugin.resource)]) for _ in ids]
            for pod in pods:
                await node.in_phase(pod, "Running")
            held = [await node.ids(pod, plugin.resource) for pod in pods]
            assert sorted(map(sorted, held)) == [[one] for one in ids]

    async def test_ended_pod_is_not_listed(self, node: Node) -> None:
        pod = await node.run([asks(script="exit 0")])
        await node.in_phase(pod, "Succeeded")
        await until(node.listed, lambda listed: pod not in listed)

    async def test_get_of_an_unknown_pod_returns_not_found(self, node: Node) -> None:
        request = podresources.GetPodResourcesRequest(pod_name="nobody", pod_namespace="none")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.ask("Get", request)
        assert caught.value.details() == "pod nobody in namespace none not found"

    async def test_allocatable_resources_are_the_healthy_devices(self, node: Node) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            plugin.set_health({"a": "Healthy", "b": "Unhealthy"})
            await plugin.register()
            await node.shows(plugin.resource, 2, 1)
            answer = await node.ask(
                "GetAllocatableResources", podresources.AllocatableResourcesRequest()
            )
            ids = [
                id_
                for devices in answer.devices
                if devices.resource_name == plugin.resource
                for id_ in devices.device_ids
            ]
            assert ids == ["a"]

    async def test_too_many_requests_at_once_are_refused(self, node: Node) -> None:
        async def ask_often() -> None:
            for _ in range(500):
                await node.ask("List", podresources.ListPodResourcesRequest())

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask_often()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "rejected by rate limit"


class PodLifeContract:
    """Starting, refreshing, ending."""

    async def test_init_containers_run_to_their_end_one_after_the_other(self, node: Node) -> None:
        mount = [{"name": "work", "mountPath": "/shared"}]
        pod = await node.run(
            [asks(script=f"cat /shared/order; {SLEEP}", volumeMounts=mount)],
            inits=[
                asks(
                    name=name, script=f"sleep 0.2; echo {name} >> /shared/order", volumeMounts=mount
                )
                for name in ("one", "two")
            ],
            volumes=[{"name": "work", "emptyDir": {}}],
        )
        assert await node.prints(pod, "two") == "one\ntwo\n"

    async def test_failed_init_container_fails_a_pod_that_never_restarts(self, node: Node) -> None:
        pod = await node.run([asks()], inits=[asks(name="first", script="exit 3")])
        failed = await node.in_phase(pod, "Failed")
        [status] = failed["status"]["initContainerStatuses"]
        assert status["state"]["terminated"]["exitCode"] == 3

    async def test_sidecar_ends_after_the_last_application_container(self, node: Node) -> None:
        script = "trap 'echo told; exit 0' TERM; while true; do sleep 0.05; done"
        pod = await node.run(
            [asks(script="sleep 0.3")],
            inits=[asks(name="side", script=script, restartPolicy="Always")],
        )
        ended = await node.in_phase(pod, "Succeeded")
        [status] = ended["status"]["initContainerStatuses"]
        assert status["state"]["terminated"]["exitCode"] == 0
        assert "told" in await node.logs(pod, "side")

    async def test_annotation_reaches_the_file_and_follows_its_changes(self, node: Node) -> None:
        key = "main.limits.example.com/v1"
        pod = await node.run(
            [
                asks(
                    script="while true; do cat /etc/limits/file; sleep 0.1; done",
                    volumeMounts=[{"name": "limits", "mountPath": "/etc/limits", "readOnly": True}],
                )
            ],
            metadata={"annotations": {key: "first\n"}},
            volumes=[
                {
                    "name": "limits",
                    "downwardAPI": {
                        "items": [
                            {
                                "path": "file",
                                "fieldRef": {"fieldPath": f"metadata.annotations['{key}']"},
                            }
                        ]
                    },
                }
            ],
        )
        await node.prints(pod, "first\n")
        patch = {"metadata": {"annotations": {key: "second\n"}}}
        await node.client.patch("pods", pod, patch, namespace=node.namespace)
        await node.prints(pod, "second\n")

    async def test_projected_volume_is_read_only(self, node: Node) -> None:
        pod = await node.run(
            [
                asks(
                    script="{ echo x > /info/name; } 2>/dev/null || echo refused; "
                    f"cat /info/name; echo; {SLEEP}",
                    volumeMounts=[{"name": "info", "mountPath": "/info"}],
                )
            ],
            volumes=[
                {
                    "name": "info",
                    "downwardAPI": {
                        "items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]
                    },
                }
            ],
        )
        assert f"refused\n{pod}" in await node.prints(pod, pod)

    async def test_deleted_pod_is_terminated_and_then_killed(self, node: Node) -> None:
        polite = await node.run(
            [asks(script="trap 'exit 0' TERM; echo up; while true; do sleep 0.05; done")]
        )
        stubborn = await node.run(
            [asks(script="trap '' TERM; echo up; while true; do sleep 0.05; done")]
        )
        for pod in (polite, stubborn):
            await node.prints(pod, "up")
            await node.delete(pod, grace_s=1)
        await node.gone(polite)
        await node.gone(stubborn)

    async def test_container_restarts_and_counts(self, node: Node) -> None:
        pod = await node.run([asks(script="exit 1")], restartPolicy="Always")

        async def status() -> dict[str, object]:
            found = await node.pod(pod)
            assert found is not None
            statuses = found["status"].get("containerStatuses") or [{"restartCount": 0}]
            return dict(statuses[0])

        again = await until(status, lambda found: found["restartCount"] == 1)
        last = again["lastState"]
        assert isinstance(last, dict)
        assert last["terminated"]["exitCode"] == 1
        await node.in_phase(pod, "Running")

    async def test_exit_codes_make_the_phase(self, node: Node) -> None:
        good = await node.run([asks(script="exit 0")])
        bad = await node.run([asks(script="exit 7"), asks(name="other", script="exit 0")])
        await node.in_phase(good, "Succeeded")
        failed = await node.in_phase(bad, "Failed")
        codes = {
            status["name"]: status["state"]["terminated"]["exitCode"]
            for status in failed["status"]["containerStatuses"]
        }
        assert codes == {"main": 7, "other": 0}

    async def test_recreated_pod_of_the_same_name_is_another_pod(self, node: Node) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            await node.joined(plugin, 2)
            name = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(name, "Running")
            old = await node.pod(name)
            assert old is not None
            await node.delete(name)
            await node.gone(name)
            fresh = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name},
                "spec": {
                    "nodeName": node.name,
                    "terminationGracePeriodSeconds": 1,
                    "containers": [{**asks(plugin.resource, 2), "image": node.image}],
                },
            }
            await node.client.create("pods", fresh, node.namespace)
            new = await node.in_phase(name, "Running")
            assert new["metadata"]["uid"] != old["metadata"]["uid"]
            assert ids_in((await node.listed())[name], plugin.resource) == {"a", "b"}
