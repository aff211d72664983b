# SPDX-License-Identifier: Apache-2.0
"""Decides when a card switches between software shares and hardware partitions.

- Only cards that the operator's setting names are switched.
- A card in the other mode is cordoned until it is unused: no reservation, no granted container, no
  partition, no process.
- The journal then records the step, the step is executed, and the next reading verifies it.
- A change that would take effect only at the card's next reset is rolled back, because the time of
  that reset is unknown.
- A card without partitions that containers get by a CDI name waits until that name exists.
- A card that cannot be switched is uncordoned, reported, and retried later.

The caller stores the journal before it executes a step, so a decision after a crash needs no
special case. Times in seconds; depends on no vendor, disk or clock.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_common.model.device import Device, DeviceFacts
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.hardware import CardMode, Instance
from hami_nodeagent.core.podbook import PodBook

FILE_VERSION = 1
Word = Literal["on", "off"]
W = TypeVar("W", bound=str)
UNNAMED = (
    "MIG mode is off, but no CDI specification names the card; renew the vendor's: nvidia-ctk cdi "
    "generate --output=/etc/cdi/nvidia.yaml"
)
_SHOWN = 3
"""Number of pods listed by name; further pods are counted."""


class ModeNote(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the journal: this mode was about to be set, or was set, by this agent."""

    uuid: str
    is_divided: bool


class ModesFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The journal on disk."""

    version: int
    notes: tuple[ModeNote, ...] = ()


class Look(Struct, frozen=True, kw_only=True):
    """Input of a decision on one card."""

    mode: CardMode
    wanted: bool | None
    """The mode that the setting names; ``None``: the agent does not switch this card."""
    note: ModeNote | None = None
    users: tuple[str, ...] = ()
    """Users of the card, as text."""
    is_known: bool = False
    """Ledger and pods are known, so ``users`` is complete."""
    cordoned_for_s: float = -1.0
    """Seconds for which the registry has cordoned the card; negative: not yet."""
    settle_s: float = 0.0
    """Seconds after which no reservation from before the cordon can still arrive."""
    is_named: bool = True
    """The container runtime finds the card by its CDI name, where that is required and visible."""
    problem: str = ""
    """Reason why the last attempt failed; empty after success."""
    pause: Literal["none", "soon", "later"] = "none"
    """Delay before the next attempt: none, short, or long, during which the card serves pods."""


class Verdict(Struct, frozen=True, kw_only=True):
    """A decision."""

    text: str = ""
    """Text for the operator; empty: the mode is as configured."""
    is_withheld: bool = False
    """The card takes no new pods."""
    step: bool | None = None
    """The mode to set now."""
    note: ModeNote | None = None
    """Line of the journal, to be stored before the step."""


def decide(look: Look) -> Verdict:
    """Return the next step of the card's mode, if any."""
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
    waits = waits_for(
        look.users,
        is_known=look.is_known,
        cordoned_for_s=look.cordoned_for_s,
        settle_s=look.settle_s,
    )
    if not waits and look.pause == "soon":
        waits = f"is tried again: {look.problem}"
    if waits:
        return Verdict(text=f"{_doing(look.wanted)} {waits}", is_withheld=True, note=kept)
    return Verdict(
        text=f"{_doing(look.wanted)} is under way",
        is_withheld=True,
        step=look.wanted,
        note=ModeNote(uuid=mode.uuid, is_divided=look.wanted),
    )


def waits_for(
    users: Sequence[str], *, is_known: bool, cordoned_for_s: float, settle_s: float
) -> str:
    """Return why a card is not unused yet; empty if it is. Arguments as in ``Look``."""
    if not is_known:
        return "waits until this agent knows who uses the card"
    if users:
        shown = ", ".join(users[:_SHOWN])
        rest = len(users) - _SHOWN
        return f"waits for {shown}" + (f" and {rest} more" if rest > 0 else "")
    if cordoned_for_s < max(0.0, settle_s):
        return "waits until no scheduler gives the card away"
    return ""


def _doing(is_divided: bool) -> str:  # noqa: FBT001 - the word for a mode
    return f"switching MIG mode {'on' if is_divided else 'off'}"


def _pending(mode: CardMode) -> str:
    return f"MIG mode goes {'on' if mode.is_divided_next else 'off'} with the card's next reset"


def wanted_of(setting: Mapping[str, W], node: str, card: DeviceFacts) -> W | None:
    """Return the word that the setting has for a card; the last matching line counts.

    Keys: a card's UUID, or ``<node>/<index>``, each with ``*`` and ``?`` as wildcards.
    """
    wanted: W | None = None
    names = (card.uuid, f"{node}/{card.index}")
    for key, word in setting.items():
        if any(fnmatchcase(name, key) for name in names):
            wanted = word
    return wanted


def check_setting(setting: Mapping[str, str], *, field: str) -> None:
    """Reject keys that match nothing or are too broad."""
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
    """Return the users of a card as texts, each once; empty: the card may be switched.

    ``instances``: hardware partitions, whether or not this agent created them.
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
    """Return whether an up-to-date scheduler avoids the card: cordoned, or not published."""
    device = devices.get(card.uuid)
    return device is None or device.cordoned
