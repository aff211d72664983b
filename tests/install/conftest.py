# SPDX-License-Identifier: Apache-2.0
"""One site for all tests of the tier: a cluster of one real node, where HAMi is installed.

The tests depend on each other's order: install, use, live through changes, another overlay. Times
of the phases are recorded as properties of the tests.
"""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster.node.node import base
from tests.cluster.site.parts import parts_or_skip
from tests.cluster.site.site import Site, run_site
from tests.install.installation import Installation, bus_address
from tests.install.tenant import Tenant
from tests.support.kubeclient import KubeClient

FILES = ("test_dev_overlay", "test_life", "test_uninstall", "test_prod_overlay")
"""Order of the files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the files in the order in which the site goes through them, after all others."""
    places = {name: place for place, name in enumerate(FILES, start=1)}
    items.sort(key=lambda item: places.get(item.path.stem, 0))


@pytest.fixture(scope="session")
async def site() -> AsyncIterator[Site]:
    """The cluster without HAMi."""
    parts = parts_or_skip()
    with tempfile.TemporaryDirectory(prefix="hi-", dir=base()) as directory:
        async with run_site(Site(parts, Path(directory))) as running:
            yield running


@pytest.fixture
async def tenant(site: Site, installation: Installation) -> AsyncIterator[Tenant]:
    """A user of HAMi; an overlay is installed, by default dev."""
    await installation.ensure(installation.overlay or "dev")
    tenant = Tenant(site)
    yield tenant
    await tenant.delete_all()


@pytest.fixture(scope="session")
async def installation(site: Site) -> AsyncIterator[Installation]:
    """HAMi on it; nothing is installed before a test asks for it."""
    async with (
        KubeClient(site.plane.access()) as client,
        site.network.relay(lambda: bus_address(client)) as bus_port,
    ):
        yield Installation(site, client, bus_port)
