# SPDX-License-Identifier: Apache-2.0
"""Output of accelerator vendors' tools, for cards in a given state.

One maker per vendor: the newest generation of the tool's output that is known, for each command
that the agent's driver uses. Serials, identities and addresses are invented. Memory in MiB.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from hami_sim.hardware.fake_nvml import Process
from tests.fakes import vendorparts

_MIB = 1 << 20


class Answer(Struct, frozen=True, kw_only=True):
    """Output of one command, and its exit status."""

    text: str
    complaint: str = ""
    status: int = 0


class Card(Struct, frozen=True, kw_only=True):
    """One card and its state."""

    index: int
    bus_id: str
    numa: int
    memory_mib: int
    used_mib: int = 0
    core_pct: int = 0
    processes: tuple[Process, ...] = ()
    present: bool = True
    lost: bool = False
    failing: bool = False
    model: str = ""
    """Chip, where the vendor's cards differ in what they can be divided into."""
    divided: bool = False
    """In the mode in which it is divided into parts, where it has such a mode."""

    def plain(self) -> dict[str, object]:
        """Return the card's properties that ``vendorparts`` uses."""
        return {
            "index": self.index,
            "bus_id": self.bus_id,
            "memory_mib": self.memory_mib,
            "used_mib": self.used_mib,
            "core_pct": self.core_pct,
            "processes": [(one.pid, one.used_mib) for one in self.processes],
            "lost": self.lost,
            "failing": self.failing,
            "model": self.model,
        }


Key = tuple[str, tuple[str, ...]]
"""A tool and its arguments."""
Texts = Mapping[Key, str]


class Make(Struct, frozen=True, kw_only=True):
    """One vendor's tools."""

    tools: tuple[str, ...]
    pci_vendor: str
    pci_class: str = "120000"
    memory_mib: int
    type: str
    version: str
    uuid: Callable[[Card, str], str]
    print: Callable[[Sequence[Card]], Texts]
    no_driver: Answer
    no_device: Answer
    sysfs_class: str = ""
    """Class of sysfs in which the vendor's driver shows its cards."""
    model: str = ""
    """Default of ``Card.model``."""
    tree: Callable[[Card], Mapping[str, str]] | None = None
    """Files below sysfs that the vendor's own driver makes for a card, by path."""
    tells_loss: bool = True
    """The tool has a word for a card that is broken; others list it no more."""
    tells_processes: bool = True
    tells_process_memory: bool = True
    tells_load: bool = True
    tells_used: bool = True

    def answers(self, cards: Sequence[Card], trouble: Answer | None) -> Mapping[Key, Answer]:
        """Return the answer of every command; if ``trouble`` is set, it is the answer of all."""
        if trouble is not None:
            one = card(self, 0)
            return dict.fromkeys(self.print([one]), trouble)
        return {key: Answer(text=text) for key, text in self.print(cards).items()}


def card(make: Make, index: int, *, model: str = "", divided: bool = False) -> Card:
    """A card that works and idles."""
    model = model or make.model
    chip = vendorparts.ASCEND_CHIPS.get(model)
    return Card(
        index=index,
        bus_id=f"0000:{0x11 + 8 * index:02x}:00.0",
        numa=index // 4,
        memory_mib=chip["memory_mib"] if chip else make.memory_mib,
        model=model,
        divided=divided,
    )


def _digits(vendor: str, index: int) -> str:
    """Hexadecimal digits that are always the same for a card."""
    return hashlib.sha256(f"{vendor}/{index}".encode()).hexdigest()


def _uuid(vendor: str, index: int) -> str:
    d = _digits(vendor, index)
    return f"{d[:8]}-{d[8:12]}-{d[12:16]}-{d[16:20]}-{d[20:32]}"


def _listed(cards: Sequence[Card]) -> list[Card]:
    """For tools that have no word for broken cards."""
    return [one for one in cards if not one.lost and not one.failing]


def _rows(cards: Sequence[Card], form: Callable[[Card, Process], str], none: str) -> str:
    rows = [form(one, process) for one in cards for process in one.processes]
    return "\n".join(rows) if rows else none


# ---- Ascend ------------------------------------------------------------------------------------


def _die(one: Card) -> list[str]:
    d = _digits("ascend", one.index).upper()
    words = [d[at : at + 8] for at in range(0, 40, 8)]
    return [words[0], words[1], words[2], words[3], f"5200000{one.index % 10}"]


def _ascend(cards: Sequence[Card]) -> Texts:
    line = f"+{'-' * 27}+{'-' * 15}+{'-' * 52}+"
    double = line.replace("-", "=")
    rows = []
    for one in cards:
        health = "Alarm" if one.lost else "UNKNOWN" if one.failing else "OK"
        hbm = f"{one.used_mib:<5}/ {one.memory_mib}"
        rows += [
            (
                f"| {one.index:<5} {one.model:<19} | {health:<13} |"
                " 91.2        36                0    / 0             |"
            ),
            (
                f"| 0                         | {one.bus_id.upper():<13} |"
                f" {one.core_pct:<11} 0    / 0          {hbm:<19}|"
            ),
            double,
        ]
    processes = [
        f"| {one.index:<7} 0                 | {process.pid:<13} | {'trainer':<24} |"
        f" {process.used_mib:<23} |"
        for one in cards
        for process in one.processes
    ] or [f"| No running processes found in NPU {0:<60} |"]
    info = "\n".join(
        [
            f"+{'-' * 96}+",
            "| npu-smi 24.1.0                   Version: 24.1.0                             |",
            line,
            (
                "| NPU   Name                | Health        |"
                " Power(W)    Temp(C)           Hugepages-Usage(page)|"
            ),
            (
                "| Chip                      | Bus-Id        |"
                " AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |"
            ),
            double,
            *rows,
            line,
            (
                "| NPU     Chip              | Process id    |"
                " Process name             | Process memory(MB)      |"
            ),
            double,
            *processes,
            double,
            "",
        ]
    )
    names = ("NPU ID", "Chip ID", "Chip Logic ID", "Chip Name")
    mapping = ["\t" + "".join(f"{name:<31}" for name in names)]
    for one in cards:
        values = (str(one.index), "0", str(one.index), f"Ascend {one.model}")
        mapping.append("\t" + "".join(f"{value:<31}" for value in values))
        mapping.append("\t" + "".join(f"{v:<31}" for v in (str(one.index), "1", "-", "Mcu")))
    named = ["NPU" + str(one.index) for one in cards]
    topo = ["\t           " + "".join(f"{name:<11}" for name in (*named, "CPU Affinity"))]
    for one in cards:
        words = ["X" if other is one else "HCCS" for other in cards]
        cells = "".join(f"{word:<11}" for word in (*words, "0-23"))
        topo.append(f"\tNPU{one.index:<8}{cells}")
    texts = {
        ("npu-smi", ("info",)): info,
        ("npu-smi", ("info", "-m")): "\n".join(mapping) + "\n",
        ("npu-smi", ("info", "-t", "topo")): "\n".join(topo) + "\n",
        ("npu-smi", ("info", "-t", "template-info")): vendorparts.ascend_templates(
            cards[0].model if cards else "910B3"
        ),
    }
    for one in cards:
        chip = ("-i", str(one.index), "-c", "0")
        texts["npu-smi", ("info", "-t", "board", *chip)] = (
            f"\tNPU ID                         : {one.index}\n"
            "\tChip ID                        : 0\n"
            "\tChip Type                      : Ascend\n"
            f"\tChip Name                      : {one.model}\n"
            f"\tVDie ID                        : {' '.join(w.lstrip('0') for w in _die(one))}\n"
            f"\tPCIe Bus Info                  : {one.bus_id.upper()}\n"
        )
        texts["npu-smi", ("info", "-t", "info-vnpu", *chip)] = vendorparts.ascend_division(
            one.model, {}
        )
    return texts


# ---- Cambricon ---------------------------------------------------------------------------------


