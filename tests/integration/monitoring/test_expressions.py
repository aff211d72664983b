# SPDX-License-Identifier: Apache-2.0
"""Dashboards, alerts and recipes on a running cluster, evaluated by a real Prometheus.

Two scheduler replicas are scraped, as in production. HAMi's older names and Volcano's are taken
from one of them alone, as docs/metrics.md recommends for dashboards made for HAMi.
"""

import json
import math
import re
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from prometheus_client import CollectorRegistry

from hami_common.runtime import httpd
from hami_common.runtime.tasks import background
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.support.prometheus import HOST, Prometheus, program_or_skip, run_prometheus
from tools.gen_metrics import rows

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
COMPONENTS = ROOT / "deploy" / "kustomize" / "components"
RULES = COMPONENTS / "prometheus" / "rules" / "hami.yaml"
DASHBOARDS = sorted((COMPONENTS / "grafana" / "dashboards").glob("*.json"))
DOCS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DCGM = (ROOT / "tests" / "golden" / "dcgm" / "dcgm-exporter.txt").read_text(encoding="utf-8")
ALL_NAMES = json.dumps(["hami", "legacy", "volcano"])
OTHERS = "(GPUDevice|nodeGPU|vGPUMemory|vGPUCore|QuotaUsed|volcano_).*"
MIB = 1 << 20
SOON_S = 15.0
SETTLED_S = 60.0
SPEC = ClusterSpec(
    nodes=(NodeSpec(name="gpu-t4", profile="4xT4"), NodeSpec(name="gpu-a30", profile="2xA30")),
    schedulers=2,
    plane="sim",
    backoff_s=0.2,
    settings={
        "scheduler": {"metric_names": ALL_NAMES},
        "nodeagent": {"metric_names": ALL_NAMES, "usage.look_s": "0.5"},
    },
)

OVERCOMMITTED = """
[[rules]]
types = ["A30"]
memory_scaling = 1.1
"""

HAMI_EXPRESSIONS = (
    "sum by (nodeid) (GPUDeviceMemoryAllocated) / sum by (nodeid) (GPUDeviceMemoryLimit) * 100",
    (
        "sum by (nodeid, deviceuuid, devicetype) (GPUDeviceCoreAllocated)"
        " / sum by (nodeid, deviceuuid, devicetype) (GPUDeviceCoreLimit)"
    ),
    "count(count by (nodeid) (GPUDeviceSharedNum))",
    'nodeGPUOverview{zone="vGPU",devicetype=~".+",devicecores=~".+",devicememorylimit=~".+"}',
    "max by (nodeid, deviceidx) (nodeGPUMemoryPercentage)",
    "sum by (podnamespace, podname) (vGPUMemoryAllocated)",
    "sum by (podname, nodename, containeridx) (vGPUCoreAllocated)",
    (
        "QuotaUsed / on (quotanamespace, quotaName) group_left ()"
        " (max by (quotanamespace, quotaName) (QuotaUsed) + 1)"
    ),
    "avg by (nodeid) (HostCoreUtilization)",
    "HostGPUMemoryUsage / on (nodeid, deviceuuid) GPUDeviceMemoryLimit",
    "vGPU_device_memory_usage_in_bytes / vGPU_device_memory_limit_in_bytes",
    "sum by (podname, ctrname, vdeviceid) (Device_utilization_desc_of_container)",
    'Device_memory_desc_of_container{context=~".*",module=~".*",data=~".*",offset=~".*"}',
    (
        "vGPU_device_memory_usage_in_bytes * on (deviceuuid) group_left (nodeid, devicetype)"
        " (GPUDeviceCoreLimit > bool 0)"
    ),
    "volcano_vgpu_device_allocated_memory / volcano_vgpu_device_memory_limit",
    "sum by (NodeName) (volcano_vgpu_device_shared_number)",
    "sum by (NodeName, devID) (volcano_vgpu_device_allocated_cores)",
    "sum by (podName) (volcano_vgpu_device_memory_allocation_for_a_certain_pod)",
    "sum by (podName) (volcano_vgpu_device_core_allocation_for_a_certain_pod)",
)
"""Queries of dashboards made for HAMi and Volcano on the older names and their labels."""

