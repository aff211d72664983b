# SPDX-License-Identifier: Apache-2.0
"""A changed settings file: settings applied at once, those that need a restart, and refusals."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import Struct, inspect
from prometheus_client import CollectorRegistry

import hami_nodeagent.settings
import hami_registry.settings
import hami_scheduler.settings
import hami_webhook.settings
from hami_common.errors import SettingsInvalid
from hami_common.runtime.httpd import Request, Response
from hami_common.runtime.reload import SettingsFile, merge
from hami_common.runtime.settings import ServiceSettings, load

pytestmark = pytest.mark.anyio

SERVICES: tuple[type[ServiceSettings], ...] = (
    hami_nodeagent.settings.Settings,
    hami_registry.settings.Settings,
    hami_scheduler.settings.Settings,
    hami_webhook.settings.Settings,
)


class Pace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    look_s: float = 1.0
    start_s: float = 5.0


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    HOT: ClassVar[frozenset[str]] = ServiceSettings.HOT | {"depth", "pace.look_s"}

    depth: int = 1
    width: int = 1
    pace: Pace = Pace()


class Running:
    """A settings file and its follower."""

    def __init__(self, path: Path, *argv: str) -> None:
        self.registry = CollectorRegistry()
        self.used: list[Settings] = []

        def again(content: bytes | None = None) -> Any:
            flags = ["--config", str(path), *argv]
            return load(Settings, service="tester", argv=flags, environ={}, content=content)

        self.file: SettingsFile[Settings] = SettingsFile(
            again(), load=again, service="tester", registry=self.registry
        )
        self.file.use = self.used.append

    async def settle(self) -> None:
        """Poll twice: a file counts once two reads return the same."""
        await self.file.file.look()
        await self.file.file.look()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"hami_settings_{name}", labels)

    async def told(self) -> dict[str, Any]:
        request = Request(method="GET", path="/", query={}, headers={}, body=b"", params={})
        answer = await self.file.page(request)
        assert isinstance(answer, Response)
        told: dict[str, Any] = json.loads(answer.body)
        return told


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text("depth = 1\n")
    return path


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def test_hot_change_is_handed_over_and_shown(path: Path) -> None:
    running = Running(path)
    assert running.value("generation") == 1
    text = "depth = 7\n[pace]\nlook_s = 0.5\n"
    path.write_text(text)
    await running.settle()
    (used,) = running.used
    assert (used.depth, used.pace.look_s) == (7, 0.5)
    assert running.file.settings == used
    assert running.value("generation") == 2
    assert running.value("info", digest=digest(text)) == 1
    assert running.value("reloads_total", outcome="ok") == 1
    assert await running.told() == {
        "service": "tester",
        "file": str(path),
        "digest": digest(text),
        "observedGeneration": 2,
        "problem": "",
        "restartNeeded": [],
    }
    await running.settle()
    assert len(running.used) == 1, "the same file is taken over once"


async def test_setting_that_needs_a_restart_is_named_and_kept(path: Path) -> None:
    running = Running(path)
    path.write_text("depth = 2\nwidth = 9\n[pace]\nlook_s = 0.5\nstart_s = 1.0\n")
    await running.settle()
    assert (running.file.settings.depth, running.file.settings.width) == (2, 1)
    assert (running.file.settings.pace.look_s, running.file.settings.pace.start_s) == (0.5, 5.0)
    assert (await running.told())["restartNeeded"] == ["width", "pace.start_s"]
    assert running.value("restart_needed") == 2
    path.write_text("depth = 2\n")
    await running.settle()
    assert running.value("restart_needed") == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dept = 2\n", "dept: is not a known key; did you mean depth?"),
        ("[pace]\nlooks_s = 1\n", "did you mean pace.look_s?"),
        ('depth = "deep"\n', "depth: Expected `int`, got `str`"),
        ("depth = \n", "settings.toml"),
    ],
)
async def test_invalid_file_keeps_the_settings_in_force_and_is_reported_until_fixed(
    path: Path, text: str, problem: str
) -> None:
    running = Running(path)
    path.write_text(text)
    await running.settle()
    assert running.used == []
    assert running.file.settings.depth == 1
    assert problem in (await running.told())["problem"]
    assert running.value("file_valid") == 0
    assert running.value("generation") == 1
    path.write_text("depth = 1\n")
    await running.settle()
    assert ((await running.told())["problem"], running.value("file_valid")) == ("", 1)
    assert running.value("generation") == 1, "it is the file of the start again"


async def test_flags_keep_precedence(path: Path) -> None:
    running = Running(path, "--set", "depth=5")
    path.write_text("depth = 2\n")
    await running.settle()
    assert running.file.settings.depth == 5


async def test_service_may_refuse_the_whole(path: Path) -> None:
    running = Running(path)

    def refuse(settings: Settings) -> None:
        raise SettingsInvalid(field="depth", problem=f"{settings.depth}", fix="give less")

    running.file.use = refuse
    path.write_text('depth = 2\nlog_level = "ERROR"\n')
    await running.settle()
    assert running.file.settings.depth == 1
    assert running.file.file.problem == "setting depth: 2; give less"


async def test_log_level_follows_the_file(path: Path) -> None:
    root = logging.getLogger()
    before = root.level
    try:
        running = Running(path)
        path.write_text('log_level = "DEBUG"\n')
        await running.settle()
        assert root.level == logging.DEBUG
    finally:
        root.setLevel(before)


@pytest.mark.parametrize("settings", SERVICES, ids=lambda one: one.__module__)
def test_every_hot_setting_exists(settings: type[ServiceSettings]) -> None:
    for path in settings.HOT:
        here: inspect.Type = inspect.type_info(settings)
        for name in path.split("."):
            assert isinstance(here, inspect.StructType), path
            here = next(field.type for field in here.fields if field.name == name)


def test_merge_without_differences_changes_nothing() -> None:
    assert merge(Settings(), Settings(), Settings.HOT) == (Settings(), ())
