# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's rules, row by row, as users of HAMi v2.10 know them, and the documented differences."""

from typing import Any

import pytest

from hami_common.errors import RequestInvalid
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import DeviceRequest, DeviceSelector
from hami_common.pods.podview import ContainerView, EnvVarView, ResourcesView
from hami_common.vendors.nvidia import Nvidia, NvidiaSettings
from hami_common.vendors.protocol import (
    BindMount,
    ContainerChanges,
    DeviceNode,
    InjectionMode,
    RenderContext,
)

GPU = "nvidia.com/gpu"
MEM = "nvidia.com/gpumem"
PCT = "nvidia.com/gpumem-percentage"
CORES = "nvidia.com/gpucores"
CORE_ALIAS = "nvidia.com/gpucore"
PRIORITY = "nvidia.com/priority"
NAMES = {"gpu": GPU, "mem": MEM, "pct": PCT, "cores": CORES, "core": CORE_ALIAS, "prio": PRIORITY}


def container(
    limits: dict[str, str] | None = None,
    requests: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
) -> ContainerView:
    def full(short: dict[str, str] | None) -> dict[str, str | int | float] | None:
        return None if short is None else {NAMES.get(k, k): v for k, v in short.items()}

    return ContainerView(
        name="main",
        resources=ResourcesView(limits=full(limits), requests=full(requests)),
        env=[EnvVarView(name=k, value=v) for k, v in (env or {}).items()],
    )


def request(
    count: int = 1, *, mib: int = 0, pct: int = 0, cores: int = 0, exclusive: bool = False
) -> DeviceRequest:
    return DeviceRequest(
        vendor="nvidia",
        count=count,
        memory_mib=mib,
        memory_pct=pct,
        core_pct=cores,
        exclusive=exclusive,
    )


WHOLE = request(pct=100, cores=100, exclusive=True)


@pytest.mark.parametrize(
    ("limits", "wanted", "added"),
    [
        # the worked examples of HAMi's pod interface
        ({"gpu": "1"}, WHOLE, {CORES: "100"}),
        ({"gpu": "1", "mem": "3000"}, request(mib=3000), {}),
        ({"mem": "3000"}, request(mib=3000), {GPU: "1"}),
        ({"gpu": "2", "pct": "50", "cores": "30"}, request(2, pct=50, cores=30), {}),
        ({"gpu": "1", "pct": "100"}, WHOLE, {CORES: "100"}),
        ({"gpu": "1", "cores": "50"}, request(pct=100, cores=50), {}),
        # count missing
        ({"cores": "30"}, request(pct=100, cores=30), {GPU: "1"}),
        ({"pct": "50"}, request(pct=50), {GPU: "1"}),
        ({"pct": "100"}, WHOLE, {GPU: "1", CORES: "100"}),
        # both amounts: memory wins, yet percentage 100 makes it exclusive
        ({"gpu": "1", "mem": "3000", "pct": "50"}, request(mib=3000), {}),
        (
            {"gpu": "1", "mem": "3000", "pct": "100"},
            request(mib=3000, cores=100, exclusive=True),
            {CORES: "100"},
        ),
        # zero counts as given: not exclusive, amounts by default
        ({"gpu": "1", "mem": "0"}, request(pct=100), {}),
        ({"gpu": "1", "pct": "0"}, request(pct=100), {}),
        ({"gpu": "1", "mem": "0", "pct": "50"}, request(pct=50), {}),
        ({"gpu": "1", "mem": "3000", "pct": "0"}, request(mib=3000), {}),
        ({"gpu": "1", "mem": "0", "pct": "0"}, request(pct=100), {}),
        # compute
        ({"gpu": "1", "cores": "0"}, request(pct=100), {}),
        (
            {"gpu": "1", "mem": "3000", "cores": "100"},
            request(mib=3000, cores=100, exclusive=True),
            {},
        ),
        ({"gpu": "1", "cores": "150"}, WHOLE, {}),
        # spellings
        ({"gpu": "1", "pct": "12.5"}, request(pct=13), {}),
        ({"gpu": "1", "mem": "3k"}, request(mib=3000), {}),
        ({"gpu": "2e0", "mem": "3000"}, request(2, mib=3000), {}),
        ({"gpu": "1", "core": "30"}, request(pct=100, cores=30), {CORES: "30"}),
    ],
)
def test_requests_and_admission_changes(
    limits: dict[str, str], wanted: DeviceRequest, added: dict[str, str]
) -> None:
    vendor = Nvidia()
    assert vendor.parse_request(container(limits)) == wanted
    changes = vendor.admit(container(limits))
    assert changes is not None
    assert changes.set_limits == added