HAMI_DASHBOARD_DEVICES = {
    "count": "count(hami_gpu_memory_limit_bytes{node=~@})",
    "memory": "sum(hami_gpu_memory_limit_bytes{node=~@})",
    "allocated": "sum(hami_gpu_memory_allocated_bytes{node=~@})",
    "allocated percent": (
        "100 * sum(hami_gpu_memory_allocated_bytes{node=~@})"
        " / sum(hami_gpu_memory_limit_bytes{node=~@})"
    ),
    "containers": "sum(hami_gpu_shared_count{node=~@})",
    "used": "hami_host_gpu_memory_used_bytes and on (device_uuid)"
    " hami_gpu_memory_limit_bytes{node=~@}",
    "utilization": "hami_host_gpu_utilization_ratio and on (device_uuid)"
    " hami_gpu_memory_limit_bytes{node=~@}",
    "allocated by node": "sum by (node) (hami_gpu_memory_allocated_bytes{node=~@})",
    "memory by node": "sum by (node) (hami_gpu_memory_limit_bytes{node=~@})",
    "allocated by device": "hami_node_gpu_memory_allocated_ratio{node=~@}",
    "compute by device": "hami_gpu_core_allocated_ratio{node=~@}",
    "containers by device": "hami_gpu_shared_count{node=~@}",
}
"""Queries of the dashboard that HAMi 2.10 ships, on devices; ``@`` is the choice of nodes."""
HAMI_DASHBOARD_CONTAINERS = {
    "used": "hami_vgpu_memory_used_bytes{namespace=~@}",
    "limit": "hami_vgpu_memory_limit_bytes{namespace=~@}",
    "utilization": "hami_container_device_utilization_ratio{namespace=~@}",
    "used percent": (
        "100 * hami_vgpu_memory_used_bytes{namespace=~@}"
        " / hami_vgpu_memory_limit_bytes{namespace=~@}"
    ),
    "most used": "topk(10, hami_vgpu_memory_used_bytes{namespace=~@})",
}
"""The other queries of that dashboard, on containers; ``@`` is the choice of namespaces."""
WEBUI_QUERIES = (
    (
        "sum_over_time(hami_container_device_utilization_ratio{@}[1m]) == 0"
        " or (sum_over_time(hami_container_device_utilization_ratio{@}[10m:])"
        " / count_over_time((hami_container_device_utilization_ratio{@} != 0)[10m:]))"
    ),
    "avg(hami_vgpu_memory_used_bytes{@})",
)
"""Queries of HAMi-WebUI for one container and device, ``@``."""
WEBUI_DCGM_QUERIES = (
    'avg(DCGM_FI_DEV_FB_USED{UUID="@"})',
    'DCGM_FI_DEV_GPU_UTIL{UUID="@"}',
    'avg(DCGM_FI_DEV_POWER_USAGE{UUID="@"})',
)
"""Queries of HAMi-WebUI for a device, by the UUID that HAMi's node annotation has."""


ONCE = (
    'hami_scheduler_verb_seconds_count{verb="bind"}',
    "hami_nodeagent_allocate_seconds_count",
    "hami_webhook_admission_seconds_count > 0",
    "hami_scheduler_ledger_append_seconds_count > 0",
)


class Site(NamedTuple):
    """A cluster and its Prometheus."""

    cluster: Cluster
    prometheus: Prometheus


def pod(name: str, memory_mib: int, *, cores: int = 0) -> dict[str, Any]:
    """A pod with one share that it never uses."""
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory_mib)}
    if cores:
        limits["nvidia.com/gpucores"] = str(cores)
    command = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.2; done"]
    main = {"name": "main", "image": "app", "command": command, "resources": {"limits": limits}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [main]},
    }


