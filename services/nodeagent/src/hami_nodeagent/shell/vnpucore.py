# SPDX-License-Identifier: Apache-2.0
"""Gives soft shares of Ascend chips hami-vnpu-core, the vendor's in-container library on the host.

The agent does not ship the library: HAMi's Ascend plugin or an administrator installs it. Chips
offer soft shares only while its files exist; without them a soft share is refused, because nothing
would limit it. With ``enforcement = "none"`` soft shares are given without the library. Calls that
touch files block; the caller runs them in a thread. Paths are those of the host, which the agent
sees under the same paths.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import anyio.to_thread
from msgspec.structs import replace

from hami_common.model.placement import Share
from hami_common.vendors import ascend
from hami_common.vendors.protocol import BindMount
from hami_nodeagent.drivers.protocol import Inventory
from hami_nodeagent.settings import Settings
from hami_nodeagent.shell.install import PRELOAD_PATH

VNPU_CORE = "hami-vnpu-core"
"""Name of the library in grants."""
SOFT, WHOLE = "soft", "whole"
_PRELOAD = "ld.so.preload"
_MOST_BYTES = 4096
_SHARED_MODE = 0o777
"""Containers run as any user and write their accounts."""
_FIX = (
    "install hami-vnpu-core there, correct vnpu_core.library_dir and vnpu_core.region_dir, or set "
    "drivers.vendors.ascend.soft_shares to false"
)


class VnpuCore:
    """hami-vnpu-core on this node."""

    def __init__(self, settings: Settings) -> None:
        self._library_dir = Path(settings.vnpu_core.library_dir)
        self._region_dir = Path(settings.vnpu_core.region_dir)
        self._containers = self._library_dir / "containers"
        self.is_wanted = settings.enforcement == "libvgpu"

    def problem(self) -> str:
        """Return why the library cannot limit a container, with the fix; empty if it can.

        The preload file must name libraries of hami-vnpu-core, and each must exist.
        """
        preload = self._library_dir / _PRELOAD
        try:
            with preload.open("rb") as file:
                lines = file.read(_MOST_BYTES).decode("utf-8", "replace").split()
        except OSError as error:
            return f"{preload}: {error.strerror or error}; {_FIX}"
        libraries = [PurePosixPath(line) for line in lines]
        if not libraries:
            return f"{preload} names no library; {_FIX}"
        for library in libraries:
            if not library.is_relative_to(ascend.LIBRARY_DIR) or ".." in library.parts:
                return f"{preload} names {library}, not a file below {ascend.LIBRARY_DIR}; {_FIX}"
            on_host = self._library_dir / library.relative_to(ascend.LIBRARY_DIR)
            if not on_host.is_file():
                return f"{on_host}, which {preload} names, is missing; {_FIX}"
        if not self._region_dir.is_dir():
            return f"{self._region_dir} is not a directory; {_FIX}"
        return ""

    async def review(self, inventory: Inventory) -> Inventory:
        """Offer soft chips as whole ones, with the reason, while the library is missing."""
        if not self.is_wanted or all(facts.mode != SOFT for facts in inventory.devices):
            return inventory
        problem = await anyio.to_thread.run_sync(self.problem)
        if not problem:
            return inventory
        return replace(
            inventory,
            devices=tuple(
                replace(facts, mode=WHOLE) if facts.mode == SOFT else facts
                for facts in inventory.devices
            ),
            problems=(*inventory.problems, f"soft shares are not offered: {problem}"),
        )

    def is_for(self, shares: Sequence[Share]) -> bool:
        """Return whether a container with these shares of one vendor needs the library."""
        return self.is_wanted and any(ascend.is_soft_share(share) for share in shares)

    def limits(self, shares: Sequence[Share]) -> bool:
        """Return whether the library limits all of these shares: it supports one device."""
        return self.is_for(shares) and len(shares) == 1

    def mounts(self, pod_uid: str, container: str) -> tuple[BindMount, ...]:
        """Create the container's directory and return its mounts; ``OSError`` if unwritable."""
        own = self._containers / f"{pod_uid}_{container}"
        self._containers.mkdir(exist_ok=True)
        own.mkdir(exist_ok=True)
        for directory in (own, self._region_dir):
            directory.chmod(_SHARED_MODE)
        return (
            _mount(self._library_dir, ascend.LIBRARY_DIR),
            _mount(self._library_dir / _PRELOAD, PRELOAD_PATH),
            _mount(self._region_dir, ascend.REGION_DIR, read_only=False),
            _mount(own, ascend.SHARED_DIR, read_only=False),
        )

    def tidy(self, is_kept: Callable[[str], bool]) -> None:
        """Remove the directories of pods (by uid) that are not kept."""
        try:
            found = list(self._containers.iterdir())
        except OSError:
            return  # no container of this node ever had a soft share
        for directory in found:
            uid, has_container, _ = directory.name.partition("_")
            if has_container and not is_kept(uid):
                shutil.rmtree(directory, ignore_errors=True)


def _mount(path: Path, inside: str, *, read_only: bool = True) -> BindMount:
    return BindMount(host_path=str(path), container_path=inside, read_only=read_only)
