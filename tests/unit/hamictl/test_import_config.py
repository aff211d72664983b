# SPDX-License-Identifier: Apache-2.0
"""HAMi's configuration is converted: keys are imported, noted or refused."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from hami_common.model.device import DeviceFacts
from hami_common.runtime.settings import load
from hami_nodeagent.settings import Settings as AgentSettings
from hami_registry.core import device_config
from hami_registry.settings import Settings as RegistrySettings
from hami_scheduler.settings import Settings as SchedulerSettings
from hami_webhook.settings import Settings as WebhookSettings
from hamictl.cli import main
from hamictl.errors import EXIT_INPUT
from hamictl.hamiconfig import ConfigInvalid, import_hami

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "hamiconfig"
BASE = ROOT / "deploy" / "kustomize" / "base" / "config"


CHIP = {"commonWord": "A", "resourceName": "a/b", "resourceMemoryName": "a/c"}


def golden(name: str) -> Any:
    return yaml.safe_load((GOLDEN / name).read_text())


def facts(index: int = 1, *, uuid: str = "GPU-x", vendor: str = "nvidia") -> DeviceFacts:
    return DeviceFacts(uuid=uuid, vendor=vendor, index=index, type="NVIDIA A30", memory_mib=24_576)


def test_names_defaults_and_sharing_are_taken_over() -> None:
    imported = import_hami(device_config=golden("device-config.yaml"))
    assert imported.settings["webhook"] == {
        "policy": {"hide_devices_from_others": True},
        "vendors": imported.settings["scheduler"]["vendors"],
    }
    vendors = imported.settings["scheduler"]["vendors"]
    assert vendors["nvidia"] == {
        "resource_count_name": "acme.com/gpu",
        "resource_memory_name": "acme.com/gpumem",
        "default_memory_mib": 1024,
        "default_core_pct": 25,
        "core_policy": "force",
        "runtime_class": "nvidia",
    }
    assert vendors["hygon"] == {"memory_factor": 2}
    assert [chip["word"] for chip in vendors["iluvatar"]["chips"]] == ["MR-V100"]
    assert [chip["word"] for chip in vendors["ascend"]["chips"]] == ["Ascend910B3"]
    assert vendors["ascend"]["runtime_class"] == "ascend"
    assert vendors.keys() == {"nvidia", "hygon", "iluvatar", "ascend"}
    agent = {
        key: value for key, value in imported.settings["nodeagent"].items() if key != "vendors"
    }
    assert agent == {
        "numa_topology": False,
        "library_log_level": "1",
        "drivers": {
            "nvidia": {"unified_memory_mib": 0, "mig_allowed_profiles": {"A100": ["1g.5gb"]}}
        },
    }
    assert imported.devices == {
        "rules": [{"vendors": ["nvidia"], "slots": 16, "memory_scaling": 1.5, "core_scaling": 1.0}]
    }
    assert {note.result for note in imported.notes} == {"carried", "no effect"}
    unused = [note for note in imported.notes if note.result == "no effect"]
    assert [note.key for note in unused if not note.is_default] == [
        "iluvatars[0].chipName",
        "vnpus.configs[0].chipName",
    ]


def test_single_nodes_become_rules_in_which_zero_says_nothing() -> None:
    imported = import_hami(
        device_config=golden("device-config.yaml"), node_config=golden("config.json")
    )
    text = yaml.safe_dump(imported.devices).encode()
    config = device_config.parse(text, name="devices.yaml")
    online = "m5-cloudinfra-online02"
    use = device_config.use_of(config, online, facts())
    assert (use.slots, use.memory_scaling, use.core_scaling, use.hidden) == (8, 1.8, 1.0, False)
    assert device_config.use_of(config, online, facts(3)).hidden
    assert device_config.use_of(config, "mig-node", facts(uuid="GPU-1")).hidden
    other = device_config.use_of(config, "other", facts(3))
    assert (other.slots, other.memory_scaling, other.hidden) == (16, 1.5, False)
    npu = device_config.use_of(config, "other", facts(vendor="ascend"))
    assert (npu.slots, npu.memory_scaling) == (10, 1.0)
    assert imported.settings["nodeagent"]["drivers"]["nvidia"]["mig_mode"] == {"mig-node/*": "on"}
    notes = {note.key: note.result for note in imported.notes if "nodeconfig" in note.key}
    assert notes["nodeconfig[0].migstrategy"] == "no effect"
    assert notes["nodeconfig[1].operatingmode"] == "carried"


def test_sample_node_of_the_chart_is_no_rule() -> None:
    node = {"name": "your-node-name", "devicesplitcount": 10}
    imported = import_hami(node_config={"nodeconfig": [node]})
    assert imported.devices == {}
    assert [(note.key, note.result) for note in imported.notes] == [("nodeconfig[0]", "no effect")]


def test_what_differs_per_node_in_one_daemonset_is_refused() -> None:
    node = {"name": "a", "enablenumatopology": True, "operatingmode": "mps"}
    with pytest.raises(ConfigInvalid) as caught:
        import_hami(node_config={"nodeconfig": [node]})
    assert "nodeconfig[0].enablenumatopology: Agents of one DaemonSet" in str(caught.value)
    assert "nodeconfig[0].operatingmode: The mode 'mps' serves only pods that name it" in str(
        caught.value
    )


def test_accepted_keys_are_left_out() -> None:
    values = {"scheduler": {"certManager": {"enabled": True}}, "mockDevicePlugin": {"enabled": 1}}
    keys = ["scheduler.certManager.enabled", "mockDevicePlugin.enabled"]
    with pytest.raises(ConfigInvalid) as caught:
        import_hami(values=values)
    assert all(f"values: {key}: " in str(caught.value) for key in keys)
    with pytest.raises(ConfigInvalid, match=r"mockDevicePlugin\.enabled"):
        import_hami(values=values, accepted=keys[:1])
    imported = import_hami(values=values, accepted=keys)
    assert [note.result for note in imported.notes] == ["refused", "refused"]
    with pytest.raises(ConfigInvalid, match=r"--accept schedulerName: the key is not refused"):
        import_hami(values={"schedulerName": "x"}, accepted=["schedulerName"])


@pytest.mark.parametrize(
    ("plugin", "injection"),
    [
        ({"passDeviceSpecsEnabled": True}, "devices"),
        ({"passDeviceSpecsEnabled": True, "deviceListStrategy": "envvar"}, "devices"),
        ({"passDeviceSpecsEnabled": True, "deviceListStrategy": "cdi-cri"}, "cdi"),
        ({"passDeviceSpecsEnabled": False, "deviceListStrategy": "envvar"}, "env"),
    ],
)
def test_injection_does_not_depend_on_the_order_of_keys(
    plugin: dict[str, Any], injection: str
) -> None:
    for given in (plugin, dict(reversed(plugin.items()))):
        imported = import_hami(values={"devicePlugin": given})
        assert imported.settings["nodeagent"]["injection"] == injection


def test_nodes_keep_their_agents_when_they_migrate() -> None:
    """``hamictl migrate node`` removes HAMi's label, so that no agent may need it."""
    selector = {"gpu": "on", "pool": "a"}
    imported = import_hami(values={"scheduler": {"nodeLabelSelector": selector}})
    pod = imported.workloads["agents"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "a"}


