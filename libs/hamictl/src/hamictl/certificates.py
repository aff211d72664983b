# SPDX-License-Identifier: Apache-2.0
"""Makes a small authority and server certificates, and judges how long those that exist still hold.

ECDSA P-256, X.509 v3 (RFC 5280). For clusters without cert-manager or an authority of their own.
Times are given by the caller; knows neither files nor Kubernetes.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

SKEW = timedelta(hours=1)
"""Clocks of the cluster may be behind by this much."""


class KeyPair(Struct, frozen=True, kw_only=True):
    """A certificate and its private key (PKCS#8, not encrypted), PEM."""

    certificate: bytes
    key: bytes


def new_authority(name: str, *, now: datetime, valid: timedelta) -> KeyPair:
    """An authority of its own that signs server certificates."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(key, name, issuer=_name(name), now=now, valid=valid)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def new_server(
    authority: KeyPair,
    names: Sequence[str],
    *,
    now: datetime,
    valid: timedelta,
    is_client: bool = False,
) -> KeyPair:
    """A certificate of ``authority`` for a server reached under the DNS ``names``.

    With ``is_client`` it also proves who the server is when that calls others.
    """
    usages = [ExtendedKeyUsageOID.SERVER_AUTH]
    if is_client:
        usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        msg = "the authority's key is not an elliptic curve key"
        raise TypeError(msg)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(key, names[0], issuer=issuer.subject, now=now, valid=valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return _pair(certificate, key)


def ends(certificate: bytes) -> datetime | None:
    """When the certificate ends; ``None`` for what is no certificate."""
    try:
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except ValueError:
        return None


def serves(certificate: bytes, names: Sequence[str], *, authority: bytes) -> bool:
    """Whether the certificate is of this authority and for all of these DNS names."""
    try:
        server = x509.load_pem_x509_certificate(certificate)
        server.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        alternatives = server.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return set(names) <= set(alternatives.value.get_values_for_type(x509.DNSName))


def _name(common_name: str) -> x509.Name:
    # A common name has at most 64 characters (RFC 5280, appendix A); nobody reads it.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _builder(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    *,
    issuer: x509.Name,
    now: datetime,
    valid: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
