# SPDX-License-Identifier: Apache-2.0
"""Variables by which vendors' container runtimes and hooks give devices to any container."""

from collections.abc import Mapping
from typing import Final

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
HIDING: Final[Mapping[str, Mapping[str, str]]] = {
    "amd": {"AMD_VISIBLE_DEVICES": "none"},
    "ascend": {"ASCEND_VISIBLE_DEVICES": "void"},
    "iluvatar": {"IX_VISIBLE_DEVICES": "none"},
    "mthreads": {"MTHREADS_VISIBLE_DEVICES": "none"},
}
"""By vendor: what hides its devices, where its runtime has a word for that (Ascend's refuses
unknown words). NVIDIA's is set in every pod, because images carry the variable."""
HIDING_ALWAYS: Final[Mapping[str, str]] = {"NVIDIA_VISIBLE_DEVICES": "none"}
