# SPDX-License-Identifier: Apache-2.0
"""The bus loses its storage: the ledger is rebuilt from signed pod annotations (design D6).

After a random history the rebuilt ledger equals the lost one, pod by pod and share by share; only
sequence numbers and released records differ. HAMI_PROPERTY_SEED sets another seed.
"""

from collections.abc import AsyncIterator

import anyio
import pytest

from tests.property.ledger.chaos import SLOTS
from tests.property.ledger.conftest import SEED, OpenDrive, memory_drive
from tests.property.ledger.drive import ROUND, Drive
from tests.support.ledger_outside import SteppedLoop

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SEEDS = range(SEED, SEED + 3)
HISTORY = 2 * ROUND


async def lose_everything(drive: Drive) -> None:
    await drive.world.wipe()
    drive.judge.begin_again()


async def check_rebuilt(drive: Drive) -> None:
    """Lose everything while all schedulers run; the rebuilt ledger equals the lost one."""
    before = drive.judge.ledger()
    assert before
    await lose_everything(drive)
    await drive.rest()
    assert drive.judge.ledger() == before
    rebuilds = [
        r.value("hami_scheduler_ledger_rebuilds_total") for r in drive.world.replicas.values()
    ]
    assert sum(rebuilds) > 0


class TestInMemory:
    @pytest.fixture
    def anyio_backend(self) -> tuple[str, dict[str, object]]:
        return "asyncio", {"loop_factory": SteppedLoop}

    @pytest.fixture(params=SEEDS)
    async def drive(
        self, request: pytest.FixtureRequest, anyio_backend: object
    ) -> AsyncIterator[Drive]:
        """A cluster with a history."""
        async with memory_drive(request.param) as drive:
            drive.chaos.leave_out("claim")  # only containers, which this world lacks, prove its use
            await drive.start()
            await drive.run(HISTORY)
            yield drive

    async def test_running_schedulers_rebuild_the_ledger(self, drive: Drive) -> None:
        await check_rebuilt(drive)

    async def test_scheduler_that_starts_on_an_empty_bus_rebuilds_the_ledger(
        self, drive: Drive
    ) -> None:
        before = drive.judge.ledger()
        assert before
        for slot in SLOTS:
            await drive.world.stop(slot)
        await lose_everything(drive)
        await drive.world.start(SLOTS[0])
        await drive.rest()
        assert drive.judge.ledger() == before

    async def test_life_goes_on_after_the_ledger_was_rebuilt(self, drive: Drive) -> None:
        await check_rebuilt(drive)
        await drive.run(ROUND)

    async def test_no_share_is_doubled_when_the_bus_is_wiped_while_pods_are_bound(
        self, drive: Drive
    ) -> None:
        # A pod that loses our label in the moment in which the ledger is lost cannot be found: no
        # record is left that names it, and the rebuild lists by label (design D6).
        drive.chaos.leave_out("take_label")
        drive.world.troubles.calm = False
        async with anyio.create_task_group() as group:
            group.start_soon(drive.chaos.run, ROUND)
            for _ in range(drive.world.rng.randrange(200, 4_000)):
                await anyio.lowlevel.checkpoint()
            await drive.world.wipe()
        drive.judge.begin_again(settled=False)
        await drive.rest()
        assert drive.judge.ledger()


class TestOnNats:
    async def test_running_schedulers_rebuild_the_ledger(self, nats_drive: OpenDrive) -> None:
        async with nats_drive(SEED) as drive:
            drive.chaos.leave_out("claim")  # as above
            await drive.start()
            await drive.run(HISTORY)
            await check_rebuilt(drive)
            await drive.run(ROUND)