def _cambricon(cards: Sequence[Card]) -> Texts:
    line = "+-------------------------------+----------------------+-----------------------+"
    table = [
        "Tue Mar  4 09:12:13 2025",
        f"+{'-' * 78}+",
        "| CNMON v5.10.31                                               Driver v5.10.31 |",
        line,
        "| Card  VF  Name       Firmware |               Bus-Id | Util        Ecc-Error |",
        "| Fan   Temp      Pwr:Usage/Cap |         Memory-Usage | Mode     Compute-Mode |",
        "|===============================+======================+=======================|",
    ]
    texts: dict[Key, str] = {}
    for one in cards:
        load, memory = f"{one.core_pct}%", f"{one.used_mib} MiB/ {one.memory_mib} MiB"
        mode = "SMLU" if one.divided else "FULL"
        table += [
            f"| {one.index:<6}/   MLU370-X4    v1.1.6 | {one.bus_id.upper():>20} | {load:<18}N/A |",
            f"|  0%   41C         44 W/ 150 W | {memory:>20} | {mode:<14}Default |",
            line,
        ]
        bus, device, function = one.bus_id[5:7], one.bus_id[8:10], one.bus_id[11]
        texts["cnmon", ("info", "-c", str(one.index))] = (
            "no such thing\n"
            if one.failing
            else f"""\
================CNMON v5.10.31================
Card {one.index}
    Product Name                   : MLU370-X4
    UUID                           : {_uuid("cambricon", one.index)}
    SN                             : 0x{_digits("cambricon", one.index)[:16]}
    Driver                         : v5.10.31
    Health State                   :
        Device                     : {"In Problem" if one.lost else "Good"}
        Driver                     : Running
    Utilization                    :
        MLU Average                : {one.core_pct} %
    Physical Memory Usage          :
        Total                      : {one.memory_mib} MiB
        Used                       : {one.used_mib} MiB
    PCI                            :
        Domain ID                  : 0000
        Bus num                    : {bus}
        Device                     : {device}
        Function                   : {function}
    NUMA Node Id                   : {one.numa}
"""
        )
    rows = _rows(
        cards,
        lambda c, p: f"|  {c.index:<5} /   {p.pid:<7} trainer {p.used_mib:>51} MiB |",
        f"|  {'No running processes found':<76}|",
    )
    table += [
        "",
        f"+{'-' * 78}+",
        f"| {'Processes:':<77}|",
        "|  Card  MI  PID     Command Line                             MLU Memory Usage |",
        f"|{'=' * 78}|",
        rows,
        f"+{'-' * 78}+",
        "",
    ]
    return {("cnmon", ()): "\n".join(table), **texts}


# ---- Hygon -------------------------------------------------------------------------------------

_HYGON_FACTS = (
    "--showuniqueid", "--showserial", "--showbus", "--showmeminfo", "vram", "--showproductname",
    "--json",
)  # fmt: skip

_HYGON_IDLE = ("50.0C", "80.0W", "auto", "1000.0W", "0%")


def _hygon(cards: Sequence[Card]) -> Texts:
    document = {
        f"card{one.index}": {
            "Unique ID": f"0x{_digits('hygon', one.index)[:16]}",
            "Serial Number": f"TZ3L{int(_digits('hygon', one.index)[:10], 16) % 10**12:012}",
            "PCI Bus": one.bus_id,
            "Card series": "K100_AI",
            "VRAM Total Memory (B)": str(one.memory_mib * _MIB),
            "VRAM Total Used Memory (B)": str(one.used_mib * _MIB),
        }
        for one in cards
    }
    width = "=" * 86
    names = ("HCU", "Temp", "AvgPwr", "Perf", "PwrCap", "VRAM%", "HCU%", "Dec%", "Enc%", "Mode")
    table = ["", width, width, "".join(f"{name:<10}" for name in names)]
    for one in cards:
        values = [str(one.index)]
        values += (
            ["N/A"] * 8 + ["Unknown"]
            if one.failing
            else [*_HYGON_IDLE, f"{one.core_pct}.0%", "0.0%", "0.0%", "Normal"]
        )
        table.append("".join(f"{value:<10}" for value in values))
    health = "".join(
        f"HCU[{one.index}]\t: Bus Id : {one.bus_id} : {'Critical' if one.lost else 'Healthy'}\n"
        for one in cards
    )
    numa = "".join(f"HCU[{one.index}]\t\t: (Topology) Numa Node: {one.numa}\n" for one in cards)
    virtual = "".join(
        f"Device {one.index}:\n\tActual Device: {one.index}\n\tCompute units: 120\n"
        f"\tGlobal memory: {one.memory_mib * _MIB} bytes\n"
        for one in cards
    )
    return {
        ("hy-smi", ()): "\n".join([*table, width, width, ""]),
        ("hy-smi", _HYGON_FACTS): json.dumps(document) + "\n",
        ("hy-smi", ("--showhealth",)): health,
        ("hy-smi", ("--showtoponuma",)): numa,
        ("hy-smi", ("virtual", "-show-device-info")): virtual,
    }


