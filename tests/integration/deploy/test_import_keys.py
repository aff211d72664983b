# SPDX-License-Identifier: Apache-2.0
"""Each key of HAMi's chart and device configuration does what the table of keys says.

One key after the other is changed in HAMi's defaults, and ``kubectl kustomize`` renders a base with
agents and the component. A carried key changes the rendering, in the object that the table names. A
key without effect leaves the component as it is, and is named. A refused key stops the import.
"""

import copy
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from hami_common.vendors import ascend, iluvatar
from hami_sim.apiserver.cel import Program
from hami_sim.kubernetes.programs import KUBECTL
from hamictl import hamicomponent
from hamictl.commands import import_config
from hamictl.hamiconfig import ConfigInvalid, Imported, import_hami
from hamictl.hamikeys import DEVICE_CONFIG, VALUES, Carried, NoEffect, Refused, chart_defaults
from tests.cluster.needs import control_plane_or_skip

KUSTOMIZE = Path(__file__).parents[3] / "deploy/kustomize"
CONFIG = KUSTOMIZE / "base/config"
AGENTS = ("nvidia", "ascend", "biren")
Tree = dict[str, Any]

MIG = {
    "A30": ["1g.6gb", "2g.12gb", "4g.24gb"],
    "A100-SXM4-40GB": ["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"],
    "A100-SXM4-80GB": ["1g.10gb", "2g.20gb", "3g.40gb", "7g.79gb"],
    "H100-PCIE-80GB": ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"],
    "H100-PCIE-94GB": ["1g.12gb", "2g.24gb", "3g.47gb", "7g.94gb"],
    "H20": ["1g.12gb", "2g.24gb", "3g.48gb", "7g.96gb"],
    "H200 NVL": ["1g.18gb", "2g.35gb", "3g.71gb", "7g.141gb"],
    "B200": ["1g.23gb", "2g.45gb", "3g.90gb", "7g.180gb"],
    "RTX PRO 6000 Blackwell Server Edition": ["1g.24gb", "2g.48gb", "4g.96gb"],
}
CHANGED: dict[str, Any] = {
    "global.labels": {"team": "a"},
    "global.annotations": {"team": "a"},
    "scheduler.overwriteEnv": "true",
    "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy": "spread",
    "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy": "topology-aware",
    "scheduler.kubeScheduler.resources": {"limits": {"cpu": "1"}},
    "scheduler.podAnnotations": {"team": "a"},
    "scheduler.replicas": 3,
    "scheduler.tolerations": [{"operator": "Exists"}],
    "scheduler.admissionWebhook.whitelistNamespaces": ["istio-system"],
    "scheduler.admissionWebhook.namespaceSelector.matchLabels": {"team": "a"},
    "scheduler.admissionWebhook.namespaceSelector.matchExpressions": [
        {"key": "team", "operator": "Exists"}
    ],
    "scheduler.admissionWebhook.objectSelector.matchExpressions": [
        {"key": "team", "operator": "Exists"}
    ],
    "metaxsGPUTopologyAware": "true",
    "scheduler.extender.extraArgs": ["--kube-qps=50"],
    "devicePlugin.monitor.extraArgs": ["--metrics-bind-address=:1"],
    "devicePlugin.extraArgs": ["--mig-strategy=mixed"],
    "devicePlugin.monitor.extraEnvs": [{"name": "A", "value": "b"}],
    "devicePlugin.extraEnvs": [{"name": "A", "value": "b"}],
    "devicePlugin.nodeConfiguration.config": json.dumps(
        {"nodeconfig": [{"name": "gpu-1", "devicesplitcount": 3}]}
    ),
    "devicePlugin.deviceListStrategy": "cdi-cri",
    "devicePlugin.nvidiaDriverRoot": "/run/nvidia/driver",
    "devicePlugin.pluginPath": "/var/snap/kubelet/device-plugins",
    "devicePlugin.podAnnotations": {"team": "a"},
    "devicePlugin.updateStrategy.type": "OnDelete",
    "device-config.content": "nvidia: {defaultMemory: 7}",
    "nvidia.gpuCorePolicy": "force",
    "devices.nvidia.gpuCorePolicy": "force",
    "nvidia.deviceMemoryScaling": 1.5,
}
"""A value of each key that HAMi accepts, where adding to the default makes none."""
TOGETHER: dict[str, Tree] = {
    "devicePlugin.gpuOperatorToolkitReady.hostPath": {
        "devicePlugin.gpuOperatorToolkitReady.enabled": True
    },
    "devicePlugin.createRuntimeClass": {"devicePlugin.runtimeClassName": "nv"},
    "devices.ascend.customresources": {"devices.ascend.enabled": True},
    "devices.iluvatar.customresources": {"devices.iluvatar.enabled": True},
}
"""Keys that have an effect only beside others, in HAMi and here."""


