# SPDX-License-Identifier: Apache-2.0
"""Machines whose devices are divided, one per vendor: fixtures of the partitioner contract."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from msgspec import Struct, structs

from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.errors import DeviceHung, PartitionRefused
from hami_nodeagent.drivers.hygon import parse as hygon
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.tool import Answer, Tool
from tests.fakes import vendorparts
from tests.fakes.vendortools import VendorTools
from tests.support.fake_dcmi import FakeDcmi
from tests.support.fake_xpuml import FakeXpuml

NODE = "node-a"


class Kind(Struct, frozen=True, kw_only=True):
    """Partitioning of one vendor, for tests."""

    vendor: str
    way: str = ""
    """Interface, where the vendor has two."""
    model: str = ""
    sizes: tuple[tuple[str, str, int, int], ...]
    """Profile, kind, memory and compute of valid requests; the first fits ``room`` times."""
    room: int
    """Number of partitions of the first size on an empty device."""
    step_mib: int = 1
    """Memory comes in multiples of this."""
    words: tuple[str, ...]
    """Handles that each instance has."""
    create: str
    """Part of the command that creates one; empty: files, not a command, create it."""
    destroy: str = ""
    tells_busy: bool = False
    """The list shows which partitions are in use."""
    refuses_busy: bool = False
    """The tool refuses to remove a partition in use."""

    @property
    def name(self) -> str:
        """Vendor, and the interface where there are two."""
        return f"{self.vendor}-{self.way}" if self.way else self.vendor


_METAX = Kind(
    vendor="metax",
    sizes=(("", "fixed-share", 16384, 20), ("", "fixed-share", 9088, 5)),
    room=4,
    step_mib=128,
    words=("sgpu", "alias"),
    create="--create",
    destroy="--remove",
    tells_busy=True,
    refuses_busy=True,
)
_KUNLUNXIN = Kind(
    vendor="kunlunxin",
    sizes=(("1/4", "1/4", 24576, 25), ("1/2", "1/2", 49152, 50)),
    room=4,
    words=("number",),
    create="--set-sriov-numvfs=4",
    destroy="--set-sriov-numvfs=0",
)
KINDS = (
    Kind(
        vendor="ascend",
        sizes=(("vir05_1c_16g", "", 16384, 25), ("vir10_3c_32g", "", 32768, 50)),
        room=4,
        words=("vnpu_id",),
        create="create-vnpu",
        destroy="destroy-vnpu",
        tells_busy=True,
        refuses_busy=True,
    ),
    Kind(
        vendor="ascend",
        way="dcmi",
        sizes=(("vir05_1c_16g", "", 16384, 25), ("vir10_3c_32g", "", 32768, 50)),
        room=4,
        words=("vnpu_id",),
        create="create",
        destroy="destroy",
        tells_busy=True,
        refuses_busy=True,
    ),
    Kind(
        vendor="enflame",
        sizes=(
            ("1g.7gb", "", 7162, 16),
            ("2g.14gb", "", 14325, 33),
            ("3g.21gb", "", 21488, 50),
            ("6g.42gb", "", 42976, 100),
        ),
        room=6,
        words=("instance_uuid",),
        create="--create-instance",
        destroy="--destroy-instance",
        refuses_busy=True,
    ),
    _METAX,
    structs.replace(_METAX, way="mxsml", create="create", destroy="remove"),
    _KUNLUNXIN,
    structs.replace(_KUNLUNXIN, way="xpuml", create=":00.0 4", destroy=":00.0 0"),
    Kind(
        vendor="cambricon",
        sizes=(("", "", 4660, 20), ("", "", 2560, 10)),
        room=5,
        words=("cap_node", "name"),
        create="create",
        destroy="destroy",
        tells_busy=True,
        refuses_busy=True,
    ),
    Kind(
        vendor="hygon",
        sizes=(("", "", 16380, 25), ("", "", 8190, 10)),
        room=4,
        words=("config_directory",),
        create="",
    ),
    Kind(
        vendor="amd",
        sizes=(("", "", 24536, 25), ("", "", 8190, 7)),
        room=4,
        words=("cu_mask",),
        create="",
    ),
)
ASCEND_MODELS = ("910B2", "910B3", "910B4", "910ProA", "310P3", "Ascend910")


def ascend_kind(model: str, way: str = "") -> Kind:
    """Partitioning of one Ascend chip: every template that it has."""
    chip = vendorparts.ASCEND_CHIPS[model]
    cores = chip["totals"][0]
    return structs.replace(
        KIND_BY_VENDOR["ascend"],
        way=way,
        create="create" if way else "create-vnpu",
        destroy="destroy" if way else "destroy-vnpu",
        model=model,
        sizes=tuple(
            (name, "", amounts[1] * 1024, 100 * amounts[0] // cores)
            for name, amounts in sorted(chip["templates"].items())
        ),
    )


KIND_BY_VENDOR = {kind.name: kind for kind in KINDS}
"""By vendor, or vendor and interface."""


class PartBench:
    """A machine of ``kind`` with two devices that are divided."""

    def __init__(self, kind: Kind, folder: Path, *, count: int = 2) -> None:
        self.kind = kind
        self.folder = folder
        self.gives_up = True
        """Tools that answer in process end at their time limit; otherwise they run until killed."""
        self.tools: VendorTools | FakeDcmi | FakeXpuml
        if kind.way == "dcmi":
            self.tools = FakeDcmi(folder, count, node=NODE, model=kind.model)
        elif kind.way == "xpuml":
            self.tools = FakeXpuml(folder, count, node=NODE)
        else:
            self.tools = VendorTools(
                folder, kind.vendor, count, node=NODE, model=kind.model, divided=True
            )

    def answer_in_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer tools without processes: the same output, a hundred times as fast."""

        async def run(tool: Tool, *arguments: str, **_: object) -> Answer:
            await anyio.lowlevel.checkpoint()
            try:
                said = self.tools.say(tool.name, arguments)
            except TimeoutError:
                if not self.gives_up:
                    await anyio.sleep_forever()
                doing = " ".join((tool.name, *arguments))
                raise DeviceHung(doing=doing, detail="no answer within 2 s") from None
            return Answer(text=said.text, complaint=said.complaint, status=said.status)

        monkeypatch.setattr(Tool, "run", run)

    @property
    def uuids(self) -> list[str]:
        return [self.tools.uuid_of(index) for index in range(2)]

    def partitioner(self, **settings: object) -> Partitioner:
        driver = build_driver(
            self.kind.vendor,
            {
                **self.tools.settings,
                **({"interface": "library"} if self.kind.way else {}),
                "answer_age_s": 0.0,
                "confirm_s": 0.001,
                **settings,
            },
        )
        assert driver.partitioner is not None
        return driver.partitioner

    def wanted(self, index: int = 0, size: int = 0) -> Wanted:
        profile, kind, memory_mib, core_pct = self.kind.sizes[size]
        return Wanted(
            uuid=self.tools.uuid_of(index),
            profile=profile,
            kind=kind,
            memory_mib=memory_mib,
            core_pct=core_pct,
        )

    def overbooked(self, index: int = 0) -> str:
        """Violation in a device's partitions by the machine itself; empty: none.

        Read from the machine's own state, not through the driver.
        """
        return _CHECKS[self.kind.vendor](self, index)

    def in_hardware(self, index: int = 0) -> int:
        """Number of partitions on a device by the machine itself."""
        vendor = self.kind.vendor
        if vendor == "kunlunxin":
            address = self.tools.bus_id_of(index)[:-4]
            return sum(path.name.startswith(address) for path in self._shares("kunlunxin"))
        if vendor == "hygon":
            return len(_vdcus(self, index)) // 2
        if vendor == "amd":
            return len(self._shares(f"amd/{self.uuids[index]}"))
        return len(self.tools.parts(index))

    def litter(self, index: int = 0) -> str:
        """Leftovers on an empty device."""
        if count := self.in_hardware(index):
            return f"{count} partitions"
        if profiles := self.tools.profiles(index):
            return f"{profiles} profiles that nobody uses"
        if self.tools.cuts(index):
            return f"it is still cut into {self.tools.cuts(index)}"
        left = [
            str(path)
            for root in (self.tools.etc, self.folder / "shares")
            for path in root.rglob("*")
            if path.is_file()
        ]
        return ", ".join(left)

    def _shares(self, name: str) -> list[Path]:
        folder = self.folder / "shares" / name
        paths = list(folder.iterdir()) if folder.is_dir() else []
        return [path for path in paths if path.is_file() and not path.name.startswith(".")]

    def masks(self, index: int) -> list[int]:
        return [
            int(json.loads(path.read_text())["mask"], 16)
            for path in self._shares(f"amd/{self.uuids[index]}")
        ]


