# SPDX-License-Identifier: Apache-2.0
"""Pods with shares whose programs use the CUDA driver, driven by ``kubectl exec``.

The image has the test program ``drive`` of native/libvgpu; driver and limiter are injected on the
node. Memory in MiB, compute in percent.
"""

import json
from subprocess import CompletedProcess
from typing import Any, Final

from hami_common.errors import Unavailable
from hami_sim.hardware.fake_cuda import FakeCard
from tests.cluster.node.driver import DRIVE_IMAGE
from tests.cluster.site.site import Site

NAMESPACE: Final = "default"
RUNNING_S: Final = 60.0
MIB: Final = 1 << 20
_WARM_S = 1.0
WAIT: Final = "trap 'exit 0' TERM; sleep 100000 & wait $!"

Document = dict[str, Any]


def share(
    name: str,
    *,
    memory_mib: int,
    core_pct: int = 0,
    uuid: str = "",
    labels: dict[str, str] | None = None,
) -> Document:
    """A pod with one share that waits; of the device ``uuid``, if there is one."""
    annotations = {"nvidia.com/use-gpuuuid": uuid} if uuid else {}
    wanted = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory_mib)}
    if core_pct:
        wanted["nvidia.com/gpucores"] = str(core_pct)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": labels or {},
            "annotations": annotations,
        },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "main",
                    "image": DRIVE_IMAGE,
                    "command": ["sh", "-c", WAIT],
                    "resources": {
                        "limits": {**wanted, "memory": "64Mi"},
                        "requests": {"cpu": "1m"},
                    },
                }
            ],
        },
    }


class Tenant:
    """A user of the site; its pods are deleted at the end of a test."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._names: list[str] = []

    async def create(self, pod: Document) -> None:
        """Create a pod."""
        text = json.dumps(pod).encode()
        await self.site.reach.kubectl("create", "--filename", "-", stdin=text)
        self._names.append(f"{pod['kind'].lower()}/{pod['metadata']['name']}")

    async def create_deployment(self, name: str, pod: Document) -> None:
        """Create a Deployment of one pod; returns when the pod is Ready."""
        labels = pod["metadata"]["labels"]
        template = {"metadata": {"labels": labels}, "spec": dict(pod["spec"])}
        document = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        }
        await self.create(document)
        await self.site.kubectl("rollout", "status", f"deployment/{name}", "--timeout=60s")

    async def delete_all(self) -> None:
        """Delete the pods; returns when they are gone."""
        if self._names:
            await self.site.kubectl("delete", "--ignore-not-found", *self._names)
        self._names.clear()

    async def running(self, name: str) -> None:
        """Wait until a pod's containers are Ready."""
        waited = ("wait", "--for=condition=Ready", f"--timeout={RUNNING_S:g}s", f"pod/{name}")
        try:
            await self.site.kubectl(*waited)
        except Unavailable as error:
            told = await self.site.kubectl("describe", "pod", name, check=False)
            raise AssertionError(f"{name} is not Ready: {error}\n{told.stdout}") from error

    async def drive(self, name: str, *commands: str) -> list[str]:
        """Run commands of ``drive`` in a pod; one answer per command."""
        text = "".join(f"{command}\n" for command in commands)
        done: CompletedProcess[str] = await self.site.reach.kubectl(
            *("exec", "-i", name, "--", "/bin/drive", "link"), stdin=text.encode()
        )
        return done.stdout.splitlines()[: len(commands)]  # the last line is about its end

    async def memory(self, name: str) -> tuple[int, int]:
        """(total that CUDA shows, amount that can be allocated) in MiB."""
        answers = await self.drive(name, "init", "device 0", "info", "fill 100M 1000")
        if any(not answer.startswith("ok") for answer in answers[:3]):
            raise AssertionError(f"{answers}\n{await self.view(name)}")
        *_, info, fill = answers
        return int(info.split()[2]) // MIB, int(fill.split()[1]) * 100

    async def view(self, name: str) -> str:
        """The files that limit the pod's container, as it sees them: for a failed test."""
        script = (
            "cat /etc/hami/limits /etc/ld.so.preload; ls -l /usr/local/vgpu /run/hami /dev;"
            " grep -e vgpu -e hami -e nvidia /proc/mounts; env"
        )
        words = ("exec", name, "--", "sh", "-c", script)
        done: CompletedProcess[str] = await self.site.reach.kubectl(*words, check=False)
        return done.stdout + done.stderr

    async def compute_pct(self, name: str, *, for_s: float) -> float:
        """Percentage of its device's time that a program gets which always has work."""
        work = "work fixed_1ms 1000 {:.0f} plain 64"
        answers = await self.drive(
            name, "init", "device 0", work.format(_WARM_S * 1000), work.format(for_s * 1000)
        )
        launches, elapsed_ns, _ = map(int, answers[-1].removeprefix("ok ").split())
        return 100 * launches * 1e6 / elapsed_ns

    def card(self) -> FakeCard:
        """Memory that the cards of the node have allocated."""
        lib = self.site.node.directory / "lib"
        return FakeCard(lib / "nvidia" / "state" / "machine")
