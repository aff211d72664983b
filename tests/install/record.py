# SPDX-License-Identifier: Apache-2.0
"""Records a terminal in which docs/install.md is followed, from Apply to Uninstall.

    python -m tests.install.record --out docs/install-session.md

The commands are those of the page. A cluster of one real node with simulated devices is started for
it and ended afterwards.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

import anyio

from tests.cluster.node.node import base
from tests.cluster.site import install, parts
from tests.cluster.site.site import Site, run_site
from tests.install.installation import Installation
from tests.support.kubeclient import KubeClient
from tools.docs_text import Command

HEAD = """# A recorded installation

The commands of [Install](install.md) with their output, for readers who want to know what to
expect. Recorded by `tests/install/record.py` on Kubernetes {release} with one node of eight
simulated A100; `mine` is an overlay as the page describes.

```text
"""
_SHOWN = "deploy/kustomize/overlays/mine"


class Recorder:
    """Runs commands on the site and keeps what a terminal would show."""

    def __init__(self, installation: Installation, place: Path) -> None:
        self._installation = installation
        self._place = place
        self.lines: list[str] = []

    async def run(self, command: Command) -> None:
        """Run a command of the page; kubectl or hamictl."""
        words = [word.replace(install.DEV, str(self._place)) for word in command.words]
        if words[0] == "hamictl":
            self._add(words, await self._installation.hamictl(*words[1:]))
        else:
            self._add(words, await self._installation.site.reach.run(words, check=False))

    async def kubectl(self, line: str) -> None:
        """Run kubectl with these words."""
        words = shlex.split(line)
        self._add(words, await self._installation.site.reach.run(words, check=False))

    def _add(self, words: list[str], done: CompletedProcess[str]) -> None:
        text = f"$ {shlex.join(words)}\n{done.stdout}{done.stderr}"
        self.lines += [*text.replace(str(self._place), _SHOWN).rstrip().splitlines(), ""]
        if done.returncode:
            self.lines.append(f"(exit code {done.returncode})")


async def record(directory: Path) -> tuple[str, list[str]]:
    """Release of Kubernetes, and the lines of the terminal."""
    async with (
        run_site(Site(parts.built(), directory)) as site,
        KubeClient(site.plane.access()) as client,
    ):
        installation = Installation(site, client, 0)
        await installation.load_images()
        place = install.write_overlay(directory, "dev", installation.images)
        terminal = Recorder(installation, place)
        await terminal.kubectl(f"kubectl label node node-1 {install.NODE_LABEL}")
        for command in install.page_commands("Apply"):
            await terminal.run(command)
        await installation.ready()
        await terminal.kubectl("kubectl get pods --all-namespaces")
        for command in install.page_commands("Verify"):
            await terminal.run(command)
        for command in install.page_commands("Uninstall"):
            await terminal.run(command)
        return install.release(site.reach), terminal.lines


def main() -> int:
    """Write the page; the exit code."""
    parser = argparse.ArgumentParser(description="Record an installation by docs/install.md.")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="hr-", dir=base()) as directory:
        release, lines = anyio.run(record, Path(directory))
    out.write_text(HEAD.format(release=release) + "\n".join(lines).rstrip() + "\n```\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
