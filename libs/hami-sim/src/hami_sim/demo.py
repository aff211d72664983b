# SPDX-License-Identifier: Apache-2.0
"""The demo.

Pods from ``examples/`` live their whole life in a simulated cluster, from manifest to running
process.

``--once`` checks what happened and exits (0 when everything did); without it the cluster keeps
running and its addresses are printed. ``--json FILE`` writes one document; every value in it is
read back from NATS, the API or the processes, never from this script's plan. This is a command for
people, so it prints.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import yaml

from hami_common import limits
from hami_common.errors import HamiError, WireInvalid
from hami_sim.cluster import Cluster, ClusterSpec, run_cluster

NAMESPACE = "default"
FIRST = (
    "whole-node",
    "whole-device",
    "memory",
    "memory-only",
    "memory-percentage",
    "cores",
    "use-type",
    "nouse-type",
    "use-uuid",
    "policy",
    "multi-container",
    "init-container",
)
"""Pods that run at once; the one that fills its node comes first, before anybody joins it."""
TOO_LARGE = "too-large"
WAITING = "waits-for-room"
DELETED = "whole-node"
RUN_S = 60.0

Document = dict[str, Any]


def examples_directory() -> Path:
    """Folder ``examples`` of the repository this runs from, else of the current directory."""
    for base in (*Path(__file__).resolve().parents, Path.cwd()):
        if (base / "examples" / "memory.yaml").is_file():
            return base / "examples"
    message = "no examples/ folder found; run the demo from the repository"
    raise FileNotFoundError(message)


def manifest(name: str) -> Document:
    """One example manifest."""
    document: Document = yaml.safe_load((examples_directory() / f"{name}.yaml").read_text())
    return document


async def _started(cluster: Cluster, name: str) -> bool:
    """Running, and every application container has printed its limits."""
    if not await cluster.pod_is(name, "Running", namespace=NAMESPACE):
        return False
    view = await cluster.pod(name, namespace=NAMESPACE)
    for kind, container in view.containers_in_order():
        if kind == "app" and limits.HEADER not in await cluster.container_log(
            name, container.name, namespace=NAMESPACE
        ):
            return False
    states = [s.state for s in await cluster.states_of(view.spec.node_name, view.metadata.uid)]
    return "running" in states


async def _refused(cluster: Cluster, name: str) -> bool:
    story = await cluster.story_of(name, namespace=NAMESPACE)
    return bool(story["reason"]) and not story["node"]


async def play(cluster: Cluster) -> tuple[list[Document], list[str]]:
    """Run the pods; returns their stories and what went wrong."""
    problems: list[str] = []
    begun = anyio.current_time()
    for name in [*FIRST, TOO_LARGE]:
        await cluster.create_pod(manifest(name), namespace=NAMESPACE)
    for name in FIRST:
        await cluster.until(f"pod {name} runs", partial(_started, cluster, name), limit_s=RUN_S)
    cluster.timings_s["first_pods_running"] = anyio.current_time() - begun
    await cluster.create_pod(manifest(WAITING), namespace=NAMESPACE)
    for name in (TOO_LARGE, WAITING):
        refused = partial(_refused, cluster, name)
        await cluster.until(f"pod {name} is refused", refused, limit_s=RUN_S)
    waited_for = (await cluster.story_of(WAITING, namespace=NAMESPACE))["reason"]
    stories = {
        name: await cluster.story_of(name, namespace=NAMESPACE) for name in [*FIRST, TOO_LARGE]
    }
    freed = anyio.current_time()
    await cluster.delete_pod(DELETED, namespace=NAMESPACE)
    await cluster.until(
        f"pod {WAITING} starts after {DELETED} was deleted",
        partial(_started, cluster, WAITING),
        limit_s=RUN_S,
    )
    cluster.timings_s["reused_after_delete"] = anyio.current_time() - freed
    gone = stories[DELETED]
    ledger = await cluster.ledger_of(gone["node"], gone["uid"])
    if ledger and ledger[-1][1].op == "release":
        gone["states"].append("released")
        gone["ledger_seq"] = ledger[-1][0]
        gone["phase"] = "Deleted"
    else:
        problems.append(f"{DELETED} was deleted, yet its share is still booked")
    stories[WAITING] = await cluster.story_of(WAITING, namespace=NAMESPACE)
    stories[WAITING]["waited_because"] = waited_for
    reused = {d["uuid"] for c in stories[WAITING]["containers"] for d in c["devices"]}
    if not reused <= {d["uuid"] for c in gone["containers"] for d in c["devices"]}:
        problems.append(f"{WAITING} does not use a device that {DELETED} left")
    for name, story in stories.items():
        problems.extend(
            f"{name}: {problem}" for problem in problems_of(story, pending=name == TOO_LARGE)
        )
    return list(stories.values()), problems


def problems_of(story: Document, *, pending: bool) -> list[str]:
    """What does not hold in a pod's story."""
    if pending:
        return (
            []
            if story["phase"] == "Pending" and story["reason"]
            else ["is not Pending with a reason"]
        )
    problems = []
    want = ["reserved", "bound", "prepared", "running"]
    if story["states"][: len(want)] != want:
        problems.append(f"states are {story['states']}, not {want}")
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
        if printed != given:
            problems.append(
                f"container {container['name']} sees {printed}, the ledger says {given}"
            )
        if container["kind"] == "app" and container["pid"] is None:
            problems.append(f"container {container['name']} has no process")
    return problems


