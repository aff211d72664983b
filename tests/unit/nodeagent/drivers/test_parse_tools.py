# SPDX-License-Identifier: Apache-2.0
"""Meaning of the older and the special output of the other vendors' tools."""

import msgspec
import pytest

from hami_nodeagent.drivers.amd import parse as amd
from hami_nodeagent.drivers.awsneuron import parse as awsneuron
from hami_nodeagent.drivers.biren import parse as biren
from hami_nodeagent.drivers.cambricon import parse as cambricon
from hami_nodeagent.drivers.enflame import parse as enflame
from hami_nodeagent.drivers.errors import AnswerUnknown, DriverMissing, HardwareAbsent
from hami_nodeagent.drivers.hygon import parse as hygon
from hami_nodeagent.drivers.iluvatar import parse as iluvatar
from hami_nodeagent.drivers.kunlunxin import parse as kunlunxin
from hami_nodeagent.drivers.metax import parse as metax
from hami_nodeagent.drivers.mthreads import parse as mthreads
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour
from hami_nodeagent.drivers.vastai import parse as vastai
from tests.unit.nodeagent.drivers.outputs import faked, golden


def test_cnmon_without_a_bus_column_is_read_by_its_other_columns() -> None:
    cards, version = cambricon.table(golden("cambricon/cnmon_4_20.txt"))
    assert version == "4.20.18"
    (card,) = cards
    assert (card.type, card.bus_id, card.used_mib, card.memory_mib) == (
        "MLU370-S4",
        "",
        4096,
        23308,
    )
    assert (card.core_pct, card.temperature_c, card.power_w) == (12, 55, 61.0)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("cnmon_4_20", "whole"), ("cnmon_5_10_13", "whole"), ("cnmon_5_10_smlu", "smlu")],
)
def test_only_a_card_in_smlu_mode_can_be_shared(name: str, mode: str) -> None:
    cards, _ = cambricon.table(golden(f"cambricon/{name}.txt"))
    assert {card.mode for card in cards} == {mode}


def test_command_lines_with_blanks_do_not_move_the_memory() -> None:
    cards, _ = cambricon.table(golden("cambricon/cnmon_5_10_13.txt"))
    assert [card.processes for card in cards] == [(), (ProcessUsage(pid=60311, used_mib=18844),)]


def test_card_in_problem_is_bad_although_its_driver_runs() -> None:
    card = cambricon.card(golden("cambricon/info_sick.txt"), 3)
    assert (card.condition, card.reason) == (Condition.BAD, "device In Problem, driver Running")
    assert (card.memory_mib, card.uuid) == (None, "MLU-51e0c2a4-1b00-0000-0000-00000000aa03")
    with pytest.raises(AnswerUnknown):
        cambricon.card(golden("cambricon/info_sick.txt"), 2)


def test_old_hy_smi_calls_its_cards_dcu() -> None:
    rows = hygon.table(golden("hygon/table_old.txt"))
    assert [(row.core_pct, row.temperature_c, row.power_w) for row in rows.values()] == [
        (0, 44, 35.0),
        (93, 61, 190.0),
    ]


def test_vdcu_file_is_read_and_one_with_a_wrong_count_refused() -> None:
    text = golden("hygon/vdev3.conf")
    vdcu = hygon.vdcu(text)
    assert (vdcu.bus_id, vdcu.cu_count, vdcu.memory_mib, vdcu.vdev, vdcu.pipe) == (
        "0000:26:00.0",
        14,
        8192,
        3,
        2,
    )
    with pytest.raises(AnswerUnknown, match="whose cu_count is that of its masks"):
        hygon.vdcu(text.replace("cu_count: 14", "cu_count: 15"))


def test_wide_ixsmi_and_boards_with_two_chips() -> None:
    chips, version = iluvatar.table(golden("iluvatar/ixsmi_4_4.txt"))
    assert version == "4.4.0"
    assert [(chip.type, chip.attributes["model"]) for chip in chips] == [
        ("MR-V100", "MR-V100 DUO")
    ] * 2
    assert [chip.power_w for chip in chips] == [None, 172.0]
    assert chips[1].processes == (ProcessUsage(pid=9913, used_mib=30000),)
    assert iluvatar.topology(golden("iluvatar/topo.txt"))[0, 1] == Neighbour(level="single")


def test_newer_gmi_has_more_columns_and_values() -> None:
    devices, version = mthreads.table(golden("mthreads/gmi_2_4.txt"))
    assert version == "5.0.3-server"
    assert [(one.type, one.memory_mib, one.core_pct) for one in devices] == [
        ("MTT S5000", 81920, 3),
        ("MTT S5000", 81920, 98),
    ]
    assert devices[1].processes == (ProcessUsage(pid=7719, used_mib=69950),)