def _hygon_uuid(one: Card, _: str) -> str:
    return f"DCU-TZ3L{int(_digits('hygon', one.index)[:10], 16) % 10**12:012}"


# ---- Iluvatar ----------------------------------------------------------------------------------


def _iluvatar(cards: Sequence[Card]) -> Texts:
    shown = _listed(cards)
    line = "+-------------------------------+----------------------+----------------------+"
    table = [
        "Timestamp    Thu Jul 10 16:59:37 2025",
        f"+{'-' * 77}+",
        "|  IX-ML: 4.3.0       Driver Version: 4.3.0       CUDA Version: 10.2          |",
        line.replace("+", "|", 1),
        "| GPU  Name                     | Bus-Id               | Clock-SM  Clock-Mem  |",
        "| Fan  Temp  Perf  Pwr:Usage/Cap|      Memory-Usage    | GPU-Util  Compute M. |",
        "|===============================+======================+======================|",
    ]
    for one in shown:
        memory = f"{one.used_mib}MiB / {one.memory_mib}MiB"
        load = f"{one.core_pct}%"
        table += [
            (
                f"| {one.index:<4} Iluvatar BI-V150         | 0000{one.bus_id.upper()}     |"
                " 1500MHz   1600MHz    |"
            ),
            f"| N/A  35C   P0    N/A / N/A    | {memory:<20} | {load:<9} Default    |",
            line,
        ]
    rows = _rows(
        shown,
        lambda c, p: f"|    {c.index:<6} {p.pid:<10} trainer {p.used_mib:>30}                  |",
        f"|  {'No running processes found':<75}|",
    )
    table += [
        "",
        f"+{'-' * 77}+",
        "| Processes:                                                       GPU Memory |",
        "|  GPU        PID      Process name                                Usage(MiB) |",
        f"|{'=' * 77}|",
        rows,
        f"+{'-' * 77}+",
        "",
    ]
    listed = "".join(
        f"GPU {one.index}: Iluvatar BI-V150 (UUID: GPU-{_uuid('iluvatar', one.index)})\n"
        for one in shown
    )
    return {("ixsmi", ()): "\n".join(table), ("ixsmi", ("-L",)): listed}


# ---- Moore Threads -----------------------------------------------------------------------------


def _mthreads(cards: Sequence[Card]) -> Texts:
    shown = _listed(cards)
    edge, line = "-" * 63, f"+{'-' * 61}+"
    table = [
        "Mon Nov 11 16:07:07 2024",
        edge,
        "    mthreads-gmi:2.3.4           Driver Version:2.7.0",
        edge,
        "ID   Name           |PCIe                |%GPU  Mem            ",
        "     Device Type    |Pcie Lane Width     |Temp  MPC Capable    ",
        "                                         |      ECC Mode       ".replace(
            " " * 20, "                    |", 1
        )[:63],
    ]
    table[-1] = "                    |                    |      ECC Mode"
    for one in shown:
        load = f"{one.core_pct}%"
        table += [
            line,
            (
                f"{one.index:<4} MTT S4000      |0000{one.bus_id:<16}|{load:<5}"
                f" {one.used_mib}MiB({one.memory_mib}MiB)"
            ),
            "     Physical       |16x(16x)            |43C   NO             ",
            "                    |                    |      N/A            ",
        ]
    rows = _rows(
        shown,
        lambda c, p: f"{c.index:<4} {p.pid:<9} trainer                  {p.used_mib}MiB",
        "   No running processes found",
    )
    processes = "ID   PID       Process name                         GPU Memory"
    table += [edge, "", edge, "Processes:", processes, line, rows, edge, ""]
    return {("mthreads-gmi", ()): "\n".join(table)}


def _place(one: Card) -> str:
    return one.bus_id.replace(":", "-")


# ---- MetaX -------------------------------------------------------------------------------------


