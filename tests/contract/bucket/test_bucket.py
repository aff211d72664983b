# SPDX-License-Identifier: Apache-2.0
"""Contract of every Bucket, in memory and over a real server (design D3)."""

from collections.abc import AsyncIterator

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Conflict
from hami_common.ports import Bucket, Entry, Expect, Reset, Synced, Write
from tests.contract.bucket.conftest import World

pytestmark = pytest.mark.anyio

NODE = "ip-10-0-0-1.ec2.internal"
OTHER = "worker-b"
FENCE = subjects.node_fence(NODE)
Item = Entry | Synced | Reset


def key(node: str, uid: str) -> str:
    return subjects.allocation_key(node, uid)


def fence(node: str, sequence: int) -> Expect:
    return Expect(subject=subjects.node_fence(node), sequence=sequence)


async def take(items: AsyncIterator[Item], count: int) -> list[Item]:
    taken: list[Item] = []
    with anyio.fail_after(15):
        while len(taken) < count:
            taken.append(await anext(items))
    return taken


async def until_synced(items: AsyncIterator[Item]) -> list[Item]:
    taken: list[Item] = []
    with anyio.fail_after(15):
        while not taken or not isinstance(taken[-1], Synced):
            taken.append(await anext(items))
    return taken


def values(items: list[Item]) -> list[bytes]:
    return [item.value for item in items if isinstance(item, Entry)]


async def test_get_returns_none_for_a_key_never_written(world: World) -> None:
    assert await world.bucket().get(key(NODE, "a")) is None


async def test_values_stored_together_are_judged_one_by_one(world: World) -> None:
    bucket = world.bucket()
    assert await bucket.append_all([]) == []
    newest = await bucket.append(key(NODE, "a"), b"a1")
    answers = await bucket.append_all(
        [
            Write(
                key=key(NODE, "b"),
                value=b"b1",
                headers={"ce-id": "7"},
                expect=fence(NODE, newest),
            ),
            Write(key=key(NODE, "c"), value=b"c1", expect=fence(NODE, newest)),
            Write(key=key(OTHER, "d"), value=b"d1", expect=fence(OTHER, 0)),
        ]
    )
    first, beaten, last = answers
    assert isinstance(beaten, Conflict)
    assert isinstance(first, int)
    assert isinstance(last, int)
    assert newest < first < last
    stored = await bucket.get(key(NODE, "b"))
    assert stored is not None
    assert (stored.value, stored.revision, stored.headers) == (b"b1", first, {"ce-id": "7"})
    assert await bucket.get(key(NODE, "c")) is None
    assert [entry.revision for entry in await bucket.latest(">")] == [newest, first, last]


async def test_get_returns_the_latest_value_with_revision_and_the_writers_headers(
    world: World,
) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "a"), b"old")
    revision = await bucket.append(
        key(NODE, "a"), b"new", headers={"ce-id": "7", "traceparent": "00-aa-bb-01"}
    )
    entry = await bucket.get(key(NODE, "a"))
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == (key(NODE, "a"), b"new", revision)
    assert dict(entry.headers) == {"ce-id": "7", "traceparent": "00-aa-bb-01"}
    assert entry.time_s > 1_600_000_000


async def test_revisions_are_stream_sequences_shared_by_all_keys(world: World) -> None:
    bucket = world.bucket()
    assert [
        await bucket.append(key(NODE, "a"), b"1"),
        await bucket.append(key(OTHER, "b"), b"2"),
        await bucket.append(key(NODE, "a"), b"3"),
    ] == [1, 2, 3]


async def test_an_empty_value_is_a_value(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "a"), b"")
    entry = await bucket.get(key(NODE, "a"))
    assert entry is not None
    assert entry.value == b""


async def test_append_with_fence_is_accepted_on_a_node_without_writes(world: World) -> None:
    bucket = world.bucket()
    assert await bucket.append(key(NODE, "a"), b"1", expect=fence(NODE, 0)) == 1
    assert await bucket.append(key(NODE, "b"), b"2", expect=fence(NODE, 1)) == 2


async def test_a_stale_writer_is_refused_and_nothing_is_stored(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "a"), b"1", expect=fence(NODE, 0))
    with pytest.raises(Conflict):
        await bucket.append(key(NODE, "b"), b"2", expect=fence(NODE, 0))
    assert await bucket.get(key(NODE, "b")) is None
    assert await bucket.last_revision(FENCE) == 1


async def test_a_writer_ahead_of_the_truth_is_refused(world: World) -> None:
    with pytest.raises(Conflict):
        await world.bucket().append(key(NODE, "a"), b"1", expect=fence(NODE, 5))


async def test_fences_of_other_nodes_are_independent(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "a"), b"1", expect=fence(NODE, 0))
    await bucket.append(key(OTHER, "b"), b"2", expect=fence(OTHER, 0))
    await bucket.append(key(OTHER, "c"), b"3", expect=fence(OTHER, 2))
    assert await bucket.append(key(NODE, "d"), b"4", expect=fence(NODE, 1)) == 4


