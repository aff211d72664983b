# SPDX-License-Identifier: Apache-2.0
"""Devices allocated to ResourceClaims are booked if they fit, and released when they end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.dra.claims import UNPREPARED
from hami_common.dra.names import BOOKED, DRIVER, device_name, pool_name
from hami_common.errors import Denied, HamiError, NotFound, RequestInvalid, Unavailable
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, ReportedState, StateRecord
from hami_common.events.asking import ShareNow, UsageAnswer
from hami_common.ports import WatchEvent
from hami_core.planning.resizing import ResizeRequest
from hami_scheduler.settings import DraSettings
from tests.support import claims
from tests.support.claims import result
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.fakekube import FakeKube
from tests.unit.scheduler.shell.world import Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

DRA = DraSettings(enabled=True)
GPU = "GPU-n1-0"
Obj = dict[str, Any]


@asynccontextmanager
async def running_world(
    *, world: World | None = None, dra: DraSettings = DRA, **settings: Any
) -> AsyncIterator[tuple[World, Running]]:
    """One scheduler, and node n1 with one device of 16,000 MiB."""
    if world is None:
        world = World()
        await world.add_devices(builders.devices("n1"))
    async with world.scheduler(dra=dra, **settings) as running:
        await world.advance(7, "n1")
        yield world, running


def put(world: World, name: str, *results: Obj, **more: Any) -> None:
    world.kube.put(claims.path(name), claims.claim(name, *results, **more))


def booked(world: World) -> dict[str, int]:
    """MiB by name of each live record."""
    return {
        record.pod: sum(s.memory_mib for one in record.containers for s in one.shares)
        for record in world.live()
    }


def events(world: World) -> list[tuple[str, str]]:
    return [(one["involvedObject"]["name"], one["reason"]) for one in world.kube.events]


async def report(
    world: World, record: AllocationRecord, state: ReportedState, code: str = ""
) -> None:
    await world.report_state(
        StateRecord(
            state=state,
            code=code,
            allocation_id=record.allocation_id,
            node=record.node,
            pod_uid=record.pod_uid,
            namespace=record.namespace,
            pod=record.pod,
            ledger_seq=1,
        )
    )


async def test_allocation_is_booked_under_the_claim_and_confirmed() -> None:
    async with running_world() as (world, running):
        put(world, "c", result(GPU, memory="3Gi", cores="20", request="main/large"))
        await world.advance(7, "n1")
        (record,) = world.live()
        assert (record.node, record.pod_uid, record.pod) == ("n1", "uid-c", "c")
        assert (record.origin, record.held_for, record.op) == ("claim", "", "reserve")
        (container,) = record.containers
        assert container.name == "main"
        (share,) = container.shares
        assert (share.uuid, share.memory_mib, share.core_pct) == (GPU, 3072, 20)
        assert [state.state for state in world.states().values()] == ["bound"]
        assert not world.kube.events
        before = world.records()
        await world.advance(100, "n1")
        assert world.records() == before
        assert running.value("hami_scheduler_claims_total", outcome="booked") == 1


async def test_without_the_setting_no_claim_is_followed() -> None:
    async with running_world(dra=DraSettings()) as (world, _):
        put(world, "c", result(GPU))
        await world.advance(14, "n1")
        assert not world.live()


async def test_claim_that_does_not_fit_gets_an_event_and_is_booked_when_a_pod_ended() -> None:
    async with running_world() as (world, running):
        pod = world.add_pod(builders.pod("p", mem_mib=10_000))
        assert await running.bind(pod, "n1") == ""
        put(world, "c", result(GPU, memory="8000Mi"))
        await world.advance(35, "n1")
        assert booked(world) == {"p": 10_000}
        (event,) = world.kube.events
        assert event["reason"] == "CardInsufficientMemory"
        assert event["message"].startswith(f"CardInsufficientMemory: device {GPU}: ")
        (decision,) = [one for one in world.decisions() if one.pod == "c"]
        assert (decision.verdict, decision.error) == ("refused", event["message"])
        assert event["involvedObject"]["kind"] == "ResourceClaim"
        assert event["involvedObject"]["apiVersion"] == "resource.k8s.io/v1"
        world.kube.remove(pod_path(pod))
        await world.advance(14, "n1")
        assert booked(world) == {"c": 8000}
        assert len(world.kube.events) == 1


def conditions(world: World, name: str) -> list[tuple[str, str]]:
    """(status, reason) of the conditions of the claim's devices."""
    devices = world.kube.objects[claims.path(name)]["status"].get("devices", [])
    return [
        (one["status"], one["reason"])
        for device in devices
        for one in device.get("conditions", [])
        if one["type"] == BOOKED
    ]


