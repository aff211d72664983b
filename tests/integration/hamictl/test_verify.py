# SPDX-License-Identifier: Apache-2.0
"""``hamictl verify`` on a simulated API server, each step of which can fail.

Webhook, scheduler and kubelet are played by the test, with the real signatures and limits files.
"""

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods import annotations, limits
from hami_common.pods.signing import SignedPlacement, Signer, Verifier
from hami_common.runtime import kubeio
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.tasks import background
from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access
from hamictl.verification import LABEL, Expected, Request, Step, Verdict, Verification
from tests.support.kubeclient import KubeClient

pytestmark = pytest.mark.anyio

NODE = "gpu-1"
NAME = "hami-verify-1"
SIGNER = Signer.generate()
SHARES = ContainerShares(
    name="probe",
    kind="app",
    shares=(Share(vendor="nvidia", uuid="GPU-1", memory_mib=1024, core_pct=10),),
)
FILE = limits.encode(limits.limits_of(SHARES, allocation_id="a-1"))
REQUEST = Request(
    vendor="nvidia",
    resources={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1024"},
    image="probe",
    is_python=False,
    limit_s=30.0,
)


class Played(kubeio.KubeClient):
    """The API server's client, which answers for a kubelet and a webhook."""

    is_admitted = True
    log = f"{FILE}limiter\n"

    async def create(self, path: str, body: bytes) -> bytes:
        pod = json.loads(body)
        if self.is_admitted:
            pod["metadata"]["labels"][annotations.MANAGED_LABEL] = "true"
            pod["spec"]["schedulerName"] = "hami-scheduler"
        return await super().create(path, json.dumps(pod).encode())

    async def get(self, path: str) -> bytes:
        return self.log.encode() if path.endswith("/log") else await super().get(path)


class Site:
    def __init__(self, api: ApiServer, kube: Played, admin: KubeClient) -> None:
        self.api = api
        self.kube = kube
        self.admin = admin
        self.steps: list[Step] = []

    async def play(self, *, signer: Signer = SIGNER, status: Any = None) -> None:
        """Bind the pod and end its container."""
        with anyio.fail_after(30):
            while not (found := (await self.admin.list("pods", "default"))["items"]):
                await anyio.sleep(0.02)
        uid = found[0]["metadata"]["uid"]
        signed = SignedPlacement(
            pod_uid=uid,
            namespace="default",
            pod=NAME,
            allocation_id="a-1",
            ledger_seq=1,
            placement=Placement(node=NODE, containers=(SHARES,)),
        )
        notes = {annotations.ALLOCATION: signer.sign(signed)}
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": NAME, "annotations": notes},
            "target": {"kind": "Node", "name": NODE},
        }
        path = f"/api/v1/namespaces/default/pods/{NAME}/binding"
        await self.admin.call("POST", path, body=binding)
        ended = {"terminated": {"exitCode": 0}}
        chosen = status or {
            "phase": "Succeeded",
            "containerStatuses": [{"name": "probe", "state": ended}],
        }
        await self.admin.patch(
            "pods", NAME, {"status": chosen}, namespace="default", subresource="status"
        )

    async def kubelet(self) -> None:
        """Stop the containers of pods that are being deleted."""
        while True:
            for pod in (await self.admin.list("pods"))["items"]:
                if pod["metadata"].get("deletionTimestamp"):
                    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
                    await self.admin.delete("pods", name, namespace, gracePeriodSeconds="0")
            await anyio.sleep(0.05)

    async def verify(
        self, *, verifier: Verifier | None = None, request: Request = REQUEST
    ) -> Verdict:
        wanted = Expected(
            scheduler_name="hami-scheduler",
            verifier=verifier or Verifier.from_pems([SIGNER.public_pem()]),
            memory_enforced="libvgpu",
            has_limiter=True,
        )
        verification = Verification(
            self.kube,
            request,
            wanted,
            name=NAME,
            clock=SystemClock(),
            report=self.steps.append,
        )
        return await verification.run()

    async def pods(self) -> list[str]:
        return [one["metadata"]["name"] for one in (await self.admin.list("pods"))["items"]]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with (
        ApiServer(Settings()) as api,
        KubeClient(Access(url=api.url, token=api.token)) as admin,
    ):
        kube = Played(kubeconfig=str(api.kubeconfig(tmp_path / "kubeconfig")))
        await kube.log_in()
        await admin.create("nodes", {"metadata": {"name": NODE}})
        site = Site(api, kube, admin)
        try:
            async with background() as group:
                group.start_soon(site.kubelet)
                yield site
        finally:
            await kube.close()


async def played(site: Site, **how: Any) -> Verdict:
    verdicts: list[Verdict] = []

    async def run() -> None:
        verdicts.append(await site.verify())

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await site.play(**how)
    assert await site.pods() == [], "the pod is deleted"
    return verdicts[0]


