# SPDX-License-Identifier: Apache-2.0
"""The contract for claims of pods: made, allocated, reserved, and deallocated."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from hami_common.dra import names
from hami_nodeagent.core.slices import next_write, pages_of
from tests.contract.dra.support import (
    CLAIMS,
    CLASSES,
    FINALIZER,
    SLICES,
    Devices,
    Obj,
    allocation_on,
    exactly,
    gpu,
    make_class,
    selector,
    unique,
)
from tests.contract.kubescheduler.support import NAMESPACE, Site, until
from tests.support.mig import card

pytestmark = pytest.mark.anyio
COMPONENT = Path("deploy/kustomize/components/dra/device-class.yaml")
NO_ROOM = "cannot allocate all claims"
ATTRIBUTES = 'device.attributes["gpu.example"]'
VERSION = f"{ATTRIBUTES}.driverVersion"
MEMORY = 'device.capacity["gpu.example"].memory'
FULL = {"key": "gpu.example/full", "effect": "NoSchedule"}


def counting(amount: int) -> Obj:
    counters = {"x": {"value": str(amount)}}
    return {"consumesCounters": [{"counterSet": "card", "counters": counters}]}


class ClaimSchedulingContract:
    """One node with slices, and a kube-scheduler."""

    @pytest.fixture
    async def gpus(self, site: Site) -> AsyncIterator[Devices]:
        name = unique("n")
        await site.node(name)
        await site.nodes_are_seen(last=name)
        found = Devices(site, name, await make_class(site.client))
        try:
            yield found
        finally:
            await found.clear()

    async def test_pod_with_claims_alone_never_meets_an_extender_with_managed_resources(
        self, gpus: Devices
    ) -> None:
        await gpus.publish(gpu(0))
        gpus.site.extender.calls.clear()
        pod, _ = await gpus.share("10Gi")
        assert await gpus.site.bound(pod) == gpus.node
        assert gpus.site.extender.calls_for(pod["metadata"]["name"]) == []

    async def test_claim_from_a_template_is_allocated_reserved_and_goes_with_its_pod(
        self, gpus: Devices
    ) -> None:
        await gpus.publish(gpu(0), gpu(1))
        template = await gpus.template(exactly(gpus.device_class, "10Gi"))
        pod = await gpus.pod(template=template)
        assert await gpus.site.bound(pod) == gpus.node
        status = (await gpus.client.get("pods", pod["metadata"]["name"], NAMESPACE))["status"]
        (made,) = status["resourceClaimStatuses"]
        assert made["name"] == "gpu"
        claim = await gpus.get_claim(made["resourceClaimName"])
        metadata = claim["metadata"]
        assert metadata["name"].startswith(f"{pod['metadata']['name']}-gpu-")
        assert metadata["annotations"]["resource.kubernetes.io/pod-claim-name"] == "gpu"
        assert metadata["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
        assert FINALIZER in metadata["finalizers"]
        (consumer,) = claim["status"]["reservedFor"]
        assert consumer["uid"] == pod["metadata"]["uid"]
        assert "allocationTimestamp" in claim["status"]["allocation"]
        (result,) = await gpus.results(metadata["name"])
        assert result["device"] == "gpu-0"
        assert result["consumedCapacity"] == {"memory": "10Gi"}
        assert result["shareID"]
        await gpus.delete_pod(pod)
        await gpus.until_gone(CLAIMS, metadata["name"])

    async def test_shares_fill_the_first_device_and_then_the_next(self, gpus: Devices) -> None:
        await gpus.publish(gpu(0, memory="20Gi"), gpu(1, memory="20Gi"))
        chosen = [(await gpus.placed(exactly(gpus.device_class, "10Gi")))[0] for _ in range(4)]
        assert chosen == ["gpu-0", "gpu-0", "gpu-1", "gpu-1"]
        assert NO_ROOM in await gpus.refused(exactly(gpus.device_class, "1Mi"))

    async def test_freed_device_is_given_to_the_pod_that_waits(self, gpus: Devices) -> None:
        await gpus.publish(gpu(memory="20Gi"))
        first, name = await gpus.share("20Gi")
        await gpus.site.bound(first)
        second, _ = await gpus.share("1Gi")
        assert NO_ROOM in await gpus.site.condition(second, "Unschedulable")
        await gpus.delete_pod(first)
        assert await gpus.site.bound(second) == gpus.node
        left = await gpus.get_claim(name)
        assert not left.get("status"), "a claim of the user stays, without an allocation"
        assert not left["metadata"].get("finalizers")

    async def test_claim_without_an_amount_takes_the_default(self, gpus: Devices) -> None:
        await gpus.publish(gpu(0), gpu(1))
        assert await gpus.placed(exactly(gpus.device_class, "1Mi")) == ["gpu-0"]
        assert await gpus.placed(exactly(gpus.device_class)) == ["gpu-1"]

    async def test_amounts_are_rounded_up_to_the_step(self, gpus: Devices) -> None:
        await gpus.publish(gpu())
        pod, name = await gpus.share("1000k")
        await gpus.site.bound(pod)
        (result,) = await gpus.results(name)
        assert result["consumedCapacity"] == {"memory": "1Mi"}
        wrong = exactly(gpus.device_class, capacity={"requests": {"cores": "1"}})
        assert NO_ROOM in await gpus.refused(wrong)

    async def test_lowered_value_keeps_others_out_and_leaves_the_claim(self, gpus: Devices) -> None:
        name = await gpus.publish(gpu(memory="20Gi"))
        pod, claim = await gpus.share("10Gi")
        await gpus.site.bound(pod)
        published = await gpus.client.get(SLICES, name)
        published["spec"]["devices"][0]["capacity"]["memory"]["value"] = "5Gi"
        await gpus.client.replace(SLICES, published)
        assert NO_ROOM in await gpus.refused(exactly(gpus.device_class, "1Mi"))
        assert await gpus.devices(claim) == ["gpu-0"]

    async def test_pool_with_a_missing_slice_offers_nothing(self, gpus: Devices) -> None:
        await gpus.publish(gpu(0), resourceSliceCount=2)
        assert NO_ROOM in await gpus.refused(exactly(gpus.device_class, "1Mi"))
        await gpus.publish(gpu(1), generation=2)
        assert await gpus.placed(exactly(gpus.device_class, "1Mi")) == ["gpu-1"]

    async def test_claim_shared_by_two_pods_is_deallocated_after_the_last(
        self, gpus: Devices
    ) -> None:
        await gpus.publish(gpu())
        name = await gpus.claim(exactly(gpus.device_class, "10Gi"))
        pods = [await gpus.pod(of=name) for _ in range(2)]
        for pod in pods:
            await gpus.site.bound(pod)
        assert len((await gpus.get_claim(name))["status"]["reservedFor"]) == 2
        await gpus.delete_pod(pods[0])

        async def consumers() -> int:
            status = (await gpus.get_claim(name)).get("status") or {}
            return len(status.get("reservedFor") or ())

        async def is_one() -> bool:
            return await consumers() == 1

        await until(is_one)
        assert await gpus.devices(name) == ["gpu-0"]
        await gpus.delete_pod(pods[1])

        async def is_free() -> bool:
            return not await gpus.devices(name)

        await until(is_free)

    async def test_allocation_made_before_decides_the_node(self, gpus: Devices) -> None:
        await gpus.publish(gpu(0), gpu(1))
        other = unique("n")
        await gpus.site.node(other)
        await gpus.site.nodes_are_seen(last=other)
        name = await gpus.claim(exactly(gpus.device_class, "10Gi"))
        current = await gpus.get_claim(name)
        allocation = allocation_on(gpus.node, "gpu-1")
        await gpus.client.replace(
            CLAIMS, {**current, "status": {"allocation": allocation}}, subresource="status"
        )
        pod = await gpus.pod(of=name)
        assert await gpus.site.bound(pod) == gpus.node
        assert await gpus.devices(name) == ["gpu-1"]
        assert (await gpus.get_claim(name))["status"]["reservedFor"]

    async def test_pod_waits_for_its_claim(self, gpus: Devices) -> None:
        await gpus.publish(gpu())
        name = unique("claim")
        pod = await gpus.pod(of=name)
        await gpus.site.nodes_are_seen(last=gpus.node)  # another pod passes meanwhile
        found = await gpus.client.get("pods", pod["metadata"]["name"], NAMESPACE)
        assert "nodeName" not in found["spec"]
        document = {
            "metadata": {"name": name},
            "spec": {
                "devices": {
                    "requests": [{"name": "r", "exactly": exactly(gpus.device_class, "1Gi")}]
                }
            },
        }
        await gpus.client.create(CLAIMS, document, NAMESPACE)
        assert await gpus.site.bound(pod) == gpus.node

    async def test_count_takes_different_devices_and_two_requests_may_share_one(
        self, gpus: Devices
    ) -> None:
        await gpus.publish(gpu(0), gpu(1))
        share = exactly(gpus.device_class, "1Gi")
        assert await gpus.placed({**share, "count": 2}) == ["gpu-0", "gpu-1"]
        assert NO_ROOM in await gpus.refused({**share, "count": 3})
        assert await gpus.placed(share, share) == ["gpu-0", "gpu-0"]
        apart = [{"distinctAttribute": "gpu.example/uuid"}]
        assert await gpus.placed(share, share, constraints=apart) == ["gpu-0", "gpu-1"]

    async def test_matched_attribute_is_equal_on_all_devices(self, gpus: Devices) -> None:
        await gpus.publish(*(gpu(number) for number in range(4)))
        assert await gpus.placed(exactly(gpus.device_class, "80Gi")) == ["gpu-0"]
        share = exactly(gpus.device_class, "1Gi", count=2)
        root = [{"matchAttribute": "resource.kubernetes.io/pcieRoot"}]
        assert await gpus.placed(share, constraints=root) == ["gpu-2", "gpu-3"]

    async def test_taint_of_a_device_needs_a_toleration(self, gpus: Devices) -> None:
        await gpus.publish(gpu(taints=[FULL]))
        share = exactly(gpus.device_class, "1Gi")
        assert NO_ROOM in await gpus.refused(share)
        tolerations = [{"key": FULL["key"], "operator": "Exists"}]
        assert await gpus.placed({**share, "tolerations": tolerations}) == ["gpu-0"]

    async def test_whole_and_shared_forms_of_a_card_exclude_each_other(self, gpus: Devices) -> None:
        whole = {"name": "whole", "attributes": {"form": {"string": "whole"}}, **counting(8)}
        shared = gpu(0, **counting(8))
        shared["attributes"]["form"] = {"string": "shared"}
        await gpus.publish(whole, shared, resourceSliceCount=2)
        counters = [{"name": "card", "counters": {"x": {"value": "8"}}}]
        pool = {"name": f"{gpus.node}/test", "generation": 1, "resourceSliceCount": 2}
        spec = {
            "driver": "gpu.example",
            "nodeName": gpus.node,
            "pool": pool,
            "sharedCounters": counters,
        }
        await gpus.client.create(SLICES, {"metadata": {"name": unique("s")}, "spec": spec})

        def of(form: str) -> Obj:
            only = selector(f'device.attributes["gpu.example"].form == "{form}"')
            return exactly(gpus.device_class, selectors=[only])

        def share() -> Obj:
            return {**of("shared"), "capacity": {"requests": {"memory": "1Gi"}}}

        pods = []
        for _ in range(2):
            name = await gpus.claim(share())
            pods.append(await gpus.pod(of=name))
            await gpus.site.bound(pods[-1])
        name = await gpus.claim(of("whole"))
        waiting = await gpus.pod(of=name)
        assert NO_ROOM in await gpus.site.condition(waiting, "Unschedulable")
        for pod in pods:
            await gpus.delete_pod(pod)
        await gpus.site.bound(waiting)
        assert await gpus.devices(name) == ["whole"]
        assert NO_ROOM in await gpus.refused(share())

    async def test_partitions_of_a_card_take_positions_that_others_leave(
        self, gpus: Devices
    ) -> None:
        def partition(size: int, start: int) -> Obj:
            slices = {f"slice-{at}": {"value": "1"} for at in range(start, start + size)}
            return {
                "name": f"p{size}-{start}",
                "attributes": {"size": {"int": size}},
                "capacity": {"memory": {"value": f"{10 * size}Gi"}},
                "consumesCounters": [
                    {"counterSet": "card", "counters": {**slices, "x": {"value": str(size)}}}
                ],
            }

        places = [(1, 3), (1, 2), (1, 1), (1, 0), (2, 2), (2, 0), (4, 0)]
        await gpus.publish(*(partition(*place) for place in places), resourceSliceCount=2)
        left = {f"slice-{at}": {"value": "1"} for at in range(4)}
        counters = {
            "metadata": {"name": unique("s")},
            "spec": {
                "driver": "gpu.example",
                "nodeName": gpus.node,
                "pool": {"name": f"{gpus.node}/test", "generation": 1, "resourceSliceCount": 2},
                "sharedCounters": [{"name": "card", "counters": {**left, "x": {"value": "4"}}}],
            },
        }
        made = await gpus.client.create(SLICES, counters)

        def of(size: int) -> Obj:
            only = selector(f'device.attributes["gpu.example"].size == {size}')
            return exactly(gpus.device_class, selectors=[only])

        name = await gpus.claim(of(1))
        first = await gpus.pod(of=name)
        await gpus.site.bound(first)
        assert await gpus.devices(name) == ["p1-3"]
        assert NO_ROOM in await gpus.refused(of(4)), "the card is fragmented"
        assert await gpus.placed(exactly(gpus.device_class, "11Gi")) == ["p2-0"]
        # Someone else takes what is left: counters may be lower than what claims have.
        made["spec"]["sharedCounters"][0]["counters"] |= {
            "slice-2": {"value": "0"},
            "x": {"value": "0"},
        }
        await gpus.client.replace(SLICES, made)
        waiting = await gpus.pod(of=await gpus.claim(of(1)))
        assert NO_ROOM in await gpus.site.condition(waiting, "Unschedulable")
        fresh = await gpus.client.get(SLICES, made["metadata"]["name"])
        fresh["spec"]["sharedCounters"][0]["counters"]["x"] = {"value": "4"}
        await gpus.client.replace(SLICES, fresh)
        await gpus.delete_pod(first)
        await gpus.site.bound(waiting)

    async def test_cards_in_mig_mode_are_stored_as_published_and_give_their_places(
        self, gpus: Devices
    ) -> None:
        pages = pages_of([card("H200-141", 0), card("H200-141", 1)], {})
        stored: dict[str, Obj] = {}
        while (write := next_write(gpus.node, pages, stored)) is not None:
            assert write.verb == "create"
            stored[write.name] = await gpus.client.create(SLICES, write.slice)
        for document in yaml.safe_load_all(COMPONENT.read_text(encoding="utf-8")):
            await gpus.client.create(CLASSES, document)

        def of(profile: str) -> Obj:
            only = selector(f'device.attributes["{names.DRIVER}"].profile == "{profile}"')
            return exactly("hami-mig", selectors=[only])

        def place(number: int, profile: str, start: int) -> str:
            return names.partition_name(f"GPU-{number}", profile, start)

        assert await gpus.placed(of("1g.18gb")) == [place(0, "1g.18gb", 6)]
        assert await gpus.placed(of("1g.18gb+me")) == [place(0, "1g.18gb+me", 5)]
        assert await gpus.placed(of("7g.141gb")) == [place(1, "7g.141gb", 0)]
        assert NO_ROOM in await gpus.refused(of("7g.141gb"))
        sized = exactly("hami-mig", capacity={"requests": {"memory": "60Gi", "cores": "40"}})
        assert await gpus.placed(sized) == [place(0, "3g.71gb", 0)]
        assert NO_ROOM in await gpus.refused(exactly("hami-share"))

    async def test_first_alternative_that_fits_is_used(self, gpus: Devices) -> None:
        await gpus.publish(gpu(memory="20Gi"))
        alternatives = [
            {"name": "large", **exactly(gpus.device_class, "40Gi")},
            {"name": "small", **exactly(gpus.device_class, "10Gi")},
        ]
        name = await gpus.claim({"firstAvailable": alternatives})
        await gpus.site.bound(await gpus.pod(of=name))
        (result,) = await gpus.results(name)
        assert result["request"] == "r0/small"
        assert result["consumedCapacity"] == {"memory": "10Gi"}

    @pytest.mark.parametrize(
        "expression",
        [
            f"{ATTRIBUTES}.index == 1",
            f'{ATTRIBUTES}.uuid == "GPU-1" && {MEMORY}.isGreaterThan(quantity("79Gi"))',
            f'{VERSION}.isLessThan(semver("571.0.0")) && {ATTRIBUTES}.index > 0',
            f'!has(device.attributes["other.example"].uuid) && {ATTRIBUTES}.index > 0',
        ],
    )
    async def test_selector_chooses_by_attributes_and_capacity(
        self, gpus: Devices, expression: str
    ) -> None:
        await gpus.publish(gpu(0), gpu(1))
        share = exactly(gpus.device_class, "1Gi", selectors=[selector(expression)])
        assert await gpus.placed(share) == ["gpu-1"]

    async def test_unknown_attribute_is_an_error_and_not_a_no(self, gpus: Devices) -> None:
        await gpus.publish(gpu())
        wrong = selector('device.attributes["gpu.example"].colour == "red"')
        name = await gpus.claim(exactly(gpus.device_class, selectors=[wrong]))
        pod = await gpus.pod(of=name)
        message = await gpus.site.condition(pod, "SchedulerError")
        assert "no such key: colour" in message

    async def test_class_that_does_not_exist_is_named(self, gpus: Devices) -> None:
        await gpus.publish(gpu())
        message = await gpus.refused(exactly("absent"))
        assert "request r0: device class absent does not exist" in message

    async def test_all_devices_must_be_free(self, gpus: Devices) -> None:
        await gpus.publish(gpu(0), gpu(1))
        every = exactly(gpus.device_class, "1Gi", allocationMode="All")
        assert await gpus.placed(every) == ["gpu-0", "gpu-1"]
        assert await gpus.placed(exactly(gpus.device_class, "79Gi")) == ["gpu-0"]
        assert NO_ROOM in await gpus.refused(every)

    async def test_configuration_of_class_and_claim_is_handed_on(self, gpus: Devices) -> None:
        await gpus.publish(gpu())

        def opaque(value: str) -> Obj:
            return {"opaque": {"driver": "gpu.example", "parameters": {"from": value}}}

        kind = await make_class(gpus.client, config=[opaque("class")])
        name = await gpus.claim(exactly(kind, "1Gi"), config=[opaque("claim")])
        await gpus.site.bound(await gpus.pod(of=name))
        status = (await gpus.get_claim(name))["status"]
        config = status["allocation"]["devices"]["config"]
        assert [(one["source"], one["opaque"]["parameters"]["from"]) for one in config] == [
            ("FromClass", "class"),
            ("FromClaim", "claim"),
        ]
