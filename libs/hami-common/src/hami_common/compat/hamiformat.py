# SPDX-License-Identifier: Apache-2.0
"""Reads and writes HAMi 2.10's annotations: devices of nodes, shares of pods.

Formats are those of HAMi (its ``pkg/device/devices.go``)::

    shares of a pod     ``<id>,<type>,<MiB>,<cores>:`` for each device, ``;`` after each container
    devices of a node   a JSON list, or ``<id>,<count>,<MiB>,<cores>,<type>,<numa>,<health>[,<index>
                        ,<mode>]:`` for each device, by vendor
    MIG instances       a JSON list beside the shares

A text that does not decode raises ``WireInvalid`` with the name of the annotation, and no other
error. Other programs write the texts, so length and numbers are bounded. A vendor is given by our
word for it, a *word* is HAMi's. Memory in MiB, compute in the vendor's unit for it. Pure.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from hami_common import bounds
from hami_common.bounds import CapacityMib, Count, DeviceId, GridPosition, Index, SignedInt32
from hami_common.errors import WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.units import shown, whole

MOST_TEXT: Final = 262_144
"""Kubernetes' own bound of all annotations of an object, in bytes."""
MOST_CONTAINERS: Final = 512
MOST_DEVICES: Final = 512
"""Of one container; a node of HAMi's has at most 64 splits of 16 devices."""

NODE: Final = "hami.io/vgpu-node"
"""Annotation and label of a pod with its node. HAMi counts the pods that have it."""
TIME: Final = "hami.io/vgpu-time"
BIND_TIME: Final = "hami.io/bind-time"
BIND_PHASE: Final = "hami.io/bind-phase"
BOUND: Final = "success"
BINDING: Final = "allocating"
MIG: Final = "hami.io/vgpu-mig-allocations"
ASCEND_CHIPS: Final = "huawei.com/"
"""Beginning of the annotation of a pod with its Ascend chips of one word, as a JSON list."""
ASCEND_SOFT: Final = "hami-vnpu-core"
"""Annotation of a node: ``true`` where its Ascend chips have soft shares, else ``false``."""

ASCEND_WORDS: Final = (
    "Ascend910A",
    "Ascend910B2",
    "Ascend910B3",
    "Ascend910B4",
    "Ascend910B4-1",
    "Ascend910C",
    "Ascend310P",
)
ILUVATAR_WORDS: Final = ("MR-V100", "MR-V50", "BI-V150", "BI-V100")


class Word(Struct, frozen=True, kw_only=True):
    """One of HAMi's kinds of devices, and the annotations with its data."""

    vendor: str
    word: str
    """In the shares of a pod."""
    allocated: str
    """Annotation of a pod."""
    register: str = ""
    """Annotation of a node with its devices; empty: they follow from the node's capacity."""
    form: Literal["json", "csv"] = "json"
    handshake: str = ""
    numbered: str = ""
    """Devices are called ``<node>-<this>-<number>``."""
    is_whole: bool = False
    """Devices are given whole; the amounts beside them have no meaning."""


def _chip(vendor: str, word: str, form: Literal["json", "csv"]) -> Word:
    return Word(
        vendor=vendor,
        word=word,
        allocated=f"hami.io/{word}-devices-allocated",
        register=f"hami.io/node-register-{word}"
        if form == "json"
        else f"hami.io/node-{word}-register",
        form=form,
        handshake=f"hami.io/node-handshake-{word}",
    )


