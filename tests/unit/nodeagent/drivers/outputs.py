# SPDX-License-Identifier: Apache-2.0
"""Output of vendors' tools for parsers: golden texts of older tools, and those of the fakes."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hami_nodeagent.drivers.amd import parse as amd
from hami_nodeagent.drivers.ascend import parse as ascend
from hami_nodeagent.drivers.ascend import parse_dcmi as dcmi
from hami_nodeagent.drivers.awsneuron import parse as awsneuron
from hami_nodeagent.drivers.biren import parse as biren
from hami_nodeagent.drivers.cambricon import parse as cambricon
from hami_nodeagent.drivers.enflame import parse as enflame
from hami_nodeagent.drivers.hygon import parse as hygon
from hami_nodeagent.drivers.iluvatar import parse as iluvatar
from hami_nodeagent.drivers.kunlunxin import parse as kunlunxin
from hami_nodeagent.drivers.metax import parse as metax
from hami_nodeagent.drivers.mthreads import parse as mthreads
from hami_nodeagent.drivers.parse import library
from hami_nodeagent.drivers.vastai import parse as vastai
from hami_sim.hardware.fake_nvml import Process
from tests.fakes import vendoranswers
from tests.fakes.vendoranswers import MAKE_BY_VENDOR

GOLDEN = Path(__file__).resolve().parents[3] / "golden/tools"


def golden(name: str) -> str:
    return (GOLDEN / name).read_text(encoding="utf-8")


def faked(vendor: str, *arguments: str, tool: str = "") -> str:
    """The answer of a fake tool for three cards, one of them busy."""
    make = MAKE_BY_VENDOR[vendor]
    idle, busy, third = (vendoranswers.card(make, index) for index in range(3))
    busy = replace(busy, used_mib=2048, core_pct=77, processes=(Process(pid=4242, used_mib=1024),))
    return make.answers([idle, busy, third], None)[tool or make.tools[0], arguments].text


class Parser(Struct, frozen=True, kw_only=True):
    """One parser and texts that it must understand."""

    vendor: str
    name: str
    parse: Callable[[str], object]
    texts: tuple[str, ...]


def _parser(vendor: str, name: str, parse: Callable[[str], object], *texts: str) -> Parser:
    return Parser(vendor=vendor, name=name, parse=parse, texts=texts)


_CHIP = ("-i", "0", "-c", "0")
_JSON = "--display-format=json"
_HYGON = (
    "--showuniqueid", "--showserial", "--showbus", "--showmeminfo", "vram", "--showproductname",
    "--json",
)  # fmt: skip


def _kfd(text: str) -> object:
    properties, _, banks = text.partition("--banks--\n")
    return amd.kfd_node(properties, banks)


PARSERS = (
    _parser("ascend", "dcmi", dcmi.sight, golden("ascend/dcmi_survey.json")),
    _parser(
        "ascend", "info", ascend.info,
        *(golden(f"ascend/info_{chip}.txt") for chip in ("310p", "910a", "910c")),
        faked("ascend", "info"),
    ),
    _parser(
        "ascend", "mapping", ascend.mapping,
        golden("ascend/map_910c.txt"), golden("ascend/map_310p.txt"), faked("ascend", "info", "-m"),
    ),
    _parser(
        "ascend", "board", ascend.board,
        golden("ascend/board_chip.txt"), golden("ascend/board_card.txt"),
    ),
    _parser(
        "ascend", "templates", ascend.templates,
        golden("ascend/templates_310p.txt"), faked("ascend", "info", "-t", "template-info"),
    ),
    _parser(
        "ascend", "division", ascend.division,
        golden("ascend/division_two.txt"), faked("ascend", "info", "-t", "info-vnpu", *_CHIP),
    ),
    _parser(
        "ascend", "created", ascend.created,
        golden("ascend/created.txt"), golden("ascend/created_one_line.txt"),
    ),
    _parser("ascend", "destroyed", ascend.destroyed, golden("ascend/destroyed.txt")),
    _parser("ascend", "recovers", ascend.recovers, golden("ascend/recovers.txt")),
    _parser(
        "ascend", "recovery_set", ascend.recovery_set, golden("ascend/recovery_set.txt")
    ),
    _parser("ascend", "topology", ascend.topology, golden("ascend/topo.txt")),
    _parser(
        "cambricon", "table", cambricon.table,
        *(golden(f"cambricon/cnmon_{word}.txt") for word in ("4_20", "5_10_13", "5_10_smlu")),
        faked("cambricon"),
    ),
    _parser(
        "cambricon", "card", lambda text: cambricon.card(text, 1),
        faked("cambricon", "info", "-c", "1"),
    ),
    _parser("cambricon", "smlus", cambricon.smlus, golden("cambricon/smlus.json")),
    _parser("cambricon", "listed", library.devices, golden("cambricon/cndev_survey.json")),
    _parser("hygon", "cards", hygon.cards, faked("hygon", *_HYGON)),
    _parser("hygon", "listed", library.devices, golden("hygon/rsmi_survey.json")),
    _parser("hygon", "table", hygon.table, golden("hygon/table_old.txt"), faked("hygon")),
    _parser("hygon", "numa", hygon.numa, faked("hygon", "--showtoponuma")),
    _parser("hygon", "health", hygon.health, faked("hygon", "--showhealth")),
    _parser(
        "hygon", "compute_units", hygon.compute_units,
        faked("hygon", "virtual", "-show-device-info"),
    ),
    _parser("hygon", "vdcu", hygon.vdcu, golden("hygon/vdev3.conf")),
    _parser(
        "iluvatar", "table", iluvatar.table, golden("iluvatar/ixsmi_4_4.txt"), faked("iluvatar")
    ),
    _parser("iluvatar", "uuids", iluvatar.uuids, faked("iluvatar", "-L")),
    _parser("iluvatar", "topology", iluvatar.topology, golden("iluvatar/topo.txt")),
    _parser("iluvatar", "told", iluvatar.told, golden("iluvatar/ixml_survey.json")),
    _parser(
        "mthreads", "table", mthreads.table,
        golden("mthreads/gmi_2_4.txt"), golden("mthreads/gmi_mpc.txt"), faked("mthreads"),
    ),
    _parser(
        "mthreads", "told", lambda text: mthreads.told(text, "node-a"),
        golden("mthreads/mtml_survey.json"),
    ),
    _parser(
        "metax", "table", metax.table,
        *(golden(f"metax/mx_{word}.txt") for word in ("2_2_4", "sgpu", "2_2_12")), faked("metax"),
    ),
    _parser("metax", "listed", metax.listed, faked("metax", "-L")),
    _parser("metax", "sgpus", metax.sgpus, golden("metax/sgpus.json")),
    _parser("metax", "listed", library.devices, golden("metax/mxsml_survey.json")),
    _parser("metax", "topology", metax.topology, faked("metax", "topo", "-m")),
    _parser(
        "enflame", "table", enflame.table,
        golden("enflame/efsmi_1_2.txt"), golden("enflame/efsmi_1_7.txt"), faked("enflame"),
    ),
    _parser(
        "enflame", "details", enflame.details,
        faked("enflame", "-q", "-d", "TEMP,MEMORY,USAGE,PCIE"),
    ),
    _parser("enflame", "listed", library.devices, golden("enflame/efml_survey.json")),
    _parser("enflame", "profiles", enflame.profiles, golden("enflame/drs_profiles.txt")),
    _parser(
        "enflame", "instances", enflame.instances,
        golden("enflame/drs_instances.txt"), golden("enflame/drs_none.txt"),
    ),
    _parser(
        "kunlunxin", "table", kunlunxin.table,
        golden("kunlunxin/xpu_sriov.txt"), faked("kunlunxin"),
    ),
    _parser("kunlunxin", "listed", library.devices, golden("kunlunxin/xpuml_look.json")),
    _parser(
        "awsneuron", "devices", awsneuron.devices,
        golden("awsneuron/ls_inf2.json"), faked("awsneuron", "-j"),
    ),
    _parser(
        "awsneuron", "monitored", awsneuron.monitored, faked("awsneuron", tool="neuron-monitor")
    ),
    _parser("amd", "gpus", amd.gpus, faked("amd", "list", "--json")),
    _parser("amd", "listed", library.devices, golden("amd/amdsmi_survey.json")),
    _parser("amd", "static", amd.static, faked("amd", "static", "--json")),
    _parser("amd", "metric", amd.metric, faked("amd", "metric", "--json")),
    _parser("amd", "processes", amd.processes, faked("amd", "process", "--json")),
    _parser(
        "amd", "concise", amd.concise,
        *(golden(f"amd/rocm_{word}.txt") for word in ("new", "old", "broken")),
    ),
    _parser(
        "amd", "kfd_node", _kfd,
        f"{golden('amd/kfd_gpu.properties')}--banks--\n{golden('amd/kfd_bank.properties')}",
        golden("amd/kfd_cpu.properties"),
    ),
    _parser(
        "biren", "cards", biren.cards,
        golden("biren/query_units.csv"),
        faked("biren", "gpu", "--query-gpu=index,memory.used,memory.free",
              "--format=csv,noheader,nounits"),
    ),
    _parser("biren", "listed", library.devices, golden("biren/brml_survey.json")),
    _parser(
        "vastai", "devices", vastai.devices,
        golden("vastai/getmem_dies.json"), faked("vastai", "getmem", _JSON),
    ),
    _parser("vastai", "power", vastai.power_by_address, faked("vastai", "summary", _JSON)),
)  # fmt: skip