def _metax(cards: Sequence[Card]) -> Texts:
    head = (
        f"mx-smi  version: 2.2.9\n\n{'=' * 19} MetaX System Management Interface Log {'=' * 19}\n"
    )
    attached = f"Attached GPUs                                     : {len(cards)}\n"
    line = "+------------------+-----------------+---------------------+----------------------+"
    shown = [one for one in cards if not one.failing and not one.lost]
    table = [
        f"+{'-' * 81}+",
        "| MX-SMI 2.2.9                       Kernel Mode Driver Version: 3.4.4            |",
        line.replace("+", "|"),
        "| Board       Name | GPU   Persist-M | Bus-id              | GPU-Util      sGPU-M |",
        "| Pwr:Usage/Cap    | Temp       Perf | Memory-Usage        | GPU-State            |",
        line.replace("-", "="),
    ]
    for one in shown:
        load, memory = f"{one.core_pct}%", f"{one.used_mib}/{one.memory_mib} MiB"
        table += [
            (
                f"| {one.index:<5} MetaX C500 | {one.index:<11} Off | {one.bus_id}        |"
                f" {load:<12}{'Enabled' if one.divided else 'Disabled':>8} |"
            ),
            f"| 57W / 350W       | 35C          P0 | {memory:<19} | Available            |",
            line,
        ]
    rows = _rows(
        shown,
        lambda c, p: f"|  {c.index:<20} {p.pid:<10} trainer {p.used_mib:>20}                   |",
        f"|  {'no process found':<79}|",
    )
    table += [
        "",
        f"+{'-' * 81}+",
        "| Process:                                                                        |",
        "|  GPU                    PID         Process Name                 GPU Memory     |",
        "|                                                                  Usage(MiB)     |",
        f"|{'=' * 81}|",
        rows,
        f"+{'-' * 81}+",
        "",
    ]
    listed = "".join(
        f"GPU#{one.index}    MXC500      {one.bus_id}   "
        + (
            "Not Available(MetaX Sysfs File Unaccessible)\n"
            if one.lost
            else f"Available (UUID: GPU-{_uuid('metax', one.index)})\n"
        )
        for one in cards
    )
    named = [f"GPU{one.index}" for one in cards]
    topo = ["            " + "".join(f"{name:<10}" for name in named) + "Node Affinity"]
    topo += [
        f"GPU{one.index:<9}"
        + "".join(
            f"{'X' if a is one else 'MX' if a.numa == one.numa else 'SYS':<10}" for a in cards
        )
        + str(one.numa)
        for one in cards
    ]
    return {
        ("mx-smi", ()): head + attached + "\n".join(table),
        ("mx-smi", ("-L",)): f"{head}{attached}{listed}\nEnd of Log\n",
        ("mx-smi", ("topo", "-m")): attached + "\n" + "\n".join(topo) + "\n",
    }


# ---- Enflame -----------------------------------------------------------------------------------


def _enflame(cards: Sequence[Card]) -> Texts:
    line = "+-----------------------------+-------------------+---------------------------+"
    table = [
        f"+2025-11-28, 10:50:14 CST{'-' * 53}+",
        "| EFSMI: 1.6.3.12          Driver Ver: 1.6.3.12                               |",
        line,
        "| DEV    NAME                 | FW VER            | BUS-ID      ECC           |",
        "| TEMP   Lpm   Pwr(Usage/Cap) | Mem      GCU Virt | DUsed       SN            |",
        f"|{'=' * 77}|",
    ]
    details = []
    for one in cards:
        memory, load = f"{one.memory_mib}MiB", f"{one.core_pct}%"
        virtual = "DRS" if one.divided else "Disable"
        table += [
            (
                f"| {one.index:<6} Enflame S60          | 31.5.3            |"
                f" {one.bus_id[2:]}  Disable       |"
            ),
            (
                f"| 34℃    LP0      N/A         | {memory:<9} {virtual:<7} | {load:<11}"
                f" {_enflame_serial(one)} |"
            ),
            line,
        ]
        bus, device, function = one.bus_id[5:7], one.bus_id[8:10], one.bus_id[11]
        if not one.failing:
            details.append(f"""\
DEV ID {one.index}
    Device Info
        Dev Name                     : S60
        Dev UUID                     : T6P1A0000000
        Dev SN                       : {_enflame_serial(one)}
        Health                       : {not one.lost}
    PCIe Info
        Vendor ID                    : 1e36
        Domain                       : 0000
        Bus                          : {bus}
        Dev                          : {device}
        Func                         : {function}
    Memory Info
        Mem Size                     : {one.memory_mib} MiB
        Mem Usage                    : {one.used_mib} MiB
    Usage Info
        GCU Usage                    : {one.core_pct}.0 %
""")
    return {
        ("efsmi", ()): "\n".join([*table, ""]),
        ("efsmi", ("-q", "-d", "TEMP,MEMORY,USAGE,PCIE")): "".join(details),
    }