def job(name: str, ports: Iterable[int], *relabelings: dict[str, Any]) -> dict[str, Any]:
    return {
        "job_name": name,
        "honor_labels": True,
        "static_configs": [{"targets": [f"{HOST}:{port}" for port in ports]}],
        "metric_relabel_configs": list(relabelings),
    }


@pytest.fixture
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    program_or_skip("prometheus")
    directory = tmp_path_factory.mktemp("m")  # sockets lie below, and have short names
    async with run_cluster(SPEC, directory / "c") as cluster, background() as group:
        with (cluster.directory / "devices.toml").open("a", encoding="utf-8") as file:
            file.write(OVERCOMMITTED)
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpu"}}
        await cluster.create(
            "/api/v1/namespaces/default/resourcequotas",
            {**quota, "spec": {"hard": {"limits.nvidia.com/gpumem": "50000"}}},
        )
        ports = cluster.ports
        dcgm = DcgmExporter()
        dcgm_port = await group.start(httpd.serve, dcgm.app, HOST, 0)
        by_name = {"source_labels": ["__name__"], "regex": OTHERS}
        scrape = [
            job(
                "scheduler",
                [ports[one] for one in cluster.schedulers],
                {**by_name, "action": "drop"},
            ),
            job("scheduler-monitor", [ports["scheduler"]], {**by_name, "action": "keep"}),
            job("nodeagent", [ports[one] for one in cluster.agents]),
            job("registry", [ports["registry"]]),
            job("webhook", [ports["webhook"]]),
            job("dcgm-exporter", [dcgm_port]),
        ]
        async with run_prometheus(directory / "prometheus", scrape, [RULES]) as prometheus:
            site = Site(cluster, prometheus)
            await use(site)
            dcgm.show(await held_first(cluster))
            yield site


async def use(site: Site) -> None:
    """Two pods that run, one that has gone, and one that waits.

    The first are there before the last come: what happens once only has no rate.
    """
    cluster = site.cluster
    for name in ("one", "gone", "two"):
        await cluster.create_pod(pod(name, 3000, cores=25))
        running = partial(cluster.pod_is, name, "Running")
        await cluster.until(f"{name} runs", running, limit_s=SETTLED_S)
        if name == "gone":
            await cluster.create_pod(pod("huge", 40000))
            await cluster.delete_pod("gone")
            gone = partial(cluster.pod_is_gone, "gone")
            await cluster.until("gone is gone", gone, limit_s=SETTLED_S)
            for series in ONCE:
                assert await all_shown(site.prometheus, [series]) == []


async def held_first(cluster: Cluster) -> list[str]:
    """UUIDs of all devices, the booked ones first."""
    found = sorted(await devices(cluster), key=lambda one: (-one["booked_mib"], one["uuid"]))
    return [one["uuid"] for one in found]


async def devices(cluster: Cluster) -> list[dict[str, Any]]:
    """All devices according to the registry."""
    text = await get(cluster, f"{cluster.url('registry')}/v1/devices")
    items: list[dict[str, Any]] = json.loads(text)["items"]
    return items


async def get(cluster: Cluster, url: str) -> str:
    async with cluster.session.get(url) as answer:
        return await answer.text()


class DcgmExporter:
    """A static exporter of dcgm-exporter's text, for devices of the cluster."""

    def __init__(self) -> None:
        self._text = ""
        self.app = httpd.HttpApp(
            {("GET", "/metrics"): self._answer},
            registry=CollectorRegistry(),
            ready=lambda: True,
        )

    def show(self, uuids: list[str]) -> None:
        """Label series with the first two of these devices."""
        self._text = DCGM
        for number in range(2):
            self._text = self._text.replace(f"@{number}", uuids[number])

    async def _answer(self, request: httpd.Request) -> httpd.Response:
        del request
        return httpd.Response(
            body=self._text.encode(), content_type="text/plain; version=0.0.4; charset=utf-8"
        )


