# SPDX-License-Identifier: Apache-2.0
"""Variables by which vendors' container runtimes and hooks give devices to any container."""

from collections.abc import Iterable, Mapping
from typing import Final

from hami_common.podview import EnvVarView

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


def giving(env: Iterable[EnvVarView]) -> str:
    """Return the first variable that gives devices, or takes its value from elsewhere; else ''."""
    for variable in env:
        if variable.name in DEVICE_VARIABLES and (
            variable.value_from is not None or (variable.value or "") not in HARMLESS
        ):
            return variable.name
    return ""