def test_divided_card_is_distinguished_from_its_instances() -> None:
    devices, _ = mthreads.table(golden("mthreads/gmi_mpc.txt"))
    kinds = [one.attributes["kind"] for one in devices]
    assert kinds == [mthreads.PARENT, "MPC Instance"]
    assert [one.memory_mib for one in devices] == [32768, 16384]


def test_older_mx_smi_names_its_columns_differently() -> None:
    gpus, version = metax.table(golden("metax/mx_2_2_4.txt"))
    assert version == "2.14.10"
    assert [(gpu.type, gpu.used_mib, gpu.power_w) for gpu in gpus] == [
        ("MXC550", 900, 52.0),
        ("MXC550", 61000, 301.0),
    ]
    assert {gpu.mode for gpu in gpus} == {"whole"}
    (shared,), _ = metax.table(golden("metax/mx_sgpu.txt"))
    assert shared.mode == "sgpu"


def test_sgpus_below_the_table_are_no_gpus_and_hide_no_process() -> None:
    text = golden("metax/mx_2_2_12.txt")
    for form in (text, text.replace("|\n| Sliced", "|\n\n| Sliced")):
        (gpu,), version = metax.table(form)
        assert (gpu.index, gpu.mode, gpu.used_mib, version) == (0, "sgpu", 3142, "3.8.30")
        assert [(one.pid, one.used_mib) for one in gpu.processes or ()] == [(71532, 2084)]


def test_unit_and_power_of_old_efsmi_are_separate() -> None:
    cards, version = enflame.table(golden("enflame/efsmi_1_2.txt"))
    assert version == "1.2.0.301"
    assert [(c.uuid, c.mode, c.temperature_c, c.power_w) for c in cards] == [
        ("GCU-A000990000077", "whole", 41, 99.0),
        ("GCU-C000990000078", "drs", 52, 140.0),
    ]
    (newer,), _ = enflame.table(golden("enflame/efsmi_1_7.txt"))
    assert (newer.type, newer.bus_id, newer.power_w) == ("L300", "0000:3d:00.0", 70.0)


def test_drs_sizes_carry_slices_and_native_ids() -> None:
    sizes = enflame.profiles(golden("enflame/drs_profiles.txt"))[1]
    assert [(one.name, one.memory_mib, one.resources, one.native_id) for one in sizes] == [
        ("1g.7gb", 7162, {"slices": 1}, 0),
        ("3g.21gb", 21488, {"slices": 3}, 2),
        ("6g.42gb", 42976, {"slices": 6}, 3),
    ]
    assert [one.core_pct for one in sizes] == [16, 50, 100]
    instances = enflame.instances(golden("enflame/drs_instances.txt"))
    assert [(one.profile, one.id) for one in instances] == [("1g.7gb", 0), ("3g.21gb", 2)]


def test_drs_lists_are_read_by_position_regardless_of_their_heads() -> None:
    sizes = enflame.profiles(
        "Profiles of device 3\n+-----+\n| Card | Profile | | Max | Size |\n+-----+\n"
        "| 3 | 2g.14gb | 1 3 | 14325 MiB | 8 0 |\n+-----+\n"
    )[3]
    assert [(one.name, one.memory_mib, one.native_id) for one in sizes] == [("2g.14gb", 14325, 1)]
    assert enflame.instances("no instances\n+-----+\n") == ()
    for cut in ("| 3 2g.14gb 1 3 14325MiB 8 |\n", "+-----+\n| 3 2g.14gb 1 |\n+-----+\n"):
        with pytest.raises(AnswerUnknown):
            enflame.profiles(cut)


def test_xpu_smi_of_another_vendor_is_rejected() -> None:
    with pytest.raises(AnswerUnknown, match="the head of Kunlunxin's xpu-smi"):
        kunlunxin.table(golden("kunlunxin/other_vendor.txt"))
    (part,), _ = kunlunxin.table(golden("kunlunxin/xpu_sriov.txt"))
    assert (part.mode, part.memory_mib) == ("sriov", 49152)


def test_neuron_devices_without_links_and_numbers_of_cores() -> None:
    (device,), peers = awsneuron.devices(golden("awsneuron/ls_inf2.json"))
    assert (device.memory_mib, device.attributes["core_ids"], peers) == (32768, "0,1", {0: ()})
    assert device.processes == (ProcessUsage(pid=771),)


