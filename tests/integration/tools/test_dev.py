# SPDX-License-Identifier: Apache-2.0
"""The entry point `./dev` works from any directory, and reports what is missing."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXIT_DEPENDENCY = 3


def tool_folder(folder: Path, **script_by_name: str) -> Path:
    """A folder for PATH with the few system programs that `./dev` needs, and these scripts."""
    folder.mkdir()
    for name in ("sh", "dirname"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, script in script_by_name.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def fresh_checkout(folder: Path) -> Path:
    """A checkout without an environment, as far as `./dev` reads it."""
    for name in ("dev", "tools/setup_env.py", "requirements", "justfile"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    return folder


def dev(checkout: Path, path: Path | str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [checkout / "dev"],
        cwd=cwd or checkout,
        env={"PATH": str(path), "HOME": str(checkout)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_dev_lists_the_recipes_from_any_folder(tmp_path: Path) -> None:
    process = dev(ROOT, os.environ["PATH"], cwd=tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0
    assert "test *args" in output


def test_dev_refuses_an_old_python_and_names_its_version(tmp_path: Path) -> None:
    old = '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0; exit 1'
    path = tool_folder(tmp_path / "bin", python3=old, cc="exit 0")
    process = dev(fresh_checkout(tmp_path / "repo"), path)
    output, _ = process.communicate()
    assert process.returncode == EXIT_DEPENDENCY
    assert "needs Python 3.11 or newer, but python3 is Python 3.9.2" in output
    assert not (tmp_path / "repo/.venv").exists()


def test_dev_refuses_a_machine_without_c_compiler(tmp_path: Path) -> None:
    path = tool_folder(tmp_path / "bin", python3=f'exec {sys.executable} "$@"')
    process = dev(fresh_checkout(tmp_path / "repo"), path)
    output, _ = process.communicate()
    assert process.returncode == EXIT_DEPENDENCY
    assert "needs a C compiler" in output
    assert not (tmp_path / "repo/.venv").exists()


def test_failed_setup_leaves_no_stamp_and_names_the_step(tmp_path: Path) -> None:
    checkout = fresh_checkout(tmp_path / "repo")
    (checkout / "requirements/bootstrap.txt").write_text("uv==0.0.1\n")  # no hash: refused offline
    path = tool_folder(tmp_path / "bin", python3=f'exec {sys.executable} "$@"', cc="exit 0")
    process = dev(checkout, path)
    output, _ = process.communicate()
    assert process.returncode == EXIT_DEPENDENCY
    assert "set-up stopped" in output
    assert "run ./dev setup again" in output
    assert not (checkout / ".venv/setup-stamp").exists()


def test_second_setup_waits_for_the_first_and_names_it(tmp_path: Path) -> None:
    checkout = fresh_checkout(tmp_path / "repo")
    path = tool_folder(tmp_path / "bin", python3=f'exec {sys.executable} "$@"', cc="exit 0")
    log = tmp_path / "log"
    with (checkout / ".venv.lock").open("w") as lock, log.open("w") as output:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        process = subprocess.Popen(
            [checkout / "dev", "setup"],
            env={"PATH": str(path)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        wait_for(lambda: "another ./dev that is setting up (pid 4711)" in log.read_text())
        assert process.poll() is None
        assert not (checkout / ".venv").exists()
        os.killpg(process.pid, signal.SIGKILL)  # the shell and the Python that it started
        process.wait()
