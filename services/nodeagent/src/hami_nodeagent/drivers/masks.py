# SPDX-License-Identifier: Apache-2.0
"""Masks of compute units, assigned to shares of one device. Bit i is unit i. Pure."""


def units_of(core_pct: int, total: int) -> int:
    """Compute units for a part of a device, rounded down, at least one; 0 percent: all."""
    return max(1, total * core_pct // 100) if core_pct else total


def lowest_free(count: int, taken: int, total: int) -> int | None:
    """Return a mask of the ``count`` lowest free units; ``None`` if there are too few."""
    mask = 0
    for unit in range(total):
        if mask.bit_count() == count:
            break
        if not taken >> unit & 1:
            mask |= 1 << unit
    return mask if mask.bit_count() == count else None


def ranges_of(mask: int) -> str:
    """The mask as ranges and single numbers, such as ``0-3,8``."""
    words: list[str] = []
    first: int | None = None
    for unit in range(mask.bit_length() + 1):
        if mask >> unit & 1:
            first = unit if first is None else first
        elif first is not None:
            words.append(str(first) if first == unit - 1 else f"{first}-{unit - 1}")
            first = None
    return ",".join(words)
