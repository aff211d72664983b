# SPDX-License-Identifier: Apache-2.0
"""Every metric of the node agent. Durations in seconds; device ids may be labels here."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hami_nodeagent.core.claims import Code

_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5)
_RECALL_S = (0.1, 0.3, 1, 2, 3, 5, 10, 20, 30, 60, 120)


KINDS = (
    "allocation",
    "breach",
    "canonical-devices",
    "card",
    "claim",
    "check",
    "container",
    "device",
    "driver",
    "eviction",
    "fault",
    "grant",
    "limits",
    "message",
    "metering",
    "partition",
    "plugin",
    "pod",
    "process",
    "question",
    "record",
    "region",
    "report",
    "share",
    "slice",
    "state",
    "usage",
    "wall",
)
"""Kinds of objects that the agent isolates."""


class RecallMetrics:
    """Metrics of recall; their labels are phases, operations and reasons of ``core.recall``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.containers = Gauge(
            "hami_recall_containers",
            "Containers of devices with recall, by phase; docs/recall.md lists them.",
            ("phase",),
            registry=registry,
        )
        self.waiting = Gauge(
            "hami_recall_waiting_containers",
            "Parked containers that wait for memory of their device.",
            registry=registry,
        )
        self.parked = Gauge(
            "hami_recall_parked_bytes",
            "Device memory of parked containers, which is in the memory of the host.",
            registry=registry,
        )
        self.moved = Counter(
            "hami_recall_moved_bytes",
            "Device memory moved to the host (park) and back (return).",
            ("operation",),
            registry=registry,
        )
        self.seconds = Histogram(
            "hami_recall_seconds",
            "Time to park a container, and to return one from the moment it got its room.",
            ("operation",),
            buckets=_RECALL_S,
            registry=registry,
        )
        self.failures = Counter(
            "hami_recall_failures",
            "Containers that could not be parked, or not be returned (restore), by reason.",
            ("reason",),
            registry=registry,
        )


