# SPDX-License-Identifier: Apache-2.0
"""Converts the configuration of HAMi 2.10 to this project's settings, with notes for the operator.

Three documents are known: ``device-config.yaml`` (names, units and defaults of each vendor, and how
devices are shared), the node configuration ``config.json`` (the same for single nodes), and the
chart's ``values.yaml``. All are optional. Each key is in a table here: mapped to a setting, or with
the reason that it has none. An unknown key is refused and the nearest known one suggested, because
HAMi silently ignores such keys, which hides mistakes.

The result is a tree of settings for each service, as in their TOML files, the device configuration,
and notes for the operator. Memory in MiB. Reads and writes no files.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from hami_common.bounds import INT32_MAX
from hami_common.units import real, whole
from hami_common.vendors import ascend, iluvatar
from hami_common.vendors.catalog import Catalog, VendorSettings

NUMBER_MOST = 1e6
_SHOWN = 60
VALUE_LENGTH_MOST = 4096
"""Characters of a name, path or list of words."""

Tree = dict[str, Any]
Weight = Literal["info", "warning"]
Service = Literal["webhook", "scheduler", "registry", "nodeagent"]
SERVICES: tuple[Service, ...] = ("webhook", "scheduler", "registry", "nodeagent")


class ConfigInvalid(Exception):
    """A document cannot be imported; the text names the field and the fix."""


class Note(Struct, frozen=True, kw_only=True):
    """A note for the operator about one key."""

    key: str
    text: str
    weight: Weight = "info"


class Imported(Struct, frozen=True, kw_only=True):
    """The converted configuration."""

    settings: dict[str, Tree]
    """By service: settings that differ from the defaults, as in its TOML file."""
    devices: Tree
    """The registry's device configuration."""
    notes: tuple[Note, ...] = ()


class _Kind(NamedTuple):
    """Type of a value."""

    name: str
    types: tuple[type, ...]


TEXT = _Kind("a string", (str,))
COUNT = _Kind("a whole number", (int,))
NUMBER = _Kind("a number", (int, float))
TRUTH = _Kind("true or false", (bool,))


class Mapped(NamedTuple):
    """A key with a setting: ``vendors.…`` (all services), ``<service>.…`` or ``devices.…``."""

    place: str
    kind: _Kind = TEXT
    convert: Callable[[Any], Any] | None = None


class Unmapped(NamedTuple):
    """A key without a setting, and the reason."""

    why: str
    weight: Weight = "info"
    harmless: tuple[object, ...] = ("", None, False, 0, "false")
    """Values that need no note."""


Rule = Mapped | Unmapped
Table = Mapping[str, Rule]

_REPLACED = "set in deploy/kustomize, see docs/install.md"


def _words(value: str) -> list[str]:
    return [word.strip() for word in str(value).split(",") if word.strip()]


def _names(vendor: str, **places: str) -> dict[str, Rule]:
    return {key: Mapped(f"vendors.{vendor}.{place}") for key, place in places.items()}


_SHARING: dict[str, Rule] = {
    "deviceSplitCount": Mapped("devices.slots", COUNT),
    "deviceMemoryScaling": Mapped("devices.memory_scaling", NUMBER, float),
    "deviceCoreScaling": Mapped("devices.core_scaling", NUMBER, float),
}

