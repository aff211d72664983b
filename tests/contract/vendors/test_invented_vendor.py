# SPDX-License-Identifier: Apache-2.0
"""The tutorial docs/adding-a-vendor.md: its vendor works with nothing but its module registered."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from hami_common.model.placement import Placement
from hami_common.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import RenderContext, Vendor
from hami_scheduler.core.pick import pick
from hami_scheduler.core.table import DeviceTable
from hami_webhook.core.mutate import AdmissionPolicy, mutate
from tests.support import builders, jsonpatch

TUTORIAL = Path(__file__).parents[3] / "docs" / "adding-a-vendor.md"
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


def tutorial() -> Vendor:
    """The vendor, from the text of the tutorial."""
    code = re.search(r"```python\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    module = ModuleType("acme")
    exec(compile(code[1], str(TUTORIAL), "exec"), module.__dict__)  # noqa: S102 - the page's own code
    vendor: Vendor = module.__dict__["Acme"]()
    return vendor


def pod(name: str, limits: dict[str, int]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": name},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
    }


def test_the_tutorials_vendor_goes_from_manifest_to_container() -> None:
    acme = tutorial()
    catalog = Catalog((*Catalog.from_settings().vendors, acme))
    table = DeviceTable()
    device = builders.device("acme-0", vendor="acme", type="Acme One", memory_mib=8192)
    table.upsert_node(builders.node_devices("node", [device], vendor="acme"))
    placed = []
    for number, limits in enumerate(
        [
            {"acme.example/card": 1, "acme.example/memory": 4, "acme.example/cores": 50},
            {"acme.example/card": 1, "acme.example/memory": 8, "acme.example/cores": 50},
            {"acme.example/card": 1},
        ]
    ):
        document = pod(f"acme-{number}", limits)
        verdict = mutate(
            document,
            msgspec.convert(document, PodView),
            catalog=catalog,
            policy=AdmissionPolicy(),
            traceparent=TRACE,
        )
        assert verdict.allowed, verdict.message
        changed = jsonpatch.apply(document, list(verdict.operations))
        request = catalog.parse_pod(msgspec.convert(changed, PodView))
        assert request is not None
        found = pick(table, request, "node")
        if isinstance(found, Placement):
            table.book("node", found.containers)
            placed.append(found.containers[0])
        else:
            assert found.text.startswith("ExclusiveDeviceAllocateConflict") or "MiB" in found.text
    assert [c.shares[0].memory_mib for c in placed] == [2048, 4096]
    edits = acme.render(placed[0], [device], RenderContext(mode="devices"))
    assert edits.env == {"ACME_VISIBLE_DEVICES": "0"}
    assert [node.host_path for node in edits.devices] == ["/dev/acme0"]
