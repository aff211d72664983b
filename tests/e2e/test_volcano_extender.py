# SPDX-License-Identifier: Apache-2.0
"""Volcano's scheduler 1.14.1 with its plugin ``extender``, on a real control plane.

The shipped manifests and the shipped configuration of Volcano's scheduler. One node has devices of
Hygon, which no plugin of Volcano knows, one has NVIDIA's. One installation serves all tests. Memory
in MiB.
"""

import re
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from hami_common.events.allocation import AllocationRecord
from hami_common.pods import annotations as keys
from hami_common.pods import limits
from hami_scheduler.shell.volcano import PREFIX
from hami_sim import demo_mixed
from hami_sim.cluster import NodeSpec
from hami_sim.kubernetes.pki import HOST
from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.e2e.test_other_schedulers import COMPONENT
from tests.e2e.test_volcano import LIMIT_S, NAMESPACE, Site, over_capacity_ever, pod, shows
from tests.support.checker import ledger_of
from tests.support.installed import OVERLAYS, SPEC, Installed, run_installed
from tests.support.kustomize import overlay
from tests.support.volcano import API, NAME, USER, Volcano, volcano_or_skip

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.volcano,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

DCU, GPU = "dcu", "gpu-b"
COMPONENTS: Final = COMPONENT.parent
CONF: Final = COMPONENTS / "volcano-extender" / "volcano-scheduler.conf"
CARDS: Final = 4
LEASE_S: Final = 4
Obj = dict[str, Any]


def dcu(memory_mib: int) -> dict[str, int | str]:
    """Limits of a container with a share of one of Hygon's cards, which have 65,520 MiB."""
    return {"hygon.com/dcunum": 1, "hygon.com/dcumem": memory_mib, "hygon.com/dcucores": 10}


def whole(cards: int) -> dict[str, int | str]:
    return {"hygon.com/dcunum": cards}


def gpu(memory_mib: int) -> dict[str, int | str]:
    return {"nvidia.com/gpu": 1, "nvidia.com/gpumem": memory_mib, "nvidia.com/gpucores": 10}


def write_overlay(directory: Path) -> Path:
    example = yaml.safe_load((COMPONENT / "example.yaml").read_text())
    example["data"] = {"schedulers": NAME, "binders": USER}
    names = directory / "other-schedulers.yaml"
    names.write_text(yaml.safe_dump(example))
    listed = ("hygon", "bind-admission", "advertise-amounts", "volcano-extender")
    components = [COMPONENTS / name for name in listed]
    return overlay(directory / "mine", OVERLAYS / "dev", components, files=[names])


def configuration(port: int) -> str:
    """The shipped one, with the port of this installation."""
    text = CONF.read_text()
    shipped = f"http://hami-volcano-extender.hami-system.svc:9397{PREFIX}"
    assert shipped in text
    return text.replace(shipped, f"http://{HOST}:{port}{PREFIX}")


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    programs = volcano_or_skip()
    folder = tmp_path_factory.mktemp("x")  # sockets of a node: 107 bytes at most
    port = free_port()
    scheduler = {
        **SPEC.settings["scheduler"],
        "lease_s": str(LEASE_S),
        "fence_delay_s": "0.5",
        "volcano_extender.lease_s": str(LEASE_S),
        "volcano_extender.port": str(port),
    }
    nodes = (NodeSpec(name=DCU, profile="4xK100AI"), NodeSpec(name=GPU, profile="2xA30"))
    settings = {**SPEC.settings, "scheduler": scheduler}
    spec = msgspec.structs.replace(
        SPEC, nodes=nodes, settings=settings, pretended_paths=demo_mixed.PRETENDED
    )
    async with run_installed(folder / "s", spec, overlay=write_overlay(folder)) as installed:
        volcano = Volcano(installed, programs, configuration(port))
        await volcano.start()
        yield Site(installed, volcano)
        await volcano.process.stop()


@pytest.fixture(autouse=True)
async def cleared(site: Site) -> AsyncIterator[None]:
    yield
    await site.clear()