def _enflame_serial(one: Card) -> str:
    return f"A000{int(_digits('enflame', one.index)[:8], 16) % 10**9:09}"


# ---- Kunlunxin ---------------------------------------------------------------------------------


def _kunlunxin(cards: Sequence[Card]) -> Texts:
    return {("xpu-smi", ()): vendorparts.kunlunxin_table([one.plain() for one in cards], {})}


# ---- AWS Neuron --------------------------------------------------------------------------------


def _awsneuron(cards: Sequence[Card]) -> Texts:
    shown = [one for one in cards if not one.failing]
    ring = [one.index for one in shown]
    listed = [
        {
            "neuron_device": one.index,
            "bdf": one.bus_id[5:],
            "cpu_affinity": "0-47",
            "numa_node": str(one.numa),
            "connected_to": [
                other
                for other in ring
                if len(ring) > 1
                and (ring.index(other) - ring.index(one.index)) % len(ring) in (1, len(ring) - 1)
            ]
            or None,
            "nc_count": 4,
            "logical_neuroncore_config": 2,
            "memory_size": one.memory_mib * _MIB,
            "neuroncore_ids": list(range(4 * one.index, 4 * one.index + 4)),
            "neuron_processes": [
                {"pid": p.pid, "command": "trainer", "neuron_runtime_version": "2.0.0"}
                for p in one.processes
            ],
        }
        for one in shown
    ]
    cores = {
        str(4 * one.index + core): {"neuroncore_utilization": float(one.core_pct), "flops": 1}
        for one in shown
        if one.core_pct
        for core in range(4)
    }
    monitored = {
        "neuron_runtime_data": [
            {"pid": 1, "report": {"neuroncore_counters": {"neuroncores_in_use": cores}}}
        ],
        "system_data": {
            "neuron_hw_counters": {
                "neuron_devices": [
                    {
                        "neuron_device_index": one.index,
                        "mem_ecc_corrected": 0,
                        "mem_ecc_uncorrected": 3 if one.lost else 0,
                        "sram_ecc_uncorrected": 0,
                    }
                    for one in shown
                ]
            }
        },
        "neuron_hardware_info": {
            "neuron_device_type": "trainium2",
            "neuron_device_count": len(shown),
            "error": "",
        },
    }
    return {
        ("neuron-ls", ("-j",)): json.dumps(listed) + "\n",
        ("neuron-monitor", ()): json.dumps(monitored) + "\n",
    }


def _neuron_tree(one: Card) -> Mapping[str, str]:
    """As the driver 2.22 makes it; every core uses the same."""
    home = f"devices/virtual/neuron_device/neuron{one.index}"
    files = {
        "core_count": "8",
        "reset": "1\n",
        "info/architecture/device_name": "Trainium2\n",
        "info/serial_number": f"{_digits('awsneuron', one.index)[:16]}\n",
        "stats/hardware/mem_ecc_uncorrected": f"{3 if one.lost else 0}\n",
        "stats/hardware/mem_ecc_repairable_uncorrected": "0\n",
        "stats/hardware/sram_ecc_uncorrected": "0\n",
    }
    for core in range(8):
        stats = f"neuron_core{core}/stats"
        files[f"{stats}/memory_usage/device_mem/total"] = f"{one.used_mib * _MIB // 8}\n"
        files[f"{stats}/status/hw_nc_ue_error/total"] = "0\n"
        files[f"{stats}/status/hw_hbm_ue_error/total"] = "0\n"
    return {f"{home}/{name}": text for name, text in files.items()}


# ---- AMD ---------------------------------------------------------------------------------------


