# SPDX-License-Identifier: Apache-2.0
"""The script of an offline bundle checks all files first, then imports, then applies."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "offline-install.sh"
DIGEST = "sha256:" + "5e" * 32
NAME = "docker.io/hami/webhook"
IMPORT = "ctr --namespace k8s.io images import webhook.oci.tar"
TAG = f"ctr --namespace k8s.io images tag --force {NAME}:0.1.0 {NAME}@{DIGEST}"
APPLY = "kubectl apply --filename manifests/dev.yaml"
FAKE = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n[ "$(basename "$0")" != "$FAILS" ]\n'


class Bundle:
    """A bundle of one image, and programs that record how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bundle"
        self.programs = folder / "programs"
        self.calls = folder / "calls"
        (self.folder / "manifests").mkdir(parents=True)
        self.programs.mkdir()
        shutil.copy(SCRIPT, self.folder / "install.sh")
        (self.folder / "webhook.oci.tar").write_bytes(b"archive")
        (self.folder / "manifests/dev.yaml").write_text("kind: Namespace\n")
        (self.folder / "images.txt").write_text(f"webhook.oci.tar {NAME}:0.1.0 {DIGEST}\n")
        names = ("images.txt", "webhook.oci.tar", "manifests/dev.yaml", "install.sh")
        sums = [f"{self.digest(name)}  {name}\n" for name in names]
        (self.folder / "SHA256SUMS").write_text("".join(sums))
        for name in ("ctr", "kubectl"):
            self.add(name)

    def digest(self, name: str) -> str:
        return hashlib.sha256((self.folder / name).read_bytes()).hexdigest()

    def add(self, name: str) -> None:
        (self.programs / name).write_text(FAKE)
        (self.programs / name).chmod(0o755)

    def install(
        self, *arguments: str, fails: str = "", **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["sh", str(self.folder / "install.sh"), *arguments],
            env={
                "PATH": f"{self.programs}{os.pathsep}/usr/bin{os.pathsep}/bin",
                "CALLS": str(self.calls),
                "FAILS": fails,
                **variables,
            },
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ((), [IMPORT, TAG, APPLY]),
        (("--import-only",), [IMPORT, TAG]),
        (("--apply-only",), [APPLY]),
        (("--overlay", "dev", "--apply-only"), [APPLY]),
        (("--dry-run",), []),
    ],
)
def test_steps_run_in_order(bundle: Bundle, arguments: tuple[str, ...], calls: list[str]) -> None:
    done = bundle.install(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert bundle.called() == calls


def test_dry_run_prints_the_commands(bundle: Bundle) -> None:
    said = bundle.install("--dry-run").stdout
    assert f"would run: {IMPORT}" in said
    assert f"would run: {TAG}" in said
    assert f"would run: {APPLY}" in said


@pytest.mark.parametrize("name", ["webhook.oci.tar", "manifests/dev.yaml", "images.txt"])
def test_changed_file_stops_it_before_anything_is_done(bundle: Bundle, name: str) -> None:
    (bundle.folder / name).write_bytes(b"changed")
    done = bundle.install()
    assert done.returncode == 1
    assert name in done.stderr + done.stdout
    assert "copy the bundle again; nothing was changed" in done.stderr
    assert bundle.called() == []


@pytest.mark.parametrize(
    ("arguments", "fails", "text"),
    [
        (("--overlay", "x"), "", "no overlay x in this bundle: write --overlay dev"),
        (("--overlay",), "", "--overlay needs dev or prod"),
        (("--import-only", "--apply-only"), "", "exclude each other"),
        ((), "ctr", "webhook.oci.tar was not imported: is containerd running"),
        ((), "kubectl", "manifests/dev.yaml was not applied: correct the cause above"),
    ],
)
def test_error_names_its_cause_and_the_fix(
    bundle: Bundle, arguments: tuple[str, ...], fails: str, text: str
) -> None:
    done = bundle.install(*arguments, fails=fails)
    assert done.returncode == 1
    assert f"install.sh: {text}" in done.stderr or text in done.stderr


def test_failed_import_applies_nothing(bundle: Bundle) -> None:
    bundle.install(fails="ctr")
    assert bundle.called() == [IMPORT]


def test_missing_program_is_named_before_anything_is_done(bundle: Bundle) -> None:
    done = bundle.install(KUBECTL="absent-program --context x")
    assert bundle.called() == []
    assert "absent-program is not in PATH: install kubectl" in done.stderr
    assert bundle.install("--import-only", KUBECTL="absent-program").returncode == 0


def test_program_may_be_named_with_its_options(bundle: Bundle) -> None:
    bundle.add("k3s")
    bundle.install("--import-only", CTR="k3s ctr --address /run/x.sock")
    call, _ = bundle.called()
    assert call.startswith("k3s ctr --address /run/x.sock --namespace k8s.io images import")


def test_unknown_option_prints_the_usage(bundle: Bundle) -> None:
    done = bundle.install("--force")
    assert done.returncode == 2
    assert "usage: install.sh" in done.stderr