async def test_refusal_is_a_condition_of_the_device_until_the_claim_is_booked() -> None:
    async with running_world() as (world, running):
        pod = world.add_pod(builders.pod("p", mem_mib=10_000))
        assert await running.bind(pod, "n1") == ""
        put(world, "c", result(GPU, memory="8000Mi"))
        put(world, "fits", result(GPU, memory="1000Mi"))
        await world.advance(35, "n1")
        (device,) = world.kube.objects[claims.path("c")]["status"]["devices"]
        identity = {key: device[key] for key in ("driver", "pool", "device", "shareID")}
        allocated = result(GPU)
        assert identity == {key: allocated[key] for key in identity}
        (condition,) = device["conditions"]
        assert condition.pop("lastTransitionTime").endswith("Z")
        assert condition == {
            "type": "hami.io/Booked",
            "status": "False",
            "reason": "CardInsufficientMemory",
            "message": world.kube.events[0]["message"],
        }
        version = world.kube.objects[claims.path("c")]["metadata"]["resourceVersion"]
        await world.advance(35, "n1")
        assert world.kube.objects[claims.path("c")]["metadata"]["resourceVersion"] == version
        world.kube.remove(pod_path(pod))
        await world.advance(14, "n1")
        assert conditions(world, "c") == [("True", "Booked")]
        assert conditions(world, "fits") == []


async def test_two_schedulers_report_a_refusal_once() -> None:
    async with running_world() as (world, first), world.scheduler("s2", dra=DRA) as second:
        for number in range(10):
            put(world, f"c{number}", result(GPU, memory="9000Mi"))
        await world.advance(35, "n1")
        assert len(booked(world)) == 1
        assert sorted(events(world)) == [
            (f"c{number}", "CardInsufficientMemory")
            for number in range(10)
            if f"c{number}" not in booked(world)
        ]
        refused = [
            s.value("hami_scheduler_claims_total", outcome="refused") for s in (first, second)
        ]
        assert sum(refused) == 9
        assert len([one for one in world.decisions() if one.verdict == "refused"]) == 9


async def test_restarted_scheduler_repeats_no_refusal_and_withdraws_an_old_one() -> None:
    async with running_world() as (world, _):
        put(world, "c", result(GPU, memory="17000Mi"))
        put(world, "d", result(GPU, memory="1000Mi"))
        await world.advance(7, "n1")
    assert conditions(world, "c") == [("False", "CardInsufficientMemory")]
    stale = {"type": BOOKED, "status": "False", "reason": "CardInsufficientCore"}
    put(world, "d", result(GPU, memory="1000Mi"))
    entry = {key: result(GPU)[key] for key in ("driver", "pool", "device", "shareID")}
    world.kube.change(claims.path("d"), status={"devices": [{**entry, "conditions": [stale]}]})
    async with running_world(world=world) as (_, running):
        await world.advance(14, "n1")
        assert conditions(world, "d") == [("True", "Booked")]
        assert len(world.kube.events) == 1
        assert running.value("hami_scheduler_claims_total", outcome="refused") == 0


async def test_status_of_another_drivers_device_is_kept() -> None:
    async with running_world() as (world, _):
        other = {"driver": "nic.example.com", "pool": "n1", "device": "eth0"}
        put(world, "c", result(GPU, memory="17000Mi"), {**other, "request": "nic"})
        ip = {**other, "networkData": {"ips": ["10.0.0.1/24"]}}
        world.kube.change(claims.path("c"), status={"devices": [ip]})
        await world.advance(14, "n1")
        devices = world.kube.objects[claims.path("c")]["status"]["devices"]
        assert devices[0] == ip
        assert [one["driver"] for one in devices[1:]] == [DRIVER]
        assert conditions(world, "c") == [("False", "CardInsufficientMemory")]


async def test_scheduler_without_the_right_to_write_conditions_reports_by_events() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))

    async def refuse(*_: Any, **__: Any) -> bytes:
        raise Denied(peer="API server", detail="Forbidden", status=403)

    world.kube.patch = refuse  # type: ignore[method-assign] # as without the rule
    async with running_world(world=world) as (_, running):
        put(world, "c", result(GPU, memory="17000Mi"))
        await world.advance(35, "n1")
        assert events(world) == [("c", "CardInsufficientMemory")]
        assert running.value("hami_scheduler_claims_total", outcome="refused") == 1


