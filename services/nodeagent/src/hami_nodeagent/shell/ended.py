# SPDX-License-Identifier: Apache-2.0
"""Lists for each container the owners of its region's slots that have ended.

The in-container library reclaims the memory of processes that were killed. It cannot judge those of
other PID namespaces: of a container before its restart, and of other containers with the same share
by a claim. The agent sees all processes of the host, so it lists them; format: ``process.h`` of the
library. The list is in the directory of the container's doorbell, which it sees read-only.
"""

import logging
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from hami_nodeagent.core.living import Owner, ended_text
from hami_nodeagent.core.priorities import ContainerKey
from hami_nodeagent.shell.doorbell import DIRECTORY_NAME

FILE_NAME: Final = "ended-1"

_log = logging.getLogger(__name__)


class EndedLists:
    """The lists of one node's containers. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        """``directory``: the one that containers see, see ``shell.doorbell``."""
        self._root = directory / DIRECTORY_NAME
        self._texts: dict[ContainerKey, str] = {}

    def write(self, ended: Mapping[ContainerKey, Collection[Owner]]) -> None:
        """Write the lists of these containers where they changed; blocks for writes to memory.

        Containers without the library have no directory, and get none.
        """
        for key, owners in ended.items():
            text = ended_text(owners)
            if text == self._texts.get(key, ""):
                continue
            try:
                self._replace(self._root / "_".join(key) / FILE_NAME, text)
            except OSError as error:
                extra = {"container": "/".join(key), "problem": str(error)}
                _log.warning("ended processes not listed", extra=extra)
            else:
                self._texts[key] = text
        self._texts = {key: text for key, text in self._texts.items() if key in ended}

    def _replace(self, path: Path, text: str) -> None:
        if not path.parent.is_dir():
            return
        if not text:
            path.unlink(missing_ok=True)
            return
        fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        try:
            with fresh.open("x") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
