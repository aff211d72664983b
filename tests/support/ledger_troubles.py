# SPDX-License-Identifier: Apache-2.0
"""Injects faults between a scheduler and its peers, drawn from one seeded source.

A request may be lost, its answer may be lost, or it may take effect long after its sender timed
out. A watch may deliver a message twice and may let messages of one node overtake those of another;
messages of one node keep their order, as the port promises. Every call takes a random number of
turns of the loop. Delays are seconds of the clock that the test moves.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Any, Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec import Struct

from hami_common.errors import Conflict, HamiError, Unavailable
from hami_common.ports import Bucket, Entry, Expect, KubeApi, Reset, Synced, WatchEvent, Write
from hami_common.runtime.tasks import background
from tests.support.memorybus import one_by_one

Trouble = Literal["none", "lost", "answer-lost", "late"]
Item = Entry | Synced | Reset


class SteppedClock:
    """A clock that only ``advance`` moves; all sleepers that are due wake at once."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._order = count()
        self._sleepers: list[tuple[float, int, anyio.Event]] = []

    def now_s(self) -> float:
        return 1_750_000_000.0 + self._elapsed_s

    def monotonic_s(self) -> float:
        return self._elapsed_s

    async def sleep(self, delay_s: float) -> None:
        if delay_s <= 0:
            await anyio.lowlevel.checkpoint()
            return
        event = anyio.Event()
        heapq.heappush(self._sleepers, (self._elapsed_s + delay_s, next(self._order), event))
        await event.wait()

    def advance(self, delay_s: float) -> None:
        self._elapsed_s += delay_s
        while self._sleepers and self._sleepers[0][0] <= self._elapsed_s:
            heapq.heappop(self._sleepers)[2].set()


class Link:
    """One process's way to its peers: up, down (calls fail), or hanging (calls wait)."""

    def __init__(self) -> None:
        self.state: Literal["up", "down", "hanging"] = "up"
        self._changed = anyio.Event()

    def become(self, state: Literal["up", "down", "hanging"]) -> None:
        self.state = state
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def pass_call(self, peer: str) -> None:
        """Let a request or an answer through."""
        while self.state == "hanging":
            await self._changed.wait()
        if self.state == "down":
            raise Unavailable(peer=peer, detail="the link is down")

    async def pass_news(self) -> None:
        """Let a message of a watch through."""
        while self.state != "up":
            await self._changed.wait()


class Rates(Struct, frozen=True, kw_only=True):
    """Rates of faults, per call or per delivered message."""

    write_lost: float = 0.008
    answer_lost: float = 0.012
    late: float = 0.008
    read_fails: float = 0.004
    repeated: float = 0.1
    overtaken: float = 0.3
    slow: float = 0.1
    """Rate at which a watch takes some turns before it delivers the next item."""
    far_behind: float = 0.01
    """Rate at which it takes a hundred times as many."""
    latest_s: float = 25.0
    """Longest time that a request is in flight after its sender timed out."""
    turns: int = 3
    """Most turns of the loop that each side of a call takes."""


