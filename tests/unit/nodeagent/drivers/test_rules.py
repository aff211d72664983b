# SPDX-License-Identifier: Apache-2.0
"""Rules that drivers share: type names, link scores, fault policy."""

import pytest
from msgspec.structs import replace

from hami_common.errors import SettingsInvalid
from hami_common.model.device import DeviceFacts, Link
from hami_nodeagent.drivers.rules import Neighbour, fault_policy, links_of, type_of, within_bounds


def device(index: int) -> DeviceFacts:
    return DeviceFacts(
        uuid=f"GPU-{index}", vendor="nvidia", index=index, type="NVIDIA A30", memory_mib=24576
    )


@pytest.mark.parametrize(
    ("model", "type_name"),
    [
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("Tesla T4", "NVIDIA-Tesla T4"),
        ("NVIDIA", "NVIDIA"),
    ],
)
def test_nvidia_type_is_prefixed_unless_it_begins_with_the_vendor(
    model: str, type_name: str
) -> None:
    assert type_of("nvidia", model) == type_name


def test_other_vendors_keep_their_model_name() -> None:
    assert type_of("ascend", "910B4") == "910B4"


@pytest.mark.parametrize(
    ("level", "links", "score"),
    [
        ("system", 0, 10),
        ("node", 0, 20),
        ("hostbridge", 0, 30),
        ("multiple", 0, 40),
        ("single", 0, 50),
        ("internal", 0, 60),
        ("hostbridge", 4, 430),
        ("node", 18, 1820),
    ],
)
def test_pair_score_adds_the_bridge_and_the_fabric(level: str, links: int, score: int) -> None:
    view = Neighbour(level=level, fabric_links=links)
    scores, problems = links_of(
        (device(0), device(1)), {("GPU-0", "GPU-1"): view, ("GPU-1", "GPU-0"): view}
    )
    assert scores == (Link(a="GPU-0", b="GPU-1", score=score),)
    assert problems == ()


def test_contradicting_pair_scores_zero_and_is_reported() -> None:
    scores, problems = links_of(
        (device(0), device(1)),
        {
            ("GPU-0", "GPU-1"): Neighbour(level="node", fabric_links=2),
            ("GPU-1", "GPU-0"): Neighbour(level="node", fabric_links=1),
        },
    )
    assert scores == (Link(a="GPU-0", b="GPU-1", score=0),)
    assert problems == ("link between device 0 and device 1 differs by direction: 220 and 120",)


def test_pair_seen_from_one_side_only_keeps_that_view() -> None:
    views = {("GPU-1", "GPU-0"): Neighbour(level="single")}
    scores, problems = links_of((device(1), device(0)), views)
    assert scores == (Link(a="GPU-0", b="GPU-1", score=50),)
    assert problems == ()


def test_pair_without_a_link_is_left_out() -> None:
    assert links_of((device(0), device(1)), {}) == ((), ())


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109])
def test_application_faults_are_harmless_by_default(code: int) -> None:
    assert not fault_policy("nvidia", disable="", enable="").condemns(code)


@pytest.mark.parametrize("code", [48, 63, 64, 74, 79, 92, 94, 95, 119, 120])
def test_every_other_fault_condemns_by_default(code: int) -> None:
    assert fault_policy("nvidia", disable="", enable="").condemns(code)


def test_other_vendors_have_no_harmless_codes_of_nvidia() -> None:
    assert fault_policy("ascend", disable="", enable="").condemns(31)


@pytest.mark.parametrize(
    ("disable", "enable", "condemns", "spares", "probes"),
    [
        ("74", "", {79}, {74, 31}, True),
        ("xids", "", set(), {79, 31}, True),
        ("all", "", set(), {79, 31}, False),
        ("", "31", {31, 79}, {13}, True),
        ("", "all", {13, 31, 79}, set(), True),
        ("xids", "79", {79}, {31, 74}, True),
        (" 74 , 79,", "", {48}, {74, 79}, True),
        ("ALL", "all", {13, 79}, set(), True),
    ],
)
def test_operators_move_codes_between_harmless_and_condemning(
    disable: str, enable: str, condemns: set[int], spares: set[int], *, probes: bool
) -> None:
    policy = fault_policy("nvidia", disable=disable, enable=enable)
    assert all(policy.condemns(code) for code in condemns)
    assert not any(policy.condemns(code) for code in spares)
    assert policy.probes is probes


def test_invalid_code_is_refused_by_name() -> None:
    with pytest.raises(SettingsInvalid, match="'fatal' is neither a fault code nor one of all"):
        fault_policy("nvidia", disable="79,fatal", enable="")


def test_device_beyond_message_limits_is_named_and_the_others_kept() -> None:
    broken = replace(device(1), index=2**31)
    kept, problems = within_bounds((device(0), broken, device(2)))
    assert kept == (device(0), device(2))
    assert len(problems) == 1
    assert problems[0].startswith("device 'GPU-1': $.index: ")
