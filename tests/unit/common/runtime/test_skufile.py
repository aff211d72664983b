# SPDX-License-Identifier: Apache-2.0
"""The catalog of SKUs: which one may follow the one in force."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import SettingsInvalid
from hami_common.runtime.skufile import sku_file
from hami_common.runtime.watchedfile import WatchedFile
from hami_common.skus.catalog import SkuCatalog
from hami_common.vendors.catalog import Catalog

ONE = '[[sku]]\nname = "a"\nmemory_mib = 1000\n[[sku.alternative]]\nvendor = "nvidia"\n'


def catalog_of(path: Path | str) -> WatchedFile[SkuCatalog]:
    return sku_file(str(path), vendors=Catalog.from_settings(), registry=CollectorRegistry())


@pytest.mark.anyio
async def test_changed_sku_under_its_old_version_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "skus.toml"
    path.write_text(ONE)
    file = catalog_of(path)

    async def change(text: str) -> None:
        path.write_text(text)
        await file.look()
        await file.look()

    await change(ONE.replace("1000", "2000"))
    assert file.value.skus[0].memory_mib == 1000
    assert "sku a: version" in file.problem
    await change(ONE.replace("memory_mib = 1000", "version = 2\nmemory_mib = 2000"))
    assert (file.value.skus[0].title, file.problem) == ("a@2", "")
    assert file.value.digest == file.digest


def test_wrong_or_missing_file_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "skus.toml"
    with pytest.raises(SettingsInvalid, match="skus_file"):
        catalog_of(path)
    path.write_text("[[sku]]\nname = 1")
    with pytest.raises(SettingsInvalid, match="sku"):
        catalog_of(path)
    assert catalog_of("").value.skus == ()