async def test_node_names_that_are_prefixes_of_each_other_do_not_share_a_fence(
    world: World,
) -> None:
    bucket = world.bucket()
    await bucket.append(key("node.a", "u"), b"1", expect=fence("node.a", 0))
    assert await bucket.append(key("node", "u"), b"2", expect=fence("node", 0)) == 2
    assert await bucket.last_revision(subjects.node_fence("node.a")) == 1


async def test_a_repeated_fenced_append_is_refused_and_the_stored_value_shows_its_owner(
    world: World,
) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "a"), b"allocation-1", expect=fence(NODE, 0))
    with pytest.raises(Conflict):
        await bucket.append(key(NODE, "a"), b"allocation-1", expect=fence(NODE, 0))
    stored = await bucket.latest(subjects.node_keys(NODE))
    assert [(entry.value, entry.revision) for entry in stored] == [(b"allocation-1", 1)]


async def test_of_many_racers_with_one_fence_exactly_one_wins(world: World) -> None:
    bucket = world.bucket()
    won: list[int] = []
    lost: list[int] = []

    async def race(number: int) -> None:
        try:
            await bucket.append(key(NODE, f"pod-{number}"), b"x", expect=fence(NODE, 0))
        except Conflict:
            lost.append(number)
        else:
            won.append(number)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(race, number)
    assert (len(won), len(lost)) == (1, 19)
    assert len(await bucket.latest(subjects.node_keys(NODE))) == 1


async def test_a_condition_on_the_key_itself_guards_create_and_update(world: World) -> None:
    bucket = world.bucket(subjects.STATE_BUCKET)
    own = subjects.kv_subject(subjects.STATE_BUCKET, key(NODE, "a"))
    await bucket.append(key(NODE, "b"), b"unrelated")
    first = await bucket.append(key(NODE, "a"), b"1", expect=Expect(subject=own, sequence=0))
    with pytest.raises(Conflict):
        await bucket.append(key(NODE, "a"), b"again", expect=Expect(subject=own, sequence=0))
    await bucket.append(key(NODE, "b"), b"unrelated")
    await bucket.append(key(NODE, "a"), b"2", expect=Expect(subject=own, sequence=first))
    with pytest.raises(Conflict):
        await bucket.append(key(NODE, "a"), b"3", expect=Expect(subject=own, sequence=first))
    entry = await bucket.get(key(NODE, "a"))
    assert entry is not None
    assert entry.value == b"2"


async def test_latest_has_one_value_per_matching_key_in_order_of_revision(world: World) -> None:
    bucket = world.bucket()
    for uid, value in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        await bucket.append(key(NODE, uid), value)
    await bucket.append(key(OTHER, "c"), b"4")
    on_node = await bucket.latest(subjects.node_keys(NODE))
    assert [(entry.key, entry.value) for entry in on_node] == [
        (key(NODE, "b"), b"2"),
        (key(NODE, "a"), b"3"),
    ]
    assert [entry.revision for entry in await bucket.latest()] == [2, 3, 4]
    assert list(await bucket.latest(subjects.node_keys("nowhere"))) == []


async def test_latest_reads_thousands_of_keys(world: World) -> None:
    bucket = world.bucket()
    async with anyio.create_task_group() as group:
        for number in range(2_500):
            group.start_soon(bucket.append, key(NODE, f"pod-{number}"), b"%d" % number)
    entries = await bucket.latest(subjects.node_keys(NODE))
    assert len({entry.key for entry in entries}) == 2_500
    revisions = [entry.revision for entry in entries]
    assert revisions == sorted(revisions)


async def test_last_revision_is_zero_without_writes(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(OTHER, "a"), b"1")
    assert await bucket.last_revision(FENCE) == 0
    assert await bucket.last_revision(subjects.node_fence(OTHER)) == 1
    assert await bucket.last_revision(subjects.kv_subject(bucket.name, ">")) == 1


async def test_forget_removes_the_history_of_a_key_and_leaves_no_marker(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "gone"), b"1")
    await bucket.append(key(NODE, "gone"), b"2")
    await bucket.append(key(NODE, "kept"), b"3")
    await bucket.forget(key(NODE, "gone"))
    assert await bucket.get(key(NODE, "gone")) is None
    assert values(list(await bucket.latest())) == [b"3"]
    assert await bucket.append(key(NODE, "new"), b"4", expect=fence(NODE, 3)) == 4


async def test_forget_refuses_the_newest_record_of_a_node(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "old"), b"1")
    await bucket.append(key(NODE, "new"), b"2")
    await bucket.append(key(OTHER, "x"), b"3")
    with pytest.raises(Conflict):
        await bucket.forget(key(NODE, "new"))
    assert await bucket.last_revision(FENCE) == 2


async def test_forget_of_an_unknown_key_has_no_effect(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "a"), b"1")
    await bucket.forget(key(NODE, "unknown"))
    assert len(await bucket.latest()) == 1


async def test_watch_of_an_empty_bucket_is_synced_at_once(world: World) -> None:
    async with world.bucket().watch() as items:
        assert await take(items, 1) == [Synced(revision=0)]


