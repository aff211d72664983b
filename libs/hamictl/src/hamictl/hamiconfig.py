# SPDX-License-Identifier: Apache-2.0
"""Converts the configuration of HAMi 2.10 to this project's settings, with notes for the operator.

Three documents are known: ``device-config.yaml`` (names, units and defaults of each vendor, and how
devices are shared), the node configuration ``config.json`` (the same for single nodes), and the
chart's ``values.yaml``. All are optional. ``hamikeys`` lists their keys and the result of each. An
unknown key is refused and the nearest known one suggested, because HAMi silently ignores such keys,
which hides mistakes.

The result is a tree of settings for each service, as in their TOML files, the device configuration,
changes of the installed objects (``hamicomponent`` writes them), and one note per key. Memory in
MiB. Reads and writes no files.
"""

import difflib
import posixpath
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NoReturn

import msgspec
from msgspec import Struct

from hami_common.bounds import INT32_MAX
from hami_common.errors import SettingsInvalid
from hami_common.model.request import PlacementPolicy
from hami_common.units import real, whole
from hami_common.vendors import ascend, iluvatar
from hami_common.vendors.catalog import Catalog, VendorSettings
from hamictl import hamikeys
from hamictl.hamikeys import (
    DEVICE_CONFIG,
    NODE_CONFIG,
    SAMPLE_NODE,
    TRUTH,
    VALUES,
    Carried,
    Kind,
    NoEffect,
    Refused,
    Rule,
)

NUMBER_MOST = 1e6
_SHOWN = 60
VALUE_LENGTH_MOST = 4096
"""Characters of a name, path or list of words."""

Tree = dict[str, Any]
Result = Literal["carried", "refused", "no effect"]
Service = Literal["webhook", "scheduler", "registry", "nodeagent"]
SERVICES: tuple[Service, ...] = ("webhook", "scheduler", "registry", "nodeagent")
_EMPTY: tuple[Any, ...] = (None, "", [], {})


class ConfigInvalid(Exception):
    """A document cannot be imported; the text names the field and the fix."""


class Note(Struct, frozen=True, kw_only=True):
    """Result of the import for one key."""

    key: str
    result: Result
    text: str
    """Destination or reason."""
    is_default: bool = False
    """The value is that of HAMi's chart."""


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of installed objects that patches of single fields cannot express."""

    scheduler_name: str = "hami-scheduler"
    leader_elect: bool = True
    kube_scheduler_args: tuple[str, ...] = ()
    kube_scheduler_resources: Tree = {}
    managed_resources: tuple[str, ...] = ()
    """Names that kube-scheduler leaves to the extender besides those of the vendors."""
    exempt_namespaces: tuple[str, ...] = ()
    namespace_labels: dict[str, str] = {}
    namespace_expressions: tuple[Tree, ...] = ()
    object_labels: dict[str, str] = {}
    object_expressions: tuple[Tree, ...] = ()
    selects_namespaces: bool = True
    """False: the platform owns the webhook's ``namespaceSelector``."""
    nvidia_agents: bool = True
    runtime_class: str = ""
    """RuntimeClass to create, with the handler ``nvidia``."""
    monitors: bool = False
    """Install the monitors of the Prometheus operator."""


class Imported(Struct, frozen=True, kw_only=True):
    """The converted configuration."""

    settings: dict[str, Tree]
    """By service: settings that differ from the defaults, as in its TOML file."""
    devices: Tree
    """The registry's device configuration."""
    cluster: Cluster = Cluster()
    workloads: dict[str, Tree] = {}
    """Strategic merge patches by the key of ``hamicomponent.WORKLOADS``."""
    notes: tuple[Note, ...] = ()

    @property
    def vendors(self) -> VendorSettings:
        """Settings of the vendors."""
        return msgspec.convert(self.settings["webhook"].get("vendors", {}), VendorSettings)


