# SPDX-License-Identifier: Apache-2.0
"""Metrics of the webhook.

Durations in seconds. No pod or namespace is ever a label (style 2.9): the label values below are
closed sets. A series whose increase an alert counts is exported as 0 from the start: a series that
begins with its first event shows no increase.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

KINDS = ("event",)
"""Kinds of objects that the webhook isolates."""
_LATENCY_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The metrics, declared in ``registry``, so that several webhooks can live in one test."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.admissions = Counter(
            "hami_webhook_admissions",
            "Reviews answered, by operation (create, update, ephemeral, other) and outcome "
            "(allowed, changed, denied, invalid, error).",
            ["operation", "outcome"],
            registry=registry,
        )
        for operation in ("create", "update", "ephemeral", "other"):
            self.admissions.labels(operation=operation, outcome="error")
        self.admission_seconds = Histogram(
            "hami_webhook_admission_seconds",
            "Time to answer one review.",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.reviews_malformed = Counter(
            "hami_webhook_reviews_malformed",
            "Requests that are not an AdmissionReview we can read, refused with 400.",
            registry=registry,
        )
        self.events_published = Counter(
            "hami_webhook_events_published",
            "Admission events stored on the bus.",
            registry=registry,
        )
        self.events_dropped = Counter(
            "hami_webhook_events_dropped",
            "Admission events given up, by cause: queue-full, no-bus, refused (by the bus), rate "
            "(more than one source may publish), invalid (names too long), error.",
            ["cause"],
            registry=registry,
        )
        self.callers_refused = Counter(
            "hami_webhook_callers_refused",
            "Calls refused unread, by cause: name (of the client certificate), rate (processor "
            "time of one address).",
            ["cause"],
            registry=registry,
        )
        for cause in ("name", "rate"):
            self.callers_refused.labels(cause=cause)
        self.bus_connected = Gauge(
            "hami_webhook_bus_connected",
            "1 while the bus can be reached; admission works without it.",
            registry=registry,
        )
        self.certificate_not_after = Gauge(
            "hami_webhook_certificate_not_after_timestamp_seconds",
            "Unix time at which the serving certificate in use expires.",
            registry=registry,
        )
        self.certificate_reloads = Counter(
            "hami_webhook_certificate_reloads",
            "Attempts to take over changed certificate files, by outcome (ok, failed).",
            ["outcome"],
            registry=registry,
        )
