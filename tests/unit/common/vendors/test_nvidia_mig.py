# SPDX-License-Identifier: Apache-2.0
"""NVIDIA devices in MIG mode: profiles requested by name, and the environment of containers."""

import pytest
from msgspec.structs import replace

from hami_common.errors import NotFound, RequestInvalid, SettingsInvalid
from hami_common.model.device import Device, Profile
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import DeviceRequest
from hami_common.pods.podview import ContainerView, EnvVarView, ResourcesView
from hami_common.vendors.nvidia import Nvidia, NvidiaSettings
from hami_common.vendors.protocol import BindMount, ContainerEdits, InjectionMode, RenderContext

SERVED = Nvidia(NvidiaSettings(mig_profiles=("1g.10gb", "1g.10gb+me", "1g.24gb-me")))
HANDLES = {
    "mig_uuid": "MIG-1",
    "gpu_instance": "7",
    "compute_instance": "0",
    "gi_cap": "/dev/nvidia-caps/nvidia-cap66",
    "ci_cap": "/dev/nvidia-caps/nvidia-cap67",
}
LIBRARY = (BindMount(host_path="/lib.so", container_path="/lib.so"),)
PART = Share(
    vendor="nvidia", uuid="GPU-0", memory_mib=9984, core_pct=12, profile="1g.10gb", start=6
)
SOFT = Share(vendor="nvidia", uuid="GPU-1", memory_mib=4096, core_pct=30)


def ask(limits: dict[str, str], env: dict[str, str] | None = None) -> ContainerView:
    return ContainerView(
        name="main",
        resources=ResourcesView(limits=dict(limits)),
        env=[EnvVarView(name=name, value=value) for name, value in (env or {}).items()],
    )


def device(number: int, mode: str = "soft") -> Device:
    sizes = (
        Profile(name="1g.10gb", memory_mib=9984, core_pct=12, size=1, starts=tuple(range(7))),
        Profile(name="1g.10gb+me", memory_mib=9984, size=1, starts=(0,), by_name_only=True),
    )
    return Device(
        uuid=f"GPU-{number}",
        vendor="nvidia",
        index=number,
        type="NVIDIA H100",
        memory_mib=81559,
        capacity_mib=81152,
        minor=number + 4,
        mode=mode,
        partitions=sizes if mode == "mig" else (),
    )


def rendered(
    *pairs: tuple[Share, Device],
    mode: InjectionMode,
    handles: dict[str, str] | None = HANDLES,
    divides: bool = True,
) -> ContainerEdits:
    context = RenderContext(
        mode=mode,
        library_mounts=LIBRARY,
        handles={"GPU-0": handles} if handles else {},
        divides=divides,
    )
    shares = ContainerShares(name="main", kind="app", shares=tuple(share for share, _ in pairs))
    return SERVED.render(shares, [one for _, one in pairs], context)


# ---- asking ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("nvidia.com/mig-1g.10gb", "1g.10gb"),
        ("nvidia.com/mig-1g.10gb.me", "1g.10gb+me"),
        ("nvidia.com/mig-1g.24gb-me", "1g.24gb-me"),
    ],
)
def test_profile_is_requested_by_its_resource(name: str, profile: str) -> None:
    wanted = DeviceRequest(vendor="nvidia", count=2, profile=profile, modes=("mig",))
    view = ask({name: "2"})
    assert SERVED.parse_request(view) == wanted
    changes = SERVED.admit(view)
    assert changes is not None
    assert not changes.set_limits
    assert name in SERVED.resources.all()


def test_unlisted_profile_name_is_ignored() -> None:
    assert Nvidia().parse_request(ask({"nvidia.com/mig-1g.10gb": "1"})) is None
    assert Nvidia().admit(ask({"nvidia.com/mig-1g.10gb": "1"})) is None
    assert len(Nvidia().families) == 1


def test_none_of_a_profile_is_no_request() -> None:
    assert SERVED.parse_request(ask({"nvidia.com/mig-1g.10gb": "0"})) is None


@pytest.mark.parametrize(
    "limits",
    [
        {"nvidia.com/mig-1g.10gb": "1", "nvidia.com/gpu": "1"},
        {"nvidia.com/mig-1g.10gb": "1", "nvidia.com/gpumem": "1000"},
        {"nvidia.com/mig-1g.10gb": "1", "nvidia.com/mig-1g.10gb.me": "1"},
        {"nvidia.com/mig-1g.10gb": "half"},
        {"nvidia.com/mig-1g.10gb": "65"},
    ],
)
def test_contradictory_request_is_refused(limits: dict[str, str]) -> None:
    with pytest.raises(RequestInvalid, match=r"nvidia\.com/"):
        SERVED.parse_request(ask(limits))


def test_variables_of_the_node_are_removed_and_the_limiter_may_be_switched_off() -> None:
    view = ask(
        {"nvidia.com/mig-1g.10gb": "1"},
        {"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_DISABLE_CONTROL": "true"},
    )
    changes = SERVED.admit(view)
    assert changes is not None
    assert changes.remove_env == ("NVIDIA_VISIBLE_DEVICES",)
    assert len(changes.warnings) == 1


