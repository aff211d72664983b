# SPDX-License-Identifier: Apache-2.0
"""The agent with a kubelet that speaks the real protocols: devices of each pod, and refusals."""

from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from hami_common.pods.signing import Signer
from hami_sim.kube import Access
from hami_sim.kubelet import Refusal
from hami_sim.kubescheduler import SchedulerSettings, SimScheduler
from tests.integration.nodeagent.plane import NODE, RESOURCE, Ask, Plane, until

pytestmark = pytest.mark.anyio


async def test_container_sees_the_devices_and_limits_of_its_record(plane: Plane) -> None:
    async with plane.agent():
        record = await plane.place("web", Ask(shares=((3, 4096), (5, 2048))))
        await plane.until_phase("web", "Running")
        seen = await plane.environment("web")
        assert seen["NVIDIA_VISIBLE_DEVICES"] == ",".join(
            plane.devices[index].uuid for index in (3, 5)
        )
        assert seen["CUDA_DEVICE_MEMORY_LIMIT_0"] == "4096m"
        assert seen["CUDA_DEVICE_MEMORY_LIMIT_1"] == "2048m"
        assert seen["device.1.memory_mib"] == "2048"
        await plane.until_state(record.pod_uid, "running")
    story = await plane.story(record.pod_uid)
    assert [state.state for state in story] == ["bound", "prepared", "running"]
    assert {state.allocation_id for state in story} == {record.allocation_id}
    assert story[-1].writer == f"nodeagent/{NODE}"