async def test_watch_gives_latest_values_then_synced_then_all_that_follows(world: World) -> None:
    bucket = world.bucket()
    for uid, value in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        await bucket.append(key(NODE, uid), value)
    async with bucket.watch() as items:
        first = await until_synced(items)
        assert values(first) == [b"2", b"3"]
        assert first[-1] == Synced(revision=3)
        for value in (b"4", b"5"):
            await bucket.append(key(NODE, "a"), value, headers={"ce-id": "x"})
        later = await take(items, 2)
        assert values(later) == [b"4", b"5"]
        assert isinstance(later[0], Entry)
        assert later[0].headers["ce-id"] == "x"


async def test_watch_sees_only_keys_that_match(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(OTHER, "x"), b"no")
    async with bucket.watch(subjects.node_keys(NODE)) as items:
        assert isinstance((await take(items, 1))[0], Synced)
        await bucket.append(key(OTHER, "x"), b"no")
        await bucket.append(key(NODE, "a"), b"yes")
        assert values(await take(items, 1)) == [b"yes"]


async def test_watch_under_load_has_no_gap_no_repetition_and_stream_order(world: World) -> None:
    bucket = world.bucket()
    total = 1_000
    for number in range(50):
        await bucket.append(key(NODE, f"before-{number}"), b"0")

    async def write() -> None:
        for number in range(total):
            await bucket.append(key(NODE, f"pod-{number % 200}"), b"%d" % number)

    seen: list[Entry] = []
    async with anyio.create_task_group() as group, bucket.watch() as items:
        group.start_soon(write)
        with anyio.fail_after(25):
            while not seen or seen[-1].value != b"%d" % (total - 1):
                item = await anext(items)
                if isinstance(item, Entry):
                    seen.append(item)
    revisions = [entry.revision for entry in seen]
    assert revisions == sorted(set(revisions))
    written_after_sync = [e for e in seen if e.key.split(".")[1].startswith("pod-")]
    numbers = [int(entry.value) for entry in written_after_sync]
    latest_before_first = numbers[0]
    assert set(range(latest_before_first, total)) <= set(numbers)


async def test_watch_continues_after_an_outage_of_the_bus(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "a"), b"1")
    async with bucket.watch() as items:
        assert values(await until_synced(items)) == [b"1"]
        await world.interrupt()
        await bucket.append(key(NODE, "a"), b"2")
        await bucket.append(key(NODE, "b"), b"3")
        later = await take(items, 2)
        assert [(item.value, item.revision) for item in later if isinstance(item, Entry)] == [
            (b"2", 2),
            (b"3", 3),
        ]


async def test_watch_reports_reset_when_the_store_was_lost(world: World) -> None:
    bucket = world.bucket()
    for number in range(3):
        await bucket.append(key(NODE, f"old-{number}"), b"old")
    async with bucket.watch() as items:
        await until_synced(items)
        await world.wipe()
        await bucket.append(key(NODE, "new"), b"new")
        after = await until_synced(items)
        assert after[0] == Reset()
        if not values(after):  # the append came after the empty bucket was found
            after += await take(items, 1)
        assert values(after) == [b"new"]


async def test_feed_gives_the_nodes_records_and_then_each_new_one(world: World) -> None:
    bucket: Bucket = world.bucket()
    await bucket.append(key(OTHER, "x"), b"no")
    await bucket.append(key(NODE, "a"), b"1")
    await bucket.append(key(NODE, "a"), b"2", headers={"ce-id": "2"})
    async with world.feed(NODE).watch() as items:
        first = await until_synced(items)
        assert values(first) == [b"2"]
        assert first[-1] == Synced(revision=3)
        await bucket.append(key(OTHER, "x"), b"no")
        await bucket.append(key(NODE, "b"), b"3", headers={"ce-id": "3"})
        (entry,) = await take(items, 1)
        assert isinstance(entry, Entry)
        assert (entry.key, entry.value, entry.revision) == (key(NODE, "b"), b"3", 5)
        assert entry.headers["ce-id"] == "3"


async def test_feed_catches_up_after_an_outage_of_the_bus(world: World) -> None:
    bucket = world.bucket()
    async with world.feed(NODE).watch() as items:
        assert await until_synced(items) == [Synced(revision=0)]
        await world.interrupt()
        await bucket.append(key(NODE, "a"), b"1")
        await bucket.append(key(NODE, "b"), b"2")
        later = await take(items, 2)
        assert sorted(values(later)) == [b"1", b"2"]


async def test_feed_reports_reset_when_the_store_was_lost(world: World) -> None:
    bucket = world.bucket()
    await bucket.append(key(NODE, "old"), b"old")
    async with world.feed(NODE).watch() as items:
        await until_synced(items)
        await world.wipe()
        await bucket.append(key(NODE, "new"), b"new")
        after = await until_synced(items)
        assert after[0] == Reset()
        if not values(after):
            after += await take(items, 1)
        assert values(after) == [b"new"]
