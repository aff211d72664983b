# SPDX-License-Identifier: Apache-2.0
"""Signs and verifies the allocation annotation, which protects placements from forgery.

(design D4, D6).

Ed25519 (RFC 8032) over a domain word and the exact payload bytes; the annotation has payload, key
id and signature in one JSON document, so verification never re-encodes. A key id is the first 16
hex digits of the SHA-256 of the raw public key. Several public keys may be trusted at once, which
allows key rotation. This module has no file access: keys come in as PEM bytes.
"""

import base64
import hashlib
from collections.abc import Iterable

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hami_common.bounds import Label, Name, Sequence, SignedInt32, Uid, Word
from hami_common.errors import SettingsInvalid, WireInvalid
from hami_common.model.placement import Placement

_DOMAIN = b"hami.io/allocation/v1\n"


class SignedPlacement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content that the signature covers.

    The pod, its node, its shares and the ledger record that reserved them.
    """

    pod_uid: Uid
    namespace: Label
    pod: Name
    allocation_id: Uid
    ledger_seq: Sequence
    placement: Placement
    origin: Word = ""
    """``hami`` for a pod that HAMi placed and we took over; empty for one that we placed."""
    claim: Name = ""
    """ResourceClaim through which the pod gets its shares; empty: through the device plugin."""


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    v: SignedInt32
    payload: msgspec.Raw
    kid: Word
    sig: Word


_payload_encoder = msgspec.json.Encoder(order="deterministic")
_payload_decoder = msgspec.json.Decoder(SignedPlacement)
_envelope_encoder = msgspec.json.Encoder()
_envelope_decoder = msgspec.json.Decoder(_Envelope)


def _key_id(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def key_id_of(annotation: str) -> str:
    """Id of the key that signed an allocation annotation, unverified; empty if it has none."""
    try:
        return _envelope_decoder.decode(annotation).kid
    except (msgspec.DecodeError, RecursionError):
        return ""


class Signer:
    """Signs placements with one private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        """Use ``key``; see ``from_pem`` for keys on disk."""
        self._key = key
        self.key_id = _key_id(key.public_key())

    @classmethod
    def from_pem(cls, pem: bytes) -> "Signer":
        """Signer from an unencrypted PKCS#8 PEM private key."""
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise SettingsInvalid(
                field="signing key",
                problem=str(error),
                fix="give an unencrypted PKCS#8 PEM Ed25519 key",
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise SettingsInvalid(
                field="signing key",
                problem="is not an Ed25519 key",
                fix="make one with: openssl genpkey -algorithm ed25519",
            )
        return cls(key)

    @classmethod
    def generate(cls) -> "Signer":
        """Signer with a fresh key."""
        return cls(Ed25519PrivateKey.generate())

    def private_pem(self) -> bytes:
        """The private key as unencrypted PKCS#8 PEM."""
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def public_pem(self) -> bytes:
        """The public key as PEM."""
        return self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def sign(self, placement: SignedPlacement) -> str:
        """Value of the allocation annotation."""
        payload = _payload_encoder.encode(placement)
        signature = self._key.sign(_DOMAIN + payload)
        envelope = _Envelope(
            v=1,
            payload=msgspec.Raw(payload),
            kid=self.key_id,
            sig=base64.b64encode(signature).decode(),
        )
        return _envelope_encoder.encode(envelope).decode()


class Verifier:
    """Verifies allocation annotations against the trusted public keys."""

    def __init__(self, keys: Iterable[Ed25519PublicKey]) -> None:
        """Trust ``keys``; with an empty set no signature is valid."""
        self._keys = {_key_id(key): key for key in keys}

    @classmethod
    def from_pems(cls, pems: Iterable[bytes]) -> "Verifier":
        """Verifier from PEM public keys."""
        keys = []
        for pem in pems:
            try:
                key = serialization.load_pem_public_key(pem)
            except (ValueError, UnsupportedAlgorithm) as error:
                raise SettingsInvalid(
                    field="trusted key", problem=str(error), fix="give PEM Ed25519 public keys"
                ) from error
            if not isinstance(key, Ed25519PublicKey):
                raise SettingsInvalid(
                    field="trusted key",
                    problem="is not an Ed25519 key",
                    fix="give PEM Ed25519 public keys",
                )
            keys.append(key)
        return cls(keys)

    def trusts(self, key_id: str) -> bool:
        """True when the key with this id is trusted."""
        return key_id in self._keys

    def verify(self, annotation: str, *, pod_uid: str, node: str | None = None) -> SignedPlacement:
        """The placement signed for exactly this pod (and node, when given).

        ``WireInvalid`` names the check that failed.
        """
        what = "allocation annotation"
        try:
            envelope = _envelope_decoder.decode(annotation)
            signature = base64.b64decode(envelope.sig, validate=True)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireInvalid(what=what, problem=f"does not decode: {error}") from error
        if envelope.v != 1:
            raise WireInvalid(what=what, problem=f"has version {envelope.v}, this program knows 1")
        key = self._keys.get(envelope.kid)
        if key is None:
            raise WireInvalid(
                what=what, problem=f"is signed with key {envelope.kid!r}, which is not trusted"
            )
        payload = bytes(envelope.payload)
        try:
            key.verify(signature, _DOMAIN + payload)
            placement = _payload_decoder.decode(payload)
        except InvalidSignature as error:
            raise WireInvalid(what=what, problem="signature does not match") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireInvalid(what=what, problem=f"payload does not decode: {error}") from error
        if placement.pod_uid != pod_uid:
            raise WireInvalid(
                what=what, problem=f"belongs to pod uid {placement.pod_uid}, not {pod_uid}"
            )
        if node is not None and placement.placement.node != node:
            raise WireInvalid(
                what=what, problem=f"belongs to node {placement.placement.node}, not {node}"
            )
        return placement
