# SPDX-License-Identifier: Apache-2.0
"""A number of processes that is an amount of ours gives a warning, and no other number does."""

from typing import Any

import pytest

from tests.unit.webhook.core.test_mutate import asking, pod, review


def nproc(value: str, name: str = "PET_NPROC_PER_NODE") -> dict[str, Any]:
    return {"env": [{"name": name, "value": value}]}


@pytest.mark.parametrize(
    "more",
    [
        nproc("3000"),
        nproc("3000", "OMPI_MCA_orte_set_default_slots"),
        {"args": ["--nnodes 2", "--nproc_per_node 3000", "recipe"]},
        {"command": ["torchrun", "--nproc-per-node", "3000", "train.py"]},
        {"command": ["torchrun", "--nproc_per_node=3000", "train.py"]},
    ],
)
def test_memory_as_the_number_of_processes_is_named_with_the_fix(more: dict[str, Any]) -> None:
    verdict = review(pod(asking("node", more, gpu="2", gpumem="3000")))
    assert verdict.allowed
    (warning,) = verdict.warnings
    assert "starts 3000 processes, the amount of nvidia.com/gpumem, on 2 devices" in warning
    assert "numProcPerNode: 2" in warning
    assert len(warning) <= 256


def test_compute_as_the_number_of_processes_is_named() -> None:
    verdict = review(pod(asking("node", nproc("50"), gpu="1", gpumem="3000", gpucores="50")))
    assert "nvidia.com/gpucores" in verdict.warnings[0]


@pytest.mark.parametrize(
    "more",
    [
        {},
        nproc("auto"),
        nproc("gpu"),
        nproc("2"),
        nproc("8"),  # more than the devices, and no amount of the container
        nproc("3000", "MY_NPROC"),
        {"args": ["--nproc_per_node"]},
        {"args": ["--nproc_per_node", "auto"]},
        {"args": ["--batch", "3000"]},
        {"env": [{"name": "PET_NPROC_PER_NODE", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
    ],
)
def test_other_numbers_give_no_warning(more: dict[str, Any]) -> None:
    assert review(pod(asking("node", more, gpu="2", gpumem="3000"))).warnings == ()


def test_container_without_devices_gives_no_warning() -> None:
    document = pod(asking("node", gpu="1", gpumem="3000"), {"name": "launcher", **nproc("3000")})
    assert review(document).warnings == ()
