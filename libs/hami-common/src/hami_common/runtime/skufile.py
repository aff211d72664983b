# SPDX-License-Identifier: Apache-2.0
"""Holds the catalog of SKUs of a file, and reads the file again when it changes.

A change is detected as for settings files: by the SHA-256 of the content, so that the symlink swap
of a mounted ConfigMap counts; two equal reads in a row show that the file is complete. An invalid
file stops the start; later it leaves the last valid catalog in force, and is reported. Webhook and
registry read the same file.
"""

import logging
from pathlib import Path

import anyio.to_thread
from prometheus_client import CollectorRegistry, Gauge, Info

from hami_common.errors import SettingsInvalid
from hami_common.ports import Clock
from hami_common.runtime.settings import digest_of
from hami_common.skus import catalog
from hami_common.skus.catalog import SkuCatalog
from hami_common.vendors.catalog import Catalog

_log = logging.getLogger(__name__)


class Metrics:
    """Metrics of the catalog, the same in each service that reads it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.info = Info(
            "hami_skus",
            "SHA-256 of the catalog of SKUs in force; empty without a file.",
            registry=registry,
        )
        self.valid = Gauge(
            "hami_skus_file_valid",
            "1 while the catalog of SKUs in the file is in force; 0 while an earlier one is.",
            registry=registry,
        )


class SkuFileWatch:
    """The catalog in force, and the problem of the current file."""

    def __init__(self, path: str, *, vendors: Catalog, registry: CollectorRegistry) -> None:
        """Read ``path``; empty: a catalog without SKUs. ``SettingsInvalid``: it is invalid."""
        self.problem = ""
        """Reason for which the current file is not in force; empty when it is."""
        self._path = Path(path) if path else None
        self._vendors = vendors
        self._metrics = Metrics(registry)
        self.catalog = catalog.empty(vendors) if self._path is None else self._read(self._path)
        self._seen = self._judged = self.catalog.digest
        self._show()

    async def watch(self, clock: Clock, *, every_s: float) -> None:
        """Poll the file until cancelled; returns at once when there is none."""
        while self._path is not None and every_s > 0:
            await clock.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Read the file once; apply it when two reads are equal and it is new."""
        if self._path is None:
            return
        content, problem = await anyio.to_thread.run_sync(_content, self._path)
        digest = digest_of(content) if content is not None else ""
        before, self._seen = self._seen, digest
        if digest != before or digest == self._judged:
            return
        self._judged = digest
        try:
            if content is None:
                raise _unreadable(self._path, problem)
            found = catalog.parse(content, vendors=self._vendors, digest=digest)
            found.require_successor_of(self.catalog)
        except SettingsInvalid as error:
            self.problem = str(error)
            _log.error(
                "catalog of SKUs invalid, last valid one kept", extra={"problem": self.problem}
            )
        else:
            self.catalog, self.problem = found, ""
            _log.info("catalog of SKUs reloaded", extra={"digest": digest, "skus": len(found.skus)})
        self._show()

    def _read(self, path: Path) -> SkuCatalog:
        content, problem = _content(path)
        if content is None:
            raise _unreadable(path, problem)
        return catalog.parse(content, vendors=self._vendors, digest=digest_of(content))

    def _show(self) -> None:
        self._metrics.valid.set(not self.problem)
        self._metrics.info.info({"digest": self.catalog.digest})


def _content(path: Path) -> tuple[bytes | None, str]:
    """Return the file's content, or why it cannot be read."""
    try:
        return path.read_bytes(), ""
    except OSError as error:
        return None, error.strerror or str(error)


def _unreadable(path: Path, problem: str) -> SettingsInvalid:
    return SettingsInvalid(
        field="skus_file",
        problem=f"{str(path)!r}: {problem}",
        fix="give the path of a TOML file, see docs/skus.md",
    )
