# SPDX-License-Identifier: Apache-2.0
"""HAMi on the site of the tests: installs an overlay once, by the page, and reads its state."""

import base64
import errno
import json
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Final

import anyio
from nats.aio.client import Client

from hami_common import namespaces
from hami_common.runtime import natsio
from hami_sim.kubernetes.pki import HOST
from tests.cluster.node.driver import drive_image
from tests.cluster.node.image import write_images
from tests.cluster.site import install
from tests.cluster.site.site import Site
from tests.install import footprint, previous
from tests.install.truth import Truth
from tests.support.kubeclient import KubeClient
from tools import images

READY_S = 120.0
"""Longest time from the page's first command until every pod is Ready."""

AGENT = "daemonset/hami-nodeagent-nvidia"
LESS_CPU: Final[dict[str, Any]] = {
    "target": {"kind": "Deployment|StatefulSet"},
    "patch": "- op: replace\n"
    "  path: /spec/template/spec/containers/0/resources/requests/cpu\n"
    "  value: 50m\n",
}
"""Reserves less of the processor: on a node of two cores kube-scheduler would otherwise preempt the
tenants' pods while two versions of all services run, and the overlay prod would not fit."""
_BUS_PORT = 4222
_SCHEDULER_PORT = 9398
_FORWARD_S = 30.0

Document = dict[str, Any]


