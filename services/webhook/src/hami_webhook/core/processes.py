# SPDX-License-Identifier: Apache-2.0
"""Warns when an operator has taken an amount of ours for a number of devices.

Kubeflow Trainer derives the processes per node from the first resource whose name contains ``gpu``,
in no fixed order: with ``nvidia.com/gpumem: 3000`` beside ``nvidia.com/gpu: 1`` it may be 3000. The
pod then shows that number where its launcher reads it. Only equal numbers count as evidence, so
that a number that the user chose gives no warning.
Fact source: kubeflow/trainer v2, ``pkg/runtime/runtime.go`` and the plugins torch and mpi. This
module must not use HTTP, time or randomness.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hami_common.pods.podview import ContainerView
from hami_common.units import parse_quantity, whole

PROCESSES_BY: Final = {
    "PET_NPROC_PER_NODE": "torchrun",
    "OMPI_MCA_orte_set_default_slots": "Open MPI",
}
"""Variables with the number of processes on a node, and the launcher that reads each."""
_ARGUMENTS: Final = ("--nproc_per_node", "--nproc-per-node")
_LIKE_A_COUNT: Final = "gpu"


def warning_of(
    container: ContainerView, document: Mapping[str, Any], *, devices: int
) -> str | None:
    """Return the warning for a container that holds ``devices``; ``None`` without evidence.

    ``document``: the same container as the API server sent it.
    """
    for where, text in (*_variables(container), *_arguments(document)):
        number = whole(text)
        if number is None or number <= devices:
            continue
        for name in (*container.limits(), *container.requests()):
            if (
                _LIKE_A_COUNT in name.lower()
                and parse_quantity(container.quantity(name) or "") == number
            ):
                return (
                    f"container {container.name}: {where} starts {number} processes, the amount "
                    f"of {name}, on {devices} devices; set numProcPerNode: {devices} in the "
                    "TrainJob (docs/guides/trainer.md)"
                )
    return None


def _variables(container: ContainerView) -> Iterator[tuple[str, str]]:
    for variable in container.env or ():
        if variable.name in PROCESSES_BY and variable.value is not None:
            yield variable.name, variable.value


def _arguments(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the number in ``--nproc_per_node 2``, as one argument or two, or with ``=``."""
    arguments = [*_texts(document.get("command")), *_texts(document.get("args"))]
    for position, argument in enumerate(arguments):
        for name in _ARGUMENTS:
            if argument == name and position + 1 < len(arguments):
                yield name, arguments[position + 1]
            elif argument.startswith((f"{name} ", f"{name}=")):
                yield name, argument[len(name) + 1 :]


def _texts(found: object) -> list[str]:
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []
