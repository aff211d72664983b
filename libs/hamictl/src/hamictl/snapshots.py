# SPDX-License-Identifier: Apache-2.0
"""Reads snapshots of a scheduler, with their quotas and queues."""

from collections.abc import Mapping
from pathlib import Path

from hami_common.errors import HamiError
from hami_common.events import codec
from hami_core.planning.whatif import Governed
from hami_core.quota.resourcequota import Asker
from hami_core.replay.snapshot import Snapshot, load_quotas
from hamictl.errors import InputRefused
from hamictl.inputs import read


def read_snapshot(path: Path) -> Snapshot:
    """Read a file of ``hamictl snapshot`` or of a scheduler's ``GET /v1/snapshot``."""
    return decode_snapshot(read(path), what=str(path))


def decode_snapshot(body: bytes, *, what: str) -> Snapshot:
    """Decode a snapshot; ``what`` names it in errors."""
    try:
        return codec.decode(body, Snapshot, what=what)
    except HamiError as error:
        raise InputRefused(str(error)) from error


def governed_by(snapshot: Snapshot, askers: Mapping[str, Asker]) -> Governed:
    """Load a snapshot's quotas and queues for the requests of ``askers``."""
    try:
        return Governed(load_quotas(snapshot), askers)
    except HamiError as error:
        raise InputRefused(str(error)) from error
