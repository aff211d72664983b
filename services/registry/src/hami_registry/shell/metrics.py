# SPDX-License-Identifier: Apache-2.0
"""Metrics of the registry.

Durations in seconds. No pod, node or device is ever a label (style 2.9): the label values below are
closed sets. A series whose increase an alert counts is exported as 0 from the start: a series that
begins with its first event shows no increase.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from hami_common.events.idle import IDLE_CHANGES

KINDS = (
    "advisory",
    "answer",
    "decision",
    "devices",
    "devices-to-store",
    "heartbeat",
    "idle",
    "login",
    "node",
    "quarantine",
    "question",
    "record",
    "report",
    "state",
    "stored-cordon",
    "stored-devices",
    "usage",
)
"""Kinds of objects that the registry isolates."""


class Metrics:
    """The metrics, declared in ``registry``, so that several replicas can live in one test."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.reports = Counter(
            "hami_registry_reports",
            "Reports of agents, by outcome (accepted, stale, poison).",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("accepted", "stale", "poison"):
            self.reports.labels(outcome=outcome)
        self.publications = Counter(
            "hami_registry_publications",
            "Canonical records by outcome (stored, unchanged, conflict, failed).",
            ["outcome"],
            registry=registry,
        )
        self.values_malformed = Counter(
            "hami_registry_values_malformed",
            "Values of a bucket or stream that do not decode and were skipped.",
            ["origin"],
            registry=registry,
        )
        self.dead_letters = Counter(
            "hami_registry_dead_letters",
            "Dead-lettered messages, by reason (undecodable, terminated, max-deliveries; gone: "
            "the event had expired from its stream).",
            ["reason"],
            registry=registry,
        )
        self.config_generation = Gauge(
            "hami_registry_config_generation",
            "Generation of the device configuration in use.",
            registry=registry,
        )
        self.resets = Counter(
            "hami_registry_bus_resets",
            "How often the bus had lost what a bucket stored.",
            ["origin"],
            registry=registry,
        )
        self.listeners = Gauge(
            "hami_registry_listeners", "Open streams of /v1/watch.", registry=registry
        )
        self.listeners_lagged = Counter(
            "hami_registry_listeners_lagged",
            "Listeners of /v1/watch let go because they read too slowly.",
            registry=registry,
        )
        self.fleet_viewers = Gauge(
            "hami_registry_fleet_viewers", "Open streams of /v1/fleet/events.", registry=registry
        )
        self.fleet_viewers_lagged = Counter(
            "hami_registry_fleet_viewers_lagged",
            "Viewers of /v1/fleet/events disconnected because they read too slowly.",
            registry=registry,
        )
        self.fleet_events = Counter(
            "hami_registry_fleet_events",
            "Events of the fleet that were encoded, once for all viewers with the same rights.",
            registry=registry,
        )
        self.fleet_snapshots = Counter(
            "hami_registry_fleet_snapshots", "Snapshots of the fleet built.", registry=registry
        )
        self.capacity_largest = Gauge(
            "hami_registry_capacity_largest_share_mib",
            "Memory of the largest share that a device of the model can still give, in MiB.",
            ["vendor", "model"],
            registry=registry,
        )
        self.capacity_largest_core = Gauge(
            "hami_registry_capacity_largest_share_core_pct",
            "Compute that this share can have, in percent of one device.",
            ["vendor", "model"],
            registry=registry,
        )
        self.capacity_fitting = Gauge(
            "hami_registry_capacity_shares_fitting",
            "Shares of a size (1/4, 1/2, 1: part of memory and compute) that still fit.",
            ["vendor", "model", "size"],
            registry=registry,
        )
        self.capacity_free = Gauge(
            "hami_registry_capacity_free_mib",
            "Memory that is not booked, in MiB, including stranded memory.",
            ["vendor", "model"],
            registry=registry,
        )
        self.capacity_stranded = Gauge(
            "hami_registry_capacity_stranded_mib",
            "Free memory that no share can use, in MiB, by cause (silent, unhealthy, cordoned, "
            "exclusive, slots, compute, mode, foreign, burst).",
            ["vendor", "model", "cause"],
            registry=registry,
        )
        self.capacity_foreign = Gauge(
            "hami_registry_capacity_foreign_mib",
            "Memory in use without an allocation, in MiB.",
            ["vendor", "model"],
            registry=registry,
        )
        self.capacity_burst = Gauge(
            "hami_registry_capacity_burst_mib",
            "Memory that pods use beyond their requests, in MiB.",
            ["vendor", "model"],
            registry=registry,
        )
        self.idle_allocations = Gauge(
            "hami_registry_idle_allocations",
            "Allocations that did no work for idle_after_s; the same at each replica.",
            registry=registry,
        )
        self.idle_devices = Gauge(
            "hami_registry_idle_devices",
            "Devices that these allocations reserve, in whole devices; the same at each replica.",
            registry=registry,
        )
        self.idle_events = Counter(
            "hami_registry_idle_events",
            "Messages about idle periods that this replica published, by change (idle, active).",
            ["change"],
            registry=registry,
        )
        for change in IDLE_CHANGES:
            self.idle_events.labels(change=change)
        self.bus_logins = Counter(
            "hami_registry_bus_logins",
            "Logins to the bus that were judged here, by outcome.",
            ["outcome"],
            registry=registry,
        )