def _vdcus(bench: PartBench, index: int) -> list[hygon.Vdcu]:
    paths = [
        *(bench.tools.etc / "vdev").glob("vdev*.conf"),
        *(bench.folder / "shares/dcu").glob("vdev*/vdev0.conf"),
    ]
    found = [hygon.vdcu(path.read_text()) for path in paths]
    return [one for one in found if one.bus_id == bench.tools.bus_id_of(index)]


def _overlap(masks: Iterable[int], units: int) -> str:
    taken = 0
    for mask in masks:
        if not mask or mask & taken or mask >> units:
            return f"mask {mask:x} overlaps {taken:x}, is empty or beyond {units} units"
        taken |= mask
    return ""


def _ascend(bench: PartBench, index: int) -> str:
    chip = vendorparts.ASCEND_CHIPS[bench.kind.model or "910B3"]
    live = [chip["templates"][str(one["template"])] for one in bench.tools.parts(index).values()]
    for at, total in enumerate(chip["totals"]):
        if total is not None and sum(amounts[at] for amounts in live) > total:
            return f"column {at} of {live} exceeds {total}"
    return ""


def _enflame(bench: PartBench, index: int) -> str:
    live = [str(one["profile"]) for one in bench.tools.parts(index).values()]
    slices = sum(int(name.partition("g")[0]) for name in live)
    return f"{slices} slices" if slices > vendorparts.ENFLAME_SLICES else ""


