# SPDX-License-Identifier: Apache-2.0
"""The demo's profile ``mixed``: one small cluster with devices of every vendor, and its pods.

Each node has devices of several vendors, unlike in a data center, so that code that confuses
vendors fails. Every manifest of ``examples/<vendor>/`` is created; where devices can be shared, the
two sharers must be placed on one device. A pod whose name ends in ``-refused`` must stay Pending
and report the reason. All other pods run, print their limits and are deleted at the end; afterwards
every device must be free.
"""

from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hami_common.errors import WireInvalid
from hami_common.pods import limits
from hami_sim.cluster import Cluster, NodeSpec

NAMESPACE = "default"
RUN_S = 120.0
REFUSED = "-refused"
SHARERS = ("-share-a", "-share-b")
NODES = (
    NodeSpec(name="mixed-a", profile="8xA100-40", others=("8xAscend910B3", "8xMLU370", "4xK100AI")),
    NodeSpec(
        name="mixed-b",
        profile="2xH200-MIG",
        others=("8xAscend910B4", "4xMR-V100", "8xMTT-S4000", "8xMXC500"),
    ),
    NodeSpec(name="mixed-c", profile="4xAscend310P", others=("4xS60", "8xP800", "16xTrainium")),
    NodeSpec(name="mixed-d", profile="16xAscend910C", others=("8xMI300X", "4xBiren166", "4xVA16")),
)
"""Every vendor, and every kind of Ascend chip that has a profile, once; NVIDIA in two modes."""

PRETENDED = ("/opt", "/usr/bin", "/usr/lib64", "/usr/local", "/etc")
"""Directories with the vendors' drivers and tools on real nodes."""

Document = dict[str, Any]


def vendors() -> list[str]:
    """Words of the vendors that the nodes hold."""
    return sorted({vendor for node in NODES for vendor in node.profiles()})


def manifests(examples: Path) -> list[Document]:
    """Every pod of ``examples/<vendor>/``: sharers first, on empty devices, the refused last."""
    found = [
        document
        for vendor in vendors()
        for path in sorted((examples / vendor).glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if document
    ]
    return sorted(found, key=_turn)


def _turn(document: Document) -> int:
    if name_of(document).endswith(SHARERS):
        return 0
    return 2 if name_of(document).endswith(REFUSED) else 1


def name_of(document: Document) -> str:
    """A pod's name."""
    name: str = document["metadata"]["name"]
    return name


async def play(cluster: Cluster, examples: Path) -> tuple[list[Document], list[str]]:
    """Run the pods; returns their stories and what went wrong."""
    names = []
    for document in manifests(examples):
        names.append(name_of(document))
        await cluster.create_pod(document, namespace=NAMESPACE)
        if not names[-1].endswith(REFUSED):
            # One after the other, so that which device binpack takes is no race.
            what = f"pod {names[-1]} runs"
            await cluster.until(what, partial(_runs, cluster, names[-1]), limit_s=RUN_S)
    stories = {}
    for name in names:
        if name.endswith(REFUSED):
            waits = partial(_waits, cluster, name)
            await cluster.until(f"pod {name} is refused", waits, limit_s=RUN_S)
        stories[name] = await cluster.story_of(name, namespace=NAMESPACE)
    problems = [
        f"{name}: {problem}" for name, story in stories.items() for problem in _problems(story)
    ]
    problems += _problems_of_sharers(stories)
    problems += [
        f"no example of {vendor}"
        for vendor in vendors()
        if not any(name.startswith(f"{vendor}-") for name in names)
    ]
    await _end(cluster, stories)
    return list(stories.values()), problems


async def _runs(cluster: Cluster, name: str) -> bool:
    if not await cluster.pod_is(name, "Running", namespace=NAMESPACE):
        return False
    view = await cluster.pod(name, namespace=NAMESPACE)
    states = [s.state for s in await cluster.states_of(view.spec.node_name, view.metadata.uid)]
    if "running" not in states:
        return False
    log = await cluster.container_log(name, "main", namespace=NAMESPACE)
    return "device." in log


async def _waits(cluster: Cluster, name: str) -> bool:
    story = await cluster.story_of(name, namespace=NAMESPACE)
    return bool(story["reason"]) and not story["node"]


def _problems(story: Document) -> list[str]:
    if story["name"].endswith(REFUSED):
        is_told = story["phase"] == "Pending" and story["reason"]
        return [] if is_told else ["is not Pending with a reason"]
    problems = []
    if story["states"] != ["reserved", "bound", "prepared", "running"]:
        problems.append(f"states are {story['states']}")
    if not story["trace_id"]:
        problems.append("has no trace")
    for container in story["containers"]:
        try:
            seen = limits.decode(container["stdout"])
        except WireInvalid as error:
            problems.append(f"container {container['name']} printed no limits: {error}")
            continue
        printed = [(d.uuid, d.memory_mib, d.core_pct) for d in seen.devices]
        given = [(d["uuid"], d["memory_mib"], d["core_pct"]) for d in container["devices"]]
        if not given or printed != given:
            problems.append(f"container {container['name']} sees {printed}, was given {given}")
    return problems


def _problems_of_sharers(stories: dict[str, Document]) -> list[str]:
    problems = []
    for vendor in vendors():
        pair = [stories[f"{vendor}{end}"] for end in SHARERS if f"{vendor}{end}" in stories]
        used = [{d["uuid"] for c in story["containers"] for d in c["devices"]} for story in pair]
        if len(pair) == len(SHARERS) and used[0] != used[1]:
            problems.append(f"the sharers of {vendor} are on different devices: {used}")
    return problems


async def _end(cluster: Cluster, stories: dict[str, Document]) -> None:
    """Delete every pod and wait until each share is released."""
    for name in stories:
        await cluster.delete_pod(name, namespace=NAMESPACE)
    for name, story in stories.items():
        if not story["node"]:
            continue

        async def is_released(story: Document = story) -> bool:
            ledger = await cluster.ledger_of(story["node"], story["uid"])
            return bool(ledger) and ledger[-1][1].op == "release"

        await cluster.until(f"share of {name} is released", is_released, limit_s=RUN_S)
        ledger = await cluster.ledger_of(story["node"], story["uid"])
        story["states"].append("released")
        story["ledger_seq"] = ledger[-1][0]
        story["phase"] = "Deleted"
