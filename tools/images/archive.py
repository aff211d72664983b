# SPDX-License-Identifier: Apache-2.0
"""Packs an OCI layout that buildah wrote into an archive that containerd imports.

Layers are compressed here, once for all images that share one, so the digest of an image does not
depend on the compressor of a builder. The archive names its image in the two annotations by which
containerd and skopeo find it. Equal layouts give equal archives. ``inventory`` lists the packages
whose records are among the image's files, for bills of materials. Obeys: OCI image
specification 1.1; image names of containerd (``io.containerd.image.name``).
"""

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from tools.sbom import Package

_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_STATUS = "var/lib/dpkg/status.d/"
_PROGRAMS = (
    *("usr/lib/hami/libvgpu.so", "usr/lib/hami/hami-recall"),
    "usr/local/bin/kube-scheduler",
)
"""Files that no package's record describes; they have the version of the image."""
_LEVEL = 6
_GZIP_MAGIC = b"\x1f\x8b"


class Layout(NamedTuple):
    """A folder with one image, as buildah pushes it."""

    folder: Path

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the image."""
        index = json.loads((self.folder / "index.json").read_bytes())
        found: dict[str, Any] = json.loads(self.blob(index["manifests"][0]["digest"]).read_bytes())
        return found

    def blob(self, digest: str) -> Path:
        """Return the file with this digest."""
        return self.folder / "blobs" / Path(digest.replace(":", "/"))

    def files(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        """Every entry of every layer, with its layer."""
        for layer in self.manifest()["layers"]:
            with tarfile.open(self.blob(layer["digest"])) as archive:
                for member in archive:
                    yield archive, member


def write(layout: Layout, path: Path, *, reference: str, compressed: Path) -> str:
    """Write the archive and return the image's digest.

    ``reference`` is the full name of the image; ``compressed`` a folder that keeps layers.
    """
    manifest = layout.manifest()
    config = manifest["config"]["digest"]
    blobs = {config: layout.blob(config)}
    layers = []
    for layer in manifest["layers"]:
        file = _compressed(layout.blob(layer["digest"]), compressed)
        with file.open("rb") as data:
            digest = f"sha256:{hashlib.file_digest(data, 'sha256').hexdigest()}"
        blobs[digest] = file
        layers.append({"mediaType": _GZIP, "digest": digest, "size": file.stat().st_size})
    text = json.dumps(
        manifest | {"mediaType": _MANIFEST, "layers": layers}, sort_keys=True
    ).encode()
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    entry = {
        "mediaType": _MANIFEST,
        "digest": digest,
        "size": len(text),
        "annotations": dict.fromkeys(_NAMES, reference),
    }
    fresh = path.with_suffix(".new")
    with tarfile.open(fresh, "w") as packed:
        _add(packed, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(packed, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        _add(packed, _place(digest), text)
        for name, file in sorted(blobs.items()):
            with file.open("rb") as data:
                packed.addfile(_entry(_place(name), file.stat().st_size), data)
    fresh.replace(path)
    return digest


def unpacked_bytes(layout: Layout) -> int:
    """Return the size of the files of all layers; a file that two layers have counts twice."""
    return sum(member.size for _, member in layout.files())


def inventory(layout: Layout, *, version: str) -> list[Package]:
    """Return the packages of the image, by kind and name; ``version`` is that of the image."""
    found: dict[tuple[str, str], Package] = {}
    for layer, member in layout.files():
        package = _package(layer, member, version)
        if package is not None:
            found[package.kind, package.name] = package
    return [found[key] for key in sorted(found)]


def _package(layer: tarfile.TarFile, member: tarfile.TarInfo, version: str) -> Package | None:
    name = member.name.removeprefix("./")
    if name.startswith(_STATUS) and member.isfile():
        record = _record(layer, member)
        return Package("deb", record["Package"], record["Version"], record["Architecture"])
    if name.endswith(".dist-info/METADATA"):
        record = _record(layer, member)
        return Package("pypi", record["Name"], record["Version"])
    if name in _PROGRAMS:
        digest = hashlib.sha256(_data(layer, member)).hexdigest()
        return Package("file", Path(name).name, version, digest)
    return None


def _record(layer: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, str]:
    message = HeaderParser().parsestr(_data(layer, member).decode("utf-8", "replace"))
    return {key: str(value) for key, value in message.items()}


def _data(layer: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = layer.extractfile(member)
    return file.read() if file is not None else b""


def _compressed(layer: Path, folder: Path) -> Path:
    """Return the layer as kept in a folder; compress it first if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{layer.name}.tgz"
    if target.exists():
        target.touch()
        return target
    fresh = target.with_suffix(".new")
    with (
        _plain(layer) as data,
        fresh.open("wb") as file,
        gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed,
    ):
        shutil.copyfileobj(data, packed, 1 << 20)
    return fresh.replace(target)


def _plain(layer: Path) -> BinaryIO:
    """Open a layer without compression; some releases of buildah compress it all the same."""
    with layer.open("rb") as file:
        is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return cast("BinaryIO", gzip.open(layer)) if is_compressed else layer.open("rb")


def _place(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add(packed: tarfile.TarFile, name: str, data: bytes) -> None:
    packed.addfile(_entry(name, len(data)), io.BytesIO(data))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry
