# SPDX-License-Identifier: Apache-2.0
"""Volcano's scheduler beside an installation, as its own manifests run it.

It logs in as its service account, and finds the token where kubelet mounts it: the plugin
deviceshare has a client of its own that looks only there. So the program runs in a mount namespace
with a ``/run`` of its own. No controllers of Volcano run: tests create PodGroups themselves.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from textwrap import dedent
from typing import Any

import anyio
import pytest
import yaml

from hami_common.compat import volcano as form
from hami_common.model.device import Device
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_nodeagent.core.amounts import totals
from hami_sim.kubernetes.pki import HOST, write_kubeconfig
from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.cluster import build
from tests.cluster.needs import control_plane_or_skip, is_required
from tests.support.checker import inventory_of
from tests.support.installed import Installed
from tests.support.kubeclient import StatusError
from tests.support.paper_nodes import each

Obj = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs" / "volcano.md"
NAME = "volcano"
NAMESPACE = "volcano-system"
ACCOUNT = "volcano-scheduler"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
GROUP = "scheduling.volcano.sh"
API = f"/apis/{GROUP}/v1beta1"
GROUP_NAME = "scheduling.k8s.io/group-name"
START_S = 90.0
NUMBER = "volcano.sh/vgpu-number"
VENDOR = Catalog.from_settings(VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",)))).vendor(
    "nvidia"
)
CONFIG = "volcano-vgpu-device-config"
"""ConfigMap of the plugin deviceshare, in kube-system."""
_UNSHARE = ("unshare", "--mount", "--map-root-user")
_ENTER = (
    "mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io /var/run &&"
    ' cp -r "$1" /run/secrets/kubernetes.io/serviceaccount && shift && exec "$@"'
)


def volcano_or_skip() -> Path:
    """Directory of Volcano's scheduler; skips, or fails where a control plane is required."""
    control_plane_or_skip()
    found = build.find_volcano()
    reason = "" if found else "Volcano is not built; ./dev cluster build makes it"
    unshare = shutil.which(_UNSHARE[0])
    probe = [*_UNSHARE, "mount", "-t", "tmpfs", "none", "/run"]
    if unshare is None or subprocess.run(probe, check=False, capture_output=True).returncode:
        reason = "Volcano's scheduler needs a mount namespace of its own (unshare of util-linux)"
    if reason and is_required():
        pytest.fail(reason, pytrace=False)
    if reason or found is None:
        pytest.skip(reason)
    return found


