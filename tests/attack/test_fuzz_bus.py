# SPDX-License-Identifier: Apache-2.0
"""Random hostile bus messages end no service, and a good pod still runs on an honest node."""

import pytest

from tests.attack.fuzz.runner import SEED, attack, shown
from tests.attack.fuzz.targets import TARGETS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


async def test_hostile_messages_end_no_service() -> None:
    target = TARGETS["bus"]
    report = await attack(target, SEED, target.few)
    assert report.count == target.few
    if report.faults:
        pytest.fail(shown(report), pytrace=False)
