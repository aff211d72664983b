# SPDX-License-Identifier: Apache-2.0
"""Faults of a kubelet: hold, delay and shuffle admissions, reject pods, disconnect a plugin.

A refusal "after" comes where kubelet checks CPU and memory: the pod's devices have been allocated
by then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

import anyio
from msgspec import Struct

from hami_sim.kubelet.admission import Refusal
from hami_sim.kubelet.objects import Obj

Moment = Literal["before", "after"]
Rule = Callable[[Obj], Refusal | None]


class FaultOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults as JSON, for a kubelet in another process: POST /sim/faults.

    What is left out stays as it is.
    """

    clear: bool = False
    """Switch everything off first."""
    hold: bool | None = None
    delay_s: float | None = None
    shuffle_seed: int | None = None
    refuse_label: str = ""
    """``key=value``: pods with this label are refused."""
    refuse_moment: Moment = "after"
    refuse_reason: str = "OutOfcpu"
    refuse_message: str = "refused by a test"
    drop_plugin: str = ""
    """Resource whose plugin is lost."""


class Faults:
    """Switches of one kubelet; they stay set over its restarts."""

    def __init__(self) -> None:
        self.admission_delay_s = 0.0
        """Wait before each admission."""
        self._rules: dict[Moment, list[Rule]] = {"before": [], "after": []}
        self._random: random.Random | None = None
        self._gate: anyio.Event | None = None

    def hold_admissions(self) -> None:
        """Let pods arrive but admit none until released."""
        if self._gate is None:
            self._gate = anyio.Event()

    def release_admissions(self) -> None:
        """Go on with the pods that wait."""
        if self._gate is not None:
            self._gate.set()
            self._gate = None

    def shuffle_admissions(self, seed: int | None) -> None:
        """Admit waiting pods in random order; None: in order of arrival again."""
        self._random = None if seed is None else random.Random(seed)

    def refuse(self, rule: Rule, *, moment: Moment = "after") -> None:
        """Refuse the pods for which the rule gives a reason."""
        self._rules[moment].append(rule)

    def clear(self) -> None:
        """Switch everything off."""
        self.release_admissions()
        self.admission_delay_s = 0.0
        self._random = None
        for rules in self._rules.values():
            rules.clear()

    def obey(self, order: FaultOrder) -> None:
        """Set what an order names."""
        if order.clear:
            self.clear()
        if order.hold is not None:
            (self.hold_admissions if order.hold else self.release_admissions)()
        if order.delay_s is not None:
            self.admission_delay_s = order.delay_s
        if order.shuffle_seed is not None:
            self.shuffle_admissions(order.shuffle_seed)
        if order.refuse_label:
            key, _, value = order.refuse_label.partition("=")
            refusal = Refusal(reason=order.refuse_reason, message=order.refuse_message)

            def rule(pod: Obj) -> Refusal | None:
                labels = pod["metadata"].get("labels") or {}
                return refusal if labels.get(key) == value else None

            self.refuse(rule, moment=order.refuse_moment)

    # -- asked by the kubelet

    async def before_admission(self) -> None:
        """Wait as long as admissions are held or delayed."""
        while self._gate is not None:
            await self._gate.wait()
        if self.admission_delay_s > 0:
            await anyio.sleep(self.admission_delay_s)

    def refusal(self, pod: Obj, moment: Moment) -> Refusal | None:
        """Give the first rule's refusal."""
        return next((found for rule in self._rules[moment] if (found := rule(pod))), None)

    def choose(self, waiting: Sequence[tuple[str, Obj]]) -> int:
        """Pick which of the waiting changes comes next; only additions change places."""
        additions = [index for index, (operation, _) in enumerate(waiting) if operation == "ADD"]
        if self._random is None or waiting[0][0] != "ADD":
            return 0
        return self._random.choice(additions)
