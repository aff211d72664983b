# SPDX-License-Identifier: Apache-2.0
"""Translates the configuration of HAMi 2.10 into ours: what is taken over, what is not, and why.

Three documents are known: ``device-config.yaml`` (names, units and defaults of each vendor, and how
devices are shared), the node configuration ``config.json`` (the same for single nodes), and the
chart's ``values.yaml``. All are optional. Each key is in a table here: with the place of ours that
has its meaning, or with the reason why it has none. A key that is in no table is refused, with the
nearest one, because HAMi ignores such keys in silence and so keeps mistakes alive.

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
from hami_common.vendors.catalog import VendorSettings

NUMBER_MOST = 1e6
_SHOWN = 60
VALUE_LENGTH_MOST = 4096
"""Characters of a name, path or list of words."""

Tree = dict[str, Any]
Weight = Literal["info", "warning"]
Service = Literal["webhook", "scheduler", "registry", "nodeagent"]
SERVICES: tuple[Service, ...] = ("webhook", "scheduler", "registry", "nodeagent")


class NotUnderstood(Exception):
    """A document that cannot be taken over as it is; says which field, and what to do."""


class Note(Struct, frozen=True, kw_only=True):
    """What an operator should know about one key."""

    key: str
    text: str
    weight: Weight = "info"


class Imported(Struct, frozen=True, kw_only=True):
    """The same configuration in our terms."""

    settings: dict[str, Tree]
    """By service: what differs from our defaults, as in its TOML file."""
    devices: Tree
    """The registry's device configuration."""
    notes: tuple[Note, ...] = ()


class _Kind(NamedTuple):
    """What a value must be."""

    name: str
    types: tuple[type, ...]


TEXT = _Kind("a text", (str,))
COUNT = _Kind("a whole number", (int,))
NUMBER = _Kind("a number", (int, float))
TRUTH = _Kind("true or false", (bool,))


class Taken(NamedTuple):
    """The key has a place: ``vendors.…`` (all services), ``<service>.…`` or ``devices.…``."""

    place: str
    kind: _Kind = TEXT
    turned: Callable[[Any], Any] | None = None


class Left(NamedTuple):
    """The key has no place of its own here, and why."""

    why: str
    weight: Weight = "info"
    harmless: tuple[object, ...] = ("", None, False, 0, "false")
    """Values with which there is nothing to say."""


Fate = Taken | Left
Table = Mapping[str, Fate]

_REPLACED = "set in deploy/kustomize, see docs/install.md"


def _words(value: str) -> list[str]:
    return [word.strip() for word in str(value).split(",") if word.strip()]


def _names(vendor: str, **places: str) -> dict[str, Fate]:
    return {key: Taken(f"vendors.{vendor}.{place}") for key, place in places.items()}


_SHARING: dict[str, Fate] = {
    "deviceSplitCount": Taken("devices.slots", COUNT),
    "deviceMemoryScaling": Taken("devices.memory_scaling", NUMBER, float),
    "deviceCoreScaling": Taken("devices.core_scaling", NUMBER, float),
}

