# SPDX-License-Identifier: Apache-2.0
"""Logging in at a real nats-server: credentials files, their rotation, TLS, permissions."""

import base64
import binascii
import hashlib
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hami_common.errors import SettingsInvalid, Unavailable
from hami_common.runtime import natsio
from hami_sim.certs import CertificateAuthority
from hami_sim.natsd import run_nats_server

pytestmark = pytest.mark.anyio

PREFIXES = {"O": 14 << 3, "A": 0, "U": 20 << 3}
SEED_PREFIX = 18 << 3


class Key:
    """An nkey of one kind (operator, account, user)."""

    def __init__(self, kind: str) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._kind = kind

    def _text(self, raw: bytes) -> str:
        raw += binascii.crc_hqx(raw, 0).to_bytes(2, "little")
        return base64.b32encode(raw).decode().rstrip("=")

    @property
    def public(self) -> str:
        raw = self._key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        return self._text(bytes([PREFIXES[self._kind]]) + raw)

    @property
    def seed(self) -> str:
        raw = self._key.private_bytes(
            serialization.Encoding.Raw,
            serialization.PrivateFormat.Raw,
            serialization.NoEncryption(),
        )
        kind = PREFIXES[self._kind]
        return self._text(bytes([SEED_PREFIX | kind >> 5, (kind & 31) << 3]) + raw)

    def jwt(self, subject: str, name: str, claims: dict[str, object]) -> str:
        def part(value: object) -> str:
            data = msgspec.json.encode(value)
            return base64.urlsafe_b64encode(data).decode().rstrip("=")

        body: dict[str, object] = {
            "iat": 1_700_000_000,
            "iss": self.public,
            "name": name,
            "sub": subject,
            "nats": {"version": 2, **claims},
        }
        digest = hashlib.new("sha512_256", msgspec.json.encode(body)).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        signed = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
        signature = base64.urlsafe_b64encode(self._key.sign(signed.encode())).decode()
        return f"{signed}.{signature.rstrip('=')}"


UNLIMITED = {
    "subs": -1,
    "data": -1,
    "payload": -1,
    "imports": -1,
    "exports": -1,
    "wildcards": True,
    "conn": -1,
    "leaf": -1,
}


class Operator:
    """An operator with one account, and users of it."""

    def __init__(self) -> None:
        self._operator, self._account, self._system = Key("O"), Key("A"), Key("A")

    @property
    def config(self) -> str:
        operator = self._operator.jwt(self._operator.public, "op", {"type": "operator"})
        accounts = ",\n".join(
            f" {key.public}: "
            + self._operator.jwt(key.public, "acc", {"type": "account", "limits": UNLIMITED})
            for key in (self._account, self._system)
        )
        return (
            f"operator: {operator}\nresolver: MEMORY\nsystem_account: {self._system.public}\n"
            f"resolver_preload: {{{accounts} }}\n"
        )

    def creds(self, path: Path) -> Path:
        user = Key("U")
        limits = {"subs": -1, "data": -1, "payload": -1}
        jwt = self._account.jwt(user.public, "hami", {"type": "user", **limits})
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            "************************* IMPORTANT *************************\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
        return path


async def test_a_credentials_file_logs_in_and_a_replaced_one_at_the_next_connection(
    tmp_path: Path,
) -> None:
    operator = Operator()
    creds = operator.creds(tmp_path / "hami.creds")
    async with run_nats_server(tmp_path / "n", config_text=operator.config) as server:
        async with natsio.connect(
            [server.url], name="t", creds=str(creds), start_timeout_s=20
        ) as bus:
            assert await bus.publish("x", b"1")
            operator.creds(creds)
            await server.restart()
            with anyio.fail_after(20):
                await bus.wait_connected(after=1)
        stranger = str(Operator().creds(tmp_path / "stranger.creds"))
        with pytest.raises(Unavailable, match=r"(?i)authorization"):
            async with natsio.connect([server.url], name="t", creds=stranger, start_timeout_s=2):
                pytest.fail("another operator made these")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda _: "", "no NATS USER JWT block"),
        (lambda text: text.replace("USER NKEY SEED", "OTHER"), "no USER NKEY SEED block"),
        (lambda text: text.replace("\nSU", "\nSA"), "not one of a user"),
        (lambda text: text.replace("\nSU", "\nSU!"), "not base32"),
        (lambda text: text.replace("\nSUA", "\nSUB"), "checksum"),
        (lambda _: "\u00e4", "not ASCII"),
    ],
)
async def test_a_damaged_credentials_file_is_a_settings_error(
    tmp_path: Path, damage: Callable[[str], str], problem: str
) -> None:
    creds = Operator().creds(tmp_path / "c")
    creds.write_text(damage(creds.read_text()), encoding="utf-8")
    with pytest.raises(SettingsInvalid, match=problem):
        async with natsio.connect(["nats://127.0.0.1:1"], name="t", creds=str(creds)):
            pytest.fail("the file is damaged")


async def test_a_missing_credentials_file_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="No such file"):
        async with natsio.connect(["nats://127.0.0.1:1"], name="t", creds=str(tmp_path / "no")):
            pytest.fail("there is no such file")


async def test_tls_is_verified_with_the_given_authority(tmp_path: Path) -> None:
    authority = CertificateAuthority()
    cert, key, ca = authority.issue_files(tmp_path, ["localhost", "127.0.0.1"])
    config = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}\n'
    async with run_nats_server(tmp_path / "n", config_text=config) as server:
        url = server.url.replace("nats://", "tls://")
        async with natsio.connect([url], name="t", ca_file=str(ca), start_timeout_s=20) as bus:
            await natsio.ensure_bus(bus)
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            async with natsio.connect([url], name="t", start_timeout_s=1.5):
                pytest.fail("nobody trusts this authority")


async def test_a_server_without_tls_is_refused_where_tls_is_required(tmp_path: Path) -> None:
    async with run_nats_server(tmp_path / "n") as server:
        url = server.url.replace("nats://", "tls://")
        with pytest.raises(Unavailable, match="does not offer TLS"):
            async with natsio.connect([url], name="t", start_timeout_s=1.5):
                pytest.fail("the connection is plain text")


async def test_denied_publish_is_unavailable_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = (
        "authorization { users = [ {user: agent, password: x, permissions: "
        '{ publish: { deny: "$KV.hami_alloc.>" } } } ] }'
    )
    async with run_nats_server(tmp_path / "n", config_text=config) as server:
        url = server.url.replace("nats://", "nats://agent:x@")
        async with natsio.connect([url], name="t", request_timeout_s=1) as bus:
            await natsio.ensure_bus(bus)
            with pytest.raises(Unavailable):
                await natsio.NatsBucket(bus, "hami_alloc").append("n.p", b"1")
            assert await natsio.NatsBucket(bus, "hami_state").append("n.p", b"1") == 1
    problems = [str(getattr(record, "problem", "")) for record in caplog.records]
    assert any("permissions violation" in text.lower() for text in problems)
