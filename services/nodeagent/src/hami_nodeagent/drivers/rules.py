# SPDX-License-Identifier: Apache-2.0
"""Pure rules that several drivers share: type names, link scores, which faults condemn a device.

Link scores are those HAMi publishes: one figure for the closest common bridge plus 100 for each
direct fabric link, so larger is closer.
"""

from collections.abc import Iterable, Mapping
from itertools import combinations

from msgspec import Struct

from hami_common.bounds import REPORTED_MOST
from hami_common.errors import SettingsInvalid
from hami_common.events.codec import out_of_range
from hami_common.model.device import DeviceFacts, Link
from hami_common.units import shown, whole

SCORE_BY_LEVEL: Mapping[str, int] = {
    "system": 10,
    "node": 20,
    "hostbridge": 30,
    "multiple": 40,
    "single": 50,
    "internal": 60,
}
"""Closest common bridge, farthest first."""
FABRIC_LINK_SCORE = 100
ASYMMETRIC_SCORE = 0
"""For a pair whose two directions disagree: such a machine is misconfigured."""

_APPLICATION_FAULTS_BY_VENDOR: Mapping[str, frozenset[int]] = {
    "nvidia": frozenset({13, 31, 43, 45, 68, 109}),
}
_DEVICE_FAULTS_BY_VENDOR: Mapping[str, frozenset[int]] = {
    "nvidia": frozenset(
        {48, 61, 62, 64, 74, 79, 92, 95, 110, 119, 120, 121, 140, 143, *range(144, 151), 154}
    ),
}
"""Codes that concern the device even when they come from one of its partitions: memory that could
not be contained or remapped, links, the bus, firmware, a reset that is wanted."""


def type_of(vendor: str, model: str) -> str:
    """The type string that users select, from the driver's model name."""
    if vendor == "nvidia" and not model.startswith("NVIDIA"):
        return f"NVIDIA-{model}"
    return model


class Neighbour(Struct, frozen=True, kw_only=True):
    """Link from one device to another."""

    level: str
    fabric_links: int = 0


def links_of(
    devices: tuple[DeviceFacts, ...], view_by_pair: Mapping[tuple[str, str], Neighbour]
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Scores of all pairs seen from at least one side, and a sentence for each contradiction."""
    links, problems = [], []
    for a, b in combinations(sorted(devices, key=lambda device: device.index), 2):
        views = [view_by_pair.get((a.uuid, b.uuid)), view_by_pair.get((b.uuid, a.uuid))]
        scores = [
            SCORE_BY_LEVEL[view.level] + FABRIC_LINK_SCORE * view.fabric_links
            for view in views
            if view is not None
        ]
        if not scores:
            continue
        score = scores[0]
        if min(scores) != max(scores):
            score = ASYMMETRIC_SCORE
            problems.append(
                f"link between device {a.index} and device {b.index} differs by direction:"
                f" {scores[0]} and {scores[1]}"
            )
        links.append(Link(a=a.uuid, b=b.uuid, score=score))
    return tuple(links), tuple(problems)


class FaultPolicy(Struct, frozen=True, kw_only=True):
    """Fault codes that condemn a device."""

    harmless: frozenset[int] = frozenset()
    """Codes that indicate an error of the application."""
    condemning: frozenset[int] = frozenset()
    """Codes that always condemn, regardless of the other fields."""
    watches_faults: bool = True
    """False: no code condemns, except those in ``condemning``."""
    probes: bool = True
    """False: devices are not probed either."""
    of_device: frozenset[int] = frozenset()
    """Codes that concern the whole device, whichever partition they come from."""

    def condemns(self, code: int) -> bool:
        """Return true if a device that reports ``code`` must not be used."""
        if code in self.condemning:
            return True
        return self.watches_faults and code not in self.harmless


def fault_policy(vendor: str, *, disable: str, enable: str) -> FaultPolicy:
    """Policy from the two lists that operators know as DP_DISABLE_ and DP_ENABLE_HEALTHCHECKS.

    ``disable``: codes that are harmless besides the vendor's application faults; the word ``xids``
    for all codes; ``all`` for probes as well. ``enable``: codes that condemn in any case; ``all``
    for every code. The second list wins.
    """
    off_codes, off_words = _split(disable, {"all", "xids"}, "disable_health_checks")
    on_codes, on_words = _split(enable, {"all"}, "enable_health_checks")
    of_device = _DEVICE_FAULTS_BY_VENDOR.get(vendor, frozenset())
    if on_words:
        return FaultPolicy(condemning=on_codes, of_device=of_device)
    harmless = _APPLICATION_FAULTS_BY_VENDOR.get(vendor, frozenset()) | off_codes
    return FaultPolicy(
        harmless=harmless - on_codes,
        condemning=on_codes,
        watches_faults=not off_words,
        probes="all" not in off_words,
        of_device=of_device,
    )


def _split(text: str, words: set[str], field: str) -> tuple[frozenset[int], frozenset[str]]:
    codes, seen = set(), set()
    for part in (piece.strip().lower() for piece in text.split(",")):
        if part in words:
            seen.add(part)
        elif (code := whole(part)) is not None:
            codes.add(code)
        elif part:
            raise SettingsInvalid(
                field=field,
                problem=f"{part!r} is neither a fault code nor one of {', '.join(sorted(words))}",
                fix="give decimal codes and these words, separated by commas",
            )
    return frozenset(codes), frozenset(seen)


def within_bounds(
    facts: Iterable[DeviceFacts],
) -> tuple[tuple[DeviceFacts, ...], tuple[str, ...]]:
    """Separate devices that a message can carry from a problem text for each other device."""
    kept: list[DeviceFacts] = []
    problems: list[str] = []
    for device in facts:
        if len(kept) == REPORTED_MOST:
            problems.append(f"more than {REPORTED_MOST} devices; the others are left out")
            break
        if problem := out_of_range(device):
            problems.append(f"device {shown(device.uuid)}: {problem}")
        else:
            kept.append(device)
    return tuple(kept), tuple(problems)
