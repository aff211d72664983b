# SPDX-License-Identifier: Apache-2.0
"""Parses the output of cnmon (4.20 to 5.10; MLU370, MLU590).

A card that is not in sMLU mode is allocated as a whole. The card number is its index and the number
of ``/dev/cambricon_dev<N>``. cnmon writes MiB.
"""

import re

import msgspec
from msgspec import Struct

from hami_common.units import INT32_MAX
from hami_nodeagent.drivers.errors import (
    DeviceGone,
    HardwareAbsent,
)
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition, Seen
from hami_nodeagent.drivers.parse.trouble import Rule

RULES = (
    Rule(words=r"there is no device", kind=HardwareAbsent),
    Rule(words=r"card \d+ not existed", kind=DeviceGone),
)
_SEVERAL = ("Command Line", "MLU Memory Usage")
_MODE_BY_WORD = {"smlu": "smlu", "mim": "mim"}
_NODE = re.compile(r"/dev/[\w.-]+(/[\w.-]+)*")
_BYTES_MOST = 1 << 50
_UUID = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")


class Size(Struct, frozen=True, kw_only=True):
    """One sMLU profile: percent of a card and bytes."""

    id: int
    quota: int
    memory: int


class Smlu(Struct, frozen=True, kw_only=True):
    """One sMLU instance; memory in bytes."""

    id: int
    profile: int
    name: str
    node: str
    """Device node of the instance."""
    quota: int
    memory: int
    used: int


class SmluCard(Struct, frozen=True, kw_only=True):
    """One card in sMLU mode."""

    slot: int
    uuid: str
    memory_mib: int
    profiles: tuple[Size, ...]
    instances: tuple[Smlu, ...]


class _SmluList(Struct, frozen=True, kw_only=True):
    cards: tuple[SmluCard, ...]


def smlus(text: str) -> tuple[SmluCard, ...]:
    """Parse the output of ``binding list``: cards in sMLU mode and their instances."""
    try:
        cards = msgspec.json.decode(text.encode("utf-8", "replace"), type=_SmluList).cards
    except (ValueError, RecursionError) as error:
        raise forms.unknown("the list of sMLU instances", text) from error
    if len({card.uuid for card in cards}) != len(cards):
        raise forms.unknown("the list of sMLU instances", text)
    for card in cards:
        is_card = _UUID.fullmatch(card.uuid) and 0 < card.memory_mib <= INT32_MAX
        numbers = [one.id for one in card.instances]
        sizes = [
            *((one.quota, one.memory) for one in card.profiles),
            *((one.quota, one.memory) for one in card.instances),
        ]
        is_sized = all(quota >= 0 and 0 <= memory < _BYTES_MOST for quota, memory in sizes)
        if not is_card or len(set(numbers)) != len(numbers) or not is_sized:
            raise forms.unknown("the list of sMLU instances", text)
        if any(one.node and not _NODE.fullmatch(one.node) for one in card.instances):
            raise forms.unknown("the device node of an sMLU instance", text)
    return cards


def table(text: str) -> tuple[tuple[Seen, ...], str]:
    """The summary table: cards without identity, and the driver's version."""
    found = forms.box(text, first="Card", needs="Name", greedy=("Name",))
    rows = forms.process_lines(text, begin=found.end, several=_SEVERAL)
    processes = forms.processes_of(
        [
            (card, pid, used)
            for before, pid, used in rows
            if (card := forms.whole(before[0])) is not None
        ]
    )
    cards: list[Seen] = []
    for record in found.records:
        card = forms.whole(record.get("Card", ""))
        if card is None or not record.get("Name"):
            raise forms.unknown("a card of cnmon", " ".join(record.values()))
        used, total = forms.mib_pair(record.get("Memory-Usage", ""))
        cards.append(
            Seen(
                place=str(card),
                index=card,
                minor=card,
                type=record["Name"],
                memory_mib=total,
                bus_id=forms.bus_id(record.get("Bus-Id", "")),
                mode=_MODE_BY_WORD.get(record.get("Mode", "").lower(), "whole"),
                used_mib=used,
                core_pct=forms.percent(record.get("Util", "")),
                temperature_c=forms.celsius(record.get("Temp", "")),
                power_w=forms.watts(record.get("Pwr:Usage/Cap", "")),
                processes=processes.get(card, ()),
            )
        )
    if len({card.index for card in cards}) != len(cards):
        raise forms.unknown("cnmon", text)
    version = re.search(r"Driver v(\d[\w.]*)", text) or re.search(r"CNMON v(\d[\w.]*)", text)
    return tuple(cards), version[1] if version else ""


def card(text: str, number: int) -> Seen:
    """``cnmon info -c N``: identity and health of one card."""
    blocks = forms.key_blocks(text, start="Card ")
    block = next((one for one in blocks if one["Card "].strip() == str(number)), None)
    if block is None or not _UUID.fullmatch(block.get("UUID", "")):
        raise forms.unknown(f"cnmon info of card {number}", text)
    device = block.get("Health State/Device", "")
    driver = block.get("Health State/Driver", "")
    good = device.lower() == "good" and driver.lower() == "running"
    address = "{}:{}:{}.{}".format(
        *(block.get(f"PCI/{key}", "") for key in ("Domain ID", "Bus num", "Device", "Function"))
    )
    return Seen(
        place=str(number),
        index=number,
        minor=number,
        uuid=f"MLU-{block['UUID'].lower()}",
        type=block.get("Product Name", ""),
        memory_mib=forms.mib(block.get("Physical Memory Usage/Total", "")),
        bus_id=forms.bus_id(address),
        numa=forms.whole(block.get("NUMA Node Id", "")),
        attributes={"serial": serial} if (serial := block.get("SN", "")) else {},
        condition=Condition.GOOD if good else Condition.BAD,
        reason="" if good else f"device {device or 'unknown'}, driver {driver or 'unknown'}",
        used_mib=forms.mib(block.get("Physical Memory Usage/Used", "")),
        core_pct=forms.percent(block.get("Utilization/MLU Average", "")),
        temperature_c=forms.celsius(block.get("Temperature/Chip", "")),
        power_w=forms.watts(block.get("Power/Usage", "")),
    )
