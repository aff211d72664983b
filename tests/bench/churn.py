# SPDX-License-Identifier: Apache-2.0
"""Pods of both allocation modes come and go at random on one node: is any device given twice?

Run as ``./dev bench churn [--arrivals 1000] [--planes sim,real] [--seed 1] --json -``. One document
with ``rows``, one per control plane; each has ``plane``, ``arrivals``, ``seconds``, ``ran`` (pods
seen running, by way to their devices) and ``problems``: devices over their memory, compute or
slots, by every record of the ledger, by claims, and by what containers were given. The exit code is
1 when there is one.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.planes import PlaneName
from tests.bench.burst import report
from tests.cluster import build
from tests.support.churn import Churn

PLANES: tuple[PlaneName, ...] = ("sim", "real")
Document = dict[str, Any]


def spec_of(plane: PlaneName | None) -> ClusterSpec:
    """A node of eight devices that serves both modes."""
    return ClusterSpec(
        nodes=(NodeSpec(name="gpu-a", profile="8xA100-40"),),
        slots=16,
        node_cpu="200",
        backoff_s=0.2,
        plane=plane,
        dra=True,
        settings={"scheduler": {"tick_s": "0.2"}, "nodeagent": {"dra.write_s": "0.1"}},
    )


async def churn(cluster: Cluster, *, arrivals: int, seed: int) -> Document:
    """One row."""
    begun = anyio.current_time()
    random = Churn(cluster, seed=seed)
    problems = await random.run(arrivals)
    return {
        "plane": cluster.plane.name,
        "arrivals": arrivals,
        "seconds": round(anyio.current_time() - begun, 1),
        "ran": random.ran,
        "problems": problems,
    }


async def _measure(planes: list[PlaneName], arrivals: int, seed: int) -> list[Document]:
    rows = []
    for plane in planes:
        with tempfile.TemporaryDirectory(prefix="churn-", ignore_cleanup_errors=True) as folder:
            async with run_cluster(spec_of(plane), Path(folder)) as cluster:
                rows.append(await churn(cluster, arrivals=arrivals, seed=seed))
    return rows


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="churn", description="Pods of both allocation modes.")
    parser.add_argument("--planes", default="sim", help="sim, real or both")
    parser.add_argument("--arrivals", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", metavar="FILE", help="- for standard output")
    options = parser.parse_args()
    planes = [one for one in PLANES if one in options.planes.split(",")]
    if len(planes) != len(options.planes.split(",")):
        parser.error(f"--planes: {options.planes} is not one of {', '.join(PLANES)}")
    if "real" in planes:
        os.environ[build.VARIABLE] = str(build.build())
    rows = anyio.run(_measure, planes, options.arrivals, options.seed)
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
