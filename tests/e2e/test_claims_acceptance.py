# SPDX-License-Identifier: Apache-2.0
"""Pods by claim and by the device plugin together: workloads, races, quotas, gangs, faults.

Two nodes with two devices each, two schedulers, taps before each service. Memory in MiB.
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from hami_common.errors import Denied, NotFound, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.pods import annotations as keys
from hami_common.units import parse_quantity
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.tap import Direction, Trap
from tests.e2e.conftest import small_pod
from tests.support.checker import lasting_problems, ledger_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.timeout(240),
    pytest.mark.shares_cluster,
]

NODES = ("gpu-a", "gpu-b")
AGENT = f"agent-{NODES[0]}"
DEVICES = 4
CAPACITY_MIB = 24_576
LEASE_S = 3.0
GROUP = "/apis/resource.k8s.io/v1"
NAMESPACE = "work"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
CLAIMS = f"{GROUP}/namespaces/{NAMESPACE}/resourceclaims"
QUOTAS = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
WORKLOADS = tuple(
    f"/apis/{group}/v1/namespaces/{NAMESPACE}/{name}"
    for group, name in (
        ("apps", "deployments/web"),
        ("apps", "statefulsets/set"),
        ("batch", "jobs/job"),
    )
)
MODES = ("device-plugin", "dra")
OURS = 'device.attributes["gpu.hami.io"]'
"""In CEL, the attributes of a device."""
QUEUES = """
[[queue]]
name = "team"
limit = { memory_mib = 5000 }
namespaces = ["team"]
"""
ROLLOUTS = 20
FROZEN_S = 8.0
"""Less than the heartbeat timeout of 15 s, after which a node gets no pods."""
LEADER = "leader"
"""The tap of the replica that creates claims, before the API server."""
STOP = "stopped scheduler"
"""Stopped for longer than a lease."""
Obj = dict[str, Any]


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two nodes, two schedulers and two priorities."""
    directory = tmp_path_factory.mktemp("accept")
    queues = directory / "queues.toml"
    queues.write_text(QUEUES)
    async with run_cluster(spec(queues), directory) as cluster:
        for namespace in (NAMESPACE, "team"):
            await cluster.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        for name, value in (("low", 10), ("high", 1000)):
            await cluster.create(
                "/apis/scheduling.k8s.io/v1/priorityclasses",
                {"metadata": {"name": name}, "value": value},
            )
        yield cluster


def spec(queues: Path) -> ClusterSpec:
    return ClusterSpec(
        nodes=tuple(NodeSpec(name=node, profile="2xA30") for node in NODES),
        slots=25,
        node_cpu="400",
        backoff_s=0.2,
        dra=True,
        taps=True,
        schedulers=2,
        settings={
            "scheduler": {
                "queues_file": str(queues),
                "config_poll_s": "0.2",
                "lease_s": str(LEASE_S),
                "fence_delay_s": "0.5",
                "tick_s": "0.2",
                "retry_s": "0.1",
                "reconcile_s": "5",
                "preempt_retry_s": "1",
                "capacity_touch_s": "0.3",
            },
            "nodeagent": {
                "dra.write_s": "0.1",
                "check_s": "1",
                "discovery_s": "1",
                "probe_s": "0.3",
                "health.recover_s": "1",
            },
        },
    )


@pytest.fixture
async def cluster(running: Cluster) -> AsyncIterator[Cluster]:
    """The cluster; afterwards, pods, claims, shares and CDI files are all gone."""
    yield running
    for tap in running.taps.values():
        tap.disarm()
        await tap.heal()
    for path in WORKLOADS:
        with suppress(NotFound):
            await running.request("DELETE", f"{path}?propagationPolicy=Background")
    async with anyio.create_task_group() as group:
        for namespace in (NAMESPACE, "team"):
            for one in await running.pods(namespace=namespace):
                group.start_soon(partial(_delete, running, one.metadata.name, namespace))
    for claim in await claims_of(running):
        if not claim["metadata"].get("ownerReferences"):
            await running.request("DELETE", f"{CLAIMS}/{claim['metadata']['name']}")
    await running.until("nothing is left", lambda: is_empty(running), limit_s=60)


async def _delete(cluster: Cluster, name: str, namespace: str) -> None:
    with suppress(NotFound):  # by another deletion
        await cluster.delete_pod(name, namespace=namespace)


async def is_empty(cluster: Cluster) -> bool:
    records = (await ledger_of(cluster)).values()
    return (
        not await cluster.pods(namespace=NAMESPACE)
        and not await cluster.pods(namespace="team")
        and not await claims_of(cluster)
        and all(one.op == "release" for one in records)
        and not list(cluster.cdi_directory.iterdir())
    )


async def claims_of(cluster: Cluster) -> list[Obj]:
    return list((await cluster.request("GET", f"{GROUP}/resourceclaims"))["items"])


