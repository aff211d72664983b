# SPDX-License-Identifier: Apache-2.0
"""Metrics of the registry.

Durations in seconds. No pod, node or device is ever a label (style 2.9): the label values below are
closed sets. A series whose increase an alert counts is exported as 0 from the start: a series that
begins with its first event shows no increase.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

KINDS = (
    "advisory",
    "answer",
    "configuration",
    "decision",
    "devices",
    "devices-to-store",
    "heartbeat",
    "login",
    "node",
    "quarantine",
    "question",
    "record",
    "report",
    "state",
    "stored-cordon",
    "stored-devices",
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
        self.config_loads = Counter(
            "hami_registry_config_loads",
            "Changed device configuration files, by outcome (ok, failed).",
            ["outcome"],
            registry=registry,
        )
        self.config_generation = Gauge(
            "hami_registry_config_generation",
            "Generation of the device configuration in use.",
            registry=registry,
        )
        self.config_problem = Gauge(
            "hami_registry_config_problem",
            "1 while the device configuration file cannot be used and an older one is in force.",
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
        self.bus_logins = Counter(
            "hami_registry_bus_logins",
            "Logins to the bus that were judged here, by outcome.",
            ["outcome"],
            registry=registry,
        )
