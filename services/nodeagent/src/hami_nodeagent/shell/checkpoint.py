# SPDX-License-Identifier: Apache-2.0
"""Files that must survive a restart of the agent: grants, last canonical devices, limits files.

Every file is written beside its place and renamed, so a reader sees the old or the new one. It is
synced before, unless kubelet's next call writes it again after a failure of the host.
A file that does not decode is kept under another name and reported, never fatal: grants are then
learnt again from kubelet's list. Calls block; the caller runs them in a thread.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
from msgspec import Struct

from hami_common.errors import WireInvalid
from hami_common.events.codec import decode, encode
from hami_common.events.inventory import NodeDevices
from hami_common.pods import limits
from hami_nodeagent.core.grants import FILE_VERSION, Grant, GrantBook, GrantFile
from hami_nodeagent.core.modes import FILE_VERSION as MODES_VERSION
from hami_nodeagent.core.modes import ModesFile
from hami_nodeagent.core.partition_specs import Rendering
from hami_nodeagent.core.partitions import FILE_VERSION as JOURNAL_VERSION
from hami_nodeagent.core.partitions import JournalFile
from hami_nodeagent.core.resourceclaims import FILE_VERSION as CLAIMS_VERSION
from hami_nodeagent.core.resourceclaims import Prepared

_log = logging.getLogger(__name__)

S = TypeVar("S", bound=Struct)


class DevicesFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Last canonical devices, so that kubelet is served after a reboot without the bus."""

    version: int
    vendors: tuple[NodeDevices, ...] = ()


