# SPDX-License-Identifier: Apache-2.0
"""Table of every key in HAMi 2.10's configuration, with what ``import-config`` does with it.

A key is carried to a place of this project, refused because its effect cannot be carried, or has no
effect here, for the reason given. The same table converts (``hamiconfig``) and documents
(docs/import.md). Keys of lists have ``[]``. Memory in MiB. Reads and writes no files.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, get_args

from hami_common.model.request import NodePolicy
from hami_common.vendors import awsneuron

SAMPLE_NODE: Final = "your-node-name"
"""Node of the sample configuration in HAMi's chart."""
_LOG_FLAG: Final = re.compile(r"--debug|--?v=\d+|--(stderrthreshold|logtostderr|vmodule)(=.*)?")


class Kind(NamedTuple):
    """Type of a value."""

    name: str
    types: tuple[type, ...]
    words: tuple[str, ...] = ()
    """Allowed values; empty: any of the type."""


TEXT: Final = Kind("a string", (str,))
COUNT: Final = Kind("a whole number", (int,))
NUMBER: Final = Kind("a number", (int, float))
TRUTH: Final = Kind("true or false", (bool,))
MAPPING: Final = Kind("a mapping", (dict,))
LIST: Final = Kind("a list", (list,))
AMOUNT: Final = Kind("a whole number or a percentage", (int, str))


class Carried(NamedTuple):
    """A key whose value the rendered installation has."""

    places: tuple[str, ...]
    """Dotted places: ``vendors`` (every service), a service, ``devices`` (the device
    configuration), ``cluster`` (``hamiconfig.Cluster``), ``workload`` (a strategic merge patch), or
    ``step``, which ``hamiconfig`` combines with other keys."""
    to: str = ""
    """Destination, for people; empty: the first place."""
    kind: Kind = TEXT
    convert: Callable[[Any], Any] | None = None
    default: Any = ...
    """Value in HAMi's chart; ``...``: the chart has no such line."""
    keeps: tuple[Any, ...] = ()
    """Values that leave this project's own value in force."""


class Refused(NamedTuple):
    """A key whose effect cannot be carried, unless it has a harmless value."""

    why: str
    fix: str
    is_harmless: Callable[[Any], bool] = lambda value: not value
    default: Any = ...


class NoEffect(NamedTuple):
    """A key that changes nothing in the rendered installation, and the reason."""

    why: str
    default: Any = ...


Rule = Carried | Refused | NoEffect
Table = Mapping[str, Rule]


def destination(rule: Carried) -> str:
    """Return where the value goes, for people."""
    if rule.to:
        return rule.to
    first, _, rest = rule.places[0].partition(".")
    if first == "vendors":
        return f"`vendors.{rest}` of every service"
    if first == "devices":
        return f"`{rest}` of a rule in `devices.toml`"
    return f"`{rest}` of the {first}"


def _only_log_flags(value: object) -> bool:
    return not value or (
        isinstance(value, list) and all(_LOG_FLAG.fullmatch(str(one)) for one in value)
    )


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"


def _name(vendor: str, field: str, default: Any = ...) -> Carried:  # noqa: ANN401 - a chart value
    return Carried((f"vendors.{vendor}.{field}",), default=default)


def _names(vendor: str, **fields: str) -> dict[str, Rule]:
    return {key: _name(vendor, field) for key, field in fields.items()}


_OVERLAY_IMAGE: Final = "Images of this project are set under `images` in the overlay."
_OWN_SIZE: Final = "The processes of this project have requests and limits of their own."
_NO_SERVICE: Final = (
    "kube-scheduler calls the extender on the loopback of their pod, and metrics are scraped from "
    "pods: `components/prometheus`."
)
_CERTIFICATES: Final = "`components/self-signed` or `components/cert-manager` issues certificates."
_NOT_IN_CHART: Final = "No template of HAMi's chart reads the key."
_LEFT_TO_TOLERATIONS: Final = "The agents tolerate every taint."
_NO_FLAGS: Final = "These are flags of HAMi's program; only flags for logging have no effect."
_SET_EACH: Final = "set what each flag means in this project's settings (docs/settings.md)"
_REPLACED_URL: Final = "Read with `customURL.enabled` only, which is refused."
_PER_NODE: Final = "Agents of one DaemonSet have one value."
_SEPARATE: Final = "run the agents of this node from a DaemonSet of their own, with this setting"


def _image(prefix: str, *, registry: str, repository: str, tag: str = "") -> dict[str, Rule]:
    defaults = {
        "registry": registry,
        "repository": repository,
        "tag": tag,
        "pullPolicy": "IfNotPresent",
        "pullSecrets": [],
    }
    return {f"{prefix}.{key}": NoEffect(_OVERLAY_IMAGE, value) for key, value in defaults.items()}


def _with_default(rule: Rule, default: Any) -> Rule:  # noqa: ANN401 - a chart value
    return rule._replace(default=default)