def test_mig_profiles_are_matched_by_slices_as_in_hami() -> None:
    entries = [
        {"models": ["A100-SXM4-80GB"], "profiles": ["1g.10gb", "7g.79gb"]},
        {"models": ["A100-SXM4-80GB", "A30"], "profiles": ["1g.6gb"]},
    ]
    imported = import_hami(device_config={"nvidia": {"migProfileAllowlist": entries}})
    assert imported.settings["nodeagent"]["drivers"]["nvidia"]["mig_allowed_profiles"] == {
        "A100-SXM4-80GB": ["1g.10gb", "7g.*"],
        "A30": ["1g.6gb"],
    }
    with pytest.raises(ConfigInvalid, match=r"profiles: 'big' is not a profile like 2g\.10gb"):
        import_hami(
            device_config={"nvidia": {"migProfileAllowlist": [{**entries[0], "profiles": ["big"]}]}}
        )


def test_webhook_gets_the_injection_mode_of_the_agents() -> None:
    imported = import_hami(values={"devicePlugin": {"deviceListStrategy": "envvar"}})
    assert imported.settings["nodeagent"]["injection"] == "env"
    assert imported.settings["webhook"]["policy"] == {"injection": "env"}


def test_chart_values_are_imported_or_noted() -> None:
    imported = import_hami(
        values={
            "resourceName": "acme.com/gpu",
            "schedulerName": "acme-scheduler",
            "scheduler": {
                "defaultSchedulerPolicy": {
                    "nodeSchedulerPolicy": "spread",
                    "gpuSchedulerPolicy": "numa,binpack",
                },
                "nodeLockExpire": "10m",
                "forceOverwriteDefaultScheduler": False,
                "overwriteEnv": "true",
                "replicas": 1,
                "extender": {"image": {"tag": "v2.10.0"}},
            },
            "devicePlugin": {
                "deviceSplitCount": 5,
                "deviceListStrategy": "cdi-cri",
                "passDeviceSpecsEnabled": False,
                "disablecorelimit": "true",
                "image": {"tag": "v2.10.0"},
            },
            "devices": {"nvidia": {"gpuCorePolicy": "disable"}, "kunlun": {"enabled": True}},
        }
    )
    assert imported.settings["scheduler"]["policy"] == {
        "node": "spread",
        "device": ["numa", "binpack"],
    }
    assert imported.settings["webhook"]["policy"] == {
        "scheduler_name": "acme-scheduler",
        "overwrite_default_scheduler": False,
        "hide_devices_from_others": True,
    }
    assert imported.settings["nodeagent"]["injection"] == "cdi"
    assert imported.settings["registry"]["vendors"]["nvidia"] == {
        "resource_count_name": "acme.com/gpu",
        "core_policy": "disable",
    }
    unused = {note.key for note in imported.notes if note.result == "no effect"}
    assert unused == {
        "values: scheduler.nodeLockExpire",
        "values: scheduler.extender.image.tag",
        "values: devicePlugin.disablecorelimit",
        "values: devicePlugin.image.tag",
    }


