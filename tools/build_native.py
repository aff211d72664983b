# SPDX-License-Identifier: Apache-2.0
"""Builds libvgpu.so, the limiter, or hami-recall, the agent's helper; prints its path last.

Output goes to build/native/<variant>-<digest>/, the digest being that of sources, flags and
compiler: unchanged input builds nothing, two builders at once cannot disturb each other, and a
process keeps the file that it has mapped. Variants other than `release` are for tests.

    python tools/build_native.py [--artifact libvgpu|hami-recall]
        [--variant release|debug|asan|ubsan|tsan] [--root DIR] [--out DIR]
"""

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libvgpu.so"
HELPER = "hami-recall"
SOURCES = ROOT / "native/libvgpu/src"
HELPER_SOURCES = ROOT / "native/hami-recall/src"
EXPORTS = ROOT / "native/libvgpu/libvgpu.map"
DEFAULT_OUT = ROOT / "build/native"

LANGUAGE = (
    *("-std=c11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-ftls-model=initial-exec"),
    *("-fno-strict-aliasing", "-fno-plt", "-fstack-protector", "-fno-common"),
)
WARNINGS = (
    *("-Wall", "-Wextra", "-Werror", "-Wstrict-prototypes", "-Wmissing-prototypes"),
    "-Wconversion",
)
LINK = (
    *("-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,relro"),
    *("-Wl,-z,now", "-Wl,-z,nodelete"),
)
"""Symbolic: calls of a hook bind to this library, even if another preloaded library defines its
name.
"""
HELPER_LINK = ("-pie", "-Wl,-z,relro", "-Wl,-z,now", "-ldl")
FLAGS_BY_VARIANT = {
    "release": ("-O2", "-g1", "-DNDEBUG"),
    "debug": ("-O1", "-g"),
    "asan": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "ubsan": ("-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"),
    "tsan": ("-O1", "-g", "-fsanitize=thread", "-Wno-tsan"),  # no support for fences
}
"""Flags per variant; the sanitizers' run-time libraries come from the compiler."""

EARLY = frozenset({"object.c", "resolve.c", "resolve_dlsym.c", "symbols.c"})
"""Run while a sanitizer initializes, because that looks up symbols: never instrumented."""
EARLY_FLAGS = ("-fno-builtin", "-fno-tree-loop-distribute-patterns", "-fno-stack-protector")
"""Calls of libc are limited to those in the source."""


def compiler() -> list[str]:
    """The C compiler of $CC, which may have arguments, else cc."""
    return shlex.split(os.environ.get("CC", "cc"))


def digest(flags: list[str], sources: Path = SOURCES) -> str:
    """Digest of every input of a build."""
    summary = hashlib.sha256(shlex.join([*compiler(), *flags, *LINK]).encode())
    inputs = [path for suffix in ("c", "h", "def") for path in sources.glob(f"*.{suffix}")]
    inputs += [EXPORTS, Path(__file__)]
    for path in sorted(inputs):
        summary.update(path.name.encode() + b"\0" + path.read_bytes())
    return summary.hexdigest()[:16]


def build(variant: str = "release", out: Path = DEFAULT_OUT, root: str = "") -> Path:
    """Build what is missing and return the library; `root` moves /etc/hami and /run/hami."""
    flags = [*LANGUAGE, *WARNINGS, *FLAGS_BY_VARIANT[variant], "-I", str(SOURCES)]
    if root:
        flags += [f'-DVGPU_ROOT="{root}"', f'-DPRIORITY_PATH="{root}/run/hami-priority/page-1"']
    target = out / f"{variant}-{digest(flags)}" / LIBRARY
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch)
        sources = sorted(SOURCES.glob("*.c"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: _compile(source, fresh, flags), sources))
        exports = fresh / EXPORTS.name
        preprocess = [*compiler(), "-E", "-P", "-x", "c", "-I", str(SOURCES), str(EXPORTS)]
        subprocess.run([*preprocess, "-o", str(exports)], check=True)
        linking = [*LINK, f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={exports}"]
        library = fresh / LIBRARY
        subprocess.run(
            [*compiler(), *flags, *linking, "-o", str(library), *map(str, objects)], check=True
        )
        library.replace(target)
    return target


def build_helper(variant: str = "release", out: Path = DEFAULT_OUT) -> Path:
    """Build hami-recall unless it exists, and return it."""
    language = ("-std=c11", "-D_GNU_SOURCE", "-fPIE", "-fstack-protector")
    flags = [*language, *WARNINGS, *FLAGS_BY_VARIANT[variant]]
    target = out / f"{variant}-{digest(flags, HELPER_SOURCES)}" / HELPER
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / HELPER
        sources = map(str, sorted(HELPER_SOURCES.glob("*.c")))
        subprocess.run([*compiler(), *flags, "-o", str(fresh), *sources, *HELPER_LINK], check=True)
        fresh.replace(target)
    return target


def _compile(source: Path, scratch: Path, flags: list[str]) -> Path:
    built = scratch / f"{source.stem}.o"
    if source.name in EARLY:
        flags = [*(flag for flag in flags if "sanitize" not in flag), *EARLY_FLAGS]
    subprocess.run([*compiler(), *flags, "-c", str(source), "-o", str(built)], check=True)
    return built


def main() -> int:
    """Build and print; on a compiler failure exit with the compiler's output and code."""
    parser = argparse.ArgumentParser(description="Build the limiter or the agent's helper.")
    parser.add_argument("--artifact", choices=("libvgpu", HELPER), default="libvgpu")
    parser.add_argument("--variant", choices=sorted(FLAGS_BY_VARIANT), default="release")
    parser.add_argument("--root", default="", help="where tests keep /etc/hami and /run/hami")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory for all builds")
    arguments = parser.parse_args()
    try:
        if arguments.artifact == HELPER:
            built = build_helper(arguments.variant, arguments.out)
        else:
            built = build(arguments.variant, arguments.out, arguments.root)
    except subprocess.CalledProcessError as error:
        return error.returncode
    sys.stdout.write(f"{built}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
