# SPDX-License-Identifier: Apache-2.0
"""A few random hostile inputs of each kind break no law; ``./dev fuzz`` runs the full sizes."""

import pytest

from tests.attack.fuzz.runner import SEED, attack, shown
from tests.attack.fuzz.targets import TARGETS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "bus"])
async def test_hostile_input_violates_no_law(name: str) -> None:
    target = TARGETS[name]
    report = await attack(target, SEED, target.few, is_shrunk=False)
    assert report.count == target.few
    if report.faults:
        pytest.fail(shown(report), pytrace=False)
