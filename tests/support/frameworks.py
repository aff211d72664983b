# SPDX-License-Identifier: Apache-2.0
"""The frameworks of requirements/frameworks.txt, installed outside of the virtual environment.

They are fetched by the first test that needs them, checked against their hashes, and kept in the
user's cache in a folder named for the pins and for Python's version. Nothing is built from source.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements/frameworks.txt"


def installed() -> Path:
    """Return the folder for ``PYTHONPATH``, filled where this machine does not have it yet.

    Raises CalledProcessError where the packages cannot be fetched. Concurrent callers wait for the
    first one.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hami" / "frameworks"
    summary = hashlib.sha256(sys.version.encode() + PINS.read_bytes())
    folder = base / summary.hexdigest()[:16]
    base.mkdir(parents=True, exist_ok=True)
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=base) as scratch:
                _install(Path(scratch) / "packages")
                (Path(scratch) / "packages").rename(folder)
    return folder


def _install(target: Path) -> None:
    command = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--quiet"]
    command += ["--python", sys.executable, "--target", str(target), "--no-build"]
    subprocess.run([*command, "--require-hashes", "-r", str(PINS)], check=True)
