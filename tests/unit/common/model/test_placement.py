# SPDX-License-Identifier: Apache-2.0
"""Booked amounts per device: every small pod, checked against a slow model of what runs when."""

from itertools import product

from hami_common.model.placement import NOTHING, Booked, ContainerShares, Share, booked_by_device
from hami_common.model.request import ContainerKind

A, B = "GPU-a", "GPU-b"
KINDS: tuple[ContainerKind, ...] = ("init", "sidecar", "app")
# Amounts are powers of two, so that a wrong sum never equals a right one by chance.
SHARE_SETS: tuple[tuple[tuple[str, int], ...], ...] = ((), ((A, 1),), ((B, 1),), ((A, 1), (B, 1)))


def share(uuid: str, amount: int, *, exclusive: bool = False) -> Share:
    return Share(
        vendor="nvidia", uuid=uuid, memory_mib=amount, core_pct=3 * amount, exclusive=exclusive
    )


def in_admission_order(kinds: tuple[ContainerKind, ...]) -> bool:
    """Init containers and sidecars come before application containers."""
    first_app = kinds.index("app") if "app" in kinds else len(kinds)
    return all(kind == "app" for kind in kinds[first_app:])


def moments(containers: tuple[ContainerShares, ...]) -> list[set[int]]:
    """Sets of containers that hold their shares at the same time, step by step (KEP-753)."""
    running: set[int] = set()
    seen: list[set[int]] = []
    for number, container in enumerate(containers):
        if container.kind == "init":
            seen.append(running | {number})  # runs to its end before the next one starts
        else:
            running = running | {number}
            seen.append(running)
    return seen


def expected(containers: tuple[ContainerShares, ...]) -> dict[str, Booked]:
    peak: dict[str, Booked] = {}
    for uuid in (A, B):
        for alive in moments(containers):
            held = NOTHING
            for number in alive:
                for own in containers[number].shares:
                    if own.uuid == uuid:
                        held = held.plus(
                            Booked(
                                memory_mib=own.memory_mib,
                                core_pct=own.core_pct,
                                slots=1,
                                exclusive=own.exclusive,
                            )
                        )
            if held != NOTHING:
                peak[uuid] = peak.get(uuid, NOTHING).peak(held)
    return peak


def pods(length: int) -> list[tuple[ContainerShares, ...]]:
    found: list[tuple[ContainerShares, ...]] = []
    for kinds in product(KINDS, repeat=length):
        if not in_admission_order(kinds):
            continue
        found.extend(
            tuple(
                ContainerShares(
                    name=f"c{number}",
                    kind=kind,
                    shares=tuple(share(uuid, 1 << (2 * number)) for uuid, _ in own),
                )
                for number, (kind, own) in enumerate(zip(kinds, sets, strict=True))
            )
            for sets in product(SHARE_SETS, repeat=length)
        )
    return found


def test_every_pod_of_up_to_four_containers_books_its_peak() -> None:
    checked = 0
    for length in range(5):
        for containers in pods(length):
            assert booked_by_device(containers) == expected(containers), containers
            checked += 1
    assert checked > 5_000


def test_the_rule_of_the_docstring_in_one_example() -> None:
    containers = (
        ContainerShares(name="i1", kind="init", shares=(share(A, 100),)),
        ContainerShares(name="s1", kind="sidecar", shares=(share(A, 10),)),
        ContainerShares(name="i2", kind="init", shares=(share(A, 95),)),
        ContainerShares(name="a1", kind="app", shares=(share(A, 20),)),
        ContainerShares(name="a2", kind="app", shares=(share(A, 30),)),
    )
    assert booked_by_device(containers)[A] == Booked(memory_mib=105, core_pct=315, slots=3)


def test_two_shares_of_one_container_on_one_device_take_two_slots() -> None:
    containers = (ContainerShares(name="a", kind="app", shares=(share(A, 1), share(A, 2))),)
    assert booked_by_device(containers)[A] == Booked(memory_mib=3, core_pct=9, slots=2)


def test_exclusive_at_any_moment_is_exclusive() -> None:
    containers = (
        ContainerShares(name="i", kind="init", shares=(share(A, 1, exclusive=True),)),
        ContainerShares(name="a", kind="app", shares=(share(A, 1),)),
    )
    assert booked_by_device(containers)[A].exclusive


def test_unshared_devices_book_nothing() -> None:
    assert booked_by_device(()) == {}
    assert booked_by_device([ContainerShares(name="a", kind="app", shares=())]) == {}