@pytest.mark.parametrize(
    ("limits", "requests", "wanted"),
    [
        ({"gpu": "2"}, {"gpu": "1"}, request(2, pct=100, cores=100, exclusive=True)),
        ({}, {"gpu": "1", "mem": "100"}, request(mib=100)),
        ({"gpu": "1"}, {"mem": "100"}, request(mib=100)),
        ({"cores": "10"}, {"core": "20", "gpu": "1"}, request(pct=100, cores=10)),
        (None, {"gpu": "1"}, WHOLE),
    ],
)
def test_limits_are_read_before_requests(
    limits: dict[str, str] | None, requests: dict[str, str], wanted: DeviceRequest
) -> None:
    assert Nvidia().parse_request(container(limits, requests)) == wanted


@pytest.mark.parametrize("limits", [{}, {"gpu": "0"}, {"prio": "1"}, {"cpu": "1"}, {"gpu": "0m"}])
def test_pod_without_devices_has_no_request(limits: dict[str, str]) -> None:
    assert Nvidia().parse_request(container(limits)) is None


def test_container_without_known_resources_is_left_alone() -> None:
    assert Nvidia().admit(container({"cpu": "1"})) is None
    assert Nvidia().admit(ContainerView(name="main")) is None


@pytest.mark.parametrize("limits", [{"gpu": "0"}, {"prio": "1"}])
def test_a_mention_without_a_device_is_only_warned_about(limits: dict[str, str]) -> None:
    changes = Nvidia().admit(container(limits))
    assert changes is not None
    assert changes == ContainerChanges(warnings=changes.warnings)
    assert "asks for no device" in changes.warnings[0]


@pytest.mark.parametrize(
    ("limits", "field", "problem", "fix"),
    [
        ({"gpu": "1", "mem": "3Gi"}, MEM, "'3Gi' looks like bytes", "not bytes: write 3072"),
        ({"gpu": "1", "mem": "512Mi"}, MEM, "looks like bytes", "not bytes: write 512"),
        ({"gpu": "1", "mem": "0.5"}, MEM, "not a whole number", "whole number of MiB"),
        ({"gpu": "1", "mem": "100m"}, MEM, "not a whole number", "whole number of MiB"),
        ({"gpu": "1", "mem": "-5"}, MEM, "is negative", "0 or more"),
        ({"gpu": "1", "mem": "lots"}, MEM, "not a Kubernetes quantity", "whole number of MiB"),
        ({"mem": "3Gi"}, MEM, "looks like bytes", "write 3072"),
        ({"gpu": "0.5"}, GPU, "not a whole number", "whole number of devices"),
        ({"gpu": "-1"}, GPU, "is negative", "whole number of devices"),
        ({"gpu": "65"}, GPU, "too large", "at most 64"),
        ({"gpu": "1", "pct": "101"}, PCT, "outside 0..100", "from 0 to 100"),
        ({"gpu": "1", "pct": "-1"}, PCT, "outside 0..100", "from 0 to 100"),
        ({"gpu": "1", "cores": "0.5"}, CORES, "not a whole number", "percent of one device"),
        ({"gpu": "1", "cores": "-1"}, CORES, "is negative", "percent of one device"),
        ({"gpu": "1", "prio": "8"}, PRIORITY, "too large", "at most 7"),
        ({"gpu": "1", "prio": "high"}, PRIORITY, "not a Kubernetes quantity", "priority levels"),
        ({"gpu": "0", "mem": "3Gi"}, MEM, "looks like bytes", "write 3072"),
    ],
)
def test_requests_that_hami_ignores_silently_are_refused_with_the_fix(
    limits: dict[str, str], field: str, problem: str, fix: str
) -> None:
    for act in (Nvidia().parse_request, Nvidia().admit):
        with pytest.raises(RequestInvalid) as caught:
            act(container(limits))
        assert caught.value.field == f"container main: resources.limits[{field}]"
        assert problem in caught.value.problem
        assert fix in caught.value.fix


