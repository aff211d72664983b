# SPDX-License-Identifier: Apache-2.0
"""Settings of the scheduler; every duration is in seconds and has the suffix ``_s``.

The defaults are those of the shipped deployment: a sidecar of kube-scheduler, called on localhost
(design D18). Loaded from file, environment and flags by ``hami_common.runtime.settings``.
"""

from typing import ClassVar, Literal

from msgspec import Struct

from hami_common.metrics.families import NameSet
from hami_common.model.request import PlacementPolicy
from hami_common.runtime.settings import ServiceSettings
from hami_core.planning.idlepolicy import IdleRule


class ApiSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Second server, with the routes ``/v1/`` alone, for the registry (docs/console.md).

    Callers always present Kubernetes tokens.
    """

    enabled: bool = False
    """Serve it, with TLS."""
    host: str = "127.0.0.1"
    """Address; ``0.0.0.0`` or ``::`` in a cluster."""
    port: int = 9443
    """0 lets the kernel choose; the choice is logged."""
    tls_cert_file: str = "/tls-api/tls.crt"
    """Serving certificate with its chain, PEM. Replaced files are used within seconds."""
    tls_key_file: str = "/tls-api/tls.key"
    """Private key of the certificate, PEM, not encrypted."""
    proxy_ca_file: str = ""
    """CA of the registry's client certificate, PEM. On connections with such a certificate the
    registry names callers whom its own proxy has named; empty: callers present tokens.
    """
    proxy_names: tuple[str, ...] = ()
    """Common names of that certificate; empty: all that the CA signed."""


class BindAdmissionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placement of pods that other schedulers bind, see docs/other-schedulers.md."""

    enabled: bool = False
    """Answer the API server's reviews of Bindings, with TLS."""
    host: str = "127.0.0.1"
    """Address for the API server's calls; ``0.0.0.0`` or ``::`` in a cluster."""
    port: int = 9399
    """0 lets the kernel choose; the choice is logged."""
    tls_cert_file: str = "/tls/tls.crt"
    """Serving certificate with its chain, PEM. Replaced files are used within ``tls_poll_s``."""
    tls_key_file: str = "/tls/tls.key"
    """Private key of the certificate, PEM, not encrypted."""
    tls_poll_s: float = 1.0
    """Interval at which the two files are polled."""
    client_ca_file: str = ""
    """CA of the client certificates that callers must present, PEM; empty: any caller is accepted,
    and can reserve what a waiting pod requests, for ``lease_s``.
    """
    client_names: tuple[str, ...] = ()
    """Common names of certificates that are accepted with ``client_ca_file``.

    Empty: all that the CA signed.
    """
    wait_s: float = 8.0
    """Longest time to decide on a Binding, below ``timeoutSeconds`` of the webhook's configuration
    (10 s), so that the text of a refusal reaches the pod's events.
    """


class DraSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of ResourceClaims (Dynamic Resource Allocation), see ADR 0038 and ADR 0039."""

    enabled: bool = False
    """Book the devices that kube-scheduler allocates to ResourceClaims, and keep the claims of pods
    in allocation mode ``dra``.
    """
    namespace: str = "hami-system"
    """Namespace of the Lease by which the replica is elected that keeps the claims of pods."""
    lease_name: str = "hami-claims"
    """Name of that Lease."""
    leader_lease_s: float = 15.0
    """Time after which another replica takes over from one that stopped."""
    discovery_s: float = 10.0
    """Pause before claims are followed again when the API server does not have or deny them."""
    unasked_s: float = 5.0
    """Time for which a pod in allocation mode ``dra`` that also has claims of its own waits without
    a question of kube-scheduler before preemption and the placement of its gang are tried all the
    same.
    """
    unprepare_wait_s: float = 60.0
    """Longest wait for the node to unprepare a claim whose allocation is gone, before its devices
    are released.
    """


class IdleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policies for idle allocations, see docs/usage.md."""

    enabled: bool = False
    """Apply the rules. Without it idle allocations are only published, by the registry."""
    rules: tuple[IdleRule, ...] = ()
    """The first rule that selects an allocation applies; without one its policy is ``report``."""
    actions_per_minute: float = 6.0
    """Largest number of pods that are shrunk, recalled or evicted, refused attempts included."""
    retry_s: float = 3600.0
    """Time after which a refused action is tried again while the allocation stays idle."""
    shrink_least_mib: int = 256
    """Smallest memory limit to which a container is shrunk."""
    namespace: str = "hami-system"
    """Namespace of the Lease by which the replica is elected that acts."""
    lease_name: str = "hami-idle"
    """Name of that Lease."""
    leader_lease_s: float = 15.0
    """Time after which another replica takes over from one that stopped."""


class HoldSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds for objects whose pods do not exist yet, by one elected replica."""

    enabled: bool = False
    lease_s: float = 60.0
    """Time for which held devices stay reserved after the last renewal; renewed at a third of it.
    """
    discovery_s: float = 10.0
    """Interval at which the API server is asked for the kinds while they are missing."""
    namespace: str = "hami-system"
    """Namespace of the Lease by which one replica is elected."""
    lease_name: str
    """Name of that Lease."""
    leader_lease_s: float = 15.0
    """Time after which another replica takes over from one that stopped."""


class KueueSettings(HoldSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds for Workloads of Kueue, see docs/kueue.md."""

    enabled: bool = False
    """Answer AdmissionChecks with the controller name ``hami.io/placement``."""
    lease_name: str = "hami-placement"
    """Name of that Lease."""
    hold_s: float = 300.0
    """Time after admission for which the devices of pods that have no node yet stay held."""
    requeue_s: int = 15
    """Pause before Kueue tries a Workload again that had no placement."""
    reject_after_s: float = 60.0
    """Time for which a Workload must exceed even unused devices before it is rejected, so that
    nodes that are just joining count.
    """
    unready_s: float = 60.0
    """Time without sync after which AdmissionChecks become inactive, which stops their queues."""


class ProvisioningSettings(HoldSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds for ProvisioningRequests, see docs/autoscalers.md."""

    enabled: bool = False
    """Answer ProvisioningRequests of the class ``class_name``."""
    lease_name: str = "hami-provisioning"
    """Name of that Lease."""
    class_name: str = "placement.hami.io"
    """``provisioningClassName`` of the requests that are answered."""
    processor_instance: str = ""
    """Also answer requests of ``check-capacity.autoscaling.x-k8s.io`` whose parameter
    ``processorInstance`` has this value; empty: none of them.
    """
    booking_s: float = 600.0
    """Time for which devices stay held after a request got them."""
    retry_s: float = 10.0
    """Interval at which a request without capacity is tried again."""
    expire_s: float = 604_800.0
    """Time after its creation at which a request without capacity fails."""


class DefragSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defragmentation: running pods are moved so that a waiting pod fits, see docs/defrag.md."""

    lease_s: float = 60.0
    """Time for which the places of a defragmentation stay held after its last call, in addition to
    the longest grace period of the moved pods. A replacement must have started by then.
    """
    enabled: bool = False
    """Defragment without being called, by one elected replica within the budget below."""
    wait_s: float = 60.0
    """Time for which a pod must have waited before others are moved for it."""
    moves: int = 4
    """Maximum number of pods that are moved for one waiting pod."""
    evictions: int = 2
    """Maximum number of evictions in ``interval_s``."""
    interval_s: float = 60.0
    """Interval of that budget."""
    run_s: float = 600.0
    """Time after which the defragmentation for one pod is stopped."""
    retry_s: float = 300.0
    """Pause before pods are moved for the same pod again."""
    round_s: float = 2.0
    """Pause between two steps."""
    namespace: str = "hami-system"
    """Namespace of the Lease by which one replica is elected."""
    lease_name: str = "hami-defrag"
    """Name of that Lease."""
    leader_lease_s: float = 15.0
    """Time after which another replica takes over from one that stopped."""


class VolcanoExtenderSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls of Volcano's plugin ``extender``, see docs/volcano-extender.md."""

    enabled: bool = False
    """Answer the plugin at a server of its own, without TLS: the plugin has none."""
    host: str = "127.0.0.1"
    """Address for Volcano's calls; ``0.0.0.0`` or ``::`` in a cluster. Any caller that reaches it
    can reserve what a waiting pod requests, for ``lease_s``.
    """
    port: int = 9397
    """Fixed, because Volcano's configuration names it; 0 lets the kernel choose."""
    lease_s: float = 30.0
    """Time for which the devices of a session stay reserved until their Binding. Longer than a
    session with its Bindings takes.
    """
    wait_s: float = 4.0
    """Longest time to reserve or release, below ``extender.httpTimeout`` in Volcano's configuration
    (5 s), so that the text of a refusal reaches its log.
    """


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set, beyond what all services share."""

    HOT: ClassVar[frozenset[str]] = ServiceSettings.HOT | {
        "nodes_to_score",
        "policy",
        "preemption",
        "reclaim",
        "preempt_hold_s",
        "preempt_retry_s",
        "preempt_nodes",
        "min_runtime_s",
        "min_runtime_most_s",
        "burst_evict",
        "burst_evict_s",
        "burst_delete_s",
        "gang_lease_s",
        "gang_wait_s",
        "gang_retry_s",
    }
    http_port: int = 9398
    """Fixed, because kube-scheduler's configuration names it; 0 lets the kernel choose."""
    auth: Literal["none", "kubernetes"] = "none"
    """``kubernetes``: callers of ``/v1/`` present a Kubernetes token and get the access that the
    cluster's RBAC grants (docs/security.md), and the server listens on loopback alone, where only
    kube-scheduler reaches the extender; ``none``: any caller that reaches the port has full access.
    """
    probe_host: str = ""
    """Address of a second server with only probes and metrics, for a kubelet and a Prometheus that
    cannot reach the extender's loopback; empty: none.
    """
    probe_port: int = 9395
    """Port of that server, by default that of HAMi's scheduler metrics; 0: the kernel chooses."""
    api: ApiSettings = ApiSettings()
    bind_admission: BindAdmissionSettings = BindAdmissionSettings()
    dra: DraSettings = DraSettings()
    kueue: KueueSettings = KueueSettings()
    idle: IdleSettings = IdleSettings()
    provisioning_requests: ProvisioningSettings = ProvisioningSettings()
    defrag: DefragSettings = DefragSettings()
    volcano_extender: VolcanoExtenderSettings = VolcanoExtenderSettings()
    metric_names: tuple[NameSet, ...] = ("hami",)
    """Sets of metric names for devices and shares, see docs/metrics.md: ``hami``, ``legacy``
    (HAMi's older ones), ``volcano``. Each set costs some ten series per device.
    """
    signing_key_file: str
    """PKCS#8 PEM Ed25519 key that signs allocations (design D4)."""
    trusted_keys_dir: str = ""
    """Directory of further public keys (PEM) whose allocations are trusted, such as the previous
    and the next key while keys rotate; read at start. The public half of ``signing_key_file`` is
    always trusted.
    """
    policy: PlacementPolicy = PlacementPolicy()
    """Placement policy of pods that name none; a change applies to pods read from then on."""
    replica: str = ""
    """Name under which this replica writes records; empty takes the host name, which in Kubernetes
    is the pod's name and so survives a restart of the container."""
    bus_replicas: int = 1
    """Copies of each stream: 3 in production; a single server supports only 1."""

    body_limit_bytes: int = 32 << 20
    """Largest request body. 5,000 whole node objects are about 10 MiB, their names 0.2 MiB."""
    sync_wait_s: float = 3.0
    """Longest wait of a call for the synchronization before it is answered with an error; below
    kube-scheduler's extender timeout (15 s), so that the text reaches the pod's events.
    """

    whatif_s: float = 10.0
    """Longest computation of one answer of ``/v1/whatif``. It runs in a thread beside the
    decisions and may delay them by tens of milliseconds."""
    whatif_policy_s: float = 25.0
    """Longest time for one answer of ``/v1/whatif/policy``, with the reading of events; browsers
    wait 30 s."""

    bus_timeout_s: float = 2.0
    """Longest wait for one answer of the bus. An append takes under 1 ms, a new leader 1 s."""
    api_timeout_s: float = 10.0
    """Longest wait for one answer of the API server."""
    fence_tries: int = 3
    """Retries of one bind after a concurrent write to the node (design D3)."""
    binding_tries: int = 3
    """Retries of one bind after the pod changed before its Binding was posted (design D4)."""
    bind_wait_s: float = 15.0
    """Longest wait of a bind for others of its pod or node before it gives up."""
    resize_confirm_s: float = 20.0
    """Longest wait of a resize for the node to rewrite the container's limits file."""
    lease_s: float = 30.0
    """Time for which a reservation may stay unbound before it is examined (design D4)."""
    fence_delay_s: float = 3.0
    """Added to the lease, so that the owner of a slow bind is the first to settle it."""

    usage_labels: tuple[str, ...] = ()
    """Keys of pod labels that allocations record, at most eight, so that usage can be summed up by
    them, see docs/usage.md. A change applies to pods that are placed from then on.
    """
    topology_labels: tuple[str, ...] = ()
    """Node labels with a node's position in the network, widest domain first, such as
    ``topology.kubernetes.io/zone`` and a rack's. Members of a gang are then placed close to each
    other. Empty: nodes are not watched.
    """

    queues_file: str = ""
    """TOML file with the tree of queues and their quotas, see docs/quota.md. Empty: no queues."""

    policies_file: str = ""
    """TOML or YAML file with named policies and a canary, see docs/policies.md. Empty: none."""
    canary_s: float = 30.0
    """Interval at which the objectives of a canary policy are evaluated."""

    nodes_to_score: int = 100
    """Maximum number of fitting nodes that filter returns, the best by the pod's policy:
    kube-scheduler scores no others. All nodes are returned for pods that prefer some nodes
    themselves (preferred affinity, topology spread that may be violated); 0: for all pods.
    """

    preemption: bool = True
    """Evict pods with a lower priority for one that fits nowhere, see docs/preemption.md."""
    reclaim: bool = True
    """Evict pods of queues that borrow for one that fits nowhere and is within the guarantee of its
    own queue, whatever their priorities; only with ``preemption``, see docs/preemption.md.
    """
    preempt_hold_s: float = 60.0
    """Time for which capacity freed by preemption stays reserved for its pod, in addition to the
    longest grace period of the victims.
    """
    preempt_retry_s: float = 5.0
    """Shortest time between two preemption attempts for the same pod."""
    preempt_nodes: int = 100
    """Nodes that are searched for one pod, those with the cheapest single victim first."""
    min_runtime_s: float = 0.0
    """Minimum run time before a pod is evicted for another one.

    A pod may claim more by its annotation ``hami.io/min-runtime-s``.
    """
    min_runtime_most_s: float = 3600.0
    """Maximum that a pod may claim by that annotation."""
    burst_evict: bool = True
    """Evict pods that use more memory than they request while their device lacks memory, see
    docs/preemption.md."""
    burst_evict_s: float = 5.0
    """Time for which a device must lack memory before that.

    A shorter one evicts pods whose use just fell.
    """
    burst_delete_s: float = 0.0
    """Further time after which these pods are deleted if their PodDisruptionBudgets refuse the
    eviction; 0: never. Needs the right to delete pods, which the manifests do not grant.
    """
    gang_lease_s: float = 30.0
    """Time for which the shares of a gang stay reserved while its members are bound."""
    gang_wait_s: float = 1.0
    """Longest wait of filter for the placement of a gang before the pod is retried later."""
    gang_retry_s: float = 1.0
    """Shortest pause after a gang did not fit or lost its nodes to another; grows to ten times."""

    heartbeat_timeout_s: float = 15.0
    """A node's devices are unusable this long after its last heartbeat (design D19), and before the
    first one that this process receives."""
    tick_s: float = 1.0
    """Interval at which heartbeats and leases are checked."""
    reconcile_s: float = 300.0
    """Interval of the full comparison of ledger and pods (design D6)."""
    list_page_size: int = 1000
    """Pods per page of that comparison."""
    tombstone_s: float = 3600.0
    """Time for which a release stays on the bus after the scheduler read it, so that disconnected
    readers see it later.
    """
    retry_s: float = 0.5
    """First pause before a failed operation is retried; grows to ten times this."""

    decision_queue_size: int = 4096
    """Decisions waiting to be published.

    When full, new ones are dropped and counted: a slow bus must never slow down a placement.
    """
    decision_hold_s: float = 2.0
    """Time for which a filter decision that found nodes waits for its bind, so that one message
    reports both; without a bind it is published after at most twice this time.
    """
    chore_queue_size: int = 65536
    """Releases and states waiting to be written. When full, the periodic comparison writes them."""
    gather_s: float = 0.1
    """Time for which decisions are gathered to be sent to the bus in one batch."""
    gather_most: int = 256
    """Maximum batch of decisions, or of reports that pods are bound."""
    chore_workers: int = 8
    """Releases written concurrently; each costs one read of the API server and one append."""
    capacity_touch_s: float = 1.0
    """Shortest time between two touches of a node that wake kube-scheduler's queue (design D16)."""

    take_over: bool = False
    """Count the pods that HAMi or Volcano placed on nodes that were taken over from them, see
    docs/migration.md and docs/volcano.md.

    Nodes with pods of theirs that no operator listed are then not used.
    """
    take_over_s: float = 1.0
    """Interval at which nodes that have not been inspected yet are inspected."""
    mirror_pods: bool = False
    """Write HAMi's annotations on the pods that we placed too, so that HAMi counts them after it
    regains their node, and programs that read these annotations find them.
    """
    mirror_nodes: bool = False
    """Write the devices of nodes in HAMi's annotations.

    Only while HAMi's scheduler does not run: it would place pods on them.
    """
    mirror_s: float = 2.0
    """Interval at which mirrored annotations are compared with their source."""

    stimulus_log_dir: str = ""
    """Directory for a log of every input of the scheduler's core, from which ``hamictl replay``
    repeats every decision. Empty: no log. The log names pods, nodes and devices."""
    stimulus_log_segment_bytes: int = 64 << 20
    """Compressed size at which a file of the log ends and the next begins."""
    stimulus_log_segments: int = 16
    """Files that are kept; the oldest goes when another begins."""
    stimulus_log_queue_size: int = 16384
    """Stimuli that may wait for the disk.

    When full, stimuli are dropped and counted, and the log records a gap: writing must never slow
    down a placement.
    """
