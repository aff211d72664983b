# SPDX-License-Identifier: Apache-2.0
"""Settings of the node agent; every duration is in seconds, with the unit in its name.

The defaults are those of a DaemonSet on a usual Linux node. Loaded from file, environment and flags
by ``hami_common.runtime.settings``.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from hami_common.events.breach import BreachAction
from hami_common.metrics.families import NameSet
from hami_common.runtime.settings import ServiceSettings
from hami_common.vendors.protocol import InjectionMode
from hami_nodeagent.core.breach import BreachRules
from hami_nodeagent.core.cgroups import OwnersBy
from hami_nodeagent.core.foreign import ForeignRules
from hami_nodeagent.core.health import HealthRules
from hami_nodeagent.core.holders import Enforcement
from hami_nodeagent.core.recall import RecallRules
from hami_nodeagent.core.thrash import ThrashRules


class NvidiaSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Discovery of this node's NVIDIA devices and their injection into containers."""

    enabled: bool = True
    simulated_profile: str = ""
    """Hardware profile to simulate instead of querying NVML; empty: real devices."""
    simulated_control: str = ""
    """File that controls the simulated devices; see ``drivers.simulated.Control``."""
    simulated_partitions: str = ""
    """File of the simulated devices' partitions; empty: in memory."""
    library_path: str = ""
    """File to load as libnvidia-ml.so.1, or root of the file system in which a driver container has
    it; empty lets the dynamic linker find it."""
    sysfs_root: str = "/sys"
    """Root of the sysfs from which NUMA nodes and the list of bound cards are read."""
    proc_root: str = "/proc"
    """Root of the procfs in which the driver lists the device nodes of MIG instances."""
    call_deadline_s: float = 5.0
    """Timeout of one NVML call, after which its device counts as hung."""
    partition_deadline_s: float = 60.0
    """The same for reading, creating and removing MIG instances."""
    mig_mode: dict[str, Literal["on", "off"]] = {}
    """Cards whose MIG mode the agent enables or disables while they are idle: by UUID or
    ``<node>/<index>``, with ``*`` and ``?``; the last matching line counts. The mode of all other
    cards is left alone."""
    mig_allowed_profiles: dict[str, tuple[str, ...]] = {}
    """MIG profiles that may be chosen by size, by model: names as NVML writes them, with ``*`` and
    ``?``. A model is whole words of the device type, such as ``A100-SXM4-40GB``; the longest that
    matches counts. Cards that no model matches use all profiles that differ only in size."""
    sharing: dict[str, Literal["hook", "timeslice", "mps"]] = {}
    """Modes in which cards without partitions are shared, with keys as in ``mig_mode``; ``hook``
    for all others. A card changes its mode while no container uses it. Pods request the modes
    ``timeslice`` and ``mps`` by name. The agent never sets a card's compute mode."""
    mps_control: str = ""
    """Control daemon of NVIDIA's Multi-Process Service; empty: ``nvidia-cuda-mps-control`` of
    ``PATH``."""
    mps_dir: str = "/run/hami-mps"
    """Host directory of the services' pipes and logs, mounted into the agent under the same path;
    its directory ``shm`` is the agent's ``/dev/shm``."""
    mps_check_s: float = 30.0
    """Interval at which each service is checked, also by a new client."""
    cgroup_root: str = "/sys/fs/cgroup"
    """Mount of the host's cgroup file system, version 2, as the driver names groups. Where the
    driver limits memory per cgroup and the agent may set it, each container gets a limit."""
    reopen_min_s: float = 60.0
    """Minimum interval between two re-initializations of NVML to recover a lost card."""
    unified_memory_mib: int = 0
    """Memory to count for devices that share the host's memory; 0 leaves these devices out."""
    disable_health_checks: str = ""
    """Xids that never make a device unhealthy, ``xids`` for all Xids, ``all`` for probes as
    well."""
    enable_health_checks: str = ""
    """Xids that always make a device unhealthy, ``all`` for every Xid."""


class DriversSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Vendor drivers of the node agent."""

    nvidia: NvidiaSettings = NvidiaSettings()
    serve: tuple[str, ...] = ("detect",)
    """Vendors besides NVIDIA that this node serves: their names, or ``detect`` for vendors whose
    hardware is present at start; empty: none."""
    vendors: dict[str, dict[str, str | float | bool]] = {}
    """Access to devices by vendor name, where it differs from the default (``ToolSettings`` of
    ``drivers.reader``). With ``simulated_profile``, and ``simulated_control``, the vendor's devices
    are simulated, and the vendor is served."""


class UsageSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of usage, and the action on a breach (design D27)."""

    look_s: float = 3.0
    """Longest interval between two samples of regions, devices and processes. Each interval is
    chosen at random between half of this value and the whole, so that no periodic use falls between
    the samples."""
    idle_look_s: float = 5.0
    """The same while samples show no launch and no change of processes or memory. A breach is
    reported after two samples that show it, so within the sum of both intervals."""
    breach: BreachRules = BreachRules()
    foreign: ForeignRules = ForeignRules()
    action: BreachAction = "event"
    """``event`` reports a breach; ``evict`` also evicts the pod, which requires the right to create
    ``pods/eviction``."""
    actions: dict[str, BreachAction] = {}
    """Overrides of ``action`` by namespace."""
    event_s: float = 60.0
    """Interval at which container usage is published; 0: never."""
    owners: OwnersBy = "cgroup"
    """Method to find the pod of a process; ``namespace`` is for the simulated kubelet."""


class PrioritySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publication of active priorities to the containers that share a device (design D31)."""

    directory: str = "/run/hami-priority"
    """Host directory of the priority page, mounted into the agent under the same path."""
    rivals_s: float = 0.025
    """Interval at which the usage regions of containers that may be active are read while
    containers of different priority share a device. Containers also ring when they begin to launch
    and when they are idle."""
    neighbours_s: float = 0.1
    """The same while containers of one priority share a device and one of the node is active. Also
    the interval at which the memory of containers with a memory limit above their request is read,
    and their bounds are granted."""
    idle_s: float = 10.0
    """Interval at which all regions are read, also of containers that declared themselves idle.
    Limits hold meanwhile: a device without active containers counts as not known, and compute is
    enforced."""
    hold_s: float = 0.3
    """Longest time for which a container counts as active after its last launch."""
    lease_s: float = 1.5
    """Validity of the priority page if the agent stops renewing it; renewed every third of it while
    a container is active. Also of memory granted above requests."""
    min_share_pct: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Percent of a device's time that a container still gets after a higher priority has blocked it
    for a second; 0: none."""


