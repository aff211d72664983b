# SPDX-License-Identifier: Apache-2.0
"""The contract for plugins that start and stop, and for their resources in the node's status."""

import grpc
import grpc.aio
import pytest

from tests.contract.kubelet.plugin import TestPlugin
from tests.contract.kubelet.support import Node, asks, identity, ids_in, until

pytestmark = pytest.mark.anyio

KEEPS_DEVICES_SINCE = 37
"""Minor release of kubelet that serves several plugins of one resource; those between 34 and this
one were not looked at."""


class RegistrationContract:
    """Registration and capacity."""

    async def test_devices_of_a_registered_plugin_show_in_the_node_status(self, node: Node) -> None:
        async with node.plugin(["a", "b", "c"]) as plugin:
            assert await node.amounts(plugin.resource) == ("", "")
            await node.joined(plugin, 3)

    async def test_unhealthy_devices_count_as_capacity_but_not_as_allocatable(
        self, node: Node
    ) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            await node.joined(plugin, 2)
            plugin.set_health({"a": "Healthy", "b": "Unhealthy"})
            await node.shows(plugin.resource, 2, 1)
            plugin.set_health({"a": "Healthy", "b": "Healthy"})
            await node.shows(plugin.resource, 2, 2)
            plugin.set_health({"a": "Healthy"})
            await node.shows(plugin.resource, 1, 1)

    async def test_vanished_plugin_leaves_capacity_without_allocatable(self, node: Node) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            await node.joined(plugin, 2)
            await plugin.close()
            await node.shows(plugin.resource, 2, 0)
            await plugin.serve()
            await node.joined(plugin, 2)

    async def test_two_plugins_do_not_disturb_each_other(self, node: Node) -> None:
        async with node.plugin(["a"]) as one, node.plugin(["a", "b"]) as two:
            await node.joined(one, 1)
            await node.joined(two, 2)
            await one.close()
            await node.shows(one.resource, 1, 0)
            assert await node.amounts(two.resource) == ("2", "2")

    async def test_plugin_may_register_again_with_other_devices(self, node: Node) -> None:
        async with node.plugin(["a"]) as old:
            await node.joined(old, 1)
            await old.close()
            old.set_health(dict.fromkeys("xyz", "Healthy"))
            await old.serve()
            await node.joined(old, 3)

    async def test_later_plugin_takes_a_resource_over_and_the_older_stream_stays_open(
        self, node: Node
    ) -> None:
        """Kubelet does not report it: only its list of healthy devices shows it.

        When the later plugin ends, its devices are gone up to 1.34; in 1.37 they stay, with the
        older plugin to be asked for them, until that one sends its list again.
        """
        older = node.plugin(["a", "b"])
        async with older:
            await node.joined(older, 2)
            later = TestPlugin(
                node.plugin_directory, older.resource, ["c"], endpoint=f"later-{older.socket.name}"
            )
            async with later:
                await node.joined(later, 1)
                assert older.streams == 1
            if await node.minor_release() >= KEEPS_DEVICES_SINCE:
                older.set_health({"a": "Healthy", "b": "Unhealthy"})
                await node.shows(older.resource, 2, 1)
                assert older.streams == 1
                return
            await node.shows(older.resource, 1, 0)
            assert older.streams == 1
            await older.register()
            await node.joined(older, 2)

    async def test_other_api_version_is_refused(self, node: Node) -> None:
        async with node.plugin(["a"]) as plugin:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await plugin.register(version="v1alpha")
        assert caught.value.code() is grpc.StatusCode.UNKNOWN
        assert caught.value.details() == (
            'requested API version "v1alpha" is not supported by kubelet. '
            'Supported version is ["v1beta1"]'
        )

    @pytest.mark.parametrize("name", ["gpu", "kubernetes.io/gpu"])
    async def test_name_that_is_no_extended_resource_is_refused(
        self, node: Node, name: str
    ) -> None:
        async with node.plugin(["a"]) as plugin:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await plugin.register(resource=name)
        assert caught.value.details() == f'the ResourceName "{name}" is invalid'

    async def test_kubelet_reads_the_plugins_options_before_register_returns(
        self, node: Node
    ) -> None:
        async with node.plugin(["a"]) as plugin:
            await plugin.register()
            assert plugin.options_asked == 1


