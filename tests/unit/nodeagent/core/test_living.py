# SPDX-License-Identifier: Apache-2.0
"""An owner counts as dead only where it would be visible if it were alive."""

import pytest

from hami_nodeagent.core.living import (
    FIRST_NAMESPACE,
    Owner,
    Seen,
    View,
    inner_pid,
    is_dead,
    parse_stat,
)

OWN, INNER = 5, 6
PRESENT = Seen(pid=900, inner_pid=7, namespace=INNER, start_ticks=100)
UNTOLD = Seen(pid=901, inner_pid=9, start_ticks=100)


def view(namespace: int = OWN, *, is_complete: bool = True) -> View:
    return View(processes={7: [PRESENT], 9: [UNTOLD]}, namespace=namespace, is_complete=is_complete)


def owner(pid: int = 8, namespace: int = INNER, start_ticks: int = 100) -> Owner:
    return Owner(pid=pid, namespace=namespace, start_ticks=start_ticks)


@pytest.mark.parametrize(
    ("asked", "seen", "inner", "dead"),
    [
        (owner(7), view(), {INNER}, False),
        (owner(7, start_ticks=0), view(), {INNER}, False),
        (owner(7, start_ticks=99), view(), {INNER}, True),
        (owner(9), view(), {INNER}, False),
        (owner(9, start_ticks=99), view(), {INNER}, True),
        (owner(8), view(), {INNER}, True),
        (owner(8), view(), set(), False),
        (owner(8, OWN), view(), set(), True),
        (owner(8, 77), view(), {INNER}, False),
        (owner(8, 77), view(FIRST_NAMESPACE), set(), True),
        (owner(8, 0), view(FIRST_NAMESPACE), set(), False),
        (owner(8), view(FIRST_NAMESPACE, is_complete=False), {INNER}, False),
    ],
    ids=[
        *("present", "start-unknown", "successor", "namespace-untold", "untold-successor"),
        *("absent", "namespace-never-seen", "own"),
        *("elsewhere", "machine-sees-all", "no-namespace", "something-hidden"),
    ],
)
def test_owner_is_judged(asked: Owner, seen: View, inner: set[int], *, dead: bool) -> None:
    assert is_dead(asked, seen, inner) == dead


def stat(state: str, threads: int = 1, start: int = 4242) -> str:
    return f"7 (a) Z 1 (b) {state} " + "1 " * 16 + f"{threads} 0 {start} 0 0\n"


def test_stat_is_read_behind_the_last_bracket() -> None:
    assert parse_stat(stat("S")) == (4242, False)
    assert parse_stat(stat("Z")) == (4242, True)
    assert parse_stat(stat("Z", threads=2)) == (4242, False)
    assert parse_stat("7 (a) S 1") is None
    assert parse_stat("") is None
    assert parse_stat(stat("S").replace("4242", "x")) is None


def test_inner_number_is_the_last_one() -> None:
    assert inner_pid("Name:\tx\nNSpid:\t900\t12\t7\nNSpgid:\t1\n") == 7
    assert inner_pid("Name:\tx\n") is None
    assert inner_pid("NSpid:\tx\n") is None
