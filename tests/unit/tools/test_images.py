# SPDX-License-Identifier: Apache-2.0
"""Images: which packages each one has, how archives are named, and what decides about a rebuild.

Nothing is built here: tests/install builds and starts the images.
"""

import ast
import gzip
import hashlib
import importlib.metadata
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.containerfile import Containerfile
from tools import pin_images
from tools.images import archive, builder, sets
from tools.sbom import Package

ROOT = Path(__file__).resolve().parents[3]
CONTENTS = sets.contents()
EPOCH_S = 1_700_000_000
ROWS = """\
aiohttp==3.1.0 ; sys_platform == 'linux' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via -r runtime.in
frozen_list==1.0 \\
    --hash=sha256:cc
    # via
    #   aiohttp
    #   other
numpy==2.4 ; python_full_version < '3.12' \\
    --hash=sha256:dd
    # via -r runtime.in
numpy==2.5 ; python_full_version >= '3.12' \\
    --hash=sha256:ee
    # via -r runtime.in
"""


# --- packages per image --------------------------------------------------------------------------


def test_pins_are_read_with_their_hashes_and_the_packages_that_need_them() -> None:
    rows = sets.rows(ROWS)
    assert [(row.name, sorted(row.via)) for row in rows] == [
        ("aiohttp", []),
        ("frozen-list", ["aiohttp", "other"]),
        ("numpy", []),
        ("numpy", []),
    ]
    assert sets.closure({"aiohttp"}, rows) == {"aiohttp", "frozen-list"}
    text = sets.text({"numpy"}, rows)
    assert text.count("numpy==") == 2
    assert "sha256:dd" in text
    assert "sha256:ee" in text
    assert "#" not in text


def test_a_package_without_a_pin_is_refused_with_the_fix() -> None:
    with pytest.raises(sets.Problem, match="absent is not pinned: run"):
        sets.closure({"absent"}, sets.rows(ROWS))


def test_every_image_of_ours_has_a_member() -> None:
    file = Containerfile(ROOT / builder.CONTAINERFILE)
    ours = {name for name in file.images() if "hami" in " ".join(file.entry_point(name))}
    assert ours == sets.MEMBER_BY_IMAGE.keys()


def test_images_have_only_what_their_part_needs() -> None:
    with_numpy = {image for image, content in CONTENTS.items() if "numpy" in content.packages}
    with_grpc = {image for image, content in CONTENTS.items() if "grpcio" in content.packages}
    assert with_numpy == {"scheduler", "hamictl"}
    assert with_grpc == {"nodeagent"}
    assert all("hami-sim" not in "".join(content.members) for content in CONTENTS.values())


@pytest.mark.timeout(60)  # parses all sources
@pytest.mark.parametrize("image", CONTENTS)
def test_every_module_that_an_image_can_import_is_of_a_package_that_it_has(image: str) -> None:
    distributions = importlib.metadata.packages_distributions()
    content = CONTENTS[image]
    entry = Path(sets.MEMBER_BY_IMAGE[image]).name.replace("-", "_")
    entry = entry if entry.startswith("hami") else f"hami_{entry}"
    missing = {
        module: importer
        for module, importer in outside_imports(entry, content.members)
        if not {sets.normal(name) for name in distributions.get(module, [])} & content.packages
    }
    assert not missing


def outside_imports(entry: str, members: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Modules of others that the entry's package reaches, lazily too, each with one importer."""
    packages = {
        path.name: path
        for member in members
        for path in (ROOT / member / "src").iterdir()
        if (path / "__init__.py").exists()
    }
    package = packages[entry]
    files = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    todo = [".".join((entry, *path.relative_to(package).with_suffix("").parts)) for path in files]
    seen: set[str] = set()
    while todo:
        module = todo.pop()
        path = file_of(module, packages)
        if module in seen or path is None:
            continue
        seen.add(module)
        todo += [module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1)]
        for name in imported(path):
            top = name.partition(".")[0]
            if top in packages:
                todo.append(name)
            elif top not in sys.stdlib_module_names:
                yield top, module


def file_of(module: str, packages: dict[str, Path]) -> Path | None:
    top, *rest = module.split(".")
    path = packages[top].joinpath(*rest)
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((one for one in candidates if one.is_file()), None)


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Absolute names in the imports of a file; the code base has no relative ones."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(names)


