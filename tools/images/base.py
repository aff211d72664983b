# SPDX-License-Identifier: Apache-2.0
"""Makes a base image from Debian packages where no registry has one: ``stand_in()``.

It has what a build needs besides wheels: Python 3.11, a C compiler, the static busybox. Packages
come from this machine's own Debian sources with its settings of apt if it runs the same release,
else from Debian's; mmdebstrap checks their signatures. The image stays in buildah's local storage
and is made again only when its list of packages changes or the storage was removed.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SUITE = "bookworm"
"""Debian 12; its Python is that of the Containerfile's base."""
PACKAGES = (
    *("busybox-static", "ca-certificates", "gcc", "libc6-dev", "libstdc++6"),
    *("python3", "python3-venv"),
)
_SOURCES = (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d"))
_SETTINGS = re.compile(r'Acquire::(?:http|https|Check-\w+|Retries)[\w:.-]* "[^"]+";')
"""Settings by which apt reaches its mirrors: proxies, certificates, checks of dates."""


def stand_in(buildah: Sequence[str], architecture: str) -> str:
    """Return the identity of the base in buildah's storage, after making it if needed."""
    recipe = repr((SUITE, PACKAGES, architecture)).encode()
    name = f"localhost/hami-base:{hashlib.sha256(recipe).hexdigest()[:16]}"
    return identity(buildah, name) or _make(buildah, name, architecture)


def identity(buildah: Sequence[str], name: str) -> str:
    """Return the identity of an image in the storage, with ``sha256:``; empty if absent."""
    words = [*buildah, "inspect", "--type", "image", "--format", "{{.FromImageID}}", name]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"sha256:{done.stdout.strip()}" if done.returncode == 0 else ""


def _make(buildah: Sequence[str], name: str, architecture: str) -> str:
    with tempfile.TemporaryDirectory(prefix="hami-base-") as scratch:
        folder = Path(scratch)
        words = ["mmdebstrap", "--quiet", "--variant=essential", f"--architectures={architecture}"]
        words += [f"--include={','.join(PACKAGES)}", "--dpkgopt=force-unsafe-io"]
        words += [f"--aptopt={line}" for line in _settings()]
        words += [SUITE, str(folder / "base.tar"), *map(str, _sources())]
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2, check=True)
        (folder / "Containerfile").write_text("FROM scratch\nADD base.tar /\n", encoding="utf-8")
        words = [*buildah, "build", "--quiet", "--platform", f"linux/{architecture}"]
        words += ["--tag", name, "--file", str(folder / "Containerfile"), str(folder)]
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2, check=True)
    return identity(buildah, name)


def _sources() -> list[Path]:
    """Files of this machine that name its mirrors; none if it runs another release of Debian."""
    try:
        system = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return []
    if not re.search(rf"(?m)^VERSION_CODENAME={SUITE}$", system):
        return []
    files = [
        file for one in _SOURCES for file in ([one] if one.is_file() else one.glob("debian.*"))
    ]
    return sorted(file for file in files if file.is_file())


def _settings() -> list[str]:
    if shutil.which("apt-config") is None:
        return []
    words = ["apt-config", "dump", "--format", '%F "%v";%n', "Acquire"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if _SETTINGS.fullmatch(line)]
