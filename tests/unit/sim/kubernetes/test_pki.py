# SPDX-License-Identifier: Apache-2.0
"""Certificates name user and groups; secrets are for their owner; nothing is made twice."""

import stat
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.x509.oid import NameOID

from hami_sim.kubernetes.pki import Pki, write_kubeconfig


def names(certificate: Path, kind: x509.ObjectIdentifier) -> list[str]:
    loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    return [str(part.value) for part in loaded.subject.get_attributes_for_oid(kind)]


def test_client_certificate_names_user_and_groups(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pki.make()
    certificate, _ = pki.client("system:node:a", ("system:nodes",))
    assert names(certificate, NameOID.COMMON_NAME) == ["system:node:a"]
    assert names(certificate, NameOID.ORGANIZATION_NAME) == ["system:nodes"]


def test_authority_goes_on_after_a_restart(tmp_path: Path) -> None:
    Pki(tmp_path).make()
    again = Pki(tmp_path)
    before = again.ca_pem
    again.make()
    assert again.ca_pem == before
    authority = x509.load_pem_x509_certificate(before.encode())
    late, _ = again.client("late")
    x509.load_pem_x509_certificate(late.read_bytes()).verify_directly_issued_by(authority)


def test_keys_and_kubeconfigs_are_private(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pki.make()
    kubeconfig = write_kubeconfig(tmp_path / "k", server="https://127.0.0.1:1", token="secret")
    keys = sorted(tmp_path.glob("*.key"))
    assert len(keys) >= 8
    for path in (kubeconfig, *keys):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert yaml.safe_load(kubeconfig.read_text())["users"][0]["user"] == {"token": "secret"}