SETTINGS = {
    f"config/{name}.toml": f"ConfigMap/hami-{'registry' if name == 'devices' else name}-config"
    for name in ("webhook", "scheduler", "registry", "nodeagent", "devices")
}
"""ConfigMap that each file of settings is in."""


def device_defaults() -> Tree:
    """Return the device configuration that HAMi's chart renders from its defaults."""

    def section(name: str, **more: object) -> Tree:
        vendor = {"kunlun": "kunlunxin"}.get(name, name)
        settings = getattr(Imported(settings={"webhook": {}}, devices={}).vendors, vendor)
        found: Tree = {}
        for key, rule in DEVICE_CONFIG.items():
            if key.startswith(f"{name}.") and isinstance(rule, Carried) and "VGCU" not in key:
                first, _, field = rule.places[0].rpartition(".")
                if first == f"vendors.{vendor}" and "disable" not in key:
                    found[key.partition(".")[2]] = getattr(settings, field)
        return found | more

    def chip(one: Tree) -> Tree:
        factor = {} if one["word"] == "Ascend910C" else {"memoryFactor": 1}
        pod = {"superPod": True} if one["super_pod"] else {}
        cpu = {"aiCPU": one["ai_cpu"]} if one["ai_cpu"] else {}
        return {
            "chipName": one["word"].removeprefix("Ascend"),
            "commonWord": one["word"],
            "resourceName": one["resource_name"],
            "resourceMemoryName": one["resource_memory_name"],
            "resourceCoreName": one["resource_core_name"],
            "memoryAllocatable": one["memory_allocatable_mib"],
            "memoryCapacity": one["memory_capacity_mib"],
            **factor,
            "aiCore": one["ai_core"],
            **cpu,
            "runtimeClassName": "",
            "overwriteEnv": False,
            **pod,
            "templates": [
                {
                    "name": template["name"],
                    "memory": template["memory_mib"],
                    "aiCore": template["ai_core"],
                    **({"aiCPU": template["ai_cpu"]} if template["ai_cpu"] else {}),
                }
                for template in one["templates"]
            ],
        }

    return {
        "nvidia": section(
            "nvidia",
            overwriteEnv=False,
            preConfiguredDeviceMemory=0,
            deviceSplitCount=10,
            deviceMemoryScaling=1,
            deviceCoreScaling=1,
            enableNumaTopology=False,
            libCudaLogLevel=1,
            migProfileAllowlist=[
                {"models": [model], "profiles": profiles} for model, profiles in MIG.items()
            ],
        ),
        **{
            name: section(name)
            for name in ("cambricon", "hygon", "enflame", "mthreads", "kunlun", "awsneuron")
        },
        "metax": section("metax", sgpuTopologyAware=False),
        **{name: section(name) for name in ("amd", "vastai", "biren")},
        "iluvatars": [
            {
                "chipName": one.word,
                "commonWord": one.word,
                "resourceCountName": one.resource_count_name,
                "resourceMemoryName": one.resource_memory_name,
                "resourceCoreName": one.resource_core_name,
            }
            for one in iluvatar.IluvatarSettings().chips
        ],
        "vnpus": {
            "hamiVnpuCore": False,
            "configs": [chip(one) for one in msgspec.to_builtins(ascend.CHIPS)],
        },
    }


def leaves(tree: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values; a list of values is one."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, (*path, name))
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, number))
    else:
        yield path


def words(path: tuple[Any, ...]) -> str:
    """Return a path as the table and the notes write it, with indexes."""
    return re.sub(r"\.(\d+)", r"[\1]", ".".join(str(part) for part in path))


def put(tree: Tree, path: tuple[Any, ...], value: object) -> None:
    here: Any = tree
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value


def other(key: str, value: object) -> object:
    """Return another value of the same type."""
    if key in CHANGED:
        return CHANGED[key]
    if isinstance(value, bool) or (value is None and key.endswith("Enabled")):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        added = "2g.99gb" if key.endswith("profiles") else "x/changed"
        return [added] if key.endswith("profiles") else [*value, added]
    return {"x": "y"} if isinstance(value, dict) else f"{value or 'x'}-changed"