def pod(name: str, memory_mib: int = 1000, mode: str = "dra", **more: Any) -> Obj:
    annotations = more.pop("annotations", {})
    found = small_pod(name, memory_mib=memory_mib, **{"terminationGracePeriodSeconds": 0, **more})
    found["metadata"]["annotations"] = {keys.ALLOCATION_MODE: mode, **annotations}
    return found


async def create(cluster: Cluster, *pods: Obj) -> None:
    for one in pods:
        await cluster.create_pod(one, namespace=NAMESPACE)


async def all_run(cluster: Cluster, names: list[str], *, limit_s: float = 60) -> None:
    async def run() -> bool:
        found = await cluster.pods(namespace=NAMESPACE)
        phases = {one.metadata.name: one.status.phase for one in found}
        return all(phases.get(name) == "Running" for name in names)

    await cluster.until(f"{names} run", run, limit_s=limit_s)


async def remove(cluster: Cluster, name: str) -> None:
    await cluster.delete_pod(name, namespace=NAMESPACE)


async def records_of(cluster: Cluster) -> dict[str, AllocationRecord]:
    """The live records by the name of their pod."""
    live = [one for one in (await ledger_of(cluster)).values() if one.op != "release"]
    return {one.pod: one for one in live}


async def devices_of(cluster: Cluster, name: str) -> tuple[str, ...]:
    record = (await records_of(cluster))[name]
    return tuple(share.uuid for held in record.containers for share in held.shares)


async def sound(cluster: Cluster) -> list[str]:
    return await lasting_problems(cluster, cluster.verifier(), namespace=NAMESPACE)


async def until_told(cluster: Cluster, name: str, text: str, *, namespace: str = NAMESPACE) -> None:
    """Wait until the pod's PodScheduled condition has the text."""
    seen = ""

    async def is_told() -> bool:
        nonlocal seen
        found = (await cluster.pod(name, namespace=namespace)).status.conditions or []
        seen = "; ".join(one.message for one in found if one.message)
        return text in seen

    try:
        await cluster.until(f"an Event of {name} says {text}", is_told)
    except Unavailable as error:
        raise AssertionError(f"{error}: {seen!r}") from error


# ------------------------------------------------------------------------------------- workloads


def template(*containers: Obj, init: tuple[Obj, ...] = (), restart: str = "Always") -> Obj:
    return {
        "metadata": {
            "labels": {"app": "it"},
            "annotations": {keys.ALLOCATION_MODE: "dra"},
        },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": restart,
            "initContainers": list(init),
            "containers": list(containers),
        },
    }


def container(name: str, memory_mib: int, script: str = "exec sleep 10000", **more: Any) -> Obj:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory_mib)}
    return {
        "name": name,
        "image": "app",
        "command": ["sh", "-c", f"cat /etc/hami/limits; {script}"],
        "resources": {"limits": limits},
        **more,
    }


async def test_containers_of_a_pod_have_shares_of_their_own(cluster: Cluster) -> None:
    made = template(
        container("small", 1000),
        container("large", 3000),
        init=(
            container("first", 900, "true"),
            container("beside", 2000, restartPolicy="Always"),
        ),
    )
    await create(cluster, {"metadata": {"name": "many", **made["metadata"]}, "spec": made["spec"]})
    await all_run(cluster, ["many"])
    for name, memory_mib in (("small", 1000), ("large", 3000), ("beside", 2000)):

        async def shows(name: str = name, memory_mib: int = memory_mib) -> bool:
            log = await cluster.container_log("many", name, namespace=NAMESPACE)
            return f"container={name}\n" in log and f"memory_mib={memory_mib}\n" in log

        await cluster.until(f"{name} shows its share", shows)
    assert len(await claims_of(cluster)) == 1
    assert await sound(cluster) == []


async def test_refused_and_dry_run_pods_leave_no_claim(cluster: Cluster) -> None:
    await cluster.request("POST", f"{PODS}?dryRun=All", pod("dry"))
    hard = {"pods": "0"}
    await cluster.create(QUOTAS, {"metadata": {"name": "none"}, "spec": {"hard": hard}})
    try:

        async def is_refused() -> bool:
            try:
                await cluster.request("POST", f"{PODS}?dryRun=All", pod("over"))
            except Denied as error:
                return "exceeded quota" in str(error)
            return False

        await cluster.until("Kubernetes refuses the pod", is_refused)
        with pytest.raises(Denied, match="exceeded quota"):
            await create(cluster, pod("over"))
    finally:
        await cluster.request("DELETE", f"{QUOTAS}/none")
    assert await claims_of(cluster) == []


