# SPDX-License-Identifier: Apache-2.0
"""Tests of the scheduler's shell run with the guard of the core's entry point."""

import pytest

from tests.support.core_entrance import guard_entrance


@pytest.fixture(autouse=True)
def _entrance(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_entrance(monkeypatch)