class RecallSettings(RecallRules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recall of idle containers' device memory; enabled by the device configuration alone."""

    helper: str = "/usr/lib/hami/hami-recall"
    """Program that makes the driver's checkpoint calls."""


class PartitionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Creation and removal of hardware partitions (design D24)."""

    look_s: float = 30.0
    """Interval at which the hardware is read when no change is pending."""
    retry_s: float = 0.5
    """First delay before a retry; doubles up to ``retry_most_s``."""
    retry_most_s: float = 10.0
    tries: int = 6
    """Attempts after which the agent gives up a share that never had its partition."""
    pre_start_wait_s: float = 15.0
    """Longest wait of ``PreStartContainer`` for a container's partitions; below the 20 s of the
    plugin proxy and the 30 s of kubelet."""
    mode_look_s: float = 2.0
    """Interval between two checks of the cards of ``drivers.nvidia.mig_mode``."""
    mode_settle_s: float = 10.0
    """Time for which a card must have been cordoned before its mode is switched, so that every
    earlier reservation has arrived."""
    mode_again_s: float = 600.0
    """Time for which a card serves pods after a failed mode switch before the next attempt."""
    collect_foreign: bool = False
    """Also remove idle partitions that this agent did not create."""
    cdi_dir: str = "/var/run/cdi"
    """Host directory for the CDI specs of partitions, which the container runtime reads."""


class DraSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices for ResourceClaims, Dynamic Resource Allocation (docs/dra.md).

    All directories are of the host, mounted into the agent under the same paths.
    """

    enabled: bool = False
    """Publish devices as ResourceSlices and prepare claims for kubelet. Requires the component
    ``dra``."""
    registry_dir: str = "/var/lib/kubelet/plugins_registry"
    """Directory in which kubelet finds the registration sockets of plugins."""
    plugin_dir: str = "/var/lib/kubelet/plugins/gpu.hami.io"
    """Directory of the socket at which kubelet asks the agent to prepare claims."""
    cdi_dir: str = "/var/run/cdi"
    """Directory for the CDI specs of claims, which the container runtime reads."""
    region_dir: str = "/run/hami-claims"
    """Directory of the usage regions of claims; on a file system in memory."""
    prepare_wait_s: Annotated[float, Meta(ge=0, le=40)] = 20.0
    """Longest wait of a call of kubelet for the ledger's record of a claim. Kubelet itself waits
    45 s, and retries a refused call."""
    write_s: Annotated[float, Meta(gt=0)] = 1.0
    """Shortest interval between two writes of the node's ResourceSlices."""
    monitor: bool = False
    """Publish one more device, ``monitor``, which gives claims with admin access all devices of the
    node without limits."""
    fault_effect: Literal["NoSchedule", "NoExecute"] = "NoSchedule"
    """Effect of the taint ``gpu.hami.io/unhealthy`` of a faulty device. With ``NoExecute`` the
    kube-controller-manager also deletes the pods whose claims have the device."""


class VnpuCoreSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Location of hami-vnpu-core, the in-container library for soft shares of Ascend chips.

    Host directories, mounted into the agent under the same paths.
    """

    library_dir: str = "/usr/local/hami-vnpu-core"
    """Directory of the library and its ``ld.so.preload``; the agent creates ``containers`` in it,
    with a directory for each container."""
    region_dir: str = "/usr/local/hami-shared-region"
    """Directory in which all containers of the node account for each chip."""


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the node agent beyond those that all services share."""

    HOT: ClassVar[frozenset[str]] = ServiceSettings.HOT | {
        "check_s",
        "heartbeat_s",
        "library_keep_s",
        "priority.idle_s",
        "priority.lease_s",
        "priority.min_share_pct",
        "priority.neighbours_s",
        "priority.rivals_s",
        "recall.idle_s",
        "recall.park_s",
        "recall.retry_s",
        "remember_gone_s",
        "thrash.after_s",
        "thrash.calm_s",
        "thrash.quanta",
        "thrash.quantum_s",
        "thrash.retry_s",
        "thrash.traffic_mib_s",
        "usage.action",
        "usage.actions",
        "usage.look_s",
    }
    node_name: str
    """Name of the Kubernetes node this agent serves; a DaemonSet sets it from ``spec.nodeName``."""
    http_port: int = 9394
    """Port of health and metrics, for metrics the same as HAMi's; 0 lets the kernel choose."""
    metric_names: tuple[NameSet, ...] = ("hami",)
    """Names under which devices and shares are exported, see docs/metrics.md: ``hami``, ``legacy``
    (HAMi's older names), ``volcano`` (the same on a node)."""
    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    """Directory of kubelet's registration socket and of the plugins' sockets."""
    plugin_socket_dir: str = ""
    """Directory in which plugins are served to the plugin proxy (``hami_nodeagent plugin-proxy``),
    which serves kubelet, so that a restart of the agent fails no pod; empty: serve kubelet
    directly."""
    leave_s: float = 0.0
    """Longest time after SIGTERM in which pods that were placed here before still get their
    devices; the scheduler places no more of them meanwhile. 0: stop at once."""
    pod_resources_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    """Kubelet's PodResources socket, which lists pods and their device ids."""
    pod_resources_view: str = ""
    """Socket at which the agent serves the same list with the devices that containers were granted,
    for NVIDIA's DCGM exporter (docs/metrics.md); empty: none."""
    state_dir: str = "/var/lib/hami/agent"
    """Directory of state that survives a restart: grants, last known devices, limits files of pods
    that the webhook did not prepare."""
    trusted_keys_dir: str = "/etc/hami-agent/trusted-keys"
    """PEM public keys (one per file) that may sign allocations; re-read when a file changes."""

    kubelet_pods_url: str = ""
    """Address of kubelet's ``/pods``, such as ``https://127.0.0.1:10250/pods``, used when the
    PodResources socket does not answer; empty: never."""
    kubelet_pods_token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
    """Bearer token for ``kubelet_pods_url``; empty: none."""
    kubelet_pods_ca_file: str = ""
    """PEM bundle for kubelet's certificate; empty: the system's."""

    injection: InjectionMode = "cdi"
    """Device injection into containers: ``cdi``, ``devices`` or ``env`` (design D10)."""
    enforcement: Enforcement = "libvgpu"
    """Enforcement of shares: ``libvgpu`` (shares are refused where the library is missing) or
    ``none``. Containers that hold only whole devices are never limited (design D33)."""
    library: str = "/usr/lib/hami/libvgpu.so"
    """In-container library shipped with this agent."""
    library_dir: str = "/var/lib/hami/libvgpu"
    """Host directory to which the library is installed, mounted into the agent under the same path
    (design D26)."""
    library_keep_s: float = 3600.0
    """Time for which an unused version of the library is kept."""
    host_proc: str = "/proc"
    """The host's ``/proc``: the agent must see all processes to find the versions in use and the
    owners of processes on the devices."""
    host_memory_mib: int = 0
    """The node's memory, which has to hold what is overcommitted on its devices; 0: that of
    ``host_proc``."""
    host_root: str = ""
    """The host's root file system, read by ``hamictl doctor``; empty: ``<host_proc>/1/root``."""
    pods_dir: str = "/var/lib/kubelet/pods"
    """Kubelet's directory of pods, where their volumes are."""
    library_log_level: str = ""
    """``LIBCUDA_LOG_LEVEL`` in containers; empty leaves it unset."""
    advertise_amounts: bool = False
    """Advertise the totals of memory and compute in the status of the node, for schedulers and
    autoscalers that sum resources. Requires the right to patch ``nodes/status``, which the
    component ``advertise-amounts`` gives."""
    volcano_refresh_s: Annotated[float, Meta(ge=0)] = 30.0
    """With ``vendors.nvidia.dialects = ["volcano"]``: interval at which all agents change the
    handshake annotations of their nodes. Volcano 1.14 counts what it allocated in vain until the
    node changes. 0: never, for Volcano from 1.15.1 on."""
    numa_topology: bool = False
    """Report the NUMA node of each id to kubelet. Kubelet's topology manager then selects ids
    itself and may refuse pods whose devices the scheduler has already selected."""
    pre_start: bool = True
    """Have kubelet call the agent before each container start, so that a container with an invalid
    grant is not restarted."""

    allocate_wait_s: float = 2.0
    """Longest wait of an Allocate call for records and pods. Kubelet admits no other pod
    meanwhile."""
    outage_wait_s: float = 15.0
    """The same while the bus or the API server is unavailable, because kubelet fails a pod
    permanently when its allocation is refused. Less than the plugin proxy's ``call_wait_s``."""
    list_timeout_s: float = 1.0
    """Timeout of one PodResources request to kubelet."""
    api_timeout_s: float = 5.0
    """Timeout of one API server request, limited to ``outage_wait_s`` inside a call of kubelet."""
    bus_timeout_s: float = 2.0
    """Timeout of one bus request."""
    kubelet_poll_s: float = 0.05
    """Interval at which kubelet's socket is checked; kubelet re-creates it when it restarts."""
    check_s: float = 10.0
    """Interval at which grants are compared with kubelet's own list."""
    settle_s: float = 30.0
    """Time after which a pod that kubelet lists and the API server does not show no longer counts
    as being admitted."""
    remember_gone_s: float = 60.0
    """Time for which a deleted pod is remembered, because kubelet may list it longer."""
    report_retry_s: float = 0.2
    """First delay before a retry after the bus refused a state or report; grows to ten times this
    value."""

    heartbeat_s: float = 5.0
    """Interval of heartbeats; the scheduler stops using devices after three missed heartbeats."""
    discovery_s: float = 30.0
    """Interval of device discovery without an event of the kernel. Events start it at once."""
    device_dirs: tuple[str, ...] = ("/dev",)
    """Directories in which a new or removed entry starts device discovery; empty: none."""
    discovery_retry_s: float = 5.0
    """Interval of device discovery while the driver is missing."""
    probe_s: float = 5.0
    """Interval at which each device is probed."""
    devices_poll_s: float = 5.0
    """Interval at which the registry's canonical devices are read; four times a second while the
    response to a new report is pending."""
    usage: UsageSettings = UsageSettings()
    priority: PrioritySettings = PrioritySettings()
    recall: RecallSettings = RecallSettings()
    thrash: ThrashRules = ThrashRules()
    partitions: PartitionSettings = PartitionSettings()
    health: HealthRules = HealthRules()
    drivers: DriversSettings = DriversSettings()
    vnpu_core: VnpuCoreSettings = VnpuCoreSettings()
    dra: DraSettings = DraSettings()

    @property
    def core_policy(self) -> str:
        """``vendors.nvidia.core_policy``, as limits files have it: empty for the default."""
        policy = self.vendors.nvidia.core_policy
        return "" if policy == "default" else policy
