# SPDX-License-Identifier: Apache-2.0
"""The allow list restricts what a size may choose, per model, and never what a pod names."""

import pytest
from msgspec.structs import replace

from hami_common.errors import SettingsInvalid
from hami_common.model.device import DeviceFacts, Profile
from hami_common.model.request import DeviceRequest
from hami_common.vendors.partitions import Division
from hami_nodeagent.core.allowedprofiles import check_allowed, model_of, restrict

A100 = DeviceFacts(
    uuid="GPU-0",
    vendor="nvidia",
    index=0,
    type="NVIDIA A100-SXM4-40GB",
    memory_mib=40960,
    mode="mig",
    partitions=(
        Profile(name="1g.5gb", memory_mib=4864, core_pct=14, size=1, starts=(0, 1, 2, 3, 4, 5, 6)),
        Profile(
            name="1g.5gb+me", memory_mib=4864, core_pct=14, size=1, starts=(0,), by_name_only=True
        ),
        Profile(name="1g.10gb", memory_mib=9856, core_pct=14, size=2, starts=(0, 2, 4, 6)),
        Profile(name="2g.10gb", memory_mib=9856, core_pct=28, size=2, starts=(0, 2, 4)),
        Profile(name="7g.40gb", memory_mib=40192, core_pct=100, size=8, starts=(0,)),
    ),
)
OF_HAMI = {"A100-SXM4-40GB": ("1g.5gb", "2g.*", "3g.*", "7g.*")}


def chosen(facts: DeviceFacts, request: DeviceRequest) -> str:
    division = Division(facts.partitions, {})
    grant = division.grant(request)
    return "" if grant is None else division.profiles[grant.profile].name


def test_size_chooses_among_the_allowed_profiles_only() -> None:
    wanted = DeviceRequest(vendor="nvidia", count=1, memory_mib=8000)
    assert chosen(A100, wanted) == "1g.10gb"
    restricted, problem = restrict(A100, OF_HAMI)
    assert (chosen(restricted, wanted), problem) == ("2g.10gb", "")


def test_left_out_profile_is_still_given_by_name() -> None:
    restricted, _ = restrict(A100, OF_HAMI)
    for name in ("1g.10gb", "1g.5gb+me"):
        assert chosen(restricted, DeviceRequest(vendor="nvidia", count=1, profile=name)) == name


def test_list_never_opens_profiles_that_differ_in_more_than_size() -> None:
    restricted, _ = restrict(A100, {"A100": ("*",)})
    assert restricted == A100


@pytest.mark.parametrize(
    ("device_type", "model"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", None),
        ("NVIDIA-a100", "A100"),
        ("NVIDIA A1000", None),
    ],
)
def test_longest_model_that_occurs_as_whole_words_counts(
    device_type: str, model: str | None
) -> None:
    allowed = {"A100": ("*",), "A100-SXM4-40GB": ("*",), "H20": ("*",)}
    assert model_of(device_type, allowed) == model


def test_other_cards_are_left_alone() -> None:
    soft = replace(A100, mode="soft")
    other = replace(A100, type="NVIDIA H200")
    assert [restrict(one, OF_HAMI) for one in (soft, other)] == [(soft, ""), (other, "")]


def test_list_that_leaves_no_profile_is_a_problem_of_the_node() -> None:
    restricted, problem = restrict(A100, {"A100": ("1g.18gb",)})
    assert all(profile.by_name_only for profile in restricted.partitions)
    assert problem == (
        "device 0: drivers.nvidia.mig_allowed_profiles[A100] allows none of"
        " 1g.5gb, 1g.10gb, 2g.10gb, 7g.40gb"
    )


@pytest.mark.parametrize(
    "allowed", [{"": ("1g.5gb",)}, {" - ": ("*",)}, {"A100": ()}, {"A": ("",)}]
)
def test_setting_without_text_is_refused(allowed: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(SettingsInvalid, match="mig_allowed_profiles"):
        check_allowed(allowed, field="drivers.nvidia.mig_allowed_profiles")
