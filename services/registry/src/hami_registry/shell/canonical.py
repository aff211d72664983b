# SPDX-License-Identifier: Apache-2.0
"""Writes canonical devices: compares desired with stored records, and stores the difference.

Several replicas may do this at once. Each append is a compare-and-set on the revision of the key it
was decided on; on a conflict, re-read; usually the peer wrote the same value. A record contains the
generation and, as a header, the digest of the configuration it was made with, so that a generation
never means two configurations and grows across restarts: a replica whose digest is the newest
stored one takes over its generation, any other takes the next. Times in seconds.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

import anyio
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import Conflict, SettingsInvalid, Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.events.inventory import NodeDevices
from hami_common.ports import Bucket, Clock, Entry, Expect
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.tasks import Backoff
from hami_common.runtime.watchedfile import FileKind
from hami_registry.core.device_config import DeviceConfig, digest
from hami_registry.core.inventory import Inventory, operator_cordons, supersedes
from hami_registry.core.stranded import Holding, refusal
from hami_registry.shell.metrics import Metrics

CONFIG_DIGEST = "hami-config-digest"
DEVICE_CONFIG: Final = FileKind(
    name="device_config", title="device configuration", field="device_config_file"
)
EVENT_TYPE = "io.hami.device.changed.v1"

NOBODY: Mapping[str, Holding] = {}

_log = logging.getLogger(__name__)

NodeVendor = tuple[str, str]


class _Stored(Struct, frozen=True, kw_only=True):
    revision: int
    devices: NodeDevices | None
    """``None`` when the value does not decode: it is replaced."""


class CanonicalWriter:
    """Keeps bucket ``hami_devices`` equal to the inventory.

    A ``follow.Reader`` of that bucket.
    """

    def __init__(
        self,
        *,
        inventory: Inventory,
        bucket: Bucket,
        clock: Clock,
        metrics: Metrics,
        source: str,
        keep_cordons: bool,
        quarantine: Quarantine,
    ) -> None:
        """``source`` is the CloudEvents source.

        With ``keep_cordons``, devices that were stored as cordoned stay so until their nodes are
        seen.
        """
        self.inventory = inventory
        self._bucket = bucket
        self._clock = clock
        self._metrics = metrics
        self._source = source
        self._keep_cordons = keep_cordons
        self._quarantine = quarantine
        self._digest = digest(inventory.config)
        self._stored: dict[str, _Stored] = {}
        self._newest: tuple[int, str] = (0, "")
        """Highest generation stored, and the digest of its configuration."""
        self._settled = False
        self._dirty: dict[NodeVendor, None] = {}
        self._wake = anyio.Event()

    # --- what is stored -------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """See ``follow.Reader``."""
        return "stored-devices"

    def entry(self, entry: Entry) -> None:
        """Fold a stored record, ours or another replica's."""
        known = self._stored.get(entry.key)
        if known is not None and known.revision >= entry.revision:
            return
        self._stored[entry.key] = _Stored(revision=entry.revision, devices=None)
        subject = subjects.kv_subject(self._bucket.name, entry.key)
        devices = codec.decode_on(subject, entry.value, NodeDevices)
        self._stored[entry.key] = _Stored(revision=entry.revision, devices=devices)
        if devices.config_generation >= self._newest[0]:
            self._newest = (devices.config_generation, entry.headers.get(CONFIG_DIGEST, ""))
        if self._settled:
            self._adopt()

    def reset(self) -> None:
        """Mark every record for storing again, because the bucket is empty."""
        self._stored.clear()
        self._newest = (0, "")
        self.mark(self.inventory.keys())

    async def synced(self) -> None:
        """Settle the generation, as all stored records are known."""
        if self._settled:
            return
        self._settled = True
        generation, stored_digest = self._newest
        same = stored_digest == self._digest
        self._use_generation(max(1, generation if same else generation + 1))
        if self._keep_cordons:
            for key, stored in list(self._stored.items()):
                if stored.devices is not None:
                    attempt = partial(self._keep_cordon, stored.devices)
                    await self._quarantine.run("stored-cordon", key, attempt)

    def _keep_cordon(self, devices: NodeDevices) -> None:
        uuids = operator_cordons(self.inventory.config, devices)
        self.inventory.cordon(devices.node, uuids)

    # --- what should be stored ------------------------------------------------------------------

    def mark(self, keys: list[NodeVendor]) -> None:
        """Queue a comparison of these with the stored records."""
        for key in keys:
            self._dirty[key] = None
        self._wake.set()

    def use_config(self, config: DeviceConfig, holdings: Mapping[str, Holding] = NOBODY) -> None:
        """Publish by ``config`` from now on.

        ``SettingsInvalid``, without any change, when ``holdings`` would not fit any more.
        """
        if not config.allow_stranded:
            problem = refusal(self.inventory.stranded_by(config, holdings))
            if problem:
                raise SettingsInvalid(
                    field="device configuration", problem=problem, fix="see docs/wire.md"
                )
        before = self.inventory.generation
        if not self.inventory.configure(config):
            return
        self._digest = digest(config)
        newest, stored_digest = self._newest
        is_newest = stored_digest == self._digest and newest >= before
        self._use_generation(newest if is_newest else max(newest, before) + 1)
        _log.info("device configuration in use", extra={"generation": self.inventory.generation})
        self.mark(self.inventory.keys())

    def cordon(self, node: str, uuids: frozenset[str]) -> None:
        """Cordon exactly these devices of ``node`` for new pods."""
        if self.inventory.cordon(node, uuids):
            _log.info("cordon changed", extra={"node": node, "devices": sorted(uuids)})
            self.mark(self.inventory.keys_of(node))

    async def run(self, *, resync_s: float, retry_s: float) -> None:
        """Store differences as they arise, and all of them every ``resync_s``, indefinitely."""
        backoff = Backoff(first_s=retry_s, most_s=10 * retry_s)
        while True:
            if not self._dirty:
                self._wake = anyio.Event()
                with anyio.move_on_after(resync_s):
                    await self._wake.wait()
                if not self._dirty:
                    self.mark(self.inventory.keys())
            if await self._store_all():
                backoff.reset()
            else:
                await backoff.wait()

    async def _store_all(self) -> bool:
        """Store all marked records; returns whether none is left to retry."""
        while self._dirty:
            node, vendor = key = next(iter(self._dirty))
            del self._dirty[key]
            attempt = partial(self._store, key)
            try:
                is_stored = await self._quarantine.run(
                    "devices-to-store",
                    subjects.devices_key(node, vendor),
                    attempt,
                    passes=(Unavailable,),
                    name=("", node),
                )
            except Unavailable as error:
                self._metrics.publications.labels(outcome="failed").inc()
                _log.info("canonical devices not stored", extra={"problem": str(error)})
                self._dirty[key] = None
                return False
            if not is_stored:
                self._metrics.publications.labels(outcome="failed").inc()
        return True

    async def _store(self, node_vendor: NodeVendor) -> None:
        now_s = self._clock.now_s()
        ours = self.inventory.canonical(*node_vendor, time_s=now_s)
        key = subjects.devices_key(*node_vendor)
        stored = self._stored.get(key)
        published = stored.devices if stored else None
        is_outlived = published is not None and self.inventory.outlives(ours, published)
        if not is_outlived and not supersedes(ours, published):
            self._metrics.publications.labels(outcome="unchanged").inc()
            return
        expected = stored.revision if stored else 0
        headers = codec.event_headers(
            event_id=f"{key}/{ours.boot_id}/{ours.seq}/{expected}",
            event_type=EVENT_TYPE,
            source=self._source,
            time_s=now_s,
        )
        try:
            revision = await self._bucket.append(
                key,
                codec.encode(ours),
                headers={**headers, CONFIG_DIGEST: self._digest},
                expect=Expect(
                    subject=subjects.kv_subject(self._bucket.name, key), sequence=expected
                ),
            )
        except (Conflict, Unavailable) as error:
            # After a conflict or a lost answer, the stored record decides about the next attempt.
            await self._read_back(key)
            if isinstance(error, Unavailable):
                raise
            self._metrics.publications.labels(outcome="conflict").inc()
            self._dirty[node_vendor] = None
            return
        self._metrics.publications.labels(outcome="stored").inc()
        if (known := self._stored.get(key)) is None or known.revision < revision:
            self._stored[key] = _Stored(revision=revision, devices=ours)
            self._newest = max(self._newest, (ours.config_generation, self._digest))

    async def _read_back(self, key: str) -> None:
        entry = await self._bucket.get(key)
        # The stream may be a new one, whose revisions restart.
        self._stored.pop(key, None)
        if entry is not None:
            try:
                self.entry(entry)
            except WireInvalid as error:
                _log.warning("stored devices replaced", extra={"problem": str(error)})

    def _adopt(self) -> None:
        """Adopt a later generation that another replica gave our configuration."""
        generation, stored_digest = self._newest
        if stored_digest == self._digest and generation > self.inventory.generation:
            self._use_generation(generation)

    def _use_generation(self, generation: int) -> None:
        self.inventory.generation = generation
        self._metrics.config_generation.set(generation)