async def test_share_that_is_in_force_passes_every_step_and_leaves_no_pod(site: Site) -> None:
    verdict = await played(site)
    assert verdict.passed, verdict
    assert [step.name for step in verdict.steps] == [
        *("admitted", "placed", "started", "limited", "removed"),
    ]
    assert list(verdict.steps) == site.steps
    assert (verdict.node, verdict.pod) == (NODE, f"default/{NAME}")


REFUSED = {
    "phase": "Failed",
    "reason": "UnexpectedAdmissionError",
    "message": "hami: no-allocation",
}
CRASHED = {
    "phase": "Failed",
    "containerStatuses": [{"name": "probe", "state": {"terminated": {"exitCode": 127}}}],
}
UNPULLED = {
    "phase": "Pending",
    "containerStatuses": [
        {"name": "probe", "state": {"waiting": {"reason": "ErrImagePull", "message": "no host"}}}
    ],
}


@pytest.mark.parametrize(
    ("how", "log", "step", "cause", "fix"),
    [
        ({"signer": Signer.generate()}, "", "placed", "not trusted", "signing key"),
        ({"status": REFUSED}, "", "started", "hami: no-allocation", "agent's log"),
        ({"status": CRASHED}, "", "started", "code 127", "--image"),
        ({"status": UNPULLED}, "", "started", "ErrImagePull: no host", "--image"),
        ({}, "", "limited", "no limits file", "same version"),
        ({}, FILE, "limited", "limiter is not loaded", "glibc"),
    ],
    ids=["forged", "refused-by-kubelet", "crashed", "image", "no-limits", "no-limiter"],
)
async def test_step_that_fails_is_named_with_cause_and_fix(
    site: Site, how: dict[str, Any], log: str, step: str, cause: str, fix: str
) -> None:
    site.kube.log = log
    verdict = await played(site, **how)
    assert not verdict.passed
    (failed,) = (one for one in verdict.steps if not one.passed)
    assert failed.name == step
    assert cause in failed.text
    assert fix in failed.fix
    assert verdict.steps[-1].name == "removed"


async def test_pod_that_bypasses_the_webhook_is_named_and_deleted(site: Site) -> None:
    site.kube.is_admitted = False
    verdict = await site.verify()
    assert [(step.name, step.passed) for step in verdict.steps] == [
        ("admitted", False),
        ("removed", True),
    ]
    assert await site.pods() == []


async def test_pod_that_stays_pending_fails_after_the_timeout_with_the_schedulers_reason(
    site: Site,
) -> None:
    async def refuse() -> None:
        with anyio.fail_after(30):
            while not await site.pods():
                await anyio.sleep(0.02)
        condition = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes: no device"}
        await site.admin.patch(
            "pods",
            NAME,
            {"status": {"conditions": [condition]}},
            namespace="default",
            subresource="status",
        )

    async with anyio.create_task_group() as group:
        group.start_soon(refuse)
        verdict = await site.verify(request=replace(REQUEST, limit_s=5.0))
    failed = verdict.steps[1]
    assert (failed.name, failed.text) == ("placed", "0/1 nodes: no device")
    assert f"hamictl explain pod {NAME}" in failed.fix
    assert await site.pods() == []


async def test_cancelled_run_deletes_its_pod(site: Site) -> None:
    with anyio.move_on_after(0.5):
        await site.verify()
    assert await site.pods() == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_command_deletes_its_pod_and_exits_with_1(
    site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    agent = {
        "metadata": {
            "name": "hami-nodeagent-nvidia",
            "labels": {"app.kubernetes.io/name": "hami-nodeagent", "hami.io/vendor": "nvidia"},
        },
        "spec": {"template": {"spec": {"containers": [{"name": "agent", "image": "a:1"}]}}},
    }
    await site.admin.create("daemonsets.apps", agent, "hami-agents")
    # Without a webhook the first step would fail: the server plays one.
    _admit_all(site)
    command = [sys.executable, "-m", "hamictl", "verify", "--kubeconfig"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "kubeconfig")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        with anyio.fail_after(60):
            while not await site.pods():
                await anyio.sleep(0.05)
        process.send_signal(number)
        with anyio.fail_after(40):
            while process.poll() is None:
                await anyio.sleep(0.05)
    finally:
        process.kill()
        output = process.communicate()[0].decode()
    assert process.returncode == 1, output
    assert "interrupted; the pods are deleted" in output
    assert await site.pods() == []


def _admit_all(site: Site) -> None:
    """Let every pod with the probe's label pass for admitted."""
    create = site.api.operations.create

    async def admitted(call: Any, body: Any) -> Any:
        if LABEL in (body.get("metadata", {}).get("labels") or {}):
            body["metadata"]["labels"][annotations.MANAGED_LABEL] = "true"
            body["spec"]["schedulerName"] = "hami-scheduler"
        return await create(call, body)

    site.api.operations.create = admitted  # type: ignore[method-assign]  # plays a webhook
