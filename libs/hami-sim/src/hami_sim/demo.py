# SPDX-License-Identifier: Apache-2.0
"""The demo.

Pods from ``examples/`` live their whole life in a simulated cluster, from manifest to running
process. Where a container asks for a device, it runs ``gpu-demo`` instead of the example's command:
a small program on the (fake) CUDA driver that takes memory until it is refused and computes as fast
as it may, under the real in-container limiter, and prints what it got.

``--once`` checks what happened and exits (0 when everything did); without it the cluster keeps
running and its addresses are printed. ``--json FILE`` writes one document; every value in it is
read back from NATS, the API or the processes, never from this script's plan. ``--scenario NAME``
plays a use case instead (``hami_sim.scenarios``). This is a command for people, so it prints.
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

from hami_common.errors import HamiError, Unavailable, WireInvalid
from hami_common.pods import limits
from hami_sim import demo_mixed, scenarios
from hami_sim.cluster import DEFAULT_NODES, Cluster, ClusterSpec, run_cluster

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
CAPPED_S, UNCAPPED_S = 2.0, 0.2
"""Durations for which containers with and without a compute limit compute."""
OUT_OF_MEMORY = 2
"""Error code of the CUDA driver when memory runs out."""
CONTEXT_MIB = 640
"""At most this much of a share goes to contexts of the driver."""
CORE_NOISE_PCT = 10

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


def computing(document: Document) -> Document:
    """The manifest with ``gpu-demo`` in each container that asks for a device."""
    spec = document["spec"]
    for containers, once in (("initContainers", " --once"), ("containers", "")):
        for container in spec.get(containers) or []:
            limits_asked = (container.get("resources") or {}).get("limits") or {}
            if any(name.startswith("nvidia.com/") for name in limits_asked):
                seconds = CAPPED_S if "nvidia.com/gpucores" in limits_asked else UNCAPPED_S
                run = f"cat /etc/hami/limits; exec gpu-demo --seconds {seconds:g}{once}"
                container["command"] = ["sh", "-c", run]
    return document


def without_messages(stdout: str) -> str:
    """Return a container's output without messages of the limiter, as busy machines cause them."""
    lines = stdout.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("hami: "))


def reported(stdout: str) -> Document:
    """Parse the output of ``gpu-demo``: ``intercepted``, ``error`` and the devices."""
    pairs = [line.partition("=") for line in stdout.splitlines() if line.startswith("gpu.")]
    values = {key.removeprefix("gpu."): value for key, _, value in pairs}
    devices = [
        {
            "uuid": values.get(f"{number}.uuid", ""),
            "device_pct": float(values.get(f"{number}.device_pct", "0")),
            **{
                key: int(values.get(f"{number}.{key}", "0"))
                for key in ("total_mib", "free_mib", "allocated_mib", "refused", "launches")
            },
        }
        for number in range(int(values.get("devices", "0")))
    ]
    return {
        "intercepted": values.get("intercepted") == "1",
        "error": values.get("error", ""),
        "devices": devices,
    }


async def _started(cluster: Cluster, name: str) -> bool:
    """Running, and every application container has shown what it got."""
    if not await cluster.pod_is(name, "Running", namespace=NAMESPACE):
        return False
    view = await cluster.pod(name, namespace=NAMESPACE)
    for kind, container in view.containers_in_order():
        if kind == "app":
            log = await cluster.container_log(name, container.name, namespace=NAMESPACE)
            if "gpu.devices=" not in log and "gpu.error=" not in log:
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
        await cluster.create_pod(computing(manifest(name)), namespace=NAMESPACE)
    for name in FIRST:
        await cluster.until(f"pod {name} runs", partial(_started, cluster, name), limit_s=RUN_S)
    cluster.timings_s["first_pods_running"] = anyio.current_time() - begun
    await cluster.create_pod(computing(manifest(WAITING)), namespace=NAMESPACE)
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
        for container in story["containers"]:
            container["gpu"] = reported(container["stdout"])
        problems.extend(
            f"{name}: {problem}" for problem in problems_of(story, pending=name == TOO_LARGE)
        )
    return list(stories.values()), problems


