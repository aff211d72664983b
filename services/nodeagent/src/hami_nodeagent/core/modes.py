# SPDX-License-Identifier: Apache-2.0
"""Decides when a card's mode is switched between shares in software and parts in hardware.

Only cards that the operator's setting names are ever touched. One that is not in the mode wanted is
kept from new pods (cordoned, it alone), until nobody has anything of it: no reservation, no granted
container, no partition, no process. Then the journal says what is about to be done, it is done, and
the next reading tells whether it was. A change that would only come with the card's next reset is
taken back: nobody could say when that is. A card that is whole again, and that containers get by a
CDI name, waits until there is such a name. A card that cannot be switched is given back to the
scheduler, told, and tried again later. Whoever takes a step stores the journal first, so a decision
after a crash is the same as any other. Seconds; knows no vendor, no disk and no clock.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_common.model.device import Device, DeviceFacts
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.podbook import PodBook
from hami_nodeagent.drivers.partitioner import Instance
from hami_nodeagent.drivers.protocol import CardMode

FILE_VERSION = 1
Word = Literal["on", "off"]
UNNAMED = (
    "MIG mode is off, but no CDI specification names the card; renew the vendor's: nvidia-ctk cdi "
    "generate --output=/etc/cdi/nvidia.yaml"
)
_SHOWN = 3
"""Pods that are named; more are counted."""


class ModeNote(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the journal: this mode was about to be set, or was set, by this agent."""

    uuid: str
    is_divided: bool


class ModesFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The journal on disk."""

    version: int
    notes: tuple[ModeNote, ...] = ()


class Look(Struct, frozen=True, kw_only=True):
    """All that a decision on one card looks at."""

    mode: CardMode
    wanted: bool | None
    """The mode that the setting names; ``None``: the card is not ours to switch."""
    note: ModeNote | None = None
    users: tuple[str, ...] = ()
    """Who has something of the card, in words."""
    is_known: bool = False
    """Ledger and pods are known, so that who is not among ``users`` has nothing."""
    cordoned_for_s: float = -1.0
    """Since when the registry keeps the card from new pods; negative: not yet."""
    settle_s: float = 0.0
    """After so long no reservation from before the cordon can arrive any more."""
    is_named: bool = True
    """The container runtime finds the card by its name, as far as that is needed and can be
    seen."""
    problem: str = ""
    """Why the last attempt failed; empty: it did not."""
    pause: Literal["none", "soon", "later"] = "none"
    """When it may be tried again: now, shortly, or not for long, so that the card is of use."""


class Verdict(Struct, frozen=True, kw_only=True):
    """A decision."""

    text: str = ""
    """For the operator; empty: all is as it should be."""
    is_withheld: bool = False
    """The card is to get no new pods."""
    step: bool | None = None
    """The mode to set now."""
    note: ModeNote | None = None
    """The journal's line, to be stored before the step."""


def decide(look: Look) -> Verdict:
    """What becomes of the card's mode next."""
    mode, note = look.mode, look.note
    is_pending = mode.is_divided_next != mode.is_divided
    if look.wanted is None or look.wanted == mode.is_divided:
        if is_pending and note is not None:
            return Verdict(text=_pending(mode), step=mode.is_divided, note=note)
        if is_pending and look.wanted is not None:
            return Verdict(text=f"{_pending(mode)}; this agent did not ask for that")
        if look.wanted is False and not look.is_named:
            return Verdict(text=UNNAMED, is_withheld=True)
        return Verdict()
    kept = note if is_pending else None
    if look.pause == "later":
        undo = mode.is_divided if kept is not None else None
        return Verdict(text=f"{_doing(look.wanted)} failed: {look.problem}", step=undo, note=kept)
    waits = _waits_for(look)
    if waits:
        return Verdict(text=f"{_doing(look.wanted)} {waits}", is_withheld=True, note=kept)
    return Verdict(
        text=f"{_doing(look.wanted)} is under way",
        is_withheld=True,
        step=look.wanted,
        note=ModeNote(uuid=mode.uuid, is_divided=look.wanted),
    )


def _waits_for(look: Look) -> str:
    if not look.is_known:
        return "waits until this agent knows who uses the card"
    if look.users:
        shown = ", ".join(look.users[:_SHOWN])
        rest = len(look.users) - _SHOWN
        return f"waits for {shown}" + (f" and {rest} more" if rest > 0 else "")
    if look.cordoned_for_s < max(0.0, look.settle_s):
        return "waits until no scheduler gives the card away"
    if look.pause == "soon":
        return f"is tried again: {look.problem}"
    return ""


def _doing(is_divided: bool) -> str:  # noqa: FBT001 - the word for a mode
    return f"switching MIG mode {'on' if is_divided else 'off'}"


def _pending(mode: CardMode) -> str:
    return f"MIG mode goes {'on' if mode.is_divided_next else 'off'} with the card's next reset"


def wanted_of(setting: Mapping[str, Word], node: str, card: DeviceFacts) -> bool | None:
    """The mode that the setting names for a card of this node; the last line that names it counts.

    Keys: a card's UUID, or ``<node>/<index>``, each with ``*`` and ``?`` for any.
    """
    wanted: bool | None = None
    names = (card.uuid, f"{node}/{card.index}")
    for key, word in setting.items():
        if any(fnmatchcase(name, key) for name in names):
            wanted = word == "on"
    return wanted


def check_setting(setting: Mapping[str, Word], *, field: str) -> None:
    """Refuse keys that name nothing, or more than anybody can mean."""
    for key in setting:
        node, slash, index = key.rpartition("/")
        is_place = bool(slash and node) and (index == "*" or index.isdecimal())
        if not is_place and not key.startswith(("GPU-", "MIG-GPU-")):
            raise SettingsInvalid(
                field=f"{field}[{key}]",
                problem="this is neither a card's UUID nor <node>/<index>",
                fix='write such as "gpu-node-1/0", "gpu-*/*" or "GPU-5d2f9a10-…"',
            )


def users_of(
    card: CardMode,
    *,
    entries: Mapping[str, Entry],
    grants: GrantBook,
    pods: PodBook,
    instances: Sequence[Instance],
) -> tuple[str, ...]:
    """Who has something of a card, in words, each once; nobody: it may be switched.

    ``instances``: hardware partitions, whoever made them.
    """
    found: dict[str, None] = {}
    for entry in entries.values():
        record = entry.record
        shares = [share for container in record.containers for share in container.shares]
        if record.op != "release" and any(share.uuid == card.uuid for share in shares):
            found[f"pod {record.namespace}/{record.pod}"] = None
    for grant in grants:
        pod = pods.find(grant.pod_uid)
        if card.uuid in grant.uuids and (pod is None or not pod.finished):
            found[f"pod {grant.namespace}/{grant.pod}"] = None
    if not found:
        found |= {f"partition {one.instance_id}": None for one in instances}
    if not found:
        found |= {f"process {pid}": None for pid in card.pids}
    return tuple(sorted(found))


def is_held_back(card: CardMode, devices: Mapping[str, Device]) -> bool:
    """Whether no scheduler that is up to date gives the card away: cordoned, or not published."""
    device = devices.get(card.uuid)
    return device is None or device.cordoned