def _amd(cards: Sequence[Card]) -> Texts:
    listed = [
        {
            "gpu": one.index,
            "bdf": one.bus_id,
            "uuid": _uuid("amd", one.index),
            "kfd_id": 1000 + one.index,
            "node_id": 2 + one.index,
            "partition_id": 0,
        }
        for one in cards
    ]
    static = [
        {
            "gpu": one.index,
            "asic": {
                "market_name": "AMD Instinct MI300X",
                "vendor_id": "0x1002",
                "asic_serial": f"0x{_digits('amd', one.index)[:16].upper()}",
                "num_compute_units": 304,
                "target_graphics_version": "gfx942",
            },
            "driver": {"name": "amdgpu", "version": "6.10.5"},
            "partition": {"accelerator_partition": "SPX", "memory_partition": "NPS1"},
            "numa": {"node": one.numa, "affinity": "NONE"},
            "vram": {"type": "HBM", "size": {"value": one.memory_mib, "unit": "MB"}},
        }
        for one in cards
    ]
    metric = {
        "gpu_data": [
            {
                "gpu": one.index,
                "usage": {
                    "gfx_activity": {"value": one.core_pct, "unit": "%"},
                    "umc_activity": {"value": 0, "unit": "%"},
                    "mm_activity": "N/A",
                },
                "power": {"socket_power": {"value": 140, "unit": "W"}},
                "temperature": {"edge": "N/A", "hotspot": {"value": 41, "unit": "C"}},
                "mem_usage": {
                    "total_vram": {"value": one.memory_mib, "unit": "MB"},
                    "used_vram": {"value": one.used_mib, "unit": "MB"},
                },
                "ecc": {"total_uncorrectable_count": 4 if one.lost else 0},
            }
            for one in cards
            if not one.failing
        ]
    }
    processes = [
        {
            "gpu": one.index,
            "process_list": [
                {
                    "process_info": {
                        "name": "trainer",
                        "pid": p.pid,
                        "memory_usage": {"vram_mem": {"value": p.used_mib * _MIB, "unit": "B"}},
                    }
                }
                for p in one.processes
            ],
        }
        for one in cards
    ]
    return {
        ("amd-smi", ("list", "--json")): json.dumps(listed),
        ("amd-smi", ("static", "--json")): json.dumps(static),
        ("amd-smi", ("metric", "--json")): json.dumps(metric),
        ("amd-smi", ("process", "--json")): json.dumps(processes),
    }


# ---- Biren and Vastai --------------------------------------------------------------------------

_BIREN_QUERY = (
    "gpu",
    "--query-gpu=index,memory.used,memory.free",
    "--format=csv,noheader,nounits",
)


def _biren(cards: Sequence[Card]) -> Texts:
    rows = [f"{c.index}, {c.used_mib}, {c.memory_mib - c.used_mib}\n" for c in _listed(cards)]
    return {("brsmi", _BIREN_QUERY): "".join(rows)}


def _vastai(cards: Sequence[Card]) -> Texts:
    shown = _listed(cards)
    memory = {
        "elem": [
            {
                "pci_bus": one.bus_id,
                "sn": _vastai_serial(one),
                "vals": {
                    "Physical": {"value": f"{one.memory_mib} MiB"},
                    "Used": {"value": f"{one.used_mib} MiB"},
                },
            }
            for one in shown
        ]
    }
    summary = {
        "elem": [
            {
                "vals": {
                    "devBusId": {"value": one.bus_id},
                    "P_Cap": {"value": "75 W"},
                    "P_Cur": {"value": "21 W"},
                }
            }
            for one in shown
        ]
    }
    return {
        ("vasmi", ("getmem", "--display-format=json")): json.dumps(memory),
        ("vasmi", ("summary", "--display-format=json")): json.dumps(summary),
    }


def _vastai_serial(one: Card) -> str:
    return f"VA1T{int(_digits('vastai', one.index)[:8], 16) % 10**10:010}"


# ---- all ---------------------------------------------------------------------------------------


def _says(complaint: str, status: int = 1) -> Answer:
    return Answer(text="", complaint=f"{complaint}\n", status=status)