_NVIDIA: dict[str, Rule] = {
    **_names(
        "nvidia",
        resourceCountName="resource_count_name",
        resourceMemoryName="resource_memory_name",
        resourceMemoryPercentageName="resource_memory_percentage_name",
        resourceCoreName="resource_core_name",
        resourcePriorityName="resource_priority_name",
        gpuCorePolicy="core_policy",
    ),
    "runtimeClassName": _name("nvidia", "runtime_class"),
    "deviceSplitCount": Carried(("devices.slots",), kind=COUNT),
    "deviceMemoryScaling": Carried(("devices.memory_scaling",), kind=NUMBER, convert=float),
    "deviceCoreScaling": Carried(("devices.core_scaling",), kind=NUMBER, convert=float),
    "overwriteEnv": Carried(("webhook.policy.hide_devices_from_others",), kind=TRUTH),
    "defaultMemory": Carried(("vendors.nvidia.default_memory_mib",), kind=COUNT),
    "defaultCores": Carried(("vendors.nvidia.default_core_pct",), kind=COUNT),
    "defaultGPUNum": Carried(("vendors.nvidia.default_count",), kind=COUNT),
    "memoryFactor": Carried(("vendors.nvidia.memory_factor",), kind=COUNT),
    "preConfiguredDeviceMemory": Carried(
        ("nodeagent.drivers.nvidia.unified_memory_mib",), kind=COUNT
    ),
    "enableNumaTopology": Carried(("nodeagent.numa_topology",), kind=TRUTH),
    "libCudaLogLevel": Carried(("nodeagent.library_log_level",), kind=COUNT, convert=str),
    "disableCoreLimit": Carried(
        ("vendors.nvidia.core_policy",),
        kind=TRUTH,
        convert=lambda is_off: "disable" if is_off else None,
    ),
    **{
        f"migProfileAllowlist[].{key}": Carried(
            ("step.mig",), "`drivers.nvidia.mig_allowed_profiles` of the nodeagent", LIST
        )
        for key in ("models", "profiles")
    },
}
_TOPOLOGY: Final = Refused(
    "The annotation of a pod requests topology, not a default of the cluster.",
    "annotate pods with hami.io/gpu-scheduler-policy: topology-aware",
    is_harmless=lambda value: not _is_true(value),
)
_SOFT_ASCEND: Final = Carried(
    ("nodeagent.drivers.vendors.ascend.soft_shares",),
    "`drivers.vendors.ascend.soft_shares` of the nodeagent; `false` leaves it as it is",
    kind=TRUTH,
    convert=lambda is_soft: True if is_soft else None,
)
_CHIP_NAME: Final = NoEffect("Chips are recognized by `commonWord`.")
_FACTOR: Final = Refused(
    "Sizes of this vendor are in MiB.",
    "write memory in MiB, in the chip and in pods",
    is_harmless=lambda value: value in (0, 1, None),
)

DEVICE_CONFIG: Final[dict[str, Rule]] = {
    **{f"nvidia.{key}": rule for key, rule in _NVIDIA.items()},
    **{
        f"{section}.{key}": rule
        for section in ("cambricon", "hygon", "mthreads")
        for key, rule in _names(
            section,
            resourceCountName="resource_count_name",
            resourceMemoryName="resource_memory_name",
            resourceCoreName="resource_core_name",
        ).items()
    },
    "hygon.memoryFactor": Carried(("vendors.hygon.memory_factor",), kind=COUNT),
    "metax.resourceCountName": _name("metax", "resource_count_name"),
    "metax.resourceVCountName": _name("metax", "resource_v_count_name"),
    "metax.resourceVMemoryName": _name("metax", "resource_v_memory_name"),
    "metax.resourceVCoreName": _name("metax", "resource_v_core_name"),
    "metax.sgpuTopologyAware": _TOPOLOGY,
    "enflame.resourceNameGCU": _name("enflame", "resource_gcu_name"),
    "enflame.resourceNameDRSGCU": _name("enflame", "resource_drs_name"),
    "enflame.resourceNameGCUMemory": _name("enflame", "resource_memory_name"),
    "enflame.resourceNameGCUCore": _name("enflame", "resource_core_name"),
    "enflame.resourceNameVGCU": _name("enflame", "resource_vgcu_name"),
    "enflame.resourceNameVGCUPercentage": _name("enflame", "resource_vgcu_percentage_name"),
    "kunlun.resourceCountName": _name("kunlunxin", "resource_count_name"),
    "kunlun.resourceVCountName": _name("kunlunxin", "resource_v_count_name"),
    "kunlun.resourceVMemoryName": _name("kunlunxin", "resource_v_memory_name"),
    "awsneuron.resourceCountName": _name("awsneuron", "resource_count_name"),
    "awsneuron.resourceCoreName": _name("awsneuron", "resource_core_name"),
    "amd.resourceCountName": _name("amd", "resource_count_name"),
    "amd.resourceMemoryName": _name("amd", "resource_memory_name"),
    "amd.resourceCoreName": _name("amd", "resource_core_name"),
    "vastai.resourceCountName": _name("vastai", "resource_count_name"),
    "biren.resourceCountName": _name("biren", "resource_count_name"),
    "iluvatars[].chipName": _CHIP_NAME,
    **{
        f"iluvatars[].{key}": Carried(
            (f"step.iluvatar.{field}",), f"`vendors.iluvatar.chips[].{field}` of every service"
        )
        for key, field in (
            ("commonWord", "word"),
            ("resourceCountName", "resource_count_name"),
            ("resourceMemoryName", "resource_memory_name"),
            ("resourceCoreName", "resource_core_name"),
        )
    },
    "vnpus.hamiVnpuCore": _SOFT_ASCEND,
    "vnpus.configs[].chipName": _CHIP_NAME,
    **{
        f"vnpus.configs[].{key}": Carried(
            (f"step.ascend.{field}",), f"`vendors.ascend.chips[].{field}` of every service", kind
        )
        for key, field, kind in (
            ("commonWord", "word", TEXT),
            ("resourceName", "resource_name", TEXT),
            ("resourceMemoryName", "resource_memory_name", TEXT),
            ("resourceCoreName", "resource_core_name", TEXT),
            ("memoryAllocatable", "memory_allocatable_mib", COUNT),
            ("memoryCapacity", "memory_capacity_mib", COUNT),
            ("aiCore", "ai_core", COUNT),
            ("aiCPU", "ai_cpu", COUNT),
            ("superPod", "super_pod", TRUTH),
            ("templates[].name", "templates[].name", TEXT),
            ("templates[].memory", "templates[].memory_mib", COUNT),
            ("templates[].aiCore", "templates[].ai_core", COUNT),
            ("templates[].aiCPU", "templates[].ai_cpu", COUNT),
        )
    },
    "vnpus.configs[].memoryFactor": _FACTOR,
    "vnpus.configs[].runtimeClassName": Carried(
        ("step.ascend.runtime_class",),
        "`vendors.ascend.runtime_class` of every service, where all chips have the same",
    ),
    "vnpus.configs[].overwriteEnv": Carried(
        ("step.ascend.hide",),
        "`policy.hide_devices_from_others` of the webhook, for all devices",
        TRUTH,
    ),
}
"""``device-config.yaml``."""

