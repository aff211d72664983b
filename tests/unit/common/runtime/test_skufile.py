# SPDX-License-Identifier: Apache-2.0
"""The file of the catalog of SKUs is read again; an invalid one never replaces a valid one."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import SettingsInvalid
from hami_common.runtime.skufile import SkuFileWatch
from hami_common.vendors.catalog import Catalog

pytestmark = pytest.mark.anyio

ONE = '[[sku]]\nname = "a"\nmemory_mib = 1000\n[[sku.alternative]]\nvendor = "nvidia"\n'


def watch_of(path: Path | str) -> tuple[SkuFileWatch, CollectorRegistry]:
    registry = CollectorRegistry()
    watch = SkuFileWatch(str(path), vendors=Catalog.from_settings(), registry=registry)
    return watch, registry


async def looked(watch: SkuFileWatch) -> SkuFileWatch:
    """Read twice: one read alone may be of a file that is still written."""
    await watch.look()
    await watch.look()
    return watch


async def test_changed_file_is_taken_over_and_a_wrong_one_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "skus.toml"
    path.write_text(ONE)
    watch, registry = watch_of(path)
    first = watch.catalog
    path.write_text(ONE.replace('name = "a"', 'name = "b"'))
    await watch.look()
    assert watch.catalog is first, "one read is not enough"
    await watch.look()
    assert [sku.name for sku in watch.catalog.skus] == ["b"]
    assert watch.catalog.digest != first.digest
    kept = watch.catalog
    path.write_text("[[sku]]\nname = 1")
    assert (await looked(watch)).catalog is kept
    assert "sku" in watch.problem
    assert registry.get_sample_value("hami_skus_file_valid") == 0
    path.unlink()
    assert (await looked(watch)).catalog is kept
    assert "No such file" in watch.problem
    path.write_text(ONE.replace('name = "a"', 'name = "b"'))
    assert (await looked(watch)).problem == ""
    assert registry.get_sample_value("hami_skus_file_valid") == 1
    assert registry.get_sample_value("hami_skus_info", {"digest": watch.catalog.digest}) == 1


async def test_changed_sku_under_its_old_version_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "skus.toml"
    path.write_text(ONE)
    watch, _ = watch_of(path)
    path.write_text(ONE.replace("1000", "2000"))
    await looked(watch)
    assert watch.catalog.skus[0].memory_mib == 1000
    assert "sku a: version" in watch.problem
    path.write_text(ONE.replace("memory_mib = 1000", "version = 2\nmemory_mib = 2000"))
    await looked(watch)
    assert watch.catalog.skus[0].title == "a@2"


def test_wrong_or_missing_file_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "skus.toml"
    with pytest.raises(SettingsInvalid, match="skus_file"):
        watch_of(path)
    path.write_text("[[sku]]\nname = 1")
    with pytest.raises(SettingsInvalid, match="sku"):
        watch_of(path)
    assert watch_of("")[0].catalog.skus == ()