def documented(word: str) -> str:
    """The YAML block with this word that the page shows to operators."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if word in block)
    return dedent(block).strip() + "\n"


async def describe_nodes(site: Installed, names: Collection[str]) -> None:
    """Write what Volcano reads of these nodes on paper, once the registry has their devices."""
    known: dict[str, tuple[Device, ...]] = {}

    async def are_known() -> bool:
        known.update({one.node: one.devices for one in await inventory_of(site)})
        return set(names) <= known.keys()

    await site.until("the registry has the devices", are_known, limit_s=START_S)

    async def describe(name: str) -> None:
        devices = known[name]
        amounts = totals(VENDOR, devices, is_usable=lambda _: True, pods=())
        texts = {key: str(value) for key, value in amounts.items()}
        texts[NUMBER] = str(sum(device.slots for device in devices))
        # With another handshake than before, so that the node changes.
        notes = form.of_node(devices, unit_mib=1, time_s=time.time())  # noqa: TID251 - of a test
        patch = {
            "metadata": {"annotations": notes},
            "status": {"capacity": texts, "allocatable": texts},
        }
        await site.client.patch("nodes", name, patch, subresource="status")

    await each(names, describe)


class Volcano:
    """The scheduler of one installation."""

    def __init__(self, site: Installed, programs: Path, conf: str = "") -> None:
        """Not running before ``start``; ``conf``: its configuration, else that of the page."""
        self._conf = conf or documented("deviceshare.VGPUEnable")
        self._site = site
        self._programs = programs
        self._directory = site.directory / "volcano"
        self.process = Process("vc-scheduler", [], log=site.directory / "logs" / "volcano.log")

    async def start(self) -> None:
        """Install what Volcano's manifests install for its scheduler, and run it."""
        site, client = self._site, self._site.client
        for file in sorted((self._programs / "bases").iterdir()):
            # Its annotation would be too large for `kubectl apply`.
            await site.kubectl("create", "-f", str(file))
        await client.create("namespaces", {"metadata": {"name": NAMESPACE}})
        await client.create("serviceaccounts", {"metadata": {"name": ACCOUNT}}, NAMESPACE)
        await self._allow()
        config = yaml.safe_load(documented("resourceMemoryPercentageName"))
        await client.create("configmaps", config, config["metadata"]["namespace"])
        self.process = await self._make()
        site.processes["vc-scheduler"] = self.process
        self.process.start()
        await self.until_ready()
        # As Volcano's controllers do.
        for queue in ("root", "default"):
            await client.call(
                "PATCH",
                f"{API}/queues/{queue}/status",
                body={"status": {"state": "Open"}},
                headers={"Content-Type": "application/merge-patch+json"},
            )

    async def until_ready(self) -> None:
        """Wait until it schedules: it creates its queues before."""

        async def is_ready() -> bool:
            try:
                for queue in ("root", "default"):
                    await self._site.client.call("GET", f"{API}/queues/{queue}")
            except StatusError:
                return False
            return True

        await self._site.until("Volcano runs", is_ready, limit_s=START_S)

    async def _allow(self) -> None:
        group = "rbac.authorization.k8s.io"
        subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
        role = {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"}
        document = {"metadata": {"name": ACCOUNT}, "roleRef": role, "subjects": [subject]}
        await self._site.client.create(f"clusterrolebindings.{group}", document)

    async def _make(self) -> Process:
        site = self._site
        mounted = self._directory / "serviceaccount"
        mounted.mkdir(parents=True)
        token = await site.token(ACCOUNT, namespace=NAMESPACE)
        authority = Path(site.plane.control.pki.file("ca.crt"))
        (mounted / "token").write_text(token)
        (mounted / "namespace").write_text(NAMESPACE)
        (mounted / "ca.crt").write_bytes(authority.read_bytes())
        login = write_kubeconfig(
            self._directory / "kubeconfig",
            server=site.plane.url,
            ca_file=str(authority),
            token=token,
        )
        conf = self._directory / "volcano-scheduler.conf"
        conf.write_text(self._conf)
        unshare = shutil.which(_UNSHARE[0])
        assert unshare is not None
        argv = [
            *(unshare, *_UNSHARE[1:], "sh", "-c", _ENTER, "sh", str(mounted)),
            str(self._programs / "vc-scheduler"),
            f"--kubeconfig={login}",
            f"--scheduler-conf={conf}",
            "--disable-default-scheduler-config",
            f"--scheduler-name={NAME}",
            "--schedule-period=500ms",
            "--leader-elect=false",
            f"--listen-address={HOST}:{free_port()}",
            "--cache-dumper=false",
            "-v=3",
        ]
        env = {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(site.plane.port)}
        log = site.directory / "logs" / "volcano.log"
        return Process("vc-scheduler", argv, log=log, env=env)

    async def group(
        self, name: str, *, members: int, namespace: str = "default", **spec: Any
    ) -> None:
        """Create a PodGroup of which so many members start together."""
        document = {
            "apiVersion": f"{GROUP}/v1beta1",
            "kind": "PodGroup",
            "metadata": {"name": name},
            "spec": {"minMember": members, "queue": "default", **spec},
        }
        path = f"{API}/namespaces/{namespace}/podgroups"
        await self._site.client.call("POST", path, body=document)

    async def sessions(self, count: int) -> None:
        """Wait until it has begun so many further sessions."""

        def begun() -> int:
            return self.process.log.read_text(errors="replace").count("Open Session")

        wanted = begun() + count

        async def are_over() -> bool:
            await anyio.lowlevel.checkpoint()
            return begun() > wanted

        await self._site.until(f"{count} sessions of Volcano", are_over, limit_s=START_S)