def test_monitor_without_a_driver_raises_driver_missing() -> None:
    with pytest.raises(DriverMissing, match="neuron driver is not installed or not running"):
        awsneuron.monitored(golden("awsneuron/monitor_no_driver.json"))


@pytest.mark.parametrize(
    ("name", "load", "watts", "celsius"),
    [
        ("new", [0, 99], [140.0, 688.0], [40, 66]),
        ("old", [17, 0], [95.0, None], [41, 30]),
        ("broken", [0], [None], [None]),
    ],
)
def test_rocm_smi_rows_are_read_by_their_heads(
    name: str, load: list[int], watts: list[float | None], celsius: list[int | None]
) -> None:
    rows = amd.concise(golden(f"amd/rocm_{name}.txt")).values()
    assert [row.core_pct for row in rows] == load
    assert [row.power_w for row in rows] == watts
    assert [row.temperature_c for row in rows] == celsius


def test_kfd_node_provides_what_rocm_smi_does_not_report() -> None:
    node = amd.kfd_node(golden("amd/kfd_gpu.properties"), golden("amd/kfd_bank.properties"))
    assert node is not None
    assert (node.uuid, node.bus_id) == ("GPU-9d84cfbf53af9c27", "0000:21:00.0")
    assert (node.compute_units, node.memory_mib, node.render) == (304, 196288, 129)
    assert amd.kfd_node(golden("amd/kfd_cpu.properties"), "") is None


def test_card_without_a_model_has_no_type_that_could_pass_a_deny_list() -> None:
    card = {
        "Serial Number": "T1",
        "PCI Bus": "0000:33:00.0",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "0",
        "Card series": "K100_AI",
    }
    named = msgspec.json.encode({"card0": card}).decode()
    nameless = msgspec.json.encode({"card0": {**card, "Card series": ""}}).decode()
    assert [one.type for one in hygon.cards(named)] == ["DCU-K100_AI"]
    assert [one.type for one in hygon.cards(nameless)] == [""]


def test_lists_are_read_with_and_without_their_wrapping() -> None:
    text = faked("amd", "list", "--json")
    assert amd.gpus(text) == amd.gpus(f'{{"gpu_data": {text}}}')


def test_units_in_brsmi_answers_change_nothing() -> None:
    first, second = biren.cards(golden("biren/query_units.csv"))
    assert (first.used_mib, first.memory_mib, second.used_mib) == (2048, 65536, 0)


def test_dies_of_one_board_have_separate_identities() -> None:
    first, second = vastai.devices(golden("vastai/getmem_dies.json"))
    assert first.attributes["board"] == second.attributes["board"]
    assert first.attributes["strategy"] == "die"
    assert len({first.uuid, second.uuid}) == 2
    with pytest.raises(HardwareAbsent):
        vastai.devices('{"elem":[]}')


def test_processes_under_a_broken_head_belong_to_no_device() -> None:
    text = golden("cambricon/cnmon_5_10_13.txt").replace("|  Card  MI  PID", "|  Card\n  PID")
    cards, _ = cambricon.table(text)
    assert [card.processes for card in cards] == [(), ()]


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("4096 MiB", 4096),
        ("64GB", 65536),
        ("1048576KiB", 1024),
        ("12", 12),
        ("N/A", None),
        ("", None),
        ("4294967296 B", 4096),
    ],
)
def test_sizes_become_mib_whatever_their_unit(text: str, mib: int | None) -> None:
    assert forms.mib(text) == mib


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("00000000:3a:00.0", "0000:3a:00.0"),
        ("00:2d:00.0", "0000:2d:00.0"),
        ("cc:00.0", "0000:cc:00.0"),
        ("0001:01:1f.7", "0001:01:1f.7"),
        ("N/A", ""),
        ("0000:c1:00", ""),
    ],
)
def test_addresses_become_those_of_sysfs(text: str, address: str) -> None:
    assert forms.bus_id(text) == address


def test_table_that_ends_in_the_middle_is_no_table() -> None:
    text = faked("iluvatar")
    end = text.index("Iluvatar BI-V150", text.index("Iluvatar BI-V150") + 1)
    with pytest.raises(AnswerUnknown):
        iluvatar.table(text[: end + 40])


def test_columns_may_come_in_another_order() -> None:
    text = """\
+------------------------+---------+
| DEV  UUID              | NAME    |
+------------------------+---------+
| 0    abc               | x y z   |
+------------------------+---------+
"""
    box = forms.box(text, first="DEV", needs="NAME", greedy=("NAME",))
    assert box.records == ({"DEV": "0", "UUID": "abc", "NAME": "x y z"},)