WORDS: Final[tuple[Word, ...]] = (
    Word(
        vendor="nvidia",
        word="NVIDIA",
        allocated="hami.io/vgpu-devices-allocated",
        register="hami.io/node-nvidia-register",
        handshake="hami.io/node-handshake",
    ),
    *(_chip("ascend", word, "json") for word in ASCEND_WORDS),
    Word(
        vendor="cambricon",
        word="MLU",
        allocated="hami.io/cambricon-mlu-devices-allocated",
        numbered="cambricon-mlu",
    ),
    Word(
        vendor="hygon",
        word="DCU",
        allocated="hami.io/dcu-devices-allocated",
        register="hami.io/node-dcu-register",
        form="csv",
        handshake="hami.io/node-handshake-dcu",
    ),
    *(_chip("iluvatar", word, "csv") for word in ILUVATAR_WORDS),
    Word(
        vendor="mthreads",
        word="Mthreads",
        allocated="hami.io/mthreads-vgpu-devices-allocated",
        numbered="mthreads",
    ),
    Word(
        vendor="metax",
        word="Metax-GPU",
        allocated="hami.io/metax-gpu-devices-allocated",
        numbered="metax",
        is_whole=True,
    ),
    Word(vendor="metax", word="Metax-SGPU", allocated="hami.io/metax-sgpu-devices-allocated"),
    Word(
        vendor="enflame",
        word="GCU",
        allocated="hami.io/enflame-gcu-devices-allocated",
        numbered="GCU",
        is_whole=True,
    ),
    Word(
        vendor="enflame",
        word="Enflame",
        allocated="hami.io/enflame-vgpu-devices-allocated",
        numbered="enflame-drs",
    ),
    Word(
        vendor="kunlunxin",
        word="kunlun",
        allocated="hami.io/kunlun-allocated",
        numbered="kunlun",
        is_whole=True,
    ),
    Word(
        vendor="kunlunxin",
        word="XPU",
        allocated="hami.io/xpu-devices-allocated",
        register="hami.io/node-register-xpu",
        handshake="hami.io/node-handshake-xpu",
        numbered="kunlun",
    ),
    Word(
        vendor="awsneuron",
        word="AWSNeuron",
        allocated="hami.io/aws-neuron-devices-allocated",
        numbered="AWSNeuron",
    ),
    Word(
        vendor="amd",
        word="AMD",
        allocated="hami.io/amd-devices-allocated",
        register="hami.io/node-amd-register",
    ),
    Word(
        vendor="vastai",
        word="Vastai",
        allocated="hami.io/Vastai-devices-allocated",
        register="hami.io/node-va-register",
        handshake="hami.io/node-handshake-va",
        is_whole=True,
    ),
    Word(
        vendor="biren",
        word="Biren",
        allocated="hami.io/Biren-devices-allocated",
        register="hami.io/node-biren-register",
        handshake="hami.io/node-handshake-biren",
        is_whole=True,
    ),
)


class Given(Struct, frozen=True, kw_only=True):
    """One device in the shares of a container."""

    id: str
    type: str
    memory_mib: int
    cores: int
    """In the vendor's unit: percent, sixteenths, compute units, or a mask of cores."""


class MigProfile(Struct, frozen=True, kw_only=True):
    """A size into which a registered device can be divided."""

    name: str
    memory_mib: int
    core_pct: int
    slices: int
    size: int
    starts: tuple[int, ...]


class Registered(Struct, frozen=True, kw_only=True):
    """One device as a node of HAMi's registers it."""

    id: str
    index: int | None = None
    """The vendor's number; ``None`` when the form does not contain it."""
    count: int = 0
    memory_mib: int = 0
    cores: int = 0
    type: str = ""
    numa: int = 0
    mode: str = "hami-core"
    profiles: tuple[MigProfile, ...] = ()
    """Of a device in MIG mode; never read."""
    healthy: bool = True


class MigInstance(Struct, frozen=True, kw_only=True):
    """One MIG instance beside the shares of a pod."""

    container: int
    """Position among the pod's containers, those that start first before all others."""
    device: int
    """Position among the container's shares."""
    uuid: str
    profile: str
    start: int
    size: int


# --- shares of a pod ------------------------------------------------------------------------------


