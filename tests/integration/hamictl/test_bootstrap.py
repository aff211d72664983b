# SPDX-License-Identifier: Apache-2.0
"""Keys and certificates of an installation: made once, kept, renewed without a gap in trust."""

import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hami_common.errors import NotFound
from hami_common.runtime import kubeio
from hami_common.signing import Signer, Verifier
from hami_sim.apiserver import ApiServer, Settings
from hami_webhook.core.configuration import Client, mutating_webhook_configuration
from hamictl.bootstrap import Plan, bootstrap
from hamictl.certificates import ends, serves

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 3, 1, tzinfo=UTC)
PLAN = Plan(namespace="hami-system", service="hami-webhook", webhook="hami-webhook")
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
NAMES = ["hami-webhook.hami-system.svc"]


class Site:
    """A cluster to which the manifests were applied, before anybody made its keys."""

    def __init__(self, kube: kubeio.KubeClient) -> None:
        self.kube = kube

    async def run(self, now: datetime, plan: Plan = PLAN) -> list[str]:
        return await bootstrap(self.kube, plan, now=now)

    async def data(self, resource: str, name: str) -> dict[str, bytes]:
        raw = await self.kube.get(f"/api/v1/namespaces/hami-system/{resource}/{name}")
        data: dict[str, str] = json.loads(raw)["data"]
        if resource == "configmaps":
            return {key: text.encode() for key, text in data.items()}
        return {key: base64.b64decode(text) for key, text in data.items()}

    async def bundles(self) -> set[bytes]:
        hooks: list[dict[str, Any]] = json.loads(await self.kube.get(f"{HOOKS}/hami-webhook"))[
            "webhooks"
        ]
        return {base64.b64decode(hook["clientConfig"]["caBundle"]) for hook in hooks}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with ApiServer(Settings()) as server:
        path = tmp_path / "kubeconfig"
        server.kubeconfig(path)
        async with kubeio.connect(str(path)) as kube:
            document = mutating_webhook_configuration(
                ["nvidia.com/gpu"], Client(namespace="hami-system", service="hami-webhook")
            )
            await kube.create(HOOKS, json.dumps(document).encode())
            yield Site(kube)


async def test_first_run_makes_everything_and_the_next_changes_nothing(site: Site) -> None:
    assert len(await site.run(NOW)) == 5
    assert await site.run(NOW + timedelta(days=1)) == []
    signer = Signer.from_pem((await site.data("secrets", "hami-signing-key"))["signing.pem"])
    trusted = await site.data("configmaps", "hami-trusted-keys")
    Verifier.from_pems(trusted.values())
    assert list(trusted) == [f"{signer.key_id}.pub"]
    authority = (await site.data("secrets", "hami-ca"))["tls.crt"]
    serving = await site.data("secrets", "hami-webhook-tls")
    assert serves(serving["tls.crt"], NAMES, authority=authority)
    assert await site.bundles() == {authority}


async def test_certificate_that_ends_soon_is_renewed_by_the_same_authority(site: Site) -> None:
    await site.run(NOW)
    authority = await site.data("secrets", "hami-ca")
    later = NOW + timedelta(days=61)
    assert await site.run(later) == ["made Secret hami-webhook-tls: the webhook's certificate"]
    serving = (await site.data("secrets", "hami-webhook-tls"))["tls.crt"]
    assert ends(serving) == later + PLAN.serving_valid
    assert await site.data("secrets", "hami-ca") == authority


async def test_old_authority_stays_trusted_until_it_ends(site: Site) -> None:
    await site.run(NOW)
    old = (await site.data("secrets", "hami-ca"))["tls.crt"]
    later = NOW + PLAN.authority_valid - timedelta(days=20)
    await site.run(later)
    new = (await site.data("secrets", "hami-ca"))["tls.crt"]
    assert new != old
    assert await site.bundles() == {new + old}
    serving = (await site.data("secrets", "hami-webhook-tls"))["tls.crt"]
    assert serves(serving, NAMES, authority=new)
    await site.run(later + timedelta(days=21))
    assert await site.bundles() == {new}


async def test_signing_key_of_the_operators_own_is_kept(site: Site) -> None:
    own = Signer.generate()
    secret = {
        "metadata": {"name": "hami-signing-key"},
        "data": {"signing.pem": base64.b64encode(own.private_pem()).decode()},
    }
    path = "/api/v1/namespaces/hami-system/secrets"
    await site.kube.create(path, json.dumps(secret).encode())
    await site.run(NOW)
    assert list(await site.data("configmaps", "hami-trusted-keys")) == [f"{own.key_id}.pub"]


async def test_unreadable_certificate_is_made_anew(site: Site) -> None:
    await site.run(NOW)
    path = "/api/v1/namespaces/hami-system/secrets/hami-webhook-tls"
    await site.kube.patch(path, b'{"data":{"tls.crt":"bm9uc2Vuc2U="}}')
    assert len(await site.run(NOW)) == 1
    serving = (await site.data("secrets", "hami-webhook-tls"))["tls.crt"]
    assert serves(serving, NAMES, authority=(await site.data("secrets", "hami-ca"))["tls.crt"])


async def test_keys_alone_need_no_webhook(site: Site) -> None:
    plan = Plan(namespace="hami-system", service="hami-webhook", webhook="")
    assert len(await site.run(NOW, plan)) == 2
    with pytest.raises(NotFound):
        await site.data("secrets", "hami-ca")