def admitted(view: ContainerView, changes: ContainerChanges) -> ContainerView:
    """The container after the changes were applied, as the webhook applies them."""
    limits: dict[str, Any] = {**view.limits(), **changes.set_limits}
    requests: dict[str, Any] = dict(view.requests())
    for name in changes.remove_resources:
        limits.pop(name, None)
        requests.pop(name, None)
    env = {v.name: v.value or "" for v in view.env or [] if v.name not in changes.remove_env}
    return container(limits, requests, {**changes.set_env, **env})


@pytest.mark.parametrize(
    "limits",
    [
        {"gpu": "1"},
        {"mem": "3000"},
        {"cores": "30"},
        {"pct": "100"},
        {"core": "30"},
        {"core": "30", "cores": "40", "gpu": "1"},
        {"gpu": "1", "cores": "150"},
        {"gpu": "1", "mem": "0"},
        {"gpu": "2", "pct": "50", "prio": "1"},
        {"gpu": "0"},
    ],
)
def test_admission_keeps_the_request_and_is_idempotent(
    limits: dict[str, str],
) -> None:
    vendor = Nvidia(NvidiaSettings(core_policy="force"))
    before = container(limits)
    first = vendor.admit(before)
    assert first is not None
    after = admitted(before, first)
    assert vendor.parse_request(after) == vendor.parse_request(before)
    second = vendor.admit(after)
    assert second is not None
    assert second.set_limits == {}
    assert second.remove_resources == ()


@pytest.mark.parametrize(
    ("limits", "warning"),
    [
        ({"gpu": "1", "core": "30"}, "nvidia.com/gpucore is read as nvidia.com/gpucores"),
        ({"gpu": "1", "core": "3", "cores": "4"}, "nvidia.com/gpucore is ignored because"),
        ({"gpu": "1", "mem": "3000", "pct": "50"}, "both given; nvidia.com/gpumem wins"),
        ({"gpu": "1", "cores": "150"}, "150 is more than one device has, read as 100"),
    ],
)
def test_reinterpreted_values_are_warned_about(limits: dict[str, str], warning: str) -> None:
    changes = Nvidia().admit(container(limits))
    assert changes is not None
    assert any(warning in text for text in changes.warnings)
    assert len(changes.warnings) == 1


def test_priority_and_core_policy_become_environment() -> None:
    vendor = Nvidia(NvidiaSettings(core_policy="force", runtime_class="nvidia"))
    changes = vendor.admit(container({"gpu": "1", "prio": "1"}))
    assert changes is not None
    assert changes.set_env == {"CUDA_TASK_PRIORITY": "1", "GPU_CORE_UTILIZATION_POLICY": "force"}
    assert changes.runtime_class == "nvidia"
    assert vendor.parse_priority(container({"prio": "0"})) == 0
    assert vendor.parse_priority(container({"gpu": "1"})) is None
    default = Nvidia().admit(container({"gpu": "1"}))
    assert default is not None
    assert default.set_env == {}


def test_environment_that_the_node_sets_is_taken_out_with_a_warning() -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_DEVICE_MEMORY_LIMIT_0": "1g", "MINE": "1"}
    changes = Nvidia().admit(container({"gpu": "1"}, env=env))
    assert changes is not None
    assert changes.remove_env == ("NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_MEMORY_LIMIT_0")
    assert len(changes.warnings) == 2


@pytest.mark.parametrize("value", ["true", "TRUE", "1", "t"])
def test_only_a_whole_device_may_switch_the_limiter_off(value: str) -> None:
    env = {"CUDA_DISABLE_CONTROL": value}
    with pytest.raises(RequestInvalid, match="cannot switch its limits off"):
        Nvidia().admit(container({"gpu": "1", "mem": "3000"}, env=env))
    assert Nvidia().admit(container({"gpu": "1"}, env=env)) is not None
    off = {"CUDA_DISABLE_CONTROL": "false"}
    assert Nvidia().admit(container({"gpu": "1", "mem": "3000"}, env=off)) is not None


