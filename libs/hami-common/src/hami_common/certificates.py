# SPDX-License-Identifier: Apache-2.0
"""Creates a CA and its certificates, and checks existing ones.

ECDSA P-256, X.509 v3 (RFC 5280). For clusters without cert-manager or a CA of their own,
and for the simulation. A client certificate names a Kubernetes user as its common name and the
user's groups as organizations. The caller passes the time; the module reads no file.
"""

import ipaddress
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
    """Create a self-signed CA."""
    key = new_key()
    certificate = (
        _builder(key, _name(name), issuer=_name(name), now=now, valid=valid)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def issue(
    authority: KeyPair,
    names: Sequence[str],
    *,
    now: datetime,
    valid: timedelta,
    common_name: str = "",
    groups: Sequence[str] = (),
    is_client: bool = False,
) -> KeyPair:
    """Issue a certificate for a server that is reached under ``names`` (DNS or IP).

    With ``is_client``, or without ``names``, it also authenticates a client.
    """
    usages = [ExtendedKeyUsageOID.SERVER_AUTH] if names else []
    if is_client or not names:
        usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        msg = "the authority's key is not an elliptic curve key"
        raise TypeError(msg)
    key = new_key()
    subject = _name(common_name or names[0], groups)
    builder = (
        _builder(key, subject, issuer=issuer.subject, now=now, valid=valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    if names:
        alternatives = [_alternative(name) for name in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return _pair(builder.sign(issuer_key, hashes.SHA256()), key)


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Write a private key as PKCS#8, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def ends(certificate: bytes) -> datetime | None:
    """Return the end of the certificate's validity; ``None`` if it cannot be parsed."""
    try:
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except ValueError:
        return None


def serves(certificate: bytes, names: Sequence[str], *, authority: bytes) -> bool:
    """Return whether this authority issued the certificate for all these DNS names."""
    try:
        server = x509.load_pem_x509_certificate(certificate)
        server.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        alternatives = server.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return set(names) <= set(alternatives.value.get_values_for_type(x509.DNSName))


def _name(common_name: str, groups: Sequence[str] = ()) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    # A common name has at most 64 characters (RFC 5280, appendix A).
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    *,
    issuer: x509.Name,
    now: datetime,
    valid: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
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
        key=key_pem(key),
    )
