# SPDX-License-Identifier: Apache-2.0
"""``hamictl get nodes -o wide`` shows which vendors' drivers have run on hardware."""

from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from hami_common.vendors.protocol import NOT_TESTED, Capability, HardwareRun
from hamictl import client
from hamictl.cli import main

NODE = {
    "node": "gpu-1",
    "vendors": ["ascend", "newcomer"],
    "alive": True,
    "devices": 8,
    "devices_usable": 8,
    "memory_mib": 1,
    "capacity_mib": 1,
    "booked_mib": 0,
    "allocations": 0,
}


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(kind: type[Any], base: str, path: str) -> Any:
        del base
        assert path == "/v1/nodes"
        return msgspec.convert({"items": [NODE]}, kind)

    monkeypatch.setattr(client, "read", read)


def shown(*options: str) -> list[str]:
    result = CliRunner().invoke(main, ["get", "nodes", "--registry", "http://r", *options])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_wide_table_says_that_a_vendors_driver_never_ran() -> None:
    heading, row = shown("-o", "wide")
    assert heading.endswith("TESTED ON HARDWARE")
    assert row.endswith(f"ascend: {NOT_TESTED}; newcomer: unknown")


def test_plain_table_has_no_such_column() -> None:
    heading, _ = shown()
    assert heading.endswith("STATUS")


def test_last_run_on_hardware_has_device_driver_and_date() -> None:
    runs = tuple(
        HardwareRun(device="H200", driver="580.159", date=f"2026-{month}-01") for month in (12, 11)
    )
    assert Capability(hardware_tested=runs).hardware_status == "H200 (driver 580.159, 2026-12-01)"
    assert Capability().hardware_status == NOT_TESTED
