# SPDX-License-Identifier: Apache-2.0
"""The dashboards link to views that the console has."""

import re
from pathlib import Path

from tools import gen_monitoring

VIEWS = Path(__file__).parents[3] / "console" / "src" / "views"


def paths() -> set[str]:
    """First segment of the path of each view."""
    found: set[str] = set()
    for source in VIEWS.glob("*/index.ts"):
        path = re.search(r'path: "/(\w+)', source.read_text(encoding="utf-8"))
        assert path is not None, source
        found.add(path[1])
    return found


def test_links_of_dashboards_are_views_of_the_console() -> None:
    linked = {
        link["url"].removeprefix("${console}/")
        for uid in gen_monitoring.ALL
        for link in gen_monitoring.dashboard(uid)["links"]
    }
    assert linked
    assert linked <= paths()