DEFAULT_VALUES, DEFAULT_DEVICES = chart_defaults(), device_defaults()
VALUE_KEYS = {
    ".".join(path): path
    for path in (tuple(key.split(".")) for key, rule in VALUES.items() if rule.default is not ...)
}
DEVICE_KEYS = {words(path): path for path in leaves(DEFAULT_DEVICES)}


def imported(values: Tree | None, devices: Tree | None) -> Imported:
    """Import as the command does, with documents in the values."""
    texts: Tree = {}
    if values is not None:
        for name, text in import_config.inner_documents(values).items():
            if text:
                texts[name] = yaml.safe_load(text)
    if devices is not None:
        texts["device_config"] = devices
    return import_hami(values=values, **texts)


def component(found: Imported, out: Path) -> dict[str, str]:
    paths = import_config.write_component(found, base=CONFIG, out=out)
    return {str(path.relative_to(out)): path.read_text() for path in paths}


def rendered(out: Path) -> dict[str, Tree]:
    """Render a base with agents and the component; objects by kind and name without its hash."""
    overlay = out.parent / f"{out.name}-overlay"
    overlay.mkdir()
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUSTOMIZE / "base", overlay)],
        "components": [
            *(os.path.relpath(KUSTOMIZE / "components" / name, overlay) for name in AGENTS),
            os.path.relpath(out, overlay),
        ],
        "generatorOptions": {"disableNameSuffixHash": True},
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(document))
    command = [control_plane_or_skip().path(KUBECTL), "kustomize", str(overlay)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    # The rendering is JSON-like YAML of known size; the C loader keeps the suite fast.
    objects = yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)
    return {
        f"{one['kind']}/{re.sub('-[0-9a-z]{10}$', '', one['metadata']['name'])}": one
        for one in objects
    }


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, dict[str, Tree]]]:
    """Component and rendering of HAMi's defaults, by document."""
    directory = tmp_path_factory.mktemp("defaults")
    found: dict[str, tuple[Any, dict[str, Tree]]] = {}
    for name, given in (("values", (DEFAULT_VALUES, None)), ("devices", (None, DEFAULT_DEVICES))):
        files = component(imported(*given), directory / name)
        found[name] = files, rendered(directory / name)
    return found


def objects_of(place: str) -> str:
    """Return a regular expression of the objects that a place of the table changes."""
    first, _, rest = place.partition(".")
    if first == "workload":
        kind, pattern = hamicomponent.WORKLOADS[rest.partition(".")[0]]
        return f"{kind}/{pattern}"
    if first == "vendors":
        return "ConfigMap/hami-(webhook|scheduler|registry|nodeagent)-config"
    if first == "devices":
        return "ConfigMap/hami-registry-config"
    if first in ("webhook", "scheduler", "registry", "nodeagent"):
        return f"ConfigMap/hami-{first}-config"
    return ".*"


def check(
    key: str, pattern: str, given: tuple[Tree | None, Tree | None], before: Any, out: Path
) -> None:
    """Import ``given``, in which ``key`` was changed, and compare with the defaults."""
    rule = {**VALUES, **DEVICE_CONFIG}[pattern]
    files, objects = before
    if isinstance(rule, Refused):
        with pytest.raises(ConfigInvalid) as caught:
            imported(*given)
        assert key in str(caught.value)
        assert rule.why in str(caught.value)
        return
    found = imported(*given)
    (note,) = {note for note in found.notes if note.key.removeprefix("values: ") == key}
    made = component(found, out)
    if isinstance(rule, NoEffect):
        assert (note.result, note.text, note.is_default) == ("no effect", rule.why, False)
        assert made == files
        return
    assert note.result == "carried"
    changed = {name for name in {*made, *files} if made.get(name) != files.get(name)}
    if all(name.endswith(".toml") for name in changed):
        differing = {SETTINGS[name] for name in changed}  # see test_settings_are_rendered
    else:
        after = rendered(out)
        differing = {name for name in {*after, *objects} if after.get(name) != objects.get(name)}
    for place in rule.places:
        assert any(re.fullmatch(objects_of(place), name) for name in differing), (place, differing)


@pytest.mark.parametrize("key", VALUE_KEYS)
def test_key_of_the_chart(key: str, before: Any, tmp_path: Path) -> None:
    values = copy.deepcopy(DEFAULT_VALUES)
    for name, value in TOGETHER.get(key, {}).items():
        put(values, VALUE_KEYS[name], value)
    if key in TOGETHER:
        files = component(imported(values, None), tmp_path / "together")
        reference = files, rendered(tmp_path / "together")
    else:
        reference = before["values"]
    put(values, VALUE_KEYS[key], other(key, VALUES[key].default))
    check(key, key, (values, None), reference, tmp_path / "component")


