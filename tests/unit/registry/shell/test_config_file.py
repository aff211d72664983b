# SPDX-License-Identifier: Apache-2.0
"""The device configuration file: changes, symlink swaps, mistakes."""

from pathlib import Path

import anyio
import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import SettingsInvalid
from hami_registry.core.device_config import DeviceConfig
from hami_registry.shell.config_file import ConfigFile
from hami_registry.shell.metrics import Metrics
from tests.support.registry import quarantine


def config_file(path: Path | str) -> tuple[ConfigFile, Metrics]:
    metrics = Metrics(CollectorRegistry())
    return ConfigFile(str(path), metrics=metrics), metrics


def write(path: Path, slots: int) -> None:
    path.write_text(f"[defaults]\nslots = {slots}\n")


def test_no_file_means_defaults() -> None:
    found, _ = config_file("")
    assert found.load() == DeviceConfig()


@pytest.mark.parametrize("text", ["[defaults]\nslots = 0\n", "nonsense", None])
def test_file_that_cannot_be_used_at_start_is_an_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "devices.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsInvalid, match=r"devices\.toml"):
        config_file(path)[0].load()


def test_change_is_reported_until_it_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    write(path, 4)
    found, metrics = config_file(path)
    assert found.load().defaults.slots == 4
    assert found.reload() is None
    write(path, 12)
    changed = found.reload()
    assert changed is not None
    assert changed.defaults.slots == 12
    assert found.reload() == changed
    found.used()
    assert found.reload() is None
    value = metrics.registry.get_sample_value
    assert value("hami_registry_config_loads_total", {"outcome": "ok"}) == 1


def test_mistake_keeps_the_old_and_shows_until_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text("defaults: {slots: 4}\n")
    found, metrics = config_file(path)
    found.load()
    path.write_text("defaults: {slots: 4000000}\n")
    assert found.reload() is None
    assert "slots" in found.problem
    value = metrics.registry.get_sample_value
    assert value("hami_registry_config_problem") == 1
    assert found.reload() is None
    assert value("hami_registry_config_loads_total", {"outcome": "failed"}) == 1
    path.unlink()
    assert found.reload() is None
    assert "No such file" in found.problem
    path.write_text("defaults: {slots: 5}\n")
    assert found.reload() is not None
    found.used()
    assert found.problem == ""
    assert value("hami_registry_config_problem") == 0


@pytest.mark.anyio
async def test_refused_change_is_retried_until_it_is_accepted_or_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "devices.toml"
    write(path, 4)
    found, metrics = config_file(path)
    found.load()
    offered: list[int] = []
    refusing = True

    def use(config: DeviceConfig) -> None:
        offered.append(config.defaults.slots)
        if refusing and config.defaults.slots == 2:
            raise SettingsInvalid(field="device configuration", problem="in use", fix="wait")

    async def until(times: int) -> None:
        with anyio.fail_after(10):
            while len(offered) < times:
                await anyio.sleep(0.001)

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: found.watch(use, quarantine(), interval_s=0.001))
        write(path, 2)
        await until(3)
        assert set(offered) == {2}
        assert "in use" in found.problem
        value = metrics.registry.get_sample_value
        assert value("hami_registry_config_loads_total", {"outcome": "failed"}) == 1
        refusing = False
        await until(len(offered) + 1)
        with anyio.fail_after(10):
            while found.problem:
                await anyio.sleep(0.001)
        taken = len(offered)
        refusing = True
        write(path, 12)
        await until(taken + 1)
        assert offered[-1] == 12
        group.cancel_scope.cancel()


def test_swap_of_a_mounted_configmap_is_seen(tmp_path: Path) -> None:
    """Kubelet changes a ConfigMap by moving the symlink ``..data`` to another folder."""
    for name, slots in (("..v1", 4), ("..v2", 7)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "devices.toml", slots)
    data = tmp_path / "..data"
    data.symlink_to("..v1")
    path = tmp_path / "devices.toml"
    path.symlink_to("..data/devices.toml")
    found, _ = config_file(path)
    assert found.load().defaults.slots == 4
    fresh = tmp_path / "..data_tmp"
    fresh.symlink_to("..v2")
    fresh.replace(data)
    changed = found.reload()
    assert changed is not None
    assert changed.defaults.slots == 7
