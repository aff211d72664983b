# SPDX-License-Identifier: Apache-2.0
"""Builds the CDI names and specs through which containers get hardware partitions.

Where devices enter containers by CDI (design D10, D24), the answer to ``Allocate`` is one name,
derived from pod, container and vendor alone. The CDI spec behind the name (Container Device
Interface 0.6) is written after the partitions were read back, before the container starts, and
again before each restart. Without CDI the answer itself must contain the partitions' own names; its
content is recorded (``Rendering``), because kubelet repeats it whenever the container starts.
"""

from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares
from hami_common.vendors.protocol import ContainerEdits, DeviceNode, RenderContext

KIND = "hami.io/partition"
CDI_VERSION = "0.6.0"
Edits = dict[str, object]


class Rendering(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Input from which one container's view of its shares can be rebuilt without a claim."""

    pod_uid: str
    container: str
    vendor: str
    allocation_id: str
    shares: ContainerShares
    devices: tuple[Device, ...]
    context: RenderContext
    """Without ``handles``."""
    by_spec: bool
    """The container was given the name of a spec, not the partitions' own names."""
    handles: dict[str, dict[str, str]] = {}
    """Handles given last, by device."""
    instances: dict[str, str] = {}
    """Instance given last, by the share's number."""

    @property
    def name(self) -> str:
        """Return the name of the container's spec, used as CDI device name and file name."""
        return spec_name(self.pod_uid, self.container, self.vendor)


def spec_name(pod_uid: str, container: str, vendor: str) -> str:
    """Return the CDI device that represents a container's shares of one vendor."""
    return f"{pod_uid}.{container}.{vendor}"


def cdi_name(name: str) -> str:
    """Return the name in the form that kubelet passes on."""
    return f"{KIND}={name}"


def spec_of(
    kind: str, edits_by_name: Mapping[str, ContainerEdits], exists: Callable[[str], bool]
) -> bytes:
    """Return the CDI spec of devices that inject edits; ``exists`` checks optional nodes."""
    document = {
        "cdiVersion": CDI_VERSION,
        "kind": kind,
        "devices": [
            {"name": name, "containerEdits": _edits(edits, exists)}
            for name, edits in edits_by_name.items()
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def _edits(edits: ContainerEdits, exists: Callable[[str], bool]) -> Edits:
    found: Edits = {
        "env": [f"{key}={value}" for key, value in sorted(edits.env.items())],
        "deviceNodes": [
            _node(node) for node in edits.devices if not node.optional or exists(node.host_path)
        ],
        "mounts": [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                "options": ["bind", "nosuid", "nodev", "ro" if mount.read_only else "rw"],
            }
            for mount in edits.mounts
        ],
    }
    return {key: part for key, part in found.items() if part}


def _node(node: DeviceNode) -> Edits:
    return {
        "path": node.container_path,
        "hostPath": node.host_path,
        "permissions": node.permissions,
    }
