# SPDX-License-Identifier: Apache-2.0
"""Every append to a bucket has a condition: replicas do not see each other's append in flight."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hami_common.bus import subjects
from hami_common.ports import Expect
from tests.support.memorybus import MemoryBus
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import World, quiet

ROOT = Path(__file__).parents[4]
SOURCES = sorted(path for part in ("libs", "services") for path in (ROOT / part).glob("*/src"))


def writes(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that store a value under a key; ``append`` of a list has one argument."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            if len(node.args) > 1 or "value" in {keyword.arg for keyword in node.keywords}:
                yield node
        elif isinstance(node.func, ast.Name) and node.func.id == "Write":
            yield node


def has_condition(call: ast.Call) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "expect"]
    return bool(given) and not (isinstance(given[0], ast.Constant) and given[0].value is None)


@pytest.mark.timeout(30)  # reads all sources
def test_every_write_in_the_sources_names_its_condition() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{call.lineno}": call
        for source in SOURCES
        for path in sorted(source.rglob("*.py"))
        if "Bucket" in (text := path.read_text("utf-8")) or "Write" in text
        for call in writes(ast.parse(text))
    }
    assert len([name for name in found if "hami_scheduler" in name]) >= 3
    assert [name for name, call in found.items() if not has_condition(call)] == []


class WatchedBus(MemoryBus):
    """Records the condition of each write."""

    conditions: list[tuple[str, Expect | None]]

    def store(
        self, bucket: str, key: str, value: bytes, headers: Mapping[str, str], expect: Expect | None
    ) -> int:
        self.conditions.append((bucket, expect))
        return super().store(bucket, key, value, headers, expect)


@pytest.mark.anyio
async def test_records_of_a_pods_life_are_all_conditional() -> None:
    world = World()
    bus = world.bus = WatchedBus(clock=world.clock)
    bus.conditions = []
    await world.add_devices(builders.devices("n1"))  # as the test's registry does, without one
    bus.conditions.clear()
    pod = world.add_pod(builders.pod("web"))
    async with world.scheduler() as s:
        assert not await s.bind(pod, "n1")
        await quiet()
        world.kube.remove("/api/v1/namespaces/default/pods/web")
        await world.advance(60, "n1")
    ledger = [expect for bucket, expect in bus.conditions if bucket == subjects.ALLOC_BUCKET]
    assert len(ledger) >= 2
    assert None not in [expect for _, expect in bus.conditions]
