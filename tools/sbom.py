# SPDX-License-Identifier: Apache-2.0
"""Writes bills of materials (CycloneDX 1.6, JSON) from the pinned requirements, and of images.

    python -m tools.sbom --out DIR

``hami-images.cdx.json`` lists the packages of all images together: ours, those of
requirements/runtime.txt, and those of npm that the console contains. ``hami-build.cdx.json`` lists
the packages that build and test them, those of requirements/dev.txt and the others of
console/package-lock.json. A Python package has every SHA-256 that its pin allows, one per published
file, as an installation with ``--require-hashes`` checks them; one of npm has its SHA-512. With
``SOURCE_DATE_EPOCH`` (Unix seconds) equal sources give equal bytes. ``bill_of_image`` lists the
packages that were found in one built image, Debian's included; tools/images calls it.
"""

import argparse
import base64
import hashlib
import json
import os
import sys
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from hami_common.runtime.clock import SystemClock
from tools.pins import Pin, parse_pins

ROOT = Path(__file__).resolve().parent.parent
FILES = {"hami-images": "runtime", "hami-build": "dev"}
"""By name of the bill: the set of requirements that it lists."""
LOCK = ROOT / "console" / "package-lock.json"
SIMULATOR = "hami-sim"
"""The one package of ours that is in no image."""


class Package(NamedTuple):
    """One package or program that was found in an image."""

    kind: str
    """``deb``, ``pypi``, or ``file`` for a program that no package's record describes."""
    name: str
    version: str
    detail: str = ""
    """Architecture of a Debian package; SHA-256 of a file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all files into a folder, which is made."""
    parser = argparse.ArgumentParser(description="Write bills of materials, CycloneDX 1.6 JSON.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    out: Path = parser.parse_args(arguments).out
    epoch_s = int(os.environ.get("SOURCE_DATE_EPOCH") or SystemClock().now_s())
    at = datetime.fromtimestamp(epoch_s, tz=UTC)
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        path = out / f"{name}.cdx.json"
        path.write_text(bill(name, at=at), encoding="utf-8")
        print(path)
    return 0


def bill(name: str, *, at: datetime) -> str:
    """One bill of materials as JSON, made at this time."""
    source = (ROOT / "requirements" / f"{FILES[name]}.txt").read_text(encoding="utf-8")
    subject = _of_ours(name, ComponentType.APPLICATION, _version())
    is_of_images = name == "hami-images"
    members = [_of_ours(*one) for one in _members()] if is_of_images else []
    locked = LOCK.read_text(encoding="utf-8")
    packages = [component(pin) for pin in parse_pins(source)]
    packages += _npm(locked, is_of_build=not is_of_images)
    bom = Bom(components=[*members, *packages], serial_number=_serial(name, source + locked))
    bom.metadata.component = subject
    bom.metadata.timestamp = at
    bom.register_dependency(subject, [*members, *packages])
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def bill_of_image(reference: str, digest: str, found: Sequence[Package], *, at: datetime) -> str:
    """Bill of what was found in one image, as JSON."""
    name, _, tag = reference.rpartition(":")
    subject = Component(
        name=name,
        type=ComponentType.CONTAINER,
        version=tag,
        bom_ref=f"{name}@{digest}",
        purl=PackageURL(
            type="oci",
            name=name.rpartition("/")[2],
            version=digest,
            qualifiers={"repository_url": name, "tag": tag},
        ),
    )
    source = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    pins = {(pin.name, str(pin.version)): pin for pin in parse_pins(source)}
    packages = [_found(package, pins) for package in found]
    bom = Bom(components=packages, serial_number=_serial(name, digest))
    bom.metadata.component = subject
    bom.metadata.timestamp = at
    bom.register_dependency(subject, packages)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _found(package: Package, pins: Mapping[tuple[str, str], Pin]) -> Component:
    """One package of an image; a Python package that the requirements do not pin is an error."""
    if package.kind == "file":
        return Component(
            name=package.name,
            type=ComponentType.FILE,
            version=package.version,
            bom_ref=f"file:{package.name}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=package.detail)],
        )
    if package.kind == "deb":
        arch = {"arch": package.detail}
        url = PackageURL("deb", "debian", package.name, package.version, qualifiers=arch)
        return Component(name=package.name, version=package.version, bom_ref=str(url), purl=url)
    name = canonicalize_name(package.name)
    ours = {member: (member, kind, version) for member, kind, version in _members()}
    if name in ours:
        return _of_ours(*ours[name])
    if (name, package.version) not in pins:
        msg = f"{name} {package.version} is in an image, but requirements/*.txt do not pin it"
        raise ValueError(msg)
    return component(pins[name, package.version])


def component(pin: Pin) -> Component:
    """A pinned package with the hashes of its files."""
    version = str(pin.version)
    url = PackageURL(type="pypi", name=pin.name, version=version)
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(str(url)),
        comment=f"published files{f', where {pin.marker}' if pin.marker else ''}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in pin.hashes],
    )
    return Component(
        name=pin.name,
        version=version,
        # A version may be pinned once per platform.
        bom_ref=f"{url}#{hashlib.sha256(pin.marker.encode()).hexdigest()[:8]}",
        purl=url,
        external_references=[files],
    )


def _npm(lock: str, *, is_of_build: bool) -> list[Component]:
    """Packages of npm: those that build and test the console, or those that it contains."""
    found: list[Component] = []
    for path, package in json.loads(lock)["packages"].items():
        # A peer that only development needs, such as typescript, is "devOptional".
        is_for_build = package.get("dev", False) or package.get("devOptional", False)
        if not path or is_for_build != is_of_build:
            continue
        scope, _, name = path.rpartition("node_modules/")[2].rpartition("/")
        kind, _, digest = package["integrity"].partition("-")
        if kind != "sha512":
            msg = f"console/package-lock.json: {path}: integrity is not sha512"
            raise ValueError(msg)
        url = PackageURL("npm", scope or None, name, package["version"])
        content = base64.b64decode(digest).hex()
        found.append(
            Component(
                name=name,
                group=scope or None,
                version=package["version"],
                bom_ref=str(url),
                purl=url,
                licenses=[LicenseExpression(package["license"])] if "license" in package else [],
                hashes=[HashType(alg=HashAlgorithm.SHA_512, content=content)],
            )
        )
    return found


def _of_ours(name: str, kind: ComponentType, version: str) -> Component:
    url = PackageURL(type="generic", namespace="hami", name=name, version=version)
    expression = LicenseExpression("Apache-2.0")
    return Component(
        name=name, type=kind, version=version, bom_ref=str(url), purl=url, licenses=[expression]
    )


def _members() -> list[tuple[str, ComponentType, str]]:
    projects = [
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for path in sorted(ROOT.glob("*/*/pyproject.toml"))
    ]
    return [
        (project["name"], ComponentType.LIBRARY, project["version"])
        for project in projects
        if project["name"] != SIMULATOR
    ]


def _version() -> str:
    """Version of a release, which all our packages share."""
    return next(version for _, _, version in _members())


def _serial(name: str, source: str) -> uuid.UUID:
    """Equal for equal content, as a rebuild makes it."""
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {_version()} {source}")


if __name__ == "__main__":
    sys.exit(main())
