# SPDX-License-Identifier: Apache-2.0
"""Configuration of all tests: tier by directory, control plane, asyncio, leak check, Hypothesis."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.cluster import build
from tests.cluster.needs import is_required
from tests.cluster.releases import NAMES
from tests.support.leaks import leaks_since, snapshot
from tests.support.natsd import nats_server

__all__ = ["nats_server"]

# Assertions in contracts and steps that test files share also report values when they fail.
pytest.register_assert_rewrite("tests.contract", "tests.e2e")

TESTS = Path(__file__).parent
TIERS = (
    "unit",
    "property",
    "contract",
    "native",
    "integration",
    "attack",
    "e2e",
    "console",
    "install",
)
LIMIT_S = {
    "unit": 20,
    "property": 60,
    "contract": 90,
    "native": 60,
    "integration": 120,
    "attack": 120,
    "e2e": 300,
    "console": 300,
    "install": 600,
}
LEAK_CHECKED = frozenset(
    {"contract", "native", "integration", "attack", "e2e", "console", "install"}
)

settings.register_profile(
    "ci",
    deadline=None,  # two shared cores: time limits are pytest's, per test
    derandomize=True,  # the same commit gives the same answer
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fresh", settings.get_profile("ci"), derandomize=False)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the caller choose the control plane of clusters."""
    parser.addoption(
        "--plane",
        choices=("sim", "real"),
        help="control plane of the end-to-end tests (sim; with --kubernetes: real)",
    )
    parser.addoption(
        "--kubernetes",
        choices=NAMES,
        help="release of the real control plane (the newest)",
    )
    parser.addoption(
        "--fresh",
        action="store_true",
        help="let Hypothesis draw other examples; --hypothesis-seed repeats a run",
    )
    parser.addoption(
        "--screenshots",
        action="store_true",
        help="write the screenshots of the console to docs/images/console",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the control plane, and the path of the real one, for fixtures and child processes.

    The real one is built only if it is required: the build takes minutes.
    """
    if config.getoption("--fresh"):
        settings.load_profile("fresh")
    release = config.getoption("--kubernetes")
    plane = config.getoption("--plane") or os.environ.get("HAMI_PLANE")
    plane = plane or ("real" if release else "sim")
    os.environ["HAMI_PLANE"] = plane
    try:
        if plane == "real" or is_required():
            found: Path | None = build.build(release)
            build.containerd()
        else:
            found = build.find(release)
    except build.BuildFailed as error:
        pytest.exit(f"no real control plane: {error}", returncode=3)
    if found is not None:
        os.environ[build.VARIABLE] = str(found)


def tier_of(path: Path) -> str | None:
    """The tier of a test file, from its first folder under tests/."""
    try:
        first = path.relative_to(TESTS).parts[0]
    except (ValueError, IndexError):
        return None
    return first if first in TIERS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier and give it the tier's time limit, unless it has its own.

    A search with new examples may run beside other work for an hour: its limit only ends a hang.
    """
    factor = 10 if config.getoption("--fresh") else 1
    for item in items:
        tier = tier_of(item.path)
        if tier is None:
            msg = f"{item.nodeid}: tests live in tests/{{{','.join(TIERS)}}}/"
            raise pytest.UsageError(msg)
        item.add_marker(tier)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(factor * LIMIT_S[tier]))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio: nats-py, kubernetes_asyncio and grpc.aio know nothing else."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    shares = request.node.get_closest_marker("shares_cluster") is not None
    if tier_of(request.path) not in LEAK_CHECKED or shares:
        yield
        return
    before = snapshot()
    yield
    left = leaks_since(before)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)
