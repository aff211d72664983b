# SPDX-License-Identifier: Apache-2.0
"""Holds the catalog of SKUs of a file, which webhook and registry read alike.

Decides which catalogs may follow each other; ``watchedfile`` reads the file.
"""

from typing import Final

from prometheus_client import CollectorRegistry

from hami_common.runtime.settings import digest_of
from hami_common.runtime.watchedfile import FileKind, WatchedFile
from hami_common.skus import catalog
from hami_common.skus.catalog import SkuCatalog
from hami_common.vendors.catalog import Catalog

FILE: Final = FileKind(name="skus", title="catalog of SKUs", field="skus_file")


def sku_file(
    path: str, *, vendors: Catalog, registry: CollectorRegistry
) -> WatchedFile[SkuCatalog]:
    """Read ``path``; empty: a catalog without SKUs. ``SettingsInvalid``: it is invalid."""

    def parse(content: bytes) -> SkuCatalog:
        return catalog.parse(content, vendors=vendors, digest=digest_of(content))

    file = WatchedFile.at_start(
        path, FILE, parse=parse, default=catalog.empty(vendors), registry=registry
    )
    file.use = lambda found: found.require_successor_of(file.value)
    return file