_NVIDIA: dict[str, Rule] = {
    **_names(
        "nvidia",
        resourceCountName="resource_count_name",
        resourceMemoryName="resource_memory_name",
        resourceMemoryPercentageName="resource_memory_percentage_name",
        resourceCoreName="resource_core_name",
        resourcePriorityName="resource_priority_name",
        runtimeClassName="runtime_class",
        gpuCorePolicy="core_policy",
    ),
    **_SHARING,
    "overwriteEnv": Mapped("webhook.policy.hide_devices_from_others", TRUTH),
    "defaultMemory": Mapped("vendors.nvidia.default_memory_mib", COUNT),
    "defaultCores": Mapped("vendors.nvidia.default_core_pct", COUNT),
    "defaultGPUNum": Mapped("vendors.nvidia.default_count", COUNT),
    "memoryFactor": Mapped("vendors.nvidia.memory_factor", COUNT),
    "preConfiguredDeviceMemory": Mapped("nodeagent.drivers.nvidia.unified_memory_mib", COUNT),
    "enableNumaTopology": Mapped("nodeagent.numa_topology", TRUTH),
    "libCudaLogLevel": Mapped("nodeagent.library_log_level", COUNT, str),
    "disableCoreLimit": Mapped(
        "vendors.nvidia.core_policy", TRUTH, lambda is_off: "disable" if is_off else None
    ),
    "migProfileAllowlist": Unmapped(
        "profiles are read from the driver and selected by size; there is no allow list",
        "warning",
        harmless=(None, []),
    ),
}

_DEVICE_CONFIG: dict[str, Table] = {
    "nvidia": _NVIDIA,
    "cambricon": _names(
        "cambricon",
        resourceCountName="resource_count_name",
        resourceMemoryName="resource_memory_name",
        resourceCoreName="resource_core_name",
    ),
    "hygon": {
        **_names(
            "hygon",
            resourceCountName="resource_count_name",
            resourceMemoryName="resource_memory_name",
            resourceCoreName="resource_core_name",
        ),
        "memoryFactor": Mapped("vendors.hygon.memory_factor", COUNT),
    },
    "metax": {
        **_names(
            "metax",
            resourceCountName="resource_count_name",
            resourceVCountName="resource_v_count_name",
            resourceVMemoryName="resource_v_memory_name",
            resourceVCoreName="resource_v_core_name",
        ),
        "sgpuTopologyAware": Unmapped(
            "pods request it with the annotation hami.io/gpu-scheduler-policy: topology-aware",
            "warning",
        ),
    },
    "enflame": _names(
        "enflame",
        resourceNameGCU="resource_gcu_name",
        resourceNameDRSGCU="resource_drs_name",
        resourceNameGCUMemory="resource_memory_name",
        resourceNameGCUCore="resource_core_name",
        resourceNameVGCU="resource_vgcu_name",
        resourceNameVGCUPercentage="resource_vgcu_percentage_name",
    ),
    "mthreads": _names(
        "mthreads",
        resourceCountName="resource_count_name",
        resourceMemoryName="resource_memory_name",
        resourceCoreName="resource_core_name",
    ),
    "kunlun": _names(
        "kunlunxin",
        resourceCountName="resource_count_name",
        resourceVCountName="resource_v_count_name",
        resourceVMemoryName="resource_v_memory_name",
    ),
    "awsneuron": _names(
        "awsneuron",
        resourceCountName="resource_count_name",
        resourceCoreName="resource_core_name",
    ),
    "amd": _names(
        "amd",
        resourceCountName="resource_count_name",
        resourceMemoryName="resource_memory_name",
        resourceCoreName="resource_core_name",
    ),
    "vastai": _names("vastai", resourceCountName="resource_count_name"),
    "biren": _names("biren", resourceCountName="resource_count_name"),
}
_ILUVATAR_KEYS = (
    "chipName",
    "commonWord",
    "resourceCountName",
    "resourceMemoryName",
    "resourceCoreName",
)
_VNPU_KEYS = (
    "chipName",
    "commonWord",
    "resourceName",
    "resourceMemoryName",
    "resourceCoreName",
    "memoryAllocatable",
    "memoryCapacity",
    "memoryFactor",
    "aiCore",
    "aiCPU",
    "runtimeClassName",
    "overwriteEnv",
    "superPod",
    "templates",
)
_TEMPLATE_KEYS = ("name", "memory", "aiCore", "aiCPU")

_NODE_KEYS = (
    "name",
    "operatingmode",
    "devicememoryscaling",
    "devicecorescaling",
    "devicesplitcount",
    "preconfigureddevicememory",
    "enablenumatopology",
    "libcudaloglevel",
    "migstrategy",
    "filterdevices",
    "enablegetpreferredallocation",
)

