# SPDX-License-Identifier: Apache-2.0
"""Runs simulated kubelets, one node each, until SIGTERM.

Containers go on after that, as with a real kubelet, unless --kill-on-exit or --owner-pid is given.
`--cleanup` only ends what an earlier run left below --root and exits. Prints one JSON line per node
when it is ready.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from pathlib import Path

import anyio

from hami_sim.kube import Access
from hami_sim.kubelet.kubelet import SimKubelet, clean_up
from hami_sim.kubelet.settings import KubeletSettings
from hami_sim.kubelet.toolkit import DriverFiles


def _arguments() -> argparse.Namespace:
    defaults = KubeletSettings()
    parser = argparse.ArgumentParser(prog="python -m hami_sim.kubelet", description=__doc__)
    parser.add_argument(
        "--kubeconfig", help="how to reach the API server; {node} stands for the node's name"
    )
    parser.add_argument("--node", default="", help="names of the nodes, separated by commas")
    parser.add_argument("--root", type=Path, required=True, help="directory for sockets and pods")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cpu", default=defaults.cpu)
    parser.add_argument("--memory", default=defaults.memory)
    parser.add_argument("--pods", type=int, default=defaults.pods)
    parser.add_argument("--owner-pid", type=int, default=0, help="containers end with this process")
    parser.add_argument(
        "--host-path", action="append", default=[], help="shown read-only in containers"
    )
    parser.add_argument(
        "--pretended-path", action="append", default=[], help="plugins mount from below it"
    )
    parser.add_argument("--driver-libraries", default="", help="directory of the fake driver")
    parser.add_argument("--driver-programs", default="", help="directory of programs beside it")
    parser.add_argument("--driver-state", default="", help="its state file; {node} is the node")
    parser.add_argument("--sync-s", type=float, default=defaults.sync_s)
    parser.add_argument("--backoff-s", type=float, default=defaults.backoff_s)
    parser.add_argument(
        "--no-namespaces", action="store_true", help="containers are plain processes"
    )
    parser.add_argument("--cdi-directory", action="append", help="default: the system's two")
    parser.add_argument("--tmpfs-volumes", action="store_true", help="emptyDir Memory by mounts")
    parser.add_argument("--kill-on-exit", action="store_true", help="end all containers at the end")
    parser.add_argument(
        "--cleanup", action="store_true", help="end leftovers below --root, then exit"
    )
    arguments = parser.parse_args()
    if not arguments.cleanup and not (arguments.kubeconfig and arguments.node):
        parser.error("--kubeconfig and --node are needed, except with --cleanup")
    return arguments


def _settings(arguments: argparse.Namespace) -> KubeletSettings:
    pairs = [text.partition("=") for text in arguments.label]
    if any(not separator for _, separator, _ in pairs):
        sys.exit("--label: want KEY=VALUE")
    driver = None
    if arguments.driver_libraries:
        driver = DriverFiles(
            libraries=arguments.driver_libraries,
            state=arguments.driver_state,
            programs=arguments.driver_programs,
        )
    return KubeletSettings(
        driver=driver,
        cpu=arguments.cpu,
        memory=arguments.memory,
        pods=arguments.pods,
        labels={key: value for key, _, value in pairs},
        owner_pid=arguments.owner_pid,
        host_paths=tuple(arguments.host_path),
        pretended_paths=tuple(arguments.pretended_path),
        sync_s=arguments.sync_s,
        backoff_s=arguments.backoff_s,
        cdi_directories=tuple(arguments.cdi_directory or KubeletSettings().cdi_directories),
        mounts_tmpfs=arguments.tmpfs_volumes,
        namespaces=False if arguments.no_namespaces else None,
    )


async def _run(arguments: argparse.Namespace) -> None:
    root: Path = arguments.root.resolve()
    if arguments.cleanup:
        await clean_up(root)
        return
    settings = _settings(arguments)
    kubelets = []
    for name in arguments.node.split(","):
        access = Access.from_kubeconfig(Path(arguments.kubeconfig.replace("{node}", name)))
        kubelets.append(SimKubelet(name, root, access, settings))
    async with anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            for kubelet in kubelets:
                await tasks.start(kubelet.run)
                ready = {
                    "node": kubelet.name,
                    "pid": os.getpid(),
                    "url": kubelet.url,
                    "plugin_directory": str(kubelet.plugin_directory),
                    "plugins_registry": str(kubelet.plugins_registry),
                    "pod_resources_socket": str(kubelet.pod_resources_socket),
                }
                print(json.dumps(ready), flush=True)
            async for _ in signals:
                break
        tasks.cancel_scope.cancel()
    if arguments.kill_on_exit:
        for kubelet in kubelets:
            await kubelet.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    anyio.run(_run, _arguments())
