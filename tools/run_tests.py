# SPDX-License-Identifier: Apache-2.0
"""Runs the gates and the test tiers and ends with counts per tier.

    ./dev test                     all gates, then all tiers
    ./dev test unit contract       these tiers, no gates
    ./dev test e2e --plane real    the end-to-end tests on a real control plane, built if needed
    ./dev test e2e --kubernetes 1.34   on this release; without a tier all tests that use one
    ./dev test e2e --scheduler volcano   the tests of this other scheduler alone
    ./dev test attack              hostile input and faults against the services
    ./dev test console             the console in a real Chromium
    ./dev test install             the images, installed on a cluster of one real node
    ./dev test property --fresh    with new examples; --minutes 60 repeats that for an hour
    ./dev test tests/unit/x.py -k name   anything else goes to pytest as it is
    ./dev check                    the gates alone

A gate is a recipe of the justfile's group "gate". A tier is one pytest run over tests/<tier>; all
run, also after a failure, and the exit code is 1 when anything failed. Without arguments the
end-to-end tests run on both control planes: on the real one if it has been built, or must be
because HAMI_REQUIRE_CLUSTER=1; else the summary gives the reason. They run on the newest release of
``tests.cluster.releases``. Where one is required, older releases run what their role says, and HAMi
is installed from its images. The summary also names the versions of the tested platform. The last
line counts tests, with failed gates among the failures.

``--scheduler`` runs the end-to-end tests with the marker of another scheduler on the real control
plane. Both are built if needed, and a test that cannot run fails, as with HAMI_REQUIRE_CLUSTER=1.

Tiers with real processes and real time (all but unit) retry a few failed tests, alone: one that
passes then is reported as "flaked", by name, with its first failure printed above. More than
``FLAKES_OF_ALL_MOST`` of them in a run are failures. A flake is a defect to be fixed, in the test
or in the tested code; it must not hide other effects of a change.
"""

import argparse
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from hami_sim.kubernetes import Programs
from hami_sim.natsd import find_nats_server
from tests.cluster import build
from tests.cluster.needs import REQUIRED, is_required
from tests.cluster.releases import DEVICE_PLUGIN_TESTS, NAMES, RELEASES, Role, named

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
RESULTS = ROOT / ".cache" / "test-results"
JUST = str(Path(sys.executable).parent / "just")
TIERS = ("unit", "property", "contract", "native", "integration", "attack", "e2e", "console")
INSTALL = "install"
"""A whole run leaves out its tests marked ``long``."""
REAL = "e2e-real"
"""The end-to-end tests on the real control plane."""
SCHEDULERS: Mapping[str, Callable[[], Path]] = {"volcano": build.volcano}
"""By the marker of their tests: what builds another scheduler."""
OLDER = "older-real"
"""The tests of an older release of Kubernetes."""
DEAL = {
    "unit": "worksteal",
    "property": "worksteal",
    "contract": "loadfile",
    "native": "worksteal",
    "integration": "loadfile",
    "attack": "loadfile",
    "e2e": "loadfile",
    "console": "loadfile",
    REAL: "loadfile",
    OLDER: "loadfile",
}
"""Distribution of a tier's tests to one worker per core: singly, or by file where the fixtures of a
file are expensive. Tests marked ``alone`` run afterwards, on one worker.
"""
ORDER = dict.fromkeys(("e2e", REAL, OLDER), ("--no-loadscope-reorder",))
"""Tiers that define the order of their files; in others, files with the most tests come first."""
ONE_WORKER = frozenset({INSTALL})
"""Tiers whose tests share one machine-wide fixture and depend on their order."""
ALONE = frozenset({"native"})
"""Tiers with tests marked ``alone``."""

RUN_AGAIN = frozenset(
    {"property", "contract", "native", "integration", "attack", "e2e", "console", REAL, OLDER}
)
"""Tiers whose tests share the machine with real processes."""
FLAKES_MOST = 3
"""Causes of failures of a tier that are retried; with more, the failure is systematic."""
FLAKES_OF_ALL_MOST = 5
"""Causes of flaky tests that a whole run may have."""

