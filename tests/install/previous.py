# SPDX-License-Identifier: Apache-2.0
"""Builds the images and manifests of an earlier state of this repository.

No release has been tagged yet; ``COMMIT`` becomes its tag then. The earlier tree builds its images
with its own program, in the cache of all builds.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "8de4202c"
TAG = "previous"


def build(tree: Path, kubernetes: str) -> list[tuple[Path, str]]:
    """Write the tree to ``tree`` and build its images; archive and reference of each."""
    known = ["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    if subprocess.run(known, cwd=ROOT, check=False, capture_output=True).returncode:
        pytest.skip(f"this checkout has no history with {COMMIT}")
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    archive = subprocess.run(
        ["git", "archive", COMMIT], cwd=ROOT, check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "-x"], cwd=tree, input=archive, check=True)
    out = tree / "images"
    command = [sys.executable, "-m", "tools.images", "--out", str(out), "--kubernetes", kubernetes]
    subprocess.run(command, cwd=tree, check=True)
    listed = json.loads((out / "images.json").read_text())
    return [(out / image["path"], image["reference"]) for image in listed]


def write_overlay(
    tree: Path, references: Sequence[str], *, patches: Sequence[dict[str, Any]]
) -> Path:
    """The tree's overlay dev with the images of ``TAG``."""
    own = tree / "deploy" / "kustomize" / "overlays" / "own"
    own.mkdir()
    images = []
    for reference in references:
        name = reference.rpartition(":")[0].removeprefix("docker.io/").removeprefix("library/")
        images.append({"name": name, "newTag": TAG})
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../dev"],
        "images": images,
        "patches": list(patches),
    }
    (own / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return own
