# SPDX-License-Identifier: Apache-2.0
"""The contract for objects of resource.k8s.io: defaults, validation, and states of a claim."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.dra.support import (
    CLAIMS,
    CLASSES,
    SLICES,
    TEMPLATES,
    Obj,
    allocation_on,
    claim,
    claim_spec,
    consumer,
    exactly,
    gpu,
    selector,
    slice_of,
    unique,
)
from tests.contract.kubeapi.support import Cluster, refused

pytestmark = pytest.mark.anyio
Change = Callable[[Obj], None]


def at(path: str, value: Any) -> Change:
    """A change that sets the field at a path of keys and indices."""

    def change(obj: Obj) -> None:
        *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        target: Any = obj
        for key in parents:
            target = target[key]
        target[last] = value

    return change


MEMORY = "devices.0.capacity.memory"
RANGE = f"{MEMORY}.requestPolicy.validRange"
TAINT = {"key": "gpu.example/full", "effect": "NoSchedule"}
COUNTER_SET = {"name": "card", "counters": {"x": {"value": "8"}}}
BAD_SLICES = {
    "no driver": (at("driver", ""), "spec.driver"),
    "pool without a name": (at("pool.name", ""), "spec.pool.name"),
    "pool without slices": (at("pool.resourceSliceCount", 0), "spec.pool.resourceSliceCount"),
    "two places": (at("allNodes", value=True), "spec"),
    "counters beside devices": (at("sharedCounters", [COUNTER_SET]), "spec"),
    "129 devices": (at("devices", [gpu(n) for n in range(129)]), "spec.devices"),
    "65 with a taint": (
        at("devices", [gpu(n, taints=[TAINT] if not n else []) for n in range(65)]),
        "spec.devices",
    ),
    "name of a device": (at("devices.0.name", "GPU_0"), "spec.devices[0].name"),
    "same name twice": (at("devices.1.name", "gpu-0"), "spec.devices[1]"),
    "attribute without a value": (
        at("devices.0.attributes.uuid", {}),
        "spec.devices[0].attributes[uuid]",
    ),
    "attribute of 65 characters": (
        at("devices.0.attributes.uuid", {"string": "x" * 65}),
        "spec.devices[0].attributes[uuid].string",
    ),
    "version": (
        at("devices.0.attributes.driverVersion", {"version": "570.1"}),
        "spec.devices[0].attributes[driverVersion].version",
    ),
    "policy of an unshared device": (
        at("devices.0.allowMultipleAllocations", value=False),
        "spec.devices[0].capacity[memory].requestPolicy",
    ),
    "range without a minimum": (
        at(RANGE, {"step": "1Mi"}),
        "spec.devices[0].capacity[memory].requestPolicy.validRange.min",
    ),
    "minimum above the value": (
        at(f"{MEMORY}.value", "1Ki"),
        "spec.devices[0].capacity[memory].requestPolicy.validRange.min",
    ),
    "default below the minimum": (
        at(f"{MEMORY}.requestPolicy.default", "1Ki"),
        "spec.devices[0].capacity[memory].requestPolicy.validRange.default",
    ),
    "no default": (
        at(f"{MEMORY}.requestPolicy", {"validRange": {"min": "1Mi"}}),
        "spec.devices[0].capacity[memory].requestPolicy.default",
    ),
    "unsorted values": (
        at(f"{MEMORY}.requestPolicy", {"default": "1Gi", "validValues": ["2Gi", "1Gi"]}),
        "spec.devices[0].capacity[memory].requestPolicy.validValues[1]",
    ),
    "effect of a taint": (
        at("devices.0.taints", [{"key": "a", "effect": "Never"}]),
        "spec.devices[0].taints[0].effect",
    ),
    "consumes no counters": (
        at("devices.0.consumesCounters", [{"counterSet": "card"}]),
        "spec.devices[0].consumesCounters[0].counters",
    ),
}
FIRST = "devices.requests.0"
BAD_CLAIMS = {
    "no class": (at(f"{FIRST}.exactly.deviceClassName", ""), "exactly.deviceClassName"),
    "count 0": (at(f"{FIRST}.exactly.count", -1), "exactly.count"),
    "count of all": (
        at(f"{FIRST}.exactly", exactly("c", allocationMode="All", count=2)),
        "exactly.count",
    ),
    "allocation mode": (at(f"{FIRST}.exactly.allocationMode", "Some"), "exactly.allocationMode"),
    "no CEL": (
        at(f"{FIRST}.exactly.selectors", [selector("device.driver ==")]),
        "exactly.selectors[0].cel.expression",
    ),
    "neither form": (at("devices.requests", [{"name": "r0"}]), ""),
    "name of a request": (at(f"{FIRST}.name", "R_0"), "name"),
}


def fields(error: Any) -> set[str]:
    return {cause.get("field", "") for cause in error.causes}


class DeviceObjectsContract:
    """Rules of the API server for objects that no scheduler looks at."""

    async def test_slice_is_stored_with_canonical_amounts_and_a_generation(
        self, cluster: Cluster
    ) -> None:
        made = await cluster.client.create(SLICES, slice_of("n", gpu(memory="81920Mi")))
        assert made["metadata"]["generation"] == 1
        capacity = made["spec"]["devices"][0]["capacity"]["memory"]
        assert capacity["value"] == "80Gi"
        assert capacity["requestPolicy"]["validRange"] == {"min": "1Mi", "step": "1Mi"}
        capacity["value"] = "3000Mi"  # lower than the default: what is left of the card
        changed = await cluster.client.replace(SLICES, made)
        assert changed["metadata"]["generation"] == 2
        await cluster.client.delete(SLICES, made["metadata"]["name"])

    @pytest.mark.parametrize("what", BAD_SLICES)
    async def test_invalid_slice_is_refused_by_field(self, cluster: Cluster, what: str) -> None:
        change, field = BAD_SLICES[what]
        wrong = slice_of("n", gpu(0), gpu(1))
        change(wrong["spec"])
        with refused(422, "Invalid") as refusal:
            await cluster.client.create(SLICES, wrong)
        assert field in fields(refusal.error), refusal.error.causes

    @pytest.mark.parametrize("path", ["driver", "nodeName", "pool.name"])
    async def test_identity_of_a_slice_stays(self, cluster: Cluster, path: str) -> None:
        made = await cluster.client.create(SLICES, slice_of("n", gpu()))
        wrong = {**made, "spec": {**made["spec"], "pool": dict(made["spec"]["pool"])}}
        at(path, "other")(wrong["spec"])
        with refused(422, "Invalid") as refusal:
            await cluster.client.replace(SLICES, wrong)
        assert f"spec.{path}" in fields(refusal.error)
        await cluster.client.delete(SLICES, made["metadata"]["name"])

    async def test_slices_are_listed_by_node_and_driver(self, cluster: Cluster) -> None:
        node = unique("n")
        made = await cluster.client.create(SLICES, slice_of(node, gpu()))
        await cluster.client.create(SLICES, slice_of(unique("n"), gpu()))
        listed = await cluster.client.list(
            SLICES, fieldSelector=f"spec.nodeName={node},spec.driver=gpu.example"
        )
        assert [item["metadata"]["name"] for item in listed["items"]] == [made["metadata"]["name"]]
        for item in (await cluster.client.list(SLICES))["items"]:
            await cluster.client.delete(SLICES, item["metadata"]["name"])

    async def test_request_without_a_mode_is_for_one_device(self, cluster: Cluster) -> None:
        spec = claim_spec(
            exactly("c", "3000Mi"), {"firstAvailable": [{"name": "a", **exactly("c")}]}
        )
        made = await cluster.client.create(
            CLAIMS,
            {"metadata": {"name": "x"}, "spec": spec, "status": {"reservedFor": [consumer()]}},
            cluster.namespace,
        )
        one, other = made["spec"]["devices"]["requests"]
        assert one["exactly"]["allocationMode"] == "ExactCount"
        assert one["exactly"]["count"] == 1
        assert other["firstAvailable"][0]["count"] == 1
        assert not made.get("status"), "the status is for controllers"

    @pytest.mark.parametrize("what", BAD_CLAIMS)
    @pytest.mark.parametrize("kind", ["claim", "template"])
    async def test_invalid_request_is_refused_by_field(
        self, cluster: Cluster, what: str, kind: str
    ) -> None:
        change, field = BAD_CLAIMS[what]
        spec = claim_spec(exactly("c"))
        change(spec)
        resource, body, prefix = (
            (CLAIMS, spec, "spec") if kind == "claim" else (TEMPLATES, {"spec": spec}, "spec.spec")
        )
        with refused(422, "Invalid") as refusal:
            await cluster.client.create(
                resource, {"metadata": {"name": "x"}, "spec": body}, cluster.namespace
            )
        wanted = f"{prefix}.devices.requests[0]" + (f".{field}" if field else "")
        assert wanted in fields(refusal.error), refusal.error.causes

    async def test_specification_of_a_claim_stays(self, cluster: Cluster) -> None:
        made = await cluster.client.create(CLAIMS, claim("x", exactly("c")), cluster.namespace)
        made["spec"]["devices"]["requests"][0]["exactly"]["count"] = 2
        with refused(422, "Invalid") as refusal:
            await cluster.client.replace(CLAIMS, made)
        assert fields(refusal.error) == {"spec"}

    async def test_constraint_must_name_a_request_and_a_domain(self, cluster: Cluster) -> None:
        constraints = [{"requests": ["other"], "matchAttribute": "uuid"}]
        wrong = claim("x", exactly("c"), constraints=constraints)
        with refused(422, "Invalid") as refusal:
            await cluster.client.create(CLAIMS, wrong, cluster.namespace)
        path = "spec.devices.constraints[0]"
        assert fields(refusal.error) == {f"{path}.requests[0]", f"{path}.matchAttribute"}

    async def test_class_needs_valid_selectors(self, cluster: Cluster) -> None:
        spec = {"selectors": [selector("device.memory == 1")]}
        with refused(422, "Invalid") as refusal:
            await cluster.client.create(CLASSES, {"metadata": {"name": "x"}, "spec": spec})
        assert fields(refusal.error) == {"spec.selectors[0].cel.expression"}

    # -- states of a claim

    async def write(self, cluster: Cluster, status: Obj) -> Obj:
        """Replace the status of claim x; returns the claim."""
        current = await cluster.client.get(CLAIMS, "x", cluster.namespace)
        changed: Obj = await cluster.client.replace(
            CLAIMS, {**current, "status": status}, subresource="status"
        )
        return changed

    async def test_claim_is_reserved_only_while_it_is_allocated(self, cluster: Cluster) -> None:
        await cluster.client.create(CLAIMS, claim("x", exactly("c")), cluster.namespace)
        with refused(422, "Invalid") as refusal:
            await self.write(cluster, {"reservedFor": [consumer()]})
        assert fields(refusal.error) == {"status.reservedFor"}
        both = {"allocation": allocation_on("n", "gpu-0"), "reservedFor": [consumer()]}
        assert (await self.write(cluster, both))["status"]["reservedFor"]
        with refused(422, "Invalid") as refusal:
            await self.write(cluster, {"reservedFor": both["reservedFor"]})
        assert "status.reservedFor" in fields(refusal.error)

    async def test_allocation_is_not_changed_but_cleared_with_its_consumers_and_written_again(
        self, cluster: Cluster
    ) -> None:
        await cluster.client.create(CLAIMS, claim("x", exactly("c")), cluster.namespace)
        pods = [consumer()]
        await self.write(cluster, {"allocation": allocation_on("n", "gpu-0"), "reservedFor": pods})
        with refused(422, "Invalid") as refusal:
            await self.write(
                cluster, {"allocation": allocation_on("n", "gpu-1"), "reservedFor": pods}
            )
        assert fields(refusal.error) == {"status.allocation"}
        assert not (await self.write(cluster, {})).get("status")
        again = {"allocation": allocation_on("n", "gpu-1"), "reservedFor": pods}
        assert (await self.write(cluster, again))["status"] == again

    async def test_allocation_names_requests_of_the_claim(self, cluster: Cluster) -> None:
        await cluster.client.create(CLAIMS, claim("x", exactly("c")), cluster.namespace)
        with refused(422, "Invalid") as refusal:
            await self.write(cluster, {"allocation": allocation_on("n", "gpu-0", request="other")})
        assert fields(refusal.error) == {"status.allocation.devices.results[0].request"}

    async def test_status_of_devices_is_kept_only_for_allocated_ones(
        self, cluster: Cluster
    ) -> None:
        await cluster.client.create(CLAIMS, claim("x", exactly("c")), cluster.namespace)
        allocation = allocation_on("n", "gpu-0")
        (result,) = allocation["devices"]["results"]
        device = {key: result[key] for key in ("driver", "pool", "device")}
        reported = {"allocation": allocation, "devices": [{**device, "data": {"mib": 3000}}]}
        (kept,) = (await self.write(cluster, reported))["status"]["devices"]
        assert kept["data"] == {"mib": 3000}
        other = [{**device, "device": "gpu-1"}]
        with refused(422, "Invalid") as refusal:
            await self.write(cluster, {"allocation": allocation, "devices": other})
        assert fields(refusal.error) == {"status.devices[0]"}
        cleared = await self.write(cluster, {"devices": reported["devices"]})
        assert not cleared.get("status")