async def check_limits(site: Site) -> None:
    """Ledger and containers have the same devices."""
    records = await site.records()
    for one in (await site.documents()).values():
        record = records[one["metadata"]["uid"]]
        assert one["spec"]["nodeName"] == record.node
        for container in record.containers:
            given = limits.decode(one["metadata"]["annotations"][keys.limits(container.name)])
            assert [(d.uuid, d.memory_mib) for d in given.devices] == [
                (s.uuid, s.memory_mib) for s in container.shares
            ]


async def held(installed: Installed) -> list[AllocationRecord]:
    """Reservations of sessions, read from the bus alone."""
    records = (await ledger_of(installed)).values()
    return [one for one in records if one.op != "release" and one.held_for.startswith("volcano ")]


def scheduler_log(site: Site, text: str) -> int:
    """Number of lines of our scheduler with a text."""
    log: Path = site.installed.processes["scheduler"].log
    return log.read_text(errors="replace").count(text)


async def test_pods_of_two_vendors_are_placed_and_limited(site: Site) -> None:
    await site.volcano.group("two", members=1)
    wanted = {"d1": dcu(30_000), "d2": whole(2), "g1": gpu(4_000)}
    for name, amounts in wanted.items():
        await site.create(pod(name, amounts, group="two"))
    await site.until_running(*wanted)
    assert await site.bound() == {"d1": DCU, "d2": DCU, "g1": GPU}
    await site.until("d1 shows its limit", partial(shows, site, "d1", "30000"))
    await check_limits(site)
    await site.until_agreed()
    assert scheduler_log(site, '"filter"') >= len(wanted)


async def test_port_serves_no_other_operation_of_the_scheduler(site: Site) -> None:
    port = site.installed.spec.settings["scheduler"]["volcano_extender.port"]
    for path in ("/filter", "/bind", "/preempt", "/v1/resize", "/v1/snapshot", "/bindings"):
        async with site.installed.session.post(f"http://{HOST}:{port}{path}", data=b"{}") as told:
            assert told.status == HTTPStatus.NOT_FOUND, path


async def test_pod_that_fits_by_sums_but_on_no_device_waits_with_the_reason(site: Site) -> None:
    await site.volcano.group("sums", members=1)
    names = [f"s{number}" for number in range(CARDS)]
    for name in names:
        await site.create(pod(name, dcu(40_000), group="sums"))
    await site.until_running(*names)
    made = await site.create(pod("large", dcu(30_000), group="sums"))
    await site.until_told("large", "CardInsufficientMemory: 30000 MiB wanted")
    await site.volcano.sessions(3)
    assert "large" not in await site.bound()
    assert "denied the request" not in await site.message("large")
    assert made["metadata"]["uid"] not in await site.records()
    await site.delete(names[0])
    await site.until_running("large")
    await site.until_agreed()
    assert await over_capacity_ever(site) == []


async def test_group_is_placed_all_or_none(site: Site) -> None:
    """Each session reserves for three and gives them back; no share outlives Volcano's end."""
    await site.volcano.group("one", members=1)
    await site.create(pod("one", dcu(40_000), group="one"))
    await site.until_running("one")
    before = scheduler_log(site, '"withdrawn"')
    await site.volcano.group("gang", members=4)
    names = [f"gang-{number}" for number in range(4)]
    for name in names:
        await site.create(pod(name, dcu(40_000), group="gang"))
    await site.volcano.sessions(6)
    assert not set(names) & (await site.bound()).keys()
    assert scheduler_log(site, '"withdrawn"') >= before + 3
    await site.volcano.process.kill()

    async def is_returned() -> bool:
        return not await held(site.installed) and len(await site.records()) == 1

    await site.until("nothing but the running pod holds devices", is_returned)
    assert not set(names) & (await site.bound()).keys()
    site.volcano.process.start()
    await site.delete("one")
    await site.until_running(*names)
    await check_limits(site)
    await site.until_agreed()
    assert await over_capacity_ever(site) == []


