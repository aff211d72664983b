# SPDX-License-Identifier: Apache-2.0
"""The pods in examples/<vendor>/, from manifest to shares on the vendor's simulated machines.

Through admission, the simulated driver, the registry's rules and the scheduler's core.
"""

from pathlib import Path
from typing import Any

import jsonpatch
import msgspec
import pytest
import yaml

from hami_common.model.placement import Placement, Share
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_core.placement.pick import pick
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from hami_nodeagent.drivers.simulated.driver import SimulatedDriver, SimulatedDriverSettings
from hami_registry.core.device_config import DeviceConfig, canonical_device
from hami_sim.hardware import profile
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, mutate
from tests.support import builders

EXAMPLES = Path(__file__).parents[3] / "examples"
CATALOG = Catalog.from_settings()
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
NEVER_SHARED = {"biren", "vastai"}

pytestmark = pytest.mark.anyio


def pods_of(vendor: str) -> list[dict[str, Any]]:
    """All pods of a vendor's folder: shares first, refusals last."""
    files = sorted((EXAMPLES / vendor).glob("*.yaml"), key=lambda file: (order(file), file.name))
    return [pod for file in files for pod in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def order(file: Path) -> int:
    return {"shares": 0, "refused": 2}.get(file.stem, 1)


async def table_of(vendor: str) -> DeviceTable:
    """A cluster of the vendor's simulated machines."""
    table = DeviceTable()
    for name in profile.names(vendor):
        node = f"node-{name}"
        settings = SimulatedDriverSettings(profile=str(profile.path_of(name)), node=node)
        inventory = await SimulatedDriver(settings).discover()
        assert inventory.problems == ()
        devices = [canonical_device(DeviceConfig(), node, facts) for facts in inventory.devices]
        links = [(link.a, link.b, link.score) for link in inventory.links]
        table.upsert_node(
            builders.node_devices(node, [d for d in devices if d], vendor=vendor, links=links)
        )
    return table


def admitted(document: dict[str, Any]) -> dict[str, Any]:
    """The pod after admission."""
    verdict = mutate(
        document,
        msgspec.convert(document, PodView),
        catalog=CATALOG,
        policy=AdmissionPolicy(),
        at=Circumstances(traceparent=TRACE, claim=""),
    )
    assert verdict.allowed, verdict.message
    changed: dict[str, Any] = jsonpatch.apply_patch(document, list(verdict.operations))
    assert changed["spec"]["schedulerName"] == "hami-scheduler"
    return changed


def test_every_vendor_has_examples_named_after_it() -> None:
    for vendor in CATALOG.vendors:
        pods = pods_of(vendor.name)
        names = [pod["metadata"]["name"] for pod in pods]
        assert names
        assert all(name.startswith(f"{vendor.name}-") for name in names)
        assert any("refused" in name for name in names)


@pytest.mark.parametrize("vendor", [vendor.name for vendor in CATALOG.vendors])
async def test_examples_are_placed_as_they_say(vendor: str) -> None:
    table = await table_of(vendor)
    shared: dict[str, list[Share]] = {}
    for number, document in enumerate(pods_of(vendor)):
        name = document["metadata"]["name"]
        document["metadata"]["uid"] = f"uid-{number}"
        request = CATALOG.parse_pod(msgspec.convert(admitted(document), PodView))
        assert request is not None
        filtered = Verdicts(table).filter(request, table.nodes())
        if "refused" in name:
            assert filtered.feasible == [], name
            texts = set(filtered.refused().values())
            assert any(any(c.isdigit() for c in text) for text in texts), texts
            continue
        assert filtered.feasible, filtered.refused()
        node = Verdicts(table).prioritize(request, filtered.feasible).best(1)[0][0]
        found = pick(table, request, node)
        assert isinstance(found, Placement)
        assert table.book(node, found.containers) == ()
        table.check()
        if "-share-" in name:
            for share in found.containers[0].shares:
                shared.setdefault(share.uuid, []).append(share)
    if vendor not in NEVER_SHARED:
        assert [len(shares) for shares in shared.values()] == [2], shared


async def test_profile_by_name_is_served_where_the_settings_list_it() -> None:
    file = EXAMPLES / "nvidia/static-names/mig-1g.18gb.yaml"
    view = msgspec.convert(yaml.safe_load(file.read_text(encoding="utf-8")), PodView)
    assert CATALOG.parse_pod(view) is None
    listing = VendorSettings(nvidia=NvidiaSettings(mig_profiles=("1g.18gb",)))
    request = Catalog.from_settings(listing).parse_pod(view)
    assert request is not None
    table = await table_of("nvidia")
    assert Verdicts(table).filter(request, table.nodes()).feasible == ["node-2xH200-MIG"]
    found = pick(table, request, "node-2xH200-MIG")
    assert isinstance(found, Placement)
    assert [share.part for share in found.containers[0].shares] == ["1g.18gb@6"]
