# SPDX-License-Identifier: Apache-2.0
"""Authorities, certificates, keys and kubeconfigs of one control plane, as kubeadm lays them out.

Three authorities: of the cluster, of the aggregation layer, and of etcd. Files are written once;
a control plane that starts again in its directory finds the ones it had. Keys and kubeconfigs are
readable for their owner only. Certificates last a year.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import yaml
from cryptography.hazmat.primitives import serialization

from hami_common.certificates import key_pem, new_key
from hami_sim.certs import CertificateAuthority, write_secret

HOST: Final = "127.0.0.1"
LASTS: Final = timedelta(days=365)
SERVICE_HOST: Final = "10.96.0.1"
"""First address of the Service network: that of the API server inside the cluster."""
SERVER_NAMES: Final = (
    HOST,
    "localhost",
    SERVICE_HOST,
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


class Pki:
    """The files below one directory; ``make`` writes them."""

    def __init__(self, directory: Path, *, host: str = HOST) -> None:
        """Keep everything in ``directory``; ``host``: further address of the servers."""
        self.directory = directory
        self._hosts = tuple(dict.fromkeys((host, HOST)))
        self._cluster: CertificateAuthority | None = None

    def file(self, name: str) -> str:
        """Path of a file."""
        return str(self.directory / name)

    @property
    def ca_pem(self) -> str:
        """Certificate of the cluster's authority."""
        return (self.directory / "ca.crt").read_text(encoding="ascii")

    def make(self) -> None:
        """Write all files, unless they are there."""
        if (self.directory / "complete").exists():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        cluster = self._authority("ca", "kubernetes")
        self._cluster = cluster
        front = self._authority("front-proxy-ca", "front-proxy-ca")
        etcd = self._authority("etcd-ca", "etcd-ca")
        names = tuple(dict.fromkeys((*self._hosts, *SERVER_NAMES)))
        self._pair(cluster, "apiserver", names, "kube-apiserver")
        self._pair(
            cluster,
            "apiserver-kubelet-client",
            (),
            "kube-apiserver-kubelet-client",
            ("kubeadm:cluster-admins",),
        )
        self._pair(front, "front-proxy-client", (), "front-proxy-client")
        self._pair(etcd, "etcd-server", (*self._hosts, "localhost"), "etcd")
        self._pair(etcd, "apiserver-etcd-client", (), "kube-apiserver-etcd-client")
        accounts = new_key()
        write_secret(self.directory / "sa.key", key_pem(accounts))
        (self.directory / "sa.pub").write_bytes(
            accounts.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        (self.directory / "complete").touch()

    def _authority(self, stem: str, name: str) -> CertificateAuthority:
        authority = CertificateAuthority(valid=LASTS, name=name)
        (self.directory / f"{stem}.crt").write_bytes(authority.pem)
        write_secret(self.directory / f"{stem}.key", authority.key_pem)
        return authority

    def _pair(
        self,
        authority: CertificateAuthority,
        stem: str,
        names: Sequence[str],
        common_name: str,
        groups: Sequence[str] = (),
    ) -> None:
        certificate, key = authority.issue(names, common_name=common_name, groups=groups)
        (self.directory / f"{stem}.crt").write_bytes(certificate)
        write_secret(self.directory / f"{stem}.key", key)

    def authority(self) -> CertificateAuthority:
        """The cluster's authority, to issue further certificates."""
        if self._cluster is None:
            files = [(self.directory / name).read_bytes() for name in ("ca.crt", "ca.key")]
            self._cluster = CertificateAuthority(valid=LASTS, existing=(files[0], files[1]))
        return self._cluster

    def client(self, user: str, groups: Sequence[str] = ()) -> tuple[Path, Path]:
        """(certificate, key) files of a user; made once per user."""
        stem = "client-" + user.replace(":", "-")
        paths = (self.directory / f"{stem}.crt", self.directory / f"{stem}.key")
        if not all(path.exists() for path in paths):
            self._pair(self.authority(), stem, (), user, groups)
        return paths


def write_kubeconfig(
    path: Path,
    *,
    server: str,
    ca_file: str = "",
    client: tuple[Path, Path] | None = None,
    token: str = "",
) -> Path:
    """A kubeconfig with one context, by client certificate or token."""
    cluster = {"server": server}
    if ca_file:
        cluster["certificate-authority"] = ca_file
    user = {"token": token} if token else {}
    if client is not None:
        user = {"client-certificate": str(client[0]), "client-key": str(client[1])}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": cluster}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": user}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_secret(path, yaml.safe_dump(document).encode())
    return path
