# SPDX-License-Identifier: Apache-2.0
"""Values that admission gives the device variables (``hami_common.pods.visibility``)."""

from collections.abc import Mapping
from typing import Final

from hami_common.pods.visibility import DEVICE_VARIABLES

HIDING: Final[Mapping[str, Mapping[str, str]]] = {
    "amd": {"AMD_VISIBLE_DEVICES": "none"},
    "ascend": {"ASCEND_VISIBLE_DEVICES": "void"},
    "iluvatar": {"IX_VISIBLE_DEVICES": "none"},
    "mthreads": {"MTHREADS_VISIBLE_DEVICES": "none"},
}
"""Variables that hide a vendor's devices, by vendor, where its runtime has a word for that
(Ascend's refuses unknown words). NVIDIA's is set in every pod, because images carry the variable.
"""
HIDING_ALWAYS: Final[Mapping[str, str]] = {"NVIDIA_VISIBLE_DEVICES": "none"}
PINNED: Final[Mapping[str, str]] = {
    **dict.fromkeys(DEVICE_VARIABLES, ""),
    **{name: value for words in HIDING.values() for name, value in words.items()},
    "NVIDIA_VISIBLE_DEVICES": "void",
}
"""Literals that win over ``envFrom`` and expose no device.

``void`` is the value that the node agent itself sets where NVIDIA's devices are injected by CDI.
"""
