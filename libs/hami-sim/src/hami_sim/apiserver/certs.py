# SPDX-License-Identifier: Apache-2.0
"""Throw-away certificates: an own CA and server certificates signed by it.

For tests and the demo only; keys are EC P-256 and live as PEM text. Validity is counted from the
instant the caller passes in.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS: Final = 30


class KeyPair(msgspec.Struct, frozen=True):
    """A certificate and its private key, both PEM."""

    cert_pem: bytes
    key_pem: bytes


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _builder(subject: str, issuer: x509.Name, now_s: float) -> x509.CertificateBuilder:
    start = datetime.fromtimestamp(now_s, UTC) - timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=_DAYS))
    )


def make_ca(now_s: float, name: str = "hami-sim-ca") -> KeyPair:
    """Make a certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(name, _name(name), now_s)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=True,
                crl_sign=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def make_server_cert(ca: KeyPair, hosts: tuple[str, ...], now_s: float) -> KeyPair:
    """Make a server certificate for host names and IP addresses."""
    authority = x509.load_pem_x509_certificate(ca.cert_pem)
    signer = serialization.load_pem_private_key(ca.key_pem, password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        msg = "the CA key is not an EC key"
        raise TypeError(msg)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    certificate = (
        _builder(hosts[0], authority.subject, now_s)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    return _pair(certificate, key)