async def all_shown(prometheus: Prometheus, expressions: Iterable[str]) -> list[str]:
    """Expressions that have no series, or none that is a number, after some time."""
    missing = list(expressions)
    with anyio.move_on_after(SETTLED_S):
        while missing:
            still = []
            for expr in missing:
                found = await prometheus.query(expr)
                if all(math.isnan(value) for _, value in found):
                    still.append(expr)
            missing = still
            if missing:
                await anyio.sleep(0.5)
    return missing


def panel_expressions() -> list[str]:
    """Every expression of the dashboards, with Grafana's variables replaced."""
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            found += [target["expr"] for target in panel["targets"]]
    return [
        re.sub(r"\$(node|namespace)\b", ".+", expr)
        .replace("$__rate_interval", "5m")
        .replace("$__range", "1h")
        for expr in found
    ]


def recipes(title: str) -> list[str]:
    """Expressions that a section of docs/metrics.md shows."""
    section = DOCS.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return [
        " ".join(expr.split()) for expr in re.findall(r"```promql\n(.*?)```", section, re.DOTALL)
    ]


async def every_panel_shows_something(site: Site) -> None:
    expressions = panel_expressions()
    assert len(expressions) > 35
    assert await all_shown(site.prometheus, expressions) == []
    assert {(health, error) for _, health, error in await site.prometheus.targets()} == {("up", "")}


async def every_alert_is_evaluated_and_none_is_critical(site: Site) -> None:
    async def evaluated() -> bool:
        return all(health != "unknown" for health, _ in (await site.prometheus.rules()).values())

    await site.cluster.until("rules are evaluated", evaluated)
    rules = await site.prometheus.rules()
    assert len(rules) > 20
    assert {name: told for name, told in rules.items() if told != ("ok", "")} == {}
    assert await site.prometheus.query('ALERTS{alertstate="firing",severity="critical"}') == []


async def expressions_made_for_hami_and_volcano_work(site: Site) -> None:
    assert await all_shown(site.prometheus, HAMI_EXPRESSIONS) == []
    used = " ".join(HAMI_EXPRESSIONS)
    older = {row.name for row in rows() if row.names in ("legacy", "volcano")}
    unseen = {name for name in older if not re.search(rf"\b{name}\b", used)}
    # A launch is needed for the first, and the simulated containers make none; for the others a
    # device in MIG mode.
    assert unseen == {"Device_last_kernel_of_container", "MigInfo", "nodeGPUMigInstance"}