def decode_shares(text: str, *, what: str) -> tuple[tuple[Given, ...], ...]:
    """Devices of each container, empty where it has none; ``what`` names the annotation."""
    check_length(text, what)
    containers = text.split(";")
    if containers[-1].strip():
        raise WireInvalid(what=what, problem="does not end with ';', so it may be cut off")
    containers.pop()
    if len(containers) > MOST_CONTAINERS:
        raise WireInvalid(what=what, problem=f"names {len(containers)} containers")
    return tuple(decode_container(one, what) for one in containers)


def decode_container(text: str, what: str) -> tuple[Given, ...]:
    """Devices of one container."""
    entries = [one for one in text.strip().split(":") if one.strip()]
    if len(entries) > MOST_DEVICES:
        raise WireInvalid(what=what, problem=f"names {len(entries)} devices of one container")
    given = []
    for entry in entries:
        fields = [field.strip() for field in entry.split(",")]
        # Check entry by entry: in no version of HAMi does a type contain commas.
        if len(fields) < 4:  # noqa: PLR2004 - id, type, memory, cores
            raise WireInvalid(what=what, problem=f"{shown(entry)} is not <id>,<type>,<MiB>,<cores>")
        if not fields[0]:
            raise WireInvalid(what=what, problem=f"{shown(entry)} names no device")
        given.append(
            Given(
                id=fields[0],
                type=fields[1],
                memory_mib=decode_number(fields[2], entry, what),
                cores=decode_number(fields[3], entry, what),
            )
        )
    return tuple(given)


def encode_shares(containers: Iterable[Sequence[Given]]) -> str:
    """The shares of all containers of a pod, including containers without shares."""
    return "".join(
        "".join(f"{one.id},{one.type},{one.memory_mib},{one.cores}:" for one in given) + ";"
        for given in containers
    )


class _PlacementLine(Struct, frozen=True, kw_only=True):
    start: GridPosition = 0
    size: GridPosition = 0


class _MigLine(Struct, frozen=True, kw_only=True, rename="camel"):
    container_index: Count = 0
    device_index: Count = 0
    gpu_uuid: DeviceId = msgspec.field(default="", name="gpuUUID")
    profile: bounds.Word = ""
    placement: _PlacementLine = _PlacementLine()


_mig_decoder = msgspec.json.Decoder(list[_MigLine])


def decode_mig(text: str, *, what: str = MIG) -> tuple[MigInstance, ...]:
    """MIG instances of a pod."""
    check_length(text, what)
    try:
        lines = _mig_decoder.decode(text.encode())
    except UNDECODABLE as error:
        raise WireInvalid(what=what, problem=f"does not decode: {error}") from error
    found = [
        MigInstance(
            container=line.container_index,
            device=line.device_index,
            uuid=line.gpu_uuid,
            profile=line.profile,
            start=line.placement.start,
            size=line.placement.size,
        )
        for line in lines
    ]
    places = {(one.container, one.device) for one in found}
    if len(places) != len(found):
        raise WireInvalid(what=what, problem="names one share twice")
    for one in found:
        if min(one.container, one.device, one.start, one.size) < 0 or not one.profile:
            raise WireInvalid(what=what, problem=f"an instance of {one.uuid!r} has no place")
    return tuple(found)


# --- devices of a node ----------------------------------------------------------------------------


class _ProfileLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: bounds.Word = ""
    memory_mib: CapacityMib = msgspec.field(default=0, name="memoryMB")
    core: Count = 0
    slice_count: Count = msgspec.field(default=0, name="sliceCount")
    placements: tuple[_PlacementLine, ...] = ()


class _RegisterLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: DeviceId = ""
    index: Index = 0
    count: Count = 0
    devmem: CapacityMib = 0
    devcore: Count = 0
    type: bounds.Word = ""
    numa: SignedInt32 = 0
    mode: bounds.Word = ""
    mig_profiles: tuple[_ProfileLine, ...] = msgspec.field(default=(), name="migProfiles")
    health: bool = False
    devicevendor: bounds.Word = ""


_register_decoder = msgspec.json.Decoder(list[_RegisterLine])
_register_encoder = msgspec.json.Encoder()
_BARE, _NUMBERED = 7, 9
"""Fields of a device in the form with commas."""