_ILUVATAR_KEYS = tuple(
    key.partition("[].")[2] for key in DEVICE_CONFIG if key.startswith("iluvatars[].")
)
_VNPU_KEYS = (
    *(
        key.partition("[].")[2]
        for key in DEVICE_CONFIG
        if key.startswith("vnpus.configs[].") and ".templates" not in key
    ),
    "templates",
)
_TEMPLATE_KEYS = ("name", "memory", "aiCore", "aiCPU")
_NODE_KEYS = (*(key for key in NODE_CONFIG if "." not in key), "filterdevices")
_SECTIONS = tuple(dict.fromkeys(key.partition(".")[0].partition("[")[0] for key in DEVICE_CONFIG))
_HEALTH_VARIABLES = {
    "DP_DISABLE_HEALTHCHECKS": "disable_health_checks",
    "DP_ENABLE_HEALTHCHECKS": "enable_health_checks",
}


def import_hami(
    *,
    device_config: Tree | None = None,
    node_config: Tree | None = None,
    values: Tree | None = None,
    accepted: Collection[str] = (),
) -> Imported:
    """Convert the documents; ``ConfigInvalid`` names all invalid or refused keys.

    ``device_config`` overrides ``values``, as in HAMi's chart, and ``node_config`` overrides both.
    ``accepted``: keys, as notes name them, whose refusal does not stop the import.
    """
    collected = _Import(frozenset(accepted))
    if values is not None:
        collected.read_values(values, has_nodes=node_config is not None)
    if device_config is not None:
        collected.read_device_config(device_config)
    if node_config is not None:
        collected.read_node_config(node_config)
    return collected.result()


