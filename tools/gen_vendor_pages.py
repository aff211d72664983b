# SPDX-License-Identifier: Apache-2.0
"""Writes the facts in docs/vendors/<vendor>.md from code, manifests and examples.

Everything between the markers ``generated: facts`` and ``end of generated part`` belongs to this
program: resource names and units, what holds a container to its share, the annotations that choose
devices, labels and component of the agent, how the driver asks the hardware, and an example that
tests place. What only people know stands below, and stays. ``--check`` only compares.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import Capability, ResourceNames, Vendor
from hami_common.vendors.sharing import ShareVendor
from hami_nodeagent.drivers.library import LibraryReader
from hami_nodeagent.drivers.reader import ToolReader

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "vendors"
EXAMPLES = ROOT / "examples"
COMPONENTS = ROOT / "deploy" / "kustomize" / "components"
BEGIN, END = "<!-- generated: facts -->", "<!-- end of generated part -->"
FIRST_EXAMPLES = ("shares.yaml", "whole.yaml")
NVIDIA_SELECTORS: dict[str, tuple[str, ...]] = {
    "types wanted": ("nvidia.com/use-gputype",),
    "types refused": ("nvidia.com/nouse-gputype",),
    "devices wanted": ("nvidia.com/use-gpuuuid",),
    "devices refused": ("nvidia.com/nouse-gpuuuid",),
}


def title_of(vendor: str) -> str:
    """The vendor's name for people, as its component has it."""
    text = (COMPONENTS / vendor / "kustomization.yaml").read_text(encoding="utf-8")
    found = re.search(r"# The agent of nodes with (.+) devices: label them", text)
    if found is None:
        message = f"components/{vendor}: its comment does not name the devices"
        raise ValueError(message)
    return found[1]


def facts(vendor: Vendor) -> str:
    """The generated part of one page."""
    example = next(name for name in FIRST_EXAMPLES if (EXAMPLES / vendor.name / name).is_file())
    return "\n\n".join(
        (
            "## What a pod asks for",
            _resources(vendor),
            f"`examples/{vendor.name}/{example}`, its first pod:",
            f"```yaml\n{_pod(EXAMPLES / vendor.name / example)}```",
            f"```sh\nkubectl apply -f examples/{vendor.name}/{example}\n```",
            _selectors(vendor),
            "## What it is held to",
            _enforced(vendor.capability),
            "## On the nodes",
            _nodes(vendor.name),
        )
    )


def _resources(vendor: Vendor) -> str:
    lines = ["| count | memory | compute |", "| --- | --- | --- |"]
    lines += [_row(family) for family in vendor.families]
    aliases = [f"`{other}` for `{name}`" for other, name in vendor.resources.aliases.items()]
    if aliases:
        lines += ["", f"Other names that are taken: {', '.join(sorted(aliases))}."]
    return "\n".join(lines)


def _row(family: ResourceNames) -> str:
    unit = {0: "percent of a device", 1: "MiB", 1024: "GiB"}.get(
        family.memory_unit_mib, f"{family.memory_unit_mib} MiB"
    )
    memory = f"`{family.memory}`, in {unit}" if family.memory else "none: whole devices"
    if family.memory_percentage:
        memory += f"; `{family.memory_percentage}`"
    whole = f"{family.core_units} are a whole device"
    cores = f"`{family.cores}`, {whole}" if family.cores else "none"
    return f"| `{family.count}` | {memory} | {cores} |"


def _selectors(vendor: Vendor) -> str:
    if isinstance(vendor, ShareVendor):
        keys = vendor.about.selectors
        named = {
            "types wanted": keys.allow_types,
            "types refused": keys.deny_types,
            "devices wanted": keys.allow_uuids,
            "devices refused": keys.deny_uuids,
        }
    else:
        named = NVIDIA_SELECTORS
    lines = [
        f"- {meaning}: {', '.join(f'`{key}`' for key in keys)}"
        for meaning, keys in named.items()
        if keys
    ]
    if not lines:
        return "No annotation chooses among these devices."
    return "Annotations of a pod that choose among devices, comma lists:\n\n" + "\n".join(lines)


def _enforced(can: Capability) -> str:
    rows = ["| | by |", "| --- | --- |"]
    for what, by in (
        ("memory", can.memory_enforced),
        ("compute", can.compute_enforced),
        ("hardware is divided", can.partitioned),
        ("last run on the hardware", can.verified or "never"),
    ):
        rows.append(f"| {what} | {by or '**nothing**: it is booked, and not held'} |")
    return "\n".join(rows).replace(
        "| hardware is divided | **nothing**: it is booked, and not held |",
        "| hardware is divided | nobody |",
    )


def _nodes(vendor: str) -> str:
    return (
        f"Add `components/{vendor}` of deploy/kustomize to your overlay and label the nodes:\n\n"
        f"```sh\nkubectl label node gpu-1 hami.io/{vendor}=true\n```\n\n"
        f"The agent asks {_interface(vendor)}."
    )


def _interface(vendor: str) -> str:
    module = import_module(f"hami_nodeagent.drivers.{vendor}")
    for reader in vars(module).values():
        if isinstance(reader, type) and issubclass(reader, ToolReader) and reader.vendor == vendor:
            tool = f"the vendor's command-line tool, `{reader.tool_name}`"
            if not issubclass(reader, LibraryReader):
                return f"{tool}; [drivers](../drivers.md) has its calls"
            library = min(reader.program.files, key=len)
            return (
                f"the vendor's library, `{library}`, where it is installed and can be used, else\n"
                f"{tool}; [drivers](../drivers.md) has the calls of both"
            )
    return "the driver through its library, NVML (`libnvidia-ml.so.1`)"


def _pod(path: Path) -> str:
    """The first document of a manifest, without its licence line."""
    text = path.read_text(encoding="utf-8").split("\n---\n", maxsplit=1)[0].rstrip("\n") + "\n"
    return "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith("# SPDX-")
    )


def page(vendor: Vendor, text: str) -> str:
    """The whole page with fresh facts."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        message = f"docs/vendors/{vendor.name}.md lacks the markers {BEGIN} and {END}"
        raise ValueError(message)
    return f"{head}{BEGIN}\n\n{facts(vendor)}\n\n{END}{tail}"


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    stale = []
    for vendor in Catalog.from_settings().vendors:
        path = PAGES / f"{vendor.name}.md"
        text = path.read_text(encoding="utf-8")
        wanted = page(vendor, text)
        if wanted != text:
            stale.append(path)
            if "--check" not in sys.argv[1:]:
                path.write_text(wanted, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
