# SPDX-License-Identifier: Apache-2.0
"""Runs containerd, as built, for the real node: its configuration, its start, its images.

All state is below the node's directory. Containers get an address on a bridge without a gateway, so
no route, no address and no firewall rule of this machine changes. Obeys: containerd configuration
version 3 (containerd 2.0 and later), CNI 0.4.0.
"""

import json
import os
import subprocess
from pathlib import Path

import anyio

from hami_sim.process import Process
from tests.cluster import build
from tests.cluster.node.image import PAUSE, find_busybox, write_images
from tests.cluster.node.space import Space

PLUGIN_DIRECTORIES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
STATE = "/run/containerd"
"""In the node's own /run, which no reboot outlives."""
SOCKET = f"{STATE}/containerd.sock"
_START_S = 30.0


def find_network_plugins() -> Path | None:
    """Directory of the CNI plugins (Debian: package containernetworking-plugins)."""
    return next((path for path in PLUGIN_DIRECTORIES if (path / "bridge").exists()), None)


class Containerd:
    """The container runtime of one node."""

    def __init__(self, space: Space) -> None:
        self._space = space
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
            images = self._root / "images.tar"
            if not images.exists():
                busybox = find_busybox()
                assert busybox is not None
                write_images(busybox, images)
                if not await self._ctr("images", "import", str(images)):
                    raise RuntimeError(self.process.tail())

    async def stop(self) -> None:
        """End it; containers go on."""
        if self.process is not None:
            await self.process.kill()

    def remove_bridge(self) -> None:
        """Remove the node's bridge from this machine."""
        subprocess.run(["ip", "link", "delete", self.bridge], capture_output=True, check=False)

    async def _ctr(self, *arguments: str) -> bool:
        command = [self._programs / "ctr", "--address", SOCKET, "--namespace", "k8s.io", *arguments]
        done = await anyio.run_process(self._space.look_command(command), check=False)
        return done.returncode == 0

    def _configure(self) -> Path:
        network = self._root / "network"
        network.mkdir(parents=True, exist_ok=True)
        self.cdi_directory.mkdir(exist_ok=True)
        plugins = find_network_plugins()
        (network / "10-node.conflist").write_text(
            json.dumps(
                {
                    "cniVersion": "0.4.0",
                    "name": self.bridge,
                    "plugins": [
                        {
                            "type": "bridge",
                            "bridge": self.bridge,
                            "isGateway": False,
                            "ipMasq": False,
                            "ipam": {
                                "type": "host-local",
                                "dataDir": f"{STATE}/addresses",
                                "ranges": [[{"subnet": "198.18.0.0/16"}]],
                            },
                        }
                    ],
                }
            )
        )
        config = self._root / "config.toml"
        config.write_text(
            f"""
version = 3
root = "{self._root}"
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
cdi_spec_dirs = ["{self.cdi_directory}"]
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{plugins}"]
conf_dir = "{network}"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins."io.containerd.internal.v1.opt"]
path = "{self._root}/opt"
"""
        )
        return config
