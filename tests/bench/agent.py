# SPDX-License-Identifier: Apache-2.0
"""Memory and processor time of one node's agent while its pods do nothing.

Run as ``./dev bench agent [--pod | --against CHECKOUT] [--windows 6] [--seconds 10] [--json -]``.
One simulated node of eight devices has ``--shares`` running containers, each with a share under the
limiter and a process that holds device memory, so that the agent reads as many usage regions as on
a real node. With ``--against`` a second, equal node is served by the agent of another checkout, and
both sides are measured in the same windows. With ``--pod`` the agent is measured in its pod: HAMi
is installed from its images on a cluster of one real node, as for ``./dev test install``.

One row per side (``here``, ``against``) and process (``agent``, ``plugin-proxy``): ``rss_mib``,
``pss_mib``, ``anonymous_mib`` (the part that is not shared with a file), ``cpu_pct`` of one core,
``switches_per_s`` (voluntary: the process slept in between) and ``threads``, each as minimum,
median and maximum over the windows. ``calls`` counts the system calls that a process makes in one
more window, by ``strace``; absent where that program is. ``is_met`` compares the medians of the
agent with ``RSS_MOST_MIB`` and ``CPU_MOST_PCT``; the exit code is 1 if they are larger.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
from msgspec import Struct

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.cluster.node.node import base
from tests.cluster.site import parts
from tests.cluster.site.site import Site, run_site
from tests.fakes.gpucontainers import why_not
from tests.install.installation import Installation
from tests.install.tenant import Tenant, share
from tests.support.kubeclient import KubeClient
from tools import build_native, build_native_fakes

RSS_MOST_MIB = 60.0
CPU_MOST_PCT = 0.5
NODES = {"here": "gpu-a", "against": "gpu-b"}
PROCESSES = ("agent", "plugin-proxy")
PROFILE = "8xA100-40"
DEVICES = 8
SETTLE_S = 20.0
"""Time after the last pod's start before the first window: longer than the agent's check of
kubelet's list and its first retries."""
TRACE_S = 10.0
INSIDE = "/opt/idle"
SOURCES = (
    "services/nodeagent/src",
    "libs/hami-common/src",
)
ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("agent_idle.c")
_KIB_PER_MIB = 1024
_CALL = re.compile(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)(?:\s+\d+)?\s+(\w+)$", re.MULTILINE)

Document = dict[str, Any]


class Reading(Struct, frozen=True, kw_only=True):
    """One window of one process."""

    rss_mib: float
    pss_mib: float
    anonymous_mib: float
    cpu_pct: float
    switches_per_s: float
    threads: int


class Counted(Struct, frozen=True, kw_only=True):
    """Counters of a process at one moment."""

    time_s: float
    cpu_s: float
    switches: int


def counted(pid: int) -> Counted:
    """Read the counters; processor time includes threads that have ended."""
    switches = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)$", status.read_text(), re.MULTILINE)
        switches += int(found[1]) if found else 0
    # The clock of another process, as clock_getcpuclockid(3) makes its number: nanoseconds, where
    # /proc/<pid>/stat counts in hundredths.
    cpu_s = time.clock_gettime((~pid << 3) | 2)
    return Counted(time_s=time.monotonic(), cpu_s=cpu_s, switches=switches)


def reading(pid: int, before: Counted) -> Reading:
    """Return the window that ends now."""
    now = counted(pid)
    took_s = now.time_s - before.time_s
    memory = _memory_mib(pid)
    return Reading(
        rss_mib=memory["Rss"],
        pss_mib=memory["Pss"],
        anonymous_mib=memory["Anonymous"],
        cpu_pct=100 * (now.cpu_s - before.cpu_s) / took_s,
        switches_per_s=(now.switches - before.switches) / took_s,
        threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
    )


def _memory_mib(pid: int) -> dict[str, float]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return {
        name: int(kib) / _KIB_PER_MIB
        for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }


def calls_of(pid: int, seconds: float) -> dict[str, int] | None:
    """System calls by name, most frequent first; ``None`` without ``strace``."""
    if shutil.which("strace") is None:
        return None
    command = ["strace", "-c", "-f", "-q", "-S", "calls", "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        time.sleep(seconds)
        tracer.send_signal(signal.SIGINT)
        _, text = tracer.communicate()
    return {name: int(count) for count, name in _CALL.findall(text) if name != "total"}


def share_pod(name: str, node: str, programs: Path) -> Document:
    """A pod with a share on this node whose program takes device memory and sleeps."""
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "2000", "nvidia.com/gpucores": "10"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"kubernetes.io/hostname": node},
            "volumes": [{"name": "idle", "hostPath": {"path": str(programs)}}],
            "containers": [
                {
                    "name": "main",
                    "image": "app",
                    "command": [f"{INSIDE}/idle", "100"],
                    "volumeMounts": [{"name": "idle", "mountPath": INSIDE, "readOnly": True}],
                    "resources": {"limits": limits},
                }
            ],
        },
    }


async def measure(options: argparse.Namespace, directory: Path) -> Document:
    """Build the cluster, wait until it is idle, and measure."""
    drivers = build_native_fakes.build(build_native_fakes.DEFAULT_OUT)
    roots = {"here": ROOT, **({"against": options.against} if options.against else {})}
    programs = directory / "programs"
    programs.mkdir()
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", programs / "idle", SOURCE, "-ldl"], check=True)
    spec = ClusterSpec(
        nodes=tuple(
            NodeSpec(
                name=NODES[side],
                profile=PROFILE,
                agent_paths=tuple(str(root / source) for source in SOURCES),
            )
            for side, root in roots.items()
        ),
        slots=16,
        node_cpu="200",
        nvml_library=str(drivers / build_native_fakes.NVML),
        limiter=str(build_native.build("release")),
        plane="sim",
    )
    async with run_cluster(spec, directory / "cluster") as cluster:
        names = []
        for side in roots:
            for number in range(options.shares):
                names.append(f"idle-{side}-{number}")
                await cluster.create_pod(share_pod(names[-1], NODES[side], programs))
        await cluster.until("all shares run", lambda: _run(cluster, set(names)), limit_s=120.0)
        await anyio.sleep(SETTLE_S)
        pids = {
            (side, process): _pid(cluster, f"{process}-{NODES[side]}")
            for side in roots
            for process in PROCESSES
        }
        return await _windows(pids, options)