@pytest.mark.parametrize(
    ("settings", "limits", "wanted"),
    [
        (NvidiaSettings(default_count=0), {"mem": "0"}, None),
        (NvidiaSettings(default_count=2), {"mem": "3000"}, request(2, mib=3000)),
        (
            NvidiaSettings(default_memory_mib=4000),
            {"gpu": "1"},
            request(mib=4000, cores=100, exclusive=True),
        ),
        (NvidiaSettings(default_memory_mib=4000), {"gpu": "1", "mem": "0"}, request(mib=4000)),
        (NvidiaSettings(default_memory_mib=4000), {"gpu": "1", "pct": "30"}, request(pct=30)),
        (NvidiaSettings(default_core_pct=20), {"gpu": "1", "mem": "1"}, request(mib=1, cores=20)),
        (NvidiaSettings(default_core_pct=20), {"gpu": "1"}, WHOLE),
        (NvidiaSettings(memory_factor=10), {"gpu": "1", "mem": "3"}, request(mib=30)),
        (NvidiaSettings(memory_factor=0), {"gpu": "1", "mem": "3"}, request(mib=3)),
    ],
)
def test_defaults_come_from_the_settings(
    settings: NvidiaSettings, limits: dict[str, str], wanted: DeviceRequest | None
) -> None:
    assert Nvidia(settings).parse_request(container(limits)) == wanted


def test_memory_in_units_is_limited_by_its_product() -> None:
    vendor = Nvidia(NvidiaSettings(memory_factor=1024))
    with pytest.raises(RequestInvalid, match=r"at most 2097151 \(unit: units of 1024 MiB\)"):
        vendor.parse_request(container({"gpu": "1", "mem": "2097152"}))
    with pytest.raises(RequestInvalid, match="not bytes: write 3"):
        vendor.parse_request(container({"gpu": "1", "mem": "3Gi"}))


def test_resource_names_are_settings() -> None:
    vendor = Nvidia(NvidiaSettings(resource_count_name="example.com/gpu", resource_aliases={}))
    assert vendor.parse_request(container({"example.com/gpu": "1"})) == WHOLE
    assert vendor.parse_request(container({"gpu": "1"})) is None
    assert "example.com/gpu" in vendor.resources.all()
    assert CORE_ALIAS not in vendor.resources.all()
    assert CORE_ALIAS in Nvidia().resources.all()


def test_selection_annotations_are_lists_of_words() -> None:
    selector = Nvidia().parse_selector(
        {
            "nvidia.com/use-gputype": "A100, H100 ,",
            "nvidia.com/nouse-gputype": "1080",
            "nvidia.com/use-gpuuuid": "GPU-1,GPU-2",
            "nvidia.com/nouse-gpuuuid": " GPU-3 ",
            "nvidia.com/numa-bind": "True",
            "nvidia.com/vgpu-mode": "hami-core,mig",
        }
    )
    assert selector == DeviceSelector(
        allow_types=("A100", "H100"),
        deny_types=("1080",),
        allow_uuids=("GPU-1", "GPU-2"),
        deny_uuids=("GPU-3",),
        modes=("soft", "mig"),
        numa_bind=True,
    )


def test_no_annotations_and_empty_lists_are_no_constraint() -> None:
    assert Nvidia().parse_selector({}) == DeviceSelector()
    assert Nvidia().parse_selector({"nvidia.com/use-gputype": " , "}) == DeviceSelector()


