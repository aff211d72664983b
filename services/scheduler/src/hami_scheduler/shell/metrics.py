# SPDX-License-Identifier: Apache-2.0
"""Metrics of the scheduler.

Durations in seconds. No pod, node or device is ever a label (style 2.9): the label values below are
closed sets. A series whose increase an alert counts is exported as 0 from the start: a series that
begins with its first event shows no increase.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hami_common.events.idle import IDLE_POLICIES

QUEUES = ("chores", "confirmations", "decisions")
"""Queues whose entries may be dropped."""
BIND_FAULTS = ("unavailable", "error", "unknown", "denied")
"""Causes of failed binds that are not the pod's."""
_LATENCY_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

CLAIM_WRITES = ("create", "finalizer", "clear", "allocate", "reserve")
"""Writes about the claims of pods."""


class Metrics:
    """The metrics, declared in ``registry``, so that several schedulers can live in one test."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.verb_seconds = Histogram(
            "hami_scheduler_verb_seconds",
            "Time to answer a call of kube-scheduler or Volcano, or a review of a Binding (admit).",
            ["verb"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.verb_errors = Counter(
            "hami_scheduler_verb_errors",
            "Calls answered with an error instead of a verdict.",
            ["verb", "cause"],
            registry=registry,
        )
        for cause in BIND_FAULTS:
            for verb in ("bind", "admit"):
                self.verb_errors.labels(verb=verb, cause=cause)
        self.refusals = Counter(
            "hami_scheduler_node_refusals",
            "Nodes that a filter or predicate call refused, by reason code.",
            ["code"],
            registry=registry,
        )
        self.binds = Counter(
            "hami_scheduler_binds",
            "Bind calls, and reviews of other schedulers' Bindings, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.binds.labels(outcome="bound")
        self.append_seconds = Histogram(
            "hami_scheduler_ledger_append_seconds",
            "Time of one fenced append to the ledger.",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.fence_conflicts = Counter(
            "hami_scheduler_fence_conflicts",
            "Reservations that lost the race for a node and were picked again.",
            registry=registry,
        )
        self.quota_races = Counter(
            "hami_scheduler_quota_races",
            "Reservations rolled back because a concurrent one left too little quota.",
            registry=registry,
        )
        self.resizes = Counter(
            "hami_scheduler_resizes",
            "Resizes of running shares that were asked for, by what came of it.",
            ["outcome"],
            registry=registry,
        )
        self.idle_actions = Counter(
            "hami_scheduler_idle_actions",
            "Policies applied to idle allocations, by policy and outcome (done, refused).",
            ["policy", "outcome"],
            registry=registry,
        )
        for policy in IDLE_POLICIES:
            for outcome in ("done", "refused"):
                self.idle_actions.labels(policy=policy, outcome=outcome)
        self.lost_acks = Counter(
            "hami_scheduler_lost_acks",
            "Appends whose acknowledgement was lost but which were found in the ledger.",
            registry=registry,
        )
        self.binding_conflicts = Counter(
            "hami_scheduler_binding_conflicts",
            "Bindings that the API server refused because the pod had changed.",
            registry=registry,
        )
        self.examined = Counter(
            "hami_scheduler_reservations_examined",
            "Reservations examined after their lease, by what was found.",
            ["finding"],
            registry=registry,
        )
        self.releases = Counter(
            "hami_scheduler_releases", "Releases written, by cause.", ["cause"], registry=registry
        )
        self.repairs = Counter(
            "hami_scheduler_repairs",
            "Differences between ledger and pods, by what was done.",
            ["action"],
            registry=registry,
        )
        self.stimuli_recorded = Counter(
            "hami_scheduler_stimuli_recorded",
            "Stimuli written to the stimulus log.",
            registry=registry,
        )
        self.stimuli_dropped = Counter(
            "hami_scheduler_stimuli_dropped",
            "Stimuli that are missing in the stimulus log: queue full, or disk refused.",
            registry=registry,
        )
        self.rebuilds = Counter(
            "hami_scheduler_ledger_rebuilds",
            "Times the ledger in memory was built from nothing.",
            registry=registry,
        )
        self.preemptions = Counter(
            "hami_scheduler_preemptions",
            "Pods that fitted nowhere and for which others might leave, by what came of it.",
            ["outcome"],
            registry=registry,
        )
        self.victims = Counter(
            "hami_scheduler_preemption_victims",
            "Pods evicted for one with a higher priority.",
            registry=registry,
        )
        self.short_devices = Gauge(
            "hami_scheduler_short_devices",
            "Devices that lack memory because pods use more than they request.",
            registry=registry,
        )
        self.bursts_evicted = Counter(
            "hami_scheduler_bursts_evicted",
            "Pods evicted because their device lacks memory that they use beyond their requests.",
            registry=registry,
        )
        self.defrag_steps = Counter(
            "hami_scheduler_defrag_steps",
            "Calls about the defragmentation for a waiting pod, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.defrag_evictions = Counter(
            "hami_scheduler_defrag_evictions",
            "Pods evicted so that a waiting pod fits.",
            registry=registry,
        )
        self.gangs = Counter(
            "hami_scheduler_gangs",
            "Attempts to place a gang, by what came of it.",
            ["outcome"],
            registry=registry,
        )
        self.workloads = Counter(
            "hami_scheduler_workloads",
            "Answers to AdmissionChecks of Kueue's Workloads, by state.",
            ["state"],
            registry=registry,
        )
        self.provisioning = Counter(
            "hami_scheduler_provisioning_requests",
            "Answers to ProvisioningRequests, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.claims = Counter(
            "hami_scheduler_claims",
            "Verdicts about allocations of ResourceClaims: booked, or refused.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("booked", "refused"):
            self.claims.labels(outcome=outcome)
        self.claim_writes = Counter(
            "hami_scheduler_claim_writes",
            "Writes of the API server about ResourceClaims of pods, by what they write.",
            ["write"],
            registry=registry,
        )
        for write in CLAIM_WRITES:
            self.claim_writes.labels(write=write)
        self.over_booked = Counter(
            "hami_scheduler_over_bookings",
            "Bookings beyond a device's capacity, because a pod that runs wins.",
            registry=registry,
        )
        self.broken_invariants = Counter(
            "hami_scheduler_broken_invariants",
            "Stimuli that the ledger refused because they cannot be: bugs.",
            registry=registry,
        )
        self.failed = Counter(
            "hami_scheduler_queue_failures",
            "Entries of a queue whose work was given up.",
            ["queue"],
            registry=registry,
        )
        self.dropped = Counter(
            "hami_scheduler_queue_drops",
            "Entries not taken because a queue was full.",
            ["queue"],
            registry=registry,
        )
        for queue in QUEUES:
            self.failed.labels(queue=queue)
            self.dropped.labels(queue=queue)
        self.undecodable = Counter(
            "hami_scheduler_undecodable_messages",
            "Messages and objects that did not decode.",
            ["source"],
            registry=registry,
        )
        self.feed_restarts = Counter(
            "hami_scheduler_feed_restarts",
            "Times a watch ended and was started again.",
            ["feed"],
            registry=registry,
        )
        self.ready = Gauge(
            "hami_scheduler_ready", "1 while calls can be answered.", registry=registry
        )
        self.served_nodes = Gauge(
            "hami_scheduler_served_nodes",
            "Pairs of node and vendor with an agent heartbeat within the timeout.",
            registry=registry,
        )
        self.silent_nodes = Gauge(
            "hami_scheduler_silent_nodes",
            "Pairs of node and vendor with devices but no agent heartbeat; they get no pods.",
            registry=registry,
        )
        self.withheld_nodes = Gauge(
            "hami_scheduler_withheld_nodes",
            "Nodes that get no pods because a record or the devices of them cannot be read.",
            registry=registry,
        )
        self.waiting_pods = Gauge(
            "hami_scheduler_waiting_pods",
            "Pods that ask for devices and have no node yet.",
            registry=registry,
        )


class CertificateMetrics:
    """Metrics of the serving certificate, declared only where bind admission is enabled."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.certificate_not_after = Gauge(
            "hami_scheduler_certificate_not_after_timestamp_seconds",
            "Unix time at which the serving certificate of bind admission expires.",
            registry=registry,
        )
        self.certificate_reloads = Counter(
            "hami_scheduler_certificate_reloads",
            "Attempts to take over changed certificate files, by outcome (ok, failed).",
            ["outcome"],
            registry=registry,
        )


class PolicyMetrics:
    """Metrics of policies."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.canary = Gauge(
            "hami_scheduler_canary_running",
            "1 while a canary policy is applied to its namespaces.",
            registry=registry,
        )
        self.rollbacks = Counter(
            "hami_scheduler_canary_rollbacks",
            "Canary policies that this replica rolled back.",
            registry=registry,
        )
