# SPDX-License-Identifier: Apache-2.0
"""Removes the agent's files from a node, for ``hamictl uninstall``; runs after the agent has ended.

A program of its own: ``python -m hami_nodeagent remove --host DIRECTORY --config FILE``. It reads
the agent's settings, works below ``DIRECTORY`` (the host's root file system), and prints one JSON
document, also into the container's termination message.

Files that running containers have mapped stay: the in-container library, usage regions, limits and
priorities. While one process of the host maps one of them, only the plugins' sockets and CDI
specifications are removed; a later run removes the rest. Absent files are no error. It knows no
Kubernetes.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hami_common.errors import SettingsInvalid
from hami_common.runtime.settings import load
from hami_nodeagent.settings import Settings
from hami_nodeagent.shell.draplugin import REGISTRATION_SOCKET
from hami_nodeagent.shell.install import mapped_inodes
from hami_nodeagent.shell.pluginproxy import PLUGIN_SOCKETS

TERMINATION_LOG = Path("/dev/termination-log")
CDI_SPECS = "hami-*.*.*.json"
"""Names of the specifications that ``partition_answers`` writes."""
CLAIM_SPECS = f"hami-{'-'.join('?' * count for count in (8, 4, 4, 4, 12))}.*"
"""Names of the CDI specifications of claims: by the claim's uid. Unfinished ones have the suffix
``.new``."""
LINKS_MOST = 40
MESSAGE_BYTES = 4000
"""Kubelet keeps 4,096 bytes of a termination message."""


class Removal:
    """The files of one host."""

    def __init__(self, settings: Settings, host: Path) -> None:
        """``host``: the host's root file system; the settings' paths are below it."""
        self._host = host
        self._settings = settings
        self._proc = Path(settings.host_proc)
        self.removed: list[str] = []
        self.kept: list[str] = []
        self.problems: list[str] = []

    def run(self) -> bool:
        """Remove everything that no running container needs; return whether nothing is left."""
        settings = self._settings
        self._remove_files(settings.device_plugin_dir, PLUGIN_SOCKETS)
        self._remove_files(settings.partitions.cdi_dir, CDI_SPECS)
        self._remove_files(settings.dra.cdi_dir, CLAIM_SPECS)
        self._remove_files(settings.dra.registry_dir, REGISTRATION_SOCKET)
        directories = [
            settings.state_dir,
            settings.library_dir,
            settings.priority.directory,
            settings.dra.plugin_dir,
            settings.dra.region_dir,
            f"{settings.vnpu_core.library_dir}/containers",
            settings.vnpu_core.region_dir,
        ]
        found = [path for path in directories if self._here(path).exists()]
        if self._is_in_use(found):
            self.kept += found
        else:
            for path in found:
                self._remove_tree(path)
        for path in [*{str(Path(one).parent) for one in directories[:2]}, directories[3]]:
            self._remove_empty(path)
        self._remove_empty(settings.vnpu_core.library_dir)
        return not self.kept and not self.problems

    def _here(self, path: str) -> Path:
        """Return a path of the host below ``host``, with the host's symbolic links resolved."""
        parts = list(reversed(Path(path).parts[1:]))
        found, links = self._host, 0
        while parts:
            part = parts.pop()
            if part == "..":
                found = found.parent if found != self._host else found
                continue
            step = found / part
            if step.is_symlink() and links < LINKS_MOST:
                links += 1
                target = step.readlink()
                if target.is_absolute():
                    found = self._host
                parts += reversed([one for one in target.parts if one not in ("/", ".")])
                continue
            found = step
        return found

    def _files(self, paths: Sequence[str]) -> Iterator[Path]:
        for path in paths:
            for folder, _, names in os.walk(self._here(path)):
                yield from (Path(folder) / name for name in names)

    def _is_in_use(self, paths: Sequence[str]) -> bool:
        """Return whether a process maps a file below the paths; true if this is not known."""
        inodes = set()
        for file in self._files(paths):
            try:
                inodes.add(file.stat(follow_symlinks=False).st_ino)
            except OSError:
                continue
        mapped = mapped_inodes(self._proc, frozenset(inodes))
        return mapped is None or bool(mapped)

    def _remove_files(self, directory: str, pattern: str) -> None:
        for path in sorted(self._here(directory).glob(pattern)):
            try:
                path.unlink(missing_ok=True)
                self.removed.append(f"{directory}/{path.name}")
            except OSError as error:
                self.problems.append(f"{directory}/{path.name}: {error.strerror or error}")

    def _remove_tree(self, path: str) -> None:
        try:
            shutil.rmtree(self._here(path))
            self.removed.append(path)
        except OSError as error:
            self.problems.append(f"{path}: {error.strerror or error}")

    def _remove_empty(self, path: str) -> None:
        try:
            self._here(path).rmdir()
        except OSError:
            return  # absent, or not empty
        self.removed.append(path)


def main(argv: Sequence[str]) -> int:
    """Run the program; exits with 0 when nothing failed, files in use included."""
    parser = argparse.ArgumentParser(prog="hami_nodeagent remove")
    parser.add_argument("--host", type=Path, required=True, help="the host's root file system")
    flags, rest = parser.parse_known_args(argv)
    try:
        settings = load(Settings, service="nodeagent", argv=rest).settings
    except SettingsInvalid as error:
        sys.stderr.write(f"{error}\n")
        return 2
    removal = Removal(settings, flags.host)
    removal.run()
    report = {"removed": removal.removed, "kept": removal.kept, "problems": removal.problems}
    text = json.dumps(report)
    sys.stdout.write(f"{text}\n")
    if TERMINATION_LOG.exists():
        TERMINATION_LOG.write_text(text[:MESSAGE_BYTES], encoding="utf-8")
    return 1 if removal.problems else 0
