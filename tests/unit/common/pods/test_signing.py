# SPDX-License-Identifier: Apache-2.0
"""The signed allocation annotation: what verifies, and everything that does not (design D4, D6)."""

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hami_common.errors import SettingsInvalid, WireInvalid
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods.signing import SignedPlacement, Signer, Verifier

SIGNED = SignedPlacement(
    pod_uid="uid-1",
    namespace="default",
    pod="web-0",
    allocation_id="a1",
    ledger_seq=7,
    placement=Placement(
        node="node.a",
        containers=(
            ContainerShares(
                name="main",
                kind="app",
                shares=(Share(vendor="nvidia", uuid="GPU-1", memory_mib=3000, core_pct=30),),
            ),
        ),
    ),
)
SIGNER = Signer.generate()
VERIFIER = Verifier.from_pems([SIGNER.public_pem()])


def envelope() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(SIGNER.sign(SIGNED))
    return document


def test_signed_payload_verifies() -> None:
    annotation = SIGNER.sign(SIGNED)
    assert VERIFIER.verify(annotation, pod_uid="uid-1", node="node.a") == SIGNED
    assert VERIFIER.verify(annotation, pod_uid="uid-1") == SIGNED


def test_the_same_placement_is_signed_to_the_same_text() -> None:
    assert SIGNER.sign(SIGNED) == SIGNER.sign(SIGNED)


def test_another_pods_annotation_does_not_verify() -> None:
    with pytest.raises(WireInvalid, match="belongs to pod uid uid-1, not uid-2"):
        VERIFIER.verify(SIGNER.sign(SIGNED), pod_uid="uid-2")


def test_another_nodes_annotation_does_not_verify() -> None:
    with pytest.raises(WireInvalid, match=r"belongs to node node\.a, not node\.b"):
        VERIFIER.verify(SIGNER.sign(SIGNED), pod_uid="uid-1", node="node.b")


def test_a_changed_payload_does_not_verify() -> None:
    document = envelope()
    document["payload"]["placement"]["containers"][0]["shares"][0]["memory_mib"] = 99_999
    with pytest.raises(WireInvalid, match="signature does not match"):
        VERIFIER.verify(json.dumps(document), pod_uid="uid-1")


def test_a_payload_written_differently_does_not_verify_even_if_it_means_the_same() -> None:
    text = SIGNER.sign(SIGNED).replace('"ledger_seq":7', '"ledger_seq": 7')
    with pytest.raises(WireInvalid, match="signature does not match"):
        VERIFIER.verify(text, pod_uid="uid-1")


def test_payload_signed_without_the_domain_prefix_does_not_verify() -> None:
    key = Ed25519PrivateKey.generate()
    signer = Signer(key)
    document = json.loads(signer.sign(SIGNED))
    payload = signer.sign(SIGNED).partition('"payload":')[2].partition(',"kid"')[0]
    document["sig"] = base64.b64encode(key.sign(payload.encode())).decode()
    verifier = Verifier([key.public_key()])
    with pytest.raises(WireInvalid, match="signature does not match"):
        verifier.verify(json.dumps(document, separators=(",", ":")), pod_uid="uid-1")


def test_a_key_that_is_not_trusted_is_named() -> None:
    stranger = Signer.generate()
    with pytest.raises(WireInvalid, match=f"{stranger.key_id}.*not trusted"):
        VERIFIER.verify(stranger.sign(SIGNED), pod_uid="uid-1")


def test_claiming_a_trusted_key_id_is_rejected() -> None:
    document = json.loads(Signer.generate().sign(SIGNED))
    document["kid"] = SIGNER.key_id
    with pytest.raises(WireInvalid, match="signature does not match"):
        VERIFIER.verify(json.dumps(document, separators=(",", ":")), pod_uid="uid-1")


def test_old_and_new_key_are_trusted_while_keys_rotate() -> None:
    new = Signer.generate()
    both = Verifier.from_pems([SIGNER.public_pem(), new.public_pem()])
    for signer in (SIGNER, new):
        assert both.verify(signer.sign(SIGNED), pod_uid="uid-1") == SIGNED


def test_signature_is_rejected_without_trusted_keys() -> None:
    with pytest.raises(WireInvalid, match="not trusted"):
        Verifier([]).verify(SIGNER.sign(SIGNED), pod_uid="uid-1")


@pytest.mark.parametrize(
    "annotation",
    [
        "",
        "{}",
        "[]",
        "null",
        "not json",
        "[" * 100_000,
        '{"v":1,"payload":{},"kid":"x"}',
        '{"v":1,"payload":{},"kid":"x","sig":"***"}',
        '{"v":1,"payload":{},"kid":"x","sig":"é"}',
        '{"v":"1","payload":{},"kid":"x","sig":""}',
        "\ud800",
    ],
)
def test_malformed_annotation_is_wire_invalid(annotation: str) -> None:
    with pytest.raises(WireInvalid):
        VERIFIER.verify(annotation, pod_uid="uid-1")


def test_unknown_version_is_named() -> None:
    with pytest.raises(WireInvalid, match="has version 2, this program knows 1"):
        VERIFIER.verify(json.dumps(envelope() | {"v": 2}), pod_uid="uid-1")


def test_a_truncated_annotation_does_not_verify() -> None:
    text = SIGNER.sign(SIGNED)
    for length in range(0, len(text), 7):
        with pytest.raises(WireInvalid):
            VERIFIER.verify(text[:length], pod_uid="uid-1")


def test_keys_survive_pem_and_keep_their_id() -> None:
    again = Signer.from_pem(SIGNER.private_pem())
    assert again.key_id == SIGNER.key_id
    assert again.sign(SIGNED) == SIGNER.sign(SIGNED)
    assert len(SIGNER.key_id) == 16


def _pem(key: Any, *, password: bytes = b"") -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )
    return pem


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"nonsense",
        _pem(ec.generate_private_key(ec.SECP256R1())),
        _pem(rsa.generate_private_key(65537, 2048)),
        _pem(Ed25519PrivateKey.generate(), password=b"x"),
        SIGNER.public_pem(),
    ],
)
def test_a_signing_key_of_another_kind_is_a_settings_error_with_the_fix(pem: bytes) -> None:
    with pytest.raises(SettingsInvalid, match=r"(?i)ed25519"):
        Signer.from_pem(pem)


@pytest.mark.parametrize("pem", [b"", b"nonsense", SIGNER.private_pem()])
def test_an_invalid_trusted_key_is_a_settings_error(pem: bytes) -> None:
    with pytest.raises(SettingsInvalid, match="give PEM Ed25519 public keys"):
        Verifier.from_pems([pem])
