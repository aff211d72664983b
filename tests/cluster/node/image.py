# SPDX-License-Identifier: Apache-2.0
"""Makes the container images of the real node from one static busybox, so that nothing is pulled.

An image is an OCI layout in a tar file, as ``ctr images import`` takes it: one layer, no
compression, every time stamp zero, so the same busybox gives the same digests. Names carry no
registry. Obeys: OCI image specification 1.0.
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

APP = "localhost/hami/app:1"
"""Has sh and the other applets of busybox in /bin."""
PAUSE = "localhost/hami/pause:1"
"""Holds a pod's namespaces and does nothing."""

_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_DIRECTORIES = ("bin", "dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "usr/bin", "var")


def find_busybox() -> Path | None:
    """The static busybox of this machine (Debian: package busybox-static)."""
    found = shutil.which("busybox", path="/bin:/usr/bin:/sbin:/usr/sbin")
    if found is None:
        return None
    path = Path(found).resolve()
    return path if b"ld-linux" not in path.read_bytes()[:4096] else None


def write_images(busybox: Path, path: Path) -> None:
    """Write both images into one tar file."""
    layer = _layer(busybox)
    blobs: dict[str, bytes] = {}
    manifests = [
        _image(blobs, layer, name=APP, command=["/bin/sh"]),
        _image(blobs, layer, name=PAUSE, command=["/bin/sleep", "infinity"]),
    ]
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": manifests}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for digest, blob in blobs.items():
            _add(archive, f"blobs/sha256/{digest}", blob)


def _image(
    blobs: dict[str, bytes], layer: bytes, *, name: str, command: Sequence[str]
) -> dict[str, Any]:
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/bin:/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _put(blobs, json.dumps(config).encode(), _CONFIG),
        "layers": [_put(blobs, layer, _LAYER)],
    }
    return {
        **_put(blobs, json.dumps(manifest).encode(), _MANIFEST),
        "annotations": {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        },
        "platform": {"architecture": _architecture(), "os": "linux"},
    }


def _architecture() -> str:
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True)
    words = {"x86_64": "amd64", "aarch64": "arm64"}
    return words.get(machine.stdout.strip(), machine.stdout.strip())


def _layer(busybox: Path) -> bytes:
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as layer:
        for name in _DIRECTORIES:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            layer.addfile(entry)
        _add(layer, "bin/busybox", busybox.read_bytes(), mode=0o755)
        _add(layer, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        for name in applets.stdout.split():
            if name != "busybox":
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                layer.addfile(entry)
    return data.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _put(blobs: dict[str, bytes], data: bytes, media_type: str) -> dict[str, Any]:
    digest = _digest(data)
    blobs[digest] = data
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