class Troubles:
    """Draws faults; none while ``calm``."""

    def __init__(self, rng: random.Random, clock: SteppedClock, group: TaskGroup) -> None:
        self.calm = True
        self.rates = Rates()
        self.met: Counter[str] = Counter()
        self.under_way = 0
        """Requests in flight whose sender timed out."""
        self.connections = 1
        """Grows when all connections break: requests in flight on them never arrive."""
        self.armed: Trouble = "none"
        """Fault of the next append."""
        self._rng = rng
        self._clock = clock
        self._group = group

    def chance(self, rate: float) -> bool:
        return not self.calm and self._rng.random() < rate

    def draw(self) -> Trouble:
        """Draw the fault of a write."""
        if self.calm:
            return "none"
        if self.armed != "none":
            trouble, self.armed = self.armed, "none"
            self.met[trouble] += 1
            return trouble
        at = self._rng.random()
        rates = self.rates
        for trouble, rate in (
            ("lost", rates.write_lost),
            ("answer-lost", rates.answer_lost),
            ("late", rates.late),
        ):
            at -= rate
            if at < 0:
                self.met[trouble] += 1
                return trouble
        return "none"

    def pick(self, most: int) -> int:
        return self._rng.randrange(most)

    async def pause(self) -> None:
        """Yield to other tasks."""
        turns = 0 if self.calm else self._rng.randrange(self.rates.turns + 1)
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()

    async def lag(self) -> None:
        """Let a watch fall behind the writers."""
        if self.chance(self.rates.far_behind):
            self.met["far-behind"] += 1
            for _ in range(100):
                await self.pause()
        elif self.chance(self.rates.slow):
            await self.pause()

    def later(self, send: Callable[[], Awaitable[Any]]) -> None:
        """Run ``send`` at some later time, even if its sender has ended."""
        delay_s = self._rng.uniform(0.0, self.rates.latest_s)
        sent_on = self.connections
        self.under_way += 1

        async def arrive() -> None:
            try:
                await self._clock.sleep(delay_s)
                if self.connections == sent_on:
                    await send()
            except HamiError:
                self.met["late-refused"] += 1
            else:
                self.met["late-accepted"] += 1
            finally:
                self.under_way -= 1

        self._group.start_soon(arrive)

    async def write(self, peer: str, link: Link, send: Callable[[], Awaitable[Any]]) -> Any:
        """Run one write, with its fault."""
        await self.pause()
        await link.pass_call(peer)
        trouble = self.draw()
        if trouble == "late":
            self.later(send)
        if trouble in ("late", "lost"):
            raise Unavailable(peer=peer, detail=f"the request was {trouble}")
        try:
            answer = await send()
        except HamiError as error:
            if trouble == "answer-lost":
                raise Unavailable(peer=peer, detail="the refusal was lost") from error
            raise
        if trouble == "answer-lost":
            raise Unavailable(peer=peer, detail="the answer was lost")
        await self.pause()
        await link.pass_call(peer)
        return answer

    async def read(self, peer: str, link: Link, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Run one read, with its fault."""
        await self.pause()
        await link.pass_call(peer)
        if self.chance(self.rates.read_fails):
            self.met["read-failed"] += 1
            raise Unavailable(peer=peer, detail="the question was lost")
        answer = await ask()
        await self.pause()
        await link.pass_call(peer)
        return answer


class TroubledBucket:
    """Port ``Bucket`` with faults; ``accepted`` is called with every append that was stored."""

    def __init__(
        self,
        inner: Bucket,
        troubles: Troubles,
        link: Link,
        *,
        accepted: Callable[[str, Entry], None],
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._troubles = troubles
        self._link = link
        self.news = Link()
        """Blocks the deliveries of watches while calls go through."""
        self._accepted = accepted
        self._watches: list[_Disorder] = []

    async def get(self, key: str) -> Entry | None:
        entry: Entry | None = await self._troubles.read(
            "bus", self._link, lambda: self._inner.get(key)
        )
        return entry

    async def latest(self, key_filter: str = ">") -> Sequence[Entry]:
        entries: Sequence[Entry] = await self._troubles.read(
            "bus", self._link, lambda: self._inner.latest(key_filter)
        )
        return entries

    async def last_revision(self, subject_filter: str) -> int:
        revision: int = await self._troubles.read(
            "bus", self._link, lambda: self._inner.last_revision(subject_filter)
        )
        return revision

    async def append(
        self,
        key: str,
        value: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        expect: Expect | None = None,
    ) -> int:
        async def send() -> int:
            revision = await self._inner.append(key, value, headers=headers, expect=expect)
            self._accepted(self.name, Entry(key=key, value=value, revision=revision))
            return revision

        revision: int = await self._troubles.write("bus", self._link, send)
        return revision

    async def append_all(self, writes: Sequence[Write]) -> list[int | HamiError]:
        return await one_by_one(self, writes)

    async def forget(self, key: str) -> None:
        await self._troubles.read("bus", self._link, lambda: self._inner.forget(key))

    @asynccontextmanager
    async def watch(self, key_filter: str = ">") -> AsyncIterator[AsyncIterator[Item]]:
        async with self._inner.watch(key_filter) as items, background() as group:
            disorder = _Disorder(self._troubles, (self._link, self.news))
            group.start_soon(disorder.fill, items)
            self._watches.append(disorder)
            disordered = disorder.items()
            try:
                yield disordered
            finally:
                self._watches.remove(disorder)
                await disordered.aclose()

    def break_watches(self) -> None:
        """Make every watch end with an error."""
        for watch in self._watches:
            watch.break_off()


class _Disorder:
    """Messages of a watch, some twice, some after later ones of other nodes."""

    def __init__(self, troubles: Troubles, links: tuple[Link, Link]) -> None:
        self._is_broken = False
        self._told_all = False
        """All initial items were delivered; only then does a watch fall behind."""
        self._troubles = troubles
        self._links = links
        self._waiting: deque[Item] = deque()
        self._wake = anyio.Event()
        self._told: deque[Entry] = deque(maxlen=200)

    async def fill(self, items: AsyncIterator[Item]) -> None:
        async for item in items:
            self._waiting.append(item)
            self._wake.set()

    def break_off(self) -> None:
        self._is_broken = True
        self._wake.set()

    async def items(self) -> AsyncGenerator[Item, None]:
        while True:
            while not self._waiting and not self._is_broken:
                self._wake = anyio.Event()
                await self._wake.wait()
                await self._troubles.pause()
            if self._is_broken:
                raise Unavailable(peer="bus", detail="the watch broke off")
            if self._told_all:
                await self._troubles.lag()
            for link in self._links:
                await link.pass_news()
            item = self._next()
            if isinstance(item, Reset):
                self._told.clear()
                self._told_all = False
            elif isinstance(item, Synced):
                self._told_all = True
            yield item
            if isinstance(item, Entry):
                self._told.append(item)
            if self._told and self._troubles.chance(self._troubles.rates.repeated):
                self._troubles.met["repeated"] += 1
                yield self._told[self._troubles.pick(len(self._told))]

    def _next(self) -> Item:
        """The oldest item, or the oldest of another node before the next mark."""
        if not isinstance(self._waiting[0], Entry) or not self._troubles.chance(
            self._troubles.rates.overtaken
        ):
            return self._waiting.popleft()
        firsts: dict[str, int] = {}
        for position, item in enumerate(self._waiting):
            if not isinstance(item, Entry):
                break
            firsts.setdefault(item.key.partition(".")[0], position)
        chosen = list(firsts.values())[self._troubles.pick(len(firsts))]
        if chosen:
            self._troubles.met["overtaken"] += 1
        item = self._waiting[chosen]
        del self._waiting[chosen]
        return item


class TroubledKube:
    """Port ``KubeApi`` with faults."""

    def __init__(self, inner: KubeApi, troubles: Troubles, link: Link) -> None:
        self._inner = inner
        self._troubles = troubles
        self._link = link
        self.news = Link()
        """Blocks the deliveries of watches while calls go through."""
        self.lost_patches = 0
        """Number of the next patches of pods that fail, because of concurrent writes."""

    async def get(self, path: str) -> bytes:
        raw: bytes = await self._troubles.read(
            "API server", self._link, lambda: self._inner.get(path)
        )
        return raw

    async def list_pages(
        self, path: str, *, label_selector: str = "", field_selector: str = "", page_size: int = 500
    ) -> Sequence[bytes]:
        pages: Sequence[bytes] = await self._troubles.read(
            "API server",
            self._link,
            lambda: self._inner.list_pages(
                path,
                label_selector=label_selector,
                field_selector=field_selector,
                page_size=page_size,
            ),
        )
        return pages

    async def metadata_pages(
        self, path: str, *, label_selector: str = "", page_size: int = 500
    ) -> AsyncIterator[bytes]:
        async def read() -> list[bytes]:
            pages = self._inner.metadata_pages(
                path, label_selector=label_selector, page_size=page_size
            )
            return [page async for page in pages]

        found: list[bytes] = await self._troubles.read("API server", self._link, read)
        for page in found:
            yield page

    async def create(self, path: str, body: bytes) -> bytes:
        raw: bytes = await self._troubles.write(
            "API server", self._link, lambda: self._inner.create(path, body)
        )
        return raw

    async def patch(
        self, path: str, body: bytes, *, content_type: str = "application/merge-patch+json"
    ) -> bytes:
        if self.lost_patches and "/pods/" in path:
            self.lost_patches -= 1
            raise Conflict(what=path, detail="the object has been modified")
        raw: bytes = await self._troubles.write(
            "API server",
            self._link,
            lambda: self._inner.patch(path, body, content_type=content_type),
        )
        return raw

    async def replace(self, path: str, body: bytes) -> bytes:
        return await self._inner.replace(path, body)

    async def delete(self, path: str, *, body: bytes = b"") -> None:
        await self._inner.delete(path, body=body)

    @asynccontextmanager
    async def _slow(
        self, watch: AbstractAsyncContextManager[AsyncIterator[WatchEvent]]
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        async with watch as events:

            async def slowly() -> AsyncGenerator[WatchEvent, None]:
                told_all = False
                async for event in events:
                    told_all = told_all or event.type == "SYNCED"
                    if told_all:
                        await self._troubles.lag()
                    await self._link.pass_news()
                    await self.news.pass_news()
                    yield event

            slow = slowly()
            try:
                yield slow
            finally:
                await slow.aclose()

    def list_watch(
        self, path: str, *, label_selector: str = "", field_selector: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        return self._slow(
            self._inner.list_watch(
                path, label_selector=label_selector, field_selector=field_selector
            )
        )
