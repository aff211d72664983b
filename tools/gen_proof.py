# SPDX-License-Identifier: Apache-2.0
"""Writes docs/proof.md: per capability the tests that prove it, by level; ``--check`` compares.

``tests/proof.toml`` names the tests of each capability; their levels are derived from where they
run (``tools.named_tests``). The level "real GPU" comes from the results in ``docs/gpu/*.json``
alone, each a ``Run``; the catalog names the checks of such a run that prove a capability. Errors,
on which nothing is written: a name without a test, a capability with neither test nor ``missing``,
an id that occurs twice, a run that the vendor's ``hardware_tested`` lacks, or the reverse.
"""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import HardwareRun, Vendor
from tools.generated import ROOT, write
from tools.named_tests import Level, UnknownTest, level_of

CATALOG = "tests/proof.toml"
TARGET = "docs/proof.md"
RUNS = "docs/gpu"
TITLES = {
    Level.SIMULATED: "simulated",
    Level.CONTROL_PLANE: "real control plane",
    Level.NODE: "real node",
    Level.POD: "image as pod",
    Level.GPU: "real GPU",
}
OPEN = "not yet run"
WIDTH = 120


class Capability(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One capability and its proof."""

    name: str
    tests: tuple[str, ...] = ()
    """Names as pytest takes them; a file stands for all of its tests."""
    gpu: tuple[str, ...] = ()
    """Checks of ``docs/gpu`` that prove it on hardware; all have to pass."""
    vendors: tuple[str, ...] = ()
    """Vendors whose drivers it is about: proved on hardware once all of them ran there."""
    missing: str = ""
    """Part that no test proves; empty: none."""
    also: tuple[str, ...] = ()
    """Further ids for the same capability."""


class Area(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the page."""

    title: str
    rows: dict[str, Capability]
    """By id."""


class Areas(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The catalog."""

    areas: tuple[Area, ...]


class Check(Struct, frozen=True, kw_only=True):
    """One check of a run; further fields are measurements."""

    check: str
    verdict: Literal["pass", "fail", "skipped"]
    reason: str = ""


class Run(Struct, frozen=True, kw_only=True):
    """Results of the checks on one machine, ``docs/gpu/<gpu>-<driver>-<date>.json``."""

    device: str
    driver: str
    date: str
    checks: tuple[Check, ...]
    vendor: str = "nvidia"

    @property
    def hardware(self) -> HardwareRun:
        """The run as the vendor's module lists it."""
        return HardwareRun(device=self.device, driver=self.driver, date=self.date)

    def passes(self, checks: Sequence[str]) -> bool:
        """Report whether every one of ``checks`` passed, at least one."""
        passed = {one.check for one in self.checks if one.verdict == "pass"}
        return bool(checks) and passed.issuperset(checks)


class Proof(Struct, frozen=True, kw_only=True):
    """A capability with the level of each of its tests."""

    ids: tuple[str, ...]
    capability: Capability
    tests: tuple[tuple[Level, str], ...]
    hardware: tuple[str, ...]
    """Runs that prove it on hardware."""

    @property
    def level(self) -> Level | None:
        """The highest level; ``None``: not proved."""
        levels = [level for level, _ in self.tests] + [Level.GPU] * bool(self.hardware)
        return max(levels, default=None)


class CatalogInvalid(ValueError):
    """The catalog and the tree disagree; one line for each problem."""


def proofs_of(
    root: Path, area: Area, runs: Sequence[Run], vendors: Sequence[Vendor], problems: list[str]
) -> tuple[Proof, ...]:
    """Derive the levels of an area's capabilities; appends what does not hold to ``problems``."""
    tested = {one.name: one.capability.hardware_tested for one in vendors}
    reported = {one.check for run in runs for one in run.checks}
    found = []
    for id_, capability in area.rows.items():
        tests = []
        for name in capability.tests:
            try:
                tests.append((level_of(name, root=root), name))
            except UnknownTest as error:
                problems.append(f"{id_}: {error}")
        if not capability.tests and not capability.missing:
            problems.append(f"{id_}: it names no test, and no reason in `missing`")
        problems += [f"{id_}: no vendor {one}" for one in capability.vendors if one not in tested]
        problems += [
            f"{id_}: no run in {RUNS} has a check {check}"
            for check in capability.gpu
            if runs and check not in reported
        ]
        found.append(
            Proof(
                ids=(id_, *capability.also),
                capability=capability,
                tests=tuple(tests),
                hardware=_hardware(capability, runs, tested),
            )
        )
    return tuple(found)


def _hardware(
    capability: Capability, runs: Sequence[Run], tested: Mapping[str, tuple[HardwareRun, ...]]
) -> tuple[str, ...]:
    """Return the runs that prove a capability: all of its checks, all of its vendors."""
    passed = [run.hardware for run in runs if run.passes(capability.gpu)]
    of_vendors = [tested.get(one, ()) for one in capability.vendors]
    if (capability.gpu and not passed) or not all(of_vendors):
        return ()
    return tuple(
        str(run) for run in sorted({*passed, *(one for each in of_vendors for one in each)})
    )


def doubled(areas: Sequence[Area]) -> Iterator[str]:
    """Yield ids that occur twice."""
    seen: set[str] = set()
    for area in areas:
        for id_, capability in area.rows.items():
            for one in (id_, *capability.also):
                if one in seen:
                    yield f"{one}: the id occurs twice"
                seen.add(one)


def unlike(runs: Sequence[Run], vendors: Sequence[Vendor]) -> Iterator[str]:
    """Yield differences between the vendors' modules and the results in ``docs/gpu``."""
    listed = {(one.name, run) for one in vendors for run in one.capability.hardware_tested}
    recorded = {(run.vendor, run.hardware) for run in runs}
    for vendor, run in sorted(recorded - listed):
        yield f"{vendor}: add {run} of {RUNS} to `hardware_tested` of the vendor's module"
    for vendor, run in sorted(listed - recorded):
        yield f"{vendor}: {run} of `hardware_tested` has no results in {RUNS}"


def page(areas: Sequence[tuple[str, Sequence[Proof]]]) -> str:
    """The whole page."""
    every = [proof for _, proofs in areas for proof in proofs]
    sections = [_section(title, proofs) for title, proofs in areas]
    return "\n\n".join((_HEAD, _summary(every), _unproved(every), *sections)) + "\n"


_HEAD = """# Proof

Each capability with the tests that prove it, by level, for readers who decide what to rely on.
`tools/gen_proof.py` generates this page from the tests and `tests/proof.toml`; do not edit it.

| level | the test runs |
| --- | --- |
| simulated | the code alone, or processes with simulated devices, driver library, Kubernetes |
| real control plane | with kube-apiserver, kube-scheduler and etcd; devices are simulated |
| real node | with kubelet, containerd and runc as well; devices are simulated |
| image as pod | from the images, installed as [Install](install.md) says; devices are simulated |
| real GPU | on a device, with its vendor's driver; results are in `docs/gpu/` |

- A test is listed at the highest level at which it runs.
- "Missing" lists what no test shows; such a capability counts as partly proved.
- "not yet run" marks a capability with checks or a driver for hardware that never ran there.
- Ids are those of the project's list of requirements."""


def _summary(proofs: Sequence[Proof]) -> str:
    rows = [
        "## Summary",
        "",
        "| highest level | capabilities | of these partly |",
        "| --- | --- | --- |",
    ]
    for level, title in TITLES.items():
        those = [one for one in proofs if one.level is level]
        partly = sum(bool(one.capability.missing) for one in those)
        rows.append(f"| {title} | {len(those)} | {partly} |")
    without = sum(one.level is None for one in proofs)
    return "\n".join((*rows, f"| not proved | {without} | |", f"| all | {len(proofs)} | |"))


def _unproved(proofs: Sequence[Proof]) -> str:
    those = [one for one in proofs if one.level is None]
    lines = ["## Not proved", ""]
    lines += [_missing(f"{', '.join(one.ids)} {one.capability.name}", one) for one in those]
    return "\n".join(lines if those else [*lines, "Every capability has a test."])


def _section(title: str, proofs: Sequence[Proof]) -> str:
    rows = [f"## {title}", "", f"| id | capability | {' | '.join(TITLES.values())} |"]
    rows.append(f"|{' --- |' * (len(TITLES) + 2)}")
    rows += [_row(proof) for proof in proofs]
    partly = [one for one in proofs if one.level is not None and one.capability.missing]
    if partly:
        rows += ["", "Missing:", ""]
        rows += [_missing(one.ids[0], one) for one in partly]
    return "\n".join(rows)


def _missing(subject: str, proof: Proof) -> str:
    text = f"- {subject}: {proof.capability.missing}"
    return textwrap.fill(
        text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _row(proof: Proof) -> str:
    cells = []
    for level in TITLES:
        names = sorted({name.split("::")[0] for at, name in proof.tests if at is level})
        cells.append(", ".join(_link(name) for name in names))
    cells[-1] = _gpu(proof)
    ids = ", ".join(proof.ids)
    return f"| {ids} | {proof.capability.name} | {' | '.join(cells)} |".replace("|  ", "| ")


def _gpu(proof: Proof) -> str:
    if proof.hardware:
        return "; ".join(proof.hardware)
    return OPEN if proof.capability.gpu or proof.capability.vendors else ""


def _link(path: str) -> str:
    """Link to a file by its tier and subject: ``unit/quota`` for ``tests/unit/…/test_quota.py``."""
    place = Path(path)
    return f"[{place.parts[1]}/{place.stem.removeprefix('test_')}](../{path})"


def read_runs(folder: Path) -> tuple[Run, ...]:
    """Read the results of ``docs/gpu``; ``msgspec.ValidationError`` names the wrong field."""
    return tuple(
        msgspec.json.decode(path.read_bytes(), type=Run) for path in sorted(folder.glob("*.json"))
    )


def generate(root: Path, vendors: Sequence[Vendor]) -> str:
    """Return the page of the tree at ``root``; raises ``CatalogInvalid`` with all problems."""
    areas = msgspec.toml.decode((root / CATALOG).read_bytes(), type=Areas).areas
    runs = read_runs(root / RUNS)
    problems = [*doubled(areas), *unlike(runs, vendors)]
    proofs = [(area.title, proofs_of(root, area, runs, vendors, problems)) for area in areas]
    if problems:
        raise CatalogInvalid("\n".join(problems))
    return page(proofs)


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    try:
        wanted = generate(ROOT, Catalog.from_settings().vendors)
    except CatalogInvalid as error:
        print(f"{CATALOG}:\n{error}", file=sys.stderr)
        return 1
    return write({ROOT / TARGET: wanted})


if __name__ == "__main__":
    sys.exit(main())
