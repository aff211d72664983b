# SPDX-License-Identifier: Apache-2.0
"""Lets no pod fail while an agent's pod is replaced or removed.

Kubelet rejects for good a pod that requests a resource while no plugin serves it. So an agent that
is asked to stop first reports its vendors as unserved, by which schedulers place nothing more on
the node, and then serves the pods that were placed before. The plugin proxy beside it, which is
asked to stop at the same time, serves kubelet until the agent is gone. Seconds throughout.
"""

import logging
from typing import Final

import anyio

from hami_nodeagent.shell.picture import Picture
from hami_nodeagent.shell.site import Site

SETTLE_S: Final = 1.0
"""Time until a reservation from before the heartbeat has arrived here, and until kubelet has the
answer for a pod whose grant is entered."""

_log = logging.getLogger(__name__)


async def leave(site: Site) -> None:
    """Return when no pod is on its way here, after ``leave_s``, or at once without the bus."""
    picture = site.picture
    if site.settings.leave_s <= 0 or not picture.view.bus_connected:
        return
    picture.note_leaving()
    with anyio.move_on_after(site.settings.leave_s) as limit:
        while True:
            await site.clock.sleep(SETTLE_S)
            if not picture.awaited():
                break
            await _until_none_is_awaited(picture)
    level = logging.WARNING if limit.cancelled_caught else logging.INFO
    _log.log(level, "serves no more pods", extra={"awaited": picture.awaited()})


async def _until_none_is_awaited(picture: Picture) -> None:
    while True:
        changed = picture.changed
        if not picture.awaited():
            return
        await changed.wait()
