# SPDX-License-Identifier: Apache-2.0
"""Every metric of the node agent. Durations in seconds; device ids may be labels here."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hami_nodeagent.core.claims import Code

_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5)


KINDS = (
    "allocation",
    "breach",
    "canonical-devices",
    "card",
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
    "state",
    "usage",
)
"""Kinds of objects that the agent isolates."""


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
        self.partition_seconds = seconds(
            "partition", "Time to make or remove a partition.", "vendor", "doing"
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
