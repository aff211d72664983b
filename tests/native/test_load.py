# SPDX-License-Identifier: Apache-2.0
"""The limiter as a guest: what it needs to be loaded, and that it leaves other programs alone.

Programs run with and without it and must print the same. Takes about 8 s.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import build_native, gen_symbols

ROOT = build_native.ROOT
GUESTS = ROOT / "native/libvgpu/tests/guest"
BASELINE = (2, 17)
STRICT = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the guest programs, one of them linked statically."""
    folder = tmp_path_factory.mktemp("guests")
    source = str(GUESTS / "guest.c")
    subprocess.run(["cc", *STRICT, "-o", str(folder / "guest"), source, "-ldl"], check=True)
    for name in ("next", "lookalike"):
        shared = ["-shared", "-fPIC", str(GUESTS / f"{name}.c"), "-ldl"]
        subprocess.run(["cc", *STRICT, "-o", str(folder / f"{name}.so"), *shared], check=True)
    still = folder / "still.c"
    still.write_text(
        '#include <unistd.h>\nint main(void) { return write(1, "still\\n", 6) != 6; }\n'
    )
    subprocess.run(["cc", "-static", "-o", str(folder / "still"), str(still)], check=True)
    return folder


@pytest.fixture
def run(limiter: Path, tmp_path: Path) -> Run:
    """Runs a program, with the limiter preloaded by default."""

    def run(
        *words: str | Path, preload: list[Path] | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        libraries = [limiter] if preload is None else preload
        clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environment}
        if libraries:
            clean["LD_PRELOAD"] = ":".join(map(str, libraries))
        return subprocess.run(
            [str(word) for word in words],
            env=clean,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def dynamic_symbols(library: Path) -> list[str]:
    done = subprocess.run(
        ["objdump", "-T", str(library)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_needs_no_glibc_symbol_newer_than_the_baseline(limiter: Path) -> None:
    needed = [line for line in dynamic_symbols(limiter) if "*UND*" in line]
    versions = {match[1] for line in needed if (match := re.search(r"\((\w+_[\w.]+)\)", line))}
    assert versions
    assert all(re.fullmatch(r"GLIBC_[\d.]+", version) for version in versions), versions
    numbers = {tuple(map(int, version.removeprefix("GLIBC_").split("."))) for version in versions}
    assert max(numbers) <= BASELINE


def test_needs_no_library_but_libc(limiter: Path) -> None:
    done = subprocess.run(
        ["readelf", "-d", str(limiter)], capture_output=True, text=True, check=True
    )
    assert re.findall(r"NEEDED.*\[(.*)\]", done.stdout) == ["libc.so.6"]


def test_exports_only_the_hooks_and_the_two_lookups(limiter: Path) -> None:
    defined = [line for line in dynamic_symbols(limiter) if " .text" in line]
    exported = {line.split()[-1] for line in defined}
    hooks = gen_symbols.read(gen_symbols.SOURCE.read_text()).hooks
    assert exported == {hook[0] for hook in hooks} | {"dlsym", "dlvsym"}


def test_loading_runs_no_constructor(limiter: Path) -> None:
    """No constructor but those that the compiler puts into every library."""
    done = subprocess.run(
        ["readelf", "-W", "-S", str(limiter)], capture_output=True, text=True, check=True
    )
    sizes = re.findall(r"\.init_array\s+INIT_ARRAY\s+\w+\s+\w+\s+(\w+)", done.stdout)
    assert [int(size, 16) for size in sizes] == [8]


@pytest.mark.parametrize(
    "words",
    [("state",), ("absent",), ("versions",), ("spawn", "/bin/true"), ("exec", "/bin/echo", "x")],
    ids=lambda words: words[0],
)
def test_process_without_cuda_is_the_same_with_it(
    run: Run, programs: Path, words: tuple[str, ...]
) -> None:
    native = run(programs / "guest", *words, preload=[])
    guest = run(programs / "guest", *words)
    assert native.returncode == 0
    assert (guest.returncode, guest.stdout, guest.stderr) == (0, native.stdout, native.stderr)


@pytest.mark.parametrize("binding", ["", "1"], ids=["lazy", "now"])
def test_names_like_the_drivers_stay_their_owners(run: Run, programs: Path, binding: str) -> None:
    library = programs / "lookalike.so"
    done = run(programs / "guest", "lookalike", library, LD_BIND_NOW=binding)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 2 3\n", "")


def test_static_program_runs_as_ever(run: Run, programs: Path) -> None:
    done = run(programs / "still")
    assert (done.returncode, done.stdout, done.stderr) == (0, "still\n", "")


@pytest.mark.parametrize("first", ["limiter", "other"])
def test_chain_of_preloaded_libraries_reaches_its_end(
    run: Run, programs: Path, limiter: Path, drivers: Path, first: str
) -> None:
    """A second interceptor asks for the next definition, before or after the limiter."""
    chain = [limiter, programs / "next.so"]
    if first == "other":
        chain.reverse()
    code = (
        "import ctypes, os\n"
        "own = ctypes.CDLL(None)\n"
        "pid = own.getpid()\n"
        "driver = ctypes.CDLL('libcuda.so.1', ctypes.RTLD_GLOBAL)\n"
        "print(pid == os.getpid() == own.getpid(), own.next_calls() >= 2, own.cuInit(0))\n"
    )
    done = run(sys.executable, "-c", code, preload=chain, LD_LIBRARY_PATH=str(drivers))
    # No state file: the fake driver answers that there is no device.
    assert (done.stdout, done.stderr) == ("True True 100\n", "")


def test_python_with_numpy_starts_silently(run: Run) -> None:
    """Its mathematical library looks up hundreds of symbols of its own at start."""
    code = "import numpy; print(int((numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum()))"
    native = run(sys.executable, "-c", code, preload=[])
    guest = run(sys.executable, "-c", code)
    assert (guest.returncode, guest.stdout, guest.stderr) == (0, native.stdout, native.stderr)
    assert guest.stdout == "262144\n"


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_program_with_a_sanitizer_runs(run: Run, tmp_path: Path, kind: str) -> None:
    """It looks up the functions that it replaces before any of them works."""
    program = tmp_path / kind
    source = str(GUESTS / "guest.c")
    flags = [f"-fsanitize={kind}", "-o", str(program), source, "-ldl"]
    subprocess.run(["cc", *STRICT, *flags], check=True)
    done = run(program, "absent", ASAN_OPTIONS="detect_leaks=0:verify_asan_link_order=0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "absent reported\n", "")


def test_shell_pipeline_leaves_no_files_behind(run: Run, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    done = run("/bin/sh", "-c", "echo one | cat; (exit 3); echo $?")
    assert (done.stdout, done.stderr) == ("one\n3\n", "")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.skipif(shutil.which("gdb") is None, reason="there is no gdb")
def test_debugger_shows_frames_through_the_lookup(
    programs: Path, limiter: Path, tmp_path: Path
) -> None:
    """The jump to the real dlsym describes its frame, so that debuggers and unwinders work."""
    script = tmp_path / "script"
    script.write_text(
        f"set environment LD_PRELOAD={limiter}\nset breakpoint pending on\n"
        f"break resolve_dlsym_target\nrun lookalike {programs / 'lookalike.so'}\nbacktrace\nkill\n"
    )
    gdb = ["gdb", "-batch", "-nx", "-iex", "set debuginfod enabled off", "-x", str(script)]
    done = subprocess.run(
        [*gdb, str(programs / "guest")], capture_output=True, text=True, check=False, timeout=60
    )
    assert "main (" in done.stdout, done.stdout + done.stderr
