# SPDX-License-Identifier: Apache-2.0
"""The recorded history that the unit tests of the console read is what the encoder writes."""

from tests.support.fleet_history import RECORDED, recorded


def test_recorded_history_is_what_the_encoder_writes() -> None:
    assert RECORDED.read_text() == recorded(), "run python -m tests.support.fleet_history"