async def test_group_waits_outside_the_queue_until_devices_suffice(site: Site) -> None:
    """With ``minResources``, as Volcano's controllers write it: sums suffice, devices do not."""
    await site.volcano.group("first", members=1)
    await site.create(pod("first", dcu(40_000), group="first"))
    await site.until_running("first")
    names = [f"wide-{number}" for number in range(4)]
    for name in names:  # before the group: without pods the extender has no opinion
        await site.create(pod(name, dcu(40_000), group="wide"))
    least = {"hygon.com/dcunum": "4", "hygon.com/dcumem": "160000"}
    await site.volcano.group("wide", members=4, minResources=least)

    async def is_rejected() -> bool:
        return scheduler_log(site, "no room for 4 pods at the same time") > 0

    await site.until("the group is not enqueued", is_rejected)
    await site.volcano.sessions(3)
    path = f"{API}/namespaces/{NAMESPACE}/podgroups/wide"
    group = await site.admin.call("GET", path)
    assert group.get("status", {}).get("phase", "Pending") == "Pending"
    assert len(await site.records()) == 1
    await site.delete("first")
    await site.until_running(*names)
    await site.until_agreed()


async def test_last_share_goes_to_exactly_one_of_two_schedulers(site: Site) -> None:
    await site.volcano.group("race", members=1)
    for turn in range(3):
        theirs, ours = f"theirs-{turn}", f"ours-{turn}"
        await site.create(pod(theirs, whole(CARDS), group="race"))
        await site.create(pod(ours, whole(CARDS), scheduler="hami-scheduler"))

        async def one_is_bound(names: frozenset[str] = frozenset({theirs, ours})) -> bool:
            return bool(names & (await site.bound()).keys())

        await site.until("one is bound", one_is_bound)
        await site.volcano.sessions(2)
        winners = {theirs, ours} & (await site.bound()).keys()
        assert len(winners) == 1
        (winner,), (loser,) = winners, {theirs, ours} - winners
        assert (await site.documents())[loser]["status"]["phase"] == "Pending"
        await site.until_running(winner)
        await site.delete(winner)
        await site.until_running(loser)
        await site.until_agreed()
        await site.delete(loser)


async def knows(site: Site, count: int) -> bool:
    """Return whether our scheduler knows so many waiting pods."""
    async with site.installed.session.get(f"{site.installed.url('scheduler')}/metrics") as told:
        found = re.search(r"^hami_scheduler_waiting_pods (\d+)", await told.text(), re.MULTILINE)
    return found is not None and int(found[1]) >= count


async def until_reserved(site: Site, names: list[str]) -> Process:
    """Reserve for pods and stop before their Bindings: the API server, stopped, is returned.

    kube-scheduler may lose its lease meanwhile and exit, so tests that need it come before.
    """
    plane = site.installed.processes["apiserver"]
    await site.volcano.group("killed", members=len(names))
    site.volcano.process.freeze()
    for name in names:
        await site.create(pod(name, dcu(20_000), group="killed"))
    await site.until("our scheduler knows the pods", partial(knows, site, len(names)))
    plane.freeze()
    site.volcano.process.thaw()

    async def are_held() -> bool:
        return len(await held(site.installed)) == len(names)

    await site.until("the session has reserved devices", are_held, limit_s=LIMIT_S)
    return plane


async def until_bound_pods_alone_hold(site: Site) -> None:
    async def is_returned() -> bool:
        uids = {(await site.documents())[n]["metadata"]["uid"] for n in await site.bound()}
        return (await site.records()).keys() == uids

    await site.until("only bound pods hold devices", is_returned)


async def test_killed_volcano_leaves_nothing_beyond_the_lease(site: Site) -> None:
    names = [f"killed-{number}" for number in range(4)]
    plane = await until_reserved(site, names)
    try:
        await site.volcano.process.kill()
    finally:
        plane.thaw()
    await until_bound_pods_alone_hold(site)
    site.volcano.process.start()
    await site.until_running(*names)
    await check_limits(site)
    await site.until_agreed()


async def test_killed_scheduler_of_ours_leaves_nothing_beyond_the_lease(site: Site) -> None:
    names = [f"retried-{number}" for number in range(4)]
    process = site.installed.processes["scheduler"]
    plane = await until_reserved(site, names)
    try:
        await process.kill()
    finally:
        plane.thaw()
    process.start()
    await site.installed.ready("scheduler")
    await site.until_running(*names)
    await until_bound_pods_alone_hold(site)
    await check_limits(site)
    await site.until_agreed()
    assert await over_capacity_ever(site) == []
