# SPDX-License-Identifier: Apache-2.0
"""Commands of the pages that need no cluster run unchanged, next to their files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import check_docs
from tools.docs_text import Command

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "hamiconfig"
LIMIT_S = 25


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A writable copy of the input of commands: the manifests, and a HAMi's configuration."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    for file in GOLDEN.iterdir():
        shutil.copy(file, folder)
    (folder / "values.yaml").write_text("schedulerName: hami-scheduler\n")
    return folder


@pytest.mark.parametrize("command", check_docs.to_run(check_docs.OFFLINE_TESTS), ids=str)
def test_command_of_the_docs_succeeds(checkout: Path, command: Command) -> None:
    words = command.words
    module = ["-m", "hamictl"] if words[0] == "hamictl" else []
    done = subprocess.run(
        [sys.executable, *module, *words[1:]],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize(("command", "code"), [("status", 1), ("down", 0)])
def test_cluster_that_does_not_run_is_reported(tmp_path: Path, command: str, code: int) -> None:
    words = [sys.executable, "-m", "tests.cluster", command, "--dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "no cluster runs there\n"), done.stderr


def test_mistyped_setting_is_refused_in_the_same_way(checkout: Path) -> None:
    """The test above can fail."""
    config = "deploy/kustomize/base/config/webhook.toml"
    words = ["-m", "hami_webhook", "--config", config, "--set", "polici.x=true", "--check"]
    done = subprocess.run(
        [sys.executable, *words], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "did you mean policy?" in done.stderr) == (2, True)
