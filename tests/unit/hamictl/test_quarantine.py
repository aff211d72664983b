# SPDX-License-Identifier: Apache-2.0
"""``hamictl get quarantine`` shows what is isolated, where and why."""

from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from hamictl import client
from hamictl.cli import main

ROWS = [
    {
        "service": "nodeagent",
        "replica": "gpu-1",
        "kind": "pod",
        "key": "uid-1",
        "namespace": "team",
        "name": "train",
        "problem": "ValueError: odd",
        "failures": 3,
        "first_s": 0.0,
        "last_s": 0.0,
    },
    {
        "service": "registry",
        "replica": "registry-0",
        "kind": "report",
        "key": "hami.v1.report.gpu-2.nvidia",
        "namespace": "",
        "name": "",
        "problem": "RuntimeError: odder",
        "failures": 1,
        "first_s": 0.0,
        "last_s": 0.0,
    },
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Parameters of the requests; every answer is ``ROWS``."""
    found: list[dict[str, str]] = []

    def read(kind: type[Any], base: str, path: str, **query: str) -> Any:
        del base
        assert path == "/v1/quarantine"
        found.append(query)
        return msgspec.convert({"items": ROWS}, kind)

    monkeypatch.setattr(client, "read", read)
    return found


def test_objects_are_named_with_service_failures_and_problem(asked: list[dict[str, str]]) -> None:
    result = CliRunner().invoke(main, ["get", "quarantine", "--registry", "http://r"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[1].split()[:5] == ["nodeagent", "gpu-1", "pod", "team/train", "3"]
    assert "ValueError: odd" in lines[1]
    assert "hami.v1.report.gpu-2.nvidia" in lines[2]
    assert asked == [{"namespace": ""}]


def test_one_namespace_is_asked_for(asked: list[dict[str, str]]) -> None:
    arguments = ["get", "quarantine", "-n", "team", "-o", "json", "--registry", "http://r"]
    result = CliRunner().invoke(main, arguments)
    assert msgspec.json.decode(result.output)["items"][0]["failures"] == 3
    assert asked == [{"namespace": "team"}]
