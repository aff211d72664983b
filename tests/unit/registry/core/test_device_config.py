# SPDX-License-Identifier: Apache-2.0
"""Device configuration: rules in order, zero values count, bad values are named."""

import pytest
from msgspec.structs import replace

from hami_common.errors import SettingsInvalid
from hami_common.model.device import Burst, DeviceFacts
from hami_common.vendors.catalog import Catalog
from hami_registry.core.device_config import DeviceConfig, canonical_device, parse, use_of

A100 = DeviceFacts(
    uuid="GPU-a", vendor="nvidia", index=0, type="NVIDIA A100-SXM4-40GB", memory_mib=40960
)
H200 = DeviceFacts(uuid="GPU-h", vendor="nvidia", index=1, type="NVIDIA H200", memory_mib=143771)


def test_empty_file_means_shipped_defaults() -> None:
    device = canonical_device(parse(b"", name="devices.toml"), "n", A100)
    assert device is not None
    assert (device.slots, device.capacity_mib, device.capacity_core_pct) == (10, 40960, 100)


def test_later_rules_win_field_by_field() -> None:
    config = parse(
        b"""
[defaults]
slots = 8
memory_scaling = 2.0
[[rules]]
nodes = ["gpu-*"]
slots = 4
[[rules]]
nodes = ["gpu-1"]
types = ["a100"]
memory_scaling = 1.0
""",
        name="devices.toml",
    )
    first, second = use_of(config, "gpu-1", A100), use_of(config, "gpu-2", A100)
    assert (first.slots, first.memory_scaling) == (4, 1.0)
    assert (second.slots, second.memory_scaling) == (4, 2.0)
    assert use_of(config, "cpu-1", A100).slots == 8
    assert use_of(config, "gpu-1", H200).memory_scaling == 2.0


@pytest.mark.parametrize(
    "vendor", [one.name for one in Catalog.from_settings().vendors if one.name != "nvidia"]
)
def test_memory_without_a_backing_in_the_host_is_never_overcommitted(vendor: str) -> None:
    config = parse(b"[defaults]\nmemory_scaling = 2.0", name="devices.toml")
    device = canonical_device(config, "n", replace(A100, vendor=vendor, partitions=()))
    assert device is not None
    assert device.capacity_mib <= device.memory_mib
    nvidia = canonical_device(config, "n", A100)
    assert nvidia is not None
    assert nvidia.capacity_mib == 2 * nvidia.memory_mib
    less = parse(b"[defaults]\nmemory_scaling = 0.5", name="devices.toml")
    assert use_of(less, "n", replace(A100, vendor=vendor)).memory_scaling == 0.5


def test_rule_that_overcommits_only_vendors_without_a_backing_is_refused() -> None:
    text = b'[[rules]]\nvendors = ["hygon", "metax"]\nmemory_scaling = 2.0'
    with pytest.raises(SettingsInvalid, match="hygon, metax have") as refused:
        parse(text, name="devices.toml")
    assert refused.value.field == "devices.toml: rules[0].memory_scaling"
    assert "only nvidia can overcommit memory" in str(refused.value)
    parse(text.replace(b'"metax"', b'"nvidia"'), name="devices.toml")


def test_later_rule_can_disable_what_an_earlier_rule_enabled() -> None:
    config = parse(
        b"""
rules:
  - cordoned: true
    reserved_mib: 500
  - uuids: [GPU-a]
    cordoned: false
    reserved_mib: 0
""",
        name="devices.yaml",
    )
    freed, kept = canonical_device(config, "n", A100), canonical_device(config, "n", H200)
    assert freed is not None
    assert kept is not None
    assert (freed.cordoned, freed.capacity_mib) == (False, 40960)
    assert (kept.cordoned, kept.capacity_mib) == (True, 143271)


def test_hidden_device_is_not_published() -> None:
    config = parse(b"[[rules]]\nindexes = [1]\nhidden = true", name="d.toml")
    assert canonical_device(config, "n", H200) is None
    assert canonical_device(config, "n", A100) is not None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"[defaults]\nslots = 0", "defaults.slots"),
        (b"[[rules]]\nmemory_scaling = 0.0", "rules[0].memory_scaling"),
        (b"host_memory_ratio = 1.5", "host_memory_ratio"),
        (b"host_memory_ratio = -0.1", "host_memory_ratio"),
        (b"[[rules]]\nreserved_mib = -1", "rules[0].reserved_mib"),
        (b"[defaults]\nslot = 4", "slot"),
        (b"[defaults]\novercommit = 'swap'", "overcommit"),
        (b"[defaults]\nslots = 'ten'", "slots"),
        (b"not toml", "d.toml"),
    ],
)
def test_bad_configuration_is_refused_by_field(text: bytes, field: str) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        parse(text, name="d.toml")
    assert field in str(caught.value)


