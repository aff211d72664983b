# SPDX-License-Identifier: Apache-2.0
"""Reads files that an operator names; the modules that parse them decide their meaning."""

from pathlib import Path

from hamictl.errors import InputRefused


def read(path: Path) -> bytes:
    """Return a file's content; ``InputRefused`` names the file and the reason."""
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise InputRefused(message) from error
