# SPDX-License-Identifier: Apache-2.0
"""Publishes active priorities with the node agent's own code. Needs all packages of the agent."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.priorities import Activity
from hami_nodeagent.core.region import Work
from hami_nodeagent.shell.priority import FILE_NAME, PriorityPage
from hami_nodeagent.shell.regions import read_activity
from tests.gpu.guest import Steps
from tests.gpu.guests.agent import holder_of

_HOLD_S, _LEASE_S, _RIVALS_S = 0.3, 1.5, 0.025
"""Defaults of the settings ``priority.hold_s``, ``lease_s`` and ``rivals_s``."""


def publish(*, directory: str, uuid: str, tenants: list[list[Any]]) -> Steps:
    """Publish the active priorities of ``(region, priority)`` from the first request on, until the
    runner kills the guest.
    """
    page = PriorityPage(Path(directory) / FILE_NAME)
    activity = Activity(hold_s=_HOLD_S, rung_hold_s=_LEASE_S)
    named = [(f"tenant-{number}", *one) for number, one in enumerate(tenants)]
    holders = [holder_of(uuid, 0, name, priority) for name, _, priority in named]
    read = partial(_publish, page, activity, holders, uuid)
    read({})
    yield {"holders": len(holders)}
    while True:
        seen = {(name, "main"): read_activity(Path(path)) for name, path, _ in named}
        read({key: one for key, one in seen.items() if isinstance(one, Work)})
        time.sleep(_RIVALS_S)


def _publish(
    page: PriorityPage,
    activity: Activity,
    holders: list[Holder],
    uuid: str,
    seen: dict[tuple[str, str], Work],
) -> None:
    keys = [(holder.pod_uid, holder.container) for holder in holders]
    activity.note(keys, seen, now_s=time.monotonic())
    until_ns = time.monotonic_ns() + int(_LEASE_S * 1e9)
    page.write(activity.standings(holders, [uuid]), lease_until_ns=until_ns)
