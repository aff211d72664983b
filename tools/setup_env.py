# SPDX-License-Identifier: Apache-2.0
"""Creates the virtual environment `.venv` from the pinned, hashed requirements; `./dev` calls it.

Order: take the lock, make the environment, fetch the installer with pip, install the pins, install
the workspace members in editable form, and write the stamp last. The stamp is a hash of all inputs,
so a warm start only compares hashes, and an environment without a stamp was interrupted and is
re-created. The lock is a kernel lock on a file: when its owner dies it is free at once, and of two
concurrent starts one waits and then finds the work done.

Runs on any Python 3.11 with the standard library alone, because nothing is installed yet.
"""

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup-stamp"
LOCK = ROOT / ".venv.lock"
BOOTSTRAP = ROOT / "requirements" / "bootstrap.txt"
PINS = ROOT / "requirements" / "dev.txt"

EXIT_DEPENDENCY = 3
"""A program or server that set-up needs failed; see the text above it."""


def main() -> int:
    """Check or create the environment; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Make .venv from the pinned requirements.")
    parser.add_argument(
        "--is-current",
        action="store_true",
        help="only tell, by exit code 0, that nothing is to be done",
    )
    options = parser.parse_args()
    if options.is_current:
        return 0 if _is_current() else 1
    with _lock():
        if _is_current():
            return 0
        started_s = time.monotonic()
        _say(f"setting up {VENV.name} with Python {sys.version.split()[0]}")
        try:
            _build()
        except subprocess.CalledProcessError as error:
            _say(f"set-up stopped: {' '.join(map(str, error.cmd[:4]))} … exited {error.returncode}")
            _say("nothing was stamped; run ./dev setup again once the cause above is gone")
            return EXIT_DEPENDENCY
        _say(f"set up in {time.monotonic() - started_s:.1f} s")
    return 0


def members() -> list[Path]:
    """Folders of the workspace members, in a stable order."""
    return sorted(
        path.parent
        for pattern in ("libs", "services")
        for path in ROOT.glob(f"{pattern}/*/pyproject.toml")
    )


def _wanted_stamp() -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]}\n".encode())
    for path in (
        BOOTSTRAP,
        PINS,
        Path(__file__),
        *(member / "pyproject.toml" for member in members()),
    ):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return f"{_place()}\n{digest.hexdigest()}"


def _place() -> str:
    # Scripts of an environment contain its absolute path: a moved environment is re-created.
    return hashlib.sha256(os.fsencode(VENV)).hexdigest()


def _is_current() -> bool:
    return (VENV / "bin" / "just").exists() and _read_stamp() == _wanted_stamp()


def _read_stamp() -> str | None:
    try:
        return STAMP.read_text(encoding="ascii")
    except FileNotFoundError:
        return None


def _build() -> None:
    python = VENV / "bin" / "python"
    stamp = _read_stamp()
    if stamp is None or not stamp.startswith(_place()) or not _same_interpreter(python):
        _run(sys.executable, "-I", "-m", "venv", "--clear", VENV)
    STAMP.unlink(missing_ok=True)
    _run(
        python,
        "-I",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--require-hashes",
        "--requirement",
        BOOTSTRAP,
    )
    uv = (VENV / "bin" / "uv", "pip")
    _run(*uv, "sync", "--quiet", "--python", python, "--require-hashes", PINS)
    editable = [part for member in members() for part in ("--editable", member)]
    _run(
        *uv,
        "install",
        "--quiet",
        "--python",
        python,
        "--no-deps",
        "--no-build-isolation",
        *editable,
    )
    unfinished = STAMP.with_suffix(".new")
    unfinished.write_text(_wanted_stamp(), encoding="ascii")
    unfinished.replace(STAMP)


def _same_interpreter(python: Path) -> bool:
    program = "import sys; print(sys.prefix, *sys.version_info[:2])"
    want = f"{VENV} {sys.version_info[0]} {sys.version_info[1]}"
    try:
        told = subprocess.run(
            [python, "-I", "-c", program], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    return told.stdout.strip() == want


def _run(*command: object) -> None:
    subprocess.run(
        [str(part) for part in command],
        check=True,
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.DEVNULL,
    )


def _environment() -> dict[str, str]:
    environment = {
        key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}
    }
    environment |= {"VIRTUAL_ENV": str(VENV), "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    environment.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    home = environment.get("HOME", "")
    if not (home and os.access(home, os.W_OK)):
        environment["UV_CACHE_DIR"] = str(ROOT / ".cache" / "uv")
        environment["PIP_NO_CACHE_DIR"] = "1"
    # A mirror configured for pip by environment serves uv as well.
    if "PIP_INDEX_URL" in environment:
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    return environment


@contextmanager
def _lock() -> Iterator[None]:
    descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            _say(f"waiting for another ./dev that is setting up (pid {owner})")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        yield
    finally:
        os.close(descriptor)


def _say(text: str) -> None:
    print(f"./dev: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
