# SPDX-License-Identifier: Apache-2.0
"""A hundred pods at once on one node of eight devices, through kube-scheduler: how fast, how dear.

Run as ``./dev bench burst [--planes sim,real] [--mode device-plugin,dra] [--turns 3] [--pods 100]
--json -``. One document with ``rows``, one per control plane, turn and allocation mode; each has
``plane``, ``mode``, ``pods``, ``bound_s`` (first create to last Binding), ``pods_per_s``,
``bind_p50_ms``, ``bind_p99_ms``, ``prepare_p99_ms`` (NodePrepareResources; 0 without claims),
``fence_conflicts``, ``api_writes_per_pod``, ``kube_scheduler_writes_per_pod`` and ``problems``.
Bind times are those of the scheduler's answers to kube-scheduler, from its histogram, interpolated
within a bucket as Prometheus does. API writes are those of our services, as the API server's audit
has them; the creation of pods and kubelet's reports are not ours, and those of kube-scheduler,
Events included, are counted by themselves. ``problems`` lists every share that is lost or given
twice. The exit code is 1 when there is one.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from hami_common.errors import Unavailable
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.cluster import build
from tests.support.checker import problems_of
from tests.support.kubeclient import KubeClient

NODE = "gpu-a"
SPEC = ClusterSpec(
    nodes=(NodeSpec(name=NODE, profile="8xA100-40"),), slots=16, node_cpu="200", backoff_s=1
)
PLANES = ("sim", "real")
MODES = ("device-plugin", "dra")
LIMIT_S = 120.0
SETTLE_S = 15.0
OURS = ("hami-scheduler", "hami-registry", "hami-nodeagent", "hami-webhook")
BIND_SECONDS = "hami_scheduler_verb_seconds"
KUBE_SCHEDULER = "kube-scheduler"
PREPARE_SECONDS = "hami_nodeagent_claim_prepare_seconds"
CONFLICTS = "hami_scheduler_fence_conflicts"

Document = dict[str, Any]


def burst_pod(number: int) -> Document:
    """A pod that asks for one share of a size of its own and sleeps."""
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(500 + 10 * number)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"burst-{number}"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "main",
                    "image": "app",
                    "command": ["sh", "-c", "cat /etc/hami/limits; exec sleep 100000"],
                    "resources": {"limits": limits},
                }
            ],
        },
    }


async def burst(cluster: Cluster, pods: Sequence[Document]) -> Document:
    """Create all pods at once and wait until each is bound; one row."""
    before = await _measured(cluster)
    names = {pod["metadata"]["name"] for pod in pods}
    begun = anyio.current_time()
    bound_s = 0.0

    async def wait(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        nonlocal bound_s
        waiting = set(names)
        async with KubeClient(cluster.plane.access()) as client:
            while waiting:  # the server ends the watch of a reader that is too slow for it
                async with client.watch("pods", "default") as watch:
                    task_status.started()
                    task_status = anyio.TASK_STATUS_IGNORED
                    async for _, pod in watch:
                        if pod.get("spec", {}).get("nodeName"):
                            waiting.discard(pod["metadata"]["name"])
                        if not waiting:
                            break
        bound_s = anyio.current_time() - begun

    with anyio.move_on_after(LIMIT_S) as limit:
        async with anyio.create_task_group() as group:
            await group.start(wait)
            begun = anyio.current_time()
            for pod in pods:
                group.start_soon(cluster.create_pod, pod)
    if limit.cancelled_caught:
        raise Unavailable(peer="burst", detail=f"not all pods were bound in {LIMIT_S:g} s")
    problems = await _problems(cluster)
    after = await _measured(cluster)
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    return {
        "plane": cluster.plane.name,
        "mode": "dra" if cluster.spec.dra else "device-plugin",
        "pods": len(pods),
        "bound_s": round(bound_s, 3),
        "pods_per_s": round(len(pods) / bound_s, 1),
        "bind_p50_ms": round(_quantile(spent, BIND_SECONDS, 0.5) * 1000, 2),
        "bind_p99_ms": round(_quantile(spent, BIND_SECONDS, 0.99) * 1000, 2),
        "prepare_p99_ms": round(_quantile(spent, PREPARE_SECONDS, 0.99) * 1000, 2),
        "fence_conflicts": int(spent[CONFLICTS]),
        "api_writes_per_pod": round(spent["writes"] / len(pods), 2),
        "kube_scheduler_writes_per_pod": round(spent["scheduler writes"] / len(pods), 2),
        "problems": problems,
    }


async def _problems(cluster: Cluster) -> list[str]:
    """Return the violations once the parts had time to agree."""
    problems = ["not looked yet"]
    with anyio.move_on_after(SETTLE_S):
        while problems:
            problems = await problems_of(cluster, cluster.verifier(), namespace="default")
            if problems:
                await anyio.sleep(0.1)
    return problems


async def _measured(cluster: Cluster) -> dict[str, float]:
    """Counters now: buckets of times by name and upper bound, fence conflicts, API writes."""
    found: dict[str, float] = {CONFLICTS: 0.0}
    for service in ("scheduler", *cluster.agents):
        async with cluster.session.get(f"{cluster.url(service)}/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_bucket")
                is_bind = name == BIND_SECONDS and sample.labels.get("verb") == "bind"
                if sample.name != name and (is_bind or name == PREPARE_SECONDS):
                    found[f"{name} {sample.labels['le']}"] = sample.value
                elif sample.name == f"{CONFLICTS}_total":
                    found[CONFLICTS] = sample.value
    agents = await cluster.plane.write_agents()
    found["writes"] = float(sum(agent.startswith(OURS) for agent in agents))
    found["scheduler writes"] = float(sum(KUBE_SCHEDULER in agent for agent in agents))
    return found


def _quantile(spent: Mapping[str, float], name: str, share: float) -> float:
    """Seconds below which ``share`` of the calls were answered, linear within a bucket; 0: none."""
    buckets = sorted(
        (float(key.removeprefix(name)), n) for key, n in spent.items() if key.startswith(f"{name} ")
    )
    wanted = share * buckets[-1][1] if buckets else 0.0
    low, below = 0.0, 0.0
    for high, count in buckets:
        if count >= wanted and count > below:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / (count - below)
        low, below = high, count
    return low if wanted else 0.0


async def measure(plane: str, mode: str, count: int) -> Document:
    """One row, on a cluster of its own."""
    claims = {"dra": True, "settings": {"webhook": {"policy.allocation_mode": "dra"}}}
    spec = msgspec.structs.replace(SPEC, plane=plane, **(claims if mode == "dra" else {}))
    with tempfile.TemporaryDirectory(prefix="burst-", ignore_cleanup_errors=True) as folder:
        async with run_cluster(spec, Path(folder)) as cluster:
            return await burst(cluster, [burst_pod(number) for number in range(count)])


async def _measure_all(
    planes: Sequence[str], modes: Sequence[str], turns: int, count: int
) -> list[Document]:
    return [
        await measure(plane, mode, count)
        for plane in planes
        for _ in range(turns)
        for mode in modes
    ]


def report(rows: Sequence[Document], to: str) -> int:
    """Print the rows, or write them to the file ``to``; the exit code."""
    document = json.dumps({"rows": rows}, indent=2)
    if to == "-":
        print(document)
    elif to:
        Path(to).write_text(f"{document}\n", encoding="utf-8")
    else:
        for row in rows:
            print("  ".join(f"{name}={value}" for name, value in row.items()))
    return 1 if any(row["problems"] for row in rows) else 0


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="burst", description="Pods at once on one node.")
    parser.add_argument("--planes", default=",".join(PLANES), help="sim, real or both")
    parser.add_argument("--mode", default=MODES[0], help="device-plugin, dra or both, in turn")
    parser.add_argument("--turns", type=int, default=1, help="repetitions of each row")
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument("--json", default="", metavar="FILE", help="- for standard output")
    options = parser.parse_args()
    planes, modes = options.planes.split(","), options.mode.split(",")
    for option, words, known in (("planes", planes, PLANES), ("mode", modes, MODES)):
        if unknown := sorted(set(words) - set(known)):
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(known)}")
    if "real" in planes:
        os.environ[build.VARIABLE] = str(build.build())
    rows = anyio.run(_measure_all, planes, modes, options.turns, options.pods)
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
