# SPDX-License-Identifier: Apache-2.0
"""Says how a running site is used: kubectl, containerd's images, commands on the node.

Also from another process than the one that runs the site: everything is in one Struct, which
``./dev cluster`` keeps in its state file.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import anyio
from msgspec import Struct

from hami_common.errors import Unavailable


class Reach(Struct, frozen=True, kw_only=True):
    """Access to one site as its administrator."""

    programs: str
    """Directory of kubectl."""
    kubeconfig: str
    node: str
    on_node: tuple[str, ...]
    """Start of a command line that runs the rest of it on the node."""
    ctr: tuple[str, ...]
    """Start of a command line of ``ctr`` for kubelet's images and containers."""

    async def run(
        self, command: Sequence[str], *, check: bool = True, stdin: bytes = b""
    ) -> CompletedProcess[str]:
        """Run a command with the administrator's KUBECONFIG and kubectl in its path.

        ``Unavailable`` with its output when it fails, unless ``check`` is false.
        """
        path = f"{self.programs}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**os.environ, "KUBECONFIG": self.kubeconfig, "PATH": path}
        done = await anyio.run_process(list(command), check=False, env=environment, input=stdin)
        text = CompletedProcess(
            list(command), done.returncode, done.stdout.decode(), done.stderr.decode()
        )
        if check and done.returncode:
            detail = f"exit code {done.returncode}: {text.stderr or text.stdout}"
            raise Unavailable(peer=" ".join(command), detail=detail)
        return text

    async def kubectl(
        self, *arguments: str, check: bool = True, stdin: bytes = b""
    ) -> CompletedProcess[str]:
        """Run kubectl as the administrator."""
        return await self.run([f"{self.programs}/kubectl", *arguments], check=check, stdin=stdin)

    async def load(self, archive: Path) -> None:
        """Import the images of an OCI archive into the node's containerd."""
        words = ("images", "import", "--digests", str(archive))
        await self.run([*self.ctr, *words])

    async def images(self) -> frozenset[str]:
        """Names of all images of the node."""
        listed = await self.run([*self.ctr, "images", "list", "--quiet"])
        return frozenset(listed.stdout.split())
