# SPDX-License-Identifier: Apache-2.0
"""Makes pods as a hostile tenant would write them: each field sound, odd or far out of range."""

import copy
import random
from collections.abc import Callable
from typing import Any

import msgspec

from hami_common.pods import annotations as keys
from hami_common.pods.visibility import DEVICE_VARIABLES
from hami_common.vendors.catalog import Catalog
from tests.attack.fuzz.inputs import DIGITS, NUMBERS, STRINGS, pick

Document = dict[str, Any]

RESOURCES = tuple(sorted(Catalog.from_settings().resource_names()))
NVIDIA = (
    "nvidia.com/gpu",
    "nvidia.com/gpumem",
    "nvidia.com/gpumem-percentage",
    "nvidia.com/gpucores",
    "nvidia.com/gpucore",
    "nvidia.com/priority",
)
SOUND_QUANTITIES = ("0", "1", "2", "10", "50", "100", "500", "1000", "4k", 1, 2, 30)
TENANT_KEYS = (
    keys.SCORING_WEIGHTS, keys.NODE_POLICY, keys.DEVICE_POLICY, keys.QUEUE_LABEL,
    keys.KUEUE_QUEUE_LABEL, keys.GANG, keys.GANG_SIZE, keys.MIN_RUNTIME, keys.NO_MOVE,
    keys.TRACEPARENT, keys.WEBHOOK_LABEL, keys.DEVICE_CORDON,
    "scheduling.x-k8s.io/pod-group", "scheduling.k8s.io/group-name",
    "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count",
    "nvidia.com/use-gputype", "nvidia.com/nouse-gputype", "nvidia.com/use-gpuuuid",
    "nvidia.com/nouse-gpuuuid", "nvidia.com/numa-bind", "nvidia.com/vgpu-mode",
    "huawei.com/vnpu-mode", "metax-tech.com/sgpu-qos-policy", "hygon.com/use-dcutype",
)  # fmt: skip
RESERVED_KEYS = (
    keys.ALLOCATION, keys.FENCE, keys.MANAGED_LABEL, keys.HAMI_NODE, keys.HAMI_TIME,
    "hami.io/vgpu-devices-allocated", "hami.io/vgpu-devices-to-allocate", keys.limits("main"),
    keys.TAKEN_OVER,
)  # fmt: skip
SOUND_NOTES = (
    "binpack", "spread", "topology-aware", "mutex", "slot=1,core=2,memory=3", "core=5", "A100",
    "NVIDIA H100", "true", "false", "hami-core", "mig", "4", "2", "60", "gang-a", "gang-b", "team",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)  # fmt: skip
PATHS = (
    "/data", "/etc/hami", "/etc//hami", "/etc/./hami/limits", "/run/hami", "/run//hami",
    "/etc/ld.so.preload", "/etc//ld.so.preload", "/etc/../etc/ld.so.preload", "/usr/local/vgpu",
    "/usr/local/vgpu/libvgpu.so", "/run/hami-priority", "/var/run/nvidia-container-devices/all",
    "", "/", "//", "relative", "/a" * 2000,
)  # fmt: skip
VOLUMES = ("cm", "lim", "hami-limits-main", "hami-region-main", "hami-limits-", "a" * 63)
TARGETS = ("main", "", "x")
SPEC_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("nodeName", ("", "n0", "../x")),
    ("schedulerName", ("hami-scheduler", "default-scheduler", "other", "")),
    ("priority", (0, 5, 1000, -(2**31), 2**31 - 1)),
    ("priorityClassName", ("high", "", "system-node-critical")),
    ("preemptionPolicy", ("Never", "PreemptLowerPriority", "x")),
    ("activeDeadlineSeconds", (1, 2**31, 2**62)),
    ("runtimeClassName", ("nvidia", "", "x")),
    ("hostPID", (True, False)),
    ("schedulingGates", ([{"name": "x"}], [])),
)
BIG = (150, 200, 201, 1_000, 3_000, 8_000)
"""Counts of list items in large pods."""


