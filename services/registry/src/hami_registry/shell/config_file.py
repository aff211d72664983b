# SPDX-License-Identifier: Apache-2.0
"""Reads the device configuration file at start and again whenever it changes.

A change is detected by polling, not by notification: inode, time and size of the file that the path
resolves to now, so that the symlink swap of a mounted ConfigMap counts. An invalid file leaves the
configuration in effect unchanged and is reported as a problem until the file is valid again. Times
in seconds.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio

from hami_common.errors import SettingsInvalid
from hami_common.runtime.quarantine import Quarantine
from hami_registry.core.device_config import DeviceConfig, parse
from hami_registry.shell.metrics import Metrics

_log = logging.getLogger(__name__)

Fingerprint = tuple[str, int, int, int] | None


class ConfigFile:
    """The file, its last content and its present problem."""

    def __init__(self, path: str, *, metrics: Metrics) -> None:
        """Watch ``path``; empty: no file, the defaults apply."""
        self.path = path
        self.problem = ""
        """Reason why the present content of the file is not in use; empty when it is."""
        self._metrics = metrics
        self._seen: Fingerprint = None
        self._waiting: DeviceConfig | None = None

    def load(self) -> DeviceConfig:
        """Return the configuration at start; ``SettingsInvalid`` when the file is invalid."""
        if not self.path:
            return DeviceConfig()
        self._seen = self._fingerprint()
        return self._read()

    def reload(self) -> DeviceConfig | None:
        """Return new content that is not in use yet; ``None`` without valid new content."""
        found = self._fingerprint()
        if found != self._seen:
            self._waiting = None
            try:
                self._waiting = self._read()
            except SettingsInvalid as error:
                self._refused(error)
            self._seen = found
        return self._waiting

    def used(self) -> None:
        """Note that the configuration that ``reload`` returned is in use."""
        self._waiting = None
        self.problem = ""
        self._metrics.config_problem.set(0)
        self._metrics.config_loads.labels(outcome="ok").inc()

    async def watch(
        self, use: Callable[[DeviceConfig], None], quarantine: Quarantine, *, interval_s: float
    ) -> None:
        """Pass each new configuration to ``use``, indefinitely.

        One that ``use`` refuses (``SettingsInvalid``) is passed to it again at every poll: the
        reason may end. One that fails otherwise is quarantined, and the configuration in effect
        stays.
        """
        while self.path:
            await anyio.sleep(interval_s)
            await quarantine.run("configuration", self.path, partial(self._look, use))

    async def _look(self, use: Callable[[DeviceConfig], None]) -> None:
        config = await anyio.to_thread.run_sync(self.reload)
        if config is None:
            return
        try:
            use(config)
        except SettingsInvalid as error:
            self._refused(error)
        else:
            self.used()

    def _refused(self, error: SettingsInvalid) -> None:
        if self.problem == str(error):
            return
        self.problem = str(error)
        self._metrics.config_problem.set(1)
        self._metrics.config_loads.labels(outcome="failed").inc()
        _log.error("device configuration kept", extra={"problem": self.problem})

    def _fingerprint(self) -> Fingerprint:
        try:
            target = Path(self.path).resolve(strict=True)
            stat = target.stat()
        except OSError:
            return None
        return str(target), stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> DeviceConfig:
        try:
            text = Path(self.path).read_bytes()
        except OSError as error:
            raise SettingsInvalid(
                field=f"device_config_file {self.path}",
                problem=error.strerror or str(error),
                fix="give the path of a readable file, or none",
            ) from error
        return parse(text, name=self.path)
