# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/vendors.md from the vendors' pure halves; ``--check`` only compares."""

import sys

from hami_common.model.isolation import EXCLUSIVE, PROPERTIES, Isolation, isolation_of
from hami_common.model.request import NAMED_MODES
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.enflame import EnflameSettings
from hami_common.vendors.protocol import ResourceNames, Vendor
from tools.generated import DOCS, write_parts

HEADINGS = (
    "vendor",
    "scheduled",
    "memory enforced by",
    "compute enforced by",
    "partitioned by",
    "run on hardware",
)


def capabilities(vendors: tuple[Vendor, ...]) -> str:
    """Capabilities of each vendor; an empty cell means no."""
    rows = [
        f"| {' | '.join(HEADINGS)} |",
        f"|{' --- |' * len(HEADINGS)}",
    ]
    for vendor in vendors:
        can = vendor.capability
        cells = (
            vendor.name,
            "yes" if can.placed else "",
            can.memory_enforced,
            can.compute_enforced,
            can.partitioned,
            can.hardware_status if can.hardware_tested else "",
        )
        rows.append(f"| {' | '.join(cells)} |".replace("|  ", "| "))
    return "\n".join(rows)


def isolation(vendors: tuple[Vendor, ...]) -> str:
    """Grades of each class, with the vendors whose shares are of it."""
    owners: dict[Isolation, list[str]] = {EXCLUSIVE: ["all"]}
    for vendor in vendors:
        can = vendor.capability
        ways = [("", False, False)]
        ways += [("", False, True)] if can.memory_cap else []
        ways += [("", True, False)] if can.partitioned else []
        ways += [(mode, False, False) for mode in sorted(NAMED_MODES)]
        for mode, divided, memory_cap in ways:
            found = isolation_of(
                vendor.name, divided=divided, exclusive=False, mode=mode, memory_cap=memory_cap
            )
            owners.setdefault(found, [])
            if vendor.name not in owners[found]:
                owners[found].append(vendor.name)
    rows = [f"| class | {' | '.join(PROPERTIES)} | vendors |", f"|{' --- |' * 6}"]
    for one, names in owners.items():
        grades = " | ".join(getattr(one, name) for name in PROPERTIES)
        rows.append(f"| `{one.name}` | {grades} | {', '.join(names)} |")
    return "\n".join(rows)


def resources(vendors: tuple[Vendor, ...]) -> str:
    """Names by count resource."""
    rows = [
        "| vendor | count | memory | unit | compute |",
        "| --- | --- | --- | --- | --- |",
    ]
    for vendor in vendors:
        rows += [_row(vendor.name, family) for family in vendor.families]
    return "\n".join(rows)


def _row(vendor: str, family: ResourceNames) -> str:
    unit = unit_of(family) if family.memory else ""
    memory = " ".join(filter(None, (family.memory, family.memory_percentage)))
    names = (f"`{name}`" if name else "" for name in (family.count, memory, unit, family.cores))
    count, memory, _, cores = names
    return f"| {vendor} | {count} | {memory} | {unit} | {cores} |".replace("|  ", "| ")


def unit_of(family: ResourceNames) -> str:
    """Unit of the memory resource, as a reader writes it."""
    enflame = EnflameSettings()
    if family.memory == enflame.resource_memory_name:
        return f"GiB up to {enflame.memory_gib_most}, MiB above"
    mib = family.memory_unit_mib
    return {0: "percent of a device", 1: "MiB", 1024: "GiB"}.get(mib, f"{mib} MiB")


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    vendors = Catalog.from_settings().vendors
    return write_parts(
        DOCS / "vendors.md",
        {
            "capabilities": capabilities(vendors),
            "isolation": isolation(vendors),
            "resources": resources(vendors),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
