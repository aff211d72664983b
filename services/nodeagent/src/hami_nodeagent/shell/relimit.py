# SPDX-License-Identifier: Apache-2.0
"""Keeps limits files equal to the pods' signed allocations while containers run (design D8).

If the limits file is in a volume of the pod, kubelet rewrites it from the annotation, and this
module only reads it. If the agent mounted the file, because the pod did not pass our webhook, this
module rewrites it when the pod's verified annotation has other shares than the file: after a
resize, including a resize while the agent was not running. Memory in MiB.
"""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import anyio.to_thread

from hami_common.errors import WireInvalid
from hami_common.pods import limits
from hami_common.pods.limits import DeviceLimit
from hami_common.runtime.quarantine import sift
from hami_nodeagent.core.grants import Grant
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
        pod = self._picture.pods.find(grant.pod_uid)
        if pod is None or not self._picture.pods.is_alive(pod.uid):
            return
        text = self._wanted(grant, pod)
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
                extra={"pod": pod.title, "container": grant.container},
            )

    def _wanted(self, grant: Grant, pod: PodFacts) -> str | None:
        """Return the file's text; ``None`` if we mounted none or no verified share exists."""
        signed = pod.signed
        if grant.container in pod.limits_mounted or signed is None:
            return None
        if signed.allocation_id != grant.allocation_id:
            return None
        for shares in signed.placement.containers:
            if shares.name == grant.container:
                return limits.encode(
                    limits.limits_of(
                        shares,
                        allocation_id=signed.allocation_id,
                        core_policy=self._site.settings.core_policy,
                    )
                )
        return None


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
