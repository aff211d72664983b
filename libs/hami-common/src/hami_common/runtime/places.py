# SPDX-License-Identifier: Apache-2.0
"""Bounds the requests of an HTTP API in progress at the same time: in total, and per caller.

A request such as an open stream occupies a place while it lasts. The last places are reserved for
callers who may read the whole cluster, so that tenants together cannot lock operators out. Uses
neither routes nor tokens: ``hami_common.runtime.gate`` identifies callers.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hami_common.errors import SettingsInvalid, TooManyRequests, Unavailable


class Places:
    """The places of one kind at one replica."""

    def __init__(
        self, *, what: str, setting: str, total: int, per_caller: int, reserve: int = 0
    ) -> None:
        """Give ``total`` places, ``per_caller`` to each, the last ``reserve`` to operators only.

        ``what`` names them in errors (``streams of /v1/watch``), ``setting`` the setting that
        bounds them per caller. ``SettingsInvalid`` where the numbers leave no place for tenants.
        """
        if not 0 <= reserve < total or per_caller < 1:
            raise SettingsInvalid(
                field=setting,
                problem=f"{per_caller} of {total} with {reserve} reserved leaves no place",
                fix="give at least 1 per caller, and a reserve below the total",
            )
        self._what = what
        self._setting = setting
        self._total = total
        self._per_caller = per_caller
        self._reserve = reserve
        self._taken: Counter[str] = Counter()

    def check(self, caller: str, *, is_operator: bool) -> None:
        """Raise ``TooManyRequests`` or ``Unavailable`` when no place is free for the caller now."""
        if self._taken[caller] >= self._per_caller:
            raise TooManyRequests(
                problem=f"{caller or 'the caller'} holds {self._taken[caller]} {self._what}, of "
                f"{self._per_caller} per caller",
                fix=f"close one first, or let an operator raise {self._setting}",
            )
        taken = self._taken.total()
        if taken >= self._total:
            raise Unavailable(peer="this replica", detail=f"{taken} {self._what} already")
        if not is_operator and taken >= self._total - self._reserve:
            raise Unavailable(
                peer="this replica",
                detail=f"{taken} {self._what} already, the last {self._reserve} are reserved for "
                "callers who read the whole cluster",
            )

    @contextmanager
    def hold(self, caller: str, *, is_operator: bool) -> Iterator[None]:
        """Occupy a place for the time of the block; errors as of ``check``."""
        self.check(caller, is_operator=is_operator)
        self._taken[caller] += 1
        try:
            yield
        finally:
            self._taken[caller] -= 1
            if not self._taken[caller]:
                del self._taken[caller]