async def test_pod_does_not_get_what_a_claim_holds() -> None:
    async with running_world() as (world, running):
        put(world, "c", result(GPU, memory="12000Mi"))
        await world.advance(7, "n1")
        pod = world.add_pod(builders.pod("p", mem_mib=6000, annotated={}))
        assert "CardInsufficientMemory" in await running.bind(pod, "n1")
        world.check(builders.devices("n1"))


async def test_whole_device_excludes_all_others() -> None:
    async with running_world() as (world, _):
        put(world, "c", result(GPU, memory="16000Mi", cores="0"))
        await world.advance(7, "n1")
        put(world, "d", result(GPU, memory="1Mi", cores="0"))
        await world.advance(7, "n1")
        assert booked(world) == {"c": 16_000}
        assert events(world) == [("d", "ExclusiveDeviceAllocateConflict")]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (result("GPU-unknown"), "AllocationInvalid"),
        (result(GPU, pool="elsewhere"), "AllocationInvalid"),
        (result(GPU, consumedCapacity=None), "AllocationInvalid"),
    ],
)
async def test_allocation_that_is_no_share_gets_an_event(wrong: Obj, reason: str) -> None:
    async with running_world() as (world, _):
        put(world, "c", wrong)
        await world.advance(70, "n1")
        assert not world.live()
        assert events(world) == [("c", reason)]


async def test_device_that_appears_later_is_booked_then() -> None:
    async with running_world() as (world, _):
        put(world, "c", result("GPU-n2-0", "n2"))
        await world.advance(7, "n1")
        assert not world.live()
        await world.add_devices(builders.devices("n2"))
        await world.advance(14, "n1", "n2")
        assert booked(world) == {"c": 1000}


async def test_claim_is_released_when_deleted_and_when_deallocated() -> None:
    async with running_world() as (world, running):
        for name in ("deleted", "deallocated"):
            put(world, name, result(GPU))
        await world.advance(7, "n1")
        assert booked(world) == {"deleted": 1000, "deallocated": 1000}
        world.kube.remove(claims.path("deleted"))
        put(world, "deallocated")
        await world.advance(7, "n1")
        assert not world.live()
        for cause in ("claim-gone", "claim-deallocated"):
            assert running.value("hami_scheduler_releases_total", cause=cause) == 1


async def test_another_allocation_of_a_claim_replaces_the_first() -> None:
    async with running_world() as (world, _):
        put(world, "c", result(GPU, memory="9000Mi"))
        await world.advance(7, "n1")
        put(world, "c", result(GPU, memory="10000Mi"), at="2026-01-01T00:00:09Z")
        await world.advance(7, "n1")
        assert booked(world) == {"c": 10_000}
        assert not world.kube.events
        ops = [one.op for one in log(world)]
        assert ops == ["reserve", "release", "reserve"]


async def test_record_stays_until_the_node_has_unprepared_the_claim() -> None:
    async with running_world() as (world, _):
        put(world, "c", result(GPU))
        await world.advance(7, "n1")
        (record,) = world.live()
        await report(world, record, "prepared")
        put(world, "c")
        await world.advance(14, "n1")
        assert booked(world) == {"c": 1000}
        await report(world, record, "prepared", UNPREPARED)
        await world.advance(7, "n1")
        assert not world.live()


async def test_node_that_never_unprepares_is_not_waited_for_longer_than_the_limit() -> None:
    async with running_world(dra=DraSettings(enabled=True, unprepare_wait_s=40.0)) as (world, _):
        put(world, "c", result(GPU))
        await world.advance(7, "n1")
        (record,) = world.live()
        await report(world, record, "prepared")
        world.kube.remove(claims.path("c"))
        await world.advance(28, "n1")
        assert booked(world) == {"c": 1000}
        await world.advance(28, "n1")
        assert not world.live()


async def test_stale_watch_releases_nothing_that_the_api_server_still_has() -> None:
    async with running_world() as (world, running):
        put(world, "c", result(GPU))
        await world.advance(7, "n1")
        running.scheduler.claims._claims.clear()  # noqa: SLF001 - as a watch that missed the claim
        await world.advance(14, "n1")
        assert booked(world) == {"c": 1000}


async def test_replica_whose_watch_lags_does_not_book_a_released_claim_again() -> None:
    async with running_world() as (world, running):
        put(world, "c", result(GPU))
        await world.advance(7, "n1")
        stale = dict(running.scheduler.claims._claims)  # noqa: SLF001 - as a watch that lags
        put(world, "c")
        await world.advance(7, "n1")
        assert not world.live()
        before = world.records()
        running.scheduler.claims._claims = stale  # noqa: SLF001 - see above
        await world.advance(14, "n1")
        assert world.records() == before


