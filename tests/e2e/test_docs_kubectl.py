# SPDX-License-Identifier: Apache-2.0
"""Every kubectl command of the pages, against a real API server on which our manifests are applied.

Commands that change objects are dry runs on the server, and commands that wait give up at once: the
tests verify that options, kinds and names are right, and that the API server accepts them.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from hami_sim.kubernetes import ControlPlane, configuration, run_control_plane
from tests.cluster.needs import control_plane_or_skip
from tests.support.kubeclient import KubeClient
from tests.support.provisioning import definition
from tools import check_docs
from tools.docs_text import Command

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = configuration.shipped_directory().parent / "overlays" / "dev"
CHANGES = {"apply", "create", "delete", "label", "drain", "cordon", "annotate", "scale", "patch"}
WAITS = {"wait", "rollout"}
NODE = "gpu-1"
PROVISIONING = "examples/provisioning-requests/request.yaml"
VOLCANO_PLUGIN = {
    "metadata": {"name": "volcano-device-plugin"},
    "spec": {
        "selector": {"matchLabels": {"name": "volcano-device-plugin"}},
        "template": {
            "metadata": {"labels": {"name": "volcano-device-plugin"}},
            "spec": {"containers": [{"name": "plugin", "image": "i:1"}]},
        },
    },
}
"""Name of a node in the pages."""
LIMIT_S = 60.0


async def run(*words: str) -> tuple[int, str]:
    """Return exit code and all output."""
    with anyio.fail_after(LIMIT_S):
        done = await anyio.run_process(words, cwd=ROOT, check=False)
    return done.returncode, done.stdout.decode() + done.stderr.decode()


class Site:
    """A control plane with our objects, without any service behind them."""

    def __init__(self, plane: ControlPlane) -> None:
        self._words = (plane.programs.path("kubectl"), f"--kubeconfig={plane.kubeconfig}")

    async def kubectl(self, *words: str) -> tuple[int, str]:
        return await run(*self._words, *words)


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    programs = control_plane_or_skip()
    async with (
        run_control_plane(tmp_path_factory.mktemp("docs"), programs) as plane,
        KubeClient(plane.access()) as client,
    ):
        site = Site(plane)
        code, told = await site.kubectl("apply", "-k", os.path.relpath(OVERLAY, ROOT))
        assert code == 0, told
        for node in (NODE, "gpu-2"):
            await client.create("nodes", {"metadata": {"name": node}})
        await client.create("namespaces", {"metadata": {"name": "team-a"}})
        await client.create("daemonsets.apps", VOLCANO_PLUGIN, "kube-system")
        # No webhook answers here, and pods of the examples request devices.
        code, told = await site.kubectl(
            *("patch", "mutatingwebhookconfiguration", "hami-webhook", "--type=json"),
            *("-p", '[{"op": "replace", "path": "/webhooks", "value": []}]'),
        )
        assert code == 0, told
        await announce_pods(site, client)
        yield site


async def announce_pods(site: Site, client: KubeClient) -> None:
    """Create the example of a ProvisioningRequest, and its kind."""
    kinds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await client.call("POST", kinds, body=definition())
    with anyio.fail_after(30):
        while (await site.kubectl("apply", "-f", PROVISIONING))[0]:
            await anyio.sleep(0.2)


def verb_of(words: list[str]) -> str:
    """The first word that is neither an option nor a namespace."""
    rest = iter(words[1:])
    for word in rest:
        if word in ("-n", "--namespace"):
            next(rest)
        elif not word.startswith("-"):
            return word
    return ""


def tried(command: Command) -> list[str]:
    """Return the command's words in a testable form."""
    words, verb = command.words[1:], verb_of(command.words)
    if verb in CHANGES and not any(word.startswith("--dry-run") for word in words):
        words.append("--dry-run=server")
    if verb in WAITS:
        words.append("--timeout=1s")
    return words


def is_taken(command: Command, code: int, told: str) -> bool:
    """Return True when it did all it can do here: no pod runs, and only our own objects exist."""
    if code == 0:
        return True
    verb = verb_of(command.words)
    if verb in WAITS:
        return "timed out waiting" in told
    return verb == "get" and "NotFound" in told and "hami-system" not in command.words


@pytest.mark.parametrize("command", check_docs.to_run(check_docs.KUBECTL_TESTS), ids=str)
async def test_command_of_the_docs_is_taken(site: Site, command: Command) -> None:
    code, told = await site.kubectl(*tried(command))
    assert is_taken(command, code, told), told


@pytest.mark.parametrize(
    "text",
    [
        "kubectl get podz",
        "kubectl -n hami-system rollout status deployment/hami-sheduler",
        "kubectl drain gpu-1 --ignore-daemonset",
        "kubectl apply -f examples/gone.yaml",
        "kubectl -n hami-system wait --for=condition=complete job/hami-botstrap",
    ],
)
async def test_mistyped_command_is_not(site: Site, text: str) -> None:
    command = Command(page="p", line=1, text=text)
    code, told = await site.kubectl(*tried(command))
    assert not is_taken(command, code, told), told
