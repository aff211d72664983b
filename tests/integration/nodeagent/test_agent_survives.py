# SPDX-License-Identifier: Apache-2.0
"""The agent when a peer stops, restarts, sends wrong data or is missing."""

from collections import Counter
from pathlib import Path

import anyio
import grpc
import grpc.aio
import pytest

from hami_common.bus import subjects
from hami_common.events.codec import decode
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeReport
from hami_common.kubeletapi import deviceplugin as api
from hami_common.runtime.natsio import ensure_bus
from hami_nodeagent.settings import Settings
from hami_sim.apiserver import Fault, Match
from tests.contract.kubelet.plugin import TestPlugin
from tests.integration.nodeagent.plane import NODE, RESOURCE, Ask, Plane, until

pytestmark = pytest.mark.anyio

SERVED_S = 3.0
"""Time from a restart of kubelet until the node offers its devices again."""
REPORTED_S = 2.0
"""Time from the appearance of devices until they are reported."""


async def test_kubelet_restart_keeps_pods_and_new_pods_are_served_within_3_seconds(
    plane: Plane,
) -> None:
    async with plane.agent():
        for number in range(5):
            await plane.place(f"old-{number}", Ask(shares=((number, 1000),)))
        for number in range(5):
            await plane.until_phase(f"old-{number}", "Running")
        before = {
            name: c["main"].pid
            for name in list(await plane.listed_ids())
            if (c := plane.kubelet.containers(name))
        }
        took_s = []
        for _ in range(3):  # the fastest counts: other tests may occupy the machine
            await plane.kubelet.restart()
            begun_s = anyio.current_time()
            await plane.offered(128)
            took_s.append(anyio.current_time() - begun_s)
            if took_s[-1] < SERVED_S:
                break
        assert min(took_s) < SERVED_S
        await plane.place("new", Ask(shares=((7, 1000),)))
        await plane.until_phase("new", "Running")
        after = {name: plane.kubelet.containers(name)["main"].pid for name in before}
        assert after == before
        for number in range(5):
            pod = await plane.pod(f"old-{number}")
            assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


async def test_agent_restart_keeps_its_grants_so_containers_may_start_again(plane: Plane) -> None:
    async with plane.agent():
        record = await plane.place(
            "web",
            Ask(name="fetch", kind="init", shares=((1, 1000),), command="true"),
            Ask(shares=((2, 2000),), command="cat /etc/hami/limits; sleep 0.2; exit 1"),
        )
        await plane.until_state(record.pod_uid, "running")
    async with plane.agent():

        async def has_restarted_with_limits() -> bool:
            status = (await plane.pod("web"))["status"]["containerStatuses"][0]
            text = plane.kubelet.logs("web", "main")
            return status["restartCount"] >= 1 and f"allocation={record.allocation_id}" in text

        await until(has_restarted_with_limits)
    assert [s.state for s in await plane.story(record.pod_uid)] == ["bound", "prepared", "running"]


async def test_agent_that_lost_its_grants_learns_them_from_kubelet(plane: Plane) -> None:
    async with plane.agent():
        record = await plane.place("web", Ask(shares=((2, 2000), (4, 2000))))
        await plane.until_state(record.pod_uid, "running")
    async with plane.agent(state_dir=str(plane.directory / "other-state")) as context:

        async def has_learnt() -> bool:
            return context.registry.get_sample_value("hami_nodeagent_grants") == 1

        await until(has_learnt)
        ids = sorted((await plane.listed_ids())["web"])
        assert await plane.may_start(ids)
        assert not await plane.may_start(ids[:1])


