# SPDX-License-Identifier: Apache-2.0
"""Renders what deploy/kustomize installs, with kubectl, and pins images as an operator would."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hami_sim.kubernetes.programs import KUBECTL
from tests.cluster.needs import control_plane_or_skip
from tools import pin_images

Obj = dict[str, Any]
DIGEST = "sha256:" + "5e" * 32
OWNERS = ("Deployment", "DaemonSet", "StatefulSet", "Job", "CronJob")


def rendering(directory: Path) -> "subprocess.CompletedProcess[str]":
    """Return the output of ``kubectl kustomize`` for a folder."""
    command = [control_plane_or_skip().path(KUBECTL), "kustomize", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(directory: Path) -> list[Obj]:
    """All objects of a folder."""
    done = rendering(directory)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def overlay(
    directory: Path,
    base: Path,
    components: Sequence[Path] = (),
    *,
    without: Sequence[Obj] = (),
    tags: Mapping[str, str] | None = None,
    files: Sequence[Path] = (),
) -> Path:
    """A folder whose overlay is ``base`` with components, without some objects, and with tags.

    ``tags``: tag by the name of an image. ``files``: resources of the overlay, which get a copy.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, directory / file.name)
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [
            os.path.relpath(base, directory.resolve()),
            *(file.name for file in files),
        ],
        "components": [os.path.relpath(one, directory.resolve()) for one in components],
        "patches": [{"patch": yaml.safe_dump({"$patch": "delete", **one})} for one in without],
        "images": [{"name": name, "newTag": tag} for name, tag in (tags or {}).items()],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return directory


def pinned_copy(directory: Path) -> Path:
    """A copy of deploy/kustomize in which every image of the overlay prod has a digest."""
    copy = directory / "kustomize"
    shutil.copytree(pin_images.KUSTOMIZE, copy)
    required, optional = pin_images.shipped()
    words = [
        f"{image}=registry.example/{image.replace('/', '-')}:1@{DIGEST}"
        for image in sorted(required | optional)
    ]
    target = copy / pin_images.TARGET.relative_to(pin_images.KUSTOMIZE)
    target.parent.mkdir(exist_ok=True)
    assert pin_images.main([*words, "--out", str(target)]) == 0
    return copy


def pods_of(objects: Sequence[Obj]) -> list[tuple[str, str, Obj]]:
    """Return every pod template: its owner, namespace and spec."""
    found = []
    for one in objects:
        spec = one.get("spec") or {}
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if one["kind"] in OWNERS and template:
            metadata = one["metadata"]
            found.append(
                (f"{one['kind']}/{metadata['name']}", metadata["namespace"], template["spec"])
            )
    return found


def containers_of(pod: Obj) -> list[Obj]:
    """Init containers and containers."""
    return [*pod.get("initContainers", ()), *pod["containers"]]
