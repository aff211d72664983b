# SPDX-License-Identifier: Apache-2.0
"""The headers of several CUDA releases, from hashed wheels, and what they declare.

The wheels of requirements/cuda-headers.txt are fetched once with pip and unpacked into the user's
cache, outside the source tree; nothing of them is installed or committed. Declarations are read
from what the C preprocessor makes of a header, in each mode that it has: with and without
per-thread default streams, and with the old names that it declares for the driver itself.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PINS = ROOT / "requirements/cuda-headers.txt"
PLATFORMS = ("manylinux2014_x86_64", "manylinux1_x86_64")
"""Headers are the same for every processor; one kind of wheel is enough."""

OLD_NAMES = "-D__CUDA_API_VERSION_INTERNAL"
THREAD_STREAMS = "-DCUDA_API_PER_THREAD_DEFAULT_STREAM"
MODES = ((), (THREAD_STREAMS,), (OLD_NAMES,))
STANDARD = ("-include", "stddef.h", "-include", "stdint.h", "-include", "stdbool.h")
HEADERS = ("cuda.h", "cudaGL.h", "cudaVDPAU.h", "cudaEGL.h")
FOREIGN = {
    "GL/gl.h": "typedef unsigned int GLuint, GLenum; typedef int GLsizei;\n",
    "vdpau/vdpau.h": "typedef uint32_t VdpDevice, VdpVideoSurface, VdpOutputSurface;\n"
    "typedef uint32_t VdpStatus, VdpFuncId; typedef int VdpGetProcAddress(void);\n",
    "EGL/egl.h": "typedef void *EGLImageKHR, *EGLStreamKHR, *EGLSyncKHR;\ntypedef int EGLint;\n",
    "EGL/eglext.h": "",
}
"""Headers of other projects that the driver's headers include, as far as needed."""

_DECLARED = re.compile(
    r"(?:CUresult|nvmlReturn_t|const char ?\*)[^;(){}=]*?"
    r"\b((?:cu|nvml)[A-Z]\w*) ?\((?:[^()]|\([^()]*\))*\) ?;"
)
_TYPEDEFS = re.compile(r"\bPFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\b")


class Release(NamedTuple):
    """One wheel: its name with version, and where its headers are."""

    name: str
    include: Path

    @property
    def is_nvml(self) -> bool:
        """NVML's headers, not the driver's."""
        return "nvml" in self.name


def releases() -> list[Release]:
    """Return every pinned release, fetched where this machine does not have it yet."""
    return [Release(name, _unpacked(name, line)) for name, line in _pins()]


def declared(release: Release) -> set[str]:
    """Names of all functions that the headers of a release declare."""
    if release.is_nvml:
        return _functions(release, "nvml.h", ("-DNVML_NO_UNVERSIONED_FUNC_DEFS",)) | _functions(
            release, "nvml.h", ()
        )
    names = set[str]()
    for header in HEADERS:
        for mode in MODES:
            names |= _functions(release, header, mode)
    return names


def versions(release: Release) -> set[tuple[str, int, bool]]:
    """Name, version and whether it is for per-thread streams, of each form of each function."""
    text = (release.include / "cudaTypedefs.h").read_text(errors="replace")
    return {(name, int(version), bool(kind)) for name, version, kind in _TYPEDEFS.findall(text)}


def preprocessed(release: Release, source: str, mode: tuple[str, ...] = ()) -> str:
    """Return the output of the C preprocessor for ``source`` with the headers of a release."""
    with tempfile.TemporaryDirectory() as foreign:
        for name, text in FOREIGN.items():
            place = Path(foreign) / name
            place.parent.mkdir(exist_ok=True)
            place.write_text(text)
        folders = ["-I", foreign, "-I", str(release.include)]
        command = ["cc", "-E", "-P", *mode, *folders, *STANDARD, "-x", "c", "-"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return done.stdout


def _functions(release: Release, header: str, mode: tuple[str, ...]) -> set[str]:
    text = re.sub(r"\s+", " ", preprocessed(release, f'#include "{header}"\n', mode))
    text = re.sub(r"__attribute__ ?\(\((?:[^()]|\([^()]*\))*\)\)", "", text)
    return set(_DECLARED.findall(text))


def _pins() -> Iterator[tuple[str, str]]:
    for line in PINS.read_text().splitlines():
        if line and not line.startswith("#"):
            yield line.split()[0], line


def _unpacked(name: str, line: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "hami" / "cuda-headers" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _fetch(line, Path(scratch))
            fresh = Path(scratch) / "headers"
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                wheel.extractall(fresh, [n for n in wheel.namelist() if n.endswith(".h")])
            if not folder.exists():
                fresh.rename(folder)
    return next(folder.rglob("include"))


def _fetch(line: str, scratch: Path) -> None:
    pin = scratch / "pin.txt"
    pin.write_text(line + "\n")
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", *platforms, "-d", str(scratch), "-r", str(pin)]
    subprocess.run(command, check=True)
