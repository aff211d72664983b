# SPDX-License-Identifier: Apache-2.0
"""Builds the fake driver libraries and the test programs, and prints where they are.

Libraries are those of native/libvgpu/tests/fakedrv. Programs are those of tests/programs beside it,
linked against the fake CUDA driver by its soname, so that a preloaded limiter comes before it.

Output goes to build/native-fakes/<digest>/, the digest being that of sources, flags and compiler:
unchanged input builds nothing, two builders at once cannot disturb each other, and a running
process keeps the file that it has mapped.

    python tools/build_native_fakes.py [--out DIR]
"""

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "native/libvgpu/tests"
SOURCES = TESTS / "fakedrv"
SYMBOLS = ROOT / "native/libvgpu/src/symbols.def"
DEFAULT_OUT = ROOT / "build/native-fakes"
LANGUAGE = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-pthread", "-fvisibility=hidden")
WARNINGS = (
    *("-Wall", "-Wextra", "-Werror", "-Wstrict-prototypes", "-Wmissing-prototypes"),
    "-Wconversion",
)
LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now")
"""Symbolic: cuGetProcAddress returns the driver's own function, even with a preloaded limiter."""
FLAGS = (*LANGUAGE, *WARNINGS, *LINK)
NVML = "libnvidia-ml.so.1"
CUDA = "libcuda.so.1"
CUDA_PARTS = (
    "driver",
    "names",
    "rest",
    "blocks",
    "checkpoint",
    "memory",
    "pool",
    "vmm",
    "work",
    "module",
    "graph",
)
FILES_BY_LIBRARY = {
    NVML: ("nvml.c", "mig.c", "limits.c", "gpm.c", "state.c", "card.c"),
    CUDA: (*(f"{part}.c" for part in CUDA_PARTS), "state.c", "card.c"),
}
FILES_BY_PROGRAM = {
    "drive": ("programs/drive.c", "programs/calls.c", "programs/nvml_view.c"),
    "bench": ("programs/bench.c", "programs/calls.c"),
    "threads": ("programs/threads.c", "programs/calls.c"),
    "storm": (
        *("property/storm.c", "property/worker.c", "programs/calls.c", "programs/nvml_view.c"),
        "fakedrv/card.c",
    ),
}
PROGRAM_FLAGS = (*LANGUAGE, *WARNINGS, "-fPIE", "-pie", "-Wl,-z,relro", "-Wl,-z,now")


def digest(compiler: list[str]) -> str:
    """Name of the output directory: a digest of every input of a build."""
    summary = hashlib.sha256(shlex.join([*compiler, *FLAGS, *PROGRAM_FLAGS]).encode())
    summary.update(f"{FILES_BY_LIBRARY} {FILES_BY_PROGRAM}".encode())
    folders = (SOURCES, TESTS / "programs", TESTS / "property")
    places = (path for folder in folders for path in folder.iterdir())
    inputs = (path for path in places if path.suffix in {".c", ".h", ".def"})
    for path in (*sorted(inputs), SYMBOLS):
        summary.update(path.name.encode() + b"\0" + path.read_bytes())
    return summary.hexdigest()[:16]


def build(out: Path) -> Path:
    """Build missing libraries and return their directory; each has its soname as name."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    target = out / digest(compiler)
    target.mkdir(parents=True, exist_ok=True)
    for library, files in FILES_BY_LIBRARY.items():
        if (target / library).exists():
            continue
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            fresh = Path(scratch) / library
            sources = [str(SOURCES / name) for name in files]
            subprocess.run(
                [*compiler, *FLAGS, f"-Wl,-soname,{library}", "-o", str(fresh), *sources],
                check=True,
            )
            fresh.replace(target / library)
    for program, files in FILES_BY_PROGRAM.items():
        if (target / program).exists():
            continue
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            fresh = Path(scratch) / program
            sources = [str(TESTS / name) for name in files]
            driver = [f"-L{target}", f"-l:{CUDA}", "-ldl"]
            subprocess.run(
                [*compiler, *PROGRAM_FLAGS, "-o", str(fresh), *sources, *driver], check=True
            )
            fresh.replace(target / program)
    return target


def main() -> int:
    """Build and print; on a compiler failure exit with the compiler's output and code."""
    parser = argparse.ArgumentParser(description="Build the fake driver libraries used by tests.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory for all builds")
    try:
        sys.stdout.write(f"{build(parser.parse_args().out)}\n")
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
