# SPDX-License-Identifier: Apache-2.0
"""A support bundle has what is needed and none of the planted secrets, wherever they stand."""

import io
import tarfile

import pytest

from hami_common.errors import Unavailable
from hamictl.commands.support_bundle import REDACTED, Bundle, redact, redact_text
from hamictl.errors import Refused

PLANTED = "hunter2-planted-Zk9"
PEM = f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\n-----END PRIVATE KEY-----"
JWT = f"eyJhbGciOiJSUzI1NiIsImtpZCI6.eyJzdWIiOiJ4IiwiYSI6{PLANTED.replace('-', '')}.c2ln"
NKEY = "SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC4"

TEXTS = [
    f"nats_urls = ['nats://user:{PLANTED}@nats:4222']",
    f"Authorization: Bearer {PLANTED}",
    f'password = "{PLANTED}"',
    f"NATS_PASSWORD={PLANTED} started",
    f'{{"api_key": "{PLANTED}"}}',
    f"client-secret: {PLANTED}",
    f"key follows {PEM} and ends",
    f"cut off {PEM[:60]}",
]

DOCUMENTS: list[object] = [
    {"data": {"scheduler.toml": f"nats_password = '{PLANTED}'\nhttp_port = 1"}},
    {"spec": {"containers": [{"env": [{"name": "X", "value": PLANTED}]}]}},
    {"metadata": {"annotations": {"auth-token": PLANTED}}},
    {"users": [{"user": {"token": PLANTED, "client-key-data": "x"}}]},
    {"kubectl.kubernetes.io/last-applied-configuration": PLANTED},
    [{"deep": ({"signing_key": PLANTED},)}],
]


@pytest.mark.parametrize("text", TEXTS)
def test_planted_secret_is_not_in_a_text(text: str) -> None:
    assert PLANTED not in redact_text(text)
    assert REDACTED in redact_text(text)


@pytest.mark.parametrize("number", range(len(DOCUMENTS)))
def test_planted_secret_is_not_in_a_document(number: int) -> None:
    bundle = Bundle(lambda _: None)
    bundle.put("document.json", DOCUMENTS[number])
    assert PLANTED.encode() not in bundle.files["document.json"]


def test_tokens_and_seeds_go_wherever_they_stand() -> None:
    assert "eyJ" not in redact_text(f"log line with {JWT} in it")
    assert NKEY not in redact_text(f"seed={NKEY}, again {NKEY}")


def test_what_is_no_secret_stays() -> None:
    text = "signing_key_file = /keys/signing.pem, lease_s = 30, pod default/web uses 300 MiB"
    assert redact_text(text) == text
    document = {"nats_creds": "", "signing_key_file": "/keys/a.pem", "secretName": "tls", "port": 1}
    assert redact(document) == document
    assert redact({"env": [{"name": "LEVEL", "value": "x"}]}) == {
        "env": [{"name": "LEVEL", "value": REDACTED}]
    }


@pytest.mark.anyio
async def test_archive_has_every_file_and_says_what_is_missing() -> None:
    heard: list[str] = []
    bundle = Bundle(heard.append)
    bundle.put_text("a/log.txt", f"token={PLANTED}")

    async def away() -> None:
        raise Unavailable(peer="NATS", detail=f"nats://u:{PLANTED}@h is away")

    async def denied() -> None:
        raise Refused("no")

    await bundle.attempt("bus", away)
    await bundle.attempt("pods", denied)
    assert heard == ["bus", "pods"]
    data = bundle.tar(prefix="hami-support", now_s=0)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = archive.getnames()
        problems = archive.extractfile("hami-support/problems.txt")
        assert problems is not None
        told = problems.read().decode()
    assert names == ["hami-support/a/log.txt", "hami-support/problems.txt"]
    assert "bus: " in told
    assert "pods: no" in told
    assert PLANTED not in told
