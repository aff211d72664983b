# SPDX-License-Identifier: Apache-2.0
"""Trusted public keys from a directory, read again when a file there changes.

One PEM key per file; hidden names are skipped, because Kubernetes keeps its own links there. A file
that is not a key is reported and left out, so that the valid keys remain usable. With an empty
directory no signature is trusted.
"""

import logging
from pathlib import Path

from hami_common.errors import SettingsInvalid
from hami_common.pods.signing import Verifier

_log = logging.getLogger(__name__)


class TrustedKeys:
    """The keys of one directory."""

    def __init__(self, directory: Path) -> None:
        """Read ``directory`` now; it may appear later."""
        self._directory = directory
        self._seen: tuple[tuple[str, bytes], ...] | None = None
        self.pems: tuple[bytes, ...] = ()
        self.verifier = Verifier(())
        self.reload_if_changed()

    def reload_if_changed(self) -> bool:
        """Read the files; whether the set of trusted keys changed."""
        content = self._read()
        if content == self._seen:
            return False
        self._seen = content
        pems = []
        for name, pem in content:
            try:
                Verifier.from_pems([pem])
            except SettingsInvalid as error:
                _log.error("trusted key not usable", extra={"file": name, "problem": str(error)})
            else:
                pems.append(pem)
        self.pems = tuple(pems)
        self.verifier = Verifier.from_pems(pems)
        _log.info("trusted keys read", extra={"count": len(pems)})
        return True

    def _read(self) -> tuple[tuple[str, bytes], ...]:
        try:
            paths = sorted(path for path in self._directory.iterdir() if path.is_file())
            return tuple(
                (path.name, path.read_bytes()) for path in paths if not path.name.startswith(".")
            )
        except OSError as error:
            _log.debug("trusted keys not readable", extra={"problem": str(error)})
            return ()
