# SPDX-License-Identifier: Apache-2.0
"""The webhook as a service: real TLS, certificate rotation under load, malformed input, the bus."""

import json
import ssl
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import anyio
import pytest
from anyio.streams.tls import TLSAttribute
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.decision import AdmissionRecord
from hami_common.runtime.natsio import connect, ensure_bus, pull_events
from hami_sim.certs import CertificateAuthority
from hami_sim.natsd import NatsServer
from hami_sim.process import Process
from tests.support.admission import asking_pod, patch_of, review
from tests.support.webhook import HOST, RunningWebhook, run_webhook

pytestmark = pytest.mark.anyio
RELOADS = "hami_webhook_certificate_reloads_total"


def replace_pair(directory: Path, authority: CertificateAuthority) -> None:
    """Put a new pair of files in place of the old one, the way a secret is updated."""
    put_pair(directory, *authority.issue([HOST]))


def put_pair(directory: Path, certificate: bytes, key: bytes) -> None:
    for name, content in (("tls.crt", certificate), ("tls.key", key)):
        fresh = directory / f"{name}.new"
        fresh.write_bytes(content)
        fresh.replace(directory / name)


async def until_reloaded(webhook: RunningWebhook, times: int, outcome: str = "ok") -> None:
    with anyio.fail_after(20):
        while webhook.sample(RELOADS, outcome=outcome) < times:
            await anyio.sleep(0.01)


async def served_certificate(webhook: RunningWebhook) -> x509.Certificate:
    """Certificate of a new handshake."""
    async with await anyio.connect_tcp(
        HOST, webhook.ports.tls, ssl_context=webhook.trusted, tls_hostname=HOST
    ) as stream:
        attribute = TLSAttribute.peer_certificate_binary
        der = stream.extra(attribute)  # noqa: S610 - a stream's attribute, no database
    assert der is not None
    return x509.load_der_x509_certificate(der)


async def test_pod_is_admitted_over_tls(tmp_path: Path) -> None:
    async with run_webhook(tmp_path, CertificateAuthority()) as webhook, webhook.session() as http:
        for path in ("/webhook", "/mutate"):
            async with http.post(f"{webhook.url}{path}", json=review(asking_pod())) as response:
                assert response.status == 200
                assert patch_of(await response.json())
        async with http.post(f"{webhook.url}/validate", json=review(asking_pod())) as response:
            assert not (await response.json())["response"]["allowed"]


async def test_changed_policy_counts_from_the_next_review_on(tmp_path: Path) -> None:
    authority = CertificateAuthority()
    certificate, key, _ = authority.issue_files(tmp_path, [HOST])
    config = tmp_path / "webhook.toml"
    text = f"""
nats_urls = []
tls_port = 0
config_poll_s = 0.1
drain_s = 0.0
tls_cert_file = "{certificate}"
tls_key_file = "{key}"
"""
    config.write_text(text)
    process = Process(
        "webhook",
        [sys.executable, "-m", "hami_webhook", "--config", str(config)],
        log=tmp_path / "webhook.log",
    )
    trusted = ssl.create_default_context(cadata=authority.pem.decode())
    process.start()
    try:
        with anyio.fail_after(40):
            while len(ports := listening(process)) < 2:
                await anyio.sleep(0.05)
        url = f"https://{HOST}:{ports[0]}/mutate"
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def scheduler_name() -> object:
                async with http.post(url, json=review(asking_pod())) as response:
                    patch = patch_of(await response.json())
                return next(one["value"] for one in patch if one["path"] == "/spec/schedulerName")

            assert await scheduler_name() == "hami-scheduler"
            config.write_text(f'{text}[policy]\nscheduler_name = "other"\n')
            with anyio.fail_after(40):
                while await scheduler_name() != "other":
                    await anyio.sleep(0.05)
    finally:
        await process.stop()


