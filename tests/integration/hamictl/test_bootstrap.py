# SPDX-License-Identifier: Apache-2.0
"""Keys and certificates of an installation: made once, kept, renewed without a gap in trust."""

import base64
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hami_common.admission.configuration import Client, mutating_webhook_configuration
from hami_common.bus import grants
from hami_common.bus.nkeys import NKey
from hami_common.certificates import ends, new_authority, serves
from hami_common.errors import NotFound
from hami_common.pods.signing import Signer, Verifier
from hami_common.runtime import kubeio, natsio
from hami_sim.apiserver import ApiServer, Settings
from hami_sim.certs import CertificateAuthority
from hami_sim.kubernetes import configuration
from hami_sim.natsd import run_nats_server
from hamictl.commands.bootstrap import (
    AGENTS_COPIES,
    BUS_SECRETS,
    Installation,
    create_missing,
)

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 3, 1, tzinfo=UTC)
PLAN = Installation(namespace="hami-system", service="hami-webhook", webhook="hami-webhook")
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
SHIPPED_BUS = configuration.shipped_directory().parent / "components" / "nats"
NAMES = ["hami-webhook.hami-system.svc"]


class Site:
    """A cluster to which the manifests were applied, before its keys exist."""

    def __init__(self, kube: kubeio.KubeClient) -> None:
        self.kube = kube

    async def run(self, now: datetime, plan: Installation = PLAN) -> list[str]:
        return await create_missing(self.kube, plan, now=now)

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


async def test_bootstrap_is_idempotent(site: Site) -> None:
    assert len(await site.run(NOW)) == 17
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
    assert await site.run(later) == [
        "made Secret hami-webhook-tls: the webhook's certificate",
        "made Secret hami-nats-tls: the bus servers' certificate",
        "made Secret hami-registry-tls: the registry's certificate",
        "made Secret hami-scheduler-tls: the scheduler's certificate",
        "made Secret hami-bind-admission-tls: the scheduler's certificate for bind admission",
    ]
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
    assert (await site.data("configmaps", "hami-ca"))["ca.crt"] == new + old
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


async def test_unreadable_certificate_is_replaced(site: Site) -> None:
    await site.run(NOW)
    path = "/api/v1/namespaces/hami-system/secrets/hami-webhook-tls"
    await site.kube.patch(path, b'{"data":{"tls.crt":"bm9uc2Vuc2U="}}')
    assert len(await site.run(NOW)) == 1
    serving = (await site.data("secrets", "hami-webhook-tls"))["tls.crt"]
    assert serves(serving, NAMES, authority=(await site.data("secrets", "hami-ca"))["tls.crt"])


async def test_keys_alone_need_no_webhook(site: Site) -> None:
    plan = Installation(namespace="hami-system", service="hami-webhook", webhook="", bus="")
    assert len(await site.run(NOW, plan)) == 3
    with pytest.raises(NotFound):
        await site.data("secrets", "hami-ca")


async def test_agents_copies_follow_the_public_halves_and_hold_no_key(site: Site) -> None:
    agents = "/api/v1/namespaces/hami-agents"
    await site.run(NOW)
    for name in AGENTS_COPIES:
        await site.kube.patch(f"{agents}/configmaps/{name}", b'{"data":{"forged.pub":"x"}}')
    own = b'{"data":{"next.pub":"the operator adds a key before a rotation"}}'
    await site.kube.patch("/api/v1/namespaces/hami-system/configmaps/hami-trusted-keys", own)
    assert await site.run(NOW) == [
        f"changed ConfigMap hami-agents/{name}: the agents' copy" for name in AGENTS_COPIES
    ]
    for name in AGENTS_COPIES:
        copy = json.loads(await site.kube.get(f"{agents}/configmaps/{name}"))["data"]
        original = await site.data("configmaps", name)
        assert copy == {key: value.decode() for key, value in original.items()}
    assert json.loads(await site.kube.get(f"{agents}/secrets"))["items"] == []


async def test_agents_beside_the_services_need_no_copies(site: Site) -> None:
    plan = Installation(
        namespace="hami-system",
        agents_namespace="hami-system",
        service="hami-webhook",
        webhook="hami-webhook",
    )
    assert len(await site.run(NOW, plan)) == 15
    assert await site.run(NOW, plan) == []


async def test_external_authority_is_published_to_clients(site: Site) -> None:
    plan = Installation(namespace="hami-system", service="hami-webhook", webhook="", bus="")
    other = new_authority("other", now=NOW, valid=timedelta(days=9))
    secret = {
        "metadata": {"name": "hami-ca"},
        "data": {"tls.crt": base64.b64encode(other.certificate).decode()},
    }
    path = "/api/v1/namespaces/hami-system/secrets"
    await site.kube.create(path, json.dumps(secret).encode())
    await site.run(NOW, plan)
    assert (await site.data("configmaps", "hami-ca"))["ca.crt"] == other.certificate


