# SPDX-License-Identifier: Apache-2.0
"""A model of kubelet's admission of pods and allocation of device ids, without sockets or time.

It follows the device manager of Kubernetes 1.30 to 1.37: a pod enters the list, then its containers
are asked for one at a time, init containers first and in order, resources of one container in any
order; ids of ordinary init containers are reused by later containers of the same pod, ids of
sidecars are not; a pod may be refused before (eviction, sysctl) or after (node resources) its
devices were allocated. ``active_only`` is the list of 1.34; before, refused pods stay in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hami_common.model.request import ContainerKind
from hami_nodeagent.core.claims import ListedPod

Fate = Literal["admitted", "refused-early", "refused-late"]


@dataclass(frozen=True)
class ModelContainer:
    name: str
    kind: ContainerKind
    counts: Mapping[str, int]
    """Resource → number of ids."""


@dataclass(frozen=True)
class ModelPod:
    uid: str
    namespace: str
    name: str
    containers: tuple[ModelContainer, ...]
    fate: Fate = "admitted"


class AllocateRefused(Exception):
    """The plugin answered with an error: kubelet rejects the pod."""


class KubeletDied(Exception):
    """The process ended inside an admission."""


Answer = Callable[[ModelPod, ModelContainer, str, frozenset[str]], None]
"""The plugin: called with data that only kubelet has (pod and container) for the test to check."""


@dataclass
class ModelKubelet:
    ids_by_resource: Mapping[str, frozenset[str]]
    rng: random.Random
    active_only: bool = True
    run: int = 1
    pods: list[ModelPod] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    devices: dict[str, dict[str, dict[str, frozenset[str]]]] = field(default_factory=dict)
    """uid → container → resource → ids: the checkpoint."""
    die_after_calls: int | None = None
    calls: int = 0

    def listing(self) -> list[ListedPod]:
        """List of PodResources."""
        return [
            ListedPod(
                namespace=pod.namespace,
                name=pod.name,
                ids_by_container={
                    container.name: self.devices.get(pod.uid, {}).get(container.name, {})
                    for container in pod.containers
                    if container.kind != "init"
                },
            )
            for pod in self.pods
            if not (self.active_only and pod.uid in self.refused)
        ]

    def remove(self, pod: ModelPod) -> None:
        """The pod was deleted and its containers are gone."""
        self.pods = [one for one in self.pods if one.uid != pod.uid]
        self.devices.pop(pod.uid, None)

    def admit(self, pod: ModelPod, answer: Answer) -> bool:
        """Admit ``pod``; return True when it may run."""
        self.pods.append(pod)
        if pod.fate == "refused-early":
            self._refuse(pod)
            return False
        try:
            self._allocate(pod, answer)
        except AllocateRefused:
            self._refuse(pod)
            return False
        if pod.fate == "refused-late":
            self._refuse(pod)
            return False
        return True

    def restart(self, answer: Answer, *, keep_checkpoint: bool = True) -> None:
        """Restart: all pods are admitted again, from the checkpoint."""
        pods, self.pods = self.pods, []
        self.run += 1
        self.die_after_calls = None
        if not keep_checkpoint:
            self.devices = {}
        for pod in pods:
            if pod.uid in self.refused:
                continue
            self.pods.append(pod)
            try:
                self._allocate(pod, answer)
            except AllocateRefused:
                self._refuse(pod)

    def _refuse(self, pod: ModelPod) -> None:
        self.refused.add(pod.uid)
        self.devices.pop(pod.uid, None)

    def _allocate(self, pod: ModelPod, answer: Answer) -> None:
        reusable: dict[str, set[str]] = {}
        for container in pod.containers:
            resources = list(container.counts)
            self.rng.shuffle(resources)
            for resource in resources:
                self._allocate_resource(pod, container, resource, reusable, answer)
            for resource, ids in self.devices.get(pod.uid, {}).get(container.name, {}).items():
                if container.kind == "init":
                    reusable.setdefault(resource, set()).update(ids)
                else:
                    reusable.get(resource, set()).difference_update(ids)

    def _allocate_resource(
        self,
        pod: ModelPod,
        container: ModelContainer,
        resource: str,
        reusable: Mapping[str, set[str]],
        answer: Answer,
    ) -> None:
        held = self.devices.setdefault(pod.uid, {}).setdefault(container.name, {})
        if resource in held:
            return
        need = container.counts[resource]
        again = sorted(reusable.get(resource, ()))
        self.rng.shuffle(again)
        chosen = again[:need]
        in_use = {
            one
            for of_pod in self.devices.values()
            for of_container in of_pod.values()
            for one in of_container.get(resource, ())
        }
        free = sorted(self.ids_by_resource[resource] - in_use)
        if len(free) < need - len(chosen):
            raise AllocateRefused
        chosen += self.rng.sample(free, need - len(chosen))
        answer(pod, container, resource, frozenset(chosen))
        self.calls += 1
        if self.die_after_calls is not None and self.calls >= self.die_after_calls:
            # Half of the deaths come before the checkpoint is written.
            if self.rng.random() < 0.5:
                held[resource] = frozenset(chosen)
            raise KubeletDied
        held[resource] = frozenset(chosen)