NUMBER_TEXTS = ("0", "1", "-1", "2147483648", "9" * 20, "9" * 400, DIGITS, "0.5", "1e309", "٣", "")
"""Numbers as text: sound, beyond int32, beyond int64, beyond float, beyond ``int()``."""


class Tenant:
    """One author of one pod."""

    def __init__(self, chance: random.Random) -> None:
        """Draw how hostile the author is: a fifth of them write sound pods only."""
        self._chance = chance
        self._hostile = pick(chance, (0.0, 0.02, 0.05, 0.1, 0.4))

    def _is(self, probability: float) -> bool:
        return self._chance.random() < probability

    def _attacks(self) -> bool:
        return self._chance.random() < self._hostile

    def _number(self) -> str:
        return pick(self._chance, NUMBER_TEXTS if self._attacks() else NUMBER_TEXTS[:2])

    def _note(self, key: str) -> str:
        """Return the text of an annotation or label, in the form that its reader expects."""
        if self._attacks():
            return pick(self._chance, STRINGS)
        match key:
            case keys.SCORING_WEIGHTS:
                return f"slot={self._number()},core={self._number()},memory={self._number()}"
            case keys.NODE_POLICY | keys.DEVICE_POLICY:
                return pick(self._chance, ("binpack", "spread", "topology-aware"))
            case keys.MIN_RUNTIME | keys.GANG_SIZE | "kueue.x-k8s.io/pod-group-total-count":
                return self._number()
        return pick(self._chance, SOUND_NOTES)

    def _notes(self) -> Document:
        wanted = [pick(self._chance, TENANT_KEYS) for _ in range(self._chance.randrange(3))]
        if self._is(0.1):
            wanted += [keys.GANG, keys.GANG_SIZE]
        if self._is(0.2):
            wanted.append(keys.SCORING_WEIGHTS)
        if self._attacks():
            wanted.append(pick(self._chance, RESERVED_KEYS))
        if self._attacks():
            wanted.append(pick(self._chance, STRINGS))
        return {key: self._note(key) for key in wanted}

    def _quantity(self, name: str) -> Any:
        """Return the value of a resource limit; text or, as in YAML, a bare number."""
        if self._attacks():
            return pick(self._chance, STRINGS if self._is(0.5) else NUMBERS)
        small = name.endswith(("gpu", "priority"))
        return pick(self._chance, ("0", "1", 1, "2") if small else SOUND_QUANTITIES)

    def _resources(self) -> Document:
        names = NVIDIA if self._is(0.9) else RESOURCES
        limits = {
            name: self._quantity(name)
            for name in (pick(self._chance, names) for _ in range(self._chance.randrange(1, 3)))
        }
        if self._is(0.8):
            limits["nvidia.com/gpu"] = "1"
        found: Document = {"limits": limits}
        if self._attacks():
            name = pick(self._chance, names)
            found["requests"] = {name: self._quantity(name)}
        if self._attacks():
            found["limits"] = None
        return found

    def _variable(self) -> Document:
        chance = self._chance
        name = pick(chance, DEVICE_VARIABLES)
        if self._is(0.4):
            name = pick(chance, ("LD_PRELOAD", "CUDA_DEVICE_MEMORY_LIMIT_0", "A"))
        if self._attacks():
            name = pick(chance, STRINGS)
        if self._is(0.1):
            return {"name": name, "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "k"}}}
        return {"name": name, "value": pick(chance, ("all", "none", "void", "0", *STRINGS[:8]))}

    def _mount(self) -> Document:
        chance = self._chance
        found: Document = {"name": pick(chance, VOLUMES), "mountPath": "/data"}
        if self._attacks():
            found["mountPath"] = pick(chance, PATHS)
        if self._attacks():
            found["subPath"] = pick(chance, ("empty", "../x", "", "/etc"))
        return found

    def _several(self, make: Callable[[], Document]) -> list[Document]:
        return [make() for _ in range(self._chance.randrange(4))]

    def container(self, name: str) -> Document:
        """Return one container."""
        found: Document = {"name": name, "image": "app"}
        if self._attacks():
            found["name"] = pick(self._chance, STRINGS)
        if self._is(0.8):
            found["resources"] = self._resources()
        if self._is(0.25):
            found["env"] = self._several(self._variable)
        if self._attacks():
            found["envFrom"] = [{"configMapRef": {"name": "cm"}}]
        if self._is(0.25):
            found["volumeMounts"] = self._several(self._mount)
        if self._attacks():
            privileged = pick(self._chance, (True, False, None))
            found["securityContext"] = {"privileged": privileged}
        if self._attacks():
            found["restartPolicy"] = pick(self._chance, ("Always", "Never", ""))
        return found

    def _containers(self) -> list[Document]:
        names = ["main", *(f"c{place}" for place in range(self._chance.randrange(2)))]
        if self._attacks():
            names.append("main")
        return [self.container(name) for name in names]

    def pod(self, name: str, *, uid: str = "", namespace: str = "team-a") -> Document:
        """Return a pod; ``uid`` and ``namespace`` are set by the API server and thus sound."""
        spec: Document = {"containers": self._containers()}
        metadata: Document = {"name": name, "namespace": namespace}
        if uid:
            metadata["uid"] = uid
        if self._is(0.3):
            metadata["labels"] = self._notes()
        if self._is(0.8):
            metadata["annotations"] = self._notes()
        if self._is(0.2):
            spec["initContainers"] = [{**one, "name": "i"} for one in self._containers()[:1]]
        if self._attacks():
            spec["ephemeralContainers"] = [
                {**self.container("debug"), "targetContainerName": pick(self._chance, TARGETS)}
            ]
        if self._is(0.3):
            spec["volumes"] = self._several(
                lambda: {"name": pick(self._chance, VOLUMES), "emptyDir": {}}
            )
        for field, values in SPEC_VALUES:
            if self._attacks():
                spec[field] = copy.deepcopy(pick(self._chance, values))
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def large(chance: random.Random, found: Document) -> Document:
    """Make one list of the pod long, within what the API server stores (1.5 MB)."""
    count = pick(chance, BIG)
    spec, first = found["spec"], found["spec"]["containers"][0]
    match chance.randrange(6):
        case 0:
            asks = {"limits": {"nvidia.com/gpu": pick(chance, ("0", "1"))}}
            spec["containers"] = [
                {"name": f"c{place}", "image": "a", "resources": asks} for place in range(count)
            ]
        case 1:
            first["volumeMounts"] = [
                {"name": f"v{place}", "mountPath": f"/d{place}"} for place in range(3 * count)
            ]
            spec["volumes"] = [{"name": f"v{place}", "emptyDir": {}} for place in range(3 * count)]
        case 2:
            first["env"] = [
                {"name": f"CUDA_DEVICE_MEMORY_LIMIT_{place}", "value": "1"}
                for place in range(3 * count)
            ]
        case 3:
            found["metadata"]["annotations"] = {
                f"hami.io/x{place}-devices-allocated": "a" for place in range(3 * count)
            }
        case 4:
            spec["initContainers"] = [
                Tenant(chance).container(f"i{place}") for place in range(count // 3)
            ]
        case _:
            spec["volumes"] = [
                {"name": f"hami-region-{place}", "emptyDir": {}} for place in range(3 * count)
            ]
    return found


def stored(found: Document) -> Document:
    """Return the pod as the API server keeps it: quantities are text, nothing is null."""
    metadata, spec = found["metadata"], found["spec"]
    for part in ("labels", "annotations"):
        metadata[part] = {key: str(text) for key, text in (metadata.get(part) or {}).items()}
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for one in spec.get(kind) or []:
            quantities = one.get("resources") or {}
            one["resources"] = {
                part: {
                    name: "1" if isinstance(amount, msgspec.Raw) else str(amount)
                    for name, amount in (named or {}).items()
                }
                for part, named in quantities.items()
            }
    return found