class ClaimMetrics:
    """Metrics of ResourceClaims and ResourceSlices."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prepared = Gauge(
            "hami_nodeagent_claims", "ResourceClaims that are prepared.", registry=registry
        )
        self.prepares = Counter(
            "hami_nodeagent_claim_prepares",
            "Calls to prepare a ResourceClaim, by outcome: ok or the code of the refusal.",
            ("outcome",),
            registry=registry,
        )
        self.seconds = Histogram(
            "hami_nodeagent_claim_prepare_seconds",
            "Time to prepare a ResourceClaim or to refuse it.",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.slice_writes = Counter(
            "hami_nodeagent_slice_writes",
            "Writes of the node's ResourceSlices, by verb.",
            ("verb",),
            registry=registry,
        )
        self.prepares.labels(outcome="ok")
        for verb in ("create", "update", "delete"):
            self.slice_writes.labels(verb=verb)


class OvercommitMetrics:
    """Metrics of overcommitted devices; kinds are those of ``core.pressure``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def of_device(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(
                f"hami_overcommit_{name}", text, (*labels, "device_uuid"), registry=registry
            )

        self.promised = of_device(
            "promised_bytes", "Sum of the memory limits of an overcommitted device's containers."
        )
        self.used = of_device(
            "used_bytes", "Memory given to these containers, on the device and in the host."
        )
        self.spilled = of_device(
            "spilled_bytes", "The part of it that exceeds the device: it is in the host at least."
        )
        self.pressure = of_device(
            "pressure",
            "1 while a condition of docs/overcommit.md holds; without a device it is the node's.",
            "kind",
        )
        self.changes = Counter(
            "hami_overcommit_quantum_changes",
            "Times that a thrashing device was given to one container alone.",
            ("device_uuid",),
            registry=registry,
        )
        self.headroom = Gauge(
            "hami_overcommit_host_headroom_bytes",
            "Available memory of the host, less what devices may still move there.",
            ("node",),
            registry=registry,
        )
        self.held = Gauge(
            "hami_overcommit_held_containers",
            "Containers that wait while another one has their device.",
            registry=registry,
        )


class Metrics:
    """The metrics, declared in ``registry``, so that several agents can live in one test."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hami_nodeagent_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hami_nodeagent_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(
                f"hami_nodeagent_{name}_seconds",
                text,
                labels,
                buckets=_LATENCY_S,
                registry=registry,
            )

        self.allocate_seconds = seconds(
            "allocate", "Time to answer an Allocate call of kubelet.", "resource"
        )
        self.allocations = counter(
            "allocations", "Containers that were given their shares.", "resource"
        )
        self.refusals = counter(
            "refusals", "Calls of kubelet that were refused, by stable code.", "resource", "code"
        )
        self.starts = counter(
            "starts", "Containers that were allowed to start with what they hold.", "resource"
        )
        self.waits = counter(
            "waits",
            (
                "Calls of kubelet that waited for an update from the bus or API server, by the "
                "last reason."
            ),
            "code",
        )
        self.list_seconds = seconds("podresources_list", "Time of one PodResources List.")
        self.list_failures = counter("podresources_failures", "Lists that kubelet did not answer.")
        self.registrations = counter(
            "kubelet_registrations", "Registrations with kubelet.", "resource", "outcome"
        )
        self.advertised = gauge(
            "advertised_amount",
            "Total in the node's status, in the unit of the resource.",
            "resource",
        )
        self.advertisements = counter(
            "advertisements", "Changes of the totals in the node's status.", "result"
        )
        self.splits = gauge("splits", "Device ids announced to kubelet.", "resource", "health")
        self.breaches = counter(
            "breaches", "Uses of a device beyond a share, or without one.", "kind"
        )
        self.evictions = counter("evictions", "Pods evicted because of a breach.")
        self.regions_refused = counter(
            "regions_refused", "Reads of usage regions that hold no valid region.", "reason"
        )
        self.unknown_processes = gauge(
            "unknown_processes",
            "Processes on devices that /proc does not show: the agent needs the host's PIDs.",
        )
        self.memory_caps = gauge(
            "memory_caps", "Containers on devices where the driver itself limits their memory."
        )
        self.memory_cap_failures = counter(
            "memory_cap_failures", "Attempts to set such a limit that failed."
        )
        self.limiter_installed = gauge(
            "limiter_installed", "1 while the in-container library is on the host."
        )
        self.grants = gauge("grants", "Containers that hold devices.")
        self.mismatches = counter(
            "mismatches", "Containers that hold ids granted to another container."
        )
        self.unconfirmed = gauge("unconfirmed_grants", "Grants that kubelet's books lack.")
        self.states = counter("states_written", "States of allocations written.", "state")
        self.state_conflicts = counter(
            "state_conflicts", "State updates that failed their compare-and-set."
        )
        self.unheld = counter(
            "unheld_pods", "Pods with a part of a device that nothing holds them to.", "vendor"
        )
        self.records = counter("ledger_records", "Ledger records received.")
        self.feed_resets = counter("ledger_resets", "Times the ledger was found replaced.")
        self.undecodable = counter("undecodable_messages", "Messages that do not decode.", "what")
        self.heartbeats = counter("heartbeats", "Heartbeats sent.")
        self.reports = counter("reports", "Device reports stored.", "vendor")
        self.faults = counter("device_faults", "Changes of device health.", "vendor", "healthy")
        self.device_healthy = gauge(
            "device_healthy", "1 for a device that may be used.", "vendor", "device"
        )
        self.device_events_up = gauge(
            "device_events_up",
            "1 while events of this source wake discovery; 0: devices are only polled.",
            "source",
        )
        self.device_events = counter(
            "device_events", "Bursts of events that concern devices.", "source"
        )
        self.device_wakes = counter("device_wakes", "Discoveries that events started.")
        self.driver_up = gauge("driver_up", "1 while the vendor's driver answers.", "vendor")
        self.pods = gauge("pods", "Pods of this node that are known.")
        self.partitions = gauge(
            "partitions",
            "Hardware partitions, of this agent (ours) and others (foreign), and places of those "
            "at fault (faulty).",
            "vendor",
            "device",
            "whose",
        )
        self.partition_changes = counter(
            "partition_changes", "Partitions seen made, adopted, removed, lost.", "vendor", "change"
        )
        self.partition_failures = counter(
            "partition_failures", "Failed attempts on partitions.", "vendor", "code"
        )
        self.mode_switches = counter(
            "mode_switches", "Attempts to switch the mode of a card.", "vendor", "to", "result"
        )
        self.mps_up = gauge(
            "mps_up", "1 while the Multi-Process Service of the device serves.", "device"
        )
        self.mps_restarts = counter(
            "mps_restarts",
            "Restarts of a Multi-Process Service, each of which ended all its clients.",
            "device",
        )
        self.partition_seconds = seconds(
            "partition", "Time to make or remove a partition.", "vendor", "doing"
        )
        self.recall, self.overcommit, self.claims = (
            RecallMetrics(registry),
            OvercommitMetrics(registry),
            ClaimMetrics(registry),
        )
        self.bus_connected = gauge("bus_connected", "1 while the connection to NATS is up.")
        self.checkpoint_failures = counter(
            "checkpoint_failures", "Writes of the state directory that failed."
        )

    def begin(self, resource: str) -> None:
        """Show the refusals of ``resource`` as 0.

        A series that appears with its first event shows no increase, so no alert would fire.
        """
        for code in Code:
            self.refusals.labels(resource=resource, code=code)
