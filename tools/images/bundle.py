# SPDX-License-Identifier: Apache-2.0
"""Makes an offline bundle: archives, rendered manifests, checksums, and the script that installs.

Every image of the manifests has the digest of its archive, so nothing else can run. Overlay and
archives are those of one commit. The manifests are rendered by the kubectl of ``./dev cluster
build``, or the one in PATH. Images of optional components are not in it.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import yaml

from tests.cluster import build as cluster
from tools import pin_images
from tools.images.builder import ROOT, SCHEDULER, BuildFailed, Images

OVERLAYS = ("dev", "prod")
SCRIPT = ROOT / "deploy" / "offline-install.sh"
SUMS = "SHA256SUMS"
LIST = "images.txt"
"""Archive, reference and digest per image, for the script."""
_OVERLAY = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"


def write(images: Images, out: Path) -> None:
    """Complete a folder that has all archives; ``BuildFailed`` says which image is missing."""
    required, _ = pin_images.shipped()
    found = {_shipped_name(image.reference): image for image in images.values()}
    if missing := sorted(required - found.keys()):
        hint = "; see ./dev cluster build, and --kubernetes" if SCHEDULER in missing else ""
        raise BuildFailed(f"a bundle needs all images, but not built: {', '.join(missing)}{hint}")
    words = [
        f"{name}={image.reference},{out / image.path.name}" for name, image in sorted(found.items())
    ]
    (out / "manifests").mkdir(exist_ok=True)
    for overlay, text in _render(words).items():
        (out / "manifests" / f"{overlay}.yaml").write_text(text, encoding="utf-8")
    rows = [f"{one.path.name} {one.reference} {one.digest}\n" for one in images.values()]
    (out / LIST).write_text("".join(rows), encoding="utf-8")
    shutil.copyfile(SCRIPT, out / "install.sh")
    (out / "install.sh").chmod(0o755)
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != SUMS)
    sums = [f"{_sha256(path)}  {path.relative_to(out)}\n" for path in files]
    (out / SUMS).write_text("".join(sums), encoding="utf-8")


def _shipped_name(reference: str) -> str:
    """Return the name of an image in deploy/kustomize, without registry and tag."""
    return reference.rpartition(":")[0].removeprefix("docker.io/").removeprefix("library/")


def _render(words: list[str]) -> dict[str, str]:
    """Return the manifests of each overlay with the images that some words of pin-images name."""
    kubectl = _kubectl()
    with tempfile.TemporaryDirectory(prefix="hami-bundle-") as scratch:
        copy = Path(scratch) / "kustomize"
        shutil.copytree(pin_images.KUSTOMIZE, copy)
        pinned = copy / pin_images.TARGET.relative_to(pin_images.KUSTOMIZE)
        try:
            pinned.write_text(pin_images.text(pin_images.pinned(words)), encoding="utf-8")
        except pin_images.Problem as problem:
            raise BuildFailed(str(problem)) from problem
        found = {}
        for overlay in OVERLAYS:
            # Last, as it changes only the images of the components before it.
            folder = copy / "overlays" / f"bundle-{overlay}"
            folder.mkdir()
            document = {"resources": [f"../{overlay}"], "components": ["../prod/images"]}
            text = _OVERLAY + yaml.safe_dump(document)
            (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
            command = [kubectl, "kustomize", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise BuildFailed(f"overlay {overlay}: {done.stderr.strip()[-500:]}")
            found[overlay] = done.stdout
    return found


def _kubectl() -> str:
    programs = cluster.find()
    path = shutil.which("kubectl", path=f"{programs or ''}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        raise BuildFailed("kubectl is missing: run ./dev cluster build, or install it")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
