# SPDX-License-Identifier: Apache-2.0
"""Settings of the scheduler; every duration is in seconds and says so in its name.

The defaults are those of the shipped deployment: a sidecar of kube-scheduler, called on localhost
(design D18). Loaded from file, environment and flags by ``hami_common.runtime.settings``.
"""

from typing import ClassVar, Literal

from hami_common.metrics.families import NameSet
from hami_common.model.request import PlacementPolicy
from hami_common.runtime.settings import ServiceSettings


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set, beyond what all services share."""

    HOT: ClassVar[frozenset[str]] = ServiceSettings.HOT | {
        "nodes_to_score",
        "policy",
        "preemption",
        "preempt_hold_s",
        "preempt_retry_s",
        "preempt_nodes",
        "min_runtime_s",
        "min_runtime_most_s",
        "gang_lease_s",
        "gang_wait_s",
        "gang_retry_s",
    }
    http_port: int = 9398
    """Fixed, because kube-scheduler's configuration names it; 0 lets the kernel choose."""
    auth: Literal["none", "kubernetes"] = "none"
    """``kubernetes``: callers of ``/v1/`` show a Kubernetes token and get what the cluster lets
    them (docs/security.md), and the server listens on loopback alone, where only kube-scheduler
    reaches the extender; ``none``: whoever reaches the port may do everything."""
    probe_host: str = ""
    """Address of a second server with probes and metrics alone, for a kubelet and a Prometheus that
    cannot reach the extender's loopback; empty: none."""
    probe_port: int = 9395
    """Its port, HAMi's for the scheduler's metrics; 0 lets the kernel choose."""
    metric_names: tuple[NameSet, ...] = ("hami",)
    """Under which names devices and shares are shown, see docs/metrics.md: ``hami``, ``legacy``
    (HAMi's older ones), ``volcano``. Each set costs some ten series per device."""
    signing_key_file: str
    """PKCS#8 PEM Ed25519 key that signs allocations (design D4)."""
    trusted_key_files: tuple[str, ...] = ()
    """Further public keys (PEM) whose allocations count, such as the previous key while keys
    rotate. The public half of ``signing_key_file`` always counts."""
    policy: PlacementPolicy = PlacementPolicy()
    """Placement policy of pods that name none; a change counts for pods read from then on."""
    replica: str = ""
    """Name under which this replica writes records; empty takes the host name, which in Kubernetes
    is the pod's name and so survives a restart of the container."""
    bus_replicas: int = 1
    """Copies of each stream: 3 in production; a single server has room for 1."""

    body_limit_bytes: int = 32 << 20
    """Largest request body. 5,000 whole node objects are about 10 MiB, their names 0.2 MiB."""
    sync_wait_s: float = 3.0
    """How long a call waits for the synchronisation before it is answered with an error; below
    kube-scheduler's extender timeout (15 s), so that the text reaches the pod's events."""

    bus_timeout_s: float = 2.0
    """Longest wait for one answer of the bus. An append takes under 1 ms, a new leader 1 s."""
    api_timeout_s: float = 10.0
    """Longest wait for one answer of the API server."""
    fence_tries: int = 3
    """How often one bind picks again after somebody else wrote to the node (design D3)."""
    binding_tries: int = 3
    """How often one bind posts again after the pod changed under it (design D4)."""
    bind_wait_s: float = 15.0
    """How long a bind may wait for others of its pod or node before it gives up."""
    resize_confirm_s: float = 20.0
    """How long a resize waits for the node to rewrite the container's limits file."""
    lease_s: float = 30.0
    """How long a reservation may stay unbound before anybody examines it (design D4)."""
    fence_delay_s: float = 3.0
    """Added to the lease, so that the owner of a slow bind is the first to settle it."""

    topology_labels: tuple[str, ...] = ()
    """Node labels that say where a node stands in the network, widest domain first, such as
    ``topology.kubernetes.io/zone`` and a rack's. Members of a gang are then placed close to each
    other. Empty: nodes are not watched."""

    queues_file: str = ""
    """TOML file with the tree of queues and their quotas, see docs/quota.md. Empty: no queues."""
    queues_reload_s: float = 5.0
    """How often that file is looked at; a change takes effect without restart."""

    nodes_to_score: int = 100
    """How many of the nodes that fit filter names at most, those that the pod's policy likes best:
    kube-scheduler scores no others. Pods that prefer some nodes themselves (preferred affinity,
    topology spread that may be violated) have all named; 0: so have all pods."""

    preemption: bool = True
    """Whether pods with a lower priority are evicted for one that fits nowhere, see
    docs/preemption.md."""
    preempt_hold_s: float = 60.0
    """How long room that others leave is held for the pod it was made for, beyond the longest time
    that these may take to end."""
    preempt_retry_s: float = 5.0
    """Shortest time between two attempts to make room for the same pod."""
    preempt_nodes: int = 100
    """Nodes that are searched for one pod, those with the cheapest single victim first."""
    min_runtime_s: float = 0.0
    """A pod that has run for less is never evicted for another one; a pod may claim more by its
    annotation ``hami.io/min-runtime-s``."""
    min_runtime_most_s: float = 3600.0
    """The most that a pod may claim by that annotation."""
    gang_lease_s: float = 30.0
    """How long the shares of a gang are held while its members are bound."""
    gang_wait_s: float = 1.0
    """How long filter waits for the placement of a gang before the pod is put off."""
    gang_retry_s: float = 1.0
    """Shortest pause after a gang did not fit or lost its nodes to another; grows to ten times."""

    heartbeat_timeout_s: float = 15.0
    """A node's devices are unusable this long after its last heartbeat (design D19)."""
    tick_s: float = 1.0
    """How often heartbeats and leases are looked at."""
    reconcile_s: float = 300.0
    """How often ledger and pods are compared in full (design D6)."""
    list_page_size: int = 1000
    """Pods per page of that comparison."""
    tombstone_s: float = 3600.0
    """How long a release is kept on the bus after we saw it; readers that were away see it then."""
    retry_s: float = 0.5
    """First pause before something that failed is tried again; grows to ten times this."""

    decision_queue_size: int = 4096
    """Decisions waiting to be published. When full, new ones are dropped and counted: a slow bus
    must never slow down a placement."""
    decision_hold_s: float = 2.0
    """How long a filter that found nodes waits for the bind it leads to, so that one message tells
    of both; without a bind it is published after at most twice this."""
    chore_queue_size: int = 65536
    """Releases and states waiting to be written. When full, the periodic comparison does them."""
    gather_s: float = 0.1
    """How long a decision waits for others, so that several are sent to the bus together."""
    gather_most: int = 256
    """The most decisions, or reports that pods are bound, that are sent together."""
    chore_workers: int = 8
    """Releases written at the same time; each costs one read of the API server and one append."""
    capacity_touch_s: float = 1.0
    """Shortest time between two touches of a node that wake kube-scheduler's queue (D16)."""

    take_over: bool = False
    """Whether pods that HAMi placed count on nodes that came over from it, see docs/migration.md.
    Nodes with pods of HAMi's that no operator listed are then not used."""
    take_over_s: float = 1.0
    """How often nodes are looked at that were not looked through yet."""
    mirror_pods: bool = False
    """Whether pods that we placed carry HAMi's annotations too, so that HAMi counts them when it
    gets their node back, and programs that read these annotations find them."""
    mirror_nodes: bool = False
    """Whether nodes carry their devices in HAMi's annotations. Only while HAMi's scheduler does not
    run: it would place pods on them."""
    mirror_s: float = 2.0
    """How often mirrors are compared with what they show."""

    stimulus_log_dir: str = ""
    """Directory for a log of every input of the scheduler's core, from which ``hamictl replay``
    decides everything once more. Empty: none. The log names pods, nodes and devices."""
    stimulus_log_segment_bytes: int = 64 << 20
    """Compressed size at which a file of the log ends and the next begins."""
    stimulus_log_segments: int = 16
    """Files that are kept; the oldest goes when another begins."""
    stimulus_log_queue_size: int = 16384
    """Stimuli that may wait for the disk. When full, stimuli are dropped and counted, and the log
    says that it has a gap: writing must never slow down a placement."""