async def test_init_containers_sidecars_and_apps_each_get_their_own_shares(plane: Plane) -> None:
    show = "env | grep -E '^(NVIDIA|CUDA)'; cat /etc/hami/limits"
    async with plane.agent():
        record = await plane.place(
            "train",
            Ask(name="fetch", kind="init", shares=((0, 1001),), command=show),
            Ask(name="log", kind="sidecar", shares=((1, 1002),)),
            Ask(name="warm", kind="init", shares=((2, 1003), (3, 1004)), command=show),
            Ask(name="main", shares=((0, 1005),)),
            Ask(name="eval", shares=((4, 1006),)),
        )
        await plane.until_phase("train", "Running")
        for shares in record.containers:
            seen = await plane.environment("train", shares.name)
            own = [share.uuid for share in shares.shares]
            assert seen["NVIDIA_VISIBLE_DEVICES"] == ",".join(own)
            assert seen["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{shares.shares[0].memory_mib}m"
            assert seen["container"] == shares.name
        await plane.until_state(record.pod_uid, "running")


@pytest.mark.timeout(180)
async def test_pods_admitted_in_shuffled_order_get_their_own_devices_and_no_others(
    plane: Plane,
) -> None:
    plane.kubelet.faults.hold_admissions()
    plane.kubelet.faults.shuffle_admissions(7)
    refused = {f"pod-{number}" for number in range(0, 64, 10)}
    excuse = Refusal(reason="OutOfcpu", message="the test says so")
    plane.kubelet.faults.refuse(lambda pod: excuse if pod["metadata"]["name"] in refused else None)
    async with plane.agent():
        pods = {}
        for number in range(64):
            name = f"pod-{number}"
            pods[name] = plane.record(
                await plane.create(name, Ask(shares=((number % 8, 100 + number),)))
            )
        for record in pods.values():
            await plane.bind(record, await plane.reserve(record))
        plane.kubelet.faults.release_admissions()
        for name, record in pods.items():
            if name in refused:
                assert "the test says so" in await plane.refusal_of(name)
                continue
            await plane.until_phase(name, "Running", within_s=40)
            seen = await plane.environment(name)
            share = record.containers[0].shares[0]
            assert seen["NVIDIA_VISIBLE_DEVICES"] == share.uuid
            assert seen["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{share.memory_mib}m"
            assert seen["allocation"] == record.allocation_id
        # Kubelet's own books name the devices that the containers really use.
        for name, ids in (await plane.listed_ids()).items():
            assert {plane.uuid_of(one) for one in ids} == {pods[name].containers[0].shares[0].uuid}


async def test_pod_that_bypassed_the_scheduler_is_refused(plane: Plane) -> None:
    async with plane.agent() as context:
        await plane.create("stray", Ask(shares=((0, 1000),)), through_webhook=False)
        await plane.bind_plainly("stray", {})
        assert "hami: no-allocation: pod default/stray was not placed" in await plane.refusal_of(
            "stray"
        )
        labels = {"resource": RESOURCE, "code": "no-allocation"}
        assert context.registry.get_sample_value("hami_nodeagent_refusals_total", labels) == 1
        # The next pod is not harmed.
        await plane.place("web", Ask(shares=((0, 1000),)))
        await plane.until_phase("web", "Running")


async def test_pod_that_the_default_scheduler_placed_is_refused_with_the_fix(plane: Plane) -> None:
    own = SchedulerSettings(profiles=("default-scheduler",), initial_backoff_s=0.1)
    access = Access(url=plane.api.url, token=plane.api.token)
    async with plane.agent(), SimScheduler(access, own):
        await plane.create(
            "past", Ask(shares=((0, 1000),)), through_webhook=False, scheduler="default-scheduler"
        )
        text = await plane.refusal_of("past")
        assert (await plane.pod("past"))["status"]["reason"] == "UnexpectedAdmissionError"
        assert "hami: no-allocation: pod default/past was not placed by hami-scheduler" in text
        assert "in a namespace without the label hami.io/webhook=ignore" in text


async def test_pod_with_a_forged_allocation_is_refused(plane: Plane) -> None:
    async with plane.agent():
        record = plane.record(await plane.create("forged", Ask(shares=((0, 1000),))))
        await plane.bind(record, await plane.reserve(record), signer=Signer.generate())
        text = await plane.refusal_of("forged")
        assert "hami: annotation-invalid: pod default/forged" in text
        assert "not trusted" in text


async def test_key_that_is_added_later_is_trusted_without_restart(plane: Plane) -> None:
    new = Signer.generate()
    async with plane.agent(allocate_wait_s=20.0) as context:
        (plane.keys / "next.pub").write_bytes(new.public_pem())
        record = plane.record(await plane.create("rotated", Ask(shares=((0, 1000),))))
        revision = await plane.reserve(record)

        async def has_looked() -> bool:
            await anyio.sleep(context.settings.check_s)
            return True

        await until(has_looked)
        await plane.bind(record, revision, signer=new)
        await plane.until_phase("rotated", "Running")


async def test_record_that_arrives_late_is_waited_for(plane: Plane) -> None:
    async with plane.agent() as context:
        record = plane.record(await plane.create("early", Ask(shares=((6, 1234),))))
        fence = await plane.ledger.last_revision(">")
        await plane.bind(record, fence + 1)

        async def waits() -> bool:
            labels = {"code": "ledger-unknown"}
            return bool(context.registry.get_sample_value("hami_nodeagent_waits_total", labels))

        await until(waits)
        await plane.reserve(record)
        await plane.until_phase("early", "Running")
        seen = await plane.environment("early")
        assert seen["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1234m"


async def test_record_that_never_arrives_is_a_refusal_with_a_reason(plane: Plane) -> None:
    async with plane.agent(allocate_wait_s=0.3):
        record = plane.record(await plane.create("lost", Ask(shares=((6, 1234),))))
        await plane.bind(record, 77)
        assert (
            "hami: ledger-unknown: the ledger has no record 77 for pod default/lost"
            in await plane.refusal_of("lost")
        )


async def test_share_that_was_released_is_not_given_out(plane: Plane) -> None:
    async with plane.agent():
        record = plane.record(await plane.create("late", Ask(shares=((6, 1234),))))
        revision = await plane.reserve(record)
        await plane.reserve(replace(record, op="release", containers=(), reason="lease over"))
        await plane.bind(record, revision)
        assert "hami: allocation-released: the share of pod default/late" in (
            await plane.refusal_of("late")
        )


async def test_allocation_marked_as_failed_is_refused(plane: Plane) -> None:
    async with plane.agent():
        record = plane.record(await plane.create("void", Ask(shares=((6, 1234),))))
        revision = await plane.reserve(record)
        await plane.fail(record, revision, code="share-lost")
        await plane.bind(record, revision)
        assert "hami: state-failed: the allocation of pod default/void failed: share-lost" in (
            await plane.refusal_of("void")
        )


async def test_pod_that_bypassed_the_webhook_gets_its_limits_file_from_the_agent(
    plane: Plane,
) -> None:
    async with plane.agent() as context:
        record = await plane.place("foreign", Ask(shares=((2, 777),)), through_webhook=False)
        await plane.until_phase("foreign", "Running")
        seen = await plane.environment("foreign")
        assert seen["allocation"] == record.allocation_id
        assert seen["device.0.memory_mib"] == "777"
        kept = Path(context.settings.state_dir) / "limits" / record.pod_uid
        assert kept.is_dir()
        await plane.kube.delete("pods", "foreign", "default")

        async def is_removed() -> bool:
            return not kept.exists()

        await until(is_removed)


async def test_recreated_pod_of_the_same_name_gets_its_new_shares(plane: Plane) -> None:
    async with plane.agent():
        for turn in range(3):
            record = await plane.place("db-0", Ask(shares=((turn, 500 + turn),)))
            await plane.until_phase("db-0", "Running")
            seen = await plane.environment("db-0")
            assert seen["allocation"] == record.allocation_id
            assert seen["NVIDIA_VISIBLE_DEVICES"] == plane.devices[turn].uuid
            await plane.kube.delete("pods", "db-0", "default", body={"gracePeriodSeconds": 0})

            async def is_gone() -> bool:
                return not (await plane.kube.list("pods", "default"))["items"]

            await until(is_gone)
