# SPDX-License-Identifier: Apache-2.0
"""Variables by which vendors' container runtimes and hooks give devices to any container."""

from collections.abc import Iterable
from typing import Final

from hami_common.podview import EnvVarView

DEVICE_VARIABLES: Final = (
    "AMD_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "AWS_NEURON_VISIBLE_DEVICES",
    "CAMBRICON_VISIBLE_DEVICES",
    "ENFLAME_VISIBLE_DEVICES",
    "IX_VISIBLE_DEVICES",
    "MTHREADS_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "METAX_SGPUS",
)
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