async def test_two_schedulers_book_each_claim_once() -> None:
    async with running_world() as (world, _), world.scheduler("s2", dra=DRA):
        for number in range(30):
            put(world, f"c{number:02}", result(GPU, memory="1000Mi", cores="1"))
        await world.advance(21, "n1")
        assert sum(booked(world).values()) == 16_000
        reserved = [one.pod_uid for one in log(world) if one.op == "reserve"]
        assert len(reserved) == len(set(reserved)) == 16
        world.check(builders.devices("n1"))


async def test_quota_of_the_namespace_holds_for_claims_too() -> None:
    async with running_world() as (world, _):
        hard = {"limits.nvidia.com/gpumem": "2500"}
        world.kube.put(
            "/api/v1/namespaces/default/resourcequotas/q",
            {"metadata": {"name": "q", "namespace": "default"}, "spec": {"hard": hard}},
        )
        for number in range(4):
            put(world, f"c{number}", result(GPU))
        await world.advance(14, "n1")
        assert booked(world) == {"c0": 1000, "c1": 1000}
        assert events(world) == [("c2", "ResourceQuotaNotFit"), ("c3", "ResourceQuotaNotFit")]
        put(world, "c0")
        await world.advance(14, "n1")
        assert booked(world) == {"c1": 1000, "c2": 1000}


async def test_lost_ledger_is_rebuilt_with_the_amounts_of_a_resize() -> None:
    async with running_world() as (world, _):
        put(world, "c", result(GPU, memory="3000Mi", cores="10"), reserved_for=["p"])
        shares = {"driver": DRIVER, "pool": pool_name("n1"), "device": device_name(GPU)}
        entry = {
            **shares,
            "shareID": f"share-of-{GPU}",
            "data": {"memory": "5000Mi", "cores": "40"},
        }
        status = world.kube.objects[claims.path("c")]["status"]
        world.kube.change(claims.path("c"), status={**status, "devices": [entry]})
        pod = builders.pod("p", gpu=None, managed=False)
        pod["spec"]["nodeName"], pod["status"]["phase"] = "n1", "Running"
        world.add_pod(pod)
        world.bus.wipe()
        await world.add_devices(builders.devices("n1"))
        await world.advance(70, "n1")
        (share,) = world.live()[0].containers[0].shares
        assert (share.memory_mib, share.core_pct) == (5000, 40)
        assert world.kube.objects[claims.path("c")]["status"]["devices"] == [entry]


async def test_lost_ledger_is_rebuilt_from_claims_in_use_before_others_are_booked() -> None:
    async with running_world() as (world, _):
        put(world, "used", result(GPU, memory="9000Mi"), reserved_for=["p"])
        await world.advance(7, "n1")
        before = world.live()
        # Allocated earlier and refused since: it must not win after the ledger was lost.
        put(world, "early", result(GPU, memory="9000Mi"), at="2025-01-01T00:00:00Z")
        pod = builders.pod("p", gpu=None, managed=False)
        pod["spec"]["nodeName"], pod["status"]["phase"] = "n1", "Running"
        world.add_pod(pod)
        await world.advance(7, "n1")
        world.bus.wipe()
        await world.add_devices(builders.devices("n1"))
        await world.advance(70, "n1")
        assert [contents(one) for one in world.live()] == [contents(one) for one in before]
        assert {state.state for state in world.states().values()} == {"bound"}


def contents(record: AllocationRecord) -> tuple[object, ...]:
    return record.allocation_id, record.node, record.pod_uid, record.containers, record.origin


async def test_scheduler_killed_after_the_append_confirms_after_its_start() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    async with world.scheduler(dra=DRA) as first:

        async def fail() -> None:
            raise Unavailable(peer="NATS", detail="cut off")

        for number in range(200):
            first.seen.before[number] = fail if number % 2 else _nothing
        put(world, "c", result(GPU))
        await world.advance(7, "n1")
    async with running_world(world=world):
        await world.advance(7, "n1")
        assert booked(world) == {"c": 1000}
        await world.advance(42, "n1")
        assert [state.state for state in world.states().values()] == ["bound"]


async def _nothing() -> None:
    return None