class Checkpoint:
    """The agent's state directory."""

    def __init__(self, directory: Path) -> None:
        """Keep everything below ``directory``; made when it is missing."""
        directory.mkdir(parents=True, exist_ok=True)
        self._grants = directory / "grants.json"
        self._devices = directory / "devices.json"
        self._limits = directory / "limits"
        self._partitions = directory / "partitions.json"
        self._modes = directory / "modes.json"
        self._renderings = directory / "renderings"
        self._claims = directory / "claims"
        self.devices_turn = anyio.Lock()
        """Held while devices are collected and stored: vendors do so concurrently, and the last
        file written must have the newest devices of each."""

    def load_grants(self) -> GrantBook:
        """The grants of the last run."""
        file = _load(self._grants, GrantFile)
        return GrantBook(file.grants if file is not None and file.version == FILE_VERSION else ())

    def save_grants(self, file: GrantFile) -> None:
        """Store the grants; ``OSError`` when that is not possible."""
        _write(self._grants, encode(file))

    def load_devices(self) -> tuple[NodeDevices, ...]:
        """The devices of the last run."""
        file = _load(self._devices, DevicesFile)
        return file.vendors if file is not None and file.version == FILE_VERSION else ()

    def save_devices(self, vendors: tuple[NodeDevices, ...]) -> None:
        """Store the canonical devices of all vendors."""
        _write(self._devices, encode(DevicesFile(version=FILE_VERSION, vendors=vendors)))

    def limits_file(self, pod_uid: str, container: str) -> Path:
        """Return the path of a container's limits file, if this agent wrote it."""
        return self._limits / pod_uid / container / limits.FILE_NAME

    def load_partitions(self) -> JournalFile | None:
        """The journal of partitions; ``None`` when there is none that can be read."""
        file = _load(self._partitions, JournalFile)
        return file if file is not None and file.version == JOURNAL_VERSION else None

    def save_partitions(self, file: JournalFile) -> None:
        """Store the journal of partitions."""
        _write(self._partitions, encode(file))

    def load_modes(self) -> ModesFile | None:
        """The journal of modes; ``None`` when there is none that can be read."""
        file = _load(self._modes, ModesFile)
        return file if file is not None and file.version == MODES_VERSION else None

    def save_modes(self, file: ModesFile) -> None:
        """Store the journal of modes."""
        _write(self._modes, encode(file))

    def limits_directory(self, grant: Grant) -> Path:
        """Return the directory to mount with a container's limits file."""
        return self._limits / grant.pod_uid / grant.container

    def write_limits(self, grant: Grant, text: str, *, is_synced: bool = True) -> Path:
        """Put a container's limits file on the host; returns the directory to mount."""
        directory = self.limits_directory(grant)
        directory.mkdir(parents=True, exist_ok=True)
        for part in (self._limits, directory.parent, directory):
            part.chmod(0o755)  # any user of a container reads it
        _write(directory / limits.FILE_NAME, text.encode(), mode=0o644, is_synced=is_synced)
        return directory

    def load_renderings(self) -> tuple[Rendering, ...]:
        """Return the stored renderings of containers with partitions."""
        files = sorted(self._renderings.glob("*/*.json"))
        found = [_load(path, Rendering) for path in files]
        return tuple(one for one in found if one is not None)

    def save_rendering(self, rendering: Rendering) -> None:
        """Store the rendering of a container."""
        directory = self._renderings / rendering.pod_uid
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / f"{rendering.container}.{rendering.vendor}.json", encode(rendering))

    def remove_renderings(self, is_kept: Callable[[str], bool]) -> None:
        """Remove what all pods (by uid) but those kept were given."""
        if self._renderings.is_dir():
            for directory in self._renderings.iterdir():
                if not is_kept(directory.name):
                    shutil.rmtree(directory, ignore_errors=True)

    def load_claims(self) -> tuple[Prepared, ...]:
        """Return the prepared claims of the last run."""
        files = sorted(self._claims.glob("*.json"))
        found = [_load(path, Prepared) for path in files]
        return tuple(one for one in found if one is not None and one.version == CLAIMS_VERSION)

    def save_claim(self, claim: Prepared) -> None:
        """Store a prepared claim."""
        _write(self._claims / f"{claim.uid}.json", encode(claim))

    def remove_claim(self, uid: str, owner: str) -> None:
        """Remove a claim and the limits files of ``owner``; absent ones are no error."""
        shutil.rmtree(self._limits / owner, ignore_errors=True)
        _remove(self._claims / f"{uid}.json")

    @property
    def has_claims(self) -> bool:
        """Return whether claims were served on this node, by this run or an earlier one."""
        return self._claims.is_dir()

    def begin_claims(self) -> None:
        """Note that claims are served on this node."""
        self._claims.mkdir(exist_ok=True)

    def end_claims(self) -> None:
        """Note that claims are served no more; has no effect while prepared ones are left."""
        if not any(self._claims.glob("*.json")):
            shutil.rmtree(self._claims, ignore_errors=True)

    def write_spec(self, path: Path, data: bytes, *, is_synced: bool = True) -> None:
        """Put a CDI spec where the container runtime reads it; one that is the same stays."""
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, data, mode=0o644, is_synced=is_synced)

    def remove_spec(self, path: Path) -> None:
        """Remove a CDI spec; an absent one is no error."""
        _remove(path)

    def remove_limits(self, is_kept: Callable[[str], bool]) -> int:
        """Remove the limits of all pods (by uid) but those kept; how many were removed."""
        removed = 0
        if self._limits.is_dir():
            for directory in self._limits.iterdir():
                if not is_kept(directory.name):
                    shutil.rmtree(directory, ignore_errors=True)
                    removed += 1
        return removed


def _load(path: Path, file_type: type[S]) -> S | None:
    try:
        return decode(path.read_bytes(), file_type, what=str(path))
    except FileNotFoundError:
        return None
    except (OSError, WireInvalid) as error:
        _log.error("state file not readable, set aside", extra={"problem": str(error)})
        try:
            path.replace(path.with_suffix(".unreadable"))
        except OSError:
            _log.warning("state file could not be set aside", extra={"file": str(path)})
        return None


def _beside(path: Path) -> Path:
    """Return where a file is written before it is renamed into its place."""
    return path.with_suffix(".new")


def _remove(path: Path) -> None:
    """Remove a file, and what a killed writer left beside it."""
    for file in (path, _beside(path)):
        file.unlink(missing_ok=True)


def _write(path: Path, data: bytes, *, mode: int = 0o600, is_synced: bool = True) -> None:
    fresh = _beside(path)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), mode)
        if is_synced:
            os.fsync(file.fileno())
    fresh.replace(path)
    if not is_synced:
        return
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