@pytest.mark.parametrize(
    ("limits", "annotations"),
    [
        ({"nvidia.com/mig-1g.10gb": "2"}, {}),
        ({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "1000"}, {"nvidia.com/vgpu-mode": "mig"}),
    ],
)
def test_request_for_several_instances_warns_that_a_process_uses_one(
    limits: dict[str, str], annotations: dict[str, str]
) -> None:
    changes = SERVED.admit(ask(limits), annotations)
    assert changes is not None
    (warning,) = changes.warnings
    assert "2 MIG instances; one CUDA process uses one" in warning
    (name, *rest) = limits
    one = SERVED.admit(ask({name: "1", **{key: limits[key] for key in rest}}), annotations)
    assert one is not None
    assert one.warnings == ()


@pytest.mark.parametrize(
    "profile", ["", "mig-1g.10gb", "1g.10gb.me", "10gb", "0g.10gb", "1g.10gb+"]
)
def test_setting_that_names_no_profile_is_refused(profile: str) -> None:
    with pytest.raises(SettingsInvalid, match="mig_profiles"):
        Nvidia(NvidiaSettings(mig_profiles=(profile,)))


def test_device_is_offered_under_the_profiles_that_it_has() -> None:
    assert SERVED.advertised(device(0, "mig")) == (
        "nvidia.com/gpu",
        "nvidia.com/mig-1g.10gb",
        "nvidia.com/mig-1g.10gb.me",
    )
    assert SERVED.advertised(device(0)) == ("nvidia.com/gpu",)


# ---- seeing ------------------------------------------------------------------------------------


def test_container_is_let_into_its_instance_only() -> None:
    edits = rendered((PART, device(0, "mig")), mode="devices")
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "MIG-1"}
    assert edits.mounts == ()
    paths = [node.host_path for node in edits.devices]
    assert paths[:3] == [
        "/dev/nvidia4",
        "/dev/nvidia-caps/nvidia-cap66",
        "/dev/nvidia-caps/nvidia-cap67",
    ]
    assert {node.host_path for node in edits.devices if node.optional}.isdisjoint(paths[:3])


def test_instance_is_named_to_the_vendors_runtime() -> None:
    edits = rendered((PART, device(0, "mig")), mode="env", handles={"mig_uuid": "MIG-1"})
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "MIG-1"}
    assert rendered((PART, device(0, "mig")), mode="cdi").cdi_devices == ("nvidia.com/gpu=MIG-1",)


def test_instance_that_was_not_made_is_never_rendered_as_the_whole_device() -> None:
    with pytest.raises(NotFound, match="has not been made"):
        rendered((PART, device(0, "mig")), mode="env", handles=None)


def test_instance_without_device_nodes_is_not_given_as_nodes() -> None:
    with pytest.raises(NotFound, match="MIG-1"):
        rendered((PART, device(0, "mig")), mode="devices", handles={"mig_uuid": "MIG-1"})


def test_container_is_let_into_all_its_instances_of_one_card() -> None:
    other = {
        "mig_uuid": "MIG-2",
        "gi_cap": "/dev/nvidia-caps/nvidia-cap75",
        "ci_cap": "/dev/nvidia-caps/nvidia-cap76",
    }
    card = device(0, "mig")
    shares = (replace(PART, start=2), PART)
    context = RenderContext(
        mode="devices",
        handles={"GPU-0/1g.10gb@6": HANDLES, "GPU-0/1g.10gb@2": other},
        divides=True,
    )
    container = ContainerShares(name="main", kind="app", shares=shares)
    edits = SERVED.render(container, [card, card], context)
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "MIG-2,MIG-1"}
    paths = [node.host_path for node in edits.devices]
    assert paths[:5] == [
        "/dev/nvidia4",
        other["gi_cap"],
        other["ci_cap"],
        HANDLES["gi_cap"],
        HANDLES["ci_cap"],
    ]
    assert len(paths) == len(set(paths))
    named = SERVED.render(container, [card, card], replace(context, mode="cdi"))
    assert named.cdi_devices == ("nvidia.com/gpu=MIG-2", "nvidia.com/gpu=MIG-1")
    lacking = replace(context, handles={"GPU-0/1g.10gb@6": HANDLES})
    with pytest.raises(NotFound, match="has not been made"):
        SERVED.render(container, [card, card], lacking)


def test_limits_are_those_of_the_soft_shares_at_their_own_numbers() -> None:
    edits = rendered((PART, device(0, "mig")), (SOFT, device(1)), mode="env")
    assert edits.env["NVIDIA_VISIBLE_DEVICES"] == "MIG-1,GPU-1"
    assert edits.env["CUDA_DEVICE_MEMORY_LIMIT_1"] == "4096m"
    assert edits.env["CUDA_DEVICE_SM_LIMIT"] == "30"
    assert "CUDA_DEVICE_MEMORY_LIMIT_0" not in edits.env
    assert edits.mounts == LIBRARY