async def test_bound_pods_are_served_without_the_bus(plane: Plane) -> None:
    async with plane.agent(allocate_wait_s=1.0) as context:
        known = plane.record(await plane.create("known", Ask(shares=((1, 1111),))))
        revision = await plane.reserve(known)
        unknown = plane.record(await plane.create("unknown", Ask(shares=((2, 2222),))))

        async def has_heard() -> bool:
            value = context.registry.get_sample_value("hami_nodeagent_ledger_records_total")
            return bool(value)

        await until(has_heard)
        await plane.nats.kill()
        await plane.bind(known, revision)
        await plane.bind(unknown, revision + 1)
        await plane.until_phase("known", "Running")
        assert (await plane.environment("known"))["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1111m"
        await plane.until_phase("unknown", "Running")
        assert (await plane.environment("unknown"))["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2222m"
        # States follow from facts once the bus has recovered.
        await plane.nats.start()
        await plane.until_state(known.pod_uid, "running")


async def test_states_are_written_again_after_all_data_on_the_bus_was_lost(plane: Plane) -> None:
    async with plane.agent():
        record = await plane.place("web", Ask(shares=((1, 1111),)))
        await plane.until_state(record.pod_uid, "running")
        generation = plane.bus.generation
        await plane.nats.stop()
        await plane.nats.wipe()
        await plane.nats.start()
        with anyio.fail_after(30):
            await plane.bus.wait_connected(after=generation)
        await ensure_bus(plane.bus)
        await plane.reserve(record)
        await plane.until_state(record.pod_uid, "running")
        assert (await plane.report()).devices
        pod = await plane.pod("web")
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


async def test_without_the_api_server_no_pod_is_confirmed(plane: Plane) -> None:
    async with plane.agent(allocate_wait_s=0.5):
        record = plane.record(await plane.create("web", Ask(shares=((1, 1111),))))
        revision = await plane.reserve(record)
        plane.api.faults.add(
            Fault(match=Match(verb="get", resource="pods"), action="deny", times=0)
        )
        await plane.bind(record, revision)

        async def is_refused() -> bool:
            pods = (await plane.kube.list("pods", "default"))["items"]
            return bool(pods[0]["status"].get("phase") == "Failed")

        await until(is_refused)
        status = (await plane.kube.list("pods", "default"))["items"][0]["status"]
        assert "hami: api-unavailable: the API server does not confirm" in status["message"]


async def test_device_fault_reaches_kubelet_bus_and_pod_and_clears(plane: Plane) -> None:
    quick = {"failures_to_condemn": 1, "probes_to_recover": 2, "recover_s": 0.3}
    async with (
        plane.bus.subscribe(subjects.fault(NODE)) as faults,
        plane.agent(health=plane.health(**quick)),
    ):
        record = await plane.place("web", Ask(shares=((1, 1111),)))
        await plane.until_phase("web", "Running")
        plane.control({"devices": {"1": {"failing": "row remapping failed"}}})
        await plane.offered(112)
        first = decode((await faults.receive(timeout_s=20))[0].data, DeviceFault, what="fault")
        assert (first.uuid, first.healthy) == (plane.devices[1].uuid, False)
        assert "row remapping failed" in first.reason

        async def is_told() -> bool:
            events = (await plane.kube.list("events", "default"))["items"]
            return any(event["reason"] == "DeviceUnhealthy" for event in events)

        await until(is_told)
        second = plane.record(await plane.create("next", Ask(shares=((1, 1000),))))
        await plane.bind(second, await plane.reserve(second))
        assert "hami: device-unhealthy:" in await plane.refusal_of("next")
        plane.control({})
        await plane.offered(128)
        assert record.pod_uid in await plane.uids_of_running()


async def test_devices_that_appear_later_are_reported_within_two_seconds(plane: Plane) -> None:
    """The fastest of three agents counts: other tests may occupy the machine."""
    took_s: list[float] = []
    while len(took_s) < 3 and not any(one < REPORTED_S for one in took_s):
        state = plane.directory / f"state-{len(took_s)}"
        took_s.append(await _seconds_to_report(plane, state))
    assert min(took_s) < REPORTED_S


async def _seconds_to_report(plane: Plane, state: Path) -> float:
    """Return the time from the appearance of devices to the report of an agent that had none."""
    plane.control({"driver_missing": "no kernel module"})
    shipped = Settings(node_name="any")
    async with plane.agent(
        discovery_retry_s=shipped.discovery_s,
        discovery_s=shipped.discovery_s,
        state_dir=str(state),
    ) as context:

        async def is_missing() -> bool:
            report = await plane.report()
            return report.devices == () and "no kernel module" in report.problem

        await until(is_missing)

        async def is_watched() -> bool:
            labels = {"source": "directories"}
            name = "hami_nodeagent_device_events_up"
            return context.registry.get_sample_value(name, labels) == 1

        await until(is_watched)
        begun_s = anyio.current_time()
        plane.control({})

        async def is_reported() -> bool:
            return len((await plane.report()).devices) == 8

        await until(is_reported)
        return anyio.current_time() - begun_s


async def test_pod_keeps_its_id_of_the_earlier_version_through_an_update(plane: Plane) -> None:
    """The earlier version names ids ``<uuid>-<n>``; kubelet's checkpoint has the pod's id."""
    ids = [f"{device.uuid}-{number}" for device in plane.devices for number in range(16)]
    earlier = TestPlugin(plane.kubelet.plugin_directory, RESOURCE, ids, endpoint="hami-nvidia.sock")
    async with earlier:
        await earlier.register()
        await plane.offered(128)
        await plane.place("old", Ask(shares=((0, 1000),)))
        await plane.until_phase("old", "Running")
    held = (await plane.listed_ids())["old"]
    pid = plane.kubelet.containers("old")["main"].pid
    assert held <= set(ids)
    async with plane.agent() as context:

        async def is_learnt() -> bool:
            return context.registry.get_sample_value("hami_nodeagent_grants") == 1

        await until(is_learnt)
        await plane.offered(128)
        await plane.kubelet.restart()
        await plane.offered(128)
        assert (await plane.listed_ids())["old"] == held
        assert plane.kubelet.containers("old")["main"].pid == pid
        for number in range(15):
            await plane.place(f"new-{number}", Ask(shares=((0, 1000),)))
        for number in range(15):
            await plane.until_phase(f"new-{number}", "Running")
        listed = await plane.listed_ids()
        assert all(
            "::" in one for name, of_pod in listed.items() if name != "old" for one in of_pod
        )
        assert len(set().union(*listed.values())) == 16


@pytest.mark.parametrize("form", ["{}", "{}::0", "{}-0"], ids=["whole", "time-sliced", "hami"])
async def test_resource_of_another_plugin_is_left_alone_until_it_is_removed(
    plane: Plane, form: str
) -> None:
    """NVIDIA's and HAMi's device plugins name the same devices, also in our form."""
    ids = [form.format(device.uuid) for device in plane.devices[:2]]
    async with TestPlugin(
        plane.kubelet.plugin_directory, RESOURCE, ids, endpoint="o.sock"
    ) as other:
        await other.register()
        await plane.offered(2)
        async with plane.agent(offer=2) as context:
            labels = {"resource": RESOURCE, "outcome": "foreign"}

            async def is_noticed() -> bool:
                name = "hami_nodeagent_kubelet_registrations_total"
                return bool(context.registry.get_sample_value(name, labels))

            await until(is_noticed)
            await plane.offered(2)
            await other.close()
            await plane.offered(128)


async def test_resource_that_another_plugin_took_over_is_not_offered_to_the_scheduler(
    plane: Plane,
) -> None:
    beats = plane.bus.subscribe(subjects.heartbeat(NODE))
    ids = [f"{plane.devices[0].uuid}::{number}" for number in range(4)]
    async with (
        beats as heard,
        plane.agent(heartbeat_s=0.1),
        TestPlugin(plane.kubelet.plugin_directory, RESOURCE, ids, endpoint="o.sock") as other,
    ):
        await other.register()
        await plane.offered(4)

        async def is_unserved() -> bool:
            messages = await heard.receive(timeout_s=20)
            last = decode(messages[-1].data, Heartbeat, what="heartbeat")
            return last.unserved == ("nvidia",) and last.vendors == ()

        await until(is_unserved)
        await other.close()
        await plane.offered(128)


async def test_malformed_calls_are_refused_and_the_plugin_continues(plane: Plane) -> None:
    async with plane.agent(allocate_wait_s=0.05) as context, plane.plugin() as plugin:
        valid = f"{plane.devices[0].uuid}::0"
        calls = [
            api.AllocateRequest(),
            _call(),
            _call(""),
            _call("GPU-nonsense::0"),
            _call(valid, valid),
            _call("x" * 100_000),
            _call(*(f"{valid}{number}" for number in range(5000))),
            _call(f"{plane.devices[0].uuid}::\u0000"),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await plugin.Allocate(call)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(refused.value.details()).startswith("hami: request-invalid: ")
        with pytest.raises(grpc.aio.AioRpcError) as nobody:
            await plugin.Allocate(_call(valid))
        assert str(nobody.value.details()).startswith("hami: no-pending-container: ")
        assert nobody.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError):
            await plugin.PreStartContainer(api.PreStartContainerRequest(devices_ids=["x"]))
        for size in (-1, 0, 1 << 30):
            preferred = await plugin.GetPreferredAllocation(_preference([valid], size))
            assert list(preferred.container_responses[0].deviceIDs) == []
        labels = {"resource": RESOURCE, "code": "request-invalid"}
        refusals = context.registry.get_sample_value("hami_nodeagent_refusals_total", labels)
        assert refusals == len(calls)
        await plane.place("web", Ask(shares=((0, 1000),)))
        await plane.until_phase("web", "Running")


async def test_heartbeats_and_reports_carry_one_run_and_growing_numbers(plane: Plane) -> None:
    beats = plane.bus.subscribe(subjects.heartbeat(NODE))
    async with beats as heard, plane.agent(heartbeat_s=0.1):
        report = await plane.report()
        seen: list[Heartbeat] = []
        while len(seen) < 3:
            seen += [
                decode(message.data, Heartbeat, what="heartbeat")
                for message in await heard.receive(timeout_s=20)
            ]
    assert {one.boot_id for one in seen} == {report.boot_id}
    assert [one.seq for one in seen] == sorted({one.seq for one in seen})
    assert {*seen[0].vendors, *seen[0].unserved} == {"nvidia"}
    assert isinstance(report, NodeReport)
    assert len(report.devices) == 8


async def test_agent_reads_each_pod_once_per_allocation_and_lists_once(plane: Plane) -> None:
    async with plane.agent():
        for number in range(5):
            await plane.place(f"web-{number}", Ask(shares=((number, 1000),)))
        for number in range(5):
            await plane.until_phase(f"web-{number}", "Running")
        calls = Counter(
            (entry.verb, entry.resource, entry.subresource)
            for entry in plane.api.audit
            if "hami-nodeagent" in entry.user_agent and entry.resource
        )
    assert calls["list", "pods", ""] == 1
    assert calls["get", "pods", ""] == 5
    assert calls["get", "nodes", ""] <= 3
    assert set(calls) <= {
        ("list", "pods", ""),
        ("get", "pods", ""),
        ("watch", "pods", ""),
        ("get", "nodes", ""),
    }


def _call(*ids: str) -> api.AllocateRequest:
    return api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids)])


def _preference(ids: list[str], size: int) -> api.PreferredAllocationRequest:
    size = max(min(size, (1 << 31) - 1), -(1 << 31))
    return api.PreferredAllocationRequest(
        container_requests=[
            api.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=size)
        ]
    )
