# SPDX-License-Identifier: Apache-2.0
"""Sequences of requests and rendering that are specific to a vendor.

Single requests are facts of ``tests/contract/vendors``.
"""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device, DeviceFacts, Profile
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.model.request import DeviceRequest
from hami_common.pods.podview import PodView
from hami_common.vendors import ascend, awsneuron, enflame, kunlunxin
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.protocol import BindMount, ContainerEdits, RenderContext
from hami_core.placement.pick import pick
from hami_core.placement.reasons import NodeRefusal
from hami_core.table.table import DeviceTable
from tests.support import builders

CATALOG = Catalog.from_settings()
CHIPS = {chip.word: chip for chip in ascend.CHIPS}

Limits = dict[str, Any]


def pod(
    *containers: Limits, annotations: dict[str, str] | None = None, name: str = "pod"
) -> PodView:
    document = {
        "metadata": {"name": name, "namespace": "ns", "uid": name, "annotations": annotations},
        "spec": {
            "containers": [
                {"name": f"c{i}", "resources": {"limits": limits}}
                for i, limits in enumerate(containers)
            ]
        },
    }
    return msgspec.convert(document, PodView)


def asked(limits: Limits, annotations: dict[str, str] | None = None) -> DeviceRequest:
    request = CATALOG.parse_pod(pod(limits, annotations=annotations))
    assert request is not None
    (one,) = request.containers[0].requests
    return one


def refusal(limits: Limits, annotations: dict[str, str] | None = None) -> str:
    with pytest.raises(RequestInvalid) as caught:
        CATALOG.parse_pod(pod(limits, annotations=annotations))
    return str(caught.value)


def node(vendor: str, type_: str, memory_mib: int, count: int = 1, **more: Any) -> NodeDevices:
    partitions: tuple[Profile, ...] = more.pop("partitions", ())
    capacity = min([memory_mib, *(p.memory_mib for p in partitions if not p.name)])
    return builders.node_devices(
        "node",
        [
            Device(
                uuid=f"{vendor}-{i}",
                vendor=vendor,
                index=i,
                minor=i,
                type=type_,
                memory_mib=memory_mib,
                capacity_mib=capacity,
                partitions=partitions,
                **more,
            )
            for i in range(count)
        ],
        vendor=vendor,
    )


def chips(word: str, count: int = 1) -> NodeDevices:
    chip = CHIPS[word]
    return node(
        "ascend",
        word,
        chip.memory_capacity_mib,
        count,
        mode="vnpu",
        partitions=ascend.partitions_of(chip),
        resources=ascend.resources_of(chip),
    )


class Node:
    """A node on which pods are placed one after another."""

    def __init__(self, *inventory: NodeDevices, catalog: Catalog = CATALOG) -> None:
        self.table = DeviceTable()
        self.catalog = catalog
        for devices in inventory:
            self.table.upsert_node(devices)

    def place(
        self, *containers: Limits, annotations: dict[str, str] | None = None
    ) -> list[Share] | str:
        """The shares of the pod, or the refusal."""
        request = self.catalog.parse_pod(pod(*containers, annotations=annotations))
        assert request is not None
        found = pick(self.table, request, "node")
        if isinstance(found, NodeRefusal):
            return found.text
        assert isinstance(found, Placement)
        assert self.table.book("node", found.containers) == ()
        self.table.check()
        return [share for container in found.containers for share in container.shares]

    def sizes(self, *containers: Limits, annotations: dict[str, str] | None = None) -> list[int]:
        """MiB of each share."""
        shares = self.place(*containers, annotations=annotations)
        assert not isinstance(shares, str), shares
        return [share.memory_mib for share in shares]


# --- Ascend ---------------------------------------------------------------------------------------


def memory_of(word: str, mib: int) -> Limits:
    return {f"huawei.com/{word}": 1, f"huawei.com/{word}-memory": mib}


def test_ascend_four_quarters_of_a_910b3_and_no_fifth() -> None:
    one = Node(chips("Ascend910B3"))
    for _ in range(4):
        assert one.sizes(memory_of("Ascend910B3", 16384)) == [16384]
    refused = one.place(memory_of("Ascend910B3", 1))
    assert isinstance(refused, str)
    assert "16384 MiB (for 1) wanted, at most 0 MiB free" in refused


