# SPDX-License-Identifier: Apache-2.0
"""Every test that the threat model names exists, and the threat model names every attack."""

import re
from pathlib import Path

from tools.named_tests import level_of

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"`(tests/[\w/]+\.py)`")


def named() -> set[str]:
    return set(NAMED.findall((ROOT / "docs/security.md").read_text(encoding="utf-8")))


def test_tests_of_the_threat_model_exist_and_run() -> None:
    for name in sorted(named()):
        level_of(name)


def test_every_file_of_attacks_has_a_row() -> None:
    files = {f"tests/attack/{path.name}" for path in (ROOT / "tests/attack").glob("test_*.py")}
    assert files - named() == set()