async def dashboard_of_hami_shows_the_devices(site: Site) -> None:
    """Sums are those of one replica, as docs/metrics.md recommends for HAMi's dashboard."""
    cluster, prometheus = site.cluster, site.prometheus
    replica = f'job="scheduler",instance="{HOST}:{cluster.ports["scheduler"]}"'
    query = {
        name: expr.replace("node=~@", f'node=~".+",{replica}')
        for name, expr in HAMI_DASHBOARD_DEVICES.items()
    }
    loaded = next(iter(cluster.hardware))
    cluster.hardware[loaded].set_used_mib(0, 1234)
    cluster.hardware[loaded].set_load(0, 42)

    async def is_measured() -> bool:
        used = [value for _, value in await prometheus.query(query["used"])]
        load = [value for _, value in await prometheus.query(query["utilization"])]
        return max(used, default=0) == 1234 * MIB and max(load, default=0) == 42

    await cluster.until("the load is shown", is_measured, limit_s=SETTLED_S)
    items = await devices(cluster)
    memory = {one["uuid"]: one["capacity_mib"] * MIB for one in items}
    booked = {one["uuid"]: one["booked_mib"] * MIB for one in items}
    total = {"count": len(items), "memory": sum(memory.values()), "allocated": 6000 * MIB}
    total |= {"allocated percent": 100 * 6000 * MIB / sum(memory.values()), "containers": 2}
    for name, value in total.items():
        assert await prometheus.value(query[name]) == pytest.approx(value), name

    async def by(label: str, name: str) -> dict[str, float]:
        found = await prometheus.query(query[name])
        return {labels[label]: value for labels, value in found}

    for name in ("used", "utilization"):
        assert sorted((await by("device_uuid", name)).values())[:-1] == [0] * (len(items) - 1)
        for labels, _ in await prometheus.query(query[name]):
            assert labels["device_type"]
            assert labels["device_index"].isdecimal()
    nodes = {one["node"] for one in items}
    for name, amounts in (("allocated by node", booked), ("memory by node", memory)):
        assert await by("node", name) == {
            node: sum(amounts[one["uuid"]] for one in items if one["node"] == node)
            for node in nodes
        }
    shares = {uuid: amount // (3000 * MIB) for uuid, amount in booked.items()}
    assert await by("device_uuid", "allocated by device") == pytest.approx(
        {uuid: booked[uuid] / memory[uuid] for uuid in memory}
    )
    assert await by("device_uuid", "compute by device") == {u: 25 * n for u, n in shares.items()}
    assert await by("device_uuid", "containers by device") == shares


async def dashboard_of_hami_and_its_web_console_show_the_containers(site: Site) -> None:
    prometheus = site.prometheus
    pods = {"one", "two"}
    held: dict[str, dict[str, str]] = {}
    for name, expr in HAMI_DASHBOARD_CONTAINERS.items():
        found = await prometheus.query(expr.replace("@", '".+"'))
        assert {labels["pod"] for labels, _ in found} == pods, name
        assert {value for _, value in found} == {3000 * MIB if name == "limit" else 0}, name
        held |= {labels["pod"]: labels for labels, _ in found}
    for labels in held.values():
        assert (labels["container"], labels["vdevice_index"]) == ("main", "0")
        names = ("device_uuid", "namespace", "pod", "container")
        chosen = ",".join(f'{name}="{labels[name]}"' for name in names)
        for query in WEBUI_QUERIES:
            assert [v for _, v in await prometheus.query(query.replace("@", chosen))] == [0.0]
    uuid = (await held_first(site.cluster))[0]
    for query in WEBUI_DCGM_QUERIES:
        (value,) = [value for _, value in await prometheus.query(query.replace("@", uuid))]
        assert value > 0, query


async def recipes_of_device_time_give_numbers(site: Site) -> None:
    table = DOCS.split("## Device time\n", 1)[1].split("\n## ", 1)[0]
    expressions = re.findall(r"\| `([^`]+\))`|\| `([^`]+)` \|", table)
    found = [a or b for a, b in expressions]
    assert len(found) == 3
    assert await all_shown(site.prometheus, found) == []


async def node_namespace_and_cluster_add_up_to_the_ledger(
    site: Site,
) -> None:
    once = "max by (node, device_uuid) (hami_gpu_memory_allocated_bytes)"
    share = (
        "max by (namespace, node, pod, container_index, device_uuid)"
        " (hami_vgpu_memory_allocated_bytes)"
    )
    limits = "max by (namespace, pod, container, device_uuid) (hami_vgpu_memory_limit_bytes)"
    booked = sum(one["booked_mib"] for one in await devices(site.cluster)) * MIB
    assert booked == 6000 * MIB

    async def agree() -> bool:
        sums = [
            await site.prometheus.value(f"sum({expr})")
            for expr in (once, share, limits, f"sum by (node) ({once})")
        ]
        return set(sums) == {booked}

    await site.cluster.until("all sums agree", agree, limit_s=SETTLED_S)
    replicas = await site.prometheus.query("count by (instance) (hami_gpu_memory_allocated_bytes)")
    assert [value for _, value in replicas] == [6, 6]


async def metered_time_never_exceeds_what_went_by(site: Site) -> None:
    held = "sum by (node) (hami_metering_slice_seconds_total)"
    whole = "sum by (node) (hami_metering_device_seconds_total)"
    assert await all_shown(site.prometheus, [held, whole]) == []
    above = f"{held} / {whole} > 1"
    assert await site.prometheus.query(above) == []
    idle = "sum(hami_metering_idle_seconds_total) > sum(hami_metering_slice_seconds_total)"
    assert await site.prometheus.query(idle) == []


async def figures_of_dcgm_exporter_join_with_our_shares(site: Site) -> None:
    found = recipes("With DCGM exporter")
    assert len(found) == 2
    assert await all_shown(site.prometheus, found) == []
    first = (await held_first(site.cluster))[0]
    holders = {
        (labels["namespace"], labels["pod"])
        for labels, _ in await site.prometheus.query(
            f'hami_vgpu_memory_allocated_bytes{{device_uuid="{first}"}}'
        )
    }
    utilisation = {
        (labels["namespace"], labels["pod"]): value
        for labels, value in await site.prometheus.query(found[0])
        if labels["device_uuid"] == first
    }
    assert utilisation == dict.fromkeys(holders, 60.0), "every pod on it, not the one DCGM names"
    watts = sum(
        value
        for labels, value in await site.prometheus.query(found[1])
        if labels["device_uuid"] == first
    )
    assert 0 < watts <= 64


async def containers_are_shown_with_0_soon_after_start_and_vanish(
    site: Site,
) -> None:
    cluster = site.cluster
    names = (
        "hami_vgpu_memory_limit_bytes",
        "hami_vgpu_memory_used_bytes",
        "hami_container_device_utilization_ratio",
        "hami_vgpu_launches_total",
    )
    await cluster.create_pod(pod("fresh", 1000))
    running = partial(cluster.pod_is, "fresh", "Running")
    await cluster.until("fresh runs", running, limit_s=SETTLED_S)
    begun = anyio.current_time()

    async def shown() -> dict[str, float]:
        found = {}
        for agent in cluster.agents:
            text = await get(cluster, f"{cluster.url(agent)}/metrics")
            for line in text.splitlines():
                name = line.partition("{")[0]
                if 'pod="fresh"' in line and name in names:
                    found[name] = float(line.rpartition(" ")[2])
        return found

    async def complete() -> bool:
        return set(await shown()) == set(names)

    await cluster.until("fresh is shown", complete, limit_s=SOON_S)
    assert anyio.current_time() - begun <= SOON_S
    assert await shown() == {**dict.fromkeys(names, 0.0), names[0]: 1000 * MIB}
    await cluster.delete_pod("fresh")

    async def vanished() -> bool:
        return not await shown()

    await cluster.until("fresh is shown no more", vanished, limit_s=60)


async def labels_of_services_own_figures_are_closed_sets(site: Site) -> None:
    uuids = {one["uuid"] for one in await devices(site.cluster)}
    words = {"one", "two", "gone", "huge", "default", "gpu-t4", "gpu-a30", *uuids}
    told = 'count by (__name__) ({__name__=~"hami_(scheduler|webhook|registry)_.+"})'
    names = {labels["__name__"] for labels, _ in await site.prometheus.query(told)}
    assert len(names) > 30
    found = await site.prometheus.query('{__name__=~"hami_(scheduler|webhook|registry)_.+"}')
    for labels, _ in found:
        own = {key: value for key, value in labels.items() if key not in ("instance", "job")}
        assert not words & set(own.values()), labels


async def test_dashboards_alerts_and_recipes_on_a_running_cluster(site: Site) -> None:
    await containers_are_shown_with_0_soon_after_start_and_vanish(site)
    await every_panel_shows_something(site)
    await every_alert_is_evaluated_and_none_is_critical(site)
    await expressions_made_for_hami_and_volcano_work(site)
    await recipes_of_device_time_give_numbers(site)
    await node_namespace_and_cluster_add_up_to_the_ledger(site)
    await metered_time_never_exceeds_what_went_by(site)
    await figures_of_dcgm_exporter_join_with_our_shares(site)
    await labels_of_services_own_figures_are_closed_sets(site)
    await dashboard_of_hami_and_its_web_console_show_the_containers(site)
    await dashboard_of_hami_shows_the_devices(site)