class _Import:
    """Collects the result."""

    def __init__(self, accepted: frozenset[str]) -> None:
        self._accepted = accepted
        self._vendors: Tree = {}
        self._settings: dict[str, Tree] = {service: {} for service in SERVICES}
        self._sharing: Tree = {}
        self._rules: list[Tree] = []
        self._cluster: Tree = {}
        self._workloads: Tree = {}
        self._steps: Tree = {}
        self._moved_labels: frozenset[str] = frozenset()
        """Labels that ``hamictl migrate node`` removes from nodes."""
        self._notes: list[Note] = []
        self._refusals: list[str] = []

    # --- documents -------------------------------------------------------------------------------

    def read_values(self, values: Tree, *, has_nodes: bool) -> None:
        plugin = _mapping(values.get("devicePlugin"), "values: devicePlugin")
        selector = plugin.get("nvidiaNodeSelector", {"gpu": "on"})
        self._moved_labels = frozenset(
            _mapping(selector, "values: devicePlugin.nvidiaNodeSelector")
        )
        for key, value in _leaves(values, known=VALUES):
            rule = _rule_of(key)
            if rule is None:
                self._unknown("values", key, tuple(VALUES))
            if key == "devicePlugin.nodeConfiguration.externalConfigName" and has_nodes:
                rule = NoEffect("Its content is given as --node-config.", "")
            self._apply(f"values: {key}", rule, value)

    def read_device_config(self, config: Tree) -> None:
        for section, content in config.items():
            if section == "iluvatars":
                self._read_iluvatars(content)
            elif section == "vnpus":
                self._read_vnpus(content)
            elif section in _SECTIONS:
                for key, value in _mapping(content, section).items():
                    if (section, key) == ("nvidia", "migProfileAllowlist"):
                        self._read_mig(value)
                        continue
                    path = f"{section}.{key}"
                    if path not in DEVICE_CONFIG:
                        keys = (k for k in DEVICE_CONFIG if k.startswith(f"{section}."))
                        self._unknown(section, key, tuple(k.partition(".")[2] for k in keys))
                    self._apply(path, DEVICE_CONFIG[path], value)
            else:
                self._unknown("device-config", section, _SECTIONS)

    def read_node_config(self, config: Tree) -> None:
        config = self._only("node-config", config, ("nodeconfig",))
        for number, content in enumerate(_list(config.get("nodeconfig"), "nodeconfig")):
            where = f"nodeconfig[{number}]"
            node = self._only(where, content, _NODE_KEYS)
            name = node.get("name")
            if not isinstance(name, str) or not name:
                raise ConfigInvalid(f"{where}.name is missing; give the name of the node")
            if name == SAMPLE_NODE:
                self._note(where, NoEffect("It is the sample of HAMi's chart, not a node."))
                continue
            self._read_node(where, name, node)

    # --- parts of them ---------------------------------------------------------------------------

    def _read_mig(self, content: object) -> None:
        allowed: Tree = {}
        for number, one in enumerate(_list(content, "nvidia.migProfileAllowlist")):
            where = f"nvidia.migProfileAllowlist[{number}]"
            entry = self._only(where, one, ("models", "profiles"))
            lists = [_list(entry.get(key), f"{where}.{key}") for key in ("models", "profiles")]
            for key, words in zip(("models", "profiles"), lists, strict=True):
                if not words or not all(isinstance(word, str) and word for word in words):
                    raise ConfigInvalid(f"{where}.{key}: {_shown(words)} is not a list of names")
                self._apply(
                    f"{where}.{key}", DEVICE_CONFIG[f"nvidia.migProfileAllowlist[].{key}"], words
                )
            profiles = list(dict.fromkeys(_mig_pattern(word, where) for word in lists[1]))
            for model in lists[0]:
                allowed.setdefault(model, profiles)
        if allowed:
            self._put("nodeagent.drivers.nvidia.mig_allowed_profiles", allowed)

    def _read_iluvatars(self, content: object) -> None:
        chips = []
        for number, one in enumerate(_list(content, "iluvatars")):
            where = f"iluvatars[{number}]"
            chip = self._only(where, one, _ILUVATAR_KEYS)
            self._note_all(where, "iluvatars[]", chip)
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
        if "hamiVnpuCore" in content:
            key = "vnpus.hamiVnpuCore"
            self._apply(key, DEVICE_CONFIG[key], content["hamiVnpuCore"])
        chips, runtime_classes = [], set()
        for number, one in enumerate(_list(content.get("configs"), "vnpus.configs")):
            where = f"vnpus.configs[{number}]"
            chip = self._only(where, one, _VNPU_KEYS)
            self._note_all(where, "vnpus.configs[]", chip)
            if _checked(f"{where}.overwriteEnv", TRUTH, chip.get("overwriteEnv") or False):
                self._put("webhook.policy.hide_devices_from_others", value=True)
            runtime_classes.add(str(chip.get("runtimeClassName") or ""))
            chips.append(self._chip(where, chip))
        if chips and chips != msgspec.to_builtins(ascend.CHIPS):
            self._vendors.setdefault("ascend", {})["chips"] = chips
        if len(runtime_classes) > 1:
            raise ConfigInvalid(
                f"vnpus.configs[].runtimeClassName: {', '.join(sorted(map(repr, runtime_classes)))}"
                " differ; one runtime class for all chips can be carried: write the same"
            )
        if runtime_class := "".join(runtime_classes):
            self._vendors.setdefault("ascend", {})["runtime_class"] = runtime_class

    def _note_all(self, where: str, pattern: str, tree: Tree) -> None:
        """Apply the rules of a chip's keys that are carried nowhere, and note the others."""
        for key, value in tree.items():
            if (rule := DEVICE_CONFIG.get(f"{pattern}.{key}")) is None:
                continue
            if isinstance(rule, Carried):
                self._note(f"{where}.{key}", rule)
            else:
                self._apply(f"{where}.{key}", rule, value)

    def _chip(self, where: str, chip: Tree) -> Tree:
        templates = []
        for number, one in enumerate(_list(chip.get("templates"), f"{where}.templates")):
            at = f"{where}.templates[{number}]"
            template = self._only(at, one, _TEMPLATE_KEYS)
            self._note_all(at, "vnpus.configs[].templates[]", template)
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
            "devicesplitcount": "slots",
            "devicememoryscaling": "memory_scaling",
            "devicecorescaling": "core_scaling",
        }
        for key, value in node.items():
            rule = NODE_CONFIG.get(key)
            if key in places and isinstance(rule, Carried) and value:  # 0 means HAMi's default
                fields[places[key]] = _checked(f"{where}.{key}", rule.kind, value)
            if isinstance(rule, Carried):
                self._note(f"{where}.{key}", rule)
            elif rule is not None:
                self._apply(f"{where}.{key}", rule, value)
        if fields:
            self._rules.append(selected | fields)
        hidden = self._only(
            f"{where}.filterdevices", node.get("filterdevices") or {}, ("uuid", "index")
        )
        for key, selector in (("uuid", "uuids"), ("index", "indexes")):
            values = _list(hidden.get(key), f"{where}.filterdevices.{key}")
            if values:
                path = f"filterdevices.{key}"
                self._apply(f"{where}.{path}", NODE_CONFIG[path], values)
                self._rules.append(selected | {selector: values, "hidden": True})
        mode = node.get("operatingmode") or "hami-core"
        if mode == "mig":
            modes = self._settings["nodeagent"].setdefault("drivers", {}).setdefault("nvidia", {})
            modes.setdefault("mig_mode", {})[f"{name}/*"] = "on"
        elif mode != "hami-core":
            why = f"The mode {_shown(mode)} serves only pods that name it here."
            fix = "write hami-core or mig, and set drivers.nvidia.sharing of the nodeagent"
            self._refuse(f"{where}.operatingmode", Refused(why, fix))

    # --- single keys -----------------------------------------------------------------------------

    def _apply(self, key: str, rule: Rule, value: object) -> None:
        is_default = value == rule.default or (rule.default is ... and value in _EMPTY)
        if isinstance(rule, Refused):
            if rule.is_harmless(value):
                self._note(key, NoEffect("This value asks for nothing."), is_default=True)
            else:
                self._refuse(key, rule)
        elif not isinstance(rule, Carried) or value in _EMPTY or value in rule.keeps:
            self._note(key, rule, is_default=is_default)
        else:
            self._note(key, rule, is_default=is_default)
            taken: object = _checked(key, rule.kind, value)
            if rule.convert is not None:
                taken = rule.convert(taken)
            if taken is not None:
                for place in rule.places:
                    self._put(place, taken)

    def _put(self, place: str, value: object) -> None:
        first, *rest = place.split(".")
        if first == "devices":
            self._sharing[rest[0]] = value
            return
        if first == "step":
            self._steps[".".join(rest)] = value
            return
        roots = {
            "vendors": self._vendors,
            "cluster": self._cluster,
            "workload": self._workloads,
            **self._settings,
        }
        here = roots[first]
        for name in rest[:-1]:
            here = here.setdefault(name, {})
        here[rest[-1]] = value

    def _note(self, key: str, rule: Carried | NoEffect, *, is_default: bool = False) -> None:
        if isinstance(rule, Carried):
            result: Result = "carried"
            text = hamikeys.destination(rule)
        else:
            result, text = "no effect", rule.why
        self._notes.append(Note(key=key, result=result, text=text, is_default=is_default))

    def _refuse(self, key: str, rule: Refused) -> None:
        if key.removeprefix("values: ") not in self._accepted:
            self._refusals.append(f"{key}: {rule.why} Fix: {rule.fix}.")
        self._notes.append(Note(key=key, result="refused", text=f"{rule.why} Fix: {rule.fix}."))

    def _only(self, where: str, content: object, keys: tuple[str, ...]) -> Tree:
        found = _mapping(content, where)
        for key in found:
            if key not in keys:
                self._unknown(where, key, keys)
        return found

    def _unknown(self, where: str, key: str, keys: tuple[str, ...]) -> NoReturn:
        near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(keys))}"
        raise ConfigInvalid(f"{where}: {_shown(key)} is not a key of HAMi 2.10; {fix}")

    # --- keys that belong together ---------------------------------------------------------------

    def _finish(self) -> None:
        steps = self._steps
        strategy = steps.get("injection.strategy", "")
        if strategy.startswith("cdi"):
            self._put("nodeagent.injection", "cdi")
        elif steps.get("injection.specs"):
            self._put("nodeagent.injection", "devices")
        elif strategy:
            self._put("nodeagent.injection", "env")
        injection = self._settings["nodeagent"].get("injection", "cdi")
        if injection != "cdi":  # the webhook's default
            self._put("webhook.policy.injection", injection)
        if features := [one for one in ("gdrcopy", "gds", "mofed") if steps.get(f"features.{one}")]:
            self._put("vendors.nvidia.features", features)
        off = [
            name.removeprefix("enabled.")
            for name, is_on in steps.items()
            if name.startswith("enabled.") and not is_on
        ]
        if off:
            self._put("vendors.ignored", sorted(off))
        managed = {
            name
            for place, names in steps.items()
            if place.startswith("managed.") and place.removeprefix("managed.") not in off
            for name in names
        }
        listed = {name for rule in VALUES.values() for name in _listed(rule)}
        if added := sorted(managed - listed):
            self._put("cluster.managed_resources", added)
        if steps.get("leader_elect") is False:
            self._put("cluster.leader_elect", value=False)
            self._put("workload.scheduler.spec.replicas", 1)
        elif steps.get("replicas", 1) != 1:
            self._put("workload.scheduler.spec.replicas", steps["replicas"])
        if steps.get("creates_runtime_class") and "runtime_class" in steps:
            self._put("cluster.runtime_class", steps["runtime_class"])
        self._finish_agents()

    def _finish_agents(self) -> None:
        """Patch the agents' DaemonSets."""
        steps, pod = self._steps, "workload.agent.spec.template.spec"
        volumes: list[Tree] = []
        container: Tree = {}
        labels = {
            key: str(value)
            for key, value in steps.get("node_labels", {}).items()
            if key not in self._moved_labels
        }
        if labels:
            self._put("workload.agents.spec.template.spec.nodeSelector", labels)
        if steps.get("host_network"):
            self._put(f"{pod}.dnsPolicy", "ClusterFirstWithHostNet")
        if env := self._environment():
            container["env"] = env
        if root := steps.get("driver_root"):
            volumes.append({"name": "driver-root", "hostPath": {"path": root, "type": "Directory"}})
            container["volumeMounts"] = [
                {
                    "name": "driver-root",
                    "mountPath": "/driver-root",
                    "readOnly": True,
                    "mountPropagation": "HostToContainer",
                }
            ]
            self._put("nodeagent.drivers.nvidia.library_path", "/driver-root")
        if steps.get("toolkit.enabled"):
            path = steps.get("toolkit.path") or "/run/nvidia/validations"
            volumes.append(
                {
                    "name": "toolkit-ready",
                    "hostPath": {"path": path, "type": "DirectoryOrCreate"},
                }
            )
            self._put(f"{pod}.initContainers", [_TOOLKIT_READY])
        if container:
            self._put(f"{pod}.containers", [{"name": "agent", **container}])
        if volumes:
            self._put(f"{pod}.volumes", volumes)
        kind = steps.get("update.type", "RollingUpdate")
        most = steps.get("update.most", 1)
        if kind == "OnDelete":
            update = {"type": kind, "rollingUpdate": None}
            self._put("workload.agent.spec.updateStrategy", update)
        elif most != 1:
            self._put("workload.agent.spec.updateStrategy.rollingUpdate.maxSurge", most)
        path = posixpath.normpath(steps.get("plugin_path", "/var/lib/kubelet/device-plugins"))
        if path != "/var/lib/kubelet/device-plugins":
            plugins = {"name": "device-plugins", "hostPath": {"path": path}}
            self._put("workload.devices.spec.template.spec.volumes", [plugins])
            root = posixpath.dirname(path)
            others = [
                {"name": name, "hostPath": {"path": f"{root}/{name}"}}
                for name in ("pod-resources", "pods")
            ]
            self._put("workload.agents.spec.template.spec.volumes", [plugins, *others])

    def _environment(self) -> list[Tree]:
        """Return the variables of HAMi's plugin and monitor, which both are the agent here."""
        found: dict[str, Tree] = {}
        for part, key in (("plugin", "extraEnvs"), ("monitor", "monitor.extraEnvs")):
            for one in self._steps.get(f"env.{part}", []):
                where = f"values: devicePlugin.{key}"
                name = _text(_mapping(one, where), "name", where)
                if found.setdefault(name, one) != one:
                    raise ConfigInvalid(f"{where}: {name} has two values; write one")
                if name in _HEALTH_VARIABLES and "value" in one:
                    place = f"nodeagent.drivers.nvidia.{_HEALTH_VARIABLES[name]}"
                    self._put(place, str(one["value"]))
        return list(found.values())

    def result(self) -> Imported:
        """Return the result, with the validated vendor settings in each service."""
        keys = {
            note.key.removeprefix("values: ") for note in self._notes if note.result == "refused"
        }
        if unknown := sorted(self._accepted - keys):
            raise ConfigInvalid(f"--accept {unknown[0]}: the key is not refused; leave it out")
        if self._refusals:
            raise ConfigInvalid(
                "keys with an effect that cannot be carried; change them, or add "
                "--accept KEY for each:\n  " + "\n  ".join(self._refusals)
            )
        self._finish()
        vendors = self._without_defaults()
        for service in SERVICES:
            if vendors:
                self._settings[service]["vendors"] = vendors
        devices: Tree = {}
        if self._sharing or self._rules:
            first = [{"vendors": ["nvidia"], **self._sharing}] if self._sharing else []
            devices["rules"] = [*first, *self._rules]
        try:
            msgspec.convert(self._settings["scheduler"].get("policy", {}), PlacementPolicy)
            cluster = msgspec.convert(self._cluster, Cluster)
        except msgspec.ValidationError as error:
            raise ConfigInvalid(f"values: {error}") from error
        return Imported(
            settings=self._settings,
            devices=devices,
            cluster=cluster,
            workloads=self._workloads,
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _without_defaults(self) -> Tree:
        try:
            settings = msgspec.convert(self._vendors, VendorSettings, strict=True)
            catalog = Catalog.from_settings(settings)
        except (msgspec.ValidationError, SettingsInvalid) as error:
            raise ConfigInvalid(f"device-config: {error}") from error
        kept: Tree = {"ignored": list(settings.ignored)} if settings.ignored else {}
        for vendor in (one.name for one in catalog.vendors):
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


_WAIT_FOR_TOOLKIT = """import pathlib, time
while not pathlib.Path("/validations/toolkit-ready").exists():
    print("waiting for the NVIDIA container toolkit", flush=True)
    time.sleep(5)
"""
_TOOLKIT_READY: Tree = {
    "name": "toolkit-ready",
    "image": "hami/nodeagent",
    "command": ["python", "-c"],
    "args": [_WAIT_FOR_TOOLKIT],
    "resources": {"requests": {"cpu": "5m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
    "securityContext": {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
    "volumeMounts": [
        {
            "name": "toolkit-ready",
            "mountPath": "/validations",
            "readOnly": True,
            "mountPropagation": "HostToContainer",
        }
    ],
}
"""Init container that waits for the validation of NVIDIA's GPU operator."""


def _mig_pattern(profile: str, where: str) -> str:
    """Return the pattern that means what HAMi reads in a profile: the slices before the ``g``."""
    slices, dot, size = profile.partition("g.")
    if not (slices.isdecimal() and dot and size):
        raise ConfigInvalid(f"{where}.profiles: {_shown(profile)} is not a profile like 2g.10gb")
    return profile if slices == "1" else f"{slices}g.*"


def _listed(rule: Rule) -> list[str]:
    """Return the resource names that HAMi's chart lists in this key."""
    if isinstance(rule, Carried) and rule.places[0].startswith("step.managed."):
        return list(rule.default)
    return []


def _rule_of(key: str) -> Rule | None:
    """Return the rule of a key of the chart, or of the free-form mapping that contains it."""
    while key and key not in VALUES:
        key = key.rpartition(".")[0]
    return VALUES.get(key)


def _leaves(
    tree: Tree, *, known: Mapping[str, Rule], path: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield dotted keys with values; a known key without known parts keeps its subtree."""
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        has_parts = key not in known or any(one.startswith(f"{key}.") for one in known)
        if isinstance(value, dict) and value and has_parts:
            yield from _leaves(value, known=known, path=key)
        elif value is not None or key in known:
            yield key, value


def _checked(key: str, kind: Kind, value: object) -> object:
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
    if kind.words and str(value).lower() not in kind.words and value not in kind.words:
        raise ConfigInvalid(
            f"{key}: {_shown(value)} is not {kind.name}; write one of {', '.join(kind.words)}"
        )
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
