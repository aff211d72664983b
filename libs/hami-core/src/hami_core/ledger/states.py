# SPDX-License-Identifier: Apache-2.0
"""States of an allocation and every transition between them, as data (design D5).

Documentation is made from ``TRANSITIONS``.

State list: ``reserved → bound → prepared → running``; ``failed`` from any of these; ``released``
from any. The state is the join of the newest ledger record and the newest state record of the same
allocation id, see ``hami_common.events.allocation``.
"""

from typing import Final, Literal

from msgspec import Struct

from hami_common.events.allocation import AllocationState


class Transition(Struct, frozen=True, kw_only=True):
    """Writers and meaning of one state transition."""

    writer: Literal["scheduler", "agent", "either"]
    meaning: str


_POD_ENDED = Transition(writer="scheduler", meaning="the pod is gone or finished")
_AGENT_FAILED = Transition(
    writer="either", meaning="the node or the scheduler found that the share cannot be used"
)
_RESIZED = Transition(
    writer="scheduler", meaning="a resize record changed the shares, the state stays"
)

TRANSITIONS: Final[dict[tuple[AllocationState, AllocationState], Transition]] = {
    ("reserved", "bound"): Transition(
        writer="either", meaning="the API server accepted the Binding"
    ),
    ("reserved", "failed"): _AGENT_FAILED,
    ("reserved", "released"): Transition(
        writer="scheduler", meaning="the Binding was refused or never came"
    ),
    ("bound", "bound"): _RESIZED,
    ("bound", "prepared"): Transition(
        writer="agent", meaning="every container of the pod was given its devices"
    ),
    ("bound", "failed"): _AGENT_FAILED,
    ("bound", "released"): _POD_ENDED,
    ("prepared", "prepared"): _RESIZED,
    ("prepared", "running"): Transition(
        writer="agent", meaning="the containers with devices have started"
    ),
    ("prepared", "failed"): _AGENT_FAILED,
    ("prepared", "released"): _POD_ENDED,
    ("running", "running"): _RESIZED,
    ("running", "failed"): _AGENT_FAILED,
    ("running", "released"): _POD_ENDED,
    ("failed", "released"): _POD_ENDED,
    ("released", "reserved"): Transition(
        writer="scheduler",
        meaning="repair found the bound pod's share still free and reserved it again",
    ),
}
"""Every transition that one writer may cause.

A pair that is neither here nor a chain of these is a bug.
"""

_PROGRESS: Final[dict[AllocationState, int]] = {
    "reserved": 0,
    "bound": 1,
    "prepared": 2,
    "running": 3,
    "failed": 4,
    "released": 5,
}


def may_follow(before: AllocationState, after: AllocationState) -> bool:
    """Return whether ``after`` may be OBSERVED after ``before``.

    True for one transition, or forward over states whose records were replaced before we read them.
    """
    if before == after or (before, after) in TRANSITIONS:
        return True
    return before not in {"released", "failed"} and _PROGRESS[after] > _PROGRESS[before]
