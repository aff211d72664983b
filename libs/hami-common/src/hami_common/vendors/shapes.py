# SPDX-License-Identifier: Apache-2.0
"""Legal sets of a node's devices for one request, for vendors whose wiring matters.

Devices are named by the vendor's own index, so that a device that drops out moves no other. Each
shape lists legal sets with a tier (lower is better) and the indexes around a set that it would
break into; among sets of a tier the one is best that leaves fewest free devices there.

``pairs``    whole modules of two devices, 2k and 2k+1 (Ascend 910C)
``wings``    1, 2, 4 or 8 of eight devices: one wing (0-3 or 4-7), else linked across (Kunlunxin)
``run``      neighbors in the vendor's enumeration (AWS Inferentia)
``aligned``  1, 4, 8 or 16 neighbors that begin at a multiple of their number (AWS Trainium)
"""

from functools import cache
from itertools import combinations
from typing import Final, NamedTuple

INDEX_LIMIT: Final = 16
"""Devices with an index from here on are in no set."""
_WINGS: Final = ((0, 1, 2, 3), (4, 5, 6, 7))
_CROSS_PAIRS: Final = ((0, 4), (1, 5), (2, 6), (3, 7))
_CROSS_QUADS: Final = (
    (0, 1, 4, 5),
    (2, 3, 6, 7),
    (0, 2, 4, 6),
    (1, 3, 5, 7),
    (0, 3, 4, 7),
    (1, 2, 5, 6),
)
_ALIGNED: Final = (1, 4, 8, 16)
SIZES_KEPT: Final = {"aligned": _ALIGNED[1:]}
"""By shape: sizes of the aligned groups that a single device of it should not break."""
COUNTS: Final = {"wings": (1, 2, 4, 8), "aligned": _ALIGNED}
"""Numbers of devices that a shape allows; a shape that is not listed allows any it has sets for."""


class LegalSet(NamedTuple):
    """One set of devices that may serve a request."""

    indexes: tuple[int, ...]
    tier: int
    around: tuple[int, ...]
    """Devices around the set; those that are free and left over count against it."""


@cache
def legal_sets(shape: str, count: int) -> tuple[LegalSet, ...]:
    """All sets of ``count`` devices of a shape, best first without other criteria."""
    everything = tuple(range(INDEX_LIMIT))
    match shape:
        case "pairs":
            modules = [(2 * k, 2 * k + 1) for k in range(INDEX_LIMIT // 2)]
            if count % 2:
                return ()
            return tuple(
                LegalSet(tuple(sorted(sum(some, ()))), 0, ())
                for some in combinations(modules, count // 2)
            )
        case "wings":
            within = [
                LegalSet(some, 0, wing) for wing in _WINGS for some in combinations(wing, count)
            ]
            across = {2: _CROSS_PAIRS, 4: _CROSS_QUADS, 8: (everything[:8],)}.get(count, ())
            return (*within, *(LegalSet(some, 1, everything[:8]) for some in across))
        case "run":
            starts = range(INDEX_LIMIT - count + 1)
            return tuple(LegalSet(everything[s : s + count], 0, ()) for s in starts)
        case "aligned":
            if count not in _ALIGNED:
                return ()
            starts = range(0, INDEX_LIMIT, count)
            return tuple(LegalSet(everything[s : s + count], 0, ()) for s in starts)
        case _:
            return ()
