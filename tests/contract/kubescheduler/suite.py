# SPDX-License-Identifier: Apache-2.0
"""The contract of kube-scheduler with an HTTP extender that manages resources and binds."""

import anyio
import pytest

from tests.contract.kubescheduler.support import QUIET_S, Site, until

pytestmark = pytest.mark.anyio


class ExtenderContract:
    """Behavior that this project's scheduler relies on."""

    async def test_bodies_of_filter_prioritize_and_bind(self, site: Site) -> None:
        for name in ("n1", "n2", "n3"):
            await site.node(name)
        site.extender.filter = lambda _args: {
            "NodeNames": ["n1", "n3"],
            "FailedNodes": {"n2": "too small"},
            "Error": "",
        }
        site.extender.scores = {"n3": 10}
        pod = await site.pod()
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        assert await site.bound(pod) == "n3"
        assert site.extender.verbs_for(name)[-3:] == ["filter", "prioritize", "bind"]
        filtered, scored, bind = (body for _, body in site.extender.calls_for(name)[-3:])
        assert set(filtered) == {"Pod", "Nodes", "NodeNames"}
        assert sorted(filtered["NodeNames"]) == ["n1", "n2", "n3"]
        assert filtered["Nodes"] is None
        assert filtered["Pod"]["metadata"]["uid"] == uid
        assert sorted(scored["NodeNames"]) == ["n1", "n3"]
        assert bind == {"PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": "n3"}

    async def test_one_feasible_node_is_not_scored(self, site: Site) -> None:
        await site.node("n1")
        pod = await site.pod()
        await site.bound(pod)
        assert "prioritize" not in site.extender.verbs_for(pod["metadata"]["name"])

    @pytest.mark.parametrize("scheduler", ["hami-scheduler", "default-scheduler"])
    async def test_pods_without_managed_resources_never_meet_the_extender(
        self, site: Site, scheduler: str
    ) -> None:
        await site.node("n1")
        pod = await site.pod({"cpu": "1"}, schedulerName=scheduler)
        assert await site.bound(pod) == "n1"
        assert site.extender.calls == []

    async def test_amounts_of_managed_resources_are_the_extenders(self, site: Site) -> None:
        await site.node("n1")  # it offers none of the resource
        assert await site.bound(await site.pod({"nvidia.com/gpu": "7"})) == "n1"

    async def test_pods_of_other_schedulers_are_left_alone(self, site: Site) -> None:
        await site.node("n1")
        other = await site.pod(schedulerName="somebody-else")
        await site.bound(await site.pod())
        found = await site.client.get("pods", other["metadata"]["name"], "default")
        assert "nodeName" not in found["spec"]

    async def test_refusals_are_counted_into_the_condition_and_the_event(self, site: Site) -> None:
        await site.node("n3", spec={"unschedulable": True})
        for name in ("n1", "n2"):
            await site.node(name)
        await site.nodes_are_seen(last="n2")
        site.extender.filter = lambda args: {
            "NodeNames": [],
            "FailedNodes": dict.fromkeys(args["NodeNames"], "memory: wants 9 MiB, best 3 MiB"),
        }
        pod = await site.pod()
        message = await site.condition(pod, "Unschedulable")
        # Kubernetes 1.34 adds a text of its DynamicResources plugin for a pod without claims.
        assert message.replace("no new claims to deallocate, ", "") == (
            "0/3 nodes are available: 1 node(s) were unschedulable, "
            "2 memory: wants 9 MiB, best 3 MiB. "
            "preemption: 0/3 nodes are available: "
            "1 Preemption is not helpful for scheduling, "
            "2 No preemption victims found for incoming pod."
        ), message
        selector = f"reason=FailedScheduling,involvedObject.name={pod['metadata']['name']}"

        async def reported() -> bool:
            events = await site.client.list("events", "default", fieldSelector=selector)
            return message in [item["message"] for item in events["items"]]

        await until(reported)

    async def test_refused_pod_is_tried_again_when_a_node_changes(self, site: Site) -> None:
        await site.node("n1")
        site.extender.filter = lambda _args: {"NodeNames": [], "FailedNodes": {"n1": "full"}}
        pod = await site.pod()
        name = pod["metadata"]["name"]
        await site.condition(pod, "Unschedulable")
        tries = await self._quiet(site, name)
        site.extender.filter = lambda args: {"NodeNames": args["NodeNames"]}
        await site.client.patch("nodes", "n1", {"metadata": {"annotations": {"touched": "1"}}})
        assert await site.bound(pod) == "n1"
        assert site.extender.verbs_for(name).count("filter") > tries

    async def test_node_heartbeats_requeue_no_pod(self, site: Site) -> None:
        await site.node("n1")
        site.extender.filter = lambda _args: {"NodeNames": [], "FailedNodes": {"n1": "full"}}
        pod = await site.pod()
        await site.condition(pod, "Unschedulable")
        tries = await self._quiet(site, pod["metadata"]["name"])
        known = await site.client.get("nodes", "n1")
        for second in range(3):
            conditions = known["status"]["conditions"]
            beaten = [
                {**one, "lastHeartbeatTime": f"2026-01-01T00:00:0{second}Z"} for one in conditions
            ]
            await site.client.patch(
                "nodes", "n1", {"status": {"conditions": beaten}}, subresource="status"
            )
        assert await self._quiet(site, pod["metadata"]["name"]) == tries

    async def test_failing_extender_is_a_scheduler_error_and_is_retried(self, site: Site) -> None:
        await site.node("n1")
        site.extender.filter = lambda _args: {"Error": "ledger is not ready"}
        pod = await site.pod()
        assert await site.condition(pod, "SchedulerError") == "ledger is not ready"
        site.extender.filter = lambda args: {"NodeNames": args["NodeNames"]}
        assert await site.bound(pod) == "n1"

    async def test_refused_bind_frees_the_node_and_is_tried_again(self, site: Site) -> None:
        await site.node("n1")
        site.extender.bind_error = "lost the race"
        pod = await site.pod({"nvidia.com/gpu": "1", "cpu": "3"})
        assert "lost the race" in await site.condition(pod, "SchedulerError")
        site.extender.bind_error = ""
        assert await site.bound(pod) == "n1"

    @staticmethod
    async def _quiet(site: Site, name: str) -> int:
        """Number of filter calls about a pod, once it does not grow any more."""
        while True:
            before = site.extender.verbs_for(name).count("filter")
            await anyio.sleep(QUIET_S)
            if site.extender.verbs_for(name).count("filter") == before:
                return before