def test_cordon_of_the_nodes_agent_reaches_the_device() -> None:
    for is_wanted in (True, False):
        device = canonical_device(DeviceConfig(), "n", replace(A100, cordoned=is_wanted))
        assert device is not None
        assert device.cordoned is is_wanted


def test_mode_and_memory_limit_of_the_driver_reach_the_device() -> None:
    for capped in (False, True):
        facts = replace(A100, mode="timeslice", memory_cap=capped)
        device = canonical_device(DeviceConfig(), "n", facts)
        assert device is not None
        assert (device.mode, device.memory_cap) == ("timeslice", capped)


def test_operator_cordon_reaches_the_device() -> None:
    device = canonical_device(DeviceConfig(), "n", A100, cordoned_uuids=["GPU-a"])
    assert device is not None
    assert device.cordoned


def test_recalled_device_bounds_the_share_by_what_is_not_reserved() -> None:
    config = parse(
        b"""
[defaults]
memory_scaling = 2.0
[[rules]]
types = ["H200"]
overcommit = "recall"
reserved_mib = 771
""",
        name="devices.toml",
    )
    recalled, managed = canonical_device(config, "n", H200), canonical_device(config, "n", A100)
    assert recalled is not None
    assert managed is not None
    assert (recalled.overcommit, recalled.capacity_mib) == ("recall", 286_000)
    assert recalled.largest_mib == 143_000
    assert (managed.overcommit, managed.largest_mib) == ("managed", 0)


@pytest.mark.parametrize("scaling", [0.5, 1.0])
def test_device_that_offers_its_own_memory_only_is_not_recalled(scaling: float) -> None:
    text = f'[defaults]\novercommit = "recall"\nmemory_scaling = {scaling}'
    device = canonical_device(parse(text.encode(), name="d.toml"), "n", A100)
    assert device is not None
    assert (device.overcommit, device.largest_mib) == ("managed", 0)


def test_clients_of_mps_are_not_recalled() -> None:
    text = b'[defaults]\novercommit = "recall"\nmemory_scaling = 2.0'
    device = canonical_device(parse(text, name="d.toml"), "n", replace(A100, mode="mps"))
    assert device is not None
    assert (device.overcommit, device.largest_mib) == ("managed", 0)


def test_recall_is_for_vendors_whose_containers_can_be_moved() -> None:
    defaults = parse(b'[defaults]\novercommit = "recall"', name="d.toml")
    assert use_of(defaults, "n", replace(A100, vendor="metax")).overcommit == "managed"
    text = b'[[rules]]\nvendors = ["hygon"]\novercommit = "recall"'
    with pytest.raises(SettingsInvalid, match="devices of hygon cannot be moved") as refused:
        parse(text, name="d.toml")
    assert refused.value.field == "d.toml: rules[0].overcommit"
    parse(text.replace(b'["hygon"]', b'["hygon", "nvidia"]'), name="d.toml")


@pytest.mark.parametrize(
    ("text", "foreign_mib"),
    [
        ("", 2048),
        ("[defaults]\nreserved_mib = 1000", 1048),
        ("[defaults]\nreserved_mib = 4000", 0),
        ("[defaults]\nignore_foreign = true", 0),
        ("[defaults]\nignore_foreign = true\n[[rules]]\nignore_foreign = false", 2048),
        ('[[rules]]\ntypes = ["A100"]\nignore_foreign = true', 0),
    ],
)
def test_foreign_use_beyond_the_reserve_is_withheld_unless_it_is_ignored(
    text: str, foreign_mib: int
) -> None:
    config = parse(text.encode(), name="d.toml")
    device = canonical_device(config, "n", replace(A100, foreign_mib=2048))
    assert device is not None
    assert device.foreign_mib == foreign_mib
    assert device.capacity_mib == A100.memory_mib - config.defaults.reserved_mib


def test_bursts_are_passed_on_by_pod_whatever_the_configuration_ignores() -> None:
    bursts = (Burst(pod_uid="b", memory_mib=256), Burst(pod_uid="a", memory_mib=512))
    config = parse(b"[defaults]\nignore_foreign = true\nreserved_mib = 4000", name="d.toml")
    found = canonical_device(config, "n", replace(A100, foreign_mib=2048, bursts=bursts))
    assert found is not None
    assert (found.foreign_mib, found.bursts) == (0, bursts[::-1])
