# SPDX-License-Identifier: Apache-2.0
"""NATS and JetStream: connection, declared streams, buckets, watches, the agents' feed, publishers.

This package alone builds JetStream requests and headers. No logic runs in a client callback:
callbacks hand messages to queues that our own tasks read.
"""

from hami_common.runtime.natsio.bucket import NatsBucket
from hami_common.runtime.natsio.client import Message
from hami_common.runtime.natsio.connection import Bus, Subscription, connect
from hami_common.runtime.natsio.consume import Delivery, ensure_consumer, pull_events
from hami_common.runtime.natsio.creds import NatsLogin
from hami_common.runtime.natsio.feed import RepublishedFeed
from hami_common.runtime.natsio.layout import BusLimits, ensure_bus, keep_bus
from hami_common.runtime.natsio.own import OwnBucket, serve_records
from hami_common.runtime.natsio.publisher import NatsPublisher

__all__ = [
    "Bus",
    "BusLimits",
    "Delivery",
    "Message",
    "NatsBucket",
    "NatsLogin",
    "NatsPublisher",
    "OwnBucket",
    "RepublishedFeed",
    "Subscription",
    "connect",
    "ensure_bus",
    "ensure_consumer",
    "keep_bus",
    "pull_events",
    "serve_records",
]
