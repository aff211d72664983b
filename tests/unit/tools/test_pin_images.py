# SPDX-License-Identifier: Apache-2.0
"""Digests of images come from the caller, an archive or a registry; what lacks one is refused."""

import json
import tarfile
from pathlib import Path

import pytest
import yaml

from tools import pin_images

DIGEST = "sha256:" + "ab" * 32
REQUIRED = [
    "hami/webhook",
    "hami/scheduler",
    "hami/registry",
    "hami/nodeagent",
    "hami/hamictl",
    "kube-scheduler",
    "nats",
]
ALL = [f"{image}=registry.example/{image}:1@{DIGEST}" for image in REQUIRED]


def archive(path: Path, digests: list[str]) -> Path:
    index = path.with_suffix(".json")
    index.write_text(json.dumps({"manifests": [{"digest": one} for one in digests]}))
    with tarfile.open(path, "w") as out:
        out.add(index, arcname="index.json")
    return path


def skopeo(folder: Path, monkeypatch: pytest.MonkeyPatch, *, says: str, code: int = 0) -> Path:
    """A program of that name, which keeps its arguments."""
    asked = folder / "asked"
    program = folder / "skopeo"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\necho "{says}"\nexit {code}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return asked


def test_every_image_of_the_overlay_must_have_a_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kustomization.yaml"
    assert pin_images.main([*ALL[1:], "--out", str(out)]) == 1
    assert "image hami/webhook has no digest: add hami/webhook=NAME:TAG" in capsys.readouterr().err
    assert not out.exists()
    assert pin_images.main([*ALL, "--out", str(out)]) == 0
    entries = yaml.safe_load(out.read_text())["images"]
    assert {one["name"] for one in entries} == set(REQUIRED)
    assert {one["digest"] for one in entries} == {DIGEST}


def test_arguments_are_read_from_a_file(tmp_path: Path) -> None:
    listed = tmp_path / "images.txt"
    listed.write_text("# built on Monday\n\n" + "\n".join(ALL[:-1]) + "  # all but one\n")
    out = tmp_path / "out.yaml"
    assert pin_images.main([ALL[-1], "--file", str(listed), "--out", str(out)]) == 0
    assert len(yaml.safe_load(out.read_text())["images"]) == len(REQUIRED)


def test_optional_image_is_pinned_where_it_is_named() -> None:
    collector = f"otel/opentelemetry-collector=registry.example/otel:1@{DIGEST}"
    found = {one.image for one in pin_images.pinned([*ALL, collector])}
    assert found == {*REQUIRED, "otel/opentelemetry-collector"}


def test_digest_of_an_archive_is_that_of_its_image(tmp_path: Path) -> None:
    file = archive(tmp_path / "nats.tar", [DIGEST])
    pinned = pin_images.pin("nats", f"localhost:5000/mirror/nats:2.12-alpine,{file}")
    assert pinned.entry() == {
        "name": "nats",
        "newName": "localhost:5000/mirror/nats",
        "newTag": "2.12-alpine",
        "digest": DIGEST,
    }


@pytest.mark.parametrize("digests", [[], [DIGEST, DIGEST]])
def test_archive_without_exactly_one_image_is_refused(tmp_path: Path, digests: list[str]) -> None:
    file = archive(tmp_path / "x.tar", digests)
    with pytest.raises(pin_images.Problem, match=f"holds {len(digests)} images"):
        pin_images.pin("nats", f"nats:1,{file}")


def test_invalid_archive_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.tar"
    file.write_text("no archive")
    with pytest.raises(pin_images.Problem, match="is no OCI archive"):
        pin_images.pin("nats", f"nats:1,{file}")


def test_digest_of_the_tag_comes_from_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = skopeo(tmp_path, monkeypatch, says=DIGEST)
    assert pin_images.pin("nats", "registry.example/nats:2").digest == DIGEST
    assert asked.read_text().split()[-1] == "docker://registry.example/nats:2"


def test_answer_of_the_registry_that_is_no_digest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skopeo(tmp_path, monkeypatch, says="latest")
    with pytest.raises(pin_images.Problem, match="'latest' is no digest"):
        pin_images.pin("nats", "nats:2")
    skopeo(tmp_path, monkeypatch, says="", code=1)
    with pytest.raises(pin_images.Problem, match="nats:2: "):
        pin_images.pin("nats", "nats:2")


def test_without_skopeo_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pin_images.Problem, match="install it, or write nats:2@sha256:"):
        pin_images.pin("nats", "nats:2")


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "nats",
        "NATS:1",
        "nats:1@sha256:short",
        f"nats:1@sha256:{'0' * 64}",
        f"nats:1@md5:{'a' * 64}",
        "-nats:1",
        "nats:1 --tls-verify=false",
    ],
)
def test_reference_that_names_no_build_is_refused(reference: str) -> None:
    with pytest.raises(pin_images.Problem, match="image nats: "):
        pin_images.pin("nats", reference)


def test_unknown_and_repeated_images_are_refused() -> None:
    with pytest.raises(pin_images.Problem, match="IMAGE is one of hami/hamictl"):
        pin_images.pinned([f"hami/other=x:1@{DIGEST}"])
    with pytest.raises(pin_images.Problem, match="image nats is given twice"):
        pin_images.pinned([f"nats=x:1@{DIGEST}"] * 2)