def test_ascend_910_matches_any_910() -> None:
    for word in ("Ascend910A", "Ascend910B2", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"):
        assert Node(chips(word)).sizes({"huawei.com/Ascend910": 1}) == [
            CHIPS[word].memory_allocatable_mib
        ]
    assert Node(chips("Ascend910B4")).sizes(
        {"huawei.com/ascend910": 1, "huawei.com/Ascend910-memory": 9000}
    ) == [16384]
    assert isinstance(Node(chips("Ascend310P")).place({"huawei.com/Ascend910": 1}), str)


def test_ascend_910c_is_allocated_in_modules() -> None:
    one = Node(chips("Ascend910C", 4))
    first = one.place({"huawei.com/Ascend910C": 1})
    second = one.place({"huawei.com/Ascend910C": 2})
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    assert [s.uuid for s in (*first, *second)] == [f"ascend-{i}" for i in range(4)]
    assert "3 chips are not whole modules of two; write 2 or 4" in refusal(
        {"huawei.com/Ascend910C": 3}
    )


def test_ascend_module_with_a_part_taken_is_not_whole() -> None:
    one = Node(chips("Ascend910C", 2))
    assert one.sizes(memory_of("Ascend910C", 16384)) == [16384]
    refused = one.place({"huawei.com/Ascend910C": 2})
    assert isinstance(refused, str)


# --- others ---------------------------------------------------------------------------------------


def test_metax_memory_is_gib_or_bytes_and_classes_do_not_mix() -> None:
    def limits(memory: str, cores: int = 30) -> Limits:
        return {
            "metax-tech.com/sgpu": 1,
            "metax-tech.com/vmemory": memory,
            "metax-tech.com/vcore": cores,
        }

    assert asked(limits("4")).memory_mib == 4096
    assert asked(limits("512Mi")).memory_mib == 512
    assert asked(limits("9000Mi")).memory_mib == 71 * 128
    one = Node(node("metax", "MXC500", 65536, mode="sgpu"))
    qos = "metax-tech.com/sgpu-qos-policy"
    assert one.sizes(limits("4"), annotations={qos: "fixed-share"}) == [4096]
    refused = one.place(limits("4"))
    assert isinstance(refused, str)
    assert refused.startswith("CardQosPolicyMismatch: every device with room serves shares of")
    assert one.sizes(limits("4"), annotations={qos: "fixed-share"}) == [4096]
    assert "is not a class" in refusal(limits("4"), {qos: "best"})
    online = {"metax-tech.com/sgpu-app-class": "online"}
    assert asked(limits("4", 100), online).core_pct == 0
    assert "has one sGPU" in refusal({**limits("4"), "metax-tech.com/sgpu": 2}, online)


def test_metax_online_pod_joins_offline_ones_and_no_other() -> None:
    limits = {
        "metax-tech.com/sgpu": 1,
        "metax-tech.com/vmemory": "4",
        "metax-tech.com/vcore": 30,
    }
    app = "metax-tech.com/sgpu-app-class"
    one = Node(node("metax", "MXC500", 65536, mode="sgpu"))
    assert one.sizes(limits, annotations={app: "offline"}) == [4096]
    assert one.sizes(limits, annotations={app: "online"}) == [4096]
    assert one.sizes(limits, annotations={app: "online"}) == [4096]
    for annotations in ({app: "offline"}, {}):
        refused = one.place(limits, annotations=annotations)
        assert isinstance(refused, str)
        assert refused.startswith("CardQosPolicyMismatch")
    normal = Node(node("metax", "MXC500", 65536, mode="sgpu"))
    assert normal.sizes(limits) == [4096]
    refused = normal.place(limits, annotations={app: "online"})
    assert isinstance(refused, str)
    assert refused.endswith(f"than online (annotation {app})")


def test_vastai_pod_with_mutex_takes_no_die_of_a_card_in_use() -> None:
    devices = node("vastai", "Vastai", 16384, 4, mode="whole")
    dies = tuple(
        replace(die, attributes={"board": f"card-{number // 2}", "strategy": "die"})
        for number, die in enumerate(devices.devices)
    )
    one = Node(replace(devices, devices=dies))
    limits = {"vastaitech.com/va": 1}
    mutex = {"hami.io/gpu-scheduler-policy": "mutex"}
    taken = [one.place(limits), one.place(limits, annotations=mutex)]
    assert [[s.uuid for s in some if isinstance(s, Share)] for some in taken] == [
        ["vastai-0"],
        ["vastai-2"],
    ]
    refused = one.place(limits, annotations=mutex)
    assert isinstance(refused, str)
    assert refused.startswith("ExclusiveDeviceAllocateConflict: no device is idle")
    assert one.sizes(limits) == [16384]


def test_enflame_slices_are_exact_and_shares_get_the_smallest() -> None:
    table = enflame.partitions_of({"1g.8gb": (1, 8), "2g.16gb": (2, 16), "6g.48gb": (6, 48)})
    one = Node(node("enflame", "S60", 49152, mode="drs", partitions=table, resources={"slices": 6}))
    first = one.place({"enflame.com/drs-gcu": 2, "enflame.com/gcu-memory": 1})
    assert not isinstance(first, str)
    assert [(s.profile, s.memory_mib) for s in first] == [("2g.16gb", 16384)]
    refused = one.place({"enflame.com/drs-gcu": 3})
    assert isinstance(refused, str)
    assert "no device has a partition of the size wanted: 3 slices" in refused
    second = one.place({"enflame.com/gcu-memory": 5, "enflame.com/gcu-core": 30})
    assert not isinstance(second, str)
    assert [s.profile for s in second] == ["2g.16gb"]
    assert one.sizes({"enflame.com/gcu-memory": 7000}) == [8192]
    assert one.sizes({"enflame.com/vgcu": 1, "enflame.com/vgcu-percentage": 10}) == [8192]
    assert "either" in refusal({"enflame.com/drs-gcu": 1, "enflame.com/vgcu": 1})


def test_kunlunxin_sizes_do_not_mix_on_a_device() -> None:
    one = Node(node("kunlunxin", "P800 OAM", 98304, 2))

    def vxpu(mib: int) -> Limits:
        return {"kunlunxin.com/vxpu": 1, "kunlunxin.com/vxpu-memory": mib}

    quarters = [one.place(vxpu(20000)) for _ in range(2)]
    halves = [one.place(vxpu(30000)) for _ in range(2)]
    assert [[s.uuid for s in found if isinstance(s, Share)] for found in quarters] == [
        ["kunlunxin-0"],
        ["kunlunxin-0"],
    ]
    assert [[s.memory_mib for s in found if isinstance(s, Share)] for found in halves] == [
        [49152],
        [49152],
    ]
    refused = one.place(vxpu(30000))
    assert isinstance(refused, str)
    assert asked(vxpu(200_000)).exclusive


def test_kunlunxin_devices_are_linked() -> None:
    one = Node(node("kunlunxin", "P800 OAM", 98304, 8))
    assert "write 1, 2, 4 or 8" in refusal({"kunlunxin.com/xpu": 3})
    single = one.place({"kunlunxin.com/xpu": 1})
    four = one.place({"kunlunxin.com/xpu": 4})
    pair = one.place({"kunlunxin.com/xpu": 2})
    taken = [
        [int(s.uuid[-1]) for s in found if isinstance(s, Share)] for found in (single, four, pair)
    ]
    assert taken == [[0], [4, 5, 6, 7], [1, 2]]
    refused = one.place({"kunlunxin.com/xpu": 2})
    assert isinstance(refused, str)


def test_kunlunxin_cross_pairs_are_used_where_no_wing_fits() -> None:
    one = Node(node("kunlunxin", "P800 OAM", 98304, 8))
    for number in (1, 2, 3, 5, 6, 7):
        one.place(
            {"kunlunxin.com/xpu": 1},
            annotations={"baidu.com/use-gpuuuid": f"kunlunxin-{number}"},
        )
    found = one.place({"kunlunxin.com/xpu": 2})
    assert [s.uuid for s in found if isinstance(s, Share)] == ["kunlunxin-0", "kunlunxin-4"]


def test_kunlunxin_lists_of_both_kinds_hold() -> None:
    annotations = {"baidu.com/use-gpuuuid": "a,b", "hami.io/use-xpu-uuid": "b,c"}
    assert CATALOG.vendor("kunlunxin").parse_selector(annotations).allow_uuids == ("b",)
    annotations["hami.io/use-xpu-uuid"] = "c"
    assert not CATALOG.vendor("kunlunxin").parse_selector(annotations).accepts_uuid("a")


def neuron(cores: int, count: int = 16, type_: str = "trainium2") -> NodeDevices:
    devices = node("awsneuron", type_, 98304, count, attributes={"cores": str(cores)})
    facts = devices.devices[0]
    assert facts is not None
    table = awsneuron.partitions_of(
        msgspec.convert(
            {
                "uuid": "x",
                "vendor": "awsneuron",
                "index": 0,
                "type": type_,
                "memory_mib": 98304,
                "attributes": {"cores": str(cores)},
            },
            DeviceFacts,
        )
    )
    return node(
        "awsneuron",
        type_,
        98304,
        count,
        attributes={"cores": str(cores)},
        partitions=table,
        resources={awsneuron.CORES: cores},
    )


def test_neuron_cores_and_single_devices_leave_aligned_sets_whole() -> None:
    one = Node(neuron(2))
    core, device = {"aws.amazon.com/neuroncore": 1}, {"aws.amazon.com/neuron": 1}
    shares = one.place(core, core)
    assert not isinstance(shares, str)
    assert sorted((s.uuid, s.start) for s in shares) == [("awsneuron-0", 0), ("awsneuron-0", 1)]
    taken = [one.place(single) for single in (core, device, core, device)]
    names = [[s.uuid for s in some if isinstance(s, Share)] for some in taken]
    assert names == [["awsneuron-1"], ["awsneuron-2"], ["awsneuron-1"], ["awsneuron-3"]]
    for expected in (range(8, 16), range(4, 8)):
        several = one.place({"aws.amazon.com/neuron": len(expected)})
        assert not isinstance(several, str)
        assert [s.uuid for s in several] == [f"awsneuron-{n}" for n in expected]


def test_neuron_cores_are_neighbors() -> None:
    settings = VendorSettings(awsneuron=awsneuron.AwsneuronSettings(cores_per_device=8))
    one = Node(neuron(8, 1), catalog=Catalog.from_settings(settings))
    starts = []
    for cores in (4, 2, 2):
        shares = one.place({"aws.amazon.com/neuroncore": cores})
        assert not isinstance(shares, str), shares
        starts.append((shares[0].start, cores))
    positions = [at for start, size in starts for at in range(start or 0, (start or 0) + size)]
    assert sorted(positions) == list(range(8))
    assert isinstance(one.place({"aws.amazon.com/neuroncore": 1}), str)


def test_neuron_cores_beyond_a_device_are_whole_aligned_devices() -> None:
    one = Node(neuron(2))
    shares = one.place({"aws.amazon.com/neuroncore": 8})
    again = one.place({"aws.amazon.com/neuron": 8})
    assert [s.uuid for s in shares if isinstance(s, Share)] == [f"awsneuron-{i}" for i in range(4)]
    assert [s.uuid for s in again if isinstance(s, Share)] == [
        f"awsneuron-{i}" for i in range(8, 16)
    ]
    assert "write up to 2, or a multiple of it" in refusal({"aws.amazon.com/neuroncore": 3})


def test_neuron_containers_of_pods_fill_a_ring_of_sixteen_without_overlap() -> None:
    one = Node(neuron(2))
    core, devices = "aws.amazon.com/neuroncore", "aws.amazon.com/neuron"
    taken: list[tuple[int, int]] = []
    for containers in (
        [{core: 8}, {devices: 4}],
        [{core: 2}, {core: 1}],
        [{devices: 4}, {core: 1}],
    ):
        shares = one.place(*containers)
        assert not isinstance(shares, str), shares
        for share in shares:
            first = 2 * int(share.uuid.removeprefix("awsneuron-")) + (share.start or 0)
            taken += [(first, n) for n in range(1 if share.start is not None else 2)]
        wide = [s.uuid for s in shares if s.start is None]
        numbers = [int(uuid.removeprefix("awsneuron-")) for uuid in wide]
        runs = [numbers[at : at + 4] for at in range(0, len(numbers) // 4 * 4, 4)]
        assert all(run == list(range(run[0], run[0] + 4)) and run[0] % 4 == 0 for run in runs)
    cores = [first + n for first, n in taken]
    assert len(cores) == len(set(cores)) == 8 + 8 + 2 + 1 + 8 + 1


def test_one_container_may_request_one_family_and_two_vendors() -> None:
    assert "ask for one of them" in refusal({"metax-tech.com/gpu": 1, "metax-tech.com/sgpu": 1})
    request = CATALOG.parse_pod(pod({"hygon.com/dcunum": 1, "vastaitech.com/va": 1}))
    assert request is not None
    assert [r.vendor for r in request.containers[0].requests] == ["hygon", "vastai"]


# --- Kunlunxin, as its driver reports it ----------------------------------------------------------


def xpus(count: int = 1) -> Node:
    sizes = kunlunxin.partitions_of(98304)
    return Node(node("kunlunxin", "P800 OAM", 98304, count, partitions=sizes))


def vxpu(memory_mib: int) -> Limits:
    return {"kunlunxin.com/vxpu": 1, "kunlunxin.com/vxpu-memory": memory_mib}


def test_vxpus_of_a_device_are_partitions_of_one_size() -> None:
    one = xpus()
    for _ in range(4):
        shares = one.place(vxpu(20000))
        assert not isinstance(shares, str), shares
        assert [(s.profile, s.kind, s.memory_mib, s.core_pct) for s in shares] == [
            ("1/4", "1/4", 24576, 25)
        ]
    assert isinstance(one.place(vxpu(20000)), str)
    two = xpus(2)
    assert two.sizes(vxpu(20000)) == [24576]
    assert two.sizes(vxpu(40000)) == [49152]
    assert isinstance(two.place({"kunlunxin.com/xpu": 1}), str)


def test_whole_xpu_is_no_partition() -> None:
    one = xpus()
    shares = one.place({"kunlunxin.com/xpu": 1})
    assert not isinstance(shares, str), shares
    assert [(s.profile, s.exclusive, s.memory_mib) for s in shares] == [("", True, 98304)]
    assert isinstance(one.place(vxpu(20000)), str)


# --- rendering ------------------------------------------------------------------------------------


def rendered(
    share: Share,
    device: Device,
    handles: dict[str, str] | None = None,
    mode: str = "env",
    library_mounts: tuple[BindMount, ...] = (),
) -> ContainerEdits:
    given = {"mode": mode, "handles": {share.uuid: handles} if handles else {}}
    context = replace(msgspec.convert(given, RenderContext), library_mounts=library_mounts)
    return CATALOG.vendor(share.vendor).render(
        ContainerShares(name="c", kind="app", shares=(share,)), (device,), context
    )


def test_ascend_template_is_made_by_the_runtime_unless_it_exists() -> None:
    (device,) = chips("Ascend910B3").devices
    share = Share(
        vendor="ascend", uuid="ascend-0", memory_mib=16384, core_pct=25, profile="vir05_1c_16g"
    )
    edits = rendered(share, device)
    assert edits.env == {
        "ASCEND_VISIBLE_DEVICES": "0",
        "ASCEND_VNPU_SPECS": "vir05_1c_16g",
    }
    assert edits.annotations == {
        "huawei.com/Ascend910B3": '[{"UUID":"ascend-0","temp":"vir05_1c_16g","memory":16384}]'
    }
    made = rendered(share, device, {"vnpu_id": "100"}, mode="devices")
    assert "ASCEND_VNPU_SPECS" not in made.env
    assert ("/dev/vdavinci100", "/dev/davinci100") in [
        (n.host_path, n.container_path) for n in made.devices
    ]


def test_ascend_soft_share_has_its_quota() -> None:
    device = builders.device("ascend-0", vendor="ascend", type="Ascend910B3")
    share = Share(vendor="ascend", uuid="ascend-0", memory_mib=5000, core_pct=30)
    assert not any(name.startswith("NPU_") for name in rendered(share, device).env)
    library = BindMount(host_path="/l", container_path=ascend.LIBRARY_DIR)
    for mode in ("devices", "env"):
        edits = rendered(share, device, mode=mode, library_mounts=(library,))
        assert library in edits.mounts
        assert {name: edits.env[name] for name in edits.env if name.startswith("NPU_")} == {
            "NPU_MEM_QUOTA": "5000",
            "NPU_PRIORITY": "30",
            "NPU_GLOBAL_SHM_PATH": "/hami-shared-region/0_global_registry",
            "NPU_LOCAL_SHM_PATH": "/hami-vnpu-shmem/vnpu_local_shmem",
        }


@pytest.mark.parametrize(
    ("vendor", "handles", "variable", "value"),
    [
        (
            "metax",
            {"sgpu": "1", "alias": "me"},
            "METAX_SGPUS",
            "sgpu=#1;compute=30;vram=4096;alias=me",
        ),
        ("enflame", {"instance_uuid": "u"}, "TOPS_VISIBLE_DEVICES", "DRS-u"),
        ("amd", {"cu_mask": "0-75"}, "HSA_CU_MASK", "0:0-75"),
        ("amd", {}, "HIP_DEVICE_MEMORY_LIMIT", "4096m"),
        ("mthreads", {}, "MTHREADS_QOS_MEMORY_LIMIT", str(4096 << 20)),
        ("mthreads", {}, "MTHREADS_QOS_COMPUTING_POWER_WEIGHT", "30"),
    ],
)
def test_limits_of_a_partition_are_rendered_in_the_vendors_variable(
    vendor: str, handles: dict[str, str], variable: str, value: str
) -> None:
    device = builders.device("u", vendor=vendor)
    share = Share(vendor=vendor, uuid="u", memory_mib=4096, core_pct=30)
    assert rendered(share, device, handles).env[variable] == value


@pytest.mark.parametrize(
    ("vendor", "handles", "path"),
    [
        ("cambricon", {"cap_node": "/dev/cambricon-caps/cap_dev0_mi1"}, None),
        ("kunlunxin", {"number": "9"}, "/dev/xpu9"),
        ("kunlunxin", {}, "/dev/xpu0"),
        ("hygon", {"config_directory": "/d"}, "/dev/mkfd"),
        ("biren", {}, "/dev/biren/card_0"),
        ("vastai", {}, "/dev/va0"),
    ],
)
def test_a_part_is_seen_through_the_node_that_the_driver_made(
    vendor: str, handles: dict[str, str], path: str | None
) -> None:
    device = builders.device("u", vendor=vendor)
    share = Share(vendor=vendor, uuid="u", memory_mib=4096, core_pct=30)
    edits = rendered(share, device, handles, mode="devices")
    wanted = path or handles["cap_node"]
    assert wanted in [one.host_path for one in edits.devices]


def test_devices_of_a_toolkit_are_given_by_their_cdi_name() -> None:
    for vendor, name in (
        ("cambricon", "cambricon.com/mlu=0"),
        ("amd", "amd.com/gpu=u"),
        ("biren", "birentech.com/gpu=card_0"),
    ):
        share = Share(vendor=vendor, uuid="u", memory_mib=40_000, core_pct=100, exclusive=True)
        edits = rendered(share, builders.device("u", vendor=vendor), mode="cdi")
        assert edits.cdi_devices == (name,)
        assert not edits.devices


def test_neuron_cores_are_numbered_inside_the_container() -> None:
    (device,) = neuron(8, 1).devices
    share = Share(vendor="awsneuron", uuid="awsneuron-0", memory_mib=1, profile="2nc", start=4)
    assert rendered(share, device).env["NEURON_RT_VISIBLE_CORES"] == "4-5"
