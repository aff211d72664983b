# SPDX-License-Identifier: Apache-2.0
"""Credentials of a connection: the files of a login, read again at each connection.

One of three: a credentials file (JWT and seed, as ``nsc`` creates them), the seed of a key in the
server's configuration, or a token that the server passes to the authenticator (ADR 0013). The
client library needs another cryptography package for this; here the Ed25519 of ours is used.
Outside document: NATS JWT and NKeys v2.
"""

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from hami_common.bus import grants
from hami_common.bus.nkeys import NKey
from hami_common.errors import SettingsInvalid, WireInvalid
from hami_common.runtime.settings import ServiceSettings

_BLOCK = re.compile(r"-{3,}BEGIN ([A-Z ]+)-{3,}\s+(\S+)\s+-{3,}END")
_USER_SEED = "SU"
_CREDS_FIX = "give the path of a credentials file as made by: nsc generate creds"
_SEED_FIX = "give the path of a file with the seed of a user (SU…), as made by: hamictl bootstrap"
_PROJECTED_FIX = "give the path of a service account token that kubelet projects"


class NatsLogin(Struct, frozen=True, kw_only=True):
    """Paths of the files of one login, at most one of them set; without any: no login."""

    creds: str = ""
    seed_file: str = ""
    token_file: str = ""
    inbox: str = ""
    """Prefix of the subjects for answers; empty: the library's own."""
    renew_s: float = 0.0
    """Interval at which the login is renewed; 0: only when the connection is lost."""
    message_bytes: int = 0
    """Largest message, with headers, that the login may send; 0: the server's own limit.

    The server closes the connection of a user who sends a larger one than its login allows.
    """

    @classmethod
    def of(cls, settings: ServiceSettings, *, inbox: str) -> "NatsLogin":
        """The login that a service's settings name; only one by token expires."""
        is_limited = settings.nats_token_file or inbox == grants.inbox("webhook")
        return cls(
            creds=settings.nats_creds,
            seed_file=settings.nats_seed_file,
            token_file=settings.nats_token_file,
            inbox=inbox,
            renew_s=settings.nats_renew_s if settings.nats_token_file else 0.0,
            message_bytes=grants.MESSAGE_MAX_BYTES if is_limited else 0,
        )

    def options(self) -> tuple[dict[str, Any], str]:
        """Options of the client library, and the public key of a login by seed.

        ``SettingsInvalid`` describes the problem of a file.
        """
        found, public_key = self._proof()
        return ({**found, "inbox_prefix": self.inbox} if self.inbox else found), public_key

    def _proof(self) -> tuple[dict[str, Any], str]:
        given = [name for name in ("creds", "seed_file", "token_file") if getattr(self, name)]
        if len(given) > 1:
            raise SettingsInvalid(
                field=f"nats_{given[1]}",
                problem=f"is given besides nats_{given[0]}",
                fix="give one of them",
            )
        if self.creds:
            jwt, key = read_credentials(self.creds)
            return {"signature_cb": _signature(key), "user_jwt_cb": lambda: bytearray(jwt)}, ""
        if self.seed_file:
            key = _user_key(
                _read(self.seed_file, field="nats_seed_file", fix=_SEED_FIX),
                path=self.seed_file,
                field="nats_seed_file",
                fix=_SEED_FIX,
            )
            return {"signature_cb": _signature(key)}, key.public
        if self.token_file:
            token = _read(self.token_file, field="nats_token_file", fix=_PROJECTED_FIX).strip()
            if not token:
                raise _invalid("nats_token_file", self.token_file, "is empty", _PROJECTED_FIX)
            return {"token": token}, ""
        return {}, ""


def read_credentials(path: str) -> tuple[bytes, NKey]:
    """JWT and key of the credentials file at ``path``."""
    text = _read(path, field="nats_creds", fix=_CREDS_FIX)
    blocks = dict(_BLOCK.findall(text))
    jwt, seed = blocks.get("NATS USER JWT"), blocks.get("USER NKEY SEED")
    if jwt is None or seed is None:
        problem = "has no NATS USER JWT block or no USER NKEY SEED block"
        raise _invalid("nats_creds", path, problem, _CREDS_FIX)
    return jwt.encode(), _user_key(seed, path=path, field="nats_creds", fix=_CREDS_FIX)


def _user_key(seed: str, *, path: str, field: str, fix: str) -> NKey:
    if not seed.strip().startswith(_USER_SEED):
        raise _invalid(field, path, "the seed is not one of a user (SU…)", fix)
    try:
        return NKey.from_seed(seed)
    except WireInvalid as error:
        raise _invalid(field, path, f"the seed {error.problem}", fix) from error


def _signature(key: NKey) -> Callable[[str], bytes]:
    def answer(nonce: str) -> bytes:
        return base64.b64encode(key.sign(nonce.encode()))

    return answer


def _read(path: str, *, field: str, fix: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        # The text of a decoding error would show a byte of the secret.
        problem = "is not ASCII text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise _invalid(field, path, problem, fix) from error


def _invalid(field: str, path: str, problem: str, fix: str) -> SettingsInvalid:
    return SettingsInvalid(field=field, problem=f"{path}: {problem}", fix=fix)
