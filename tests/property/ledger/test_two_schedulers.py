# SPDX-License-Identifier: Apache-2.0
"""Two schedulers on one bus never double or lose a share, whatever happens (design D3-D6).

40,000 random operations by default: binds, gangs, Volcano's sessions, claims of users and of pods,
resizes and releases, agents' states, nodes that are lost and return, replicas that die, hang or are
cut off, requests and answers that are lost or come late, repeated and reordered delivery. Judged
from pods, claims and streams alone, see ``judge``.

They run in parts against the in-memory bus, on an event loop whose time stands still while any task
can run: such a run depends on its seed alone and can be repeated exactly. A part of the number runs
against a real nats-server as well, because only there are the events that must equal the accepted
appends, and a smaller number against three servers, where a scheduler may read from a stale
replica. Measured on two shared cores: 990 to 1,460 operations per second in memory, 390 to 630 with
the server. HAMI_PROPERTY_OPS sets another total (100,000 take four minutes), HAMI_PROPERTY_SEED
another seed.
"""

import pytest

from tests.property.ledger.conftest import OPERATIONS, SEED, OpenDrive, memory_drive
from tests.property.ledger.drive import ROUND, Drive
from tests.support.ledger_outside import SteppedLoop

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(360)]

PARTS = 4
ENOUGH = 5 * ROUND
"""A run this long includes every kind of operation."""


class TestInMemory:
    @pytest.fixture
    def anyio_backend(self) -> tuple[str, dict[str, object]]:
        return "asyncio", {"loop_factory": SteppedLoop}

    @pytest.mark.parametrize("part", range(PARTS))
    async def test_shares_are_neither_doubled_nor_lost(self, part: int) -> None:
        async with memory_drive(SEED + part) as drive:
            await drive.start()
            await drive.run(OPERATIONS // PARTS)
            print(drive.report())
            check_everything_happened(drive)

    async def test_a_run_is_repeated_exactly_by_its_seed(self) -> None:
        reports = []
        for _ in range(2):
            async with memory_drive(SEED) as drive:
                await drive.start()
                await drive.run(min(ROUND, OPERATIONS))
                reports.append(drive.report().partition("\n")[2])
        assert reports[0] == reports[1]


class TestOnNats:
    async def test_shares_are_neither_doubled_nor_lost_and_every_append_is_an_event(
        self, nats_drive: OpenDrive
    ) -> None:
        async with nats_drive(SEED) as drive:
            await drive.start()
            await drive.run(OPERATIONS // PARTS)
            print(drive.report())
            check_everything_happened(drive)
            stored = drive.judge.stored
            assert drive.judge.events["allocation"] == stored["hami_alloc"] > 0
            assert drive.judge.events["state"] == stored["hami_state"] > 0


class TestOnThreeServers:
    async def test_shares_are_neither_doubled_nor_lost_when_replicas_lag(
        self, replicated_drive: OpenDrive
    ) -> None:
        async with replicated_drive(SEED) as drive:
            await drive.start()
            await drive.run(min(2 * ROUND, OPERATIONS))
            print(drive.report())
            assert drive.chaos.outcomes["bind bound"] > 0
            assert drive.judge.events["allocation"] == drive.judge.stored["hami_alloc"] > 0


def check_everything_happened(drive: Drive) -> None:
    """Verify coverage: a run without some operations would prove nothing."""
    done = drive.chaos.done.total()
    if done < ENOUGH:
        return
    missing = {kind.__name__ for kind, _ in drive.chaos.operations} - drive.chaos.done.keys()
    assert not missing
    for what in (
        "bind bound",
        "bind no-fit",
        "resize done",
        "state running",
        "end removed",
        "claim allocated",
    ):
        assert drive.chaos.outcomes[what] > done / 100, what
    assert drive.chaos.outcomes["gang bound"] > done / 1000
    for what in ("prepare held", "prepare no-fit", "withdraw done", "admit admitted"):
        assert drive.chaos.outcomes[what] > done / 1000, what
    assert drive.chaos.outcomes["claim prepared"] > done / 1000
    assert drive.chaos.outcomes["claim unprepared"] > 0
    for what in ("pod-claim allocated", "pod-claim collected"):
        assert drive.chaos.outcomes[what] > done / 1000, what
    for outcome in ("created", "written", "re-picked", "cleared"):
        values = [
            replica.value("hami_scheduler_claims_total", outcome=outcome)
            for replica in drive.world.all_replicas
        ]
        assert sum(values) > 0, outcome
    for trouble in ("lost", "answer-lost", "late-accepted", "late-refused", "repeated"):
        assert drive.world.troubles.met[trouble] > 0, trouble