@pytest.mark.parametrize(
    ("key", "value"), [("nvidia.com/vgpu-mode", "turbo"), ("nvidia.com/numa-bind", "maybe")]
)
def test_unknown_selector_values_are_refused(key: str, value: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        Nvidia().parse_selector({key: value})
    assert caught.value.field == f"annotation {key}"
    assert f"{value!r}" in caught.value.problem


def device(number: int, *, minor: int | None = None) -> Device:
    return Device(
        uuid=f"GPU-{number}",
        vendor="nvidia",
        index=number,
        type="NVIDIA A100",
        memory_mib=81920,
        capacity_mib=81920,
        minor=minor,
    )


SHARES = ContainerShares(
    name="main",
    kind="app",
    priority=1,
    shares=(
        Share(vendor="nvidia", uuid="GPU-1", memory_mib=3000, core_pct=30),
        Share(vendor="nvidia", uuid="GPU-2", memory_mib=4000),
    ),
)
LIMITER_ENV = {
    "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
    "CUDA_DEVICE_MEMORY_LIMIT_1": "4000m",
    "CUDA_DEVICE_SM_LIMIT": "30",
    "CUDA_DEVICE_SM_LIMIT_0": "30",
    "CUDA_DEVICE_SM_LIMIT_1": "0",
    "CUDA_TASK_PRIORITY": "1",
}
CONTROL = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"]


@pytest.mark.parametrize(
    ("mode", "visible", "nodes", "cdi"),
    [
        ("env", "GPU-1,GPU-2", [], ()),
        ("devices", "GPU-1,GPU-2", ["/dev/nvidia1", "/dev/nvidia2", *CONTROL], ()),
        ("cdi", "void", [], ("nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-2")),
    ],
)
def test_every_injection_mode_sets_the_limiters_environment(
    mode: InjectionMode, visible: str, nodes: list[str], cdi: tuple[str, ...]
) -> None:
    edits = Nvidia().render(
        SHARES, (device(1, minor=1), device(2, minor=2)), RenderContext(mode=mode)
    )
    assert edits.env == LIMITER_ENV | {"NVIDIA_VISIBLE_DEVICES": visible}
    assert edits.devices == tuple(
        DeviceNode(host_path=n, container_path=n, optional=n.endswith(("-tools", "-modeset")))
        for n in nodes
    )
    assert edits.cdi_devices == cdi


def test_node_settings_reach_the_container() -> None:
    mount = BindMount(host_path="/opt/hami/libvgpu.so", container_path="/usr/lib/libvgpu.so")
    context = RenderContext(
        mode="env",
        region_file="/run/hami/region",
        memory_oversubscribed=True,
        library_log_level="2",
        core_policy="force",
        library_mounts=(mount,),
    )
    edits = Nvidia().render(SHARES, (device(1), device(2)), context)
    assert edits.env == LIMITER_ENV | {
        "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/run/hami/region",
        "CUDA_OVERSUBSCRIBE": "true",
        "LIBCUDA_LOG_LEVEL": "2",
        "GPU_CORE_UTILIZATION_POLICY": "force",
    }
    assert edits.mounts == (mount,)


def of_mode(mode: str, core_pct: int = 30) -> ContainerShares:
    share = Share(vendor="nvidia", uuid="GPU-1", memory_mib=3000, core_pct=core_pct, mode=mode)
    return ContainerShares(name="main", kind="app", shares=(share,))


def test_time_slices_are_limited_in_memory_only() -> None:
    edits = Nvidia().render(of_mode("timeslice"), (device(1),), RenderContext(mode="env"))
    assert edits.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert edits.env["CUDA_DEVICE_SM_LIMIT"] == edits.env["CUDA_DEVICE_SM_LIMIT_0"] == "0"
    assert not any(name.startswith("CUDA_MPS") for name in edits.env)
    assert edits.mounts == ()


@pytest.mark.parametrize(("core_pct", "threads"), [(30, "30"), (0, "100")])
def test_service_gets_its_limits_and_the_pipes_of_its_device_alone(
    core_pct: int, threads: str
) -> None:
    library = BindMount(host_path="/opt/hami/libvgpu.so", container_path="/usr/lib/libvgpu.so")
    context = RenderContext(mode="env", mps_dir="/run/hami-mps", library_mounts=(library,))
    edits = Nvidia().render(of_mode("mps", core_pct), (device(1),), context)
    assert {name: text for name, text in edits.env.items() if "MPS" in name} == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/hami-mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": threads,
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3000M",
    }
    assert edits.env["CUDA_DEVICE_SM_LIMIT_0"] == "0"
    assert edits.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert [(one.host_path, one.container_path) for one in edits.mounts] == [
        ("/opt/hami/libvgpu.so", "/usr/lib/libvgpu.so"),
        ("/run/hami-mps/GPU-1/pipe", "/run/hami-mps"),
        ("/run/hami-mps/shm", "/dev/shm"),
    ]