# --- references ----------------------------------------------------------------------------------


def test_every_image_has_the_reference_that_a_runtime_resolves_its_manifest_to() -> None:
    references = builder.references()
    assert references["webhook"] == "docker.io/hami/webhook:0.1.0"
    assert references["nats"].startswith("docker.io/library/nats:")
    assert references["kube-scheduler"].startswith("docker.io/library/kube-scheduler:v1.")
    assert set(builder.names()) <= references.keys()


def test_unknown_image_is_refused_with_the_known_ones() -> None:
    with pytest.raises(builder.BuildFailed, match="no image webhok; there are webhook"):
        builder.build(["webhok"])


# --- archives ------------------------------------------------------------------------------------


def layout(folder: Path, files: dict[str, bytes]) -> archive.Layout:
    """A layout as buildah writes it, of one image with one layer."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    with tarfile.open(blobs / "1a", mode="w") as layer:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            layer.addfile(entry, io.BytesIO(data))
    (blobs / "3c").write_text("{}")
    layers = [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": "sha256:1a"}]
    manifest = {"schemaVersion": 2, "config": {"digest": "sha256:3c"}, "layers": layers}
    (blobs / "2b").write_text(json.dumps(manifest))
    index = {"manifests": [{"digest": "sha256:2b", "annotations": {}}]}
    (folder / "index.json").write_text(json.dumps(index))
    return archive.Layout(folder)


def test_archive_names_its_image_for_containerd_and_is_the_same_for_the_same_layout(
    tmp_path: Path,
) -> None:
    source = layout(tmp_path / "layout", {"etc/passwd": b"root"})
    reference = "docker.io/hami/webhook:0.1.0"
    digests = {
        archive.write(
            source, tmp_path / f"{name}.tar", reference=reference, compressed=tmp_path / name
        )
        for name in ("a", "b")
    }
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as packed:
        read = {member.name: packed.extractfile(member) for member in packed}
        data = {name: file.read() for name, file in read.items() if file}
    [entry] = json.loads(data["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == reference
    assert {entry["digest"], pin_images.archive_digest(tmp_path / "a.tar")} == digests
    manifest: Any = json.loads(data[f"blobs/{entry['digest'].replace(':', '/')}"])
    layer = data[f"blobs/{manifest['layers'][0]['digest'].replace(':', '/')}"]
    assert hashlib.sha256(layer).hexdigest() in manifest["layers"][0]["digest"]
    assert len(layer) == manifest["layers"][0]["size"]
    assert gzip.decompress(layer) == source.blob("sha256:1a").read_bytes()


def test_layer_that_buildah_compressed_is_compressed_once(tmp_path: Path) -> None:
    source = layout(tmp_path / "layout", {"etc/passwd": b"root"})
    blob = source.blob("sha256:1a")
    plain = blob.read_bytes()
    digests = []
    for name, data in (("plain", plain), ("packed", gzip.compress(plain, mtime=1))):
        blob.write_bytes(data)
        digests.append(
            archive.write(
                source, tmp_path / f"{name}.tar", reference="a:1", compressed=tmp_path / name
            )
        )
    assert digests[0] == digests[1]


def test_inventory_lists_packages_by_the_records_in_the_image(tmp_path: Path) -> None:
    status = b"Package: libc6\nArchitecture: amd64\nVersion: 2.36-9\nDescription: GNU\n more\n"
    files = {
        "var/lib/dpkg/status.d/libc6": status,
        "opt/hami/lib/python3.11/site-packages/anyio-4.dist-info/METADATA": (
            b"Metadata-Version: 2.4\nName: anyio\nVersion: 4.16.0\n\nVersion: of the text\n"
        ),
        "usr/lib/hami/libvgpu.so": b"library",
        "usr/bin/python3.11": b"program",
    }
    source = layout(tmp_path / "layout", files)
    found = archive.inventory(source, version="0.1.0")
    digest = hashlib.sha256(b"library").hexdigest()
    assert found[0] == Package("deb", "libc6", "2.36-9", "amd64")
    assert found[1] == Package("file", "libvgpu.so", "0.1.0", digest)
    assert found[2] == Package("pypi", "anyio", "4.16.0")
    assert archive.unpacked_bytes(source) == sum(map(len, files.values()))
