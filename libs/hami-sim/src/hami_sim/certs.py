# SPDX-License-Identifier: Apache-2.0
"""Throw-away certificate authorities for simulations and tests, with the files they issue.

Certificates are valid for a day by default. In production cert-manager or the operator's own
authority issues them.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hami_common.certificates import KeyPair, issue, new_authority
from hami_common.runtime.clock import SystemClock


def _now() -> datetime:
    return datetime.fromtimestamp(SystemClock().now_s(), tz=UTC)


class CertificateAuthority:
    """One authority; a webhook configuration carries its certificate as ``caBundle``."""

    def __init__(
        self,
        *,
        valid: timedelta = timedelta(days=1),
        name: str = "simulated authority",
        existing: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Make an authority, or use an ``existing`` certificate and key (PEM)."""
        self._valid = valid
        self._pair = (
            new_authority(name, now=_now(), valid=valid)
            if existing is None
            else KeyPair(certificate=existing[0], key=existing[1])
        )

    @property
    def pem(self) -> bytes:
        """Return the authority's certificate."""
        return self._pair.certificate

    @property
    def key_pem(self) -> bytes:
        """Return the authority's private key, for another program that signs in its name."""
        return self._pair.key

    def issue(
        self, names: Sequence[str], *, common_name: str = "", groups: Sequence[str] = ()
    ) -> tuple[bytes, bytes]:
        """Issue (certificate, private key) as PEM for a client and, with ``names``, a server."""
        made = issue(
            self._pair,
            names,
            now=_now(),
            valid=self._valid,
            common_name=common_name,
            groups=groups,
            is_client=True,
        )
        return made.certificate, made.key

    def issue_files(
        self,
        directory: Path,
        names: Sequence[str],
        *,
        common_name: str = "",
    ) -> tuple[Path, Path, Path]:
        """Write ``ca.crt``, ``tls.crt`` and ``tls.key``; returns (certificate, key, authority)."""
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = self.issue(names, common_name=common_name)
        paths = (directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
        paths[0].write_bytes(certificate)
        write_secret(paths[1], key)
        paths[2].write_bytes(self.pem)
        return paths


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, also while it is written."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(content)
