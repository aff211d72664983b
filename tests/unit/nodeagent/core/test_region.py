# SPDX-License-Identifier: Apache-2.0
"""Bytes that a tenant wrote: parsed, or refused with the reason, never an exception."""

import subprocess
from pathlib import Path

import pytest

from hami_nodeagent.core import region
from hami_nodeagent.core.living import Owner
from hami_nodeagent.core.region import DeviceUse, Refused, Region, parse
from tests.support.regions import Built, Process, Used

HEADER_FILE = Path(__file__).parents[4] / "native" / "libvgpu" / "src" / "region.h"
GIB = 1 << 30

_C_NAMES = {
    "region_header": region.HEADER,
    "region_control": region.CONTROL,
    "region_share": region.SHARE,
    "region_slot": region.SLOT,
    "region_device": region.DEVICE,
}
_C_CONSTANTS = {
    "REGION_MAGIC": region.MAGIC,
    "REGION_LAYOUT": region.LAYOUT,
    "REGION_SLOTS": region.SLOTS_MAX,
    "REGION_DEVICES_MAX": region.DEVICES_MAX,
    "REGION_LINE": region.LINE,
    "REGION_UUID": region.UUID_BYTES,
}


def named(fields: tuple[tuple[str, str], ...]) -> dict[str, int]:
    """Offsets of named C fields; parts of a word are checked by their bits."""
    offsets = region.offsets_of(fields)
    return {name: at for name, at in offsets.items() if not name.startswith(("owner_", "share_"))}


def test_layout_is_that_of_the_c_header(tmp_path: Path) -> None:
    lines = ["#include <stdio.h>", "#include <string.h>", f'#include "{HEADER_FILE}"']
    lines.append("int main(void) {")
    for name, fields in _C_NAMES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        lines.extend(
            f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));'
            for field in named(fields)
        )
    lines.extend(f'printf("{name} %llu\\n", 0ULL + {name});' for name in _C_CONSTANTS)
    lines.append('printf("name %s\\n", REGION_FILE_NAME);')
    # The words of 16 bytes: meaning of the bits of each half.
    lines += [
        "union region_share_word s = {0}; s.slack = 5; s.leased = (1ULL << 48) - 1;",
        "unsigned long long h[2];",
        'memcpy(h, &s, 16); printf("share %llu %llu\\n", h[0], h[1]);',
        "union region_owner o = {0}; o.pid = 1; o.pid_namespace = 2; o.start_ticks = 3;",
        'memcpy(h, &o, 16); printf("owner %llu %llu\\n", h[0], h[1]);',
        "return 0; }",
    ]
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join(lines))
    subprocess.run(["cc", "-std=gnu11", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = dict(line.split(" ", 1) for line in printed.splitlines())
    wanted = {name: str(value) for name, value in _C_CONSTANTS.items()}
    for name, fields in _C_NAMES.items():
        wanted[name] = str(region.layout_of(fields).size)
        for field, offset in named(fields).items():
            wanted[f"{name}.{field}"] = str(offset)
    wanted["name"] = region.FILE_NAME
    wanted["share"] = f"5 {(1 << 48) - 1}"
    wanted["owner"] = f"{1 | 2 << 32} 3"
    assert found == wanted


def test_use_of_all_processes_is_added_up_by_device() -> None:
    data = Built(
        uuids=("GPU-a", "GPU-b"),
        processes=(
            Process(7, (Used(GIB, context=5, module=6), Used(10)), last_launch_ns=3),
            Process(8, (Used(1), Used(20, context=1)), last_launch_ns=9, launches=4, slot=5),
        ),
        over_since_ns={1: 99},
        counters=(3, 4),
    ).data()
    found = parse(data)
    assert isinstance(found, Region)
    assert found.devices == {
        "GPU-a": DeviceUse(
            used_bytes=GIB + 1, leased_bytes=GIB + 7, context_bytes=5, module_bytes=6
        ),
        "GPU-b": DeviceUse(used_bytes=30, leased_bytes=36, context_bytes=1, over_since_ns=99),
    }
    assert [(one.owner.pid, one.launches) for one in found.processes] == [(7, 0), (8, 4)]
    assert found.last_launch_ns == 9
    assert (found.reclaimed, found.errors) == (3, 4)


def test_only_wanted_devices_are_read() -> None:
    use = Process(7, (Used(1), Used(2), Used(3), Used(4)))
    data = Built(uuids=("GPU-a", "GPU-b", "GPU-b", "GPU-c"), processes=(use,)).data()
    found = parse(data, uuids={"GPU-b", "GPU-x"})
    assert isinstance(found, Region)
    assert found.devices == {"GPU-b": DeviceUse(used_bytes=2, leased_bytes=5)}


def test_slots_of_dead_processes_use_nothing_and_keep_their_counters() -> None:
    data = Built(
        processes=(
            Process(7, (Used(GIB, context=5),), launches=3, last_launch_ns=9),
            Process(8, (Used(20),), namespace=4),
        )
    ).data()
    gone = Owner(pid=7, namespace=1, start_ticks=1)
    found = parse(data, lambda owners: owners & {gone} if isinstance(owners, frozenset) else ())
    assert isinstance(found, Region)
    assert found.devices == {"GPU-0": DeviceUse(used_bytes=20, leased_bytes=23)}
    assert [one.owner.pid for one in found.processes] == [8]
    assert [(one.owner, one.launches) for one in found.ended] == [(gone, 3)]
    assert found.last_launch_ns == 9


def test_slots_without_an_owner_count_nothing() -> None:
    free = Process(0, (Used(GIB),), last_launch_ns=5)
    found = parse(Built(processes=(free,)).data())
    assert found == Region(devices={"GPU-0": DeviceUse()}, processes=())


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"magic": 0}, "magic"),
        ({"layout": 2}, "layout"),
        ({"header_bytes": 64}, "header"),
        ({"file_bytes": 1}, "header"),
        ({"device_count": 0}, "header"),
        ({"device_count": 65}, "header"),
        ({"slot_count": 0}, "header"),
        ({"slot_count": 2049}, "header"),
        ({"devices_offset": 0}, "header"),
        ({"devices_offset": 65}, "header"),
        ({"slots_offset": 2**64 - 64}, "header"),
        ({"shares_offset": 2**63}, "header"),
        ({"checksum": 1}, "checksum"),
    ],
)
def test_header_that_does_not_hold_is_refused(header: dict[str, int], reason: str) -> None:
    assert parse(Built().data(**header)) == Refused(reason=reason)  # type: ignore[arg-type]  # table of words


def test_count_of_slots_beyond_the_file_is_rejected() -> None:
    data = Built(processes=(Process(1, (Used(5),)),)).data(slots_seen=2**32 - 1)
    found = parse(data)
    assert isinstance(found, Region)
    assert found.devices["GPU-0"].used_bytes == 5


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300])
def test_truncated_region_is_refused(size: int) -> None:
    outcome = parse(Built().data()[:size])
    assert isinstance(outcome, Refused)
    assert isinstance(parse(bytes(region.SIZE_MAX + 1)), Refused)