def decode_register(text: str, word: Word) -> tuple[Registered, ...]:
    """Devices that a node registers under ``word``."""
    what = f"annotation {word.register}"
    check_length(text, what)
    return _decode_csv(text, what) if word.form == "csv" else _decode_json(text, what)


def _decode_json(text: str, what: str) -> tuple[Registered, ...]:
    try:
        lines = _register_decoder.decode(text.encode())
    except UNDECODABLE as error:
        raise WireInvalid(what=what, problem=f"does not decode: {error}") from error
    for line in lines:
        if not line.id:
            raise WireInvalid(what=what, problem="a device has no id")
    return tuple(
        Registered(
            id=line.id,
            index=line.index,
            count=line.count,
            memory_mib=line.devmem,
            cores=line.devcore,
            type=line.type,
            numa=line.numa,
            mode=line.mode or "hami-core",
            healthy=line.health,
        )
        for line in lines
    )


def _decode_csv(text: str, what: str) -> tuple[Registered, ...]:
    found = []
    for entry in text.split(":"):
        if not entry.strip():
            continue
        fields = [field.strip() for field in entry.split(",")]
        if len(fields) not in (_BARE, _NUMBERED) or not fields[0]:
            raise WireInvalid(what=what, problem=f"{shown(entry)} has not 7 or 9 fields")
        is_numbered = len(fields) == _NUMBERED
        found.append(
            Registered(
                id=fields[0],
                count=decode_number(fields[1], entry, what),
                memory_mib=decode_number(fields[2], entry, what),
                cores=decode_number(fields[3], entry, what),
                type=fields[4],
                numa=decode_number(fields[5], entry, what),
                healthy=fields[6] == "true",
                index=decode_number(fields[7], entry, what) if is_numbered else None,
                mode=fields[8] if is_numbered else "hami-core",
            )
        )
    return tuple(found)


def encode_register(devices: Iterable[Registered], word: Word) -> str:
    """The devices of a node, as HAMi and its readers expect them."""
    if word.form == "csv":
        return "".join(
            f"{one.id},{one.count},{one.memory_mib},{one.cores},{one.type},{one.numa},"
            f"{'true' if one.healthy else 'false'},{one.index or 0},{one.mode}:"
            for one in devices
        )
    lines = [
        _RegisterLine(
            id=one.id,
            index=one.index or 0,
            count=one.count,
            devmem=one.memory_mib,
            devcore=one.cores,
            type=one.type,
            numa=one.numa,
            mode=one.mode,
            mig_profiles=tuple(map(_profile_line, one.profiles)),
            health=one.healthy,
            devicevendor=word.word,
        )
        for one in devices
    ]
    return _register_encoder.encode(lines).decode()


def _profile_line(profile: MigProfile) -> _ProfileLine:
    return _ProfileLine(
        name=profile.name,
        memory_mib=profile.memory_mib,
        core=profile.core_pct,
        slice_count=profile.slices,
        placements=tuple(
            _PlacementLine(start=start, size=profile.size) for start in profile.starts
        ),
    )


_NUMBERED_ID = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,4})", re.ASCII)


def number_in(device_id: str, word: Word, node: str) -> int | None:
    """N of ``<node>-<word>-N``; ``None`` where the id has another form."""
    match = _NUMBERED_ID.fullmatch(device_id)
    if not word.numbered or match is None or match["stem"] != f"{node}-{word.numbered}":
        return None
    return int(match["number"])


def check_length(text: str, what: str) -> None:
    """Raise ``WireInvalid`` for a text that no annotation can have."""
    if len(text) > MOST_TEXT:
        raise WireInvalid(what=what, problem=f"has {len(text)} characters")


def decode_number(text: str, entry: str, what: str) -> int:
    """Return an amount in an entry."""
    number = whole(text)
    if number is None:
        raise WireInvalid(what=what, problem=f"{shown(text)} in {shown(entry)} is no amount")
    return number