_NVIDIA: dict[str, Fate] = {
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
    "overwriteEnv": Taken("webhook.policy.hide_devices_from_others", TRUTH),
    "defaultMemory": Taken("vendors.nvidia.default_memory_mib", COUNT),
    "defaultCores": Taken("vendors.nvidia.default_core_pct", COUNT),
    "defaultGPUNum": Taken("vendors.nvidia.default_count", COUNT),
    "memoryFactor": Taken("vendors.nvidia.memory_factor", COUNT),
    "preConfiguredDeviceMemory": Taken("nodeagent.drivers.nvidia.unified_memory_mib", COUNT),
    "enableNumaTopology": Taken("nodeagent.numa_topology", TRUTH),
    "libCudaLogLevel": Taken("nodeagent.library_log_level", COUNT, str),
    "disableCoreLimit": Taken(
        "vendors.nvidia.core_policy", TRUTH, lambda is_off: "disable" if is_off else None
    ),
    "migProfileAllowlist": Left(
        "profiles are read from the driver and chosen by size; a list of allowed ones is not kept",
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
        "memoryFactor": Taken("vendors.hygon.memory_factor", COUNT),
    },
    "metax": {
        **_names(
            "metax",
            resourceCountName="resource_count_name",
            resourceVCountName="resource_v_count_name",
            resourceVMemoryName="resource_v_memory_name",
            resourceVCoreName="resource_v_core_name",
        ),
        "sgpuTopologyAware": Left(
            "pods ask for it by the annotation hami.io/gpu-scheduler-policy: topology-aware",
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

_VALUES: dict[str, Fate] = {
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
    "vastaiResourceName": Taken("vendors.vastai.resource_count_name"),
    "birenResourceName": Taken("vendors.biren.resource_count_name"),
    "schedulerName": Taken("webhook.policy.scheduler_name"),
    "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy": Taken("scheduler.policy.node"),
    "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy": Taken(
        "scheduler.policy.device", TEXT, _words
    ),
    "scheduler.forceOverwriteDefaultScheduler": Taken(
        "webhook.policy.overwrite_default_scheduler", TRUTH
    ),
    "scheduler.overwriteEnv": Taken(
        "webhook.policy.hide_devices_from_others",
        _Kind("true or false", (bool, str)),
        lambda value: str(value).lower() == "true",
    ),
    "scheduler.nodeLockExpire": Left(
        "had no effect in HAMi; nothing here waits for a lock", harmless=("5m", "", None)
    ),
    "scheduler.replicas": Left(
        "all replicas answer here; set it in an overlay", harmless=(1, None)
    ),
    "scheduler.admissionWebhook.failurePolicy": Left(
        "ours is Fail, for pods that name our resources only, so that none runs without limits",
        harmless=("Fail", None),
    ),
    "scheduler.nodeLabelSelector": Left(
        "nodes count as soon as an agent reports; restrict the agents' DaemonSet instead",
        "warning",
        harmless=(None, {}),
    ),
    "scheduler.metricsBindAddress": Left(_REPLACED, harmless=(":9395", None)),
    "devicePlugin.deviceSplitCount": _NVIDIA["deviceSplitCount"],
    "devicePlugin.deviceMemoryScaling": _NVIDIA["deviceMemoryScaling"],
    "devicePlugin.deviceCoreScaling": _NVIDIA["deviceCoreScaling"],
    "devicePlugin.enableNumaTopology": _NVIDIA["enableNumaTopology"],
    "devicePlugin.preConfiguredDeviceMemory": _NVIDIA["preConfiguredDeviceMemory"],
    "devicePlugin.runtimeClassName": _NVIDIA["runtimeClassName"],
    "devicePlugin.pluginPath": Taken("nodeagent.device_plugin_dir"),
    "devicePlugin.libPath": Taken(
        "nodeagent.library_dir",
        TEXT,
        lambda path: None if path == "/usr/local/vgpu" else path,
    ),
    "devicePlugin.disablecorelimit": Left(
        "had no effect in HAMi; gpuCorePolicy: disable switches the limit off",
        harmless=("false", False, None),
    ),
    "devicePlugin.migStrategy": Left(
        "MIG devices are divided on demand, and nvidia.com/mig-* names are served",
        harmless=("none", "", None),
    ),
    "devicePlugin.deviceListStrategy": Taken(
        "nodeagent.injection",
        TEXT,
        lambda word: {"envvar": "env", "cdi-cri": "cdi", "cdi-annotations": "cdi"}.get(word, word),
    ),
    "devicePlugin.passDeviceSpecsEnabled": Taken(
        "nodeagent.injection", TRUTH, lambda is_on: "devices" if is_on else None
    ),
    "devicePlugin.nvidiaNodeSelector": Left(
        "set it in an overlay of components/nvidia", "warning", harmless=({"gpu": "on"}, None)
    ),
    "devices.nvidia.gpuCorePolicy": _NVIDIA["gpuCorePolicy"],
    "devices.nvidia.libCudaLogLevel": _NVIDIA["libCudaLogLevel"],
    "devices.ascend.hamiVnpuCore": Left(
        "pods choose soft sharing themselves: huawei.com/vnpu-mode: hami-core", "warning"
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
    """Our configuration of the same meaning. ``NotUnderstood`` names the key that is wrong.

    ``device_config`` wins over ``values``, as it does in HAMi's own chart; single nodes over both.
    """
    made = _Made()
    if values is not None:
        made.take_values(values)
    if device_config is not None:
        made.take_device_config(device_config)
    if node_config is not None:
        made.take_node_config(node_config)
    return made.finished()


class _Made:
    """The result while it is put together."""

    def __init__(self) -> None:
        self._vendors: Tree = {}
        self._settings: dict[str, Tree] = {service: {} for service in SERVICES}
        self._sharing: Tree = {}
        self._rules: list[Tree] = []
        self._notes: list[Note] = []

    # --- documents -------------------------------------------------------------------------------

    def take_values(self, values: Tree) -> None:
        for key, value in _leaves(values, known=_VALUES):
            fate = _VALUES.get(key)
            if fate is not None:
                self._apply(f"values: {key}", fate, value)
            elif not any(key == top or key.startswith(f"{top}.") for top in _VALUES_ELSEWHERE):
                self._unknown("values", key, (*_VALUES, *_VALUES_ELSEWHERE, "device-config"))
        self._notes.append(
            Note(
                key="values",
                text=f"images, names, ports and pod settings of the chart: {_REPLACED}",
            )
        )

    def take_device_config(self, config: Tree) -> None:
        sections = (*_DEVICE_CONFIG, "iluvatars", "vnpus")
        for section, content in config.items():
            if section == "iluvatars":
                self._take_iluvatars(content)
            elif section == "vnpus":
                self._take_vnpus(content)
            elif section in _DEVICE_CONFIG:
                table = _DEVICE_CONFIG[section]
                for key, value in _mapping(content, section).items():
                    if key not in table:
                        self._unknown(section, key, tuple(table))
                    self._apply(f"{section}.{key}", table[key], value)
            else:
                self._unknown("device-config", section, sections)

    def take_node_config(self, config: Tree) -> None:
        config = self._only("node-config", config, ("nodeconfig",))
        for number, content in enumerate(_list(config.get("nodeconfig"), "nodeconfig")):
            where = f"nodeconfig[{number}]"
            node = self._only(where, content, _NODE_KEYS)
            name = node.get("name")
            if not isinstance(name, str) or not name:
                raise NotUnderstood(f"{where}.name is missing; give the name of the node")
            self._take_node(where, name, node)

    # --- parts of them ---------------------------------------------------------------------------

    def _take_iluvatars(self, content: object) -> None:
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

    def _take_vnpus(self, content: object) -> None:
        content = self._only("vnpus", content, ("hamiVnpuCore", "configs"))
        if content.get("hamiVnpuCore"):
            self._apply("vnpus.hamiVnpuCore", _VALUES["devices.ascend.hamiVnpuCore"], value=True)
        chips, runtime_classes = [], set()
        for number, one in enumerate(_list(content.get("configs"), "vnpus.configs")):
            where = f"vnpus.configs[{number}]"
            chip = self._only(where, one, _VNPU_KEYS)
            if chip.get("memoryFactor", 1) not in (0, 1):
                raise NotUnderstood(
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
            raise NotUnderstood(
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

    def _take_node(self, where: str, name: str, node: Tree) -> None:
        selected: Tree = {"nodes": [name], "vendors": ["nvidia"]}
        fields: Tree = {}
        places = {
            "devicesplitcount": ("slots", COUNT),
            "devicememoryscaling": ("memory_scaling", NUMBER),
            "devicecorescaling": ("core_scaling", NUMBER),
        }
        for key, (place, kind) in places.items():
            value = node.get(key)
            if value:  # HAMi takes 0 for "as everywhere"
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
                f"switch MIG on for the devices of {name} (nvidia-smi -mig 1); the agent follows",
                "warning",
            )
        elif mode != "hami-core":
            self._note(f"{where}.operatingmode", f"{mode!r} is not served", "warning")
        for key in ("preconfigureddevicememory", "enablenumatopology", "libcudaloglevel"):
            if node.get(key):
                self._note(
                    f"{where}.{key}",
                    f"a setting of the agent: give the agents of {name} a DaemonSet of their own",
                    "warning",
                )
        if node.get("migstrategy"):
            self._note(f"{where}.migstrategy", "had no effect in HAMi")

    # --- single keys -----------------------------------------------------------------------------

    def _apply(self, key: str, fate: Fate, value: object) -> None:
        if isinstance(fate, Left):
            if value not in fate.harmless:
                self._note(key, fate.why, fate.weight)
            return
        if value is None or value == "":
            return  # as if it were not written
        taken: object = _checked(key, fate.kind, value)
        if fate.turned is not None:
            taken = fate.turned(taken)
        if taken is None:
            return
        first, *rest = fate.place.split(".")
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
        raise NotUnderstood(f"{where}: {_shown(key)} is not a key of HAMi 2.10; {fix}")

    def finished(self) -> Imported:
        """Everything, with the vendors' part checked and given to each service."""
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
            told = msgspec.convert(self._vendors, VendorSettings, strict=True)
        except msgspec.ValidationError as error:
            raise NotUnderstood(f"device-config: {error}") from error
        kept: Tree = {}
        for vendor in VendorSettings.__struct_fields__:
            section = getattr(told, vendor)
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
    """Dotted keys with their values; a key that is known keeps what is below it."""
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if key == "device-config":
            continue
        if isinstance(value, dict) and value and key not in known:
            yield from _leaves(value, known=known, path=key)
        else:
            yield key, value


def _checked(key: str, kind: _Kind, value: object) -> object:
    """The value, when it is of its kind; a quoted number or truth counts as one."""
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
        raise NotUnderstood(f"{key}: {_shown(value)} is not {kind.name}")
    if isinstance(value, int) and abs(value) > INT32_MAX:
        raise NotUnderstood(f"{key}: the number is outside -{INT32_MAX}..{INT32_MAX}")
    if isinstance(value, float) and not abs(value) <= NUMBER_MOST:
        raise NotUnderstood(f"{key}: {value} is outside -{NUMBER_MOST:g}..{NUMBER_MOST:g}")
    if isinstance(value, str) and len(value) > VALUE_LENGTH_MOST:
        raise NotUnderstood(f"{key}: {len(value)} characters, write at most {VALUE_LENGTH_MOST}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _mapping(content: object, where: str) -> Tree:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise NotUnderstood(f"{where}: {_shown(content)} is not a mapping")
    return content


def _list(content: object, where: str) -> list[Any]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise NotUnderstood(f"{where}: {_shown(content)} is not a list")
    return content


def _text(tree: Tree, key: str, where: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str) or not value:
        raise NotUnderstood(f"{where}.{key}: {_shown(value)} is not a text; write the name")
    if len(value) > VALUE_LENGTH_MOST:
        raise NotUnderstood(f"{where}.{key}: {len(value)} characters, at most {VALUE_LENGTH_MOST}")
    return value


def _count(tree: Tree, key: str, where: str) -> int:
    value = tree.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= INT32_MAX:
        raise NotUnderstood(
            f"{where}.{key}: {_shown(value)} is not a whole number from 0 to {INT32_MAX}"
        )
    return value