MAKE_BY_VENDOR: dict[str, Make] = {
    "ascend": Make(
        tools=("npu-smi",),
        pci_vendor="19e5",
        memory_mib=65536,
        model="910B3",
        type="Ascend910B3",
        version="24.1.0",
        uuid=lambda one, _: "-".join(word.upper() for word in _die(one)),
        print=_ascend,
        no_driver=_says("dcmi module initialize failed. ret is -8005", 255),
        no_device=_says("No NPU device was found", 1),
    ),
    "cambricon": Make(
        tools=("cnmon", "hami-cndev"),
        pci_vendor="cabc",
        memory_mib=23308,
        type="MLU370-X4",
        version="5.10.31",
        uuid=lambda one, _: f"MLU-{_uuid('cambricon', one.index)}",
        print=_cambricon,
        no_driver=_says("cnmon: the driver is not loaded"),
        no_device=Answer(text="There is no device.\n", status=1),
    ),
    "hygon": Make(
        tools=("hy-smi",),
        pci_vendor="1d94",
        memory_mib=65520,
        type="DCU-K100_AI",
        version="",
        uuid=_hygon_uuid,
        print=_hygon,
        no_driver=_says("ERROR:root:Driver not initialized (hydcu not found in modules)"),
        no_device=_says("No devices found"),
        tells_processes=False,
    ),
    "iluvatar": Make(
        tools=("ixsmi",),
        pci_vendor="1e3e",
        memory_mib=32768,
        type="BI-V150",
        version="4.3.0",
        uuid=lambda one, _: f"GPU-{_uuid('iluvatar', one.index)}",
        print=_iluvatar,
        no_driver=_says("ixsmi: error while loading shared libraries: libixml.so: not here", 127),
        no_device=Answer(text="No devices were found\n", status=6),
        tells_loss=False,
    ),
    "mthreads": Make(
        tools=("mthreads-gmi",),
        pci_vendor="1ed5",
        pci_class="030000",
        memory_mib=49152,
        type="MTT S4000",
        version="2.7.0",
        uuid=lambda one, node: f"MTT-{node}-{_place(one)}",
        print=_mthreads,
        no_driver=_says("Error: failed to initialize mtml: driver not loaded"),
        no_device=Answer(text="No devices were found\n", status=1),
        tells_loss=False,
    ),
    "metax": Make(
        tools=("mx-smi", "hami-mxsml"),
        pci_vendor="9999",
        memory_mib=65536,
        type="MXC500",
        version="3.4.4",
        uuid=lambda one, _: f"GPU-{_uuid('metax', one.index)}",
        print=_metax,
        no_driver=_says("mx-smi: the kernel mode driver is not loaded"),
        no_device=_says("No devices were found"),
    ),
    "enflame": Make(
        tools=("efsmi",),
        pci_vendor="1e36",
        memory_mib=49120,
        type="S60",
        version="1.6.3.12",
        uuid=lambda one, _: f"GCU-{_enflame_serial(one)}",
        print=_enflame,
        no_driver=_says("efsmi: error while loading shared libraries: libefml.so", 127),
        no_device=_says("No device found"),
        tells_processes=False,
    ),
    "kunlunxin": Make(
        tools=("xpu-smi",),
        pci_vendor="1d22",
        memory_mib=98304,
        type="P800 OAM",
        version="5.0.21.26",
        uuid=lambda one, node: f"XPU-{node}-{_place(one)}",
        print=_kunlunxin,
        no_driver=_says("bash: xpu-smi: command not found", 127),
        no_device=Answer(text="No devices were found\n", status=6),
    ),
    "awsneuron": Make(
        tools=("neuron-ls", "neuron-monitor"),
        pci_vendor="1d0f",
        memory_mib=98304,
        type="trainium2",
        version="",
        uuid=lambda one, node: f"{node}-AWSNeuron-{one.index}",
        print=_awsneuron,
        no_driver=_says("neuron-ls: neuron driver is not installed or not running"),
        no_device=_says("neuron-ls: No neuron device found"),
        tree=_neuron_tree,
        tells_process_memory=False,
    ),
    "amd": Make(
        tools=("amd-smi",),
        pci_vendor="1002",
        memory_mib=196288,
        type="AMD Instinct MI300X",
        version="6.10.5",
        uuid=lambda one, _: _uuid("amd", one.index),
        print=_amd,
        no_driver=_says("ERROR:root:Driver not initialized (amdgpu not found in modules)"),
        no_device=_says("No devices found"),
    ),
    "biren": Make(
        tools=("brsmi",),
        pci_vendor="1ee0",
        sysfs_class="biren",
        memory_mib=65536,
        type="Biren",
        version="",
        uuid=lambda one, node: f"{node}-card_{one.index}",
        print=_biren,
        no_driver=_says("brsmi: the driver is not loaded"),
        no_device=_says("No devices found"),
        tells_loss=False,
        tells_processes=False,
        tells_load=False,
    ),
    "vastai": Make(
        tools=("vasmi",),
        pci_vendor="1ec6",
        memory_mib=16384,
        type="Vastai",
        version="",
        uuid=lambda one, _: f"VA-{_vastai_serial(one)}-{_place(one)}",
        print=_vastai,
        no_driver=_says("vasmi: the driver is not loaded"),
        no_device=Answer(text='{"elem":[]}\n'),
        tells_loss=False,
        tells_processes=False,
        tells_load=False,
    ),
}
