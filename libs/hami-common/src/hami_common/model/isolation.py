# SPDX-License-Identifier: Apache-2.0
"""Isolation of a share: its class, with a grade per property, and what a pod may demand of it.

Grades, best first: ``A`` enforced by hardware, or there is nothing to share with; ``B`` enforced by
the vendor's driver or kernel module; ``C`` enforced by a library inside the container, which a
process that avoids it escapes (the agent reports such a process); ``D`` not enforced, or not known.
Properties: device memory, compute time, faults (an error of one container ends no other), and
bandwidth of memory and links. Only hardware partitions isolate bandwidth.

A pod demands the least grades by the annotation ``hami.io/min-isolation``: one grade, which applies
to memory and compute, or ``<property>=<grade>`` pairs. The table has what the vendors document and
``Capability`` of each vendor lists; docs/vendors.md is made from it.
"""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.units import shown

Grade = Literal["A", "B", "C", "D"]
GRADES: Final = ("A", "B", "C", "D")
PROPERTIES: Final = ("memory", "compute", "fault", "bandwidth")
_OF_ONE_GRADE: Final = ("memory", "compute")
"""Properties for which a grade alone is demanded: those whose amounts a pod requests."""
_WALL: Final[Grade] = "B"
"""Grade of memory that the driver limits by the container's cgroup, whatever the library does."""


class Isolation(Struct, frozen=True, kw_only=True):
    """One class of isolation."""

    name: str
    """Word of the class, such as ``hook`` or ``mig``."""
    memory: Grade
    compute: Grade
    fault: Grade
    bandwidth: Grade = "D"

    def with_memory_cap(self) -> "Isolation":
        """Return the class with the driver's own limit of memory as outer wall."""
        return replace(self, name=f"{self.name}+wall", memory=min(self.memory, _WALL))

    def meets(self, least: tuple[tuple[str, str], ...]) -> bool:
        """Return whether every property in ``least`` has its grade or a better one."""
        return all(getattr(self, name) <= grade for name, grade in least)

    def __str__(self) -> str:
        grades = " ".join(f"{name}={getattr(self, name)}" for name in PROPERTIES)
        return f"{self.name} ({grades})"


EXCLUSIVE: Final = Isolation(name="exclusive", memory="A", compute="A", fault="A", bandwidth="A")
"""A device that is given whole: no other container has a part of it."""
MIG: Final = Isolation(name="mig", memory="A", compute="A", fault="A", bandwidth="A")
HOOK: Final = Isolation(name="hook", memory="C", compute="C", fault="B")
"""libvgpu; each container has its own CUDA context, so the driver confines its faults."""
TIME_SLICES: Final = Isolation(name="timeslice", memory="C", compute="D", fault="B")
"""The driver gives the contexts of a device equal turns; libvgpu limits memory only."""
MPS: Final = Isolation(name="mps", memory="C", compute="C", fault="D")
"""NVIDIA's Multi-Process Service: contexts run at once, each on a part of the multiprocessors. It
takes its limits from the client's environment. A fatal error of one client ends all."""
BOOKED: Final = Isolation(name="booked", memory="D", compute="D", fault="D")
"""Amounts are booked and not enforced."""


def _by_driver(name: str) -> Isolation:
    """Return a class of which the vendor documents limits and says nothing about faults."""
    return Isolation(name=name, memory="B", compute="B", fault="D")


_CLASSES: Final[Mapping[str, tuple[Isolation, Isolation]]] = {
    "nvidia": (HOOK, MIG),
    "ascend": (
        Isolation(name="vnpu-core", memory="C", compute="C", fault="D"),
        _by_driver("vnpu"),
    ),
    "cambricon": (BOOKED, _by_driver("smlu")),
    "enflame": (BOOKED, _by_driver("drs")),
    "hygon": (BOOKED, _by_driver("vdcu")),
    "kunlunxin": (BOOKED, _by_driver("vxpu")),
    "metax": (BOOKED, _by_driver("sgpu")),
    "mthreads": (_by_driver("sgpu"), _by_driver("sgpu")),
    "amd": (BOOKED, Isolation(name="cu-mask", memory="D", compute="C", fault="D")),
}
"""By vendor: of a share of an undivided device, and of a part that the driver made for it."""
_BY_MODE: Final[Mapping[tuple[str, str], Isolation]] = {
    ("nvidia", "timeslice"): TIME_SLICES,
    ("nvidia", "mps"): MPS,
}
"""By vendor and ``Device.mode``: of a share of an undivided device in a mode of its own."""


def isolation_of(
    vendor: str, *, divided: bool, exclusive: bool, mode: str = "", memory_cap: bool = False
) -> Isolation:
    """Return the class of a share: ``divided`` if its device is, ``exclusive`` if it is all of it.

    ``mode`` and ``memory_cap``: as in ``Device``; hardware partitions have no such limit. A vendor
    without an entry enforces nothing that this project knows of.
    """
    if exclusive:
        return EXCLUSIVE
    undivided, part = _CLASSES.get(vendor, (BOOKED, BOOKED))
    if divided:
        return part
    undivided = _BY_MODE.get((vendor, mode), undivided)
    return undivided.with_memory_cap() if memory_cap else undivided


def parse_least(text: str, *, field: str) -> tuple[tuple[str, str], ...]:
    """Return the least grades that ``text`` demands, by property; empty text demands nothing.

    ``RequestInvalid`` names ``field`` and the fix.
    """
    words = [word.strip() for word in text.split(",")]
    if words == [""]:
        return ()
    if len(words) == 1 and words[0] in GRADES:
        return tuple((name, words[0]) for name in _OF_ONE_GRADE)
    found: dict[str, str] = {}
    for word in words:
        name, _, grade = (part.strip() for part in word.partition("="))
        if name not in PROPERTIES or grade not in GRADES or name in found:
            raise RequestInvalid(
                field=field,
                problem=f"{shown(word)} is not a grade of one property",
                fix=f"write a grade of {', '.join(GRADES)} for memory and compute, or pairs such as"
                f" memory=B,fault=A; properties are {', '.join(PROPERTIES)}",
            )
        found[name] = grade
    return tuple(sorted(found.items()))