RUNTIME = ("runc",)
VERSION = re.compile(r"v?\d+\.\d+\.\d+[\w.+~-]*")
VERSION_S = 60

NAMED_MOST = 40
PROBLEM_CHARS = 200
"""Failed tests of a tier that the end of the report names, and the length of their message."""

PYTEST_NO_TESTS = 5
PYTEST_RAN = (0, 1)
"""Exit codes of a pytest run that reached its end: all passed, or some failed."""


@dataclass(kw_only=True)
class Outcome:
    """Result of one gate or tier."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    skip_reasons: Counter[str] = field(default_factory=Counter)
    flaked: list[str] = field(default_factory=list)
    """Tests that failed beside others and passed alone; included in ``passed``."""
    failed_names: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """First line of the message of each failed test, by its name."""
    measured: dict[str, str] = field(default_factory=dict)
    """Measurements of tests, by ``record_property``."""


def main(arguments: list[str]) -> int:
    """Run the gates and tiers that ``arguments`` name; return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gates", action="store_true")
    parser.add_argument("--plane", choices=("sim", "real"))
    parser.add_argument("--kubernetes", choices=NAMES)
    parser.add_argument("--scheduler", choices=tuple(SCHEDULERS))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--minutes", type=float, default=0.0)
    options, rest = parser.parse_known_args(arguments)
    if options.gates:
        outcomes = _run_gates()
        _print_table(outcomes, "gate")
        return 1 if any(outcome.failed for outcome in outcomes) else 0
    release: str | None = options.kubernetes
    if options.scheduler:
        if rest not in ([], ["e2e"]) or options.plane == "sim" or options.fresh:
            parser.error("--scheduler runs tests of the tier e2e on the real plane")
        return _run_scheduler(options.scheduler, release)
    unknown = [argument for argument in rest if argument not in (*TIERS, INSTALL)]
    if unknown:
        chosen = ["--plane", options.plane] if options.plane else []
        chosen += ["--kubernetes", release] if release else []
        chosen += ["--fresh"] if options.fresh else []
        return subprocess.run([*_pytest(), *chosen, *rest], cwd=ROOT, check=False).returncode
    if options.fresh:
        return _run_fresh(rest or ["property"], minutes=options.minutes)
    required = options.plane == "real" or release is not None or is_required()
    problem = _provide_cluster(release, required=required)
    gates = [] if rest else _run_gates()
    _build_native()
    plane = options.plane or ("real" if rest and release else "sim")
    tiers = [_run_tier(name, plane=plane) for name in (rest or TIERS)]
    if not rest and options.plane is None:
        tiers.append(_run_real(problem))
        if release is None and required:
            tiers.append(_run_tier(INSTALL, plane="real", without="long"))
            tiers += _run_older()
    return _report(gates, tiers, release)


def _report(gates: list[Outcome], tiers: list[Outcome], release: str | None) -> int:
    """Print the results; return the exit code."""
    _print_table(gates, "gate")
    _print_table(tiers, "tier")
    _print_skips(tiers)
    _print_versions(release)
    _print_failures(tiers)
    flaked = _print_flakes(tiers)
    failed = sum(outcome.failed for outcome in gates + tiers)
    failed += flaked if flaked > FLAKES_OF_ALL_MOST else 0
    passed = sum(outcome.passed for outcome in tiers)
    skipped = sum(outcome.skipped for outcome in tiers)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed or not passed else 0


def _run_scheduler(name: str, release: str | None) -> int:
    """Run the tests of another scheduler; return the exit code."""
    os.environ[REQUIRED] = "1"
    problem = _provide_cluster(release, required=True, parts=(build.containerd, SCHEDULERS[name]))
    if problem:
        print(problem, flush=True)
        return 1
    _build_native()
    return _report([], [_run_tier("e2e", plane="real", only=name)], release)


