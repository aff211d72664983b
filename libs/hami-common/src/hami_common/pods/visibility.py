# SPDX-License-Identifier: Apache-2.0
"""Variables by which vendors' container runtimes and hooks give devices to any container.

Kubelet puts the variables of a pod behind those of the device plugin, and among a pod's own a
literal in ``env`` wins over ``envFrom``. So a container that sets such a variable, or that takes
variables from an object under any name, could overrule those of the node agent.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from hami_common.pods.podview import ContainerView, EnvVarView

VARIABLE_BY_VENDOR: Final[Mapping[str, str]] = {
    "amd": "AMD_VISIBLE_DEVICES",
    "ascend": "ASCEND_VISIBLE_DEVICES",
    "awsneuron": "AWS_NEURON_VISIBLE_DEVICES",
    "cambricon": "CAMBRICON_VISIBLE_DEVICES",
    "enflame": "ENFLAME_VISIBLE_DEVICES",
    "iluvatar": "IX_VISIBLE_DEVICES",
    "mthreads": "MTHREADS_VISIBLE_DEVICES",
    "nvidia": "NVIDIA_VISIBLE_DEVICES",
    "metax": "METAX_SGPUS",
}
DEVICE_VARIABLES: Final = tuple(VARIABLE_BY_VENDOR.values())
HARMLESS: Final = ("", "none", "void")
"""Values by which such a variable gives no device."""


def gives_devices(variable: EnvVarView) -> bool:
    """Return whether the variable gives devices, or takes its value from elsewhere."""
    return variable.name in DEVICE_VARIABLES and (
        variable.value_from is not None or (variable.value or "") not in HARMLESS
    )


def giving(env: Iterable[EnvVarView]) -> str:
    """Return the name of the first variable that gives devices; empty when none does."""
    return next((variable.name for variable in env if gives_devices(variable)), "")


def from_elsewhere(container: ContainerView) -> frozenset[str]:
    """Return the device variables that ``envFrom`` of the container could bring, by its prefixes.

    The result includes variables that ``env`` sets too, although the literal wins.
    """
    prefixes = tuple(source.prefix or "" for source in container.env_from or [])
    return frozenset(name for name in DEVICE_VARIABLES if name.startswith(prefixes))
