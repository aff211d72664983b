# SPDX-License-Identifier: Apache-2.0
"""Filter's answer about a pod whose node is decided elsewhere: by a gang, a hold or preemption."""

from msgspec import Struct

from hami_core.placement.reasons import RefusalCode


class Answer(Struct, frozen=True, kw_only=True):
    """Filter's answer about a pod whose node is decided elsewhere."""

    node: str = ""
    """The one node that fits; empty: none does, and ``text`` has the reason."""
    code: RefusalCode = "OtherReasons"
    text: str = ""
