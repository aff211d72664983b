# SPDX-License-Identifier: Apache-2.0
"""Runs containerd, as built, for the real node: its configuration, its start, its images.

All state is below the node's directory. On a node that shares this machine's network, containers
get an address on a bridge without a gateway, so no route, no address and no firewall rule of this
machine changes. A contained node routes to each container (plugin ptp: all traffic between
containers passes its firewall, where Service addresses are translated), and keeps configuration and
images at containerd's usual paths. Obeys: containerd configuration version 3 (containerd 2.0 and
later), CNI 0.4.0.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from hami_sim.process import Process
from tests.cluster import build
from tests.cluster.node.image import PAUSE, Image, busybox_images, find_busybox, write_images
from tests.cluster.node.space import Space

PLUGIN_DIRECTORIES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
STATE = "/run/containerd"
"""In the node's own /run, which no reboot outlives."""
SOCKET = f"{STATE}/containerd.sock"
POD_SUBNET = "10.244.0.0/24"
"""Addresses of pods on a contained node."""
_START_S = 30.0


def find_network_plugins() -> Path | None:
    """Directory of the CNI plugins (Debian: package containernetworking-plugins)."""
    return next((path for path in PLUGIN_DIRECTORIES if (path / "bridge").exists()), None)


class Containerd:
    """The container runtime of one node."""

    def __init__(
        self,
        space: Space,
        *,
        runtimes: Mapping[str, Path] | None = None,
        images: Sequence[Image] = (),
    ) -> None:
        """``runtimes``: OCI runtimes by the name of their handler, in addition to runc.

        ``images``: images that the node has from the start, beside those of busybox.
        """
        self._space = space
        self._runtimes = dict(runtimes or {})
        self._images = tuple(images)
        self._root = space.directory / "containerd"
        self.bridge = f"hm{space.cgroup[-8:]}"
        self.cdi_directory = space.directory / "cdi"
        self._programs = build.containerd()
        self.process: Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it answers and has the images."""
        config = self._configure()
        self.process = Process(
            "containerd",
            self._space.command([self._programs / "containerd", "--config", config]),
            log=self._space.directory / "logs" / "containerd.log",
            # It looks for its shim there.
            env={"PATH": f"{self._programs}:{os.environ['PATH']}"},
        )
        self.process.start()
        with anyio.fail_after(_START_S):
            while not await self._ctr("version"):
                if not self.process.is_running():
                    raise RuntimeError(self.process.tail())
                await anyio.sleep(0.05)
        archive = self._root / "images.tar"
        if not archive.exists():
            busybox = find_busybox()
            assert busybox is not None
            write_images(archive, [*busybox_images(busybox), *self._images])
            if not await self._ctr("images", "import", str(archive)):
                raise RuntimeError(self.process.tail())

    async def stop(self) -> None:
        """End it; containers go on."""
        if self.process is not None:
            await self.process.kill()

    def remove_bridge(self) -> None:
        """Remove the node's bridge from this machine."""
        subprocess.run(["ip", "link", "delete", self.bridge], capture_output=True, check=False)

    def ctr(self, *arguments: str) -> list[str]:
        """Command line of ``ctr`` for kubelet's images and containers on this node."""
        program = str(self._programs / "ctr")
        command = [program, "--address", SOCKET, "--namespace", "k8s.io", *arguments]
        return self._space.look_command(command)

    async def _ctr(self, *arguments: str) -> bool:
        done = await anyio.run_process(self.ctr(*arguments), check=False)
        return done.returncode == 0

    def _configure(self) -> Path:
        """Write the configuration; its path on the node."""
        network = self._root / "network"
        network.mkdir(parents=True, exist_ok=True)
        plugins = self._routed() if self._space.is_contained else self._bridged()
        list_of_plugins = {"cniVersion": "0.4.0", "name": self.bridge, "plugins": plugins}
        (network / "10-node.conflist").write_text(json.dumps(list_of_plugins))
        if self._space.is_contained:
            config, images, cdi = Path("/etc/containerd/config.toml"), "/var/lib/containerd", ""
        else:
            self.cdi_directory.mkdir(exist_ok=True)
            config, images = self._root / "config.toml", str(self._root)
            cdi = f'cdi_spec_dirs = ["{self.cdi_directory}"]'
        runtimes = "".join(_runtime(name, path) for name, path in self._runtimes.items())
        file = self._space.seen(config)
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            f"""
version = 3
root = "{images}"
state = "{STATE}"
oom_score = 0
[grpc]
address = "{SOCKET}"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
netns_mounts_under_state_dir = true
restrict_oom_score_adj = true
disable_apparmor = true
enable_cdi = true
{cdi}
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{find_network_plugins()}"]
conf_dir = "{network}"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
{runtimes}
[plugins."io.containerd.internal.v1.opt"]
path = "{images}/opt"
"""
        )
        return config

    def _bridged(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "bridge",
                "bridge": self.bridge,
                "isGateway": False,
                "ipMasq": False,
                "ipam": _addresses("198.18.0.0/16"),
            }
        ]

    def _routed(self) -> list[dict[str, Any]]:
        addresses = {**_addresses(POD_SUBNET), "routes": [{"dst": "0.0.0.0/0"}]}
        return [
            {"type": "ptp", "ipMasq": True, "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ]


def _addresses(subnet: str) -> dict[str, Any]:
    return {
        "type": "host-local",
        "dataDir": f"{STATE}/addresses",
        "ranges": [[{"subnet": subnet}]],
    }


def _runtime(name: str, path: Path) -> str:
    table = f'[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{name}'
    return f"""
{table}]
runtime_type = "io.containerd.runc.v2"
{table}.options]
BinaryName = "{path}"
SystemdCgroup = false
"""
