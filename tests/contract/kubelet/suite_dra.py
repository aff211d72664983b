# SPDX-License-Identifier: Apache-2.0
"""The contract for dynamic resource allocation: drivers, claims, CDI devices, health.

The tests play kube-scheduler: they allocate and reserve each claim themselves, then bind the pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import anyio
import pytest

from hami_common.kubeletapi import drahealth, podresources
from tests.contract.kubelet.dradriver import (
    HEALTH_V1,
    HEALTH_V1ALPHA1,
    V1,
    V1BETA1,
    Claim,
    Refusal,
    TestDriver,
)
from tests.contract.kubelet.support import SLEEP, Node, Obj, asks, until

pytestmark = pytest.mark.anyio

CLAIMS = "resourceclaims.resource.k8s.io"
SLICES = "resourceslices.resource.k8s.io"


class Site:
    """A node with a driver: makes claims of the driver's devices and pods that use them."""

    def __init__(self, node: Node, driver: TestDriver) -> None:
        self.node = node
        self.driver = driver
        self._users: dict[str, list[Obj]] = {}

    async def joined(self, count: int = 1) -> None:
        """Wait until kubelet has registered the driver so many times."""

        async def registered() -> list[str]:
            return [status.error for status in self.driver.statuses if status.plugin_registered]

        await until(registered, lambda found: len(found) >= count)

    async def claim(self, *requests: str) -> Claim:
        """Create a claim and allocate a device for each request."""
        name = f"claim-{uuid4().hex[:8]}"
        asked = [{"name": r, "exactly": {"deviceClassName": "contract"}} for r in requests]
        claim = await self.node.client.create(
            CLAIMS,
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name},
                "spec": {"devices": {"requests": asked}},
            },
            self.node.namespace,
        )
        results = [
            {"request": request, "driver": self.driver.name, "pool": "pool", "device": f"gpu-{i}"}
            for i, request in enumerate(requests)
        ]
        await self._set_status(name, {"allocation": {"devices": {"results": results}}})
        self.driver.requests[name] = requests
        return Claim(self.node.namespace, claim["metadata"]["uid"], name)

    async def _set_status(self, name: str, status: Obj) -> None:
        await self.node.client.patch(
            CLAIMS,
            name,
            {"status": status},
            namespace=self.node.namespace,
            subresource="status",
        )

    async def run(self, claims: Mapping[str, Claim], containers: Sequence[Obj], **spec: Any) -> str:
        """Create a pod with claims by their references, reserve them for it, and bind it."""
        references = [
            {"name": reference, "resourceClaimName": claim.name}
            for reference, claim in claims.items()
        ]
        name = await self.node.run(
            containers,
            nodeName="",
            schedulerName="contract",
            terminationGracePeriodSeconds=1,
            resourceClaims=references,
            **spec,
        )
        pod = await self.node.client.get("pods", name, self.node.namespace)
        for claim in claims.values():
            users = self._users.setdefault(claim.name, [])
            users.append({"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]})
            await self._set_status(claim.name, {"reservedFor": users})
        await self.node.client.bind(name, self.node.name, namespace=self.node.namespace)
        return name

    async def started(self, claim: Claim, **spec: Any) -> str:
        """Run a pod that uses one claim and sleeps; return when it runs."""
        pod = await self.run({"c": claim}, [uses("c")], **spec)
        await self.node.in_phase(pod, "Running")
        return pod

    async def ended(self, pod: str) -> None:
        """Delete a pod and wait until it is gone."""
        await self.node.delete(pod)
        await self.node.gone(pod)

    async def warned(self, pod: str, text: str) -> None:
        """Wait until an event of a failed preparation has the text."""

        async def messages() -> list[str]:
            listed = await self.node.client.list(
                "events",
                self.node.namespace,
                fieldSelector=f"involvedObject.name={pod},reason=FailedPrepareDynamicResources",
            )
            return [event["message"] for event in listed["items"]]

        await until(
            messages,
            lambda found: (
                f"Failed to prepare dynamic resources: prepare dynamic resources: {text}" in found
            ),
        )

    async def shows(self, pod: str, name: str, *resources: Obj) -> None:
        """Wait until a pod's status has these resources under a name."""

        async def read() -> list[Obj]:
            found = await self.node.pod(pod)
            assert found is not None
            [status] = found["status"].get("containerStatuses") or [{}]
            return list(status.get("allocatedResourcesStatus") or ())

        await until(read, [{"name": name, "resources": list(resources)}].__eq__)

    def id_of(self, claim: Claim, request: str) -> str:
        """CDI id of a claim's request."""
        return f"{self.driver.kind}={claim.uid}-{request}"


async def refusal_of(driver: TestDriver) -> str:
    """Wait until kubelet refuses to register a driver; return the reason that it gives."""

    async def errors() -> list[str]:
        return [status.error for status in driver.statuses if not status.plugin_registered]

    [error, *_] = await until(errors, bool)
    return error


def uses(*references: str, name: str = "main", script: str = SLEEP, **more: Any) -> Obj:
    """A container that uses claims: ``claim`` or ``claim/request``."""
    pairs = [reference.partition("/") for reference in references]
    claims = [
        {"name": claim, **({"request": request} if request else {})} for claim, _, request in pairs
    ]
    container = asks(name=name, script=script, **more)
    return {**container, "resources": {"claims": claims}}


SHOW = f"env | grep ^GIVEN_ | sort; echo end; {SLEEP}"


class DriverContract:
    """Drivers come, fail and go."""

    @pytest.mark.parametrize(
        ("versions", "used"),
        [((V1,), V1), ((V1BETA1,), V1BETA1), (("v9.DRAPlugin", V1BETA1, V1), V1BETA1)],
    )
    async def test_first_version_that_kubelet_knows_is_used(
        self, node: Node, driver: TestDriver, versions: tuple[str, ...], used: str
    ) -> None:
        site = Site(node, driver)
        driver.versions = versions
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        await site.ended(await site.started(claim))
        assert driver.used == {used}
        assert driver.prepared == driver.unprepared == [[claim]]

    async def test_driver_without_a_known_version_is_refused_with_the_reason(
        self, node: Node, driver: TestDriver
    ) -> None:
        driver.versions = ("v9.DRAPlugin", "v8.DRAPlugin")
        await driver.serve()
        assert await refusal_of(driver) == (
            "RegisterPlugin error -- plugin validation failed with err: invalid supported gRPC "
            f"versions of DRA driver plugin {driver.name} at endpoint {driver.socket}: none of "
            'services supported by the plugin (["v9.DRAPlugin" "v8.DRAPlugin"]) are supported by '
            'the kubelet (["v1.DRAPlugin" "v1beta1.DRAPlugin"])'
        )

    async def test_plugin_of_an_unknown_type_is_refused(
        self, node: Node, driver: TestDriver
    ) -> None:
        driver.type = "OtherPlugin"
        await driver.serve()
        error = await refusal_of(driver)
        assert error.startswith(
            "RegisterPlugin error -- no handler registered for plugin type: OtherPlugin at socket "
        )
        assert error.endswith(f"/plugins_registry/{driver.registry.name}")

    async def test_plugin_that_vanishes_while_it_registers_disturbs_no_other(
        self, node: Node, driver: TestDriver
    ) -> None:
        other = TestDriver(node.kubelet_directory, node.cdi_directory)
        asked = anyio.Event()

        async def hang() -> None:
            asked.set()
            await anyio.sleep_forever()

        other.before_info = hang
        await other.serve()
        await asked.wait()
        other.registry.unlink()
        await anyio.sleep(0.5)  # kubelet leaves the call
        await other.close()
        await driver.serve()
        await Site(node, driver).joined()
        assert other.statuses == []

    async def test_second_plugin_with_the_same_endpoint_is_refused(
        self, node: Node, driver: TestDriver
    ) -> None:
        await driver.serve()
        await Site(node, driver).joined()
        twin = TestDriver(node.kubelet_directory, node.cdi_directory, name=driver.name)
        twin.socket = driver.socket
        try:
            await twin.start_registration()
            assert await refusal_of(twin) == (
                "RegisterPlugin error -- plugin registration failed with err: endpoint "
                f"{driver.socket} already registered for DRA driver plugin {driver.name}"
            )
        finally:
            await twin.close()

    async def test_pod_waits_for_a_driver_that_is_not_registered(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        pod = await site.run({"c": await site.claim("a")}, [uses("c")])
        await site.warned(pod, f"DRA driver {driver.name} is not registered")
        await node.in_phase(pod, "Pending")
        await driver.serve()
        await node.in_phase(pod, "Running")

    async def test_driver_that_restarts_registers_again(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        await driver.close()
        await driver.serve()
        await site.joined(2)
        await site.started(await site.claim("a"))

    async def test_connection_is_restored_when_only_the_service_restarts(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        pod = await site.started(claim)
        await driver.stop_service()
        await driver.start_service()
        await site.ended(pod)
        await site.started(await site.claim("a"))
        assert driver.unprepared == [[claim]]
        assert len(driver.statuses) == 1

    async def test_newest_connected_plugin_of_a_driver_is_called(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        newer = TestDriver(node.kubelet_directory, node.cdi_directory, name=driver.name)
        newer.requests = driver.requests
        try:
            await newer.serve()
            await Site(node, newer).joined()
            first = await site.claim("a")
            pod = await site.started(first)
            assert (newer.prepared, driver.prepared) == ([[first]], [])
        finally:
            await newer.close()
        await site.ended(pod)
        second = await site.claim("a")
        await site.started(second)
        assert (driver.unprepared, driver.prepared) == ([[first]], [[second]])

    @pytest.mark.parametrize("version", [HEALTH_V1, HEALTH_V1ALPHA1])
    async def test_health_of_devices_shows_in_the_pods_status(
        self, node: Node, driver: TestDriver, version: str
    ) -> None:
        site = Site(node, driver)
        driver.versions = (V1, version)
        driver.set_health([("gpu-0", drahealth.HEALTHY, "")])
        await driver.serve()
        await site.joined()
        claim = await site.claim("a", "b")
        pod = await site.run({"c": claim}, [uses("c/a")])
        entry = {"resourceID": site.id_of(claim, "a")}
        await site.shows(pod, "claim:c/a", {**entry, "health": "Healthy"})
        driver.set_health([("gpu-0", drahealth.UNHEALTHY, "fell off the bus")])
        unhealthy = {**entry, "health": "Unhealthy", "message": "fell off the bus"}
        await site.shows(pod, "claim:c/a", unhealthy)
        assert driver.used == {V1, version}
        assert (await node.in_phase(pod, "Running"))["metadata"]["name"] == pod

    async def test_health_is_unknown_without_recent_report(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        driver.versions = (V1, HEALTH_V1)
        driver.set_health([("gpu-0", drahealth.HEALTHY, "")], timeout_s=1)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a", "b")
        pod = await site.run({"c": claim}, [uses("c")])
        one, two = ({"resourceID": site.id_of(claim, request)} for request in "ab")
        unknown = {"health": "Unknown"}
        await site.shows(pod, "claim:c", {**one, **unknown}, {**two, **unknown})
        driver.set_health(
            [("gpu-0", drahealth.HEALTHY, "up"), ("gpu-1", drahealth.HEALTHY, "")], timeout_s=60
        )
        healthy = {"health": "Healthy"}
        await site.shows(pod, "claim:c", {**one, **healthy, "message": "up"}, {**two, **healthy})
        driver.set_health(None)
        await site.shows(pod, "claim:c", {**one, **unknown}, {**two, **unknown})


class ClaimContract:
    """Claims of pods are prepared and unprepared, and their devices reach the containers."""

    async def test_all_claims_of_a_pod_are_prepared_in_one_call_before_its_containers(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        may_prepare = anyio.Event()
        driver.before_prepare = may_prepare.wait
        await driver.serve()
        await site.joined()
        claims = {"one": await site.claim("a"), "two": await site.claim("b")}
        pod = await site.run(claims, [uses("one", "two", script=SHOW)])

        async def calls() -> list[list[Claim]]:
            return driver.prepared

        await until(calls, bool)
        await anyio.sleep(0.5)
        assert not await node.logs(pod, "main")
        await node.in_phase(pod, "Pending")
        may_prepare.set()
        await node.in_phase(pod, "Running")
        assert [sorted(call) for call in driver.prepared] == [sorted(claims.values())]
        assert await node.prints(pod, "end") == (
            f"GIVEN_A={claims['one'].name}\nGIVEN_B={claims['two'].name}\nend\n"
        )

    async def test_each_container_gets_the_devices_of_the_requests_it_names(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a", "b")
        pod = await site.run(
            {"c": claim},
            [
                uses("c/a", name="one", script=SHOW),
                uses("c/b", name="two", script=SHOW),
                uses("c", name="both", script=SHOW),
                uses(name="none", script=SHOW),
            ],
        )
        given = {
            name: await node.prints(pod, "end", container=name)
            for name in ("one", "two", "both", "none")
        }
        a, b = (f"GIVEN_{request}={claim.name}\n" for request in "AB")
        assert given == {
            "one": f"{a}end\n",
            "two": f"{b}end\n",
            "both": f"{a}{b}end\n",
            "none": "end\n",
        }
        assert driver.prepared == [[claim]]

    async def test_variables_of_a_device_replace_the_containers_own(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        env = [{"name": "GIVEN_A", "value": "mine"}]
        pod = await site.run({"c": claim}, [uses("c", script=SHOW, env=env)])
        assert await node.prints(pod, "end") == f"GIVEN_A={claim.name}\nend\n"

    @pytest.mark.parametrize(
        ("refusal", "text"),
        [
            (
                Refusal(error="no share here"),
                "NodePrepareResources failed for ResourceClaim {name}: no share here",
            ),
            (
                Refusal(status="not now"),
                "NodePrepareResources: rpc error: code = Internal desc = not now",
            ),
            (Refusal(skips=True), "NodePrepareResources skipped 1 ResourceClaims"),
            (
                Refusal(adds="other"),
                "NodePrepareResources returned result for unknown claim UID other",
            ),
        ],
    )
    async def test_pod_stays_pending_and_is_retried_while_its_claim_is_refused(
        self, node: Node, driver: TestDriver, refusal: Refusal, text: str
    ) -> None:
        site = Site(node, driver)
        driver.refusal = refusal
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        pod = await site.run({"c": claim}, [uses("c")])
        await site.warned(pod, text.format(name=claim.name))

        async def calls() -> int:
            return len(driver.prepared)

        await until(calls, lambda count: count >= 2)

        async def waiting() -> list[str]:
            shown = (await node.in_phase(pod, "Pending"))["status"].get("containerStatuses") or ()
            return [one["state"]["waiting"]["reason"] for one in shown]

        await until(waiting, lambda reasons: reasons == ["ContainerCreating"])
        driver.refusal = None
        await node.in_phase(pod, "Running")
        await site.ended(pod)
        assert driver.unprepared == [[claim]]

    async def test_pod_deleted_while_its_claim_is_refused_has_it_unprepared(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        driver.refusal = Refusal(error="no share here")
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        pod = await site.run({"c": claim}, [uses("c")])
        await site.warned(
            pod, f"NodePrepareResources failed for ResourceClaim {claim.name}: no share here"
        )
        await site.ended(pod)
        assert driver.unprepared == [[claim]]

    async def test_pod_deleted_during_the_call_is_unprepared_after_it(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        may_prepare = anyio.Event()
        driver.before_prepare = may_prepare.wait
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        pod = await site.run({"c": claim}, [uses("c")])

        async def calls() -> list[list[Claim]]:
            return driver.prepared

        await until(calls, bool)
        await node.delete(pod)
        await anyio.sleep(1.0)
        assert driver.unprepared == []
        assert await node.pod(pod) is not None
        may_prepare.set()
        await node.gone(pod)
        assert (driver.prepared, driver.unprepared) == ([[claim]], [[claim]])

    async def test_container_with_an_unknown_device_does_not_start(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        driver.writes_files = False
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        name = await site.run({"c": claim}, [uses("c")])

        async def waiting() -> Obj:
            pod = await node.pod(name)
            assert pod is not None
            statuses = pod["status"].get("containerStatuses") or [{"state": {}}]
            state: Obj = statuses[0]["state"].get("waiting", {})
            return state

        state = await until(waiting, lambda found: found.get("reason") == "CreateContainerError")
        assert f"unresolvable CDI devices {site.id_of(claim, 'a')}" in state["message"]

    async def test_claim_is_unprepared_before_the_pod_is_gone(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        pod = await site.started(claim)
        seen: list[Obj | None] = []

        async def look() -> None:
            seen.append(await node.pod(pod))

        driver.before_unprepare = look
        await site.ended(pod)
        assert driver.unprepared == [[claim]]
        assert [found is not None for found in seen] == [True]

    async def test_claim_of_an_ended_pod_is_unprepared_before_its_final_status(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        phases: list[str] = []
        pods: list[str] = []

        async def look() -> None:
            found = await node.pod(pods[0])
            assert found is not None
            phases.append(found["status"]["phase"])

        driver.before_unprepare = look
        pods.append(await site.run({"c": claim}, [uses("c", script="sleep 1")]))
        await node.in_phase(pods[0], "Succeeded")
        assert driver.unprepared == [[claim]]
        assert phases[0] in ("Pending", "Running")

    async def test_failed_unprepare_is_retried_and_keeps_the_pod(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        pod = await site.started(claim)
        driver.unprepare_error = "still busy"
        await node.delete(pod)

        async def calls() -> int:
            return len(driver.unprepared)

        await until(calls, lambda count: count >= 2)
        assert await node.pod(pod) is not None
        driver.unprepare_error = ""
        await node.gone(pod)
        assert {tuple(call) for call in driver.unprepared} == {(claim,)}

    async def test_shared_claim_is_prepared_once_and_unprepared_after_its_last_pod(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        first = await site.started(claim)
        second = await site.run({"c": claim}, [uses("c", script=SHOW)])
        assert await node.prints(second, "end") == f"GIVEN_A={claim.name}\nend\n"
        await site.ended(first)
        assert (driver.prepared, driver.unprepared) == ([[claim]], [])
        await site.ended(second)
        assert (driver.prepared, driver.unprepared) == ([[claim]], [[claim]])

    async def test_restart_of_kubelet_prepares_again_only_for_pods_without_sandbox(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        script = f"echo again; {SHOW.replace(SLEEP, 'sleep 8')}"
        running = await site.started(claim)
        looping = await site.run({"c": claim}, [uses("c", script=script)], restartPolicy="Always")
        before = await node.in_phase(running, "Running")
        await node.prints(looping, "end")
        await node.restart()
        await site.joined(2)

        async def restarts() -> int:
            found = await node.pod(looping)
            assert found is not None
            return int(found["status"]["containerStatuses"][0]["restartCount"])

        await until(restarts, bool)
        given = f"again\nGIVEN_A={claim.name}\nend\n"
        assert await node.prints(looping, "end") == given
        assert driver.prepared == [[claim]]
        late = await site.run({"c": claim}, [uses("c", script=SHOW)])
        assert await node.prints(late, "end") == f"GIVEN_A={claim.name}\nend\n"
        assert driver.prepared == [[claim], [claim]]
        after = await node.in_phase(running, "Running")
        assert [c["containerID"] for c in before["status"]["containerStatuses"]] == [
            c["containerID"] for c in after["status"]["containerStatuses"]
        ]
        for pod in (running, looping):
            await site.ended(pod)
        assert driver.unprepared == []
        await site.ended(late)
        assert driver.unprepared == [[claim]]

    async def test_reboot_prepares_the_claims_of_pods_again(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        claim = await site.claim("a")
        pod = await site.run({"c": claim}, [uses("c", script=SHOW)], restartPolicy="Always")
        await node.prints(pod, "end")
        for file in node.cdi_directory.iterdir():
            file.unlink()  # the directory of a node is in memory
        await node.reboot()
        await site.joined(2)

        async def restarts() -> int:
            found = await node.pod(pod)
            assert found is not None
            return int(found["status"]["containerStatuses"][0]["restartCount"])

        await until(restarts, bool)
        assert await node.prints(pod, "end") == f"GIVEN_A={claim.name}\nend\n"
        assert (driver.prepared, driver.unprepared) == ([[claim], [claim]], [])
        await site.ended(pod)
        assert driver.unprepared == [[claim]]

    async def test_podresources_shows_claims_devices_and_ids(
        self, node: Node, driver: TestDriver
    ) -> None:
        """A device is listed with the ids of those before it, and whatever the container names."""
        site = Site(node, driver)
        driver.share_ids = {"gpu-0": "8b2f4c1e-6f3a-4d57-9f0e-0c4f6f1f2a3b"}
        await driver.serve()
        await site.joined()
        claim = await site.claim("a", "b")
        pod = await site.run({"c": claim}, [uses("c/b"), uses(name="other")])
        await node.in_phase(pod, "Running")
        ids = [podresources.CDIDevice(name=site.id_of(claim, request)) for request in ("a", "b")]
        expected = podresources.DynamicResource(
            claim_name=claim.name,
            claim_namespace=claim.namespace,
            claim_resources=[
                podresources.ClaimResource(
                    cdi_devices=ids[: number + 1],
                    driver_name=driver.name,
                    pool_name="pool",
                    device_name=f"gpu-{number}",
                    share_id=driver.share_ids.get(f"gpu-{number}"),
                )
                for number in range(2)
            ],
        )
        request = podresources.GetPodResourcesRequest(pod_name=pod, pod_namespace=node.namespace)
        for found in ((await node.listed())[pod], (await node.ask("Get", request)).pod_resources):
            resources = {entry.name: list(entry.dynamic_resources) for entry in found.containers}
            assert resources == {"main": [expected], "other": []}


class SliceContract:
    """ResourceSlices of a node without its drivers."""

    async def test_slices_of_the_node_are_deleted_when_kubelet_starts(
        self, node: Node, driver: TestDriver
    ) -> None:
        own = await publish(node, driver.name)
        other = await publish(node, driver.name, node_name="another-node")
        await node.restart()
        await until(lambda: slices(node), lambda found: own not in found)
        assert other in await slices(node)
        await node.client.delete(SLICES, other)

    async def test_slices_of_a_driver_are_deleted_some_time_after_its_connection_broke(
        self, node: Node, driver: TestDriver
    ) -> None:
        site = Site(node, driver)
        await driver.serve()
        await site.joined()
        own, other = [await publish(node, name) for name in (driver.name, f"x{driver.name}")]
        await driver.stop_service()
        await until(lambda: slices(node), lambda found: own not in found)
        assert other in await slices(node)
        await driver.start_service()
        fresh = await publish(node, driver.name)
        await site.started(await site.claim("a"))
        assert fresh in await slices(node)
        for name in (fresh, other):
            await node.client.delete(SLICES, name)


async def publish(node: Node, driver: str, *, node_name: str = "") -> str:
    """Create a slice of a driver on a node, by default on this one."""
    name = f"slice-{uuid4().hex[:8]}"
    spec = {
        "driver": driver,
        "nodeName": node_name or node.name,
        "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0"}],
    }
    slice_ = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": spec,
    }
    await node.client.create(SLICES, slice_)
    return name


async def slices(node: Node) -> set[str]:
    """Names of all slices."""
    return {found["metadata"]["name"] for found in (await node.client.list(SLICES))["items"]}