_VALUES: dict[str, Rule] = {
    "resourceName": _NVIDIA["resourceCountName"],
    "resourceMem": _NVIDIA["resourceMemoryName"],
    "resourceMemPercentage": _NVIDIA["resourceMemoryPercentageName"],
    "resourceCores": _NVIDIA["resourceCoreName"],
    "resourcePriority": _NVIDIA["resourcePriorityName"],
    **_names(
        "cambricon",
        mluResourceName="resource_count_name",
        mluResourceMem="resource_memory_name",
        mluResourceCores="resource_core_name",
    ),
    **_names(
        "hygon",
        dcuResourceName="resource_count_name",
        dcuResourceMem="resource_memory_name",
        dcuResourceCores="resource_core_name",
    ),
    **_names(
        "metax",
        metaxResourceName="resource_v_count_name",
        metaxResourceCore="resource_v_core_name",
        metaxResourceMem="resource_v_memory_name",
    ),
    "metaxsGPUTopologyAware": _DEVICE_CONFIG["metax"]["sgpuTopologyAware"],
    **_names(
        "enflame",
        enflameResourceNameDRSGCU="resource_drs_name",
        enflameResourceNameGCUMemory="resource_memory_name",
        enflameResourceNameGCUCore="resource_core_name",
    ),
    **_names(
        "kunlunxin",
        kunlunResourceName="resource_count_name",
        kunlunResourceVCountName="resource_v_count_name",
        kunlunResourceVMemoryName="resource_v_memory_name",
    ),
    "vastaiResourceName": Mapped("vendors.vastai.resource_count_name"),
    "birenResourceName": Mapped("vendors.biren.resource_count_name"),
    "schedulerName": Mapped("webhook.policy.scheduler_name"),
    "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy": Mapped("scheduler.policy.node"),
    "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy": Mapped(
        "scheduler.policy.device", TEXT, _words
    ),
    "scheduler.forceOverwriteDefaultScheduler": Mapped(
        "webhook.policy.overwrite_default_scheduler", TRUTH
    ),
    "scheduler.overwriteEnv": Mapped(
        "webhook.policy.hide_devices_from_others",
        _Kind("true or false", (bool, str)),
        lambda value: str(value).lower() == "true",
    ),
    "scheduler.nodeLockExpire": Unmapped(
        "had no effect in HAMi; there is no node lock", harmless=("5m", "", None)
    ),
    "scheduler.replicas": Unmapped(
        "all replicas are active; set it in an overlay", harmless=(1, None)
    ),
    "scheduler.admissionWebhook.failurePolicy": Unmapped(
        "always Fail, for pods that request a device only, so that none runs without limits",
        harmless=("Fail", None),
    ),
    "scheduler.nodeLabelSelector": Unmapped(
        "nodes are used as soon as an agent reports; restrict the agents' DaemonSet instead",
        "warning",
        harmless=(None, {}),
    ),
    "scheduler.metricsBindAddress": Unmapped(_REPLACED, harmless=(":9395", None)),
    "devicePlugin.deviceSplitCount": _NVIDIA["deviceSplitCount"],
    "devicePlugin.deviceMemoryScaling": _NVIDIA["deviceMemoryScaling"],
    "devicePlugin.deviceCoreScaling": _NVIDIA["deviceCoreScaling"],
    "devicePlugin.enableNumaTopology": _NVIDIA["enableNumaTopology"],
    "devicePlugin.preConfiguredDeviceMemory": _NVIDIA["preConfiguredDeviceMemory"],
    "devicePlugin.runtimeClassName": _NVIDIA["runtimeClassName"],
    "devicePlugin.pluginPath": Mapped("nodeagent.device_plugin_dir"),
    "devicePlugin.libPath": Mapped(
        "nodeagent.library_dir",
        TEXT,
        lambda path: None if path == "/usr/local/vgpu" else path,
    ),
    "devicePlugin.disablecorelimit": Unmapped(
        "had no effect in HAMi; gpuCorePolicy: disable disables the limit",
        harmless=("false", False, None),
    ),
    "devicePlugin.migStrategy": Unmapped(
        "MIG instances are created on demand, and nvidia.com/mig-* resources are supported",
        harmless=("none", "", None),
    ),
    "devicePlugin.deviceListStrategy": Mapped(
        "nodeagent.injection",
        TEXT,
        lambda word: {"envvar": "env", "cdi-cri": "cdi", "cdi-annotations": "cdi"}.get(word, word),
    ),
    "devicePlugin.passDeviceSpecsEnabled": Mapped(
        "nodeagent.injection", TRUTH, lambda is_on: "devices" if is_on else None
    ),
    "devicePlugin.nvidiaNodeSelector": Unmapped(
        "set it in an overlay of components/nvidia", "warning", harmless=({"gpu": "on"}, None)
    ),
    "devices.nvidia.gpuCorePolicy": _NVIDIA["gpuCorePolicy"],
    "devices.nvidia.libCudaLogLevel": _NVIDIA["libCudaLogLevel"],
    "devices.ascend.hamiVnpuCore": Unmapped(
        "pods select soft sharing with the annotation huawei.com/vnpu-mode: hami-core", "warning"
    ),
}
_VALUES_ELSEWHERE = (
    "global",
    "nameOverride",
    "fullnameOverride",
    "namespaceOverride",
    "podSecurityPolicy",
    "legacyMetrics",
    "prometheus",
    "mockDevicePlugin",
    "scheduler.nodeName",
    "scheduler.livenessProbe",
    "scheduler.leaderElect",
    "scheduler.kubeScheduler",
    "scheduler.extender",
    "scheduler.podAnnotations",
    "scheduler.tolerations",
    "scheduler.nodeSelector",
    "scheduler.admissionWebhook",
    "scheduler.certManager",
    "scheduler.patch",
    "scheduler.service",
    *(
        f"devicePlugin.{name}"
        for name in (
            "enabled",
            "gpuOperatorToolkitReady",
            "image",
            "monitor",
            "nodeConfiguration",
            "createRuntimeClass",
            "nvidiaHookPath",
            "nvidiaDriverRoot",
            "gdrcopyEnabled",
            "gdsEnabled",
            "mofedEnabled",
            "extraArgs",
            "extraEnvs",
            "service",
            "podAnnotations",
            "hostPID",
            "hostNetwork",
            "securityContext",
            "tolerations",
            "updateStrategy",
            "resources",
        )
    ),
    *(
        f"devices.{vendor}"
        for vendor in (
            "amd",
            "awsneuron",
            "kunlun",
            "enflame",
            "mthreads",
            "vastai",
            "biren",
            "ascend",
            "iluvatar",
        )
    ),
)
"""Subtrees of the values about images, names, ports and pods of the chart's own workloads."""