class Installation:
    """The installed overlay, if any."""

    def __init__(self, site: Site, client: KubeClient, bus_port: int) -> None:
        """``bus_port`` of 127.0.0.1 leads to a server of the bus."""
        self.site = site
        self.client = client
        self._bus_port = bus_port
        self.overlay = ""
        self.before: footprint.Footprint | None = None
        """The site before the first installation."""
        self.images: images.Images = {}
        self._ready_s = 0.0
        self._place = Path()
        """Path of the installed overlay."""

    async def load_images(self) -> None:
        """Build the images and import them into the node's containerd, once."""
        if self.images:
            return
        begun_s = anyio.current_time()
        self.images = await anyio.to_thread.run_sync(install.build_images, self.site.reach)
        built_s = anyio.current_time()
        for image in self.images.values():
            await self.site.reach.load(image.path)
        cuda = self.site.directory / "cuda.tar"
        await anyio.to_thread.run_sync(write_images, cuda, [drive_image()])
        await self.site.reach.load(cuda)
        self.site.timings_s["images_built"] = built_s - begun_s
        self.site.timings_s["images_imported"] = anyio.current_time() - built_s

    async def ensure(self, overlay: str) -> None:
        """Have ``overlay`` installed and Ready; another one is removed before."""
        if self.overlay == overlay:
            return
        await self.load_images()
        if self.before is None:
            self.before = await footprint.take(self.site)
        if self.overlay:
            # Without waiting for kubelet, which hamictl reports as incomplete.
            *_, deleted = await self.uninstall("--keep-pods", "--wait", "0")
            assert deleted.returncode == 0, deleted.stderr
        place = await self._overlay(overlay)
        begun_s = anyio.current_time()
        await install.apply(self.site.reach, place)
        await self.ready(limit_s=READY_S - (anyio.current_time() - begun_s))
        self._ready_s = anyio.current_time()
        self.site.timings_s[f"{overlay}_ready"] = self._ready_s - begun_s
        self.overlay, self._place = overlay, place

    async def update(self, place: Path) -> None:
        """Run the page's commands of the section Update for the overlay at ``place``."""
        for command in install.page_commands("Update"):
            words = [word.replace(install.DEV, str(place)) for word in command.words]
            await self.site.reach.run(words)

    async def previous(self) -> Path:
        """The overlay dev of ``previous.COMMIT`` with its images, which the node then has too."""
        tree = self.site.directory / "previous"
        kubernetes = install.release(self.site.reach)
        built = await anyio.to_thread.run_sync(previous.build, tree, kubernetes)
        for path, reference in built:
            await self.site.reach.load(path)
            tagged = f"{reference.rpartition(':')[0]}:{previous.TAG}"
            await self.site.reach.run(
                [*self.site.reach.ctr, "images", "tag", "--force", reference, tagged]
            )
        for image in self.images.values():  # the archives of both name the same tags
            await self.site.reach.load(image.path)
        references = [reference for _, reference in built]
        return previous.write_overlay(tree, references, patches=[LESS_CPU])

    @property
    def place(self) -> Path:
        """Path of the installed overlay."""
        return self._place

    async def uninstall(self, *options: str) -> list[CompletedProcess[str]]:
        """Run the page's commands of the section Uninstall; returns their results.

        ``options`` are added to those of ``hamictl uninstall``.
        """
        done = []
        for command in install.page_commands("Uninstall"):
            first, *rest = command.words
            if first == "hamictl":
                dry = "--dry-run" in rest
                done.append(await self.hamictl(*rest, *(() if dry else options)))
            else:
                words = [word.replace(install.DEV, str(self._place)) for word in command.words]
                done.append(await self.site.reach.run(words, check=False))
        self.overlay = ""
        return done

    async def _overlay(self, base: str) -> Path:
        """An overlay of one's own for two cores; of prod with the images' digests."""
        own = install.write_overlay(self.site.directory, base, self.images, patches=[LESS_CPU])
        if base == "prod":
            words = []
            for image in self.images.values():
                name, tag = install.short_name(image)
                words.append(f"{name}={name}:{tag}@{image.digest}")
                by_digest = f"{image.reference.rpartition(':')[0]}@{image.digest}"
                tagged = (*self.site.reach.ctr, "images", "tag", "--force")
                await self.site.reach.run([*tagged, image.reference, by_digest])
            out = own.parent / "prod" / "images" / "kustomization.yaml"
            pinned = [sys.executable, "-m", "tools.pin_images", "--out", str(out), *words]
            await self.site.reach.run(pinned)
        return own

    async def ready(self, *, limit_s: float = READY_S) -> None:
        """Wait until every pod of the services and agents is Ready, and the node has devices."""

        async def is_ready() -> bool:
            pods = await self.pods()
            node = await self.site.node_object()
            return (
                bool(pods)
                and all(is_pod_ready(pod) for pod in pods)
                and node["status"]["allocatable"].get("nvidia.com/gpu", "0") != "0"
            )

        await self.site.until("every pod is Ready", is_ready, limit_s=limit_s)

    async def aged(self, age_s: float) -> None:
        """Wait until the installation has been Ready for ``age_s``."""
        await anyio.sleep(self._ready_s + age_s - anyio.current_time())

    async def pods(self) -> list[Document]:
        """Pods of the services and the agents; of Jobs only those that have not succeeded."""
        found: list[Document] = []
        for namespace in (namespaces.SYSTEM, namespaces.AGENTS):
            found += (await self.client.list("pods", namespace))["items"]
        return [pod for pod in found if pod["status"]["phase"] != "Succeeded"]

    async def story(self) -> str:
        """Events and pods of the cluster, for the message of a failed test."""
        words = ("--all-namespaces", "--output=wide")
        events = await self.site.kubectl("get", "events", *words, "--sort-by=.lastTimestamp")
        return events.stdout + (await self.site.kubectl("get", "pods", *words)).stdout

    async def restart_agent(self) -> None:
        """Restart the agent of NVIDIA nodes; returns when its pod is Ready."""
        words = ("--namespace", namespaces.AGENTS, "rollout")
        await self.site.kubectl(*words, "restart", AGENT)
        await self.site.kubectl(*words, "status", AGENT, f"--timeout={READY_S:g}s")

    async def finds_devices(self) -> bool:
        """Return true once the running agent reports devices; false if it reports none."""
        words = ("--namespace", namespaces.AGENTS, "logs", AGENT, "--container", "agent")
        reports: list[int] = []

        async def has_reported() -> bool:
            lines = (await self.site.kubectl(*words)).stdout.splitlines()
            reports[:] = [
                entry["devices"]
                for line in lines
                if (entry := json.loads(line)).get("message") == "devices reported"
            ]
            return bool(reports)

        await self.site.until("the agent reports devices", has_reported)
        return reports[-1] > 0

    async def hamictl(self, *arguments: str) -> CompletedProcess[str]:
        """Run hamictl on the node, where the cluster's names are resolved, as an administrator."""
        token = await self.site.kubectl("create", "token", "admin", "--namespace", "kube-system")
        variables = {
            "HAMICTL_REGISTRY": f"https://hami-registry.{namespaces.SYSTEM}.svc",
            "HAMICTL_TOKEN": token.stdout.strip(),
            "HAMICTL_CA_FILE": str(await self._ca_file()),
        }
        words = ("env", *(f"{name}={value}" for name, value in variables.items()))
        command = [*self.site.reach.on_node, *words, sys.executable, "-m", "hamictl", *arguments]
        return await self.site.reach.run(command, check=False)

    async def doctor(self) -> CompletedProcess[str]:
        """Run ``hamictl doctor``; kubectl port-forward leads to the scheduler's loopback."""
        async with self._scheduler_forwarded():
            return await self.hamictl("doctor", "-o", "wide")

    @asynccontextmanager
    async def _scheduler_forwarded(self) -> AsyncIterator[None]:
        reach = self.site.reach
        words = ("--kubeconfig", reach.kubeconfig, "--namespace", namespaces.SYSTEM, "port-forward")
        command = [*reach.on_node, f"{reach.programs}/kubectl", *words]
        async with await anyio.open_process(
            [*command, "deployment/hami-scheduler", f"{_SCHEDULER_PORT}:{_SCHEDULER_PORT}"]
        ) as forward:
            assert forward.stdout is not None
            with anyio.fail_after(_FORWARD_S):
                await forward.stdout.receive()
            try:
                yield
            finally:
                forward.kill()

    @asynccontextmanager
    async def truth(self, namespace: str) -> AsyncIterator[Truth]:
        """Compare what the parts report about the pods of ``namespace``."""
        bus = await self._log_in_to_bus()
        try:
            yield Truth(self.site.node, self.client, bus, namespace=namespace)
        finally:
            with anyio.move_on_after(5, shield=True):
                await bus.close()

    async def _log_in_to_bus(self) -> Client:
        secret = await self.client.get("secrets", "hami-bus-operator", namespaces.SYSTEM)
        seed = self.site.directory / "operator.seed"
        seed.write_bytes(base64.b64decode(secret["data"]["seed"]))
        options, public_key = natsio.NatsLogin(seed_file=str(seed)).options()
        bus = Client()
        bus._public_nkey = public_key  # noqa: SLF001 - the library sets it from a seed only
        await bus.connect(
            f"tls://{HOST}:{self._bus_port}",
            tls=ssl.create_default_context(cafile=str(await self._ca_file())),
            tls_hostname=f"nats.{namespaces.SYSTEM}.svc",
            max_reconnect_attempts=-1,
            **options,
        )
        return bus

    async def _ca_file(self) -> Path:
        bundle = await self.client.get("configmaps", "hami-ca", namespaces.SYSTEM)
        file = self.site.directory / "hami-ca.crt"
        file.write_text(bundle["data"]["ca.crt"])
        return file


async def bus_address(client: KubeClient) -> tuple[str, int]:
    """Address of a server of the bus; ``OSError`` if none runs."""
    listed = await client.list(
        "pods", namespaces.SYSTEM, labelSelector="app.kubernetes.io/name=hami-nats"
    )
    for pod in listed["items"]:
        if is_pod_ready(pod):
            return str(pod["status"]["podIP"]), _BUS_PORT
    raise OSError(errno.ECONNREFUSED, "no server of the bus is Ready")


def is_pod_ready(pod: Document) -> bool:
    """Return true if the pod's condition Ready is true."""
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod["status"].get("conditions", ())
    )


def restarts(pod: Document) -> int:
    """Restarts of all containers."""
    statuses = pod["status"].get("containerStatuses", ())
    return sum(int(status["restartCount"]) for status in statuses)
