# SPDX-License-Identifier: Apache-2.0
"""Differences from HAMi 2.10 in how a pod's request is read and placed, each with its reason.

``tools.gen_migration`` writes them into docs/migration.md. The facts in
``tests/contract/vendors/facts`` refer to them by key, and a test fails for a difference that has
neither a fact nor ``checked_by``.
"""

from typing import Final, NamedTuple


class Difference(NamedTuple):
    """One request that HAMi 2.10 answers differently."""

    vendor: str
    """Vendor word, or ``all``."""
    request: str
    hami: str
    here: str
    reason: str
    checked_by: str = ""
    """File of the test, where no fact covers it."""


_UNSERVED: Final = "HAMi leaves the pod pending, because no node offers the amount alone"
_TYPO: Final = "a typing error takes effect without notice"

DIFFERENCES: Final[dict[str, Difference]] = {
    "quantities": Difference(
        "all",
        "a count or an amount that is no whole number: `1.5`, `-1`, `4Gi`",
        "no device, or the amount is ignored",
        "rejected, with the number to write",
        "the container would run without its device or limit",
    ),
    "count-above-64": Difference(
        "all",
        "a count above 64",
        "pending",
        "rejected",
        "no node has so many devices",
    ),
    "amount-without-count": Difference(
        "all",
        "memory or compute without a count"
        " (NVIDIA with `default_count`, and Enflame, add a count of 1)",
        "left to the default scheduler, pending",
        "rejected, with the count to add",
        _UNSERVED,
    ),
    "memory-zero": Difference(
        "all",
        "memory of 0",
        "unset (NVIDIA, AMD), smallest size (Ascend, Kunlunxin), rejected (Moore Threads)",
        "unset for every vendor",
        "one meaning; a memory of 0 can be left out",
    ),
    "compute-above": Difference(
        "all",
        "compute above one device",
        "clamped, rejected by AMD and Enflame",
        "clamped for every vendor, with a warning",
        "one rule; no pod gets more than a device",
    ),
    "policies": Difference(
        "all",
        "an unknown word in `hami.io/…-scheduler-policy`",
        "ignored",
        "rejected",
        _TYPO,
    ),
    "numbered-uuids": Difference(
        "all",
        "HAMi's numbers in UUID lists, such as `node-1-cambricon-mlu-0` or `card_0`:"
        " Cambricon, Moore Threads, MetaX, Enflame, Kunlunxin, Biren",
        "name the device",
        "rejected; write the UUID that `hamictl get devices` shows",
        "numbers change when a device fails, UUIDs do not",
    ),
    "nvidia-priority": Difference(
        "nvidia",
        "`nvidia.com/priority` above 7",
        "passed to the container",
        "rejected",
        "the limiter has levels 0 to 7",
    ),
    "nvidia-percentage": Difference(
        "nvidia",
        "a negative `gpumem-percentage`",
        "ignored",
        "rejected",
        "the pod would get a whole device",
    ),
    "nvidia-numa-bind": Difference(
        "nvidia",
        "`nvidia.com/numa-bind` that is no truth value",
        "ignored",
        "rejected",
        _TYPO,
    ),
    "nvidia-mode": Difference(
        "nvidia",
        "an unknown word in `nvidia.com/vgpu-mode`",
        "pending",
        "rejected",
        "no node can ever serve it",
    ),
    "nvidia-opt-out": Difference(
        "nvidia",
        "`CUDA_DISABLE_CONTROL=true` with a share",
        "a container without limits",
        "rejected; allowed with whole devices",
        "it could use the shares of other pods",
    ),
    "nvidia-gpucore": Difference(
        "nvidia",
        "`nvidia.com/gpucore`",
        "ignored",
        "read as `gpucores`, with a warning",
        "an older spelling in published manifests",
    ),
    "nvidia-several-parts": Difference(
        "nvidia",
        "several devices for a container where only MIG devices fit",
        "several MIG instances",
        "only with `nvidia.com/vgpu-mode: mig`, else pending",
        "one CUDA process uses one MIG instance",
        checked_by="tests/unit/core/placement/test_published_screens.py",
    ),
    "nvidia-mig-last": Difference(
        "nvidia",
        "a share without `nvidia.com/vgpu-mode` where cards with and without MIG fit",
        "the card that the policy prefers; of MIG, the smallest instance by memory",
        "a card without MIG, else the instance that exceeds memory and compute least",
        "an instance is up to 24 times the request while other cards are idle",
        checked_by="tests/unit/core/placement/test_least_excess.py",
    ),
    "nvidia-mig-list": Difference(
        "nvidia",
        "the MIG profile for an amount of memory",
        "one of the chart's list per model",
        "any plain profile, or those of `drivers.nvidia.mig_allowed_profiles`",
        "smaller profiles fit more often, and the chart's list lacks several models",
        checked_by="tests/unit/nodeagent/core/test_allowedprofiles.py",
    ),
    "ascend-types": Difference(
        "ascend",
        "`huawei.com/Ascend910B4` on a 910B4-1",
        "placed",
        "another chip",
        "the chips differ in memory",
    ),
    "ascend-any-910": Difference(
        "ascend",
        "`huawei.com/Ascend910[-memory,-core]`, or `ascend910`",
        "unknown",
        "any 910 chip",
        "published manifests use these names",
    ),
    "ascend-rounded": Difference(
        "ascend",
        "memory between two templates",
        "the rounded size is written into the pod",
        "the pod keeps the size that it requests",
        "one name may stand for several chips",
    ),
    "ascend-910c-part": Difference(
        "ascend",
        "a part of a 910C",
        "parts of two dies",
        "a part of one die",
        "a container can have one vNPU",
    ),
    "ascend-ai-cpus": Difference(
        "ascend",
        "eight `vir03_1c_8g` on a 910B2",
        "placed, two fail at start",
        "six",
        "AI CPUs are counted; the chip has six",
    ),
    "ascend-part-on-soft": Difference(
        "ascend",
        "a part without `huawei.com/vnpu-mode` on a soft chip",
        "placed",
        "`ModeNotFit`",
        "HAMi's device plugin cannot serve it",
    ),
    "ascend-whole-soft": Difference(
        "ascend",
        "`huawei.com/vnpu-mode: hami-core` without memory on a divided chip",
        "`ModeNotFit`",
        "a whole chip",
        "a whole chip needs no limiter",
    ),
    "ascend-mode": Difference(
        "ascend",
        "an unknown word in `huawei.com/vnpu-mode`",
        "ignored",
        "rejected",
        _TYPO,
    ),
    "parts-of-several": Difference(
        "all",
        "parts of several devices: Cambricon, Hygon",
        "placed",
        "rejected",
        "the hardware limits one part per container",
    ),
    "cambricon-percent": Difference(
        "cambricon",
        "`cambricon.com/mlu.smlu.vmemory-percentage`, or `memory_unit: percent`",
        "unknown, memory is in blocks of 256 MiB",
        "memory in percent of a card",
        "the vendor's own plugin counts so",
    ),
    "cambricon-370": Difference(
        "cambricon",
        "`cambricon.com/mlunum`, `cambricon.com/mlu370.smlu.…`",
        "unknown, left to kubelet",
        "aliases, with a warning",
        "names of the vendor's plugin",
    ),
    "cambricon-mode": Difference(
        "cambricon",
        "a part on a card that is not in sMLU mode",
        "placed",
        "`ModeNotFit`",
        "the driver cannot divide the card",
    ),
    "cambricon-types": Difference(
        "cambricon",
        "`cambricon.com/use-mlutype`, `nouse-mlutype`",
        "ignored",
        "honored",
        "a deny list must not be ignored",
    ),
    "iluvatar-names": Difference(
        "iluvatar",
        "`iluvatar.ai/gpu`, `vcuda-memory`, `vcuda-core`",
        "unknown",
        "any chip",
        "published manifests use these names",
    ),
    "mthreads-containers": Difference(
        "mthreads",
        "several containers with shares",
        "one device, else rejected",
        "one device each, if need be",
        "nothing in the driver requires one device",
    ),
    "metax-containers": Difference(
        "metax",
        "several containers with whole GPUs",
        "rejected where the GPUs differ",
        "GPUs of their own",
        "nothing in the driver prevents it",
    ),
    "metax-steps": Difference(
        "metax",
        "memory between steps of 128 MiB",
        "as requested",
        "rounded up",
        "the driver's step",
    ),
    "metax-mode": Difference(
        "metax",
        "an sGPU on a card that is not in sGPU mode",
        "placed",
        "`ModeNotFit`",
        "the driver cannot divide the card",
    ),
    "metax-qos-online": Difference(
        "metax",
        "an unknown `sgpu-qos-policy` with app class `online`",
        "ignored",
        "rejected",
        _TYPO,
    ),
    "metax-empty-class": Difference(
        "metax",
        "an empty `sgpu-app-class`",
        "rejected",
        "none",
        "an empty annotation is absent for every vendor",
    ),
    "enflame-units": Difference(
        "enflame",
        "large numbers of `gcu-memory`",
        "MiB above twice the largest profile of some node",
        "MiB above `memory_gib_most` (96)",
        "the unit must not depend on a node",
    ),
    "enflame-vgcu": Difference(
        "enflame",
        "`gcu-memory` or `gcu-core` alone",
        "no count",
        "a count of `enflame.com/vgcu` is added; the compute of a slice is rounded down",
        "kubelet allocates only counted resources",
    ),
    "awsneuron-cores": Difference(
        "awsneuron",
        "devices with more than two cores",
        "not served",
        "served; `cores_per_device` is a setting",
        "Trainium 2 has eight",
    ),
    "awsneuron-aligned": Difference(
        "awsneuron",
        "4, 8 or 16 devices of Inferentia",
        "any neighbors",
        "neighbors that begin at a multiple of their number, as on Trainium",
        "aligned sets leave less stranded",
    ),
    "amd-mask": Difference(
        "amd",
        "compute units of a share",
        "chosen by the scheduler",
        "chosen by the agent",
        "only the agent knows the device's units",
        checked_by="tests/contract/drivers/test_partitioners.py",
    ),
}
"""By key, in the order of the page."""
