# SPDX-License-Identifier: Apache-2.0
"""MIG profiles of NVIDIA cards, as the fake NVML library reports and enforces them.

Facts of names, counts, shares and engines:
https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html. Ids, placements
and sizes: lists that ``nvidia-smi mig -lgip`` and ``-lgipp`` print on the cards, as published in
the descriptions of pull requests 166 and 187 of NVIDIA/mig-parted. Not published, and derived here:
sizes of 3g, 4g and 7g of B200 (two and four times 2g) and processors of its 3g and 4g; media
engines of its sizes above 2g follow H200. Drivers differ in sizes by some hundred MiB.

These tables are for tests and simulation only: the driver of the agent asks NVML. Memory in MiB,
positions on the card's own grid.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

# Kinds: by which callers ask NVML for a profile (NVML_GPU_INSTANCE_PROFILE_*).
_1, _2, _3, _4, _7 = 0, 1, 2, 3, 4
_1_MEDIA, _2_MEDIA, _1_LARGE = 7, 8, 9
_1_GFX, _2_GFX, _4_GFX = 10, 11, 12
_1_NO_MEDIA, _2_NO_MEDIA, _1_ALL_MEDIA, _2_ALL_MEDIA = 13, 14, 15, 16


class MigProfile(Struct, frozen=True, kw_only=True):
    """One size of MIG instance."""

    name: str
    kind: int
    native_id: int
    slices: int
    memory_mib: int
    sm_count: int
    count: int
    copy_engines: int
    decoders: int = 0
    encoders: int = 0
    jpeg: int = 0
    ofa: int = 0
    size: int
    starts: tuple[int, ...]

    def line(self) -> str:
        """The value of ``gi_profile`` in the state file."""
        numbers = (
            *(self.kind, self.native_id, self.slices, self.memory_mib, self.sm_count, self.count),
            *(self.copy_engines, self.decoders, self.encoders, self.jpeg, self.ofa, self.size),
        )
        starts = ",".join(map(str, self.starts))
        return f"{' '.join(map(str, numbers))} {starts} {self.name}"


def _sevenths(
    gigabytes: tuple[int, int, int, int],
    memory_mib: tuple[int, int, int, int],
    sm_count: tuple[int, int, int, int, int, int],
    copy_engines: tuple[int, int, int, int, int],
    media: tuple[tuple[int, int, int], ...],
) -> tuple[MigProfile, ...]:
    """A card of seven compute and eight memory slices.

    ``gigabytes`` and ``memory_mib``: of an eighth, a quarter, a half and the whole. ``sm_count``:
    of 1g, large 1g, 2g, 3g, 4g, 7g; ``copy_engines`` of 1g to 7g; ``media`` (decoders, JPEG, OFA)
    of 1g, 1g+me, large 1g, 2g, 3g, 4g, 7g.
    """
    eighth, quarter, half, whole = gigabytes
    mib_8, mib_4, mib_2, mib = memory_mib
    one = tuple(range(7))
    rows = (
        (f"1g.{eighth}gb", _1, 19, 1, mib_8, sm_count[0], 7, 0, 1, one),
        (f"1g.{eighth}gb+me", _1_MEDIA, 20, 1, mib_8, sm_count[0], 1, 0, 1, one),
        (f"1g.{quarter}gb", _1_LARGE, 15, 1, mib_4, sm_count[1], 4, 0, 2, (0, 2, 4, 6)),
        (f"2g.{quarter}gb", _2, 14, 2, mib_4, sm_count[2], 3, 1, 2, (0, 2, 4)),
        (f"3g.{half}gb", _3, 9, 3, mib_2, sm_count[3], 2, 2, 4, (0, 4)),
        (f"4g.{half}gb", _4, 5, 4, mib_2, sm_count[4], 1, 3, 4, (0,)),
        (f"7g.{whole}gb", _7, 0, 7, mib, sm_count[5], 1, 4, 8, (0,)),
    )
    return tuple(
        MigProfile(
            name=name,
            kind=kind,
            native_id=native_id,
            slices=slices,
            memory_mib=memory,
            sm_count=sms,
            count=count,
            copy_engines=copy_engines[engines],
            decoders=decoders,
            jpeg=jpeg,
            ofa=ofa,
            size=size,
            starts=starts,
        )
        for (name, kind, native_id, slices, memory, sms, count, engines, size, starts), (
            decoders,
            jpeg,
            ofa,
        ) in zip(rows, media, strict=True)
    )


def _quarters(
    unit: int, rows: tuple[tuple[str, int, int, int, int, int, int, tuple[int, int, int, int]], ...]
) -> tuple[MigProfile, ...]:
    """A card of four slices, each ``unit`` positions long.

    Rows: name, kind, id, slices, memory, processors, count, (decoders, encoders, JPEG, OFA).
    """
    return tuple(
        MigProfile(
            name=name,
            kind=kind,
            native_id=native_id,
            slices=slices,
            memory_mib=memory,
            sm_count=sms,
            count=count,
            copy_engines=slices,
            decoders=media[0],
            encoders=media[1],
            jpeg=media[2],
            ofa=media[3],
            size=slices * unit,
            starts=tuple(range(0, 4 * unit, slices * unit)),
        )
        for name, kind, native_id, slices, memory, sms, count, media in rows
    )


_AMPERE_MEDIA = (
    *((0, 0, 0), (1, 1, 1), (1, 0, 0), (1, 0, 0)),
    *((2, 0, 0), (2, 0, 0), (5, 1, 1)),
)
_HOPPER_MEDIA = (
    *((1, 1, 0), (1, 1, 1), (1, 1, 0), (2, 2, 0)),
    *((3, 3, 0), (4, 4, 0), (7, 7, 1)),
)
_AMPERE_SM = (14, 14, 28, 42, 56, 98)
_HOPPER_SM = (16, 26, 32, 60, 64, 132)

_A30 = _quarters(
    1,
    (
        ("1g.6gb", _1, 14, 1, 5836, 14, 4, (0, 0, 0, 0)),
        ("1g.6gb+me", _1_MEDIA, 21, 1, 5836, 14, 1, (1, 0, 1, 1)),
        ("2g.12gb", _2, 5, 2, 11672, 28, 2, (2, 0, 0, 0)),
        ("2g.12gb+me", _2_MEDIA, 6, 2, 11672, 28, 1, (2, 0, 1, 1)),
        ("4g.24gb", _4, 0, 4, 23344, 56, 1, (4, 0, 1, 1)),
    ),
)
_RTX_PRO_6000 = _quarters(
    3,
    (
        ("1g.24gb", _1, 14, 1, 24186, 46, 4, (1, 1, 1, 0)),
        ("1g.24gb+me", _1_MEDIA, 21, 1, 24186, 46, 1, (1, 1, 1, 1)),
        ("1g.24gb+gfx", _1_GFX, 47, 1, 24186, 46, 4, (1, 1, 1, 0)),
        ("1g.24gb+me.all", _1_ALL_MEDIA, 65, 1, 24186, 46, 1, (4, 4, 4, 1)),
        ("1g.24gb-me", _1_NO_MEDIA, 67, 1, 24186, 46, 4, (0, 0, 0, 0)),
        ("2g.48gb", _2, 5, 2, 48517, 94, 2, (2, 2, 2, 0)),
        ("2g.48gb+gfx", _2_GFX, 35, 2, 48517, 94, 2, (2, 2, 2, 0)),
        ("2g.48gb+me.all", _2_ALL_MEDIA, 64, 2, 48517, 94, 1, (4, 4, 4, 1)),
        ("2g.48gb-me", _2_NO_MEDIA, 66, 2, 48517, 94, 2, (0, 0, 0, 0)),
        ("4g.96gb", _4, 0, 4, 97402, 188, 1, (4, 4, 4, 1)),
        ("4g.96gb+gfx", _4_GFX, 32, 4, 97402, 188, 1, (4, 4, 4, 1)),
    ),
)

TABLES: Final[Mapping[str, tuple[MigProfile, ...]]] = {
    "A30": _A30,
    "A100-40": _sevenths(
        (5, 10, 20, 40),
        (4864, 9856, 19968, 40192),
        _AMPERE_SM,
        (1, 2, 3, 4, 7),
        _AMPERE_MEDIA,
    ),
    "A100-80": _sevenths(
        (10, 20, 40, 80),
        (9728, 19968, 40192, 80896),
        _AMPERE_SM,
        (1, 2, 3, 4, 7),
        _AMPERE_MEDIA,
    ),
    "H100-80": _sevenths(
        (10, 20, 40, 80),
        (9984, 20096, 40448, 81152),
        _HOPPER_SM,
        (1, 2, 3, 4, 8),
        _HOPPER_MEDIA,
    ),
    "H200-141": _sevenths(
        (18, 35, 71, 141),
        (16384, 33024, 71168, 143104),
        _HOPPER_SM,
        (1, 2, 3, 4, 8),
        _HOPPER_MEDIA,
    ),
    "B200-180": _sevenths(
        (23, 45, 90, 180),
        (22528, 45312, 90624, 181248),
        (18, 30, 36, 70, 72, 148),
        (2, 4, 6, 8, 16),
        _HOPPER_MEDIA,
    ),
    "RTX-PRO-6000": _RTX_PRO_6000,
}
"""By the word that hardware profiles write as attribute ``mig_table``."""