async def test_keys_of_the_bus_stay_and_its_permissions_are_those_of_this_release(
    site: Site,
) -> None:
    await site.run(NOW)
    seeds = {name: await site.data("secrets", name) for name in BUS_SECRETS}
    accounts = await site.data("configmaps", "hami-bus-accounts")
    path = "/api/v1/namespaces/hami-system/configmaps/hami-bus-accounts"
    await site.kube.patch(path, b'{"data":{"accounts.conf":"of an older release"}}')
    assert await site.run(NOW) == [
        "changed ConfigMap hami-bus-accounts: accounts and permissions of the bus"
    ]
    assert await site.data("configmaps", "hami-bus-accounts") == accounts
    assert {name: await site.data("secrets", name) for name in BUS_SECRETS} == seeds
    for name, users in BUS_SECRETS.items():
        for key, user in users.items():
            public = NKey.from_seed(seeds[name][key].decode()).public
            assert (public.encode() in accounts["accounts.conf"]) is True, user
            assert seeds[name][key] not in accounts["accounts.conf"]


async def test_region_and_hub_get_a_login_and_the_account_of_the_copies(site: Site) -> None:
    plan = msgspec.structs.replace(PLAN, region="east", hub="tls://hub.example:7422")
    done = await site.run(NOW, plan)
    seed = (await site.data("secrets", "hami-bus-regions"))["seed"].decode()
    public = NKey.from_seed(seed).public
    assert f"login of region east at its hub: {public}" in done
    accounts = (await site.data("configmaps", "hami-bus-accounts"))["accounts.conf"].decode()
    assert public in accounts
    assert "$HAMI_REGION_SEED" in accounts
    assert "tls://hub.example:7422" in accounts
    assert seed not in accounts
    hub = msgspec.structs.replace(PLAN, leaf_by_region={"east": public}, bus_names=("hub.example",))
    await site.run(NOW, hub)
    accounts = (await site.data("configmaps", "hami-bus-accounts"))["accounts.conf"].decode()
    assert public in accounts
    assert "$HAMI_REGION_SEED" not in accounts
    certificate = (await site.data("secrets", "hami-nats-tls"))["tls.crt"]
    authority = (await site.data("configmaps", "hami-ca"))["ca.crt"]
    assert serves(certificate, ["hub.example"], authority=authority)


async def test_bus_runs_on_the_shipped_files_and_reloads_a_new_certificate(
    site: Site, tmp_path: Path
) -> None:
    """The files of the component nats with the accounts made here, and certificates that change."""
    await site.run(NOW)
    server_folder, tls = tmp_path / "n", tmp_path / "tls"
    server_folder.mkdir()
    accounts = server_folder / "accounts.conf"
    accounts.write_bytes((await site.data("configmaps", "hami-bus-accounts"))["accounts.conf"])
    seed = tmp_path / "seed"
    seed.write_bytes((await site.data("secrets", "hami-bus-scheduler"))["seed"])
    cert, key, ca = CertificateAuthority().issue_files(tls, ["127.0.0.1"])
    pid_file = tmp_path / "nats.pid"
    config = (SHIPPED_BUS / "nats.conf").read_text(encoding="utf-8")
    for there, here in (
        ("/tls/tls.crt", cert),
        ("/tls/tls.key", key),
        ("/run/nats/nats.pid", pid_file),
    ):
        assert there in config
        config = config.replace(there, str(here))
    # Where it listens and stores is not for the file to say here.
    config = re.sub(r"(?m)^(server_name|listen|http): .*$|^jetstream \{[^}]*\}$", "", config)
    login = natsio.NatsLogin(seed_file=str(seed), inbox=grants.inbox("scheduler"))
    async with run_nats_server(server_folder, config_text=config) as server:
        url = server.url.replace("nats://", "tls://")
        async with natsio.connect([url], name="t", login=login, ca_file=str(ca)) as bus:
            await natsio.ensure_bus(bus)
            reloader = subprocess.Popen(
                ["/bin/sh", SHIPPED_BUS / "reload.sh", cert, key, accounts],
                env={**os.environ, "PID_FILE": str(pid_file), "EVERY_S": "0.2"},
            )
            try:
                _, _, other_ca = CertificateAuthority().issue_files(tmp_path / "2", ["127.0.0.1"])
                (tmp_path / "2" / key.name).replace(key)
                (tmp_path / "2" / cert.name).replace(cert)
                async with natsio.connect(
                    [url], name="new", login=login, ca_file=str(other_ca), start_timeout_s=20
                ) as late:
                    await natsio.ensure_bus(late)
            finally:
                reloader.kill()
                reloader.wait()
            await natsio.ensure_bus(bus)
            assert bus.generation == 1