NODE_CONFIG: Final[dict[str, Rule]] = {
    "name": Carried(("step.node",), "`nodes` of a rule in `devices.toml`"),
    "operatingmode": Carried(
        ("step.node",),
        "`mig`: `drivers.nvidia.mig_mode` of the nodeagent; `mps` is refused",
    ),
    "devicesplitcount": Carried(("step.node",), "`slots` of the rule", COUNT),
    "devicememoryscaling": Carried(("step.node",), "`memory_scaling` of the rule", NUMBER),
    "devicecorescaling": Carried(("step.node",), "`core_scaling` of the rule", NUMBER),
    "filterdevices.uuid": Carried(("step.node",), "a rule with `uuids` and `hidden`", LIST),
    "filterdevices.index": Carried(("step.node",), "a rule with `indexes` and `hidden`", LIST),
    "preconfigureddevicememory": Refused(
        _PER_NODE, f"{_SEPARATE} drivers.nvidia.unified_memory_mib"
    ),
    "enablenumatopology": Refused(_PER_NODE, f"{_SEPARATE} numa_topology"),
    "libcudaloglevel": Refused(_PER_NODE, f"{_SEPARATE} library_log_level"),
    "migstrategy": NoEffect("HAMi does not use the key."),
    "enablegetpreferredallocation": NoEffect(
        "The agent identifies the pod of each call, whatever replicas kubelet selects."
    ),
}
"""One node of ``config.json``."""


def _enabled(vendor: str, *, default: bool) -> Carried:
    return Carried(
        (f"step.enabled.{vendor}",),
        f"`false`: `{vendor}` in `vendors.ignored` of every service, and no agents of this vendor",
        TRUTH,
        default=default,
    )


def _resources(vendor: str, *names: str) -> Carried:
    return Carried(
        (f"step.managed.{vendor}",),
        "names that the chart does not list: `managedResources` of kube-scheduler's extender",
        LIST,
        default=list(names),
    )


def _ascend_names() -> list[str]:
    words = ("910A", "910B2", "910B3", "910B4", "910B4-1", "310P", "910C")
    return [f"huawei.com/Ascend{word}{part}" for word in words for part in ("", "-memory", "-core")]


def _iluvatar_names() -> list[str]:
    words = ("BI-V100", "BI-V150", "MR-V100", "MR-V50")
    return [f"iluvatar.ai/{word}{part}" for word in words for part in ("-vgpu", ".vCore", ".vMem")]


_POD: Final = "spec.template.spec"
_CONTROL: Final = "pods of the scheduler, webhook and registry"

