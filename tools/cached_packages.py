# SPDX-License-Identifier: Apache-2.0
"""Installs a set of pinned packages, ``requirements/NAME.txt``, outside of the virtual environment.

For large packages that few commands need. They are downloaded at first use, checked against their
hashes, and kept in the user's cache in a folder named for the pins and for Python's version.
Nothing is built from source.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def installed(name: str) -> Path:
    """Return the folder of the packages, for ``PYTHONPATH``; install them if it does not exist.

    Raises CalledProcessError if the packages cannot be downloaded. Concurrent callers wait for the
    first one.
    """
    pins = ROOT / "requirements" / f"{name}.txt"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hami" / name
    summary = hashlib.sha256(sys.version.encode() + pins.read_bytes())
    folder = base / summary.hexdigest()[:16]
    base.mkdir(parents=True, exist_ok=True)
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=base) as scratch:
                _install(pins, Path(scratch) / "packages")
                (Path(scratch) / "packages").rename(folder)
    return folder


def _install(pins: Path, target: Path) -> None:
    command = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--quiet"]
    command += ["--python", sys.executable, "--target", str(target), "--no-build"]
    subprocess.run([*command, "--require-hashes", "-r", str(pins)], check=True)
