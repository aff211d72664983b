# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the demo that run in a simulated cluster, and the checks of their figures.

A scenario file (``examples/scenarios/NAME.toml``) of kind ``cluster`` names the manifest of its
pods and bounds of figures; the function of the same name here creates the pods and measures the
figures on real services: from the ledger, from the registry's answers and from programs under the
limiter on the fake driver. Files of kind ``trace`` are played by ``hamictl scenario``. Times in
seconds, memory in MiB.
"""

import copy
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import anyio
import yaml
from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec

Document = dict[str, Any]
Figures = dict[str, float]
RUN_S: Final = 60.0
NODE: Final = NodeSpec(name="gpu-a30", profile="2xA30")
QUEUES: Final = """
[[queue]]
name = "gpu"
limit = { "nvidia/devices" = 16 }

[[queue]]
name = "serving"
parent = "gpu"
namespaces = ["serving"]

[[queue]]
name = "training"
parent = "gpu"
limit = { "nvidia/devices" = 1 }
task_priority_floor = 1
namespaces = ["training"]
"""
"""Training gets one share, and no container of it the highest task priority."""


class Check(Struct, frozen=True, kw_only=True):
    """A bound of a figure with its measured value."""

    text: str
    value: float
    least: float | None
    most: float | None

    @property
    def ok(self) -> bool:
        """Return whether the value is within the bounds."""
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )

    def line(self) -> str:
        """Return the check for a terminal."""
        bounds = [f"at least {self.least:g}"] if self.least is not None else []
        bounds += [f"at most {self.most:g}"] if self.most is not None else []
        state = "ok" if self.ok else "FAILED"
        return f"{state}: {self.text}: {self.value:g} ({', '.join(bounds)})"


def spec(directory: Path, *, nvml_library: str, limiter: str) -> ClusterSpec:
    """Return the cluster of all scenarios; ``directory`` gets the file of its queues."""
    directory.mkdir(parents=True, exist_ok=True)
    queues = directory / "queues.toml"
    queues.write_text(QUEUES, encoding="utf-8")
    return ClusterSpec(
        nodes=(NODE,),
        nvml_library=nvml_library,
        limiter=limiter,
        backoff_s=0.2,
        settings={
            # Limits hold for containers that are alone on a device, too, so that they show.
            "scheduler": {"vendors.nvidia.core_policy": "force", "queues_file": str(queues)},
            "nodeagent": {"vendors.nvidia.core_policy": "force"},
        },
    )


def read(path: Path) -> Document:
    """Read a scenario file; ``SettingsInvalid`` when it is none."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        names = ", ".join(sorted(one.stem for one in path.parent.glob("*.toml")))
        raise SettingsInvalid(
            field="scenario", problem=f"{path.name}: {error}", fix=f"name one of: {names}"
        ) from error
    return document


async def play(cluster: Cluster, path: Path) -> list[Check]:
    """Play a scenario of kind ``cluster``, delete its pods, and check its figures."""
    document = read(path)
    pods = [
        one
        for one in yaml.safe_load_all(path.with_suffix(".yaml").read_text(encoding="utf-8"))
        if one
    ]
    for namespace in sorted({_namespace(pod) for pod in pods} - {"default"}):
        await _ensure_namespace(cluster, namespace)
    try:
        figures = await _PLAYS[document["name"]](cluster, pods)
    finally:
        await _clear(cluster, {_namespace(pod) for pod in pods})
    return [
        Check(
            text=one["text"],
            value=round(figures[one["value"]], 4),
            least=one.get("least"),
            most=one.get("most"),
        )
        for one in document["checks"]
    ]


# --- the scenarios --------------------------------------------------------------------------------


async def _ten_servings(cluster: Cluster, pods: list[Document]) -> Figures:
    """Ten inference servings share one card, each within its cap."""
    (template,) = pods
    names = [f"{template['metadata']['name']}-{number}" for number in range(10)]
    for name in names:
        await cluster.create_pod(_named(template, name))
    reports = {}
    for name in names:
        reports[name] = await _report(cluster, name, "default")
    devices = [one["device"] for one in reports.values()]
    return {
        "servings": len(reports),
        "cards": len({one["uuid"] for one in devices}),
        "intercepted": sum(one["intercepted"] for one in reports.values()),
        "largest_share_of_cap": max(one["allocated_mib"] / one["cap_mib"] for one in devices),
        "refused_at_cap": sum(one["refused"] == OUT_OF_MEMORY for one in devices),
        "largest_core_pct": max(one["device_pct"] for one in devices),
    }


