# SPDX-License-Identifier: Apache-2.0
"""Random arrivals and departures of pods in both allocation modes, on one node.

Pods ask for their devices by the device plugin, by the claim of allocation mode ``dra``, or by a
claim that the user wrote; some do not fit and wait. ``run`` looks at the cluster again and again,
and in the end at the whole history of the ledger; what it returns are violations. Memory in MiB,
compute in percent.
"""

import random
from typing import Any

import anyio
import msgspec
from nats.js.api import ConsumerConfig, DeliverPolicy

from hami_common.bus import subjects
from hami_common.dra.claims import ResourceClaim
from hami_common.dra.names import DRIVER
from hami_common.errors import HamiError, WireInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import decode
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods import annotations, limits
from hami_sim.cluster import Cluster
from tests.support.checker import (
    at_every_instant,
    claim_problems,
    inventory_of,
    ledger_of,
    over_capacity,
    problems_of,
)

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
ALIVE_MOST = 60
LOOK_EVERY = 25
"""Steps between two looks at the cluster."""
SETTLE_S = 30.0
WAYS = ("device-plugin", "dra", "claim")
Document = dict[str, Any]


def pod(name: str, way: str, amounts: Document) -> Document:
    """A pod that prints its limits and sleeps."""
    container: Document = {
        "name": "main",
        "image": "app",
        "command": ["sh", "-c", "cat /etc/hami/limits; exec sleep 100000"],
    }
    metadata: Document = {"name": name}
    spec: Document = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    if way == "claim":
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": name}]
        container["resources"] = {"claims": [{"name": "gpu", "request": "main"}]}
    else:
        metadata["annotations"] = {annotations.ALLOCATION_MODE: way}
        container["resources"] = {
            "limits": {f"nvidia.com/{key}": str(value) for key, value in amounts.items()}
        }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def claim(name: str, amounts: Document) -> Document:
    """A claim that a user would write for the same share."""
    exactly = {
        "deviceClassName": "hami-share",
        "count": amounts["gpu"],
        "selectors": [{"cel": {"expression": f'device.attributes["{DRIVER}"].vendor == "nvidia"'}}],
        "capacity": {
            "requests": {"memory": f"{amounts['gpumem']}Mi", "cores": str(amounts["gpucores"])}
        },
    }
    return {
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "main", "exactly": exactly}]}},
    }


async def claims_of(cluster: Cluster) -> list[ResourceClaim]:
    """Return the claims of the pods' namespace."""
    items = (await cluster.request("GET", CLAIMS))["items"]
    return [msgspec.convert(item, ResourceClaim) for item in items]