def problems_of(story: Document, *, pending: bool) -> list[str]:
    """Return the violated expectations in a pod's history."""
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
            seen = limits.decode(without_messages(container["stdout"]))
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
        problems += [
            f"container {container['name']}: {problem}" for problem in problems_inside(container)
        ]
    return problems


def problems_inside(container: Document) -> list[str]:
    """Return mismatches between a container's shares and the memory and compute its program got."""
    gpu, given = container["gpu"], {d["uuid"]: d for d in container["devices"]}
    is_whole = all(device["exclusive"] for device in given.values())
    if gpu["error"] or {device["uuid"] for device in gpu["devices"]} != set(given):
        return [f"saw devices {gpu['devices']} of {sorted(given)}; {gpu['error']}"]
    problems = []
    if gpu["intercepted"] == is_whole:
        problems.append(f"whole devices: {is_whole}, yet intercepted: {gpu['intercepted']}")
    for device in gpu["devices"]:
        limit_mib = given[device["uuid"]]["memory_mib"]
        core_pct = given[device["uuid"]]["core_pct"] or 100
        if device["total_mib"] != limit_mib and not is_whole:
            problems.append(f"total is {device['total_mib']} MiB, its limit is {limit_mib} MiB")
        got_mib = device["allocated_mib"]
        if not limit_mib - CONTEXT_MIB <= got_mib <= limit_mib:
            problems.append(f"got {got_mib} MiB of {limit_mib} MiB")
        if device["refused"] != OUT_OF_MEMORY:
            problems.append(f"was refused with code {device['refused']}, not {OUT_OF_MEMORY}")
        if not 0 < device["device_pct"] <= core_pct + CORE_NOISE_PCT:
            problems.append(f"got {device['device_pct']} % of the device, its limit is {core_pct}")
    return problems


