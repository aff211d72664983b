# SPDX-License-Identifier: Apache-2.0
"""The scenarios of ``./dev demo --scenario``: each file's checks hold."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hami_sim import demo, scenarios
from hami_sim.cluster import Cluster, run_cluster
from hamictl import scenarios as traces

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]

FILES = {path.stem: path for path in (demo.examples_directory() / "scenarios").glob("*.toml")}
TRACES = sorted(name for name, path in FILES.items() if scenarios.read(path)["kind"] == "trace")
CLUSTER = sorted(set(FILES) - set(TRACES))


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("scenarios")
    spec = scenarios.spec(
        directory,
        nvml_library=str(await demo.built("build_native_fakes.py") / "libnvidia-ml.so.1"),
        limiter=str(await demo.built("build_native.py")),
    )
    async with run_cluster(spec, directory) as running:
        yield running


@pytest.mark.shares_cluster
@pytest.mark.parametrize("name", CLUSTER)
async def test_scenario_in_a_cluster_keeps_its_bounds(cluster: Cluster, name: str) -> None:
    checks = await scenarios.play(cluster, FILES[name])
    assert len(checks) > 2
    assert [one.line() for one in checks if not one.ok] == []


@pytest.mark.parametrize("name", TRACES)
def test_scenario_of_a_trace_keeps_its_bounds(name: str) -> None:
    outcome = traces.play(traces.read(FILES[name]))
    assert [one for one in outcome.checks if not one.ok] == []
    assert outcome.ok


def test_all_use_cases_have_a_file() -> None:
    assert CLUSTER == ["ab-test", "ten-servings", "training-pause"]
    assert TRACES == ["day-night", "fill", "packing", "slices", "small-tasks"]
    assert all(Path(FILES[name]).with_suffix(".yaml").is_file() for name in CLUSTER)
