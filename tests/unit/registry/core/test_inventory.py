# SPDX-License-Identifier: Apache-2.0
"""Canonical inventory: order of reports, validation, configuration changes."""

import pytest
from msgspec.structs import replace

from hami_common.events.codec import out_of_range
from hami_common.events.inventory import NodeReport
from hami_common.model.device import DeviceFacts, Link
from hami_registry.core.device_config import Defaults, DeviceConfig, Rule, digest, parse
from hami_registry.core.inventory import (
    LATE,
    Inventory,
    operator_cordons,
    same_content,
    supersedes,
)


def facts(uuid: str, index: int = 0, **more: object) -> DeviceFacts:
    values = {"vendor": "nvidia", "type": "NVIDIA H200", "memory_mib": 1000, **more}
    return DeviceFacts(uuid=uuid, index=index, **values)  # type: ignore[arg-type]  # test data


def report(*devices: DeviceFacts, boot: str = "1", seq: int = 1, **more: object) -> NodeReport:
    return NodeReport(
        node="n",
        vendor="nvidia",
        boot_id=boot,
        seq=seq,
        time_s=0.0,
        devices=devices,
        **more,  # type: ignore[arg-type]  # test data
    )


def test_overcommitted_memory_fits_into_the_hosts() -> None:
    """Of three cards scaled to 3.0, six cards' worth is promised; half of the host holds three."""
    inventory = Inventory(DeviceConfig(defaults=Defaults(memory_scaling=3.0)))
    cards = [facts(name, index=i) for i, name in enumerate("abc")]
    inventory.accept(report(*cards, host_memory_mib=6001))
    canonical = inventory.canonical("n", "nvidia", time_s=0)
    assert [one.capacity_mib for one in canonical.devices] == [2000, 2000, 2000]
    assert canonical.problem == (
        "memory is overcommitted by 3000 MiB, not by the configured 6000 MiB: the host has 6001 MiB"
        ", of which host_memory_ratio allows 3000 MiB"
    )


@pytest.mark.parametrize("host_mib", [0, 12000, 10**6])
def test_overcommit_that_the_host_can_hold_is_as_configured(host_mib: int) -> None:
    """A host of unknown memory, as of an agent of an earlier version, limits nothing."""
    inventory = Inventory(DeviceConfig(defaults=Defaults(memory_scaling=3.0)))
    cards = [facts(name, index=i) for i, name in enumerate("abc")]
    inventory.accept(report(*cards, host_memory_mib=host_mib))
    canonical = inventory.canonical("n", "nvidia", time_s=0)
    assert [one.capacity_mib for one in canonical.devices] == [3000, 3000, 3000]
    assert canonical.problem == ""


def test_card_without_overcommit_keeps_its_memory_on_a_small_host() -> None:
    config = parse(
        b"[[rules]]\nuuids = ['a']\nmemory_scaling = 2.0\n"
        b"[[rules]]\nuuids = ['b']\nmemory_scaling = 0.5",
        name="devices.toml",
    )
    inventory = Inventory(config)
    inventory.accept(report(facts("a"), facts("b", index=1), host_memory_mib=1))
    found = inventory.canonical("n", "nvidia", time_s=0).devices
    assert [one.capacity_mib for one in found] == [1000, 500]


def test_older_report_of_the_same_boot_is_ignored() -> None:
    inventory = Inventory(DeviceConfig())
    assert inventory.accept(report(facts("a"), seq=2))
    assert not inventory.accept(report(facts("b"), seq=1))
    assert [d.uuid for d in inventory.canonical("n", "nvidia", time_s=0).devices] == ["a"]


def test_later_boot_supersedes_whatever_its_sequence() -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(facts("a"), boot="1", seq=9))
    assert inventory.accept(report(facts("b"), boot="2", seq=1))
    assert not inventory.accept(report(facts("a"), boot="1", seq=10))


@pytest.mark.parametrize(("boot", "seq"), [("~~~~", 10**12), ("1", 10**12)])
def test_forged_sequence_numbers_are_superseded_by_the_agents_own_run(boot: str, seq: int) -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(facts("a"), boot="1", seq=100))
    assert inventory.accept(report(facts("forged"), boot=boot, seq=seq))
    forged = inventory.canonical("n", "nvidia", time_s=0)
    assert not inventory.accept(report(facts("a"), boot="1", seq=101)), "it may be late only"
    assert inventory.accept(report(facts("a"), boot="1", seq=101 + LATE + 1))
    ours = inventory.canonical("n", "nvidia", time_s=0)
    assert inventory.outlives(ours, forged)
    other = replace(forged, boot_id="zzzz")
    assert not inventory.outlives(ours, other), "another replica may know more"


def test_restarted_registry_replaces_a_forged_record_once_the_run_continues() -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(facts("a"), boot="1", seq=100))
    ours = inventory.canonical("n", "nvidia", time_s=0)
    forged = replace(ours, boot_id="~~~~", seq=10**12)
    assert not inventory.outlives(ours, forged)
    inventory.accept(report(facts("a"), boot="1", seq=101 + LATE))
    ours = inventory.canonical("n", "nvidia", time_s=0)
    assert inventory.outlives(ours, forged)
    assert not inventory.outlives(ours, replace(forged, config_generation=9))


def test_stale_replica_within_one_run_replaces_nothing() -> None:
    inventory = Inventory(DeviceConfig())
    for seq in (100, 200, 300):
        inventory.accept(report(facts("a"), boot="1", seq=seq))
        ours = inventory.canonical("n", "nvidia", time_s=0)
        assert not inventory.outlives(ours, replace(ours, seq=400))