def table(stories: list[Document]) -> str:
    """The pods as a table for people."""
    rows = [("POD", "PHASE", "NODE", "DEVICES", "GOT", "STATES")]
    for story in stories:
        devices = ", ".join(
            f"{c['name']}: {len(c['devices'])} x {c['devices'][0]['memory_mib']} MiB"
            + (f" {c['devices'][0]['core_pct']} %" if c["devices"][0]["core_pct"] else "")
            for c in story["containers"]
            if c["devices"]
        )
        got = ", ".join(
            f"{c['name']}: {d['allocated_mib']} MiB {d['device_pct']:.0f} %"
            for c in story["containers"]
            for d in c.get("gpu", {}).get("devices", [])[:1]
        )
        rows.append(
            (
                story["name"],
                story["phase"],
                story["node"] or "-",
                devices or "-",
                got or "-",
                " ".join(story["states"]) or "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


async def built(tool: str, *arguments: str) -> Path:
    """Return the path that a tool of the repository builds or has built: its last printed line."""
    program = examples_directory().parent / "tools" / tool
    done = await anyio.run_process([sys.executable, str(program), *arguments], check=False)
    if done.returncode != 0:
        raise Unavailable(peer=tool, detail=done.stderr.decode(errors="replace"))
    return Path(done.stdout.decode().splitlines()[-1])


async def built_console() -> str:
    """Return the directory of the console; empty if there is none, with the reason printed.

    A console that cannot be built now, such as without access to packages, is that of an earlier
    build if there is one.
    """
    try:
        return str(await built("build_console.py", "build"))
    except Unavailable as error:
        reason = (error.detail.strip().splitlines() or ["no reason given"])[-1]
    earlier = examples_directory().parent / "build" / "console"
    has_earlier = (earlier / "index.html").is_file()
    state = "is that of an earlier build" if has_earlier else "is not served"
    say(f"the console {state}, it could not be built: {reason}")
    return str(earlier) if has_earlier else ""


def exports(cluster: Cluster) -> str:
    """Return shell exports that point kubectl and hamictl at the cluster."""
    variables = {
        "KUBECONFIG": cluster.kubeconfig,
        "HAMICTL_REGISTRY": cluster.url("registry"),
        "HAMICTL_SCHEDULER": cluster.url("scheduler"),
        "HAMICTL_NATS": cluster.nats.url,
        "PATH": f"{Path(sys.executable).parent}:$PATH",
    }
    return "export " + " ".join(f"{name}={value}" for name, value in variables.items())


def say(text: str) -> None:
    """Print for the person at the terminal."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


PROFILES = ("nvidia", "mixed", "dra")


async def demo(*, once: bool, profile: str, json_path: Path | None, directory: Path) -> int:
    """Run the demo; the exit code."""
    begun = anyio.current_time()
    spec = ClusterSpec(
        nodes=demo_mixed.NODES if profile == "mixed" else DEFAULT_NODES,
        pretended_paths=demo_mixed.PRETENDED if profile == "mixed" else (),
        nvml_library=str(await built("build_native_fakes.py") / "libnvidia-ml.so.1"),
        limiter=str(await built("build_native.py")),
        # Limits hold for containers that are alone on a device, too, so that they show.
        settings={
            "scheduler": {"vendors.nvidia.core_policy": "force"},
            "nodeagent": {"vendors.nvidia.core_policy": "force"},
            "webhook": {"policy.allocation_mode": "dra"} if profile == "dra" else {},
        },
        dra=profile == "dra",
        console="" if once else await built_console(),
    )
    built_s = anyio.current_time() - begun
    async with run_cluster(spec, directory) as cluster:
        cluster.timings_s["built"] = built_s
        ready_s = cluster.timings_s["cluster_ready"]
        say(f"cluster ready in {ready_s:.1f} s: {len(cluster.spec.nodes)} nodes")
        if profile == "mixed":
            stories, problems = await demo_mixed.play(cluster, examples_directory())
        else:
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
            say("\nIn another terminal kubectl and hamictl find the cluster after this line:")
            say(exports(cluster))
            if spec.console:
                say(f"\nConsole: {cluster.url('registry')}/console/")
            say("\nstop with Ctrl-C")
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    break
        return 0 if not problems else 1


async def play_scenarios(names: list[str], directory: Path) -> int:
    """Play scenarios, those in a cluster in the same one; the exit code."""
    folder = examples_directory() / "scenarios"
    files = [folder / f"{name}.toml" for name in names]
    documents = [scenarios.read(path) for path in files]
    in_cluster = [
        path for path, one in zip(files, documents, strict=True) if one["kind"] == "cluster"
    ]
    code = 0
    for path in files:
        if path not in in_cluster:
            say(f"\n{path.stem}")
            command = [sys.executable, "-m", "hamictl", "scenario", str(path)]
            code |= (await anyio.run_process(command, check=False, stdout=None)).returncode
    if not in_cluster:
        return code
    spec = scenarios.spec(
        directory,
        nvml_library=str(await built("build_native_fakes.py") / "libnvidia-ml.so.1"),
        limiter=str(await built("build_native.py")),
    )
    async with run_cluster(spec, directory) as cluster:
        for path in in_cluster:
            say(f"\n{path.stem}: {scenarios.read(path)['purpose']}")
            checks = await scenarios.play(cluster, path)
            for check in checks:
                say(check.line())
            code |= not all(check.ok for check in checks)
    return code


def main() -> int:
    """Entry point of ``./dev demo``."""
    parser = argparse.ArgumentParser(
        prog="demo", description="Run the example pods in a simulated cluster."
    )
    parser.add_argument("--once", action="store_true", help="check what happened and exit")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        default=PROFILES[0],
        help="nvidia: GPU programs under their limits; mixed: devices of every vendor;"
        " dra: as nvidia, with the devices from ResourceClaims",
    )
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        metavar="NAME",
        help="play examples/scenarios/NAME.toml, check its figures and exit; may be repeated",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result as one JSON document"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and state in DIR")
    options = parser.parse_args()
    directory = options.keep or Path(tempfile.mkdtemp(prefix="hami-demo-"))
    failed = True
    try:
        code = _run(
            once=options.once,
            profile=options.profile,
            json_path=options.json,
            directory=directory,
            names=options.scenario,
        )
        failed = code != 0
    except KeyboardInterrupt:
        code, failed = 0, False
    if failed:
        say(f"logs: {directory}/logs")
    elif options.keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _run(
    *, once: bool, profile: str, json_path: Path | None, directory: Path, names: list[str]
) -> int:
    try:
        if names:
            return anyio.run(play_scenarios, names, directory)
        return anyio.run(
            lambda: demo(once=once, profile=profile, json_path=json_path, directory=directory)
        )
    except* HamiError as group:
        for error in group.exceptions:
            say(f"FAILED {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
