# SPDX-License-Identifier: Apache-2.0
"""``hamictl policy test``: runs the tests of policies files on recorded traces.

Histories are placed again by the comparison behind ``hamictl simulate --since``, snapshots by
``hamictl simulate --snapshot``.
"""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import click
from msgspec import Struct

from hami_common.errors import HamiError, RequestInvalid, SettingsInvalid
from hami_core.planning.whatif import Outcome
from hami_core.replay.compare import PodOutcome, compare_pods
from hami_core.replay.loghistory import LogHistory
from hami_core.replay.policies import PoliciesFile, PolicyTest, decode
from hami_core.replay.policytest import (
    Tested,
    Trial,
    evaluate,
    lines_of,
    of_moment,
    of_result,
)
from hami_core.replay.snapshot import Snapshot
from hamictl import manifests, options, output, policies, traces
from hamictl.commands.simulate import place
from hamictl.errors import EXIT_NO, InputRefused
from hamictl.inputs import read


class Report(Struct, frozen=True, kw_only=True):
    """All tests of one file."""

    file: str
    passed: int
    failed: int
    tests: tuple[Tested, ...]


class Reports(Struct, frozen=True, kw_only=True):
    """All files."""

    items: tuple[Report, ...]


@click.group()
def policy() -> None:
    """Test placement policies on recorded traces."""


@policy.command("test")
@click.argument(
    "files", metavar="FILE...", type=click.Path(path_type=Path), nargs=-1, required=True
)
@click.option(
    "--junit",
    "junit_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the results to this file, as JUnit XML.",
)
@click.option("--update", is_flag=True, help="Write golden placements instead of comparing them.")
@options.format_option
def test(
    files: tuple[Path, ...],
    junit_file: Path | None,
    update: bool,  # noqa: FBT001 - click passes flags so
    format_: str,
) -> None:
    """Run the tests of policies files; exit with 1 if one fails.

    FILE is TOML or YAML, with policies, traces and expectations. See docs/policies.md.
    """
    found = tuple(_run(path, update=update) for path in files)
    if junit_file is not None:
        junit_file.write_bytes(_junit(found))
    if not output.structured(Reports(items=found), format_):
        for report in found:
            _show(report, is_wide=format_ == "wide")
    if any(report.failed for report in found):
        raise SystemExit(EXIT_NO)


def read_file(path: Path) -> PoliciesFile:
    """Read a policies file."""
    content = read(path)
    try:
        return decode(content, path=path, field=str(path))
    except SettingsInvalid as error:
        message = f"{path}: {error}"
        raise InputRefused(message) from error


def _run(path: Path, *, update: bool) -> Report:
    file = read_file(path)
    if not file.tests:
        message = f"{path}: no test; write [[tests]] with trace and expect"
        raise InputRefused(message)
    known: dict[tuple[str, ...], LogHistory | Snapshot] = {}
    tests: list[Tested] = []
    for one in file.tests:
        output.progress(f"{path}: {one.name}")
        if one.trace not in known:
            known[one.trace] = traces.read_trace([path.parent / name for name in one.trace])
        try:
            tests.append(_tested(path, file, one, known[one.trace], update=update))
        except HamiError as error:
            message = f"{path}: test {one.name!r}: {error}"
            raise InputRefused(message) from error
    failed = sum(not one.passed for one in tests)
    return Report(file=str(path), passed=len(tests) - failed, failed=failed, tests=tuple(tests))


def _tested(
    path: Path,
    file: PoliciesFile,
    test: PolicyTest,
    trace: LogHistory | Snapshot,
    *,
    update: bool,
) -> Tested:
    trial, recorded = _tried(path, file, test, trace)
    golden = path.parent / test.golden if test.golden else None
    if golden is not None and update:
        golden.write_text("".join(f"{line}\n" for line in lines_of(trial.pods)), encoding="utf-8")
    checks = evaluate(test, trial, recorded=recorded, golden=_lines(golden))
    return Tested(
        name=test.name,
        policy=policies.policy_text(file.policy_of(test)),
        trace=test.trace,
        passed=all(one.passed for one in checks),
        checks=checks,
    )


def _tried(
    path: Path, file: PoliciesFile, test: PolicyTest, trace: LogHistory | Snapshot
) -> tuple[Trial, Trial | None]:
    """Place the pods of the trace; return the outcome and the record."""
    wanted = file.policy_of(test)
    if isinstance(trace, Snapshot):
        pods = [one for name in test.pods for one in manifests.read_manifests(path.parent / name)]
        result = place(trace, pods, wanted, explain=False)
        return of_moment(result.after, tuple(map(_outcome, result.pods))), None
    if test.pods:
        raise RequestInvalid(
            field="pods",
            problem="the trace has its own pods",
            fix="leave pods out, or give one snapshot as trace",
        )
    found = compare_pods(trace.history, [wanted], check=lambda: None, prices=file.prices)
    comparison = found.comparison
    if comparison.unpriced:
        raise RequestInvalid(
            field="prices.device_hour",
            problem=f"has no price of {', '.join(comparison.unpriced)}",
            fix='add it, or "*" = PRICE for all other models',
        )
    return (
        of_result(comparison.results[0], found.pods[0]),
        of_result(comparison.recorded, found.recorded),
    )


def _outcome(one: Outcome) -> PodOutcome:
    return PodOutcome(
        namespace=one.namespace,
        pod=one.pod,
        node=one.node,
        devices=tuple(share.uuid for part in one.containers for share in part.shares),
        wait_s=0.0,
    )


def _lines(path: Path | None) -> Sequence[str] | None:
    if path is None or not path.exists():
        return None
    return path.read_text(encoding="utf-8").splitlines()


def _show(report: Report, *, is_wide: bool) -> None:
    for one in report.tests:
        click.echo(f"{'PASS' if one.passed else 'FAIL'}  {report.file}: {one.name} ({one.policy})")
        for check in one.checks:
            if check.passed and not is_wide:
                continue
            value = "" if check.value is None else f" (is {check.value:g})"
            click.echo(f"      {'ok' if check.passed else 'failed'}: {check.text}{value}")
            if check.value is None:
                for line in check.problem.splitlines():
                    click.echo(f"        {line}")
    click.echo(f"{report.passed} passed, {report.failed} failed")


def _junit(reports: Sequence[Report]) -> bytes:
    """Return JUnit XML with a suite for each file and a case for each test."""
    root = ET.Element(
        "testsuites",
        tests=str(sum(len(one.tests) for one in reports)),
        failures=str(sum(one.failed for one in reports)),
    )
    for report in reports:
        suite = ET.SubElement(
            root,
            "testsuite",
            name=report.file,
            tests=str(len(report.tests)),
            failures=str(report.failed),
        )
        for one in report.tests:
            case = ET.SubElement(suite, "testcase", classname=report.file, name=one.name)
            broken = [check for check in one.checks if not check.passed]
            if broken:
                text = "\n".join(f"{check.text}: {check.problem}" for check in broken)
                failure = ET.SubElement(case, "failure", message=broken[0].text)
                failure.text = text
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document