def _pid(cluster: Cluster, process: str) -> int:
    pid = cluster.processes[process].pid
    assert pid is not None
    return pid


async def measure_pod(options: argparse.Namespace, directory: Path) -> Document:
    """Install HAMi on a site, run the shares, wait until they are idle, and measure."""
    async with (
        run_site(Site(parts.built(), directory)) as site,
        KubeClient(site.plane.access()) as client,
    ):
        installation = Installation(site, client, 0)
        await installation.ensure("dev")
        tenant = Tenant(site)
        names = [f"idle-{number}" for number in range(options.shares)]
        for name in names:
            await tenant.create(holding_pod(name))
        for name in names:
            await tenant.running(name)
        await anyio.sleep(SETTLE_S)
        commands = {"agent": "nodeagent.toml", "plugin-proxy": "plugin-proxy"}
        pids = {("here", process): _pid_with(word) for process, word in commands.items()}
        return await _windows(pids, options)


def holding_pod(name: str) -> Document:
    """A pod of the site with a share, whose program takes device memory and sleeps."""
    pod = share(name, memory_mib=2000, core_pct=10)
    hold = "(printf 'init\\ndevice 0\\nfill 100M 1\\n'; sleep 100000) | /bin/drive link"
    pod["spec"]["containers"][0]["command"] = ["sh", "-c", hold]
    return pod


def _pid_with(word: str) -> int:
    """The process of the agent's image with an argument that ends so."""
    [found] = (
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "hami_nodeagent" in " ".join(process.info["cmdline"] or ())
        and any(argument.endswith(word) for argument in process.info["cmdline"])
    )
    return int(found)


async def _run(cluster: Cluster, names: set[str]) -> bool:
    running = {pod.metadata.name for pod in await cluster.pods() if pod.status.phase == "Running"}
    return names <= running


async def _windows(pids: Mapping[tuple[str, str], int], options: argparse.Namespace) -> Document:
    readings: dict[tuple[str, str], list[Reading]] = {key: [] for key in pids}
    for _ in range(options.windows):
        before = {key: counted(pid) for key, pid in pids.items()}
        await anyio.sleep(options.seconds)
        for key, pid in pids.items():
            readings[key].append(reading(pid, before[key]))
    rows = []
    for (side, process), found in readings.items():
        calls = None
        if options.trace:
            calls = await anyio.to_thread.run_sync(calls_of, pids[side, process], TRACE_S)
        rows.append(_row(side, process, found, calls))
    agent = next(row for row in rows if row["side"] == "here" and row["process"] == "agent")
    return {
        "shares": options.shares,
        "devices": DEVICES,
        "windows": options.windows,
        "seconds": options.seconds,
        "rows": rows,
        "is_met": agent["rss_mib"][1] <= RSS_MOST_MIB and agent["cpu_pct"][1] <= CPU_MOST_PCT,
        "load": [round(value, 1) for value in os.getloadavg()],
    }


def _row(
    side: str, process: str, found: Sequence[Reading], calls: Mapping[str, int] | None
) -> Document:
    row: Document = {"side": side, "process": process}
    for name in Reading.__struct_fields__:
        values = [getattr(one, name) for one in found]
        row[name] = [
            round(value, 2) for value in (min(values), statistics.median(values), max(values))
        ]
    if calls is not None:
        row["calls"] = dict(calls)
    return row


def _print(document: Document) -> None:
    print("| side | process | RSS MiB | PSS MiB | anonymous MiB | CPU % | switches/s | threads |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in document["rows"]:
        cells = [" / ".join(f"{v:g}" for v in row[name]) for name in Reading.__struct_fields__]
        print(f"| {row['side']} | {row['process']} | {' | '.join(cells)} |")
        if "calls" in row:
            often = ", ".join(
                f"{name} {count / TRACE_S:.1f}" for name, count in list(row["calls"].items())[:12]
            )
            print(f"|  | calls per second: {often} |")
    print(f"load average {document['load']}; within the target: {document['is_met']}")


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="agent", description="Cost of an idle node agent.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--against", type=Path, help="checkout whose agent is measured beside")
    where.add_argument("--pod", action="store_true", help="measure the agent in its pod")
    parser.add_argument("--shares", type=int, default=40)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window")
    parser.add_argument("--trace", action="store_true", help="also count system calls")
    parser.add_argument("--json", default="", metavar="FILE", help="- for standard output")
    options = parser.parse_args()
    if options.against is not None:
        options.against = options.against.resolve()
    reason = "" if options.pod else why_not()
    if reason:
        parser.error(f"shares under the limiter need containers: {reason}")
    work, below = (measure_pod, base()) if options.pod else (measure, None)
    with tempfile.TemporaryDirectory(
        prefix="agent-", dir=below, ignore_cleanup_errors=True
    ) as folder:
        document = anyio.run(work, options, Path(folder))
    text = json.dumps(document, indent=2)
    if options.json == "-":
        print(text)
    else:
        _print(document)
        if options.json:
            Path(options.json).write_text(f"{text}\n", encoding="utf-8")
    return 0 if document["is_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
