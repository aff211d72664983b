# SPDX-License-Identifier: Apache-2.0
"""Installs HAMi on a site by the commands of docs/install.md, and by nothing else.

The registry of a real cluster is replaced by an import of the images into the node's containerd.
The page's commands are read from the page, so a change of it is a change of what is tested.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from hami_common.errors import NotFound
from hami_sim.kubernetes import Programs
from hami_sim.kubernetes.programs import KUBECTL
from tests.cluster.site.reach import Reach
from tools import docs_text, images

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = "docs/install.md"
OVERLAYS: Final = "deploy/kustomize/overlays"
DEV: Final = f"{OVERLAYS}/dev"
NODE_LABEL: Final = "hami.io/nvidia=true"
_DOCKER = "docker.io/"

Document = dict[str, Any]


def page_commands(heading: str) -> list[docs_text.Command]:
    """Commands of the section ``heading`` of the page, without its subsections' marks."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {heading}\n")
    if not found:
        raise NotFound(what=f"{PAGE}: ## {heading}")
    section = rest.partition("\n## ")[0]
    parsed = docs_text.parse(section, name=PAGE)
    return [one for one in parsed.commands if not one.inline and not one.mark]


def build_images(reach: Reach) -> images.Images:
    """Build what the cache lacks; kube-scheduler is that of the site's release."""
    return images.build(kubernetes=release(reach))


def release(reach: Reach) -> str:
    """Minor release of the site's Kubernetes, such as ``1.37``."""
    version = Programs(Path(reach.programs)).version(KUBECTL).removeprefix("v")
    return ".".join(version.split(".")[:2])


def write_overlay(
    directory: Path,
    base: str,
    built: images.Images,
    *,
    components: Sequence[str] = (),
    patches: Sequence[Document] = (),
) -> Path:
    """An overlay of one's own below ``directory``, as the page demands; returns its path.

    It takes ``dev`` or ``prod`` as its base and names the built images by their tags.
    """
    manifests = directory / "kustomize"
    shutil.copytree(ROOT / OVERLAYS / "..", manifests, dirs_exist_ok=True)
    own = manifests / "overlays" / f"own-{base}"
    own.mkdir(exist_ok=True)
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"../{base}"],
        "components": [f"../../components/{name}" for name in components],
        "images": [] if base == "prod" else [_tag(image) for image in built.values()],
        "patches": list(patches),
    }
    (own / "kustomization.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return own


def short_name(image: images.Image) -> tuple[str, str]:
    """(name, tag) of an image, as deploy/kustomize writes them."""
    name, _, tag = image.reference.removeprefix(_DOCKER).rpartition(":")
    return name.removeprefix("library/"), tag


def _tag(image: images.Image) -> dict[str, str]:
    name, tag = short_name(image)
    return {"name": name, "newTag": tag}


async def images_of(reach: Reach, overlay: Path) -> frozenset[str]:
    """Names of all images in the manifests of an overlay, as containerd names them."""
    rendered = await reach.kubectl("kustomize", str(overlay))
    return frozenset(
        _full_name(image)
        for document in yaml.safe_load_all(rendered.stdout)
        for image in _images(document)
    )


async def load_images(reach: Reach, archives: Sequence[Path], overlay: Path) -> None:
    """Import the archives; ``NotFound`` names the images of the overlay that none has."""
    for archive in archives:
        await reach.load(archive)
    missing = await images_of(reach, overlay) - await reach.images()
    if missing:
        raise NotFound(what=f"images on the node: {', '.join(sorted(missing))}")


async def apply(reach: Reach, overlay: Path) -> list[str]:
    """Label the node and run the page's commands for an overlay; returns their output."""
    printed = [(await reach.kubectl("label", "--overwrite", "node", reach.node, NODE_LABEL)).stdout]
    for command in page_commands("Apply"):
        words = [word.replace(DEV, str(overlay)) for word in command.words]
        printed.append(f"$ {' '.join(words)}\n")
        printed.append((await reach.run(words)).stdout)
    return printed


def _full_name(image: str) -> str:
    first, slash, _ = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return image
    return f"{_DOCKER}{image}" if slash else f"{_DOCKER}library/{image}"


def _images(document: object) -> list[str]:
    if isinstance(document, dict):
        own = document.get("image")
        return [
            *([own] if isinstance(own, str) else []),
            *(image for value in document.values() for image in _images(value)),
        ]
    if isinstance(document, list):
        return [image for value in document for image in _images(value)]
    return []