@pytest.mark.parametrize(
    ("limits", "removed"),
    [({"gpu": "1", "mem": "3000"}, ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",)), ({"gpu": "1"}, ())],
)
def test_variables_of_a_service_are_the_nodes_except_on_a_whole_device(
    limits: dict[str, str], removed: tuple[str, ...]
) -> None:
    env = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=90G"}
    changes = Nvidia().admit(container(limits, env=env))
    assert changes is not None
    assert changes.remove_env == removed


def test_features_reach_the_container_in_every_injection_mode() -> None:
    vendor = Nvidia(NvidiaSettings(features=("gds", "gdrcopy")))
    pair = (device(1), device(2))
    env = vendor.render(SHARES, pair, RenderContext(mode="env"))
    assert env.env["NVIDIA_GDS"] == env.env["NVIDIA_GDRCOPY"] == "enabled"
    cdi = vendor.render(SHARES, pair, RenderContext(mode="cdi"))
    assert cdi.cdi_devices[-2:] == ("nvidia.com/gds=all", "nvidia.com/gdrcopy=all")
    nodes = vendor.render(SHARES, pair, RenderContext(mode="devices")).devices
    assert {"/dev/nvidia-fs0", "/dev/gdrdrv"} <= {one.host_path for one in nodes if one.optional}
    assert "NVIDIA_GDS" not in cdi.env
    assert "NVIDIA_MOFED" not in env.env


def test_shares_of_other_vendors_do_not_shift_the_numbering() -> None:
    shares = ContainerShares(
        name="main",
        kind="app",
        shares=(
            Share(vendor="ascend", uuid="A-1", memory_mib=1),
            Share(vendor="nvidia", uuid="GPU-1", memory_mib=3000, core_pct=30),
        ),
    )
    edits = Nvidia().render(shares, (device(1),), RenderContext(mode="env"))
    assert edits.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert "CUDA_DEVICE_MEMORY_LIMIT_1" not in edits.env


NUMBER, SIZE = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory"
SIZE_PCT, VGPU_CORES = "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores"
VOLCANO = NvidiaSettings(dialects=("volcano",))


@pytest.mark.parametrize(
    ("limits", "wanted", "added"),
    [
        ({NUMBER: "1"}, WHOLE, {VGPU_CORES: "100"}),
        ({NUMBER: "2", SIZE: "3000", VGPU_CORES: "30"}, request(2, mib=3000, cores=30), {}),
        ({NUMBER: "1", SIZE_PCT: "50"}, request(pct=50), {}),
        ({SIZE: "3000"}, request(mib=3000), {NUMBER: "1"}),
        ({"gpu": "1", "mem": "3000"}, request(mib=3000), {}),
        ({"gpu": "1", "core": "30"}, request(pct=100, cores=30), {CORES: "30"}),
    ],
)
def test_dialect_keeps_its_names_at_admission(
    limits: dict[str, str], wanted: DeviceRequest, added: dict[str, str]
) -> None:
    vendor = Nvidia(VOLCANO)
    assert vendor.parse_request(container(limits)) == wanted
    changes = vendor.admit(container(limits))
    assert changes is not None
    assert changes.set_limits == added
    assert not {NUMBER, SIZE, SIZE_PCT, VGPU_CORES} & set(changes.remove_resources)


def test_dialect_of_the_settings_alone_is_known() -> None:
    assert Nvidia().admit(container({NUMBER: "1"})) is None
    assert NUMBER not in Nvidia().resources.all()
    assert {NUMBER, SIZE, SIZE_PCT, VGPU_CORES} <= Nvidia(VOLCANO).resources.all()


def test_container_uses_one_dialect() -> None:
    with pytest.raises(RequestInvalid) as caught:
        Nvidia(VOLCANO).parse_request(container({"gpu": "1", SIZE: "3000"}))
    assert caught.value.field == f"container main: resources.limits[{SIZE}]"
    assert f"uses {GPU}" in caught.value.problem


def test_error_names_the_resource_of_the_dialect() -> None:
    with pytest.raises(RequestInvalid) as caught:
        Nvidia(VOLCANO).parse_request(container({NUMBER: "1", SIZE: "3Gi"}))
    assert caught.value.field == f"container main: resources.limits[{SIZE}]"


def test_factor_of_memory_holds_for_the_dialect() -> None:
    vendor = Nvidia(NvidiaSettings(dialects=("volcano",), memory_factor=1024))
    assert vendor.parse_request(container({NUMBER: "1", SIZE: "3"})) == request(mib=3072)
    assert [one.memory_unit_mib for one in vendor.families] == [1024, 1024]


def test_device_is_advertised_under_every_dialect() -> None:
    device = Device(
        uuid="GPU-1", vendor="nvidia", index=0, type="A30", memory_mib=100, capacity_mib=100
    )
    assert Nvidia(VOLCANO).advertised(device) == (GPU, NUMBER)


def test_mode_is_read_from_the_dialects_annotation() -> None:
    written = {"volcano.sh/vgpu-mode": "mig"}
    assert Nvidia(VOLCANO).parse_selector(written).modes == ("mig",)
    assert Nvidia().parse_selector(written).modes == ()
    both = {**written, "nvidia.com/vgpu-mode": "hami-core"}
    assert Nvidia(VOLCANO).parse_selector(both).modes == ("soft",)
    with pytest.raises(RequestInvalid, match=r"volcano.sh/vgpu-mode"):
        Nvidia(VOLCANO).parse_selector({"volcano.sh/vgpu-mode": "fast"})
