# SPDX-License-Identifier: Apache-2.0
"""The contract of kube-scheduler with an extender without managed resources: component ``dra``."""

from collections.abc import AsyncIterator

import pytest

from hami_sim.kubescheduler.settings import CLAIMS_PROFILE
from tests.contract.dra.support import (
    CLAIMS,
    Devices,
    allocation_on,
    exactly,
    gpu,
    make_class,
    unique,
)
from tests.contract.kubescheduler.support import NAMESPACE, Site

pytestmark = pytest.mark.anyio


class EveryPodContract:
    """Behavior on which allocation mode ``dra`` relies."""

    @pytest.fixture
    async def gpus(self, site: Site) -> AsyncIterator[Devices]:
        name = unique("n")
        await site.node(name)
        await site.nodes_are_seen(last=name)
        site.extender.calls.clear()
        found = Devices(site, name, await make_class(site.client))
        try:
            yield found
        finally:
            await found.clear()

    async def test_pod_with_claims_alone_meets_the_extender(self, gpus: Devices) -> None:
        await gpus.publish(gpu(0))
        pod, claim = await gpus.share("10Gi")
        assert await gpus.site.bound(pod) == gpus.node
        assert gpus.site.extender.verbs_for(pod["metadata"]["name"]) == ["filter", "bind"]
        (result,) = await gpus.results(claim)
        assert result["device"] == "gpu-0"

    async def test_extender_refuses_a_node_for_a_pod_with_claims_alone(self, gpus: Devices) -> None:
        await gpus.publish(gpu(0))
        gpus.site.extender.filter = lambda args: {
            "NodeNames": [],
            "FailedNodes": dict.fromkeys(args["NodeNames"], "quota: 3 of 3 used"),
        }
        pod, claim = await gpus.share("10Gi")
        assert "1 quota: 3 of 3 used" in await gpus.site.condition(pod, "Unschedulable")
        assert await gpus.results(claim) == []

    async def test_pod_that_asks_for_nothing_meets_the_extender_too(self, site: Site) -> None:
        await site.node("n1")
        pod = await site.pod({"cpu": "1"})
        assert await site.bound(pod) == "n1"
        assert site.extender.verbs_for(pod["metadata"]["name"]) == ["filter", "bind"]

    async def test_amounts_of_ignored_resources_are_the_extenders(self, site: Site) -> None:
        await site.node("n1")  # it offers none of the resource
        limits = {"nvidia.com/gpu": "7", "nvidia.com/gpumem": "3000"}
        assert await site.bound(await site.pod(limits)) == "n1"

    async def test_profile_without_the_plugin_binds_before_the_claim_exists(
        self, gpus: Devices
    ) -> None:
        pod = await gpus.pod(of=unique("claim"), scheduler=CLAIMS_PROFILE)
        assert await gpus.site.bound(pod) == gpus.node
        assert gpus.site.extender.verbs_for(pod["metadata"]["name"]) == ["filter", "bind"]
        found = await gpus.client.get("pods", pod["metadata"]["name"], NAMESPACE)
        assert not found["status"].get("nominatedNodeName")

    async def test_profile_without_the_plugin_allocates_nothing(self, gpus: Devices) -> None:
        await gpus.publish(gpu(0))
        name = await gpus.claim(exactly(gpus.device_class, "10Gi"))
        assert await gpus.site.bound(await gpus.pod(of=name, scheduler=CLAIMS_PROFILE)) == gpus.node
        claim = await gpus.get_claim(name)
        assert not claim.get("status")
        assert not claim["metadata"].get("finalizers")

    async def test_profile_without_the_plugin_reports_the_extenders_refusal(
        self, gpus: Devices
    ) -> None:
        """Although no device could be allocated to the claim."""
        gpus.site.extender.filter = lambda args: {
            "NodeNames": [],
            "FailedNodes": dict.fromkeys(args["NodeNames"], "CardInsufficientMemory"),
        }
        name = await gpus.claim(exactly(gpus.device_class, "10Gi"))
        pod = await gpus.pod(of=name, scheduler=CLAIMS_PROFILE)
        message = await gpus.site.condition(pod, "Unschedulable")
        assert "1 CardInsufficientMemory" in message
        assert "claim" not in message

    async def test_allocation_written_elsewhere_counts_for_pods_with_the_plugin(
        self, gpus: Devices
    ) -> None:
        await gpus.publish(gpu(0), gpu(1))
        name = await gpus.claim(exactly(gpus.device_class))
        status = {"allocation": allocation_on(gpus.node, "gpu-0")}
        status["allocation"]["devices"]["results"][0] |= {
            "shareID": "6a1c1e0e-5d0f-4b0f-9d5e-1f6b1f2a3c4d",
            "consumedCapacity": {"memory": "80Gi"},
        }
        current = await gpus.get_claim(name)
        await gpus.client.replace(CLAIMS, {**current, "status": status}, subresource="status")
        assert await gpus.placed(exactly(gpus.device_class, "10Gi")) == ["gpu-1"]
