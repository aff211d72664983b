# SPDX-License-Identifier: Apache-2.0
"""``./dev cluster``: a real control plane, or a whole cluster of one node, for people.

    ./dev cluster up [--dir DIR] [--extender-url URL]   start it, print its kubeconfig
    ./dev cluster status [--dir DIR] [--json]           versions and health; exit 1 when not well
    ./dev cluster down [--dir DIR]                      end what `up` started, and nothing else
    ./dev cluster up --node                             a cluster of one real node, without HAMi
    ./dev cluster install                               install HAMi there, by docs/install.md
    ./dev cluster build                                 only build the programs, print the places

`up` and `build` take the newest tested release of Kubernetes, or the one of `--kubernetes`. State
is kept below DIR, by default in the user's cache. Objects of a control plane survive `down` and
`up`, but etcd refuses the state of a newer release; of a cluster with a node `down` leaves nothing.
One process holds all others and writes ``state.json``; `down` ends that process only if its start
time is the recorded one. `up` on a running cluster prints what runs. These are commands for people,
so they print.
"""

import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil

from hami_common.errors import HamiError
from hami_sim.kubernetes import ControlPlane, Programs, run_control_plane
from hami_sim.kubernetes.programs import SCHEDULER, VARIABLE
from tests.cluster import build
from tests.cluster.node.node import base
from tests.cluster.node.space import remove_cgroups
from tests.cluster.releases import NAMES
from tests.cluster.site import parts
from tests.cluster.site.install import apply, build_images, load_images, write_overlay
from tests.cluster.site.reach import Reach
from tests.cluster.site.site import Site, run_site
from tools import images

STATE = "state.json"
UP_S = 240.0
DOWN_S = 60.0
_POLL_S = 0.2
_SAME_START_S = 1.0

Document = dict[str, Any]


def say(text: str) -> None:
    """Print for the person at the terminal."""
    print(text, flush=True)


class Held:
    """The directory of one cluster and the process that holds it."""

    def __init__(self, directory: Path) -> None:
        """Read ``directory``."""
        self.directory = directory

    @property
    def log(self) -> Path:
        """Output of the holding process."""
        return self.directory / "cluster.log"

    def state(self) -> Document | None:
        """State that the holding process wrote, if it still runs."""
        try:
            state: Document = json.loads((self.directory / STATE).read_text(encoding="utf-8"))
            started_s = psutil.Process(state["pid"]).create_time()
        except (FileNotFoundError, ValueError, KeyError, psutil.NoSuchProcess):
            return None
        return state if abs(started_s - state["started_s"]) < _SAME_START_S else None

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Serialize commands on one directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def up(
    held: Held, extender_url: str, release: str | None = None, *, with_node: bool = False
) -> int:
    """Start the cluster unless it runs; the exit code."""
    with held.one_at_a_time():
        state = held.state()
        if state is None:
            _remove_leftovers(held)
            state = _start(held, extender_url, release, with_node=with_node)
        if state is None:
            return 1
    say(f"API server  {state['url']}")
    say(f"kubectl     {state['kubectl']} --kubeconfig {state['kubeconfig']} get nodes")
    say(f"KUBECONFIG  {state['kubeconfig']}")
    if "site" in state:
        reach = msgspec.convert(state["site"]["reach"], Reach)
        say(f"node        {shlex.join([*reach.on_node, 'sh'])}")
        say(f"images      {shlex.join([*reach.ctr, 'images', 'list'])}")
    return 0


def _start(
    held: Held, extender_url: str, release: str | None, *, with_node: bool
) -> Document | None:
    programs = build.build(release)
    if with_node:
        parts.built(release)
    (held.directory / STATE).unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.cluster", "hold", "--dir", str(held.directory)]
    if extender_url:
        command += ["--extender-url", extender_url]
    if with_node:
        command += ["--node"]
    with held.log.open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, VARIABLE: str(programs)},
        )
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline:
        state = held.state()
        if state is not None:
            return state
        if child.poll() is not None:
            break
        time.sleep(_POLL_S)
    else:
        child.terminate()
    tail = held.log.read_text(errors="replace").splitlines()[-25:]
    say("the cluster did not start:\n" + "\n".join(tail))
    return None


