# SPDX-License-Identifier: Apache-2.0
"""Callers of the webhook other than the API server: over TLS, as any pod of the cluster can."""

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from hami_sim.certs import CertificateAuthority
from tests.support.admission import asking_pod, review
from tests.support.webhook import RunningWebhook, run_webhook

pytestmark = pytest.mark.anyio

API_SERVER = "kube-apiserver-webhook-client"
OFFERED = "hami_webhook_events_dropped_total"
"""Without a bus, an event that would be published is dropped for this cause."""


@pytest.fixture
def authority() -> CertificateAuthority:
    return CertificateAuthority()


@pytest.fixture
async def webhook(tmp_path: Path, authority: CertificateAuthority) -> AsyncIterator[RunningWebhook]:
    """A webhook configured with the authority and the name of the API server's certificate."""
    file = tmp_path / "clients.crt"
    file.write_bytes(authority.pem)
    async with run_webhook(
        tmp_path / "tls", authority, client_ca_file=str(file), client_names=(API_SERVER,)
    ) as webhook:
        yield webhook


async def post(
    webhook: RunningWebhook,
    folder: Path,
    authority: CertificateAuthority | None = None,
    name: str = API_SERVER,
) -> int:
    """Status of the answer to a forged review, 0 where there is none."""
    context = ssl.create_default_context(cafile=str(folder / "tls" / "ca.crt"))
    if authority is not None:
        certificate, key, _ = authority.issue_files(folder / "client", [], common_name=name)
        context.load_cert_chain(certificate, key)
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    try:
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"{webhook.url}/mutate", json=review(asking_pod())) as answer,
        ):
            await answer.read()
            return answer.status
    except (aiohttp.ClientError, OSError):
        return 0


def offered(webhook: RunningWebhook) -> float:
    return webhook.sample(OFFERED, cause="no-bus")


async def test_caller_without_certificate_is_rejected(
    webhook: RunningWebhook, tmp_path: Path
) -> None:
    assert await post(webhook, tmp_path) == 0
    assert offered(webhook) == 0


async def test_certificate_of_another_authority_is_rejected(
    webhook: RunningWebhook, tmp_path: Path
) -> None:
    assert await post(webhook, tmp_path, CertificateAuthority()) == 0
    assert offered(webhook) == 0


async def test_other_certificate_of_the_same_authority_is_refused(
    webhook: RunningWebhook, authority: CertificateAuthority, tmp_path: Path
) -> None:
    assert await post(webhook, tmp_path, authority, "system:node:n1") == 403
    assert webhook.sample("hami_webhook_callers_refused_total", cause="name") == 1
    assert offered(webhook) == 0


async def test_api_server_is_accepted_and_not_throttled(
    webhook: RunningWebhook, authority: CertificateAuthority, tmp_path: Path
) -> None:
    for _ in range(3):
        assert await post(webhook, tmp_path, authority) == 200
    assert offered(webhook) == 3


async def test_address_that_uses_up_its_share_is_throttled(
    tmp_path: Path, authority: CertificateAuthority
) -> None:
    """Another address has a share of its own."""
    async with run_webhook(
        tmp_path / "tls", authority, source_cpu_share=0.01, source_cpu_burst_s=0.02
    ) as webhook:
        statuses = []
        with anyio.fail_after(30):
            while 429 not in statuses:
                statuses.append(await post(webhook, tmp_path))
        assert set(statuses) == {200, 429}
        assert webhook.sample("hami_webhook_callers_refused_total", cause="rate") >= 1