async def _ab_test(cluster: Cluster, pods: list[Document]) -> Figures:
    """A base with 65 % of the traffic and seven variants with 5 % each share two cards."""
    base, variant = pods
    names = [base["metadata"]["name"]]
    names += [f"{variant['metadata']['name']}-{number}" for number in range(7)]
    await cluster.create_pod(base, namespace=_namespace(base))
    for name in names[1:]:
        await cluster.create_pod(_named(variant, name), namespace=_namespace(variant))
    reports = {name: await _report(cluster, name, "serving") for name in names}
    begin_s = await _registry_s(cluster)
    await anyio.sleep(COSTED_S)
    costed = await _consumption(cluster, begin_s)
    total, costed_s = costed["total"], costed["to_s"] - costed["from_s"]
    rates = {name: one["device"]["device_pct"] * KERNELS_PER_PCT for name, one in reports.items()}
    return {
        "services": len(reports),
        "cards": len({one["device"]["uuid"] for one in reports.values()}),
        "base_served": rates[names[0]] / (TRAFFIC_PER_S * 0.65),
        "least_variant_served": min(rates[name] for name in names[1:]) / (TRAFFIC_PER_S * 0.05),
        "cards_whole": total["whole_s"] / costed_s,
        "cards_occupied": total["occupied_s"] / costed_s,
        "cards_saved_ratio": total["whole_s"] / total["occupied_s"],
    }


async def _training_pause(cluster: Cluster, pods: list[Document]) -> Figures:
    """A burst of inference with a higher task priority pauses training on the same card."""
    training, second, burst = pods
    name, space = training["metadata"]["name"], _namespace(training)
    await cluster.create_pod(training, namespace=space)
    await cluster.until("training computes", partial(_has_steps, cluster, name, space, 10))
    await cluster.create_pod(second, namespace=space)
    waiting = second["metadata"]["name"]
    await cluster.until("the second training waits", partial(_is_refused, cluster, waiting, space))
    reason = (await cluster.story_of(waiting, namespace=space))["reason"]
    burst_name, burst_space = burst["metadata"]["name"], _namespace(burst)
    await cluster.create_pod(burst, namespace=burst_space)
    served = await _report(cluster, burst_name, burst_space)
    seen = len(await _steps(cluster, name, space))
    await cluster.until("training goes on", partial(_has_steps, cluster, name, space, seen + 15))
    steps = await _steps(cluster, name, space)
    during = await _steps(cluster, burst_name, burst_space)
    begin_ms, end_ms = during[0][1] + SETTLE_MS, during[-1][1]
    status = (await cluster.pod_document(name, namespace=space))["status"]
    before_per_s = _rate(steps, 0, during[0][1] - SETTLE_MS)
    counts = [count for count, _ in steps]
    return {
        "queued_by_quota": float("queue" in reason and "training" in reason),
        "burst_s": (end_ms - begin_ms) / 1000,
        "burst_kernels": during[-1][0],
        "burst_core_pct": served["device"]["device_pct"],
        "steps_during": _rate(steps, begin_ms, end_ms) / before_per_s,
        "steps_after": _rate(steps, end_ms + SETTLE_MS, steps[-1][1]) / before_per_s,
        "lost_steps": sum(max(0, a - b) for a, b in pairwise(counts)),
        "restarts": sum(one["restartCount"] for one in status["containerStatuses"]),
    }


OUT_OF_MEMORY: Final = 2
"""Error code of the CUDA driver when memory runs out."""
COSTED_S: Final = 3.0
TRAFFIC_PER_S: Final = 400.0
"""Requests of all variants together; each takes a kernel of 1 ms."""
KERNELS_PER_PCT: Final = 10.0
"""Kernels of 1 ms per second in one percent of a card's time."""
SETTLE_MS: Final = 400
"""Time around a begin or end that belongs to neither side."""
_PLAYS: Final[Mapping[str, Callable[[Cluster, list[Document]], Awaitable[Figures]]]] = {
    "ten-servings": _ten_servings,
    "ab-test": _ab_test,
    "training-pause": _training_pause,
}