class Churn:
    """Pods that come and go on one cluster."""

    def __init__(self, cluster: Cluster, *, seed: int) -> None:
        """``seed`` fixes sizes, ways and the order of arrivals and departures."""
        self._cluster = cluster
        self._chance = random.Random(seed)
        self._alive: dict[str, str] = {}
        """Way of each pod that exists, by name."""
        self.ran: dict[str, int] = dict.fromkeys(WAYS, 0)
        """Pods seen running, by way."""
        self._seen: set[str] = set()

    async def run(self, arrivals: int) -> list[str]:
        """Create and delete pods; returns the violations."""
        problems: list[str] = []
        count = steps = 0
        while count < arrivals:
            steps += 1
            if self._chance.random() < len(self._alive) / ALIVE_MOST:
                await self._delete(self._chance.choice(sorted(self._alive)))
            else:
                await self._create(f"pod-{count}")
                count += 1
            if steps % LOOK_EVERY == 0:
                problems += await self._look()
        problems += await self._settled()
        problems += await self._look()
        problems += [
            f"no pod by {way} was seen running" for way, seen in self.ran.items() if not seen
        ]
        for name in sorted(self._alive):
            await self._delete(name)
        await self._cluster.until("nothing is held", self._is_empty, limit_s=SETTLE_S)
        history = await self._history()
        problems += at_every_instant(history, await inventory_of(self._cluster))
        return problems

    async def _create(self, name: str) -> None:
        chance = self._chance
        way = chance.choice(WAYS)
        amounts = {
            "gpu": chance.choice((1, 1, 1, 2)),
            "gpumem": chance.choice((500, 2000, 5000, 12000, 30000)),
            "gpucores": chance.choice((0, 5, 20, 50)),
        }
        if way == "claim":
            await self._cluster.create(CLAIMS, claim(name, amounts))
        await self._cluster.create_pod(pod(name, way, amounts))
        self._alive[name] = way

    async def _delete(self, name: str) -> None:
        await self._cluster.delete_pod(name)
        if self._alive.pop(name) == "claim":
            await self._cluster.request("DELETE", f"{CLAIMS}/{name}")

    async def _look(self) -> list[str]:
        """Return devices of which the containers that run now were given too much."""
        before = await self._running()
        given = [shares for name in before if (shares := await self._given(name))]
        after = await self._running()
        at_once = [shares for name, shares in given if before[name] == after.get(name)]
        for name, _ in given:
            if name not in self._seen:
                self._seen.add(name)
                self.ran[self._alive.get(name, WAYS[0])] += 1
        return over_capacity(at_once, await inventory_of(self._cluster))

    async def _running(self) -> dict[str, str]:
        """UIDs of the pods that run and are not being deleted, by name."""
        return {
            one.metadata.name: one.metadata.uid
            for one in await self._cluster.pods()
            if one.status.phase == "Running" and one.metadata.deletion_timestamp is None
        }

    async def _given(self, name: str) -> tuple[str, tuple[ContainerShares, ...]] | None:
        """Return the shares by the limits that the container printed."""
        try:
            found = limits.decode(await self._cluster.container_log(name, "main"))
        except (HamiError, WireInvalid):  # gone meanwhile, or not printed yet
            return None
        shares = tuple(
            Share(
                vendor=one.vendor,
                uuid=one.uuid,
                memory_mib=one.memory_mib,
                core_pct=one.core_pct,
                exclusive=one.exclusive,
            )
            for one in found.devices
        )
        return name, (ContainerShares(name="main", kind="app", shares=shares),)

    async def _settled(self) -> list[str]:
        """Return what ledger, pods and claims disagree about once they had time to agree."""
        problems = ["not looked yet"]
        with anyio.move_on_after(SETTLE_S):
            while problems:
                problems = await self._disagreements()
                if problems:
                    await anyio.sleep(0.2)
        return problems

    async def _disagreements(self) -> list[str]:
        cluster = self._cluster
        problems = await problems_of(cluster, cluster.verifier(), namespace="default")
        live = [one for one in (await ledger_of(cluster)).values() if one.op != "release"]
        return problems + claim_problems(
            await claims_of(cluster), live, await inventory_of(cluster)
        )

    async def _is_empty(self) -> bool:
        records = (await ledger_of(self._cluster)).values()
        return (
            all(one.op == "release" for one in records)
            and not await claims_of(self._cluster)
            and not list(self._cluster.cdi_directory.iterdir())
        )

    async def _history(self) -> list[AllocationRecord]:
        """Return all records of the ledger, in the order of the stream."""
        stream = self._cluster.bus.jetstream()
        subject = f"{subjects.EVENT_PREFIX}.allocation.>"
        info = await stream.stream_info(subjects.EVENTS_STREAM, subjects_filter=subject)
        total = sum((info.state.subjects or {}).values())
        subscription = await stream.subscribe(
            subject,
            stream=subjects.EVENTS_STREAM,
            ordered_consumer=True,
            config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL),
        )
        found = []
        for _ in range(total):
            message = await subscription.next_msg(timeout=SETTLE_S)
            found.append(decode(message.data, AllocationRecord, what=message.subject))
        await subscription.unsubscribe()
        return found
