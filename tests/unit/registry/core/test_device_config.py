# SPDX-License-Identifier: Apache-2.0
"""Device configuration: rules in order, zero values count, bad values are named."""

import pytest
from msgspec.structs import replace

from hami_common.errors import SettingsInvalid
from hami_common.model.device import DeviceFacts
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
        (b"[[rules]]\nreserved_mib = -1", "rules[0].reserved_mib"),
        (b"[defaults]\nslot = 4", "slot"),
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


def test_operator_cordon_reaches_the_device() -> None:
    device = canonical_device(DeviceConfig(), "n", A100, cordoned_uuids=["GPU-a"])
    assert device is not None
    assert device.cordoned
