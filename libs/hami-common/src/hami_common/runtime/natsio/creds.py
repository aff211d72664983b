# SPDX-License-Identifier: Apache-2.0
"""Reads a NATS credentials file: the user's JWT, and the key that answers the server's challenge.

The client library would do this with another cryptography package; Ed25519 of the one we have is
enough. Outside document: NATS JWT and NKeys v2 (seed: base32 of two prefix bytes, 32 bytes of
Ed25519 seed, two bytes of CRC-16). The file is read at each login, so it may be replaced.
"""

import base64
import binascii
import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Struct

from hami_common.errors import SettingsInvalid

_BLOCK = re.compile(r"-{3,}BEGIN ([A-Z ]+)-{3,}\s+(\S+)\s+-{3,}END")
_SEED_BYTES = 36
_USER_SEED = "SU"


class Credentials(Struct, frozen=True, kw_only=True):
    """Who we are to the server."""

    jwt: str
    key: Ed25519PrivateKey

    def sign(self, nonce: str) -> bytes:
        """Answer to the server's challenge."""
        return base64.b64encode(self.key.sign(nonce.encode()))

    def user_jwt(self) -> bytearray:
        """The JWT as the client library wants it."""
        return bytearray(self.jwt.encode())


def read_credentials(path: str) -> Credentials:
    """Credentials from the file at ``path``; ``SettingsInvalid`` says what is wrong with it."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(path, str(error)) from error
    blocks = dict(_BLOCK.findall(text))
    jwt, seed = blocks.get("NATS USER JWT"), blocks.get("USER NKEY SEED")
    if jwt is None or seed is None:
        raise _invalid(path, "has no NATS USER JWT block or no USER NKEY SEED block")
    if not seed.startswith(_USER_SEED):
        raise _invalid(path, "the seed is not one of a user (SU…)")
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except binascii.Error as error:
        raise _invalid(path, "the seed is not base32") from error
    if len(raw) != _SEED_BYTES or binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(
        raw[-2:], "little"
    ):
        raise _invalid(path, "the seed is damaged: its checksum does not match")
    return Credentials(jwt=jwt, key=Ed25519PrivateKey.from_private_bytes(raw[2:-2]))


def _invalid(path: str, problem: str) -> SettingsInvalid:
    return SettingsInvalid(
        field="nats_creds",
        problem=f"{path}: {problem}",
        fix="give the path of a credentials file as made by: nsc generate creds",
    )
