# SPDX-License-Identifier: Apache-2.0
"""Running containers keep the library they map, whichever agents start and stop."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hami_nodeagent.shell.install import Installed, Installer

PROCESSES = 50
RESTARTS = 100

LIBRARY = "int vgpu_version(void) { return VERSION; }\n"
PROGRAM = """
#include <stdio.h>
extern int vgpu_version(void) __attribute__((weak));
int main(void)
{
    while (getchar() != EOF) {
        printf("%d\\n", vgpu_version ? vgpu_version() : 0);
        fflush(stdout);
    }
    return 0;
}
"""


def build(directory: Path) -> tuple[Path, list[Path]]:
    (directory / "library.c").write_text(LIBRARY)
    (directory / "program.c").write_text(PROGRAM)
    libraries = []
    for version in (1, 2):
        library = directory / f"{version}.so"
        command = ["cc", "-shared", "-fPIC", f"-DVERSION={version}"]
        subprocess.run([*command, "-o", library, directory / "library.c"], check=True)
        libraries.append(library)
    program = directory / "program"
    subprocess.run(["cc", "-o", program, directory / "program.c"], check=True)
    return program, libraries


@contextmanager
def running(program: Path, installed: Installed) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [program],
        env={"LD_PRELOAD": str(installed.library)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def version(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"?")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_fifty_processes_survive_restarts_upgrade_and_downgrade(tmp_path: Path) -> None:
    program, (one, two) = build(tmp_path)
    host = tmp_path / "host"

    def agent_starts(library: Path) -> Installed:
        return Installer(library, host, proc=Path("/proc")).install()

    with ExitStack() as stack:
        first = agent_starts(one)
        old = [stack.enter_context(running(program, first)) for _ in range(PROCESSES)]
        inode = first.library.stat().st_ino
        for _ in range(RESTARTS):
            assert agent_starts(one) == first
        upgraded = agent_starts(two)
        new = stack.enter_context(running(program, upgraded))
        downgraded = agent_starts(one)
        assert downgraded == first
        late = stack.enter_context(running(program, downgraded))
        keep = {downgraded.library.name}
        installer = Installer(one, host, proc=Path("/proc"))
        now_s = upgraded.library.stat().st_mtime + 86_400
        assert installer.collect(keep=keep, unused_for_s=60, now_s=now_s) == []
        assert [version(process) for process in (*old, late)] == [1] * (PROCESSES + 1)
        assert version(new) == 2
        assert first.library.stat().st_ino == inode
        assert not any(
            "(deleted)" in Path(f"/proc/{process.pid}/maps").read_text() for process in (*old, new)
        )