def _run_fresh(tiers: list[str], *, minutes: float) -> int:
    """Run ``tiers`` with new seeds of Hypothesis, again until ``minutes`` have passed.

    Stops at the first run that fails and prints the command that repeats it.
    """
    folders = [str(TESTS / tier) for tier in tiers]
    until_s = time.monotonic() + minutes * 60
    runs = 0
    while not runs or time.monotonic() < until_s:
        runs += 1
        seed = f"--hypothesis-seed={secrets.randbits(32)}"
        command = [*_pytest(), "--quiet", "--tb=short", "--fresh", seed, *folders]
        run = subprocess.run(
            [*command, "--numprocesses", "auto", "--dist", "worksteal"], cwd=ROOT, check=False
        )
        if run.returncode:
            print(f"run {runs} failed; repeat it: ./dev test tests/{tiers[0]} --fresh {seed}")
            return run.returncode
    print(f"{runs} runs with new seeds passed", flush=True)
    return 0


def _build_native() -> None:
    """Compile the limiter and the fake drivers now, not in the time of the first test.

    Compile errors are reported by the tests that need the library.
    """
    for tool in ("tools.build_native", "tools.build_native_fakes"):
        subprocess.run(
            [sys.executable, "-m", tool], cwd=ROOT, check=False, stdout=subprocess.DEVNULL
        )


