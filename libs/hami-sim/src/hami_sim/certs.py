# SPDX-License-Identifier: Apache-2.0
"""Makes a throw-away certificate authority and server certificates for simulations and tests.

ECDSA P-256, valid for a day by default; nothing here is meant for production, where cert-manager or
the operator's own authority issues certificates.
"""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hami_common.runtime.clock import SystemClock


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


class CertificateAuthority:
    """One authority; its certificate is what a webhook configuration carries as ``caBundle``."""

    def __init__(self, *, valid: timedelta = timedelta(days=1)) -> None:
        """Make a fresh key and a self-signed certificate that is ``valid`` from a minute ago."""
        self._valid = valid
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._start = datetime.fromtimestamp(SystemClock().now_s(), tz=UTC) - timedelta(minutes=1)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(_name("simulated authority"))
            .issuer_name(_name("simulated authority"))
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._start)
            .not_valid_after(self._start + valid)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        """The authority's certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, names: Sequence[str]) -> tuple[bytes, bytes]:
        """(certificate, private key) as PEM for a server reached under ``names`` (DNS or IP)."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = []
        for name in names:
            try:
                alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
            except ValueError:
                alternatives.append(x509.DNSName(name))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(names[0]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._start)
            .not_valid_after(self._start + self._valid)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return (
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def issue_files(self, directory: Path, names: Sequence[str]) -> tuple[Path, Path, Path]:
        """Write ``ca.crt``, ``tls.crt`` and ``tls.key``; returns (certificate, key, authority)."""
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = self.issue(names)
        paths = (directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
        for path, content in zip(paths, (certificate, key, self.pem), strict=True):
            path.write_bytes(content)
            path.chmod(0o600 if path.name == "tls.key" else 0o644)
        return paths
