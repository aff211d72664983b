# SPDX-License-Identifier: Apache-2.0
"""Holds the changed copy of a pod during an admission, and gives the patch to it."""

from typing import Any, Final

from hami_common.admission.review import Operation
from hami_webhook.core.patch import diff

Document = dict[str, Any]


class Draft:
    """A pod that is changed while the original stays as it is.

    Copies only the changed parts, so that the patch is found without a walk through the rest.
    """

    _GROUPS: Final = ("initContainers", "containers")

    def __init__(self, pod: Document) -> None:
        """Begin with ``pod``, which has metadata and spec."""
        self._pod = pod
        self.metadata: Document = dict(pod["metadata"])
        self.spec: Document = dict(pod["spec"])
        self._places = [
            (group, position)
            for group in self._GROUPS
            for position in range(len(self.spec.get(group) or []))
        ]
        self._copied: dict[int, Document] = {}

    def seen(self, index: int) -> Document:
        """Return one container, in kubelet's order, as it is now; not to be changed."""
        group, position = self._places[index]
        document: Document = self.spec[group][position]
        return document

    def container(self, index: int) -> Document:
        """Return a copy of one container, in kubelet's order, to be changed at its top level."""
        if index not in self._copied:
            group, position = self._places[index]
            if self.spec[group] is self._pod["spec"][group]:
                self.spec[group] = list(self.spec[group])
            self._copied[index] = self.spec[group][position] = dict(self.spec[group][position])
        return self._copied[index]

    def original(self, index: int) -> Document:
        """Return one container as it was sent, in kubelet's order."""
        group, position = self._places[index]
        document: Document = self._pod["spec"][group][position]
        return document

    def operations(self) -> tuple[Operation, ...]:
        """Return the patch from the original pod to the draft."""
        return tuple(diff(self._pod, {**self._pod, "metadata": self.metadata, "spec": self.spec}))