def _run_gates() -> list[Outcome]:
    """Run all gates, as many at a time as there are cores: they only read the tree."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_run_gate, gate_names()))


def gate_names() -> list[str]:
    """Recipes of the justfile's group "gate", in the order of the file."""
    dump = subprocess.run(
        [JUST, "--dump", "--dump-format", "json"], cwd=ROOT, capture_output=True, check=True
    )
    recipes = json.loads(dump.stdout)["recipes"]
    names = {name for name, recipe in recipes.items() if {"group": "gate"} in recipe["attributes"]}
    listing = subprocess.run(
        [JUST, "--summary", "--unsorted"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listing.stdout.split() if name in names]


def _run_gate(name: str) -> Outcome:
    started_s = time.monotonic()
    run = subprocess.run(
        [JUST, name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    seconds = time.monotonic() - started_s
    is_good = run.returncode == 0
    print(f"gate {name}: {'ok' if is_good else 'FAILED'} ({seconds:.1f} s)", flush=True)
    if not is_good:
        sys.stdout.flush()
        sys.stdout.buffer.write(run.stdout)
        sys.stdout.flush()
    return Outcome(name=name, passed=int(is_good), failed=int(not is_good), seconds=seconds)


def _provide_cluster(
    release: str | None,
    *,
    required: bool,
    parts: Iterable[Callable[[], object]] = (build.containerd, build.kueue, build.volcano),
) -> str:
    """Export the path of the real control plane's programs; else return the reason.

    ``required`` also builds ``parts``: the container runtime of a real node, Kueue and Volcano.
    """
    try:
        found = build.build(release) if required else build.find(release)
        if required:
            for make in parts:
                make()
    except build.BuildFailed as error:
        return f"the real control plane could not be built: {error}"
    if found is None:
        return f"the real control plane is not built; ./dev cluster build, or {REQUIRED}=1"
    os.environ[build.VARIABLE] = str(found)
    return ""


def _run_real(problem: str) -> Outcome:
    if not problem:
        return _run_tier("e2e", plane="real")
    return _missing(REAL, problem)


def _missing(name: str, problem: str) -> Outcome:
    """Report a real control plane that is missing: a failure where it is required."""
    if is_required():
        print(f"{name}: {problem}", flush=True)
        return Outcome(name=name, failed=1)
    return Outcome(name=name, skipped=1, skip_reasons=Counter({problem: 1}))


def _run_older() -> list[Outcome]:
    """Run the tests of device-plugin mode on older releases, each on its own control plane."""
    outcomes = []
    newest = os.environ.get(build.VARIABLE)
    for release in RELEASES:
        if release.role is not Role.DEVICE_PLUGIN:
            continue
        name = f"real-{release.name}"
        problem = _provide_cluster(release.name, required=True)
        if problem:
            outcomes.append(_missing(name, problem))
            continue
        print(f"\n--- {name}: {release.role}", flush=True)
        RESULTS.mkdir(parents=True, exist_ok=True)
        paths = [str(ROOT / path) for path in DEVICE_PLUGIN_TESTS]
        outcome = _run_part(OLDER, name, ["--plane=real", *paths], [], is_alone=False)
        outcome.name = name
        outcomes.append(outcome)
    if newest is not None:
        os.environ[build.VARIABLE] = newest
    return outcomes


def _run_tier(folder_name: str, *, plane: str, without: str = "", only: str = "") -> Outcome:
    folder = TESTS / folder_name
    name = REAL if (folder_name, plane) == ("e2e", "real") else folder_name
    if not folder.is_dir():
        return Outcome(name=name)
    print(f"\n--- {name}", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = ["not real"] if name == "e2e" else []  # those belong to the other run
    chosen += [f"not {without}"] if without else []
    chosen += [only] if only else []
    options = [f"--plane={plane}", str(folder)]
    if name not in ALONE:
        return _run_part(name, name, options, chosen, is_alone=name in ONE_WORKER)
    outcome = _run_part(name, name, options, [*chosen, "not alone"], is_alone=False)
    return add(
        outcome, _run_part(name, f"{name}-alone", options, [*chosen, "alone"], is_alone=True)
    )


def _run_part(
    tier: str, part: str, options: list[str], chosen: list[str], *, is_alone: bool
) -> Outcome:
    """Run pytest once, and again for a few failed tests."""
    report = RESULTS / f"{part}.xml"
    report.unlink(missing_ok=True)
    started_s = time.monotonic()
    command = [*_pytest(), "--quiet", "--tb=short", f"--junit-xml={report}", *options]
    if chosen:
        command += ["-m", " and ".join(chosen)]
    cache = RESULTS / f"{part}.cache"
    shutil.rmtree(cache, ignore_errors=True)
    command += ["--override-ini", f"cache_dir={cache}"]
    dealt = (
        [] if is_alone else ["--numprocesses", "auto", "--dist", DEAL[tier], *ORDER.get(tier, ())]
    )
    code = subprocess.run([*command, *dealt], cwd=ROOT, check=False).returncode
    outcome = count(tier, report) if report.exists() else Outcome(name=tier)
    if tier in RUN_AGAIN and code == 1 and 1 <= causes(outcome.failed_names) <= FLAKES_MOST:
        outcome, code = _run_again(outcome, command, report)
    outcome.seconds = time.monotonic() - started_s
    if code not in (*PYTEST_RAN, PYTEST_NO_TESTS) or (code == 1 and not outcome.failed):
        print(f"{part}: pytest itself stopped with exit code {code}", flush=True)
        outcome.failed += 1
    return outcome


def causes(names: Sequence[str]) -> int:
    """Return the number of causes that the failures of ``names`` count as.

    Many failures that are all in one file count as one: the control plane that they share failed.
    """
    is_one_file = len({re.split(r"\.Test|::", name)[0] for name in names}) == 1
    return 1 if is_one_file and len(names) > FLAKES_MOST else len(names)


def add(first: Outcome, second: Outcome) -> Outcome:
    """Add the results of two parts of one tier."""
    first.passed += second.passed
    first.failed += second.failed
    first.skipped += second.skipped
    first.seconds += second.seconds
    first.skip_reasons += second.skip_reasons
    first.flaked += second.flaked
    first.failed_names += second.failed_names
    first.problems |= second.problems
    first.measured |= second.measured
    return first


def _run_again(first: Outcome, command: list[str], report: Path) -> tuple[Outcome, int]:
    """Run the failed tests alone, one after the other; return the outcome of both runs together."""
    print(f"\n--- {first.name}: the {first.failed} that failed, alone", flush=True)
    again = report.with_suffix(".again.xml")
    again.unlink(missing_ok=True)
    command = [part.replace(str(report), str(again)) for part in command]
    command += ["--last-failed", "--last-failed-no-failures", "none"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not again.exists():
        return first, 1
    return merge(first, count(first.name, again)), code


def merge(first: Outcome, second: Outcome) -> Outcome:
    """Count a failed test as passed, and flaked, when the second run shows that it passed."""
    still = set(second.failed_names) & set(first.failed_names)
    if second.passed + second.failed < first.failed:
        return first  # incomplete second run: no conclusion
    first.flaked = [name for name in first.failed_names if name not in still]
    first.passed += len(first.flaked)
    first.failed -= len(first.flaked)
    first.failed_names = sorted(still)
    return first


def _pytest() -> list[str]:
    color = "yes" if sys.stdout.isatty() else "no"
    return [sys.executable, "-m", "pytest", f"--color={color}"]


def count(name: str, report: Path) -> Outcome:
    """Counts of a JUnit file; a test that failed and then broke its teardown counts once."""
    outcome = Outcome(name=name)
    verdicts: dict[tuple[str, str], str] = {}
    root = ET.parse(report).getroot()  # noqa: S314 - pytest wrote the file
    for case in root.iter("testcase"):
        for told in case.iterfind("properties/property"):
            outcome.measured[told.get("name", "")] = told.get("value", "")
        test = (case.get("classname", ""), case.get("name", ""))
        broken = [*case.iterfind("failure"), *case.iterfind("error")]
        if broken:
            verdicts[test] = "failed"
            message = (broken[0].get("message") or "").strip().splitlines() or [""]
            outcome.problems.setdefault("::".join(test), message[0][:PROBLEM_CHARS])
        elif (skip := case.find("skipped")) is not None:
            verdicts.setdefault(test, "skipped")
            outcome.skip_reasons[skip.get("message") or "no reason given"] += 1
        else:
            verdicts.setdefault(test, "passed")
    outcome.failed_names = sorted(
        "::".join(test) for test, verdict in verdicts.items() if verdict == "failed"
    )
    counts = Counter(verdicts.values())
    outcome.passed, outcome.failed = counts["passed"], counts["failed"]
    outcome.skipped = counts["skipped"]
    return outcome


def _print_table(outcomes: list[Outcome], title: str) -> None:
    if not outcomes:
        return
    print(f"\n{title:<12} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for outcome in outcomes:
        print(
            f"{outcome.name:<12} {outcome.passed:>7} {outcome.failed:>7} {outcome.skipped:>8}"
            f" {outcome.seconds:>8.1f}"
        )


def _print_skips(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        for reason, times in sorted(outcome.skip_reasons.items()):
            print(f"skipped in {outcome.name}: {times} × {reason}")
        for name, value in outcome.measured.items():
            print(f"measured in {outcome.name}: {name} {value}")
    print()


def _print_failures(outcomes: list[Outcome]) -> None:
    """Name the failed tests again: logs of continuous integration are cut at their beginning."""
    for outcome in outcomes:
        for name in outcome.failed_names[:NAMED_MOST]:
            print(f"FAILED in {outcome.name}: {name}: {outcome.problems.get(name, '')}")
        more = len(outcome.failed_names) - NAMED_MOST
        if more > 0:
            print(f"FAILED in {outcome.name}: {more} more")


def _print_flakes(outcomes: list[Outcome]) -> int:
    """Name the tests that flaked; return the number of causes."""
    flaked = [(outcome.name, name) for outcome in outcomes for name in outcome.flaked]
    for tier, name in flaked:
        print(f"FLAKED in {tier}: {name} failed among others and passed alone; mend it")
    return sum(causes(outcome.flaked) for outcome in outcomes)


def _print_versions(release: str | None) -> None:
    versions = {"python": platform.python_version(), "nats-server": _version(find_nats_server())}
    runtime = build.find_containerd()
    if runtime is not None:
        versions["containerd"] = _version(runtime / "containerd")
    versions |= {name: _version(path) for name in RUNTIME if (path := shutil.which(name))}
    for one in RELEASES if release is None else [named(release)]:
        programs = build.find(one.name)
        if programs is not None:
            versions |= {
                f"{one.name} {name}": version
                for name, version in Programs(programs).versions().items()
            }
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"versions: {listed}\n")


def _version(program: str | Path) -> str:
    told = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False
    )
    found = VERSION.search(told.stdout + told.stderr)
    return found[0] if found else "unknown"


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