async def test_rollouts_leave_no_claim_behind(cluster: Cluster) -> None:
    """By the controllers of Kubernetes, which name the pods after their claims were chosen."""
    apps, batch = (f"/apis/{group}/v1/namespaces/{NAMESPACE}" for group in ("apps", "batch"))
    selector = {"matchLabels": {"app": "it"}}
    made = template(container("main", 1000))
    body = {"selector": selector, "template": made}
    await cluster.create(
        f"{apps}/deployments", {"metadata": {"name": "web"}, "spec": {**body, "replicas": 2}}
    )
    other = {**made, "metadata": {**made["metadata"], "labels": {"app": "set"}}}
    in_order = {
        "selector": {"matchLabels": {"app": "set"}},
        "template": other,
        "replicas": 2,
        "serviceName": "set",
    }
    await cluster.create(f"{apps}/statefulsets", {"metadata": {"name": "set"}, "spec": in_order})
    job = template(container("main", 1000, "sleep 1"), restart="Never")
    del job["metadata"]["labels"]
    await cluster.create(
        f"{batch}/jobs",
        {"metadata": {"name": "job"}, "spec": {"template": job, "completions": 3}},
    )

    async def are_done() -> bool:
        of_set = await cluster.request("GET", f"{apps}/statefulsets/set")
        of_job = await cluster.request("GET", f"{batch}/jobs/job")
        counts = of_set["status"].get("readyReplicas"), of_job["status"].get("succeeded")
        return counts == (2, 3)

    await cluster.until("set and job are done", are_done, limit_s=60)
    for number in range(ROLLOUTS):
        changed = {"metadata": {"annotations": {"turn": str(number)}}}
        await cluster.request(
            "PATCH",
            f"{apps}/deployments/web",
            {"spec": {"template": changed}},
            content_type="application/merge-patch+json",
        )

        async def is_rolled_out() -> bool:
            found = await cluster.request("GET", f"{apps}/deployments/web")
            status = found["status"]
            counts = [status.get(f"{one}eplicas") for one in ("r", "updatedR", "availableR")]
            seen = status.get("observedGeneration") == found["metadata"]["generation"]
            return bool(seen) and counts == [2, 2, 2]

        await cluster.until(f"rollout {number} is complete", is_rolled_out, limit_s=60)

    async def has_no_more() -> bool:
        owners = {
            owner["name"]
            for one in await claims_of(cluster)
            for owner in one["metadata"]["ownerReferences"]
        }
        alive = {
            one.metadata.name
            for one in await cluster.pods(namespace=NAMESPACE)
            if one.status.phase == "Running"
        }
        return owners == alive and len(alive) == 4

    await cluster.until("only running pods have claims", has_no_more)
    assert await sound(cluster) == []


async def test_mode_of_a_namespace_changes_while_pods_of_the_other_run(cluster: Cluster) -> None:
    async def set_mode(mode: str | None) -> None:
        await cluster.request(
            "PATCH",
            f"/api/v1/namespaces/{NAMESPACE}",
            {"metadata": {"labels": {keys.ALLOCATION_MODE: mode}}},
            content_type="application/merge-patch+json",
        )

    names: list[str] = []
    for number, mode in enumerate((None, "dra", None)):
        await set_mode(mode)
        name = f"of-namespace-{number}"
        await cluster.until("the label counts", partial(_is_by_claim, cluster, mode is not None))
        found = pod(name)
        del found["metadata"]["annotations"]
        await create(cluster, found)
        await all_run(cluster, [*names, name])
        names.append(name)
    records = await records_of(cluster)
    assert [bool(records[name].claim) for name in names] == [False, True, False]
    assert await sound(cluster) == []


async def _is_by_claim(cluster: Cluster, wanted: bool) -> bool:  # noqa: FBT001 - a result
    """Return whether a pod without a mode of its own would be by claim, or not, as wanted."""
    found = pod("dry")
    del found["metadata"]["annotations"]
    made = await cluster.request("POST", f"{PODS}?dryRun=All", found)
    return bool(made["spec"].get("resourceClaims")) == wanted


async def test_lost_storage_is_rebuilt_from_pods_of_both_modes_and_claims(
    cluster: Cluster,
) -> None:
    names = [f"kept-{mode}-{n}" for n in range(3) for mode in MODES]
    await create(
        cluster, *(pod(n, 3000, "dra" if "-dra-" in n else "device-plugin") for n in names)
    )
    await use_claim(cluster, "written", exactly(2000))
    await all_run(cluster, [*names, "written"])
    assert await sound(cluster) == []
    before = await _holdings(cluster)
    await cluster.nats.kill()
    await cluster.nats.wipe()
    await cluster.nats.start()

    async def is_rebuilt() -> bool:
        try:
            return await _holdings(cluster) == before
        except Exception:  # noqa: BLE001 - the buckets are being declared again
            return False

    await cluster.until("the ledger is what it was", is_rebuilt, limit_s=60)
    await create(cluster, pod("after-the-loss"))
    await all_run(cluster, [*names, "written", "after-the-loss"])
    assert await sound(cluster) == []


async def _holdings(cluster: Cluster) -> dict[str, tuple[object, ...]]:
    return {
        name: (one.node, one.allocation_id, one.claim, one.containers)
        for name, one in (await records_of(cluster)).items()
    }


# ------------------------------------------------------------------------------ races and policies


