# SPDX-License-Identifier: Apache-2.0
"""Cambricon's library CNDEV: sMLU profiles and instances.

Commands::

    list
    create UUID QUOTA_PERCENT BYTES NAME
    destroy UUID INSTANCE
    tidy UUID

Structures and calls are those of the vendor's header ``cndev.h`` for API version 6, as its
Kubernetes device plugin ships it: sizes in bytes, names in buffers of 100, the card's own
percentage as quota. ``list`` prints JSON, the others nothing. What a failed ``create`` has made is
removed again. Never run on this vendor's hardware.
"""

import ctypes
from typing import Any

from hami_nodeagent.libraries.loading import Errors, Failed, Kind, Library, Program, Trouble, main

_VERSION = 6
_NAME_SIZE, _UUID_SIZE = 100, 37
_INSTANCES = 256
_NAMES = {
    1: "NO_DRIVER", 2: "LOW_DRIVER_VERSION", 3: "UNSUPPORTED_API_VERSION", 4: "UNINITIALIZED",
    5: "INVALID_ARGUMENT", 6: "INVALID_DEVICE_ID", 7: "UNKNOWN", 8: "MALLOC",
    9: "INSUFFICIENT_SPACE", 10: "NOT_SUPPORTED", 11: "INVALID_LINK", 12: "NO_DEVICES",
    13: "NO_PERMISSION", 14: "NOT_FOUND", 15: "IN_USE", 16: "DUPLICATE", 17: "TIMEOUT",
    18: "IN_PROBLEM",
}  # fmt: skip
_KINDS = {
    1: Kind.MISSING,
    2: Kind.MISMATCH,
    3: Kind.MISMATCH,
    6: Kind.GONE,
    9: Kind.REFUSED,
    10: Kind.UNSUPPORTED,
    12: Kind.ABSENT,
    13: Kind.DENIED,
    14: Kind.GONE,
    15: Kind.BUSY,
}


class _Count(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("number", ctypes.c_int))


class _Uuid(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("uuid", ctypes.c_uint8 * _UUID_SIZE),
        ("ncs", ctypes.c_uint64),
    )


