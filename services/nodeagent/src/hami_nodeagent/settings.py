# SPDX-License-Identifier: Apache-2.0
"""Settings of the node agent; every duration is in seconds and says so in its name.

The defaults are those of a DaemonSet on a usual Linux node. Loaded from file, environment and flags
by ``hami_common.runtime.settings``.
"""

from typing import ClassVar, Literal

from msgspec import Struct

from hami_common.events.breach import BreachAction
from hami_common.metrics.families import NameSet
from hami_common.runtime.settings import ServiceSettings
from hami_common.vendors.protocol import InjectionMode
from hami_nodeagent.core.breach import BreachRules
from hami_nodeagent.core.cgroups import OwnersBy
from hami_nodeagent.core.health import HealthRules
from hami_nodeagent.core.holders import Enforcement


class NvidiaSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this node's NVIDIA devices are found and given to containers."""

    enabled: bool = True
    simulated_profile: str = ""
    """Hardware profile to pretend instead of asking NVML; empty: real devices."""
    simulated_control: str = ""
    """File that steers the simulated devices; see ``drivers.simulated.Control``."""
    simulated_partitions: str = ""
    """File of the simulated devices' partitions; empty: in memory."""
    library_path: str = ""
    """File to load as libnvidia-ml.so.1; empty lets the dynamic linker find it."""
    sysfs_root: str = "/sys"
    """Where NUMA nodes and the list of bound cards are read."""
    proc_root: str = "/proc"
    """Where the driver tells the device nodes of MIG instances."""
    call_deadline_s: float = 5.0
    """Longest time one call of NVML may take before its device counts as hung."""
    partition_deadline_s: float = 60.0
    """The same for the reading, making and removing of MIG instances."""
    mig_mode: dict[str, Literal["on", "off"]] = {}
    """Cards that the agent switches into MIG mode, or out of it, when nobody uses them: by UUID or
    ``<node>/<index>``, with ``*`` and ``?``; the last line that names a card counts. Others it
    never switches."""
    reopen_min_s: float = 60.0
    """Shortest time between two new opens of NVML for the sake of a lost card."""
    unified_memory_mib: int = 0
    """Memory to count for devices that share the host's; 0 leaves them out."""
    disable_health_checks: str = ""
    """Xids that never condemn a device, ``xids`` for all of them, ``all`` for probes as well."""
    enable_health_checks: str = ""
    """Xids that always condemn, ``all`` for every one."""


class DriversSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Node half of each vendor."""

    nvidia: NvidiaSettings = NvidiaSettings()
    serve: tuple[str, ...] = ("detect",)
    """Vendors besides NVIDIA that this node serves: their words, or ``detect`` for those whose
    hardware is seen at start; empty: none."""
    vendors: dict[str, dict[str, str | float | bool]] = {}
    """By vendor's word: what is special about reaching its devices here (``ToolSettings`` of
    ``drivers.reader``). With ``simulated_profile``, and ``simulated_control``, its devices are
    pretended, and it is served."""


class UsageSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How use is watched, and what follows from a breach (design D27)."""

    look_s: float = 3.0
    """The longest time between two looks at regions, devices and processes; half of it is the
    shortest, and chance says which, so that no rhythm of use stays between the looks."""
    breach: BreachRules = BreachRules()
    action: BreachAction = "event"
    """``event`` reports a breach; ``evict`` also evicts the pod, for which the agent needs the
    right to create ``pods/eviction``."""
    actions: dict[str, BreachAction] = {}
    """The same by namespace, where it differs from ``action``."""
    event_s: float = 60.0
    """How often what containers use is told on the bus; 0: never."""
    owners: OwnersBy = "cgroup"
    """How the pod of a process is found; ``namespace`` is for the simulated kubelet."""


class PrioritySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How containers of a device learn who is active on it (design D31)."""

    directory: str = "/run/hami-priority"
    """Where the page is on the host, mounted into the agent under the same path."""
    rivals_s: float = 0.025
    """How often regions are looked at while containers of different priority share a device."""
    neighbours_s: float = 0.1
    """The same while containers of one priority share a device."""
    idle_s: float = 0.5
    """The same otherwise."""
    hold_s: float = 0.3
    """How long a container counts as active after its last launch."""
    lease_s: float = 1.5
    """How long what the page says holds when the agent stops saying it; above all periods."""


class PartitionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hardware partitions are made and removed (design D24)."""

    look_s: float = 30.0
    """How often the hardware is read although nothing is to be done."""
    retry_s: float = 0.5
    """First pause after a failure; doubles up to ``retry_most_s``."""
    retry_most_s: float = 10.0
    tries: int = 6
    """After so many failures a share that never had its partition is given up."""
    pre_start_wait_s: float = 15.0
    """How long ``PreStartContainer`` waits for a container's partitions; below the 20 s that the
    plugin proxy waits, and the 30 s that kubelet does."""
    mode_look_s: float = 2.0
    """How often cards of ``drivers.nvidia.mig_mode`` are looked at."""
    mode_settle_s: float = 10.0
    """How long a card must have been cordoned before its mode is switched, so that every
    reservation from before has arrived."""
    mode_again_s: float = 600.0
    """How long a card whose mode cannot be switched serves pods before it is tried again."""
    collect_foreign: bool = False
    """Also remove partitions that this agent did not make and that nobody uses."""
    cdi_dir: str = "/var/run/cdi"
    """Where CDI specs of partitions are put, for the container runtime: the host's directory."""


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set, beyond what all services share."""

    HOT: ClassVar[frozenset[str]] = ServiceSettings.HOT | {
        "check_s",
        "heartbeat_s",
        "library_keep_s",
        "priority.idle_s",
        "priority.lease_s",
        "priority.neighbours_s",
        "priority.rivals_s",
        "remember_gone_s",
        "usage.action",
        "usage.actions",
        "usage.look_s",
    }
    node_name: str
    """Name of the Kubernetes node this agent serves; a DaemonSet sets it from ``spec.nodeName``."""
    http_port: int = 9394
    """Health and metrics, HAMi's port for the latter; 0 lets the kernel choose."""
    metric_names: tuple[NameSet, ...] = ("hami",)
    """Under which names devices and shares are shown, see docs/metrics.md: ``hami``, ``legacy``
    (HAMi's older ones), ``volcano`` (the same on a node)."""
    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    """Where kubelet listens for plugins and where plugins put their sockets."""
    plugin_socket_dir: str = ""
    """Where to serve the plugin proxy, which serves kubelet (``hami_nodeagent plugin-proxy``), so
    that a restart of the agent costs no pod; empty: serve kubelet directly."""
    pod_resources_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    """Kubelet's PodResources socket: which pods it has, and their device ids."""
    state_dir: str = "/var/lib/hami/agent"
    """What must survive a restart: grants, last known devices, limits files of foreign pods."""
    trusted_keys_dir: str = "/etc/hami-agent/trusted-keys"
    """PEM public keys (one per file) whose allocations count; re-read when a file changes."""

    kubelet_pods_url: str = ""
    """Address of kubelet's ``/pods``, such as ``https://127.0.0.1:10250/pods``, asked when the
    PodResources socket does not answer; empty: never."""
    kubelet_pods_token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
    """Bearer token for that address; empty: none."""
    kubelet_pods_ca_file: str = ""
    """PEM bundle for kubelet's certificate; empty: the system's."""

    injection: InjectionMode = "cdi"
    """How devices enter containers: ``cdi``, ``devices`` or ``env`` (design D10)."""
    enforcement: Enforcement = "libvgpu"
    """What holds containers to their shares: ``libvgpu``, without which no share is given, or
    ``none``. Containers that hold only whole devices are never limited (design D33)."""
    library: str = "/usr/lib/hami/libvgpu.so"
    """The in-container library that came with this agent."""
    library_dir: str = "/var/lib/hami/libvgpu"
    """Where it is put on the host, mounted into the agent under the same path (design D26)."""
    library_keep_s: float = 3600.0
    """How long a version that nothing needs is kept."""
    host_proc: str = "/proc"
    """The host's ``/proc``: the agent must see all processes to know which versions are in use and
    whose processes use the devices."""
    host_root: str = ""
    """The host's root file system, read by ``hamictl doctor``; empty: ``<host_proc>/1/root``."""
    pods_dir: str = "/var/lib/kubelet/pods"
    """Kubelet's directory of pods, where their volumes are."""
    library_log_level: str = ""
    """``LIBCUDA_LOG_LEVEL`` in containers; empty leaves it unset."""
    core_policy: Literal["", "default", "force", "disable"] = ""
    """``GPU_CORE_UTILIZATION_POLICY`` in containers; empty leaves it unset."""
    numa_topology: bool = False
    """Tell kubelet the NUMA node of each id. Its topology manager then chooses among ids on its
    own grounds and may refuse pods whose devices were chosen already."""
    pre_start: bool = True
    """Have kubelet ask before each start of a container, so that a container whose grant turned
    out wrong is not started again."""

    allocate_wait_s: float = 2.0
    """How long an Allocate call waits for records and pods to arrive. Kubelet admits nothing else
    meanwhile."""
    outage_wait_s: float = 15.0
    """The same while bus or API server do not tell what they must know of the pod: refused, the pod
    would be ``Failed`` for good. Less than the plugin proxy's ``call_wait_s``."""
    list_timeout_s: float = 1.0
    """Longest wait for one answer of kubelet's PodResources."""
    api_timeout_s: float = 5.0
    """Longest wait for one answer of the API server, and at most ``outage_wait_s`` inside a call of
    kubelet."""
    bus_timeout_s: float = 2.0
    """Longest wait for one answer of the bus."""
    kubelet_poll_s: float = 0.05
    """How often kubelet's socket is looked at: it is created anew when kubelet restarts."""
    check_s: float = 10.0
    """How often grants are compared with kubelet's own list."""
    settle_s: float = 30.0
    """A pod that kubelet lists for this long, yet the API server does not show, is none that is
    being admitted."""
    remember_gone_s: float = 60.0
    """How long a deleted pod is remembered, because kubelet may list it longer."""
    report_retry_s: float = 0.2
    """First pause after the bus refused a state or report; grows to ten times this."""

    heartbeat_s: float = 5.0
    """Period of heartbeats; the scheduler stops using devices after three missed ones."""
    discovery_s: float = 30.0
    """How often the driver is asked for new devices."""
    discovery_retry_s: float = 5.0
    """The same while the driver is missing."""
    probe_s: float = 5.0
    """How often each device is probed."""
    devices_poll_s: float = 5.0
    """How often the registry's canonical devices are read; four times a second while an answer to
    a new report is awaited."""
    usage: UsageSettings = UsageSettings()
    priority: PrioritySettings = PrioritySettings()
    partitions: PartitionSettings = PartitionSettings()
    health: HealthRules = HealthRules()
    drivers: DriversSettings = DriversSettings()