class WithoutClaims(FakeKube):
    """A cluster older than Dynamic Resource Allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.has_claims = False

    @asynccontextmanager
    async def list_watch(
        self, path: str, *, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        if path.endswith("/resourceclaims") and not self.has_claims:
            raise NotFound(what=path)
        async with super().list_watch(
            path, label_selector=label_selector, field_selector=field_selector
        ) as found:
            yield found


async def test_cluster_without_claims_is_served_and_asked_again() -> None:
    world = World()
    world.kube = kube = WithoutClaims()
    await world.add_devices(builders.devices("n1"))
    async with running_world(world=world) as (_, running):
        pod = world.add_pod(builders.pod("p"))
        assert await running.bind(pod, "n1") == ""
        put(world, "c", result(GPU))
        kube.has_claims = True
        await world.advance(21, "n1")
        assert booked(world) == {"p": 1000, "c": 1000}


async def test_unreadable_claim_is_quarantined_and_others_are_booked() -> None:
    async with running_world() as (world, running):
        broken = claims.claim("broken", result(GPU))
        broken["status"]["allocation"]["devices"]["results"] = "none"
        world.kube.put(claims.path("broken"), broken)
        put(world, "c", result(GPU))
        await world.advance(7, "n1")
        assert booked(world) == {"c": 1000}
        entry = running.state.quarantine.get("claim", "uid-broken")
        assert entry is not None
        assert "results" in entry.problem


async def test_comparison_with_the_pods_leaves_claims_alone() -> None:
    async with running_world(reconcile_s=7.0) as (world, _):
        put(world, "c", result(GPU))
        await world.advance(70, "n1")
        assert booked(world) == {"c": 1000}


async def test_records_of_claims_are_settled_while_claims_are_not_followed() -> None:
    async with running_world() as (world, _):
        for name in ("kept", "gone"):
            put(world, name, result(GPU))
        await world.advance(7, "n1")
    world.kube.remove(claims.path("gone"))
    async with running_world(world=world, dra=DraSettings(), reconcile_s=7.0):
        await world.advance(14, "n1")
        assert booked(world) == {"kept": 1000}


async def test_claim_is_not_evicted_for_a_pod() -> None:
    async with running_world() as (world, running):
        put(world, "c", result(GPU, memory="12000Mi"))
        await world.advance(7, "n1")
        pod = builders.pod("urgent", mem_mib=6000)
        pod["spec"]["priority"] = 1_000_000
        world.add_pod(pod)
        await running.filter(pod, ["n1"])
        await world.advance(14, "n1")
        assert world.kube.evictions == []
        assert booked(world) == {"c": 12_000}


async def test_claim_on_a_node_without_heartbeats_is_booked_once_they_return() -> None:
    async with running_world() as (world, _):
        await world.advance(21)
        put(world, "c", result(GPU))
        await world.advance(7)
        assert booked(world) == {}
        assert [name for name, _ in events(world)] == ["c"]
        await world.advance(14, "n1")
        assert booked(world) == {"c": 1000}


class Agent:
    """The node agent as a resize asks it: claim ``c`` is used by two containers of one request."""

    def __init__(self, world: World, *, used_mib: int = 0) -> None:
        self._world = world
        self.used_mib = used_mib
        self.is_following = True
        self.seen: list[tuple[int, int]] = []
        """(booked, limit) of each question, in MiB."""

    async def ask(self, subject: str) -> bytes:
        (record,) = self._world.live()
        (booked_share,) = record.containers[0].shares
        (share,) = (record.limits or record.containers)[0].shares
        self.seen.append((booked_share.memory_mib, share.memory_mib))
        users = [
            ShareNow(
                namespace="default",
                pod=pod,
                pod_uid=f"uid-{pod}",
                container="main",
                vendor="nvidia",
                uuid=share.uuid,
                memory_mib=booked_share.memory_mib,
                used_mib=self.used_mib,
                file_mib=share.memory_mib if self.is_following else 1,
                file_core_pct=share.core_pct,
                owner_uid="uid-c",
                owner_container="gpu",
            )
            for pod in ("a", "b")
        ]
        return codec.encode(UsageAnswer(node="n1", time_s=0.0, shares=tuple(users)))


@asynccontextmanager
async def prepared_claim(
    monkeypatch: pytest.MonkeyPatch, **agent: Any
) -> AsyncIterator[tuple[World, Running, Agent]]:
    """Claim ``c`` with 3000 MiB and 10 % of a device, prepared on its node."""
    async with running_world(reconcile_s=7.0) as (world, running):
        put(world, "c", result(GPU, memory="3000Mi", cores="10", shareID="s"))
        await world.advance(7, "n1")
        (record,) = world.live()
        await report(world, record, "prepared")
        asked = Agent(world, **agent)
        monkeypatch.setattr(running.scheduler.resizer, "_ask", asked.ask)
        yield world, running, asked


def shown(world: World) -> list[Obj]:
    """``status.devices`` of claim ``c``."""
    status: Obj = world.kube.objects[claims.path("c")]["status"]
    return list(status.get("devices") or ())


async def test_claim_is_resized_in_both_directions_and_shows_its_amounts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with prepared_claim(monkeypatch) as (world, running, agent):
        before = world.live()[0].allocation_id
        wish = ResizeRequest(namespace="default", claim="c", memory_mib=5000, core_pct=40)
        done = await running.scheduler.resizer.resize(wish)
        assert (done.pod, done.container.name, done.in_force) == ("c", "gpu", True)
        assert booked(world) == {"c": 5000}
        await world.advance(7, "n1")
        (entry,) = shown(world)
        assert entry["data"] == {"memory": "5000Mi", "cores": "40"}
        assert (entry["driver"], entry["shareID"]) == ("gpu.hami.io", "s")
        agent.seen.clear()
        less = ResizeRequest(namespace="default", claim="c", container="gpu", memory_mib=2000)
        assert (await running.scheduler.resizer.resize(less)).in_force
        assert agent.seen[-1] == (5000, 2000)  # capacity is freed once the limits have shrunk
        assert booked(world) == {"c": 2000}
        await world.advance(30, "n1")
        assert shown(world)[0]["data"] == {"memory": "2000Mi", "cores": "40"}
        assert booked(world) == {"c": 2000}
        assert world.live()[0].allocation_id == before
        assert not world.live()[0].limits


async def test_shrink_of_a_claim_that_its_node_does_not_apply_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with prepared_claim(monkeypatch) as (world, running, agent):
        agent.is_following = False
        wish = ResizeRequest(namespace="default", claim="c", memory_mib=1000)
        refused: list[HamiError] = []

        async def resize() -> None:
            try:
                await running.scheduler.resizer.resize(wish)
            except HamiError as error:
                refused.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(resize)
            await world.advance(30, "n1")
        assert "did not change" in str(refused[0])
        (record,) = world.live()
        assert (booked(world), record.limits) == ({"c": 3000}, ())


async def test_shrink_of_a_claim_whose_scheduler_was_killed_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with prepared_claim(monkeypatch) as (world, running, agent):
        agent.is_following = False
        wish = ResizeRequest(namespace="default", claim="c", memory_mib=1000)
        async with anyio.create_task_group() as group:
            group.start_soon(running.scheduler.resizer.resize, wish)
            await quiet()
            group.cancel_scope.cancel()
        assert world.live()[0].limits[0].shares[0].memory_mib == 1000
        assert booked(world) == {"c": 3000}
        await world.advance(200, "n1")
        (record,) = world.live()
        assert (booked(world), record.limits) == ({"c": 3000}, ())


async def test_resize_of_a_claim_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with prepared_claim(monkeypatch, used_mib=2500) as (world, running, _):
        resize = running.scheduler.resizer.resize
        for wish, says in (
            (ResizeRequest(namespace="default", pod="c", memory_mib=1), "name it as claim"),
            (ResizeRequest(namespace="default", memory_mib=1), "name either of them"),
            (ResizeRequest(namespace="default", claim="none", memory_mib=1), "claim default/none"),
            (
                ResizeRequest(namespace="default", claim="c", container="x", memory_mib=1),
                "'x' has no share",
            ),
            (ResizeRequest(namespace="default", claim="c", memory_mib=2000), "uses 2500 MiB"),
            (ResizeRequest(namespace="default", claim="c", memory_mib=90_000), "do not fit"),
        ):
            with pytest.raises(HamiError, match=says):
                await resize(wish)
        assert booked(world) == {"c": 3000}
        (record,) = world.live()
        await report(world, record, "prepared", code="unprepared")
        with pytest.raises(RequestInvalid, match="not prepared"):
            await resize(ResizeRequest(namespace="default", claim="c", memory_mib=4000))


def log(world: World) -> list[AllocationRecord]:
    """Every record, in stream order."""
    entries = sorted(
        world.bus.stream(subjects.ALLOC_BUCKET).after(">", 0), key=lambda entry: entry.revision
    )
    return [codec.decode(one.value, AllocationRecord, what=one.key) for one in entries]
