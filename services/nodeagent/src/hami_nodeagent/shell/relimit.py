# SPDX-License-Identifier: Apache-2.0
"""Keeps limits files equal to the pods' signed allocations while containers run (design D8).

If the limits file is in a volume of the pod, kubelet rewrites it from the annotation, and this
module only reads it. If the agent mounted the file, because the pod did not pass our webhook or has
its share by a ResourceClaim, this module rewrites it when the pod's verified annotation has other
shares than the file: after a resize, including a resize while the agent was not running. A claim
that a user wrote has no annotation; its ledger record counts. Memory in MiB.
"""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import anyio.to_thread

from hami_common.errors import WireInvalid
from hami_common.model.placement import ContainerShares
from hami_common.pods import limits
from hami_common.pods.limits import DeviceLimit
from hami_common.runtime.quarantine import sift
from hami_nodeagent.core.grants import Grant, shares_of
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.shell.allocate import GrantKeeper
from hami_nodeagent.shell.site import Site

_DOWNWARD_API = "kubernetes.io~downward-api"
_MOST_BYTES = 65536
_LOOK_S = 5.0

_log = logging.getLogger(__name__)


def limits_path(pods_dir: Path, agent_file: Path, pod: PodFacts, container: str) -> Path:
    """Return the host path of the container's limits file: in the pod's volume or the agent's."""
    volume = pod.limits_volumes.get(container)
    if volume is None:
        return agent_file
    return pods_dir / pod.uid / "volumes" / _DOWNWARD_API / volume / limits.FILE_NAME


def read_limits(path: Path) -> dict[str, DeviceLimit]:
    """Return the limits in a file, by device; empty if it is unreadable."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode()
        found = limits.decode(text)
    except (OSError, ValueError, WireInvalid):
        return {}
    return {one.uuid: one for one in found.devices}


class Relimiter:
    """Rewrites the limits files that this agent mounted."""

    def __init__(self, *, site: Site, keeper: GrantKeeper) -> None:
        self._site = site
        self._picture = site.picture
        self._keeper = keeper

    async def run(self) -> None:
        """Compare and rewrite until cancelled."""
        while True:
            changed = self._picture.changed
            await self.look()
            await self._picture.wait_change(changed, _LOOK_S)

    async def look(self) -> None:
        """Compare every grant's file with its pod once, and rewrite it where they differ."""
        for grant in tuple(self._picture.grants):
            key = f"{grant.pod_uid}/{grant.container}"
            if self._site.quarantine.is_due("limits", key):
                await self._site.quarantine.run(
                    "limits",
                    key,
                    partial(self._look_at, grant),
                    name=(grant.namespace, grant.pod),
                    is_retried=False,
                )

    async def _look_at(self, grant: Grant) -> None:
        text = self._wanted(grant)
        path = self._site.checkpoint.limits_file(grant.pod_uid, grant.container)
        if text is None or not await anyio.to_thread.run_sync(_differs, path, text):
            return
        try:
            await self._keeper.write_limits(grant, text)
        except OSError as error:
            _log.warning("limits not rewritten", extra={"problem": str(error)})
        else:
            _log.info(
                "limits rewritten",
                extra={"pod": f"{grant.namespace}/{grant.pod}", "container": grant.container},
            )

    def _wanted(self, grant: Grant) -> str | None:
        """Return the file's text; ``None`` if we mounted none or no verified share exists."""
        shares = shares_of(grant, self._shares_of(grant))
        if shares is None:
            return None
        return limits.encode(
            limits.limits_of(
                shares,
                allocation_id=grant.allocation_id,
                core_policy=self._site.settings.core_policy,
            )
        )

    def _shares_of(self, grant: Grant) -> tuple[ContainerShares, ...]:
        """Return the shares in force: of a claim of a user's the ledger's, else the pod's."""
        if grant.is_claim:
            entry = self._picture.entries_by_uid.get(grant.pod_uid)
            is_live = entry is not None and entry.record.allocation_id == grant.allocation_id
            if entry is None or not is_live:
                return ()
            return entry.record.limits or entry.record.containers
        pod = self._picture.pods.find(grant.pod_uid)
        if pod is None or pod.signed is None or not self._picture.pods.is_alive(pod.uid):
            return ()
        is_ours = bool(grant.claim) or grant.container not in pod.limits_mounted
        is_of_grant = pod.signed.allocation_id == grant.allocation_id
        return pod.signed.placement.containers if is_ours and is_of_grant else ()


def _differs(path: Path, text: str) -> bool:
    """Return true if the file exists with another content."""
    try:
        return path.read_bytes() != text.encode()
    except OSError:
        return False


def read_all(
    paths: Iterable[tuple[tuple[str, str], Path]],
) -> dict[tuple[str, str], dict[str, DeviceLimit]]:
    """Return the limits in the files, per container; none for an unreadable file."""
    return {item[0]: found for item, found in sift(paths, lambda item: read_limits(item[1]))[0]}
