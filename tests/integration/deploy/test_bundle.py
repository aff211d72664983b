# SPDX-License-Identifier: Apache-2.0
"""An offline bundle runs the images of its archives and no others."""

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.cluster.needs import control_plane_or_skip
from tools import pin_images
from tools.images import BuildFailed, Image, bundle
from tools.images.builder import names, references

pytestmark = pytest.mark.timeout(120)


def images(folder: Path) -> dict[str, Image]:
    """Archives without layers: a bundle reads their digests."""
    found = {}
    for name in names():
        digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
        data = json.dumps({"manifests": [{"digest": digest}]}).encode()
        entry = tarfile.TarInfo("index.json")
        entry.size = len(data)
        path = folder / f"{name}.oci.tar"
        with tarfile.open(path, "w") as archive:
            archive.addfile(entry, io.BytesIO(data))
        found[name] = Image(
            name=name,
            reference=references()[name],
            digest=digest,
            path=path,
            unpacked_bytes=0,
            seconds=0,
            sbom=path,
        )
    return found


def test_manifests_name_every_image_by_the_digest_of_its_archive(tmp_path: Path) -> None:
    control_plane_or_skip()
    built = images(tmp_path)
    bundle.write(built, tmp_path)
    known = {f"{one.reference}@{one.digest}" for one in built.values()}
    for overlay in bundle.OVERLAYS:
        text = (tmp_path / "manifests" / f"{overlay}.yaml").read_text()
        documents = [one for one in yaml.safe_load_all(text) if one]
        used = {image for document in documents for image in pin_images.images_of(document)}
        assert used == known
        assert any(one["kind"] == "Namespace" for one in documents)
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", bundle.SUMS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "manifests/prod.yaml: OK" in done.stdout
    assert "install.sh: OK" in done.stdout
    dry = subprocess.run(
        [tmp_path / "install.sh", "--dry-run", "--overlay", "prod"],
        env={"PATH": "/usr/bin:/bin", "CTR": "true", "KUBECTL": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert dry.returncode == 0, dry.stderr
    assert f"docker.io/hami/webhook@{built['webhook'].digest}" in dry.stdout


def test_bundle_needs_all_images(tmp_path: Path) -> None:
    built = images(tmp_path)
    del built["kube-scheduler"]
    with pytest.raises(BuildFailed, match="not built: kube-scheduler"):
        bundle.write(built, tmp_path)
    assert not (tmp_path / bundle.SUMS).exists()
