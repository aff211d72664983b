# SPDX-License-Identifier: Apache-2.0
"""Variables by which vendors' container runtimes and hooks give devices to any container.

Kubelet puts the variables of a pod behind those of the device plugin, and among a pod's own a
literal in ``env`` wins over ``envFrom``. So a container that names such a variable, or that takes
variables from an object under any name, could overrule what the node agent gives it.
"""

from collections.abc import Mapping
from typing import Final

from hami_common.podview import ContainerView

VENDOR_BY_VARIABLE: Final[Mapping[str, str]] = {
    "AMD_VISIBLE_DEVICES": "amd",
    "ASCEND_VISIBLE_DEVICES": "ascend",
    "AWS_NEURON_VISIBLE_DEVICES": "awsneuron",
    "CAMBRICON_VISIBLE_DEVICES": "cambricon",
    "ENFLAME_VISIBLE_DEVICES": "enflame",
    "IX_VISIBLE_DEVICES": "iluvatar",
    "MTHREADS_VISIBLE_DEVICES": "mthreads",
    "NVIDIA_VISIBLE_DEVICES": "nvidia",
    "METAX_SGPUS": "metax",
}
DEVICE_VARIABLES: Final = tuple(VENDOR_BY_VARIABLE)
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
PINNED: Final[Mapping[str, str]] = {
    **dict.fromkeys(DEVICE_VARIABLES, ""),
    **{name: value for words in HIDING.values() for name, value in words.items()},
    "NVIDIA_VISIBLE_DEVICES": "void",
}
"""Literals that win over ``envFrom`` and give nothing. ``void`` is what the node agent itself sets
where NVIDIA's devices are injected by CDI."""


def takes_any_variable(container: ContainerView) -> bool:
    """Whether ``envFrom`` could bring one of the device variables."""
    return any(
        name.startswith(source.prefix or "")
        for source in container.env_from or []
        for name in DEVICE_VARIABLES
    )