async def test_hundred_pods_of_each_mode_race_for_fifty_shares(cluster: Cluster) -> None:
    """Two full devices, and two that take 25 shares each; the slices stay as they were before."""
    for number, mode in enumerate(MODES):
        name = f"full-{number}"
        await create(cluster, pod(name, CAPACITY_MIB, mode))
        await all_run(cluster, [name])
    agents = [cluster.processes[name] for name in cluster.agents]
    names = {f"race-{mode}-{n}": mode for n in range(100) for mode in MODES}
    for agent in agents:
        agent.freeze()
    try:
        async with anyio.create_task_group() as group:
            for name, mode in names.items():
                group.start_soon(create, cluster, pod(name, 100, mode))
            await anyio.sleep(FROZEN_S)
    finally:
        for agent in agents:
            agent.thaw()

    async def are_full() -> bool:
        found = await cluster.pods(namespace=NAMESPACE)
        running = [one for one in found if one.status.phase == "Running"]
        return len(running) == 2 + 50

    await cluster.until("50 of the pods run", are_full, limit_s=90)
    assert await sound(cluster) == []
    silent: list[str] = []

    async def all_say_why() -> bool:
        nonlocal silent
        silent = [
            f"{one.metadata.name}: {[c.message for c in one.status.conditions or []]}"
            for one in await cluster.pods(namespace=NAMESPACE)
            if one.status.phase == "Pending"
            and not any(c.message for c in one.status.conditions or [])
        ]
        return not silent

    try:
        await cluster.until("the others say why", all_say_why)
    except Unavailable:
        assert silent == []
    records = await records_of(cluster)
    assert len(records) == 2 + 50
    by_mode = {mode: sum(names.get(name) == mode for name in records) for mode in MODES}
    assert min(by_mode.values()) > 0, by_mode


@pytest.mark.parametrize("policy", ["binpack", "spread", "numa", "mutex", "topology-aware"])
async def test_policy_chooses_the_same_devices_in_both_modes(cluster: Cluster, policy: str) -> None:
    chosen: dict[str, list[tuple[str, ...]]] = {}
    more = {keys.DEVICE_POLICY: policy, keys.NODE_POLICY: "binpack"}
    for mode in MODES:
        chosen[mode] = []
        for number, memory_mib in enumerate((4000, 1000, 9000)):
            name = f"p-{number}"
            await create(cluster, pod(name, memory_mib, mode, annotations=more))
            await all_run(cluster, [name])
            chosen[mode].append(await devices_of(cluster, name))
        for number in range(3):
            await remove(cluster, f"p-{number}")
        await cluster.until("all is free", lambda: is_empty(cluster))
    assert chosen["dra"] == chosen["device-plugin"]


# ---------------------------------------------------------------------- quotas, gangs, preemption


async def test_quota_counts_both_modes_and_claims_once(cluster: Cluster) -> None:
    hard = {"limits.nvidia.com/gpumem": "5000"}
    await cluster.create(QUOTAS, {"metadata": {"name": "memory"}, "spec": {"hard": hard}})
    try:
        await cluster.until("the quota is known", lambda: _quota_is(cluster, "0"))
        await create(cluster, pod("a", 2000, "device-plugin"), pod("b", 2000, "dra"))
        await use_claim(cluster, "c", exactly(1000))
        await all_run(cluster, ["a", "b", "c"])
        await cluster.until("all count once", lambda: _quota_is(cluster, "5000"))
        for mode in MODES:
            await create(cluster, pod(f"over-{mode}", 500, mode))
            await until_told(cluster, f"over-{mode}", "ResourceQuotaNotFit")
        await remove(cluster, "a")
        await all_run(cluster, [f"over-{mode}" for mode in MODES])
        await cluster.until("all count once", lambda: _quota_is(cluster, "4000"))
    finally:
        await cluster.request("DELETE", f"{QUOTAS}/memory")


async def _quota_is(cluster: Cluster, used: str) -> bool:
    """Return whether both schedulers count this much memory of the quota."""
    for name in cluster.schedulers:
        async with cluster.session.get(f"{cluster.url(name)}/v1/quotas") as response:
            rows = (await response.json())["items"]
        if [str(row["used"]) for row in rows if row["namespace"] == NAMESPACE] != [used]:
            return False
    return True


async def test_queue_counts_both_modes(cluster: Cluster) -> None:
    for mode in MODES:
        await cluster.create_pod(pod(mode, 2000, mode), namespace="team")
        runs = partial(cluster.pod_is, mode, "Running", namespace="team")
        await cluster.until(f"{mode} runs", runs)
    for mode in MODES:
        await cluster.create_pod(pod(f"over-{mode}", 1500, mode), namespace="team")
        text = "QueueOverLimit: queue team memory_mib: 1500 MiB wanted, 4000 used, limit 5000"
        await until_told(cluster, f"over-{mode}", text, namespace="team")


