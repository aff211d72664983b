# SPDX-License-Identifier: Apache-2.0
"""Keeps the node's ResourceSlices in the API server equal to ``core.slices``.

Kubelet deletes the slices of its node when it starts, and those of a driver some time after its
plugin has gone; the watch shows it and they are created again. There is at most one write in
``dra.write_s``. Nothing is written before the ledger is known: values without the shares of pods
would be too large. While the bus is unavailable, the last known records count.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from hami_common.apipath import api_path
from hami_common.dra import names
from hami_common.errors import Conflict, Denied, HamiError, NotFound
from hami_common.ports import KubeApi
from hami_common.runtime.tasks import Backoff
from hami_common.units import whole
from hami_nodeagent.core.slices import (
    SliceWrite,
    holdings_of,
    monitor_write,
    next_write,
    pages_of,
    pci_bus_id,
)
from hami_nodeagent.shell.site import Site

PATH = api_path("apis", names.GROUP, names.VERSION, "resourceslices")
_RETRY_S = 1.0
_RETRY_MOST_S = 30.0
_REVISION_MOST = 1 << 63

_log = logging.getLogger(__name__)


class SliceKeeper:
    """Writes the slices of one node."""

    def __init__(self, *, site: Site, kube: KubeApi) -> None:
        self._site = site
        self._picture = site.picture
        self._kube = kube
        self._stored: dict[str, dict[str, Any]] = {}
        self._is_listed = False
        self._owner_uid = ""
        self._roots: dict[str, str] = {}
        self._sysfs = Path(site.settings.drivers.nvidia.sysfs_root)

    async def run(self) -> None:
        """Follow and write until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow)
            await self._keep()

    async def _follow(self) -> None:
        selector = f"spec.nodeName={self._picture.node},spec.driver={names.DRIVER}"
        async with self._kube.list_watch(PATH, field_selector=selector) as events:
            async for event in events:
                if event.type == "SYNCED":
                    self._is_listed = True
                else:
                    found = _decoded(event.raw)
                    name = found["metadata"]["name"]
                    take = partial(self._take, event.type, name, found)
                    self._site.quarantine.call("slice", name, take)
                self._picture.note_change()

    def _take(self, kind: str, name: str, found: dict[str, Any]) -> None:
        known = self._stored.get(name)
        if kind == "DELETED":
            if known is None or known["metadata"]["uid"] == found["metadata"]["uid"]:
                self._stored.pop(name, None)
        elif known is None or _revision(known) <= _revision(found):
            self._stored[name] = found

    async def _keep(self) -> None:
        backoff = Backoff(first_s=_RETRY_S, most_s=_RETRY_MOST_S)
        while True:
            changed = self._picture.changed
            try:
                write = await self._wanted()
                if write is None:
                    await changed.wait()
                    continue
                await self._apply(write)
            except HamiError as error:
                level = logging.ERROR if isinstance(error, Denied) else logging.WARNING
                _log.log(level, "ResourceSlices not written", extra={"problem": str(error)})
                await backoff.wait()
            else:
                backoff.reset()
                await self._site.clock.sleep(self._site.settings.dra.write_s)

    async def _wanted(self) -> SliceWrite | None:
        picture, view = self._picture, self._picture.view
        if not (self._is_listed and picture.ledger_known and picture.canonical_by_vendor):
            return None
        if not self._owner_uid:
            node = await self._kube.get(api_path("api", "v1", "nodes", picture.node))
            self._owner_uid = msgspec.json.decode(node, type=dict)["metadata"]["uid"]
        await anyio.to_thread.run_sync(self._find_roots)
        pages = pages_of(
            view.devices_by_uuid.values(),
            holdings_of(
                (entry.record for entry in picture.entries_by_uid.values()),
                picture.allocated_by_uid,
            ),
            faulty=view.faulty,
            sound=view.sound,
            pcie_roots=self._roots,
            fault_effect=self._site.settings.dra.fault_effect,
        )
        monitor = names.monitor_slice(picture.node)
        shares = {name: one for name, one in self._stored.items() if name != monitor}
        return next_write(picture.node, pages, shares, owner_uid=self._owner_uid) or monitor_write(
            picture.node,
            self._stored.get(monitor),
            is_on=self._site.settings.dra.monitor,
            owner_uid=self._owner_uid,
        )

    def _find_roots(self) -> None:
        """Find the PCIe root of each new device, by which drivers of NICs name it, too."""
        for device in self._picture.view.devices_by_uuid.values():
            if device.uuid not in self._roots:
                self._roots[device.uuid] = pcie_root(self._sysfs, pci_bus_id(device.bus_id))

    async def _apply(self, write: SliceWrite) -> None:
        path, body = f"{PATH}/{write.name}", msgspec.json.encode(write.slice)
        try:
            if write.verb == "delete":
                await self._kube.delete(path)
                self._stored.pop(write.name, None)
            elif write.verb == "create":
                self._stored[write.name] = _decoded(await self._kube.create(PATH, body))
            else:
                self._stored[write.name] = _decoded(await self._kube.replace(path, body))
        except NotFound:
            self._stored.pop(write.name, None)
        except Conflict:
            self._stored[write.name] = _decoded(await self._kube.get(path))
        else:
            self._site.metrics.claims.slice_writes.labels(verb=write.verb).inc()
            _log.info("ResourceSlice written", extra={"verb": write.verb, "slice": write.name})


def _decoded(raw: bytes) -> dict[str, Any]:
    return msgspec.json.decode(raw, type=dict[str, Any])


def _revision(stored: dict[str, Any]) -> int:
    return whole(stored["metadata"].get("resourceVersion", ""), most=_REVISION_MOST) or 0


def pcie_root(sysfs: Path, bus_id: str) -> str:
    """Return the PCIe root of a device, such as ``pci0000:00``; empty where it is not known."""
    if not bus_id:
        return ""
    try:
        parts = (sysfs / "bus/pci/devices" / bus_id).resolve(strict=True).parts
    except OSError:
        return ""
    return next((part for part in parts if part.startswith("pci") and ":" in part), "")


async def withdraw(site: Site, kube: KubeApi) -> None:
    """Delete the slices of an earlier run, after DRA was switched off; retries until it is done.

    Kubelet deletes them, too, 30 s after the plugin has gone; so an agent that lost the right to do
    it only reports that.
    """
    if not site.checkpoint.has_claims:
        return
    backoff = Backoff(first_s=_RETRY_S, most_s=_RETRY_MOST_S)
    selector = f"spec.nodeName={site.node},spec.driver={names.DRIVER}"
    while True:
        try:
            for page in await kube.list_pages(PATH, field_selector=selector):
                for item in _decoded(page).get("items") or ():
                    name = item["metadata"]["name"]
                    delete = partial(kube.delete, f"{PATH}/{name}")
                    await site.quarantine.run("slice", name, delete, passes=(HamiError,))
        except Denied as error:
            _log.warning("ResourceSlices not deleted", extra={"problem": str(error)})
        except NotFound:
            pass
        except HamiError as error:
            _log.warning("ResourceSlices not deleted", extra={"problem": str(error)})
            await backoff.wait()
            continue
        await anyio.to_thread.run_sync(partial(_end, site))
        return


def _end(site: Site) -> None:
    site.checkpoint.end_claims()
