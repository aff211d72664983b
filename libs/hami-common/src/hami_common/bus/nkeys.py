# SPDX-License-Identifier: Apache-2.0
"""Keys of the bus and the tokens that they sign: NKeys and NATS JWT, version 2.

An nkey is an Ed25519 key as base32 text with a CRC-16 and a prefix for its kind: public ``U…``
(user), ``A…`` (account), ``N…`` (server); a seed begins with ``S`` and the kind. A JWT is signed
over ``header.body`` with the algorithm word ``ed25519-nkey``. Sources: the specifications of NKeys
and of JWT v2 of nats-io, ADR-26 of the NATS architecture (auth callout). Ed25519 comes from
``cryptography``, as for allocations (ADR 0013). Times in Unix seconds; uses no file and no clock.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hami_common.errors import WireInvalid

Kind = Literal["account", "server", "user"]

_PREFIX: Mapping[Kind, int] = {"account": 0, "server": 13 << 3, "user": 20 << 3}
_SEED_PREFIX = 18 << 3
_PUBLIC_BYTES = 35
_SEED_BYTES = 36
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_JWT_PARTS = 3

_encoder = msgspec.json.Encoder()


class NKey:
    """A private key of one kind."""

    def __init__(self, key: Ed25519PrivateKey, kind: Kind) -> None:
        """Use ``key``; see ``from_seed`` for keys as text."""
        self._key = key
        self.kind = kind
        raw = key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self.public = _text(bytes([_PREFIX[kind]]) + raw)
        """Public half of the key, which identifies it to the server and others."""

    @classmethod
    def generate(cls, kind: Kind) -> "NKey":
        """A fresh key."""
        return cls(Ed25519PrivateKey.generate(), kind)

    @classmethod
    def from_seed(cls, seed: str) -> "NKey":
        """Key from a seed; ``WireInvalid`` describes the error without quoting the seed."""
        raw = _raw(seed.strip(), size=_SEED_BYTES, what="nkey seed")
        if raw[0] & 0xF8 != _SEED_PREFIX:
            raise WireInvalid(what="nkey seed", problem="does not begin with S: it is no seed")
        prefix = (raw[0] & 7) << 5 | raw[1] >> 3
        for kind, value in _PREFIX.items():
            if value == prefix:
                return cls(Ed25519PrivateKey.from_private_bytes(raw[2:]), kind)
        raise WireInvalid(what="nkey seed", problem="is of a kind that has no use here")

    @property
    def seed(self) -> str:
        """The private half as text."""
        raw = self._key.private_bytes(
            serialization.Encoding.Raw,
            serialization.PrivateFormat.Raw,
            serialization.NoEncryption(),
        )
        prefix = _PREFIX[self.kind]
        return _text(bytes([_SEED_PREFIX | prefix >> 5, (prefix & 31) << 3]) + raw)

    def sign(self, data: bytes) -> bytes:
        """Signature of ``data``, 64 bytes."""
        return self._key.sign(data)

    def jwt(self, claims: Mapping[str, Any], *, subject: str, issued_s: int) -> str:
        """``claims`` about ``subject``, signed by this key."""
        body: dict[str, Any] = {**claims, "iat": issued_s, "iss": self.public, "sub": subject}
        digest = hashlib.new("sha512_256", _encoder.encode(body)).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        signed = f"{_part(_encoder.encode(_HEADER))}.{_part(_encoder.encode(body))}"
        return f"{signed}.{_part(self.sign(signed.encode()))}"


def verified_claims(jwt: str, *, issuer_kind: Kind) -> dict[str, Any]:
    """Claims of a JWT of the given kind whose signature matches the issuer that it names.

    The caller checks that the issuer is trusted, and the times.
    """
    what = "NATS JWT"
    parts = jwt.split(".")
    if len(parts) != _JWT_PARTS:
        raise WireInvalid(what=what, problem="does not have three parts")
    try:
        header, body, signature = (_unpart(part) for part in parts)
        heading, claims = msgspec.json.decode(header), msgspec.json.decode(body)
        issuer = claims["iss"]
        algorithm = heading["alg"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireInvalid(what=what, problem="does not decode") from error
    if algorithm != _HEADER["alg"] or not isinstance(claims, dict) or not isinstance(issuer, str):
        raise WireInvalid(what=what, problem=f"is not signed by {_HEADER['alg']}")
    raw = _raw(issuer, size=_PUBLIC_BYTES, what="issuer of a NATS JWT")
    if raw[0] != _PREFIX[issuer_kind]:
        raise WireInvalid(what=what, problem=f"its issuer is no {issuer_kind}")
    try:
        Ed25519PublicKey.from_public_bytes(raw[1:]).verify(
            signature, f"{parts[0]}.{parts[1]}".encode()
        )
    except InvalidSignature as error:
        raise WireInvalid(what=what, problem="its signature does not match") from error
    return claims


def check_public(text: str, *, kind: Kind) -> None:
    """Raise ``WireInvalid`` unless ``text`` is a public key of the given kind."""
    if _raw(text, size=_PUBLIC_BYTES, what="public nkey")[0] != _PREFIX[kind]:
        raise WireInvalid(what="public nkey", problem=f"is no key of the kind {kind}")


def _text(raw: bytes) -> str:
    raw += binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(raw).decode().rstrip("=")


def _raw(text: str, *, size: int, what: str) -> bytes:
    """Prefix and key of ``text``, without the checksum."""
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError) as error:
        raise WireInvalid(what=what, problem="is not base32") from error
    if len(raw) != size:
        raise WireInvalid(what=what, problem="has the wrong length")
    if binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
        raise WireInvalid(what=what, problem="is damaged: its checksum does not match")
    return raw[:-2]


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _unpart(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