async def test_gang_by_claim_starts_whole_though_its_scheduler_dies(cluster: Cluster) -> None:
    """Eight halves of four devices: none runs while one half is taken, then all do."""
    await create(cluster, pod("in-the-way", 12_000, "device-plugin"))
    await all_run(cluster, ["in-the-way"])
    gang = {keys.GANG: "g", keys.GANG_SIZE: "8"}
    names = [f"g-{number}" for number in range(8)]
    await create(cluster, *(pod(name, 12_000, annotations=gang) for name in names))
    await anyio.sleep(2)
    found = await cluster.pods(namespace=NAMESPACE)
    assert [one.metadata.name for one in found if one.spec.node_name] == ["in-the-way"]

    async def kill() -> None:
        await cluster.processes["scheduler"].kill()

    trap = Trap(b"PUB $KV.hami_alloc.", "up", kill, deliver=True, skip=3)
    cluster.taps["scheduler-nats"].arm(trap)
    async with anyio.create_task_group() as group:

        async def revive() -> None:
            await trap.sprung.wait()
            cluster.processes["scheduler"].start()

        group.start_soon(revive)
        await remove(cluster, "in-the-way")
        await all_run(cluster, names, limit_s=150)
        group.cancel_scope.cancel()
    assert await sound(cluster) == []


async def test_least_important_pods_of_either_mode_are_displaced(cluster: Cluster) -> None:
    """One of four full devices is needed; only the pod with the lowest priority goes."""
    names = [f"low-{number}" for number in range(4)]
    for number, name in enumerate(names):
        priority = {} if number == 3 else {"priorityClassName": "low"}
        await create(cluster, pod(name, 20_000, MODES[number % 2], **priority))
    await all_run(cluster, names)
    await create(cluster, pod("waits", 20_000, "dra"))
    await create(cluster, pod("urgent", 20_000, "dra", priorityClassName="high"))
    await all_run(cluster, ["urgent", *names[:3]])
    assert "waits" not in await records_of(cluster)
    assert await sound(cluster) == []


async def test_disruption_budget_protects_pods_of_either_mode(cluster: Cluster) -> None:
    """The two least important pods, one of each mode, must both stay; then one of them may go."""
    budgets = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
    selector = {"matchLabels": {"guarded": "yes"}}
    budget = {"metadata": {"name": "both"}, "spec": {"minAvailable": 2, "selector": selector}}
    await cluster.create(budgets, budget)
    try:
        names = [f"low-{number}" for number in range(4)]
        for number, name in enumerate(names):
            one = pod(name, 20_000, MODES[number % 2])
            if number < 2:
                one["spec"]["priorityClassName"] = "low"
            else:
                one["metadata"]["labels"] = {"guarded": "yes"}
            await create(cluster, one)
        await all_run(cluster, names)
        await until_allowed(cluster, f"{budgets}/both", 0)
        await create(cluster, pod("urgent", 20_000, "dra", priorityClassName="high"))
        await all_run(cluster, ["urgent", *names[2:]])
        assert len(await records_of(cluster)) == 4
        await cluster.request(
            "PATCH",
            f"{budgets}/both",
            {"spec": {"minAvailable": 1}},
            content_type="application/merge-patch+json",
        )
        await until_allowed(cluster, f"{budgets}/both", 1)
        await create(cluster, pod("next", 20_000, "device-plugin", priorityClassName="high"))
        await all_run(cluster, ["urgent", "next"])
        left = set(await records_of(cluster))
        assert len(left & set(names[2:])) == len(left & set(names[:2])) == 1
    finally:
        await cluster.request("DELETE", f"{budgets}/both")
    assert await sound(cluster) == []


async def until_allowed(cluster: Cluster, path: str, count: int) -> None:
    """Wait until the budget allows this number of disruptions."""

    async def is_allowed() -> bool:
        status = (await cluster.request("GET", path)).get("status") or {}
        return bool(status.get("disruptionsAllowed", -1) == count)

    await cluster.until(f"{count} disruptions are allowed", is_allowed)


async def test_hold_for_a_preemptor_survives_restarts_of_all_schedulers(cluster: Cluster) -> None:
    """Its victim ends while no scheduler runs; another pod has waited for as much since before."""
    slow = {"terminationGracePeriodSeconds": 4}
    names = [f"low-{number}" for number in range(4)]
    for number, name in enumerate(names):
        one = pod(name, 20_000, MODES[number % 2], **slow)
        one["spec"]["containers"][0]["command"] = ["sh", "-c", "trap '' TERM; sleep 1000"]
        await create(cluster, one)
    await all_run(cluster, names)
    await create(cluster, pod("waits", 20_000, "device-plugin"))
    await until_told(cluster, "waits", "CardInsufficientMemory")
    await create(cluster, pod("urgent", 20_000, "dra", priorityClassName="high"))

    async def is_held() -> bool:
        record = (await records_of(cluster)).get("urgent")
        return record is not None and bool(record.held_for)

    await cluster.until("the share of the victim is held", is_held)
    for name in ("scheduler", "scheduler-1"):
        await cluster.processes[name].kill()
    await anyio.sleep(slow["terminationGracePeriodSeconds"] + 1)
    for name in ("scheduler", "scheduler-1"):
        cluster.processes[name].start()
    await all_run(cluster, ["urgent"])
    assert "waits" not in await records_of(cluster)
    assert await sound(cluster) == []