# --- pods and their programs ----------------------------------------------------------------------


def _namespace(pod: Document) -> str:
    namespace: str = pod["metadata"].get("namespace", "default")
    return namespace


def _named(template: Document, name: str) -> Document:
    pod = copy.deepcopy(template)
    pod["metadata"]["name"] = name
    return pod


async def _ensure_namespace(cluster: Cluster, name: str) -> None:
    known = (await cluster.request("GET", "/api/v1/namespaces"))["items"]
    if name not in {one["metadata"]["name"] for one in known}:
        document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await cluster.create("/api/v1/namespaces", document)


async def _clear(cluster: Cluster, namespaces: set[str]) -> None:
    """Delete the pods, and wait until the ledger has released their shares."""
    uids = set()
    for namespace in namespaces:
        for pod in await cluster.pods(namespace=namespace):
            uids.add((pod.spec.node_name, pod.metadata.uid))
            await cluster.delete_pod(pod.metadata.name, namespace=namespace)

    async def released() -> bool:
        for node, uid in uids:
            ledger = await cluster.ledger_of(node, uid) if node else []
            if ledger and ledger[-1][1].op != "release":
                return False
        return True

    await cluster.until("the shares of the scenario are free", released, limit_s=RUN_S)


async def _report(cluster: Cluster, name: str, namespace: str) -> Document:
    """Return what ``gpu-demo`` of the pod printed after it has computed, with the cap."""

    async def finished() -> bool:
        if not (await cluster.pod(name, namespace=namespace)).spec.node_name:
            return False
        return "gpu.devices=" in await cluster.container_log(name, "main", namespace=namespace)

    await cluster.until(f"pod {name} has computed", finished, limit_s=RUN_S)
    text = await cluster.container_log(name, "main", namespace=namespace)
    pairs = [line.partition("=") for line in text.splitlines() if line.startswith("gpu.")]
    values = {key.removeprefix("gpu."): value for key, _, value in pairs}
    story = await cluster.story_of(name, namespace=namespace)
    (container,) = story["containers"]
    (share,) = container["devices"]
    return {
        "intercepted": values.get("intercepted") == "1",
        "device": {
            "uuid": values["0.uuid"],
            "cap_mib": share["memory_mib"],
            "allocated_mib": int(values["0.allocated_mib"]),
            "refused": int(values["0.refused"]),
            "device_pct": float(values["0.device_pct"]),
        },
    }


async def _is_refused(cluster: Cluster, name: str, namespace: str) -> bool:
    story = await cluster.story_of(name, namespace=namespace)
    return bool(story["reason"]) and not story["node"]


async def _steps(cluster: Cluster, name: str, namespace: str) -> list[tuple[int, int]]:
    """Return (kernels so far, milliseconds) of the program's progress."""
    text = await cluster.container_log(name, "main", namespace=namespace)
    lines = [line for line in text.split("\n")[:-1] if line.startswith("gpu.step=")]
    found = [line.removeprefix("gpu.step=").split() for line in lines]
    return [(int(count), int(at_ms)) for count, at_ms in found]


async def _has_steps(cluster: Cluster, name: str, namespace: str, count: int) -> bool:
    if not (await cluster.pod(name, namespace=namespace)).spec.node_name:
        return False
    return len(await _steps(cluster, name, namespace)) >= count


def _rate(steps: list[tuple[int, int]], from_ms: int, to_ms: int) -> float:
    """Return kernels per second in an interval, from the progress around it."""
    before = [one for one in steps if one[1] <= from_ms] or steps[:1]
    until = [one for one in steps if one[1] <= to_ms] or steps[:1]
    (first, first_ms), (last, _) = before[-1], until[-1]
    return (last - first) / max(0.001, (to_ms - max(from_ms, first_ms)) / 1000)


# --- the registry ---------------------------------------------------------------------------------


async def _registry_s(cluster: Cluster) -> float:
    return float((await _consumption(cluster, None))["to_s"])


async def _consumption(cluster: Cluster, from_s: float | None) -> Document:
    url = f"{cluster.url('registry')}/v1/consumption"
    params = {"namespace": "serving"} | ({} if from_s is None else {"from": f"{from_s:.3f}"})
    async with cluster.session.get(url, params=params) as response:
        document: Document = await response.json()
        return document
