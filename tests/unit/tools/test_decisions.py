# SPDX-License-Identifier: Apache-2.0
"""Decisions that ADRs cite by number are in docs/design.md."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
CITED = re.compile(r"\bD(\d{1,2})(?: to D(\d{1,2}))?\b")
LISTED = re.compile(r"\*\*D(\d{1,2})\b")


def test_every_cited_decision_is_listed() -> None:
    listed = set(map(int, LISTED.findall((DOCS / "design.md").read_text(encoding="utf-8"))))
    assert len(listed) > 40
    for path in sorted((DOCS / "adr").glob("*.md")):
        for first, last in CITED.findall(path.read_text(encoding="utf-8")):
            cited = set(range(int(first), int(last or first) + 1))
            assert cited <= listed, (path.name, cited - listed)