async def test_waiting_pod_by_claim_is_explained(cluster: Cluster) -> None:
    """Its condition has the reason of HAMi's filter, although no device could serve the claim."""
    await create(cluster, pod("large", CAPACITY_MIB + 1))
    wanted = f"CardInsufficientMemory: {CAPACITY_MIB + 1} MiB wanted, at most {CAPACITY_MIB} MiB"
    told: Obj = {}

    async def is_explained() -> bool:
        nonlocal told
        told = await cluster.explain("large", namespace=NAMESPACE)
        return wanted in str(told)

    try:
        await cluster.until("the pod is explained", is_explained)
    except Unavailable as error:
        raise AssertionError(told) from error
    await until_told(cluster, "large", wanted)


async def test_waiting_pod_with_a_claim_of_its_own_is_explained(cluster: Cluster) -> None:
    """kube-scheduler does not ask about it, because no device of the slices is large enough."""
    await create(cluster, await with_claim(cluster, pod("large", CAPACITY_MIB + 1)))
    wanted = f"CardInsufficientMemory: {CAPACITY_MIB + 1} MiB wanted"

    async def is_explained() -> bool:
        return wanted in str(await cluster.explain("large", namespace=NAMESPACE))

    await until_told(cluster, "large", "cannot allocate all claims")
    await cluster.until("the pod is explained", is_explained)


# -------------------------------------------------------------------------- claims of users


def exactly(memory_mib: int = 0, **more: Any) -> Obj:
    """A request of a claim; no memory: a whole device."""
    capacity = {"capacity": {"requests": {"memory": f"{memory_mib}Mi"}}} if memory_mib else {}
    return {"name": "main", "exactly": {"deviceClassName": "hami-share", **capacity, **more}}


async def use_claim(cluster: Cluster, name: str, *requests: Obj, **more: Any) -> None:
    """Create a claim, and a pod with the same name that uses its request ``main``."""
    spec = {"devices": {"requests": list(requests), **more}}
    await cluster.create(CLAIMS, {"metadata": {"name": name}, "spec": spec})
    await create(cluster, user_of(name, name))


def user_of(claim: str, name: str) -> Obj:
    found = pod(name)
    del found["metadata"]["annotations"]
    found["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claim}]
    found["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu", "request": "main"}]}
    return found


async def facts_of(cluster: Cluster, node: str = "") -> list[Obj]:
    """Attributes of the published devices, of one node or of all, in their order."""
    items = (await cluster.request("GET", f"{GROUP}/resourceslices"))["items"]
    return [
        {name: next(iter(value.values())) for name, value in device["attributes"].items()}
        for item in items
        if node in ("", item["spec"]["nodeName"])
        for device in item["spec"].get("devices") or ()
    ]


def selects(expression: str) -> Obj:
    return {"selectors": [{"cel": {"expression": expression}}]}


async def test_claims_of_users_choose_devices_by_cel_count_and_constraints(
    cluster: Cluster,
) -> None:
    facts = await facts_of(cluster)
    wanted = max(one["uuid"] for one in facts)
    by_uuid = selects(f'{OURS}.uuid == "{wanted}"')
    by_type = selects(f'{OURS}.type == "{facts[0]["type"]}"')
    by_memory = selects('device.capacity["gpu.hami.io"].memory.compareTo(quantity("20Gi")) >= 0')
    await use_claim(cluster, "uuid", exactly(1000, **by_uuid))
    await use_claim(cluster, "type", exactly(1000, **by_type))
    await use_claim(cluster, "memory", exactly(1000, **by_memory))
    await use_claim(cluster, "two", exactly(1000, count=2))
    apart = [{"requests": ["main", "other"], "distinctAttribute": "gpu.hami.io/uuid"}]
    second = {**exactly(1000), "name": "other"}
    await use_claim(cluster, "apart", exactly(1000), second, constraints=apart)
    first = {
        "name": "main",
        "firstAvailable": [
            {"name": "large", **exactly(CAPACITY_MIB * 2)["exactly"]},
            {"name": "small", **exactly(700)["exactly"]},
        ],
    }
    await use_claim(cluster, "first", first)
    names = ["uuid", "type", "memory", "two", "apart", "first"]
    await create(cluster, user_of("first", "joins"))
    await all_run(cluster, [*names, "joins"])
    assert await devices_of(cluster, "uuid") == (wanted,)
    for name in ("two", "apart"):
        assert len(set(await devices_of(cluster, name))) == 2
    records = await records_of(cluster)
    assert "joins" not in records or "first" not in records, "one share for both"
    owner = records.get("first") or records["joins"]
    assert [one.memory_mib for held in owner.containers for one in held.shares] == [700]
    assert await sound(cluster) == []


