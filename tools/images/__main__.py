# SPDX-License-Identifier: Apache-2.0
"""``./dev images``: build the images as OCI archives.

    python -m tools.images --out DIR [--base NAME@sha256:…] [--platform linux/arm64] [--only NAME…]
    python -m tools.images --bundle --out DIR

Writes ``NAME.oci.tar`` and ``NAME.cdx.json`` (bill of materials) per image, and ``images.json``
with their references, digests and sizes. A bundle also has manifests, checksums and a script that
installs all of it without a registry.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from tools.images import bundle
from tools.images.builder import BuildFailed, Images, build, names


def main() -> int:
    """Build and copy; the exit code is 1 if an image cannot be built."""
    parser = argparse.ArgumentParser(prog="./dev images", description="Build all images.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the archives")
    parser.add_argument(
        "--base", default="", metavar="NAME@DIGEST", help="a Debian image with Python"
    )
    parser.add_argument("--platform", default="", help="linux/amd64 or linux/arm64")
    parser.add_argument(
        "--only", nargs="+", choices=names(), metavar="NAME", help=", ".join(names())
    )
    parser.add_argument(
        "--kubernetes",
        metavar="RELEASE",
        help="minor release of kube-scheduler, as built by cluster",
    )
    parser.add_argument(
        "--bundle", action="store_true", help="make an offline bundle of all images"
    )
    parser.add_argument("--no-cache", action="store_true", help="build again what is in the cache")
    options = parser.parse_args()
    if options.bundle and options.only:
        parser.error("--bundle needs all images; leave out --only")
    try:
        images = build(
            options.only,
            base_image=options.base,
            for_platform=options.platform,
            kubernetes=options.kubernetes,
            is_fresh=options.no_cache,
        )
        copy(images, options.out)
        if options.bundle:
            bundle.write(images, options.out)
    except BuildFailed as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    for image in images.values():
        size = image.unpacked_bytes / 1e6
        print(f"{image.reference} {image.digest} {size:.0f} MB, built in {image.seconds} s")
    return 0


def copy(images: Images, out: Path) -> None:
    """Write archives, bills and ``images.json`` into a folder, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    listed = []
    for image in images.values():
        for path in (image.path, image.sbom):
            _place(path, out / path.name)
        listed.append(image._asdict() | {"path": image.path.name, "sbom": image.sbom.name})
    (out / "images.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def _place(source: Path, target: Path) -> None:
    """Link a file of the cache, which nothing changes, or copy it to another file system."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


if __name__ == "__main__":
    sys.exit(main())
