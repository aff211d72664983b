# SPDX-License-Identifier: Apache-2.0
"""Writes the digests of all images into the production overlay; nothing there runs by a tag.

    python -m tools.pin_images hami/webhook=registry.example/hami-webhook:0.1.0,webhook.tar …

Each argument is ``IMAGE=REFERENCE``, where IMAGE is the name in deploy/kustomize. REFERENCE is

    NAME:TAG@sha256:…   the digest is given
    NAME:TAG,FILE       the digest is that of an OCI archive or layout, as a builder saves it
    NAME:TAG            the registry is asked, through skopeo

``--file FILE`` reads such arguments, one per line. Images of optional components may be left out.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
KUSTOMIZE = ROOT / "deploy" / "kustomize"
TARGET = KUSTOMIZE / "overlays" / "prod" / "images" / "kustomization.yaml"
OPTIONAL = KUSTOMIZE / "components" / "otel"
HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Written by ./dev pin-images: which build of each image runs. See docs/supply-chain.md.
"""
LIMIT_S = 60
ARCHIVE_LIMIT_BYTES = 1 << 20
"""Largest index of an archive that is read."""

_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_NAME = re.compile(
    rf"(?P<name>(?:{_PART}(?::[0-9]{{1,5}})?/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>.+))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loads as ``safe_load`` does; the C version is ten times as fast and not always installed."""


class Problem(Exception):
    """An argument or its source cannot be used; the text names it and the fix."""


class Pinned(NamedTuple):
    """One image of the overlay, and its replacement."""

    image: str
    name: str
    tag: str
    digest: str

    def entry(self) -> dict[str, str]:
        """Entry of a list of images of kustomize."""
        tag = {"newTag": self.tag} if self.tag else {}
        return {"name": self.image, "newName": self.name, **tag, "digest": self.digest}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; the exit code is 1 when an image has no digest."""
    parser = argparse.ArgumentParser(description="Pin the images of the overlay prod by digest.")
    parser.add_argument("images", nargs="*", metavar="IMAGE=REFERENCE")
    parser.add_argument(
        "--file", type=Path, help="such arguments, one per line; # begins a comment"
    )
    parser.add_argument("--out", type=Path, default=TARGET, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        words = [*options.images, *(_lines(options.file) if options.file else ())]
        entries = pinned(words)
    except (Problem, OSError) as problem:
        print(f"pin-images: {problem}", file=sys.stderr)
        return 1
    options.out.write_text(text(entries), encoding="utf-8")
    for one in entries:
        print(f"{one.image}: {one.name} {one.digest}")
    return 0


def text(entries: Sequence[Pinned]) -> str:
    """The component that pins them."""
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "images": [one.entry() for one in entries],
    }
    return HEADER + yaml.safe_dump(document, sort_keys=False, width=200)


def pinned(words: Sequence[str]) -> list[Pinned]:
    """Every image of the overlay with its digest, by name; ``Problem`` when one is missing."""
    required, optional = shipped()
    found: dict[str, Pinned] = {}
    for word in words:
        image, equals, reference = word.partition("=")
        if not equals or image not in required | optional:
            known = ", ".join(sorted(required | optional))
            raise Problem(f"{word!r} is not IMAGE=REFERENCE; IMAGE is one of {known}")
        if image in found:
            raise Problem(f"image {image} is given twice: keep one")
        found[image] = pin(image, reference)
    if missing := sorted(required - found.keys()):
        lines = [f"image {image} has no digest: add {image}=NAME:TAG" for image in missing]
        raise Problem("\n".join(lines))
    return [found[image] for image in sorted(found)]


@cache
def shipped() -> tuple[frozenset[str], frozenset[str]]:
    """Images of all pods in deploy/kustomize: of what the overlay may have, and optional ones."""
    required: set[str] = set()
    optional: set[str] = set()
    for path in sorted(KUSTOMIZE.rglob("*.yaml")):
        into = optional if path.is_relative_to(OPTIONAL) else required
        for document in yaml.load_all(path.read_text(encoding="utf-8"), Loader=_LOADER):
            into.update(images_of(document))
    return frozenset(required), frozenset(optional - required)


def images_of(document: dict[str, Any] | None) -> Iterator[str]:
    """Return the images of all containers of an object that makes pods."""
    spec = (document or {}).get("spec") or {}
    template = spec.get("jobTemplate", {}).get("spec", spec).get("template") or {}
    pod = template.get("spec") or {}
    for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
        yield container["image"]


def pin(image: str, reference: str) -> Pinned:
    """Pin one image by its reference; asks the registry only when no digest is given."""
    named, _, archive = reference.partition(",")
    match = _NAME.fullmatch(named)
    if match is None:
        raise Problem(f"image {image}: {named!r} is no reference of an image: write NAME:TAG")
    name, tag, digest = match["name"], match["tag"] or "", match["digest"] or ""
    if not digest:
        if not tag:
            raise Problem(f"image {image}: {named!r} has neither tag nor digest: write NAME:TAG")
        digest = archive_digest(Path(archive)) if archive else registry_digest(f"{name}:{tag}")
    if not _DIGEST.fullmatch(digest) or digest == f"sha256:{'0' * 64}":
        raise Problem(f"image {image}: {digest!r} is no digest: it is sha256: and 64 digits 0-9a-f")
    return Pinned(image=image, name=name, tag=tag, digest=digest)


def archive_digest(path: Path) -> str:
    """Digest of the one image of an OCI archive (tar) or layout (folder)."""
    try:
        if path.is_dir():
            raw = (path / "index.json").read_bytes()
        else:
            with tarfile.open(path) as archive:
                member = archive.extractfile("index.json")
                raw = member.read(ARCHIVE_LIMIT_BYTES) if member else b""
        manifests = json.loads(raw)["manifests"]
    except (KeyError, TypeError, ValueError, tarfile.TarError) as error:
        raise Problem(f"{path}: is no OCI archive: save it with --format oci-archive") from error
    if len(manifests) != 1:
        raise Problem(f"{path}: holds {len(manifests)} images: save one per archive")
    return str(manifests[0]["digest"])


def registry_digest(reference: str) -> str:
    """Digest that a registry serves under a name and tag."""
    if (skopeo := shutil.which("skopeo")) is None:
        raise Problem(
            f"{reference}: a registry is asked through skopeo, which is not in PATH: install it, or"
            f" write {reference}@sha256:…"
        )
    command = [skopeo, "inspect", "--no-tags", "--format", "{{.Digest}}", f"docker://{reference}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Problem(f"{reference}: the registry did not answer in {LIMIT_S} s") from error
    if done.returncode != 0:
        raise Problem(f"{reference}: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def _lines(path: Path) -> list[str]:
    rows = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    return [row for row in rows if row]


if __name__ == "__main__":
    sys.exit(main())
