# SPDX-License-Identifier: Apache-2.0
"""A journal of changes, so that the state survives a restart of the process.

One JSON line per change, written without buffering before the client gets its response; a torn last
line (the process was killed while writing) is dropped. Opening compacts the file to live objects.
History does not survive, so watches from before a restart get 410, as with a real server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.store import Change, Store, encode


class _Line(msgspec.Struct, kw_only=True):
    revision: int
    key: str
    op: Literal["put", "remove", "revision"]
    obj: Obj


class Journal:
    """The open journal of one store."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def open(self, store: Store) -> None:
        """Load what the file holds into the store, compact it, and follow the store."""
        revision = self._load(store) if self._path.exists() else 0
        store.forget_history(revision)
        fresh = self._path.with_suffix(f"{self._path.suffix}.new")
        with fresh.open("wb") as file:
            file.write(self._line(store.revision, "", "revision", {}))
            for key, table in store.tables.items():
                for stored in table.rows.values():
                    file.write(self._line(stored.revision, key, "put", stored.obj))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        self._file = self._path.open("ab", buffering=0)
        store.on_change.append(self._record)

    def _load(self, store: Store) -> int:
        decoder = msgspec.json.Decoder(_Line)
        revision = 0
        latest: dict[tuple[str, str, str], _Line] = {}
        for raw in self._path.read_bytes().split(b"\n"):
            if not raw:
                continue
            try:
                line = decoder.decode(raw)
            except msgspec.DecodeError:
                break
            revision = max(revision, line.revision)
            if line.op == "revision":
                continue
            metadata = line.obj["metadata"]
            name = (line.key, metadata.get("namespace", ""), metadata["name"])
            if line.op == "remove":
                latest.pop(name, None)
            else:
                latest[name] = line
        for line in latest.values():
            if line.key in store.tables:
                store.load(line.key, line.obj)
        return revision

    @staticmethod
    def _line(revision: int, key: str, op: Literal["put", "remove", "revision"], obj: Obj) -> bytes:
        return encode(_Line(revision=revision, key=key, op=op, obj=obj)) + b"\n"

    def _record(self, key: str, change: Change) -> None:
        if self._file is None:
            return
        if change.type == "DELETED":
            metadata = change.new.obj["metadata"]
            kept = {k: metadata[k] for k in ("namespace", "name") if k in metadata}
            self._file.write(self._line(change.revision, key, "remove", {"metadata": kept}))
        else:
            self._file.write(self._line(change.revision, key, "put", change.new.obj))

    def close(self) -> None:
        """Stop recording."""
        if self._file is not None:
            self._file.close()
            self._file = None
