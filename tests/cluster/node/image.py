# SPDX-License-Identifier: Apache-2.0
"""Makes the container images of the real node from programs of this machine; nothing is pulled.

An image is an OCI layout in a tar file, as ``ctr images import`` takes it: one layer, no
compression, every time stamp zero, so the same programs give the same digests. Names carry no
registry. Obeys: OCI image specification 1.0.
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

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


class Image(Struct, frozen=True, kw_only=True):
    """One image of a single layer."""

    name: str
    files: Mapping[str, bytes]
    """Contents of programs by path without a leading slash; all are executable."""
    links: Mapping[str, str] = {}
    """Targets of symbolic links by path."""
    command: Sequence[str]
    is_entrypoint: bool = False
    """A pod's ``args`` are appended to ``command``, else they replace it."""


def busybox_images(busybox: Path) -> list[Image]:
    """Return ``APP`` and ``PAUSE``."""
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    files = {"bin/busybox": busybox.read_bytes(), "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n"}
    links = {f"bin/{name}": "busybox" for name in applets.stdout.split() if name != "busybox"}
    return [
        Image(name=APP, files=files, links=links, command=["/bin/sh"]),
        Image(name=PAUSE, files=files, links=links, command=["/bin/sleep", "infinity"]),
    ]


def write_images(path: Path, images: Sequence[Image]) -> None:
    """Write images into one tar file."""
    blobs: dict[str, bytes] = {}
    manifests = [_image(blobs, image) for image in images]
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": manifests}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for digest, blob in blobs.items():
            _add(archive, f"blobs/sha256/{digest}", blob)


def _image(blobs: dict[str, bytes], image: Image) -> dict[str, Any]:
    layer = _layer(image)
    program = "Entrypoint" if image.is_entrypoint else "Cmd"
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {program: list(image.command), "Env": ["PATH=/bin:/usr/bin"]},
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
            "io.containerd.image.name": image.name,
            "org.opencontainers.image.ref.name": image.name.rpartition(":")[2],
        },
        "platform": {"architecture": _architecture(), "os": "linux"},
    }


def _architecture() -> str:
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True)
    words = {"x86_64": "amd64", "aarch64": "arm64"}
    return words.get(machine.stdout.strip(), machine.stdout.strip())


def _layer(image: Image) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as layer:
        above = {str(parent) for path in image.files for parent in Path(path).parents}
        for name in sorted({*_DIRECTORIES, *above} - {"."}):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            layer.addfile(entry)
        for name, content in image.files.items():
            _add(layer, name, content, mode=0o755)
        for name, target in image.links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
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