def import_hami(
    *,
    device_config: Tree | None = None,
    node_config: Tree | None = None,
    values: Tree | None = None,
) -> Imported:
    """Convert the documents; ``ConfigInvalid`` names an invalid key.

    ``device_config`` overrides ``values``, as in HAMi's chart, and ``node_config`` overrides both.
    """
    collected = _Import()
    if values is not None:
        collected.read_values(values)
    if device_config is not None:
        collected.read_device_config(device_config)
    if node_config is not None:
        collected.read_node_config(node_config)
    return collected.result()


class _Import:
    """Collects the result."""

    def __init__(self) -> None:
        self._vendors: Tree = {}
        self._settings: dict[str, Tree] = {service: {} for service in SERVICES}
        self._sharing: Tree = {}
        self._rules: list[Tree] = []
        self._notes: list[Note] = []

    # --- documents -------------------------------------------------------------------------------

    def read_values(self, values: Tree) -> None:
        for key, value in _leaves(values, known=_VALUES):
            rule = _VALUES.get(key)
            if rule is not None:
                self._apply(f"values: {key}", rule, value)
            elif not any(key == top or key.startswith(f"{top}.") for top in _VALUES_ELSEWHERE):
                self._unknown("values", key, (*_VALUES, *_VALUES_ELSEWHERE, "device-config"))
        self._notes.append(
            Note(
                key="values",
                text=f"images, names, ports and pod settings of the chart: {_REPLACED}",
            )
        )

    def read_device_config(self, config: Tree) -> None:
        sections = (*_DEVICE_CONFIG, "iluvatars", "vnpus")
        for section, content in config.items():
            if section == "iluvatars":
                self._read_iluvatars(content)
            elif section == "vnpus":
                self._read_vnpus(content)
            elif section in _DEVICE_CONFIG:
                table = _DEVICE_CONFIG[section]
                for key, value in _mapping(content, section).items():
                    if key not in table:
                        self._unknown(section, key, tuple(table))
                    self._apply(f"{section}.{key}", table[key], value)
            else:
                self._unknown("device-config", section, sections)

    def read_node_config(self, config: Tree) -> None:
        config = self._only("node-config", config, ("nodeconfig",))
        for number, content in enumerate(_list(config.get("nodeconfig"), "nodeconfig")):
            where = f"nodeconfig[{number}]"
            node = self._only(where, content, _NODE_KEYS)
            name = node.get("name")
            if not isinstance(name, str) or not name:
                raise ConfigInvalid(f"{where}.name is missing; give the name of the node")
            self._read_node(where, name, node)

    # --- parts of them ---------------------------------------------------------------------------

    def _read_iluvatars(self, content: object) -> None:
        chips = []
        for number, one in enumerate(_list(content, "iluvatars")):
            where = f"iluvatars[{number}]"
            chip = self._only(where, one, _ILUVATAR_KEYS)
            chips.append(
                {
                    "word": _text(chip, "commonWord", where),
                    "resource_count_name": _text(chip, "resourceCountName", where),
                    "resource_memory_name": _text(chip, "resourceMemoryName", where),
                    "resource_core_name": _text(chip, "resourceCoreName", where),
                }
            )
        if chips and chips != msgspec.to_builtins(iluvatar.IluvatarSettings().chips):
            self._vendors.setdefault("iluvatar", {})["chips"] = chips

    def _read_vnpus(self, content: object) -> None:
        content = self._only("vnpus", content, ("hamiVnpuCore", "configs"))
        if content.get("hamiVnpuCore"):
            self._apply("vnpus.hamiVnpuCore", _VALUES["devices.ascend.hamiVnpuCore"], value=True)
        chips, runtime_classes = [], set()
        for number, one in enumerate(_list(content.get("configs"), "vnpus.configs")):
            where = f"vnpus.configs[{number}]"
            chip = self._only(where, one, _VNPU_KEYS)
            if chip.get("memoryFactor", 1) not in (0, 1):
                raise ConfigInvalid(
                    f"{where}.memoryFactor is {chip['memoryFactor']}; only 1 can be taken over: "
                    "write memory in MiB"
                )
            if chip.get("overwriteEnv"):
                self._note(
                    f"{where}.overwriteEnv", "policy.hide_devices_from_others does it for all"
                )
            runtime_classes.add(str(chip.get("runtimeClassName") or ""))
            chips.append(self._chip(where, chip))
        if chips and chips != msgspec.to_builtins(ascend.CHIPS):
            self._vendors.setdefault("ascend", {})["chips"] = chips
        classes = runtime_classes - {""}
        if len(classes) > 1:
            raise ConfigInvalid(
                f"vnpus.configs: runtimeClassName differs ({', '.join(sorted(classes))}); one "
                "runtime class for all chips can be taken over"
            )
        if classes:
            self._vendors.setdefault("ascend", {})["runtime_class"] = classes.pop()

    def _chip(self, where: str, chip: Tree) -> Tree:
        templates = []
        for number, one in enumerate(_list(chip.get("templates"), f"{where}.templates")):
            at = f"{where}.templates[{number}]"
            template = self._only(at, one, _TEMPLATE_KEYS)
            templates.append(
                {
                    "name": _text(template, "name", at),
                    "memory_mib": _count(template, "memory", at),
                    "ai_core": _count(template, "aiCore", at),
                    "ai_cpu": _count(template, "aiCPU", at),
                }
            )
        allocatable = _count(chip, "memoryAllocatable", where)
        return {
            "word": _text(chip, "commonWord", where),
            "resource_name": _text(chip, "resourceName", where),
            "resource_memory_name": _text(chip, "resourceMemoryName", where),
            "resource_core_name": str(chip.get("resourceCoreName") or ""),
            "memory_allocatable_mib": allocatable,
            "memory_capacity_mib": _count(chip, "memoryCapacity", where) or allocatable,
            "ai_core": _count(chip, "aiCore", where),
            "ai_cpu": _count(chip, "aiCPU", where),
            "templates": templates,
            "super_pod": bool(chip.get("superPod")),
        }

    def _read_node(self, where: str, name: str, node: Tree) -> None:
        selected: Tree = {"nodes": [name], "vendors": ["nvidia"]}
        fields: Tree = {}
        places = {
            "devicesplitcount": ("slots", COUNT),
            "devicememoryscaling": ("memory_scaling", NUMBER),
            "devicecorescaling": ("core_scaling", NUMBER),
        }
        for key, (place, kind) in places.items():
            value = node.get(key)
            if value:  # HAMi uses the default for 0
                fields[place] = _checked(f"{where}.{key}", kind, value)
        if fields:
            self._rules.append(selected | fields)
        hidden = self._only(
            f"{where}.filterdevices", node.get("filterdevices") or {}, ("uuid", "index")
        )
        for key, selector in (("uuid", "uuids"), ("index", "indexes")):
            values = _list(hidden.get(key), f"{where}.filterdevices.{key}")
            if values:
                self._rules.append(selected | {selector: values, "hidden": True})
        mode = node.get("operatingmode") or "hami-core"
        if mode == "mig":
            self._note(
                f"{where}.operatingmode",
                f"enable MIG mode on the devices of {name} (nvidia-smi -mig 1); the agent adapts",
                "warning",
            )
        elif mode != "hami-core":
            self._note(f"{where}.operatingmode", f"{mode!r} is not supported", "warning")
        for key in ("preconfigureddevicememory", "enablenumatopology", "libcudaloglevel"):
            if node.get(key):
                self._note(
                    f"{where}.{key}",
                    f"set per agent: run the agents of {name} from a separate DaemonSet",
                    "warning",
                )
        if node.get("migstrategy"):
            self._note(f"{where}.migstrategy", "had no effect in HAMi")

    # --- single keys -----------------------------------------------------------------------------

    def _apply(self, key: str, rule: Rule, value: object) -> None:
        if isinstance(rule, Unmapped):
            if value not in rule.harmless:
                self._note(key, rule.why, rule.weight)
            return
        if value is None or value == "":
            return  # same as an absent key
        taken: object = _checked(key, rule.kind, value)
        if rule.convert is not None:
            taken = rule.convert(taken)
        if taken is None:
            return
        first, *rest = rule.place.split(".")
        if first == "devices":
            self._sharing[rest[0]] = taken
            return
        here = self._vendors if first == "vendors" else self._settings[first]
        for name in rest[:-1]:
            here = here.setdefault(name, {})
        here[rest[-1]] = taken

    def _note(self, key: str, text: str, weight: Weight = "info") -> None:
        self._notes.append(Note(key=key, text=text, weight=weight))

    def _only(self, where: str, content: object, keys: tuple[str, ...]) -> Tree:
        found = _mapping(content, where)
        for key in found:
            if key not in keys:
                self._unknown(where, key, keys)
        return found

    def _unknown(self, where: str, key: str, keys: tuple[str, ...]) -> None:
        near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(keys))}"
        raise ConfigInvalid(f"{where}: {_shown(key)} is not a key of HAMi 2.10; {fix}")

    def result(self) -> Imported:
        """Return the result, with the validated vendor settings in each service."""
        vendors = self._without_defaults()
        injection = self._settings["nodeagent"].get("injection", "cdi")
        if injection != "cdi":  # the webhook's default
            self._settings["webhook"].setdefault("policy", {})["injection"] = injection
        for service in SERVICES:
            if vendors:
                self._settings[service]["vendors"] = vendors
        devices: Tree = {}
        if self._sharing or self._rules:
            first = [{"vendors": ["nvidia"], **self._sharing}] if self._sharing else []
            devices["rules"] = [*first, *self._rules]
        return Imported(
            settings=self._settings, devices=devices, notes=tuple(dict.fromkeys(self._notes))
        )

    def _without_defaults(self) -> Tree:
        try:
            settings = msgspec.convert(self._vendors, VendorSettings, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigInvalid(f"device-config: {error}") from error
        kept: Tree = {}
        for vendor in (one.name for one in Catalog.from_settings(settings).vendors):
            section = getattr(settings, vendor)
            default = type(section)()
            differing = {
                field: msgspec.to_builtins(getattr(section, field))
                for field in section.__struct_fields__
                if getattr(section, field) != getattr(default, field)
            }
            if differing:
                kept[vendor] = differing
        return kept


def _leaves(
    tree: Tree, *, known: Mapping[str, object], path: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield dotted keys with values; a known key keeps its subtree."""
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if key == "device-config":
            continue
        if isinstance(value, dict) and value and key not in known:
            yield from _leaves(value, known=known, path=key)
        else:
            yield key, value


def _checked(key: str, kind: _Kind, value: object) -> object:
    """Return the value if it has the right type; convert quoted numbers and booleans."""
    if isinstance(value, str) and str not in kind.types:
        value = {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, str) and kind is not TRUTH:
            number: float | None = whole(value, least=-INT32_MAX)
            if number is None and float in kind.types:
                number = real(value, least=-NUMBER_MOST, most=NUMBER_MOST)
            value = value if number is None else number
    is_kind = isinstance(value, kind.types)
    if isinstance(value, bool) and bool not in kind.types:
        is_kind = False
    if not is_kind:
        raise ConfigInvalid(f"{key}: {_shown(value)} is not {kind.name}")
    if isinstance(value, int) and abs(value) > INT32_MAX:
        raise ConfigInvalid(f"{key}: the number is outside -{INT32_MAX}..{INT32_MAX}")
    if isinstance(value, float) and not abs(value) <= NUMBER_MOST:
        raise ConfigInvalid(f"{key}: {value} is outside -{NUMBER_MOST:g}..{NUMBER_MOST:g}")
    if isinstance(value, str) and len(value) > VALUE_LENGTH_MOST:
        raise ConfigInvalid(f"{key}: {len(value)} characters, write at most {VALUE_LENGTH_MOST}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _mapping(content: object, where: str) -> Tree:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigInvalid(f"{where}: {_shown(content)} is not a mapping")
    return content


def _list(content: object, where: str) -> list[Any]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise ConfigInvalid(f"{where}: {_shown(content)} is not a list")
    return content


def _text(tree: Tree, key: str, where: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigInvalid(f"{where}.{key}: {_shown(value)} is not a string; write the name")
    if len(value) > VALUE_LENGTH_MOST:
        raise ConfigInvalid(f"{where}.{key}: {len(value)} characters, at most {VALUE_LENGTH_MOST}")
    return value


def _count(tree: Tree, key: str, where: str) -> int:
    value = tree.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= INT32_MAX:
        raise ConfigInvalid(
            f"{where}.{key}: {_shown(value)} is not a whole number from 0 to {INT32_MAX}"
        )
    return value