VALUES: Final[dict[str, Rule]] = {
    # --- global ----------------------------------------------------------------------------------
    "global.imageRegistry": NoEffect(_OVERLAY_IMAGE, ""),
    "global.imagePullSecrets": NoEffect(
        "The Secrets are in HAMi's namespace; set `imagePullSecrets` in the overlay.", []
    ),
    "global.imageTag": NoEffect(_OVERLAY_IMAGE, "v2.10.0"),
    "global.gpuHookPath": NoEffect("The limiter is in `/var/lib/hami` of each node.", "/usr/local"),
    "global.labels": Carried(
        ("workload.scheduler.metadata.labels", "workload.agents.metadata.labels"),
        "labels of the Deployment `hami-scheduler` and of the agents' DaemonSets",
        MAPPING,
        default={},
    ),
    "global.annotations": Carried(
        ("workload.scheduler.metadata.annotations", "workload.agents.metadata.annotations"),
        "annotations of the Deployment `hami-scheduler` and of the agents' DaemonSets",
        MAPPING,
        default={},
    ),
    "global.managedNodeSelectorEnable": NoEffect(
        "HAMi reads the variables nowhere.", default=False
    ),
    "global.managedNodeSelector.usage": NoEffect("HAMi reads the variables nowhere.", "gpu"),
    "global.managedNodeSelector": NoEffect("HAMi reads the variables nowhere."),
    "nameOverride": NoEffect("It names objects of HAMi; see `components/hami-take-over`.", ""),
    "fullnameOverride": NoEffect("It names objects of HAMi; see `components/hami-take-over`.", ""),
    "namespaceOverride": NoEffect(
        "It places objects of HAMi; see `components/hami-take-over`.", ""
    ),
    # --- resource names --------------------------------------------------------------------------
    "resourceName": _name("nvidia", "resource_count_name", "nvidia.com/gpu"),
    "resourceMem": _name("nvidia", "resource_memory_name", "nvidia.com/gpumem"),
    "resourceMemPercentage": _name(
        "nvidia", "resource_memory_percentage_name", "nvidia.com/gpumem-percentage"
    ),
    "resourceCores": _name("nvidia", "resource_core_name", "nvidia.com/gpucores"),
    "resourcePriority": _name("nvidia", "resource_priority_name", "nvidia.com/priority"),
    "mluResourceName": _name("cambricon", "resource_count_name", "cambricon.com/vmlu"),
    "mluResourceMem": _name("cambricon", "resource_memory_name", "cambricon.com/mlu.smlu.vmemory"),
    "mluResourceCores": _name("cambricon", "resource_core_name", "cambricon.com/mlu.smlu.vcore"),
    "dcuResourceName": _name("hygon", "resource_count_name", "hygon.com/dcunum"),
    "dcuResourceMem": _name("hygon", "resource_memory_name", "hygon.com/dcumem"),
    "dcuResourceCores": _name("hygon", "resource_core_name", "hygon.com/dcucores"),
    "metaxResourceName": _name("metax", "resource_v_count_name", "metax-tech.com/sgpu"),
    "metaxResourceCore": _name("metax", "resource_v_core_name", "metax-tech.com/vcore"),
    "metaxResourceMem": _name("metax", "resource_v_memory_name", "metax-tech.com/vmemory"),
    "metaxsGPUTopologyAware": _with_default(_TOPOLOGY, "false"),
    "enflameResourceNameDRSGCU": _name("enflame", "resource_drs_name", "enflame.com/drs-gcu"),
    "enflameResourceNameGCUMemory": _name(
        "enflame", "resource_memory_name", "enflame.com/gcu-memory"
    ),
    "enflameResourceNameGCUCore": _name("enflame", "resource_core_name", "enflame.com/gcu-core"),
    "kunlunResourceName": _name("kunlunxin", "resource_count_name", "kunlunxin.com/xpu"),
    "kunlunResourceVCountName": _name("kunlunxin", "resource_v_count_name", "kunlunxin.com/vxpu"),
    "kunlunResourceVMemoryName": _name(
        "kunlunxin", "resource_v_memory_name", "kunlunxin.com/vxpu-memory"
    ),
    "vastaiResourceName": _name("vastai", "resource_count_name", "vastaitech.com/va"),
    "birenResourceName": _name("biren", "resource_count_name", "birentech.com/gpu"),
    # --- scheduler -------------------------------------------------------------------------------
    "schedulerName": Carried(
        ("webhook.policy.scheduler_name", "cluster.scheduler_name"),
        "`policy.scheduler_name` of the webhook, kube-scheduler's profile, admission policies",
        default="hami-scheduler",
    ),
    "podSecurityPolicy.enabled": NoEffect(
        "Kubernetes 1.25 removed PodSecurityPolicies.", default=False
    ),
    "scheduler.nodeName": Carried(
        (f"workload.scheduler.{_POD}.nodeName",),
        "`nodeName` of the scheduler's pods",
        default="",
    ),
    "scheduler.nodeLabelSelector": Carried(
        ("step.node_labels",),
        "`nodeSelector` of all agents, without the labels of `nvidiaNodeSelector`, which migrated "
        "nodes lose",
        MAPPING,
    ),
    "scheduler.overwriteEnv": Carried(
        ("webhook.policy.hide_devices_from_others",),
        kind=Kind("true or false", (bool, str), ("true", "false")),
        convert=_is_true,
        default="false",
    ),
    "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy": Carried(
        ("scheduler.policy.node",),
        kind=Kind("a policy", (str,), get_args(NodePolicy)),
        default="binpack",
    ),
    "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy": Carried(
        ("scheduler.policy.device",), convert=_words, default="spread"
    ),
    "scheduler.metricsBindAddress": NoEffect(
        "Metrics of the scheduler are on the container port `probes`, 9395.", ":9395"
    ),
    "scheduler.forceOverwriteDefaultScheduler": Carried(
        ("webhook.policy.overwrite_default_scheduler",), kind=TRUTH, default=True
    ),
    "scheduler.livenessProbe": NoEffect("All containers have probes.", default=False),
    "scheduler.leaderElect": Carried(
        ("step.leader_elect",),
        "`leaderElection` of kube-scheduler; `false` also sets one replica of the scheduler",
        TRUTH,
        default=True,
    ),
    "scheduler.replicas": Carried(
        ("step.replicas",),
        "replicas of the scheduler; HAMi's 1 leaves the two of this project",
        COUNT,
        default=1,
    ),
    "scheduler.kubeScheduler.enabled": Refused(
        "The extender serves only the kube-scheduler of its own pod.",
        "put your profile into the overlay's kube-scheduler.yaml",
        is_harmless=lambda value: value is not False,
        default=True,
    ),
    **_image(
        "scheduler.kubeScheduler.image",
        registry="registry.cn-hangzhou.aliyuncs.com",
        repository="google_containers/kube-scheduler",
    ),
    "scheduler.kubeScheduler.resources": Carried(
        ("cluster.kube_scheduler_resources",),
        "`resources` of the container `kube-scheduler`",
        MAPPING,
        default={},
    ),
    "scheduler.kubeScheduler.extraNewArgs": Carried(
        ("cluster.kube_scheduler_args",),
        "arguments of `kube-scheduler`, except `--config`; HAMi's default changes nothing",
        LIST,
        lambda flags: [str(one) for one in flags if not str(one).startswith("--config")],
        default=["--config=/config/config.yaml", "-v=4"],
        keeps=(["--config=/config/config.yaml", "-v=4"],),
    ),
    "scheduler.kubeScheduler.extraArgs": NoEffect(
        "They are for Kubernetes before 1.22.", ["--policy-config-file=/config/config.json", "-v=4"]
    ),
    **_image("scheduler.extender.image", registry="docker.io", repository="projecthami/hami"),
    "scheduler.extender.resources": NoEffect(_OWN_SIZE, {}),
    "scheduler.extender.extraArgs": Refused(
        _NO_FLAGS, _SET_EACH, is_harmless=_only_log_flags, default=["--debug", "-v=4"]
    ),
    "scheduler.nodeLockExpire": NoEffect("HAMi ignores the key, and there is no node lock.", "5m"),
    "scheduler.podAnnotations": Carried(
        ("workload.scheduler.spec.template.metadata.annotations",),
        "annotations of the scheduler's pods",
        MAPPING,
        default={},
    ),
    "scheduler.tolerations": Carried(
        (f"workload.control.{_POD}.tolerations",),
        f"`tolerations` of the {_CONTROL}",
        LIST,
        default=[],
    ),
    "scheduler.nodeSelector": Carried(
        (f"workload.control.{_POD}.nodeSelector",), f"`nodeSelector` of the {_CONTROL}", MAPPING
    ),
    # --- admission -------------------------------------------------------------------------------
    "scheduler.admissionWebhook.enabled": Refused(
        "Without the webhook, shares have no limits.",
        "exempt namespaces with whitelistNamespaces or the label hami.io/webhook=ignore",
        is_harmless=lambda value: value is not False,
        default=True,
    ),
    "scheduler.admissionWebhook.customURL.enabled": Refused(
        "The certificate of the webhook names its Service only.",
        "render the configuration: python -m hami_webhook --render-configuration --url",
        default=False,
    ),
    "scheduler.admissionWebhook.customURL.host": NoEffect(_REPLACED_URL, "127.0.0.1"),
    "scheduler.admissionWebhook.customURL.port": NoEffect(_REPLACED_URL, 31998),
    "scheduler.admissionWebhook.customURL.path": NoEffect(_REPLACED_URL, "/webhook"),
    "scheduler.admissionWebhook.whitelistNamespaces": Carried(
        ("cluster.exempt_namespaces",),
        "`namespaceSelector` of the webhook for new pods, and of the policies that hold with it",
        LIST,
        default=None,
    ),
    "scheduler.admissionWebhook.manageNamespaceSelector": Carried(
        ("cluster.selects_namespaces",),
        "`false`: the webhook configuration has no `namespaceSelector`",
        TRUTH,
        default=True,
    ),
    "scheduler.admissionWebhook.namespaceSelector.matchLabels": Carried(
        ("cluster.namespace_labels",),
        "`namespaceSelector` of the webhook for new pods, and of the policies that hold with it",
        MAPPING,
        default=None,
    ),
    "scheduler.admissionWebhook.namespaceSelector.matchExpressions": Carried(
        ("cluster.namespace_expressions",),
        "`namespaceSelector` of the webhook for new pods, and of the policies that hold with it",
        LIST,
        default=[],
    ),
    "scheduler.admissionWebhook.objectSelector.matchLabels": Carried(
        ("cluster.object_labels",), "`objectSelector` of the webhook for new pods", MAPPING
    ),
    "scheduler.admissionWebhook.objectSelector.matchExpressions": Carried(
        ("cluster.object_expressions",),
        "`objectSelector` of the webhook for new pods",
        LIST,
        default=[],
    ),
    "scheduler.admissionWebhook.reinvocationPolicy": NoEffect(
        "It is always `IfNeeded`, so that injected containers are seen.", "Never"
    ),
    "scheduler.admissionWebhook.failurePolicy": NoEffect(
        "It is always `Fail`, for pods that request devices only: none runs without limits.",
        "Ignore",
    ),
    "scheduler.certManager.enabled": Refused(
        "The overlay selects who issues certificates.",
        "list components/cert-manager in place of components/self-signed",
        default=False,
    ),
    "scheduler.patch.enabled": NoEffect(_CERTIFICATES, default=True),
    **_image(
        "scheduler.patch.image",
        registry="docker.io",
        repository="jettech/kube-webhook-certgen",
        tag="v1.5.2",
    ),
    **_image(
        "scheduler.patch.imageNew",
        registry="docker.io",
        repository="liangjw/kube-webhook-certgen",
        tag="v1.1.1",
    ),
    "scheduler.patch.priorityClassName": NoEffect(_CERTIFICATES, ""),
    "scheduler.patch.podAnnotations": NoEffect(_CERTIFICATES, {}),
    "scheduler.patch.nodeSelector": NoEffect(_CERTIFICATES, {}),
    "scheduler.patch.tolerations": NoEffect(_CERTIFICATES, []),
    "scheduler.patch.runAsUser": NoEffect(_CERTIFICATES, 2000),
    **{
        f"scheduler.service.{key}": NoEffect(_NO_SERVICE, default)
        for key, default in (
            ("type", "NodePort"),
            ("httpPort", 443),
            ("schedulerPort", 31998),
            ("httpTargetPort", 443),
            ("monitorPort", 31993),
            ("monitorTargetPort", 9395),
            ("labels", {}),
            ("annotations", {}),
        )
    },
    # --- device plugin ---------------------------------------------------------------------------
    "devicePlugin.enabled": Carried(
        ("cluster.nvidia_agents",), "`false`: no NVIDIA agents", TRUTH, default=True
    ),
    "devicePlugin.gpuOperatorToolkitReady.enabled": Carried(
        ("step.toolkit.enabled",),
        "init container `toolkit-ready` of the NVIDIA agents",
        TRUTH,
        default=False,
    ),
    "devicePlugin.gpuOperatorToolkitReady.hostPath": Carried(
        ("step.toolkit.path",),
        "host path of the init container `toolkit-ready`, if enabled",
        default="/run/nvidia/validations",
    ),
    "devicePlugin.gpuOperatorToolkitReady.securityContext.privileged": NoEffect(
        "The init container needs no privileges.", default=True
    ),
    "devicePlugin.gpuOperatorToolkitReady.securityContext.runAsUser": NoEffect(
        "The init container runs as root without capabilities.", 0
    ),
    **_image("devicePlugin.image", registry="docker.io", repository="projecthami/hami"),
    **_image("devicePlugin.monitor.image", registry="docker.io", repository="projecthami/hami"),
    "devicePlugin.monitor.ctrPath": NoEffect(
        "Usage regions are in volumes of the pods.", "/usr/local/vgpu/containers"
    ),
    "devicePlugin.monitor.resyncInterval": NoEffect("The agent watches pods.", "5m"),
    "devicePlugin.monitor.extraArgs": Refused(
        _NO_FLAGS, _SET_EACH, is_harmless=_only_log_flags, default=["-v=4"]
    ),
    "devicePlugin.monitor.extraEnvs": Carried(
        ("step.env.monitor",), "`env` of the NVIDIA agents", LIST, default={}, keeps=({},)
    ),
    "devicePlugin.monitor.securityContext.allowPrivilegeEscalation": NoEffect(
        "The agent has the capabilities that it needs, by name.", default=False
    ),
    "devicePlugin.monitor.securityContext.capabilities.drop": NoEffect(
        "The agent has the capabilities that it needs, by name.", ["ALL"]
    ),
    "devicePlugin.monitor.securityContext.capabilities.add": NoEffect(
        "The agent has the capabilities that it needs, by name.", ["SYS_ADMIN"]
    ),
    "devicePlugin.monitor.resources": NoEffect(_OWN_SIZE, {}),
    "devicePlugin.deviceSplitCount": _with_default(_NVIDIA["deviceSplitCount"], 10),
    "devicePlugin.deviceMemoryScaling": _with_default(_NVIDIA["deviceMemoryScaling"], 1),
    "devicePlugin.deviceCoreScaling": _with_default(_NVIDIA["deviceCoreScaling"], 1),
    "devicePlugin.enableNumaTopology": _with_default(_NVIDIA["enableNumaTopology"], default=False),
    "devicePlugin.preConfiguredDeviceMemory": _with_default(
        _NVIDIA["preConfiguredDeviceMemory"], 0
    ),
    "devicePlugin.nodeConfiguration.config": Carried(
        ("step.document",),
        "read as `--node-config`",
        default=f'{{"nodeconfig": [{{"name": "{SAMPLE_NODE}", "operatingmode": "hami-core"}}]}}',
    ),
    "devicePlugin.nodeConfiguration.externalConfigName": Refused(
        "The configuration of nodes is in a ConfigMap of yours.",
        "read the ConfigMap, and give its file as --node-config",
        default="",
    ),
    "devicePlugin.runtimeClassName": Carried(
        (
            "vendors.nvidia.runtime_class",
            f"workload.agent.{_POD}.runtimeClassName",
            "step.runtime_class",
        ),
        "`vendors.nvidia.runtime_class` of every service, `runtimeClassName` of the NVIDIA agents",
        default="",
    ),
    "devicePlugin.createRuntimeClass": Carried(
        ("step.creates_runtime_class",),
        "a RuntimeClass with the handler `nvidia`, if `runtimeClassName` is set",
        TRUTH,
        default=False,
    ),
    "devicePlugin.migStrategy": NoEffect(
        "MIG instances are created on demand, and `nvidia.com/mig-*` resources exist.", "none"
    ),
    "devicePlugin.disablecorelimit": NoEffect(
        "HAMi ignores the key; `gpuCorePolicy: disable` disables the limit.", "false"
    ),
    "devicePlugin.passDeviceSpecsEnabled": Carried(
        ("step.injection.specs",),
        "`injection` of the nodeagent, `policy.injection` of the webhook: `devices`, except with "
        "a CDI strategy",
        TRUTH,
        default=False,
    ),
    "devicePlugin.deviceListStrategy": Carried(
        ("step.injection.strategy",),
        "`injection` of the nodeagent, `policy.injection` of the webhook: `envvar` is `env`, "
        "`cdi-cri` and `cdi-annotations` are `cdi`; without `cdi` the component "
        "`nvidia-without-cdi` is included",
        Kind("a strategy", (str,), ("envvar", "cdi-cri", "cdi-annotations")),
        default="envvar",
    ),
    "devicePlugin.nvidiaHookPath": NoEffect(
        "NVIDIA's toolkit writes the CDI specifications of devices.", None
    ),
    "devicePlugin.nvidiaDriverRoot": Carried(
        ("step.driver_root",),
        "a volume of the NVIDIA agents, and `drivers.nvidia.library_path` of the nodeagent",
        default=None,
        keeps=("/",),
    ),
    **{
        f"devicePlugin.{feature}Enabled": Carried(
            (f"step.features.{feature}",),
            f"`{feature}` in `vendors.nvidia.features` of every service",
            TRUTH,
            default=None,
        )
        for feature in ("gdrcopy", "gds", "mofed")
    },
    "devicePlugin.extraArgs": Refused(
        _NO_FLAGS, _SET_EACH, is_harmless=_only_log_flags, default=["-v=4"]
    ),
    "devicePlugin.extraEnvs": Carried(
        ("step.env.plugin",), "`env` of the NVIDIA agents", LIST, default={}, keeps=({},)
    ),
    **{
        f"devicePlugin.service.{key}": NoEffect(
            "Metrics of the agents are scraped from pods: `components/prometheus`.", default
        )
        for key, default in (
            ("type", "NodePort"),
            ("httpPort", 31992),
            ("labels", {}),
            ("annotations", {}),
        )
    },
    "devicePlugin.pluginPath": Carried(
        ("step.plugin_path",),
        "host paths of kubelet in all agents",
        default="/var/lib/kubelet/device-plugins",
    ),
    "devicePlugin.libPath": NoEffect(
        "The limiter is in `/var/lib/hami` of each node.", "/usr/local/vgpu"
    ),
    "devicePlugin.podAnnotations": Carried(
        ("workload.agent.spec.template.metadata.annotations",),
        "annotations of the NVIDIA agents' pods",
        MAPPING,
        default={},
    ),
    "devicePlugin.hostPID": Refused(
        "The agent maps process IDs that the driver reports to pods.",
        "leave the key out",
        is_harmless=lambda value: value is not False,
        default=True,
    ),
    "devicePlugin.hostNetwork": Carried(
        (f"workload.agent.{_POD}.hostNetwork", "step.host_network"),
        "`hostNetwork` of the NVIDIA agents",
        TRUTH,
        default=False,
        keeps=(False,),
    ),
    **{
        f"devicePlugin.securityContext.{key}": NoEffect(
            "The agent has the capabilities that it needs, by name.", default
        )
        for key, default in (
            ("privileged", True),
            ("allowPrivilegeEscalation", True),
            ("capabilities.drop", ["ALL"]),
            ("capabilities.add", ["SYS_ADMIN"]),
        )
    },
    **{
        f"devicePlugin.{part}securityContext": NoEffect(
            "The agent has the capabilities that it needs, by name."
        )
        for part in ("", "monitor.", "gpuOperatorToolkitReady.")
    },
    "devicePlugin.nvidiaNodeSelector.gpu": NoEffect(
        "Agents run on nodes with `hami.io/nvidia=true`, which `hamictl migrate node` sets.", "on"
    ),
    "devicePlugin.nvidiaNodeSelector": NoEffect(
        "Agents run on nodes with `hami.io/nvidia=true`; give the label of HAMi's nodes to "
        "`hamictl migrate node` as `--node-label`."
    ),
    "devicePlugin.tolerations": NoEffect(_LEFT_TO_TOLERATIONS, []),
    "devicePlugin.updateStrategy.type": Carried(
        ("step.update.type",),
        "`updateStrategy` of the NVIDIA agents",
        Kind("a strategy", (str,), ("RollingUpdate", "OnDelete")),
        default="RollingUpdate",
    ),
    "devicePlugin.updateStrategy.rollingUpdate.maxUnavailable": Carried(
        ("step.update.most",),
        "`maxSurge` of the NVIDIA agents, of which no node is without one; HAMi's 1 leaves 10%",
        AMOUNT,
        default=1,
    ),
    "devicePlugin.resources": NoEffect(_OWN_SIZE, {}),
    "mockDevicePlugin.enabled": Refused(
        "This project advertises only counts to kubelet.",
        "read amounts from the metrics or the registry",
        default=False,
    ),
    **_image(
        "mockDevicePlugin.image",
        registry="docker.io",
        repository="projecthami/mock-device-plugin",
        tag="1.0.1",
    ),
    # --- vendors ---------------------------------------------------------------------------------
    "devices.amd.customresources": _resources(
        "amd", "amd.com/gpu", "amd.com/gpumem", "amd.com/gpucores"
    ),
    "devices.awsneuron.customresources": _resources(
        awsneuron.NAME, "aws.amazon.com/neuron", "aws.amazon.com/neuroncore"
    ),
    "devices.kunlun.enabled": _enabled("kunlunxin", default=True),
    "devices.kunlun.customresources": _resources(
        "kunlunxin", "kunlunxin.com/xpu", "kunlunxin.com/vxpu", "kunlunxin.com/vxpu-memory"
    ),
    "devices.enflame.enabled": _enabled("enflame", default=True),
    "devices.enflame.customresources": _resources(
        "enflame",
        "enflame.com/drs-gcu",
        "enflame.com/gcu-memory",
        "enflame.com/gcu-core",
        "enflame.com/gcu",
    ),
    "devices.mthreads.enabled": _enabled("mthreads", default=True),
    "devices.mthreads.customresources": _resources("mthreads", "mthreads.com/vgpu"),
    "devices.vastai.enabled": _enabled("vastai", default=True),
    "devices.vastai.customresources": _resources("vastai", "vastaitech.com/va"),
    "devices.biren.enabled": _enabled("biren", default=True),
    "devices.biren.customresources": _resources("biren", "birentech.com/gpu"),
    "devices.nvidia.gpuCorePolicy": _with_default(_NVIDIA["gpuCorePolicy"], "default"),
    "devices.nvidia.libCudaLogLevel": _with_default(_NVIDIA["libCudaLogLevel"], 1),
    "devices.ascend.enabled": _enabled("ascend", default=False),
    "devices.ascend.image": NoEffect(_NOT_IN_CHART, ""),
    "devices.ascend.imagePullPolicy": NoEffect(_NOT_IN_CHART, "IfNotPresent"),
    "devices.ascend.extraArgs": NoEffect(_NOT_IN_CHART, []),
    "devices.ascend.nodeSelector.ascend": NoEffect(_NOT_IN_CHART, "on"),
    "devices.ascend.nodeSelector": NoEffect(_NOT_IN_CHART),
    "devices.ascend.tolerations": NoEffect(_NOT_IN_CHART, []),
    "devices.ascend.runtimeClassName": Carried(("vendors.ascend.runtime_class",), default=""),
    "devices.ascend.hamiVnpuCore": _with_default(_SOFT_ASCEND, default=False),
    "devices.ascend.customresources": _resources("ascend", *_ascend_names()),
    "devices.iluvatar.enabled": _enabled("iluvatar", default=False),
    "devices.iluvatar.customresources": _resources("iluvatar", *_iluvatar_names()),
    # --- metrics and documents -------------------------------------------------------------------
    "legacyMetrics": Carried(
        ("scheduler.metric_names", "nodeagent.metric_names"),
        "`legacy` in `metric_names` of scheduler and nodeagent",
        TRUTH,
        lambda is_on: ["hami", "legacy"] if is_on else None,
        default=False,
    ),
    "prometheus.enabled": Carried(
        ("cluster.monitors",), "`components/prometheus-operator`", TRUTH, default=False
    ),
    "device-config.content": Carried(("step.document",), "read as `--device-config`", default=""),
}
"""``values.yaml`` of the chart."""


def chart_defaults() -> dict[str, Any]:
    """Return the values of HAMi's chart as a tree."""
    tree: dict[str, Any] = {}
    for key, rule in VALUES.items():
        if rule.default is ...:
            continue
        *path, last = key.split(".")
        here = tree
        for name in path:
            here = here.setdefault(name, {})
        here[last] = rule.default
    return tree