@pytest.fixture(params=[1, 2])
async def scaling(running: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """Memory that is handed out of each device, as a factor of its own: ``memory_scaling``."""
    factor: int = request.param
    file = running.directory / "devices.toml"
    before = file.read_text()

    async def scale(factor: int, text: str) -> None:
        file.write_text(text)

        async def is_published() -> bool:
            return await memory_of(running) == {CAPACITY_MIB * factor}

        await running.until(f"{factor} times the memory is published", is_published)

    await scale(factor, f"{before}memory_scaling = {factor}\n")
    yield factor
    await scale(1, before)


async def memory_of(cluster: Cluster) -> set[int]:
    """The amounts of memory that the published devices have."""
    items = (await cluster.request("GET", f"{GROUP}/resourceslices"))["items"]
    texts = [
        one["capacity"]["memory"]["value"]
        for item in items
        for one in item["spec"].get("devices") or ()
    ]
    return {int(amount) >> 20 for text in texts if (amount := parse_quantity(text)) is not None}


async def test_claim_without_memory_has_its_device_alone(scaling: int, cluster: Cluster) -> None:
    await create(cluster, pod("beside", 500, "device-plugin"))
    await all_run(cluster, ["beside"])
    for number in range(DEVICES - 1):
        await use_claim(cluster, f"whole-{number}", exactly())
    names = [f"whole-{number}" for number in range(DEVICES - 1)]
    await all_run(cluster, names)
    alone = [await devices_of(cluster, name) for name in names]
    assert len({*alone, await devices_of(cluster, "beside")}) == DEVICES
    records = await records_of(cluster)
    shares = [records[name].containers[0].shares[0] for name in names]
    assert {(one.memory_mib, one.exclusive) for one in shares} == {(scaling * CAPACITY_MIB, True)}
    for mode in MODES:
        await create(cluster, pod(f"small-{mode}", 500, mode))
    await use_claim(cluster, "one-too-many", exactly())
    await all_run(cluster, [f"small-{mode}" for mode in MODES])
    for mode in MODES:
        assert await devices_of(cluster, f"small-{mode}") not in alone
    assert "one-too-many" not in await records_of(cluster)
    assert await sound(cluster) == []


async def test_adopted_claim_runs_within_a_second_of_a_pod_by_device_plugin(
    cluster: Cluster,
) -> None:
    """The best of three: the machine may be busy."""
    took_s: dict[str, list[float]] = {"claim": [], "plugin": []}
    for turn in range(3):
        for way, took in took_s.items():
            name = f"{way}-{turn}"
            begun_s = anyio.current_time()
            if way == "claim":
                await use_claim(cluster, name, exactly(500))
            else:
                await create(cluster, pod(name, 500, "device-plugin"))
            await all_run(cluster, [name])
            took.append(anyio.current_time() - begun_s)
    assert min(took_s["claim"]) < min(took_s["plugin"]) + 1, took_s


# ------------------------------------------------------------------------------- health and cordon


async def taints_of(cluster: Cluster, uuid: str) -> set[str]:
    """The taints of a device, by the slices."""
    items = (await cluster.request("GET", f"{GROUP}/resourceslices"))["items"]
    return {
        taint["key"]
        for item in items
        for device in item["spec"].get("devices") or ()
        if device["attributes"]["uuid"]["string"] == uuid
        for taint in device.get("taints") or ()
    }


async def test_faulty_and_cordoned_devices_are_tainted_and_avoided(cluster: Cluster) -> None:
    node = NODES[0]
    first, second = [one["uuid"] for one in await facts_of(cluster, node)]
    path = f"/api/v1/nodes/{node}"

    async def cordon(uuid: str | None) -> None:
        await cluster.request(
            "PATCH",
            path,
            {"metadata": {"annotations": {"hami.io/device-cordon": uuid}}},
            content_type="application/merge-patch+json",
        )

    async def are(*taints: set[str]) -> bool:
        return [await taints_of(cluster, one) for one in (first, second)] == list(taints)

    selector = {"kubernetes.io/hostname": node}
    cluster.hardware[node].lose(0)
    try:
        fault = partial(are, {"gpu.hami.io/unhealthy"}, set())
        await cluster.until("the fault is a taint", fault)
        await create(cluster, pod("sound", nodeSelector=selector))
        await all_run(cluster, ["sound"])
        assert await devices_of(cluster, "sound") == (second,)
    finally:
        cluster.hardware[node].restore(0)
    await cluster.until("the fault is over", partial(are, set(), set()))
    await cordon(second)
    try:
        await cluster.until("it is tainted", partial(are, set(), {"gpu.hami.io/cordoned"}))
        await create(cluster, pod("in-use", nodeSelector=selector))
        await use_claim(cluster, "claimed", exactly(500, **selects(f'{OURS}.uuid != "{first}"')))
        await all_run(cluster, ["in-use", "claimed"])
        assert await devices_of(cluster, "in-use") == (first,)
        assert second not in await devices_of(cluster, "claimed")
    finally:
        await cordon(None)
    await cluster.until("nothing is tainted", partial(are, set(), set()))


# ------------------------------------------------------------------------------------------ faults


FAULTS: tuple[tuple[str, str, Direction, bytes, tuple[str, ...]], ...] = (
    ("bind-asked", "extender", "up", b"POST /bind", ("scheduler", "kube-scheduler")),
    ("record-appended", "scheduler-nats", "up", b"PUB $KV.hami_alloc.", ("scheduler", STOP)),
    ("record-stored", "scheduler-nats", "down", b'"stream":"KV_hami_alloc"', ("nats",)),
    ("claim-created", "scheduler-api", "up", b"/resourceclaims HTTP", ("scheduler", STOP)),
    ("early-claim-created", LEADER, "up", b"/resourceclaims HTTP", ("scheduler", "nats")),
    ("allocation-cleared", "scheduler-api", "up", b'"allocation":null', ("scheduler", STOP)),
    ("allocation-written", "scheduler-api", "up", b'"consumedCapacity"', ("scheduler", STOP)),
    ("binding-sent", "scheduler-api", "up", b"/binding HTTP", ("scheduler", "kube-scheduler")),
    ("prepared", f"{AGENT}-nats", "up", b'"state":"prepared"', (AGENT, "nats")),
)
"""Step, tap, pattern that shows that it was done, and what then dies."""
OF_BOTH = ("early-claim-created", "allocation-cleared")
"""Steps for pods alone that kube-scheduler allocates claims for, because they have another one."""


@pytest.mark.parametrize(
    ("step", "tap", "direction", "pattern", "victim"),
    [
        pytest.param(name, tap, direction, pattern, victim, id=f"{name}-{victim.replace(' ', '-')}")
        for name, tap, direction, pattern, victims in FAULTS
        for victim in victims
    ],
)
async def test_part_dies_or_stops_between_two_steps(
    cluster: Cluster, step: str, tap: str, direction: Direction, pattern: bytes, victim: str
) -> None:
    """Two pods in turn run in the end, by the policy's choice of devices."""
    process = victim.removeprefix("stopped ")
    is_over = anyio.Event()

    async def harm(process: str = process) -> None:
        if process == "nats":
            await cluster.nats.kill()
        elif victim == STOP:
            cluster.processes[process].freeze()
        else:
            await cluster.processes[process].kill()
        is_over.set()

    if tap == LEADER:
        for name in cluster.schedulers:
            one = partial(harm, name if victim == "scheduler" else process)
            cluster.taps[f"{name}-api"].arm(Trap(pattern, direction, one, deliver=True))
    else:
        cluster.taps[tap].arm(Trap(pattern, direction, harm, deliver=True))
    selector = {"kubernetes.io/hostname": NODES[0]}
    names = ["one", "two"]
    pods = [pod(name, 300, nodeSelector=selector) for name in names]
    if step in OF_BOTH:
        # kube-scheduler takes the first device that fits, the policy another for one of them.
        pods = [await with_claim(cluster, one) for one in pods]
    await create(cluster, *pods)
    with anyio.fail_after(60):
        await is_over.wait()
    if process == "nats":
        await cluster.nats.start()
    elif victim == STOP:
        await anyio.sleep(LEASE_S + 1)
        cluster.processes[process].thaw()
    else:
        for part in cluster.processes.values():
            part.start()
    await all_run(cluster, names, limit_s=90)
    assert await sound(cluster) == []
    assert await _unrecorded(cluster) == []


async def with_claim(cluster: Cluster, asking: Obj) -> Obj:
    """Add a container with a claim of the pod's own, which is created."""
    name = f"own-{asking['metadata']['name']}"
    spec = {"devices": {"requests": [exactly(100)]}}
    await cluster.create(CLAIMS, {"metadata": {"name": name}, "spec": spec})
    side = {"name": "side", "image": "app", "resources": {"claims": [{"name": "own"}]}}
    asking["spec"]["containers"].append(side)
    asking["spec"]["resourceClaims"] = [{"name": "own", "resourceClaimName": name}]
    return asking


async def _unrecorded(cluster: Cluster) -> list[str]:
    """Return claims that are still allocated without a record a lease later."""
    found: list[str] = []
    with anyio.move_on_after(LEASE_S + 30):
        while True:
            records = (await records_of(cluster)).values()
            recorded = {one.claim or one.pod for one in records}
            found = [
                claim["metadata"]["name"]
                for claim in await claims_of(cluster)
                if claim.get("status", {}).get("allocation")
                and claim["metadata"]["name"] not in recorded
            ]
            if not found:
                return []
            await anyio.sleep(0.2)
    return found