def test_wrong_device_is_left_out_and_named_while_others_stay() -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(
        report(facts("a"), facts("a", 1), facts("", 2), facts("x y", 3), facts("c", vendor="amd"))
    )
    published = inventory.canonical("n", "nvidia", time_s=0)
    assert [d.uuid for d in published.devices] == ["a"]
    for part in ("uuid appears twice", "'x y'", "vendor 'amd'"):
        assert part in published.problem


def test_links_to_devices_that_are_not_published_are_dropped() -> None:
    inventory = Inventory(DeviceConfig(rules=(Rule(uuids=("b",), hidden=True),)))
    links = (Link(a="a", b="b", score=1), Link(a="a", b="c", score=2))
    inventory.accept(report(facts("a"), facts("b", 1), facts("c", 2), links=links))
    assert inventory.canonical("n", "nvidia", time_s=0).links == (links[1],)


def test_new_configuration_grows_the_generation_and_changes_devices() -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(facts("a")))
    before = inventory.canonical("n", "nvidia", time_s=0)
    assert not inventory.configure(DeviceConfig())
    assert inventory.configure(DeviceConfig(defaults=Defaults(slots=3)))
    after = inventory.canonical("n", "nvidia", time_s=1)
    assert (before.config_generation, after.config_generation) == (1, 2)
    assert after.devices[0].slots == 3
    assert not same_content(after, before)


def test_same_facts_at_another_time_are_no_change() -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(facts("a")))
    first = inventory.canonical("n", "nvidia", time_s=0)
    assert same_content(inventory.canonical("n", "nvidia", time_s=5), first)
    assert not same_content(first, None)


def test_cordon_of_a_node_marks_its_devices() -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(facts("a"), facts("b", 1)))
    assert inventory.cordon("n", frozenset({"b"}))
    assert not inventory.cordon("n", frozenset({"b"}))
    devices = inventory.canonical("n", "nvidia", time_s=0).devices
    assert [d.cordoned for d in devices] == [False, True]


def test_record_supersedes_older_or_different_records_and_no_newer_one() -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(facts("a"), boot="2", seq=5))
    ours = inventory.canonical("n", "nvidia", time_s=0)
    assert supersedes(ours, None)
    assert not supersedes(ours, ours)
    for boot_id, seq, generation, expected in (
        ("2", 4, 1, True),
        ("1", 9, 1, True),
        ("2", 6, 1, False),
        ("3", 1, 1, False),
        ("2", 4, 2, False),
    ):
        stored = replace(ours, boot_id=boot_id, seq=seq, config_generation=generation)
        assert supersedes(ours, stored) == expected, stored


def test_operators_cordons_are_distinguished_from_the_configurations() -> None:
    config = DeviceConfig(rules=(Rule(uuids=("a",), cordoned=True),))
    inventory = Inventory(config)
    inventory.accept(report(facts("a"), facts("b", 1), facts("c", 2)))
    inventory.cordon("n", frozenset({"b"}))
    stored = inventory.canonical("n", "nvidia", time_s=0)
    assert operator_cordons(config, stored) == {"b"}
    assert inventory.cordoned_nodes() == ["n"]


def test_digest_names_the_meaning_of_a_configuration() -> None:
    assert digest(DeviceConfig()) == digest(DeviceConfig(defaults=Defaults(slots=10)))
    assert digest(DeviceConfig()) != digest(DeviceConfig(defaults=Defaults(slots=9)))


@pytest.mark.parametrize(
    ("field", "at", "beyond"),
    [
        ("index", 4095, 4096),
        ("numa", 1023, 1024),
        ("memory_mib", 2**31 - 1, 2**31),
        ("core_pct", 10_000, 10_001),
        ("minor", 2**20 - 1, 2**20),
        ("type", "x" * 253, "x" * 254),
        ("attributes", {"a": "x" * 65_536}, {"a": "x" * 65_537}),
    ],
)
def test_device_out_of_range_is_left_out_and_named(field: str, at: object, beyond: object) -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(replace(facts("a"), **{field: at}), facts("b", 1)))
    assert len(inventory.canonical("n", "nvidia", time_s=0).devices) == 2
    inventory.accept(report(replace(facts("a"), **{field: beyond}), facts("b", 1), seq=2))
    published = inventory.canonical("n", "nvidia", time_s=0)
    assert [device.uuid for device in published.devices] == ["b"]
    assert f"device a: $.{field}" in published.problem


def test_record_of_the_largest_device_under_the_largest_scaling_is_within_bounds() -> None:
    most = facts("a", 4095, memory_mib=2**31 - 1)
    config = DeviceConfig(defaults=Defaults(slots=1024, memory_scaling=100.0, core_scaling=100.0))
    inventory = Inventory(config)
    inventory.accept(report(most))
    assert out_of_range(inventory.canonical("n", "nvidia", time_s=0)) == ""


def test_problem_of_many_devices_is_shortened() -> None:
    inventory = Inventory(DeviceConfig())
    inventory.accept(report(*(facts(f"x y {number}", number) for number in range(256))))
    published = inventory.canonical("n", "nvidia", time_s=0)
    assert published.problem.endswith("…")
    assert out_of_range(published) == ""


def test_reports_without_a_boot_id_are_accepted() -> None:
    inventory = Inventory(DeviceConfig())
    for seq in (1, 2, 3):
        assert inventory.accept(report(facts("a"), boot="", seq=seq))
    assert not inventory.accept(report(facts("a"), boot="", seq=2))
