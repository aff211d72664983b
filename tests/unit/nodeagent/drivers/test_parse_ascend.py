# SPDX-License-Identifier: Apache-2.0
"""Output of npu-smi's generations: columns by their heads, numberings, templates, errors."""

import pytest

from hami_nodeagent.drivers.ascend import parse as ascend
from hami_nodeagent.drivers.ascend.parse import Instance, Place
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceBusy,
    DriverError,
    DriverMissing,
    NotSupported,
)
from hami_nodeagent.drivers.parse.seen import Condition
from hami_nodeagent.drivers.parse.trouble import trouble
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour
from tests.unit.nodeagent.drivers.outputs import golden


def test_two_chips_of_one_board_share_number_and_address() -> None:
    chips, version = ascend.info(golden("ascend/info_310p.txt"))
    assert version == "23.0.rc3"
    assert [chip.key for chip in chips] == [(3, 0), (3, 1), (6, 0)]
    assert [chip.bus_id for chip in chips] == ["0000:5e:00.0", "0000:5e:00.0", "0000:af:00.0"]
    assert [(chip.used_mib, chip.total_mib) for chip in chips] == [
        (2210, 44280),
        (1702, 43693),
        (6144, 21527),
    ]
    assert [chip.power_w for chip in chips] == [None, None, 17.4]
    assert [chip.condition for chip in chips] == [Condition.GOOD] * 3


def test_on_chip_memory_is_preferred() -> None:
    chips, _ = ascend.info(golden("ascend/info_910a.txt"))
    assert [(chip.used_mib, chip.total_mib) for chip in chips] == [(29411, 32768), (0, 32768)]
    assert [chip.condition for chip in chips] == [Condition.GOOD, Condition.BAD]
    assert chips[1].health == "Critical"


def test_second_die_has_no_power_and_its_processes_are_its_own() -> None:
    chips, _ = ascend.info(golden("ascend/info_910c.txt"))
    assert [chip.physical for chip in chips] == [12, 13]
    assert [chip.power_w for chip in chips] == [168.9, None]
    assert chips[0].processes == ()
    assert chips[1].processes == (
        ProcessUsage(pid=40417, used_mib=57002),
        ProcessUsage(pid=40418, used_mib=1200),
    )


def test_numbers_are_distinguished_and_controllers_left_out() -> None:
    assert ascend.mapping(golden("ascend/map_910c.txt")) == {
        (6, 0): Place(logic=4, physical=12, name="Ascend910"),
        (6, 1): Place(logic=5, physical=13, name="Ascend910"),
    }
    assert ascend.mapping(golden("ascend/map_310p.txt"))[6, 0] == Place(
        logic=2, physical=None, name="310P3"
    )


def test_parts_of_a_die_id_are_padded() -> None:
    board = ascend.board(golden("ascend/board_chip.txt"))
    assert board.die == "9C04F1B2-30A10C44-0140C979-20000001-B1000007"
    card = ascend.board(golden("ascend/board_card.txt"))
    assert (card.die, card.serial) == ("", "102XYZ77P0000341")


@pytest.mark.parametrize(
    ("chip", "word"),
    [
        ("910B3", "Ascend910B3"),
        ("910B4-1", "Ascend910B4-1"),
        ("Ascend 910B4", "Ascend910B4"),
        ("Ascend910", "Ascend910C"),
        ("910A", "Ascend910A"),
        ("910ProA", "Ascend910A"),
        ("310P3", "Ascend310P"),
    ],
)
def test_chip_names_become_the_names_that_users_write(chip: str, word: str) -> None:
    assert ascend.type_of(chip) == word


def test_templates_have_all_that_they_take() -> None:
    by_name = {one.name: one for one in ascend.templates(golden("ascend/templates_310p.txt"))}
    assert list(by_name) == ["vir01", "vir02", "vir04_3c"]
    assert by_name["vir04_3c"].memory_mib == 12288
    assert by_name["vir04_3c"].resources == {
        "aicore": 4,
        "aicpu": 3,
        "vpc": 6,
        "venc": 1,
        "jpegd": 8,
        "vdec": 6,
        "jpege": 4,
    }


def test_division_lists_free_amounts_and_instances() -> None:
    division = ascend.division(golden("ascend/division_two.txt"))
    assert (division.free_gib, division.memory_gib) == (12, 21)
    assert (division.free["aicpu"], division.totals["aicpu"]) == (4, 7)
    assert "pngd" not in division.totals
    assert division.instances == (
        Instance(id=196, template="vir01", used=True, container="ffffffffffff"),
        Instance(id=197, template="vir02", used=False, container="000000000000"),
    )


def test_fewer_instances_than_announced_are_no_answer() -> None:
    text = golden("ascend/division_two.txt")
    without = "\n".join(line for line in text.splitlines() if "vir02" not in line)
    with pytest.raises(AnswerUnknown):
        ascend.division(without)


def test_links_are_read_from_the_square() -> None:
    views = ascend.topology(golden("ascend/topo.txt"))
    assert views[0, 1] == Neighbour(level="node", fabric_links=1)
    assert views[2, 0] == Neighbour(level="hostbridge")
    assert views[1, 2] == Neighbour(level="system")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("dcmi model initialized failed, because the device is used. ret is -8020", DeviceBusy),
        ("dcmi module initialize failed. ret is -8005", DriverMissing),
        ("This device does not support querying template-info.", NotSupported),
        ("bash: npu-smi: command not found", DriverMissing),
    ],
)
def test_error_has_a_kind_and_keeps_its_message(words: str, kind: type[DriverError]) -> None:
    error = trouble("npu-smi info", words, 1, ascend.RULES)
    assert type(error) is kind
    assert error.detail == words
