# SPDX-License-Identifier: Apache-2.0
"""Tables that kubectl prints."""

import pytest

from hami_sim.apiserver.tables import human_duration, render


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (150, "2m30s"),
        (600, "10m"),
        (3 * 3600, "3h"),
        (3 * 3600 + 120, "3h2m"),
        (47 * 3600, "47h"),
        (49 * 3600, "2d1h"),
        (10 * 86400, "10d"),
        (-10, "<invalid>"),
    ],
)
def test_durations_are_shortened_as_kubectl_does(seconds: int, text: str) -> None:
    assert human_duration(seconds) == text


def test_pod_status_column_shows_the_containers_trouble() -> None:
    pod = {
        "metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "c"}], "nodeName": "n"},
        "status": {
            "phase": "Pending",
            "containerStatuses": [
                {"ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
            ],
        },
    }
    table = render("pods", [pod], now=1767225660.0, metadata={}, full=dict)
    assert table["rows"][0]["cells"][:5] == ["p", "0/1", "CrashLoopBackOff", "0", "60s"]
    assert table["rows"][0]["cells"][6] == "n"