def _metax(bench: PartBench, index: int) -> str:
    live = json.loads(json.dumps(list(bench.tools.parts(index).values())))
    over = (
        len(live) > vendorparts.METAX_MOST
        or sum(one["vram"] for one in live) > bench.tools.make.memory_mib
        or sum(one["compute"] for one in live) > 100
        or len({one["alias"] for one in live}) != len(live)
    )
    return f"{live}" if over else ""


def _kunlunxin(bench: PartBench, index: int) -> str:
    given = bench.in_hardware(index)
    cut = bench.tools.cuts(index)
    return f"{given} given of {cut}" if given > cut else ""


def _hygon(bench: PartBench, index: int) -> str:
    own = [one for one in _vdcus(bench, index) if one.device == 0]
    own = list({one.vdev: one for one in own}.values())
    if len(own) > 4 or sum(one.memory_mib for one in own) > bench.tools.make.memory_mib:
        return f"{own}"
    if len({one.pipe for one in own}) != len(own):
        return f"pipes of {own}"
    return _overlap((one.masks[0] | one.masks[1] << 64 for one in own), 120)


def _cambricon(bench: PartBench, index: int) -> str:
    live = json.loads(json.dumps(list(bench.tools.parts(index).values())))
    over = (
        sum(one["memory"] for one in live) > bench.tools.make.memory_mib << 20
        or sum(one["quota"] for one in live) > 100
        or len({one["name"] for one in live}) != len(live)
        or bench.tools.profiles(index) != len({(one["quota"], one["memory"]) for one in live})
    )
    return f"{live}, {bench.tools.profiles(index)} profiles" if over else ""


_CHECKS: dict[str, Callable[[PartBench, int], str]] = {
    "ascend": _ascend,
    "cambricon": _cambricon,
    "enflame": _enflame,
    "metax": _metax,
    "kunlunxin": _kunlunxin,
    "hygon": _hygon,
    "amd": lambda bench, index: _overlap(bench.masks(index), 304),
}


async def fill(bench: PartBench, partitioner: Partitioner, index: int = 0) -> list[Instance]:
    """Make partitions of the first size until the device refuses."""
    made: list[Instance] = []
    for _ in range(40):
        try:
            made.append(await partitioner.create(bench.wanted(index)))
        except PartitionRefused:
            break
    return made
