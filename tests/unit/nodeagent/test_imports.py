# SPDX-License-Identifier: Apache-2.0
"""Imports of the processes of a node: each module costs memory on every node of a cluster."""

import json
import subprocess
import sys

import pytest

VENDORS = ("amd", "ascend", "cambricon", "hygon", "metax", "vastai")
HEAVY = (
    "kubernetes_asyncio",
    "numpy",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "pynvml",
    *(f"hami_nodeagent.drivers.{vendor}.reader" for vendor in VENDORS),
)


def imported_by(module: str) -> set[str]:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(ran.stdout))


@pytest.mark.timeout(60)
def test_agent_imports_neither_unused_drivers_nor_heavy_libraries() -> None:
    assert not imported_by("hami_nodeagent.app") & set(HEAVY)


@pytest.mark.timeout(60)
def test_plugin_proxy_imports_no_http_server_and_no_bus_client() -> None:
    heavy = {*HEAVY, "aiohttp", "cryptography", "nats", "hami_nodeagent.app"}
    assert not imported_by("hami_nodeagent.shell.pluginproxy") & heavy
