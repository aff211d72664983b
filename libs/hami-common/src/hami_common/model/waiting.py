# SPDX-License-Identifier: Apache-2.0
"""Classifies the reasons for which a pod waits: what has to change before it can start.

Codes are those of ``hami_core.placement.reasons``. Pure; knows no pods.
"""

from collections.abc import Iterable
from typing import Final, Literal

WaitClass = Literal["quota", "queue", "gang", "request", "devices"]
"""``quota``: a ResourceQuota of the namespace; ``queue``: the share of the pod's queue; ``gang``:
other members of its gang; ``request``: the pod has to be changed, or admitted again; ``devices``:
no node has the devices that it requests.
"""

_BY_CODE: Final[dict[str, WaitClass]] = {
    "ResourceQuotaNotFit": "quota",
    "QueueOverLimit": "queue",
    "QueueCannotBorrow": "queue",
    "QueueWaitsItsTurn": "queue",
    "GangIncomplete": "gang",
    "GangWaiting": "gang",
    "QueueUnknown": "request",
    "TaskPriorityTooHigh": "request",
    "PodNotAdmitted": "request",
    "PodQuarantined": "request",
}
_FIRST: Final[tuple[WaitClass, ...]] = ("quota", "queue", "gang", "request", "devices")


def class_of(code: str) -> WaitClass:
    """Return the class of one code; ``devices`` for a code of a node or device."""
    return _BY_CODE.get(code, "devices")


def main_refusal(codes: Iterable[str]) -> int:
    """Return the position of the code to act on first; -1 without codes.

    Quotas and queues are checked only on nodes that have the devices, so their refusals precede
    those of devices on other nodes. Among equal classes the first code counts.
    """
    ranked = [(_FIRST.index(class_of(code)), position) for position, code in enumerate(codes)]
    return min(ranked)[1] if ranked else -1