class RestartContract:
    """Kubelet restarts; containers go on."""

    async def test_restart_removes_sockets_and_makes_a_new_kubelet_socket(self, node: Node) -> None:
        async with node.plugin(["a"]) as plugin:
            await node.joined(plugin, 1)
            before = identity(node.plugin_directory / "kubelet.sock")
            await node.restart()
            assert identity(node.plugin_directory / "kubelet.sock") != before
            assert not plugin.socket.exists()
            await node.shows(plugin.resource, 0, 0)
            await plugin.close()
            await plugin.serve()
            await node.joined(plugin, 1)

    async def test_restart_keeps_containers_and_their_devices_without_another_allocate(
        self, node: Node
    ) -> None:
        async with node.plugin(["a", "b", "c"]) as plugin:
            await node.joined(plugin, 3)
            pod = await node.run([asks(plugin.resource, 2)])
            before = await node.in_phase(pod, "Running")
            held = await node.ids(pod, plugin.resource)
            await node.restart()
            # Its list is empty until the API server has sent it its pods.
            await until(lambda: node.ids(pod, plugin.resource), held.__eq__)
            await plugin.close()
            await plugin.serve()
            await node.joined(plugin, 3)
            after = await node.in_phase(pod, "Running")
            assert [c["containerID"] for c in before["status"]["containerStatuses"]] == [
                c["containerID"] for c in after["status"]["containerStatuses"]
            ]
            assert len(plugin.allocated) == 1
            other = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(other, "Running")
            assert not await node.ids(other, plugin.resource) & held

    async def test_pod_created_before_the_plugin_registers_again_is_rejected_permanently(
        self, node: Node
    ) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            await node.joined(plugin, 2)
            await node.restart()
            await node.shows(plugin.resource, 0, 0)
            early = await node.run([asks(plugin.resource, 1)])
            failed = await node.in_phase(early, "Failed")
            assert failed["status"]["reason"] == "UnexpectedAdmissionError"
            assert failed["status"]["message"] == (
                "Pod was rejected: Allocate failed due to no healthy devices present; "
                f"cannot allocate unhealthy devices {plugin.resource}, which is unexpected"
            )
            await plugin.close()
            await plugin.serve()
            await node.joined(plugin, 2)
            late = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(late, "Running")
            assert (await node.in_phase(early, "Failed"))["status"] == failed["status"]
            assert len(plugin.allocated) == 1

    async def test_without_its_checkpoint_kubelet_offers_the_ids_of_running_pods_again(
        self, node: Node
    ) -> None:
        async with node.plugin(["a"]) as plugin:
            await node.joined(plugin, 1)
            old = await node.run([asks(plugin.resource, 1)])
            before = await node.in_phase(old, "Running")
            (node.plugin_directory / "kubelet_internal_checkpoint").unlink()
            await node.restart()
            listed = await until(node.listed, lambda pods: old in pods)
            assert ids_in(listed[old], plugin.resource) == set()
            await plugin.close()
            await plugin.serve()
            await node.joined(plugin, 1)
            new = await node.run([asks(plugin.resource, 1)])
            failed = await node.in_phase(new, "Failed")
            # Requests are counted by the pods that run, ids are not.
            assert failed["status"]["reason"] == f"OutOf{plugin.resource}"
            assert plugin.allocated == [["a"], ["a"]]
            after = await node.in_phase(old, "Running")
            assert [c["containerID"] for c in before["status"]["containerStatuses"]] == [
                c["containerID"] for c in after["status"]["containerStatuses"]
            ]

    async def test_pod_deleted_after_a_restart_ends_and_frees_its_devices(self, node: Node) -> None:
        async with node.plugin(["a"]) as plugin:
            await node.joined(plugin, 1)
            pod = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(pod, "Running")
            await node.restart()
            await plugin.close()
            await plugin.serve()
            await node.joined(plugin, 1)
            await node.delete(pod)
            await node.gone(pod)
            following = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(following, "Running")
