# SPDX-License-Identifier: Apache-2.0
"""What a test may do to a kubelet: hold, delay and shuffle admissions, refuse pods, lose a plugin.

A refusal "after" comes where kubelet checks CPU and memory: the pod's devices have been allocated
by then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

import anyio

from hami_sim.kubelet.admission import Refusal
from hami_sim.kubelet.objects import Obj

Moment = Literal["before", "after"]
Rule = Callable[[Obj], Refusal | None]


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