@pytest.mark.parametrize("key", DEVICE_KEYS)
def test_key_of_the_device_configuration(key: str, before: Any, tmp_path: Path) -> None:
    devices = copy.deepcopy(DEFAULT_DEVICES)
    path = DEVICE_KEYS[key]
    here: Any = devices
    for part in path:
        here = here[part]
    if key.endswith("runtimeClassName") and key.startswith("vnpus"):
        put(devices, path, "ascend")
        with pytest.raises(ConfigInvalid, match="one runtime class for all chips"):
            imported(None, devices)
        for one in devices["vnpus"]["configs"]:
            one["runtimeClassName"] = "ascend"
    else:
        put(devices, path, other(key, here))
    pattern = re.sub(r"\[\d+\]", "[]", key)
    check(key, pattern, (None, devices), before["devices"], tmp_path / "component")


def test_settings_are_rendered(before: Any) -> None:
    """A component that differs in settings only renders to ConfigMaps with exactly these files."""
    for files, objects in before.values():
        for path, name in SETTINGS.items():
            assert objects[name]["data"][Path(path).name] == files[path]


def test_pods_with_renamed_resources_reach_webhook_and_scheduler(tmp_path: Path) -> None:
    """A file with two names is enough: admission, policies and kube-scheduler follow."""
    values = {"resourceName": "my.com/gpu", "schedulerName": "my-sched"}
    component(import_hami(values=values), tmp_path / "component")
    objects = rendered(tmp_path / "component")
    webhook = objects["MutatingWebhookConfiguration/hami-webhook"]["webhooks"][0]
    concerns = Program(webhook["matchConditions"][0]["expression"], frozenset({"object"}))

    def is_ours(resource: str) -> bool:
        container = {"name": "a", "resources": {"limits": {resource: "1"}}}
        return concerns.decide({"object": {"metadata": {}, "spec": {"containers": [container]}}})

    assert is_ours("my.com/gpu")
    assert not is_ours("nvidia.com/gpu")
    configuration = yaml.safe_load(
        objects["ConfigMap/hami-kube-scheduler-config"]["data"]["kube-scheduler.yaml"]
    )
    assert configuration["profiles"] == [{"schedulerName": "my-sched"}]
    managed = {one["name"] for one in configuration["extenders"][0]["managedResources"]}
    assert "my.com/gpu" in managed
    assert "nvidia.com/gpu" not in managed
    limiter = objects["ValidatingAdmissionPolicy/limiter.hami.io"]["spec"]["matchConditions"]
    assert "'my-sched'" in str(limiter)
    settings = objects["ConfigMap/hami-webhook-config"]["data"]["webhook.toml"]
    assert tomllib.loads(settings)["policy"]["scheduler_name"] == "my-sched"


def test_selectors_of_the_values_are_those_of_the_webhook(tmp_path: Path) -> None:
    admission = {
        "whitelistNamespaces": ["istio-system"],
        "namespaceSelector": {"matchLabels": {"team": "a"}},
        "objectSelector": {"matchLabels": {"gpu": "yes"}},
    }
    values = {"scheduler": {"admissionWebhook": admission}}
    component(import_hami(values=values), tmp_path / "component")
    objects = rendered(tmp_path / "component")
    new, changed = objects["MutatingWebhookConfiguration/hami-webhook"]["webhooks"]
    exempt = {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": ["istio-system"],
    }
    assert exempt in new["namespaceSelector"]["matchExpressions"]
    assert new["namespaceSelector"]["matchLabels"] == {"team": "a"}
    assert new["objectSelector"] == {"matchLabels": {"gpu": "yes"}}
    assert exempt not in changed["namespaceSelector"]["matchExpressions"]
    for name, is_bound in (("limiter", True), ("pod-bounds", True), ("device-environment", False)):
        spec = objects[f"ValidatingAdmissionPolicyBinding/{name}.hami.io"]["spec"]
        selector = spec["matchResources"]["namespaceSelector"]
        assert (exempt in selector["matchExpressions"]) is is_bound


def test_table_has_every_key_of_hami() -> None:
    assert len(VALUE_KEYS) == 196
    assert len(DEVICE_KEYS) == 237


def test_defaults_of_hami_are_imported() -> None:
    """Nothing is refused, and the sample node is no rule."""
    for given in ((DEFAULT_VALUES, None), (None, DEFAULT_DEVICES)):
        found = imported(*given)
        assert not [note for note in found.notes if note.result == "refused"]
        assert "your-node-name" not in str(found.devices)