def listening(process: Process) -> list[int]:
    """Ports that the service listens on, admission's first."""
    lines = process.log.read_bytes().splitlines() if process.log.exists() else []
    told = [json.loads(line) for line in lines if line.startswith(b"{")]
    return [one["port"] for one in told if one["message"] == "listening"]


async def test_probes_and_metrics_are_on_both_ports(tmp_path: Path) -> None:
    async with run_webhook(tmp_path, CertificateAuthority()) as webhook, webhook.session() as http:
        for base in (webhook.url, webhook.plain_url):
            for path in ("/healthz", "/readyz", "/metrics"):
                async with http.get(f"{base}{path}") as response:
                    assert response.status == 200
        async with http.post(f"{webhook.plain_url}/mutate", json={}) as response:
            assert response.status == 404


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "does not decode"),
        (b"{", 400, "does not decode"),
        (b'{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview"}', 400, "v1beta1"),
        (b"x" * 4097, 413, "passes the limit of 4096 bytes"),
    ],
)
async def test_malformed_input_is_refused_with_a_message(
    tmp_path: Path, body: bytes, status: int, text: str
) -> None:
    authority = CertificateAuthority()
    async with (
        run_webhook(tmp_path, authority, body_limit_bytes=4096) as webhook,
        webhook.session() as http,
        http.post(f"{webhook.url}/mutate", data=body) as response,
    ):
        assert response.status == status
        assert text in (await response.json())["error"]["message"]


