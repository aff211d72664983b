# SPDX-License-Identifier: Apache-2.0
"""Writes the facts in docs/vendors/<vendor>.md from code, manifests and examples.

Everything between the markers ``generated: facts`` and ``end of generated part`` belongs to this
program: resource names and units, enforcement, the annotations that select
devices, labels and component of the agent, the driver's interface, and an example that tests
schedule. Hand-written notes below the markers are kept. ``--check`` only compares.
"""

import sys
from importlib import import_module
from pathlib import Path

from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import Capability, ResourceNames, Vendor
from hami_common.vendors.sharing import ShareVendor
from hami_nodeagent.drivers.library import LibraryReader
from hami_nodeagent.drivers.reader import ToolReader
from tools.gen_vendors import unit_of
from tools.generated import DOCS, ROOT, replaced, write

PAGES = DOCS / "vendors"
EXAMPLES = ROOT / "examples"
COMPONENTS = ROOT / "deploy" / "kustomize" / "components"
FIRST_EXAMPLES = ("shares.yaml", "whole.yaml")
NVIDIA_SELECTORS: dict[str, tuple[str, ...]] = {
    "allowed types": ("nvidia.com/use-gputype",),
    "excluded types": ("nvidia.com/nouse-gputype",),
    "allowed devices": ("nvidia.com/use-gpuuuid",),
    "excluded devices": ("nvidia.com/nouse-gpuuuid",),
}


def facts(vendor: Vendor) -> str:
    """The generated part of one page."""
    example = next(name for name in FIRST_EXAMPLES if (EXAMPLES / vendor.name / name).is_file())
    return "\n\n".join(
        (
            "## Resource names",
            _resources(vendor),
            f"First pod of `examples/{vendor.name}/{example}`:",
            f"```yaml\n{_pod(EXAMPLES / vendor.name / example)}```",
            f"```sh\nkubectl apply -f examples/{vendor.name}/{example}\n```",
            _selectors(vendor),
            "## Enforcement",
            _enforced(vendor.capability),
            "## Node setup",
            _nodes(vendor.name),
        )
    )


def _resources(vendor: Vendor) -> str:
    lines = ["| count | memory | compute |", "| --- | --- | --- |"]
    lines += [_row(family) for family in vendor.families]
    aliases = [f"`{other}` for `{name}`" for other, name in vendor.resources.aliases.items()]
    if aliases:
        lines += ["", f"Aliases: {', '.join(sorted(aliases))}."]
    return "\n".join(lines)


def _row(family: ResourceNames) -> str:
    memory = f"`{family.memory}`, in {unit_of(family)}" if family.memory else "none"
    if family.memory_percentage:
        memory += f"; `{family.memory_percentage}`"
    whole = f"{family.core_units} for a whole device"
    cores = f"`{family.cores}`, {whole}" if family.cores else "none"
    return f"| `{family.count}` | {memory} | {cores} |"


def _selectors(vendor: Vendor) -> str:
    if isinstance(vendor, ShareVendor):
        keys = vendor.about.selectors
        named = {
            "allowed types": keys.allow_types,
            "excluded types": keys.deny_types,
            "allowed devices": keys.allow_uuids,
            "excluded devices": keys.deny_uuids,
        }
    else:
        named = NVIDIA_SELECTORS
    lines = [
        f"- {meaning}: {', '.join(f'`{key}`' for key in keys)}"
        for meaning, keys in named.items()
        if keys
    ]
    if not lines:
        return "No annotation selects among these devices."
    return "Pod annotations that select devices, as comma-separated lists:\n\n" + "\n".join(lines)


def _enforced(can: Capability) -> str:
    rows = ["| | enforced by |", "| --- | --- |"]
    for resource, by in (("memory", can.memory_enforced), ("compute", can.compute_enforced)):
        rows.append(f"| {resource} | {by or '**nothing**: accounted, but not limited'} |")
    divided = can.partitioned or "not supported"
    if can.memory_cap:
        rows.append(f"| memory, beside it | the driver, per cgroup ({can.memory_cap}) |")
    backed = can.memory_backed or "never; nothing keeps the excess in the host"
    if can.memory_recalled:
        backed += f"; of idle containers: {can.memory_recalled}"
    return "\n".join(
        (
            *rows,
            "",
            f"- Hardware partitioning: {divided}.",
            f"- Memory overcommit: {backed}.",
            f"- Hardware: {can.hardware_status}.",
        )
    )


def _nodes(vendor: str) -> str:
    return (
        f"Add `components/{vendor}` of deploy/kustomize to your overlay, and label the nodes:\n\n"
        f"```sh\nkubectl label node gpu-1 hami.io/{vendor}=true\n```\n\n"
        f"The agent reads devices through {_interface(vendor)}."
    )


def _interface(vendor: str) -> str:
    if vendor == "nvidia":
        return "the driver's library, NVML (`libnvidia-ml.so.1`)"
    module = import_module(f"hami_nodeagent.drivers.{vendor}.reader")
    for reader in vars(module).values():
        if isinstance(reader, type) and issubclass(reader, ToolReader) and reader.vendor == vendor:
            tool = f"the vendor's command-line tool, `{reader.tool_name}`"
            if not issubclass(reader, LibraryReader):
                return f"{tool}; see [drivers](../drivers.md)"
            library = min(reader.program.files, key=len)
            return (
                f"the vendor's library, `{library}`, if installed and usable, otherwise\n"
                f"{tool}; see [drivers](../drivers.md)"
            )
    message = f"hami_nodeagent.drivers.{vendor}.reader has no reader of {vendor}"
    raise ValueError(message)


def _pod(path: Path) -> str:
    """The first document of a manifest, without its license line."""
    text = path.read_text(encoding="utf-8").split("\n---\n", maxsplit=1)[0].rstrip("\n") + "\n"
    return "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith("# SPDX-")
    )


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    pages = {PAGES / f"{one.name}.md": one for one in Catalog.from_settings().vendors}
    return write(
        {
            path: replaced(path.read_text(encoding="utf-8"), {"facts": facts(vendor)})
            for path, vendor in pages.items()
        }
    )


if __name__ == "__main__":
    sys.exit(main())
