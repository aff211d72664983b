# SPDX-License-Identifier: Apache-2.0
"""The contract for admission and allocation: order, ids, refusals, container environment."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import anyio
import pytest

from hami_common.kubeletapi import deviceplugin as api
from tests.contract.kubelet.plugin import Refused
from tests.contract.kubelet.support import SLEEP, Node, Obj, asks, ids_in, until

pytestmark = pytest.mark.anyio


class AllocationContract:
    """Ids that a container gets, and the outcome when it cannot have them."""

    async def test_container_gets_the_requested_number_of_ids(self, node: Node) -> None:
        async with node.plugin(["a", "b", "c", "d"]) as plugin:
            await node.joined(plugin, 4)
            pod = await node.run(
                [asks(plugin.resource, 3, script=f"echo devices=$TEST_DEVICES; {SLEEP}")]
            )
            await node.in_phase(pod, "Running")
            [ids] = plugin.allocated
            assert len(set(ids)) == 3
            assert await node.ids(pod, plugin.resource) == set(ids)
            await node.prints(pod, f"devices={','.join(sorted(ids))}\n")

    async def test_each_container_has_its_own_call_init_containers_first(self, node: Node) -> None:
        async with node.plugin([f"d{i}" for i in range(9)]) as plugin:
            await node.joined(plugin, 9)
            resource = plugin.resource
            pod = await node.run(
                [asks(resource, 4, name="main"), asks(resource, 5, name="second")],
                inits=[
                    asks(resource, 1, name="first", script="exit 0"),
                    asks(resource, 3, name="side", restartPolicy="Always"),
                ],
            )
            await node.in_phase(pod, "Failed")  # 1 is reused, but 3 + 4 + 5 > 9
            assert [len(ids) for ids in plugin.allocated] == [1, 3, 4]

    async def test_devices_of_an_init_container_are_reused(self, node: Node) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            await node.joined(plugin, 2)
            pod = await node.run(
                [asks(plugin.resource, 2)],
                inits=[asks(plugin.resource, 2, name="first", script="exit 0")],
            )
            await node.in_phase(pod, "Running")
            assert [set(ids) for ids in plugin.allocated] == [{"a", "b"}, {"a", "b"}]

    async def test_devices_of_a_sidecar_are_not_reused(self, node: Node) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            await node.joined(plugin, 2)
            pod = await node.run(
                [asks(plugin.resource, 1)],
                inits=[asks(plugin.resource, 1, name="side", restartPolicy="Always")],
            )
            await node.in_phase(pod, "Running")
            found = (await node.listed())[pod]
            held = [ids_in(found, plugin.resource, name) for name in ("side", "main")]
            assert sorted(map(sorted, held)) == [["a"], ["b"]]

    async def test_preferred_ids_are_taken(self, node: Node) -> None:
        offered = []

        def wish(available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
            offered.append((set(available), set(must), size))
            return ["c", "d"]

        async with node.plugin(["a", "b", "c", "d"], preferred=wish) as plugin:
            await node.joined(plugin, 4)
            pod = await node.run([asks(plugin.resource, 2)])
            await node.in_phase(pod, "Running")
            assert offered == [({"a", "b", "c", "d"}, set(), 2)]
            assert await node.ids(pod, plugin.resource) == {"c", "d"}

    async def test_ids_that_were_not_offered_are_ignored_as_preference(self, node: Node) -> None:
        def wish(available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
            return ["nonsense"]

        async with node.plugin(["a", "b"], preferred=wish) as plugin:
            await node.joined(plugin, 2)
            pod = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(pod, "Running")
            assert len(plugin.allocated[0]) == 1
            assert set(plugin.allocated[0]) < {"a", "b"}

    async def test_refused_allocate_fails_the_pod_with_the_plugins_message(
        self, node: Node
    ) -> None:
        async with node.plugin(["a"]) as plugin:

            async def refuse(ids: Sequence[str]) -> api.ContainerAllocateResponse:
                raise Refused("no share here")

            plugin.answer = refuse
            await node.joined(plugin, 1)
            pod = await node.run([asks(plugin.resource, 1)])
            failed = await node.in_phase(pod, "Failed")
            assert failed["status"]["reason"] == "UnexpectedAdmissionError"
            assert failed["status"]["message"] == (
                "Pod was rejected: Allocate failed due to rpc error: "
                "code = Unknown desc = no share here, which is unexpected"
            )
            assert pod not in await node.listed()
            await node.delete(pod)
            await node.gone(pod)

    async def test_more_than_there_is_fails_the_pod(self, node: Node) -> None:
        async with node.plugin(["a"]) as plugin:
            await node.joined(plugin, 1)
            pod = await node.run([asks(plugin.resource, 2)])
            failed = await node.in_phase(pod, "Failed")
            assert failed["status"]["message"] == (
                "Pod was rejected: Allocate failed due to requested number of devices unavailable "
                f"for {plugin.resource}. Requested: 2, Available: 1, which is unexpected"
            )
            assert plugin.allocated == []

    async def test_pod_created_after_the_plugin_vanished_is_rejected(self, node: Node) -> None:
        async with node.plugin(["a"]) as plugin:
            await node.joined(plugin, 1)
            await plugin.close()
            await node.shows(plugin.resource, 1, 0)
            pod = await node.run([asks(plugin.resource, 1)])
            failed = await node.in_phase(pod, "Failed")
            assert failed["status"]["reason"] == "UnexpectedAdmissionError"
            assert failed["status"]["message"] == (
                "Pod was rejected: Allocate failed due to no healthy devices present; "
                f"cannot allocate unhealthy devices {plugin.resource}, which is unexpected"
            )
            assert not failed["status"].get("containerStatuses")

    async def test_resource_that_no_plugin_offers_is_not_kubelets_concern(self, node: Node) -> None:
        pod = await node.run([asks("contract.example.com/nobody", 1)])
        await node.in_phase(pod, "Running")

    async def test_resource_in_the_status_of_another_writer_is_kept_and_added_up(
        self, node: Node
    ) -> None:
        resource = "contract.example.com/amount"
        await node.write_amount(resource, "5")
        first = await node.run([asks(resource, 3)])
        await node.in_phase(first, "Running")
        refused = await node.run([asks(resource, 3)])
        failed = await node.in_phase(refused, "Failed")
        assert failed["status"]["reason"] == f"OutOf{resource}"
        await node.write_amount(resource, "6")
        await node.admits([asks(resource, 3)])
        await node.write_amount(resource, None)
        await node.admits([asks(resource, 3)])

    async def test_pod_refused_for_cpu_had_its_allocate_call_and_frees_its_devices(
        self, node: Node
    ) -> None:
        async with node.plugin(["a"]) as plugin:
            await node.joined(plugin, 1)
            pod = await node.run([asks(plugin.resource, 1, limits={"cpu": "1000"})])
            failed = await node.in_phase(pod, "Failed")
            assert failed["status"]["reason"] == "OutOfcpu"
            assert failed["status"]["message"].startswith(
                "Pod was rejected: Node didn't have enough resource: cpu, requested: 1000000, "
            )
            assert plugin.allocated == [["a"]]
            assert pod not in await node.listed()
            following = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(following, "Running")

    async def test_devices_are_free_once_the_deleted_pods_containers_are_gone(
        self, node: Node
    ) -> None:
        async with node.plugin(["a"]) as plugin:
            await node.joined(plugin, 1)
            stubborn = "trap '' TERM; echo armed; while true; do sleep 0.1; done"
            first = await node.run([asks(plugin.resource, 1, script=stubborn)])
            await node.prints(first, "armed")
            await node.delete(first, grace_s=2)
            early = await node.run([asks(plugin.resource, 1)])
            failed = await node.in_phase(early, "Failed")
            assert "Requested: 1, Available: 0" in failed["status"]["message"]
            await node.gone(first)
            late = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(late, "Running")


class AdmissionContract:
    """Facts that hold while an Allocate call runs: the basis of design D9."""

    async def test_pod_is_listed_without_devices_inside_its_own_allocate(self, node: Node) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            seen: list[tuple[set[str], float]] = []

            async def look(ids: Sequence[str]) -> api.ContainerAllocateResponse:
                begin_s = time.monotonic()
                listed = await node.listed()
                took_s = time.monotonic() - begin_s
                empty = {pod.name for pod in listed.values() if not ids_in(pod, plugin.resource)}
                seen.append((empty, took_s))
                return api.ContainerAllocateResponse()

            plugin.answer = look
            await node.joined(plugin, 2)
            one = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(one, "Running")
            two = await node.run([asks(plugin.resource, 1)])
            await node.in_phase(two, "Running")
            assert [names for names, _ in seen] == [{one}, {two}]
            assert max(took_s for _, took_s in seen) < 0.5

    async def test_pods_are_admitted_one_after_the_other(self, node: Node) -> None:
        async with node.plugin([f"d{i}" for i in range(4)]) as plugin:
            gate = anyio.Event()
            inside = 0
            most = 0
            waiting: list[set[str]] = []

            async def wait(ids: Sequence[str]) -> api.ContainerAllocateResponse:
                nonlocal inside, most
                inside += 1
                most = max(most, inside)
                await gate.wait()
                listed = await node.listed()
                waiting.append(
                    {pod.name for pod in listed.values() if not ids_in(pod, plugin.resource)}
                )
                inside -= 1
                return api.ContainerAllocateResponse()

            async def calls() -> int:
                return len(plugin.allocated)

            plugin.answer = wait
            await node.joined(plugin, 4)
            pods = [await node.run([asks(plugin.resource, 1)]) for _ in range(4)]
            await until(calls, (1).__eq__)
            await anyio.sleep(0.2)  # time in which another call would come
            assert len(plugin.allocated) == 1
            gate.set()
            for pod in pods:
                await node.in_phase(pod, "Running")
            assert most == 1
            assert sorted(map(sorted, waiting)) == sorted([pod] for pod in pods)

    async def test_containers_of_one_pod_are_allocated_one_after_the_other(
        self, node: Node
    ) -> None:
        async with node.plugin([f"d{i}" for i in range(3)]) as plugin:
            empty: list[set[str]] = []

            async def look(ids: Sequence[str]) -> api.ContainerAllocateResponse:
                [pod] = (await node.listed()).values()
                names = [entry.name for entry in pod.containers]
                empty.append({n for n in names if not ids_in(pod, plugin.resource, n)})
                return api.ContainerAllocateResponse()

            plugin.answer = look
            await node.joined(plugin, 3)
            pod = await node.run(
                [asks(plugin.resource, 1, name="one"), asks(plugin.resource, 1, name="two")],
                inits=[asks(plugin.resource, 1, name="side", restartPolicy="Always")],
            )
            await node.in_phase(pod, "Running")
            assert empty == [{"side", "one", "two"}, {"one", "two"}, {"two"}]


class StartContract:
    """Environment and devices of the container, and PreStartContainer."""

    async def test_pre_start_is_called_with_the_ids_before_the_command_runs(
        self, node: Node
    ) -> None:
        async with node.plugin(["a", "b"], pre_start=True) as plugin:
            states: list[Obj] = []

            async def look(ids: Sequence[str]) -> None:
                states.extend(
                    status["state"]
                    for pod in (await node.client.list("pods", node.namespace))["items"]
                    for status in pod["status"].get("containerStatuses") or []
                )

            plugin.pre_start_answer = look
            await node.joined(plugin, 2)
            pod = await node.run([asks(plugin.resource, 2)])
            await node.in_phase(pod, "Running")
            assert [sorted(ids) for ids in plugin.pre_started] == [["a", "b"]]
            assert not any("running" in state for state in states)

    async def test_refused_pre_start_keeps_the_pod_waiting_and_is_tried_again(
        self, node: Node
    ) -> None:
        async with node.plugin(["a"], pre_start=True) as plugin:
            refusing = True

            async def refuse(ids: Sequence[str]) -> None:
                if refusing:
                    raise Refused("partition is not ready")

            plugin.pre_start_answer = refuse
            await node.joined(plugin, 1)
            name = await node.run([asks(plugin.resource, 1)])

            async def waiting() -> Obj:
                pod = await node.pod(name)
                assert pod is not None
                statuses = pod["status"].get("containerStatuses") or [{"state": {}}]
                state: Obj = statuses[0]["state"].get("waiting", {})
                return state

            state = await until(
                waiting, lambda found: found.get("reason") == "CreateContainerConfigError"
            )
            assert state["message"] == (
                "device plugin PreStartContainer rpc failed with err: "
                "rpc error: code = Unknown desc = partition is not ready"
            )
            refusing = False
            await node.in_phase(name, "Running")
            assert len(plugin.pre_started) >= 2

    async def test_variables_of_the_pod_win_over_those_of_the_plugin(self, node: Node) -> None:
        async with node.plugin(["a"]) as plugin:

            async def answer(ids: Sequence[str]) -> api.ContainerAllocateResponse:
                return api.ContainerAllocateResponse(envs={"ONE": "plugin", "TWO": "plugin"})

            plugin.answer = answer
            await node.joined(plugin, 1)
            env = [{"name": "ONE", "value": "pod"}]
            script = f"echo one=$ONE two=$TWO; {SLEEP}"
            pod = await node.run([asks(plugin.resource, 1, script=script, env=env)])
            await node.prints(pod, "one=pod two=plugin")

    async def test_mounts_and_devices_of_the_answer_are_in_the_container(self, node: Node) -> None:
        async with node.plugin(["a"]) as plugin:
            shared = node.plugin_directory / f"{plugin.resource.rpartition('/')[2]}.txt"
            shared.write_text("from the host\n")

            async def answer(ids: Sequence[str]) -> api.ContainerAllocateResponse:
                return api.ContainerAllocateResponse(
                    mounts=[
                        api.Mount(
                            container_path="/usr/local/vendor/file.txt",
                            host_path=str(shared),
                            read_only=True,
                        )
                    ],
                    devices=[
                        api.DeviceSpec(
                            container_path="/dev/vendor0", host_path="/dev/null", permissions="rw"
                        )
                    ],
                )

            plugin.answer = answer
            await node.joined(plugin, 1)
            script = (
                "cat /usr/local/vendor/file.txt; test -c /dev/vendor0 && echo device; "
                "{ echo x > /usr/local/vendor/file.txt; } 2>/dev/null || echo read-only; "
                "exec sleep 1000"
            )
            pod = await node.run([asks(plugin.resource, 1, script=script)])
            printed = await node.prints(pod, "read-only")
            assert "from the host\ndevice\n" in printed
            assert shared.read_text() == "from the host\n"
            shared.unlink()

    async def test_named_cdi_devices_are_in_the_container(self, node: Node) -> None:
        async with node.plugin(["a", "b"]) as plugin:
            word = plugin.resource.rpartition("/")[2]
            kind = f"contract.example.com/c{word}"

            def device(name: str) -> Obj:
                edits = {
                    "env": [f"GIVEN={name}"],
                    "deviceNodes": [{"path": f"/dev/cdi-{name}", "hostPath": "/dev/null"}],
                }
                return {"name": name, "containerEdits": edits}

            async def answer(ids: Sequence[str]) -> api.ContainerAllocateResponse:
                return api.ContainerAllocateResponse(
                    cdi_devices=[api.CDIDevice(name=f"{kind}={id_}") for id_ in ids]
                )

            spec = {"cdiVersion": "0.5.0", "kind": kind, "devices": [device("a"), device("b")]}
            (node.cdi_directory / f"{word}.json").write_text(json.dumps(spec))
            plugin.answer = answer
            await node.joined(plugin, 2)
            script = f"echo given=$GIVEN; ls /dev | grep cdi-; {SLEEP}"
            pod = await node.run([asks(plugin.resource, 1, script=script)])
            await node.in_phase(pod, "Running")
            [[given]] = plugin.allocated
            assert await node.prints(pod, f"cdi-{given}\n") == f"given={given}\ncdi-{given}\n"

    async def test_unknown_cdi_device_keeps_the_container_from_starting(self, node: Node) -> None:
        async with node.plugin(["a"]) as plugin:

            async def answer(ids: Sequence[str]) -> api.ContainerAllocateResponse:
                name = "contract.example.com/none=a"
                return api.ContainerAllocateResponse(cdi_devices=[api.CDIDevice(name=name)])

            plugin.answer = answer
            await node.joined(plugin, 1)
            name = await node.run([asks(plugin.resource, 1)])

            async def waiting() -> Obj:
                pod = await node.pod(name)
                assert pod is not None
                statuses = pod["status"].get("containerStatuses") or [{"state": {}}]
                state: Obj = statuses[0]["state"].get("waiting", {})
                return state

            state = await until(
                waiting, lambda found: found.get("reason") == "CreateContainerError"
            )
            assert "unresolvable CDI devices contract.example.com/none=a" in state["message"]
