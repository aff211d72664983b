# SPDX-License-Identifier: Apache-2.0
"""Makes throw-away certificate authorities and their certificates for simulations and tests.

ECDSA P-256, valid for a day by default; nothing here is meant for production, where cert-manager or
the operator's own authority issues certificates. A client certificate names a Kubernetes user as
its common name and the user's groups as organizations.
"""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hami_common.runtime.clock import SystemClock


def _name(common_name: str, groups: Sequence[str] = ()) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _a_minute_ago() -> datetime:
    return datetime.fromtimestamp(SystemClock().now_s(), tz=UTC) - timedelta(minutes=1)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def _loaded(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        msg = "the authority's key is not an elliptic curve key"
        raise TypeError(msg)
    return key


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


class CertificateAuthority:
    """One authority; its certificate is what a webhook configuration carries as ``caBundle``."""

    def __init__(
        self,
        *,
        valid: timedelta = timedelta(days=1),
        name: str = "simulated authority",
        existing: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Make a fresh key and a self-signed certificate that is ``valid`` from a minute ago.

        Or go on with an ``existing`` certificate and key (PEM).
        """
        if existing is None:
            key = new_key()
            certificate = self._sign_itself(key, name, valid)
        else:
            certificate = x509.load_pem_x509_certificate(existing[0])
            key = _loaded(existing[1])
        self._valid = valid
        self._key = key
        self._certificate = certificate
        self._start = _a_minute_ago()
        self._identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())

    @staticmethod
    def _sign_itself(
        key: ec.EllipticCurvePrivateKey, name: str, valid: timedelta
    ) -> x509.Certificate:
        start = _a_minute_ago()
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + valid)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        """The authority's certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The authority's private key, for another program that signs in its name."""
        return pem_of(self._key)

    def issue(
        self, names: Sequence[str], *, common_name: str = "", groups: Sequence[str] = ()
    ) -> tuple[bytes, bytes]:
        """(certificate, private key) as PEM for a server reached under ``names`` (DNS or IP).

        Without names it is for a client only.
        """
        key = new_key()
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(common_name or names[0], groups))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._start)
            .not_valid_after(self._start + self._valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identity),
                critical=False,
            )
        )
        if names:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            alternatives = [_alternative(name) for name in names]
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
        certificate = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False).sign(
            self._key, hashes.SHA256()
        )
        return certificate.public_bytes(serialization.Encoding.PEM), pem_of(key)

    def issue_files(
        self,
        directory: Path,
        names: Sequence[str],
        *,
        stem: str = "tls",
        common_name: str = "",
        groups: Sequence[str] = (),
    ) -> tuple[Path, Path, Path]:
        """Write ``ca.crt``, ``tls.crt`` and ``tls.key``; returns (certificate, key, authority).

        Another ``stem`` names the pair differently.
        """
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = self.issue(names, common_name=common_name, groups=groups)
        paths = (directory / f"{stem}.crt", directory / f"{stem}.key", directory / "ca.crt")
        for path, content in zip(paths, (certificate, key, self.pem), strict=True):
            if path.suffix == ".key":
                write_secret(path, content)
            else:
                path.write_bytes(content)
        return paths


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads, from its first moment on."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(content)