def table(stories: list[Document]) -> str:
    """The pods as a table for people."""
    rows = [("POD", "PHASE", "NODE", "DEVICES", "STATES")]
    for story in stories:
        devices = ", ".join(
            f"{c['name']}: {len(c['devices'])} x {c['devices'][0]['memory_mib']} MiB"
            + (f" {c['devices'][0]['core_pct']} %" if c["devices"][0]["core_pct"] else "")
            for c in story["containers"]
            if c["devices"]
        )
        rows.append(
            (
                story["name"],
                story["phase"],
                story["node"] or "-",
                devices or "-",
                " ".join(story["states"]) or "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def say(text: str) -> None:
    """Print for the person at the terminal."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def demo(*, once: bool, json_path: Path | None, directory: Path) -> int:
    """Run the demo; the exit code."""
    begun = anyio.current_time()
    async with run_cluster(ClusterSpec(), directory) as cluster:
        ready_s = cluster.timings_s["cluster_ready"]
        say(f"cluster ready in {ready_s:.1f} s: {len(cluster.spec.nodes)} nodes")
        stories, problems = await play(cluster)
        events = await cluster.event_count()
        cluster.timings_s["total"] = anyio.current_time() - begun
        say(table(stories))
        for story in stories:
            if story["phase"] == "Pending":
                say(f"\n{story['name']} is Pending: {story['reason']}")
        say(f"\n{events} events in HAMI_EVENTS")
        for problem in problems:
            say(f"PROBLEM {problem}")
        document = {
            "ok": not problems,
            "problems": problems,
            "pods": stories,
            "events": events,
            "timings_s": {name: round(value, 3) for name, value in cluster.timings_s.items()},
        }
        if json_path is not None:
            json_path.write_text(json.dumps(document, indent=2) + "\n")
        if not once:
            say(f"\nKubernetes API  {cluster.api_url}")
            say(f"                kubectl --kubeconfig {cluster.kubeconfig} get pods -o wide")
            say(f"registry API    {cluster.url('registry')}/v1/allocations")
            say(f"NATS            {cluster.nats.url}")
            say("stop with Ctrl-C")
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    break
        return 0 if not problems else 1


def main() -> int:
    """Entry point of ``./dev demo``."""
    parser = argparse.ArgumentParser(
        prog="demo", description="Run the example pods in a simulated cluster."
    )
    parser.add_argument("--once", action="store_true", help="check what happened and exit")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result as one JSON document"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and state in DIR")
    options = parser.parse_args()
    directory = options.keep or Path(tempfile.mkdtemp(prefix="hami-demo-"))
    failed = True
    try:
        code = _run(once=options.once, json_path=options.json, directory=directory)
        failed = code != 0
    except KeyboardInterrupt:
        code, failed = 0, False
    if failed:
        say(f"logs: {directory}/logs")
    elif options.keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _run(*, once: bool, json_path: Path | None, directory: Path) -> int:
    try:
        return anyio.run(lambda: demo(once=once, json_path=json_path, directory=directory))
    except* HamiError as group:
        for error in group.exceptions:
            say(f"FAILED {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