async def test_body_of_unknown_length_is_held_to_the_limit(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 1024

    authority = CertificateAuthority()
    async with (
        run_webhook(tmp_path, authority, body_limit_bytes=4096) as webhook,
        webhook.session() as http,
        http.post(f"{webhook.url}/mutate", data=pieces()) as response,
    ):
        assert response.status == 413


async def test_old_protocol_versions_are_refused(tmp_path: Path) -> None:
    async with run_webhook(tmp_path, CertificateAuthority()) as webhook:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname = False
        old.verify_mode = ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1 is deprecated"):
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match=r"TLSv1_1 is deprecated"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        # The server hangs up; a client that refused by itself would raise SSLError.
        with pytest.raises(anyio.BrokenResourceError):
            await anyio.connect_tcp(HOST, webhook.ports.tls, ssl_context=old)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        async with await anyio.connect_tcp(HOST, webhook.ports.tls, ssl_context=old) as stream:
            version = stream.extra(TLSAttribute.tls_version)  # noqa: S610 - no database
        assert version == "TLSv1.2"


async def test_certificate_rotates_under_load_without_a_failed_request(tmp_path: Path) -> None:
    """Reviews are sent every 5 ms, also while others wait; one in eight on a new connection."""
    authority = CertificateAuthority()
    answered: list[int] = []
    reviews, every_s, rotations = 400, 0.005, 5

    async def call(webhook: RunningWebhook, http: aiohttp.ClientSession, number: int) -> None:
        if number % 8 == 0:
            async with webhook.session(reuse=False) as alone:
                await ask(webhook, alone)
        else:
            await ask(webhook, http)

    async def ask(webhook: RunningWebhook, http: aiohttp.ClientSession) -> None:
        async with http.post(f"{webhook.url}/mutate", json=review(asking_pod())) as answer:
            answered.append(answer.status)
            assert patch_of(await answer.json())

    async with run_webhook(tmp_path, authority) as webhook, webhook.session() as http:
        serials = {(await served_certificate(webhook)).serial_number}
        async with anyio.create_task_group() as group:
            begin_s = anyio.current_time()
            for number in range(reviews):
                await anyio.sleep_until(begin_s + number * every_s)
                group.start_soon(call, webhook, http, number)
                if (number + 1) % (reviews // (rotations + 1)) == 0 and len(serials) <= rotations:
                    replace_pair(tmp_path, authority)
                    await until_reloaded(webhook, len(serials))
                    serials.add((await served_certificate(webhook)).serial_number)
    assert len(serials) == rotations + 1
    assert answered == [200] * reviews


async def test_new_certificate_of_another_key_type_is_the_only_one_served(tmp_path: Path) -> None:
    authority = CertificateAuthority()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rsa")])
    now = datetime.fromtimestamp(1_700_000_000, tz=UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(4711)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    async with run_webhook(tmp_path, authority) as webhook:
        webhook.trusted.check_hostname = False
        webhook.trusted.verify_mode = ssl.CERT_NONE
        put_pair(tmp_path, certificate.public_bytes(serialization.Encoding.PEM), pem)
        await until_reloaded(webhook, 1)
        assert (await served_certificate(webhook)).serial_number == 4711
        gauge = "hami_webhook_certificate_not_after_timestamp_seconds"
        assert webhook.sample(gauge) == (now + timedelta(days=3650)).timestamp()


@pytest.mark.parametrize("broken", ["garbage", "foreign-key", "missing"])
async def test_broken_new_pair_keeps_the_old_until_it_is_right(tmp_path: Path, broken: str) -> None:
    authority = CertificateAuthority()
    async with run_webhook(tmp_path, authority) as webhook:
        old = (await served_certificate(webhook)).serial_number
        if broken == "garbage":
            (tmp_path / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\nno\n")
        elif broken == "foreign-key":
            (tmp_path / "tls.key").write_bytes(authority.issue([HOST])[1])
        else:
            (tmp_path / "tls.key").unlink()
        await until_reloaded(webhook, 1, "failed")
        assert (await served_certificate(webhook)).serial_number == old
        replace_pair(tmp_path, authority)
        await until_reloaded(webhook, 1)
        assert (await served_certificate(webhook)).serial_number != old


async def test_admission_works_without_the_bus_and_events_follow(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    await nats_server.stop()
    authority = CertificateAuthority()
    async with (
        run_webhook(tmp_path, authority, nats_urls=[nats_server.url]) as webhook,
        webhook.session() as http,
    ):
        async with http.post(f"{webhook.url}/mutate", json=review(asking_pod())) as response:
            assert response.status == 200
        assert webhook.sample("hami_webhook_bus_connected") == 0
        await nats_server.start()
        async with connect([nats_server.url], name="test") as bus:
            await ensure_bus(bus)
            subject = subjects.admission_event("team-a", "train-0")
            with anyio.fail_after(40):
                async with pull_events(
                    bus, subjects.EVENTS_STREAM, filter_subjects=(subject,)
                ) as deliveries:
                    delivery = await anext(deliveries)
            record = codec.decode(delivery.data, AdmissionRecord, what=subject)
            assert record.allowed
            assert delivery.headers["traceparent"]


async def test_shutdown_finishes_queued_reviews(tmp_path: Path, nats_server: NatsServer) -> None:
    authority = CertificateAuthority()
    async with connect([nats_server.url], name="test") as bus:
        await ensure_bus(bus)
        async with (
            run_webhook(tmp_path, authority, nats_urls=[nats_server.url]) as webhook,
            webhook.session() as http,
        ):
            for number in range(20):
                pod = asking_pod(f"p-{number}")
                document = review(pod, uid=f"uid-{number}")
                async with http.post(f"{webhook.url}/mutate", json=document) as response:
                    assert response.status == 200
        assert webhook.sample("hami_webhook_events_published_total") == 20


async def test_readiness_fails_before_the_server_stops(tmp_path: Path) -> None:
    authority = CertificateAuthority()
    async with run_webhook(tmp_path, authority, drain_s=0.5) as webhook, webhook.session() as http:
        webhook.context.stop()
        async with http.get(f"{webhook.url}/readyz") as response:
            assert response.status == 503
        async with http.post(f"{webhook.url}/mutate", json=review(asking_pod())) as response:
            assert response.status == 200
    with pytest.raises(aiohttp.ClientError):
        async with webhook.session() as http:
            await http.get(f"{webhook.url}/readyz")