class _Mode(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("mode", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("quota", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
    )


class _ProfileIds(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("count", ctypes.c_int),
        ("ids", ctypes.c_int * 128),
    )


class _Profile(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("name", ctypes.c_char * _NAME_SIZE),
        ("total", ctypes.c_uint32),
        ("remain", ctypes.c_uint32),
        ("quota", ctypes.c_uint32 * 2),
        ("memory", ctypes.c_uint64 * 2),
    )


class _Instance(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("profile", ctypes.c_int),
        ("id", ctypes.c_int),
        ("uuid", ctypes.c_uint8 * _UUID_SIZE),
        ("domain", ctypes.c_int),
        ("bus", ctypes.c_int),
        ("device", ctypes.c_int),
        ("function", ctypes.c_int),
        ("profile_name", ctypes.c_char * _NAME_SIZE),
        ("name", ctypes.c_char * _NAME_SIZE),
        ("node", ctypes.c_char * _NAME_SIZE),
        ("quota", ctypes.c_uint32 * 2),
        ("memory", ctypes.c_uint64 * 2),
        ("reserved", ctypes.c_uint * 128),
    )


class Cndev:
    """The opened library."""

    def __init__(self, library: Library) -> None:
        """Initialise it."""
        self._library = library
        self._call = library.call
        self._call("cndevInit", 0)

    def cards(self) -> list[dict[str, Any]]:
        """Cards in sMLU mode, with what they are divided into."""
        count = _Count(version=_VERSION)
        self._call("cndevGetDeviceCount", ctypes.byref(count))
        return [card for slot in range(count.number) if (card := self._card(slot)) is not None]

    def create(self, uuid: str, quota: int, size: int, name: str) -> None:
        """A profile of that size, where there is none, and an instance of it."""
        device = self._find(uuid)
        profile = next(
            (p for p in self._profiles(device) if (p.quota[0], p.memory[0]) == (quota, size)), None
        )
        made = ctypes.c_int(-1 if profile is None else profile.id)
        if profile is None:
            wanted = _Set(version=_VERSION, quota=quota, memory=size)
            self._call(
                "cndevCreateSMluProfileInfo", ctypes.byref(wanted), ctypes.byref(made), device
            )
        handle = ctypes.c_int(0)
        try:
            self._call(
                "cndevCreateSMluInstanceByProfileId",
                *(ctypes.byref(handle), ctypes.c_uint(made.value), device, name.encode()),
            )
        except Failed:
            if profile is None:
                self._library.code("cndevDestroySMluProfileInfo", made, device)
            raise

    def destroy(self, uuid: str, instance: int) -> None:
        """One instance, by its number on the card."""
        device = self._find(uuid)
        slot = next(card["slot"] for card in self.cards() if card["uuid"] == uuid)
        self._call("cndevDestroySMluInstanceByHandle", ctypes.c_int(instance << 8 | slot))
        self.tidy_device(device)

    def tidy(self, uuid: str) -> None:
        """Remove profiles of which there is no instance."""
        self.tidy_device(self._find(uuid))

    def tidy_device(self, device: ctypes.c_int) -> None:
        """The same for an opened card."""
        used = {one.profile for one in self._instances(device)}
        for profile in self._profiles(device):
            if profile.id not in used and profile.remain == profile.total:
                self._library.code("cndevDestroySMluProfileInfo", ctypes.c_int(profile.id), device)

    # ---- reading --------------------------------------------------------------------------------

    def _card(self, slot: int) -> dict[str, Any] | None:
        device = self._device(slot)
        mode = _Mode(version=_VERSION)
        if not self._library.told("cndevGetSMLUMode", ctypes.byref(mode), device) or not mode.mode:
            return None
        memory = (ctypes.c_int64 * 64)()
        self._call("cndevGetMemoryUsageV2", ctypes.byref(memory), device)
        return {
            "slot": slot,
            "uuid": self._uuid(device),
            "memory_mib": memory[0],
            "profiles": [
                {"id": one.id, "quota": one.quota[0], "memory": one.memory[0]}
                for one in self._profiles(device)
            ],
            "instances": [
                {
                    "id": one.id,
                    "profile": one.profile,
                    "name": one.name.decode("utf-8", "replace"),
                    "node": one.node.decode("utf-8", "replace"),
                    "quota": one.quota[0],
                    "memory": one.memory[0],
                    "used": one.memory[1],
                }
                for one in self._instances(device)
            ],
        }

    def _find(self, uuid: str) -> ctypes.c_int:
        count = _Count(version=_VERSION)
        self._call("cndevGetDeviceCount", ctypes.byref(count))
        for slot in range(count.number):
            device = self._device(slot)
            if self._uuid(device) == uuid:
                return device
        raise Trouble(Kind.GONE, f"there is no card {uuid}")

    def _device(self, slot: int) -> ctypes.c_int:
        device = ctypes.c_int(0)
        self._call("cndevGetDeviceHandleByIndex", ctypes.c_int(slot), ctypes.byref(device))
        return device

    def _uuid(self, device: ctypes.c_int) -> str:
        found = _Uuid(version=_VERSION)
        self._call("cndevGetUUID", ctypes.byref(found), device)
        return bytes(found.uuid).partition(b"\0")[0].decode("ascii", "replace").lower()

    def _profiles(self, device: ctypes.c_int) -> list[_Profile]:
        ids = _ProfileIds(version=_VERSION)
        self._call("cndevGetSMluProfileIdInfo", ctypes.byref(ids), device)
        found = []
        for number in ids.ids[: ids.count]:
            profile = _Profile(version=_VERSION)
            self._call(
                "cndevGetSMluProfileInfo", ctypes.byref(profile), ctypes.c_int(number), device
            )
            found.append(profile)
        return found

    def _instances(self, device: ctypes.c_int) -> list[_Instance]:
        count = ctypes.c_int(_INSTANCES)
        found = (_Instance * _INSTANCES)()
        found[0].version = _VERSION
        self._call("cndevGetAllSMluInstanceInfo", ctypes.byref(count), ctypes.byref(found), device)
        return list(found[: count.value])


PROGRAM = Program(
    word="cndev",
    files=("libcndev.so",),
    folders=("$NEUWARE_HOME/lib64", "/usr/local/neuware/lib64"),
    errors=Errors(names=_NAMES, kinds=_KINDS),
    open=Cndev,
    commands={
        "list": lambda cndev: {"cards": cndev.cards()},
        "create": lambda cndev, uuid, quota, size, name: cndev.create(
            uuid, int(quota), int(size), name
        ),
        "destroy": lambda cndev, uuid, instance: cndev.destroy(uuid, int(instance)),
        "tidy": Cndev.tidy,
    },
)

if __name__ == "__main__":
    main(PROGRAM)
