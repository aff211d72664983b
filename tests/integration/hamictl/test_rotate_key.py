# SPDX-License-Identifier: Apache-2.0
"""``hamictl rotate-key`` on a simulated API server; the Deployment's controller is the test."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from hami_common import namespaces
from hami_common.errors import Conflict, Unavailable
from hami_common.pods import annotations
from hami_common.pods.signing import Signer
from hami_common.runtime import kubeio
from hami_common.runtime.clock import SystemClock
from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access
from hamictl import rotation
from hamictl.rotation import NEXT, SIGNED_BY, SIGNING, TRUSTED, Rotation
from tests.support.kubeclient import KubeClient
from tests.unit.core.facts import signed

pytestmark = pytest.mark.anyio

SCHEDULER = "hami-scheduler"
MAPS = (namespaces.SYSTEM, namespaces.AGENTS)

Obj = dict[str, Any]


class Site:
    def __init__(self, kube: kubeio.KubeClient, admin: KubeClient) -> None:
        self.kube = kube
        self.admin = admin
        self.first = Signer.generate()
        self.seen: list[tuple[Obj, set[str], str]] = []
        """Per restart: the pods' annotations, the trusted keys, and the key that signs."""
        self.is_stuck = False

    async def install(self) -> None:
        public = {f"{self.first.key_id}.pub": self.first.public_pem().decode()}
        for namespace in MAPS:
            body = {"metadata": {"name": "hami-trusted-keys"}, "data": public}
            await self.admin.create("configmaps", body, namespace)
        data = {SIGNING: base64.b64encode(self.first.private_pem()).decode()}
        secret = {"metadata": {"name": "hami-signing-key"}, "data": data}
        await self.admin.create("secrets", secret, namespaces.SYSTEM)
        spec: Obj = {"replicas": 2, "template": {"metadata": {}, "spec": {"containers": []}}}
        deployment = {"metadata": {"name": SCHEDULER}, "spec": spec}
        await self.admin.create("deployments.apps", deployment, namespaces.SYSTEM)

    async def trusted(self, namespace: str) -> set[str]:
        found = await self.admin.get("configmaps", "hami-trusted-keys", namespace)
        return {name.removesuffix(".pub") for name in found["data"]}

    async def keys(self) -> dict[str, str]:
        """Ids of the keys in the Secret by name."""
        secret = await self.admin.get("secrets", "hami-signing-key", namespaces.SYSTEM)
        return {
            name: Signer.from_pem(base64.b64decode(text)).key_id
            for name, text in secret["data"].items()
        }

    async def control(self) -> None:
        """Roll out each change of the Deployment, one replica after the other."""
        while True:
            found = await self.admin.get("deployments.apps", SCHEDULER, namespaces.SYSTEM)
            marks = found["spec"]["template"]["metadata"].get("annotations") or {}
            generation = found["metadata"]["generation"]
            is_seen = (found.get("status") or {}).get("observedGeneration") == generation
            if marks and not is_seen and not self.is_stuck:
                trusted = [await self.trusted(namespace) for namespace in MAPS]
                assert trusted[0] == trusted[1]
                self.seen.append((dict(marks), trusted[0], (await self.keys())[SIGNING]))
                for updated in (1, 2):
                    status = {
                        "observedGeneration": generation,
                        "replicas": 2,
                        "updatedReplicas": updated,
                        "availableReplicas": 2,
                    }
                    await self.admin.patch(
                        *("deployments.apps", SCHEDULER, {"status": status}),
                        namespace=namespaces.SYSTEM,
                        subresource="status",
                    )
                    await anyio.sleep(0.05)
            await anyio.sleep(0.02)

    def rotation(self, *, rollout_s: float = 40.0) -> Rotation:
        return Rotation(
            self.kube,
            namespace=namespaces.SYSTEM,
            agents_namespace=namespaces.AGENTS,
            clock=SystemClock(),
            refresh_s=0.2,
            rollout_s=rollout_s,
            report=lambda _text: None,
        )

    async def pod(self, signer: Signer) -> None:
        metadata = {
            "name": "web",
            "labels": {annotations.MANAGED_LABEL: "true"},
            "annotations": {annotations.ALLOCATION: signer.sign(signed("a1"))},
        }
        spec = {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]}
        await self.admin.create("pods", {"metadata": metadata, "spec": spec}, "default")


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(rotation, "POLL_S", 0.02)
    async with (
        ApiServer(Settings()) as api,
        KubeClient(Access(url=api.url, token=api.token)) as admin,
        kubeio.connect(str(api.kubeconfig(tmp_path / "kubeconfig")), start_timeout_s=20) as kube,
        anyio.create_task_group() as group,
    ):
        site = Site(kube, admin)
        await site.install()
        group.start_soon(site.control)
        yield site
        group.cancel_scope.cancel()


async def test_next_key_is_trusted_everywhere_before_it_signs(site: Site) -> None:
    key = await site.rotation().run()
    assert key != site.first.key_id
    both = {site.first.key_id, key}
    old = {TRUSTED: key, SIGNED_BY: site.first.key_id}
    assert site.seen == [
        (old, both, site.first.key_id),
        ({TRUSTED: key, SIGNED_BY: key}, both, key),
    ]
    assert await site.keys() == {SIGNING: key}


async def test_interrupted_rotation_continues_with_the_same_key(site: Site) -> None:
    site.is_stuck = True
    with pytest.raises(Unavailable, match="hami-scheduler"):
        await site.rotation(rollout_s=0.1).run()
    keys = await site.keys()
    assert keys[SIGNING] == site.first.key_id
    with pytest.raises(Conflict, match="not finished"):
        await site.rotation().retire()
    site.is_stuck = False
    assert await site.rotation().run() == keys[NEXT]


async def test_rotation_interrupted_before_its_last_restart_makes_no_third_key(site: Site) -> None:
    key = await site.rotation().run()
    marks = {"spec": {"template": {"metadata": {"annotations": {SIGNED_BY: site.first.key_id}}}}}
    await site.admin.patch("deployments.apps", SCHEDULER, marks, namespace=namespaces.SYSTEM)
    assert await site.rotation().run() == key


async def test_old_key_is_retired_once_no_pod_needs_it(site: Site) -> None:
    await site.pod(site.first)
    key = await site.rotation().run()
    refused = await site.rotation().retire()
    assert [(one.pod, one.key) for one in refused.pods] == [("web", site.first.key_id)]
    assert await site.trusted(namespaces.AGENTS) == {site.first.key_id, key}
    await site.admin.delete("pods", "web", "default", gracePeriodSeconds="0")
    retired = await site.rotation().retire()
    assert retired.removed == (site.first.key_id,)
    for namespace in MAPS:
        assert await site.trusted(namespace) == {key}
    assert site.seen[-1][0] == {TRUSTED: key, SIGNED_BY: key}