async def hold(held: Held, extender_url: str) -> None:
    """Hold the cluster until SIGTERM."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with run_control_plane(held.directory, Programs.from_environment()) as plane:
            await plane.install_accounts()
            login = await plane.kubeconfig_for_account("hami-kube-scheduler", name=SCHEDULER)
            plane.add_scheduler(login, extender_url=extender_url).start()
            await plane.until("the scheduler is ready", plane.is_scheduler_ready, SCHEDULER)
            _write_state(held, plane)
            async for _ in signals:
                break
            (held.directory / STATE).unlink(missing_ok=True)


async def hold_site(held: Held) -> None:
    """Hold a cluster with a node until SIGTERM."""
    with (
        anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
        tempfile.TemporaryDirectory(prefix="hami-site-", dir=base()) as directory,
    ):
        site = Site(parts.built(), Path(directory))
        async with run_site(site):
            _write_state(held, site.plane, site)
            async for _ in signals:
                break
            (held.directory / STATE).unlink(missing_ok=True)


def install(held: Held) -> int:
    """Install the overlay dev on the running cluster with a node; the exit code."""
    state = held.state()
    if state is None or "site" not in state:
        say("no cluster with a node runs there: ./dev cluster up --node")
        return 1
    reach = msgspec.convert(state["site"]["reach"], Reach)
    built = build_images(reach)
    overlay = write_overlay(Path(state["site"]["directory"]), "dev", built)

    async def do() -> None:
        await load_images(reach, [image.path for image in built.values()], overlay)
        for text in await apply(reach, overlay):
            say(text.rstrip())

    anyio.run(do)
    return 0


def _remove_leftovers(held: Held) -> None:
    """Remove what a killed holder of a node left: its processes are gone, files are not."""
    try:
        state = json.loads((held.directory / STATE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return
    if "site" in state:
        shutil.rmtree(state["site"]["directory"], ignore_errors=True)
        remove_cgroups(state["site"]["cgroup"])
    (held.directory / STATE).unlink(missing_ok=True)


def _write_state(held: Held, plane: ControlPlane, site: Site | None = None) -> None:
    mine = psutil.Process()
    state = {
        "pid": mine.pid,
        "started_s": mine.create_time(),
        "url": plane.url,
        "host": plane.host,
        "plane": str(plane.directory),
        "kubeconfig": str(plane.kubeconfig),
        "kubectl": plane.programs.path("kubectl"),
        "programs": str(plane.programs.directory),
        "ports": plane.ports,
        "pids": {name: process.pid for name, process in plane.processes.items()},
    }
    if site is not None:
        state["site"] = {
            "directory": str(site.directory),
            "cgroup": site.node.space.cgroup,
            "reach": msgspec.to_builtins(site.reach),
        }
    unfinished = held.directory / f"{STATE}.new"
    unfinished.write_text(json.dumps(state, indent=2), encoding="utf-8")
    unfinished.replace(held.directory / STATE)


def down(held: Held) -> int:
    """End the cluster if it runs; the exit code."""
    with held.one_at_a_time():
        state = held.state()
        if state is None:
            _remove_leftovers(held)
            say("no cluster runs there")
            return 0
        process = psutil.Process(state["pid"])
        process.terminate()
        try:
            process.wait(timeout=DOWN_S)
        except psutil.TimeoutExpired:
            say(f"process {state['pid']} did not end in {DOWN_S:g} s; see {held.log}")
            return 1
    say("stopped")
    return 0


def status(held: Held, *, as_json: bool) -> int:
    """Print what runs and its health; returns the exit code."""
    state = held.state()
    if state is None:
        say(json.dumps({"running": False}) if as_json else "no cluster runs there")
        return 1
    programs = Programs(Path(state["programs"]))
    plane = ControlPlane(Path(state["plane"]), programs, host=state["host"])
    plane.ports.update(state["ports"])
    versions = plane.programs.versions()

    async def look() -> dict[str, bool]:
        return {name: await plane.is_healthy(name) for name in state["pids"]}

    healthy = anyio.run(look)
    if as_json:
        document = {"running": True, **state, "versions": versions, "healthy": healthy}
        say(json.dumps(document, indent=2))
    else:
        say(f"{state['url']}   KUBECONFIG {state['kubeconfig']}")
        for name, is_well in healthy.items():
            word = "healthy" if is_well else "NOT HEALTHY"
            say(f"{name:<24} {versions.get(name, ''):<10} pid {state['pids'][name]:<8} {word}")
    return 0 if all(healthy.values()) else 1


def default_directory() -> Path:
    """The default directory of the cluster."""
    return build.cache().parent / "cluster"


def main() -> int:
    """Run one command; the exit code."""
    parser = argparse.ArgumentParser(prog="cluster", description="A real control plane.")
    parser.add_argument("command", choices=("up", "down", "status", "install", "build", "hold"))
    parser.add_argument("--dir", type=Path, default=default_directory(), metavar="DIR")
    parser.add_argument("--extender-url", default="", help="our scheduler, for kube-scheduler")
    parser.add_argument("--kubernetes", choices=NAMES, help="release (the newest)")
    parser.add_argument("--node", action="store_true", help="with a real node, DNS and storage")
    parser.add_argument("--json", action="store_true", help="status as one JSON document")
    options = parser.parse_args()
    held = Held(options.dir.resolve())
    try:
        match options.command:
            case "up":
                return up(held, options.extender_url, options.kubernetes, with_node=options.node)
            case "down":
                return down(held)
            case "status":
                return status(held, as_json=options.json)
            case "install":
                return install(held)
            case "build":
                say(f"kubernetes  {build.build(options.kubernetes)}")
                say(f"containerd  {build.containerd()}")
                say(f"coredns     {build.coredns()}")
                say(f"kueue       {build.kueue()}")
                say(f"volcano     {build.volcano()}")
                return 0
            case _ if options.node:
                anyio.run(hold_site, held)
                return 0
            case _:
                anyio.run(hold, held, options.extender_url)
                return 0
    except (HamiError, build.BuildFailed, images.BuildFailed) as error:
        print(f"cluster: {error}", file=sys.stderr, flush=True)
        return 3


if __name__ == "__main__":
    sys.exit(main())