@pytest.mark.parametrize(
    ("documents", "text"),
    [
        (
            {"device_config": {"nvidia": {"deviceSpiltCount": 3}}},
            "nvidia: 'deviceSpiltCount' is not a key of HAMi 2.10; did you mean deviceSplitCount?",
        ),
        ({"device_config": {"nvidea": {}}}, "did you mean nvidia?"),
        (
            {"device_config": {"nvidia": {"deviceSplitCount": "ten"}}},
            "nvidia.deviceSplitCount: 'ten' is not a whole number",
        ),
        ({"device_config": {"nvidia": {"overwriteEnv": 1}}}, "1 is not true or false"),
        ({"device_config": {"nvidia": [1]}}, "nvidia: [1] is not a mapping"),
        (
            {"device_config": {"nvidia": {"defaultMemory": 2**31}}},
            "nvidia.defaultMemory: the number is outside -2147483647..2147483647",
        ),
        (
            {"device_config": {"nvidia": {"defaultMemory": "9" * 5000}}},
            "9… is not a whole number",
        ),
        (
            {"device_config": {"nvidia": {"deviceMemoryScaling": float("inf")}}},
            "nvidia.deviceMemoryScaling: inf is outside",
        ),
        (
            {"device_config": {"nvidia": {"resourceCountName": "x" * 4097}}},
            "nvidia.resourceCountName: 4097 characters, write at most 4096",
        ),
        (
            {"device_config": {"vnpus": {"configs": [{**CHIP, "memoryCapacity": 2**31}]}}},
            "vnpus.configs[0].memoryCapacity: 2147483648 is not a whole number from 0",
        ),
        (
            {"device_config": {"vnpus": {"configs": [{"commonWord": "A"}]}}},
            "vnpus.configs[0].resourceName",
        ),
        (
            {"device_config": {"vnpus": {"configs": [{"aiCores": 3}]}}},
            "vnpus.configs[0]: 'aiCores' is not a key of HAMi 2.10; did you mean aiCore?",
        ),
        (
            {"node_config": {"nodeconfig": [{"devicesplitcount": 3}]}},
            "nodeconfig[0].name is missing",
        ),
        ({"values": {"devicePlugin": {"deviceSplitCnt": 3}}}, "devicePlugin.deviceSplitCount?"),
        (
            {"values": {"devicePlugin": {"deviceListStrategy": "volume-mounts"}}},
            "'volume-mounts' is not a strategy; write one of envvar, cdi-cri, cdi-annotations",
        ),
        (
            {"values": {"scheduler": {"defaultSchedulerPolicy": {"nodeSchedulerPolicy": "any"}}}},
            "nodeSchedulerPolicy: 'any' is not a policy; write one of binpack, spread",
        ),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_key(documents: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        import_hami(**documents)
    assert text in str(caught.value)


def test_component_holds_settings_that_every_service_accepts(tmp_path: Path) -> None:
    out = tmp_path / "from-hami"
    configmap = tmp_path / "configmap.yaml"
    configmap.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "data": {"device-config.yaml": (GOLDEN / "device-config.yaml").read_text()},
            }
        )
    )
    values = tmp_path / "values.yaml"
    node_config = (GOLDEN / "config.json").read_text()
    values.write_text(
        yaml.safe_dump({"devicePlugin": {"nodeConfiguration": {"config": node_config}}})
    )
    arguments = ["--device-config", configmap, "--values", values, "--base", BASE, "--out", out]
    ran = CliRunner().invoke(main, ["import-config", *map(str, arguments)])
    assert ran.exit_code == 0, ran.output
    assert "iluvatars[0].chipName and 1 more" in ran.output
    services: dict[str, Any] = {
        "webhook": WebhookSettings,
        "scheduler": SchedulerSettings,
        "registry": RegistrySettings,
        "nodeagent": AgentSettings,
    }
    for service, settings_type in services.items():
        flags = ["--config", str(out / "config" / f"{service}.toml")]
        flags += ["--set", "node_name=n"] if service == "nodeagent" else []
        settings = load(settings_type, service=service, argv=flags, environ={}).settings
        assert settings.vendors.nvidia.resource_count_name == "acme.com/gpu"
        base = tomllib.loads((BASE / f"{service}.toml").read_text())
        assert settings.http_port == base["http_port"]
    config = device_config.parse((out / "config/devices.toml").read_bytes(), name="devices.toml")
    assert device_config.use_of(config, "m5-cloudinfra-online02", facts()).slots == 8
    made = yaml.safe_load((out / "kustomization.yaml").read_text())
    files = [file for generator in made["configMapGenerator"] for file in generator["files"]]
    assert all((out / file).is_file() for file in files)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "scheduler.toml").write_text("bus_replicas = 3\n")
    beside = [*map(str, arguments[:-1]), str(tmp_path / "beside"), "--overlay", str(overlay)]
    assert CliRunner().invoke(main, ["import-config", *beside]).exit_code == 0
    written = tomllib.loads((tmp_path / "beside/config/scheduler.toml").read_text())
    assert written["bus_replicas"] == 3
    assert written["vendors"]["nvidia"]["resource_count_name"] == "acme.com/gpu"
    again = CliRunner().invoke(main, ["import-config", *map(str, arguments)])
    assert again.exit_code == EXIT_INPUT
    assert "is not empty" in again.output


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: [", "expected"),
        ("- a", "not a mapping at its top"),
        ("kind: ConfigMap\ndata: {x: y}", "it is not of HAMi"),
        ("nvidia: {deviceSpiltCount: 3}", "did you mean deviceSplitCount?"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "device-config.yaml"
    path.write_text(content)
    ran = CliRunner().invoke(main, ["import-config", "--device-config", str(path)])
    assert ran.exit_code == EXIT_INPUT
    assert text in ran.output
