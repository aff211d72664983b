# SPDX-License-Identifier: Apache-2.0
"""What a container with hardware partitions is given: a name at once, the contents when they exist.

Where devices enter containers by CDI (design D10, D24), the answer to ``Allocate`` is one name that
follows from pod, container and vendor alone. The CDI spec behind it (Container Device Interface
0.6) is written once the partitions were read back, before the container starts, and again before
each further start. Where they do not, the answer itself must hold the partitions' own names; what
it held is remembered (``Rendering``), because kubelet repeats it whenever the container starts.
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
    """All that one container's view of its shares is made of, to be made again without a claim."""

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
    """What was given last, by device."""
    instances: dict[str, str] = {}
    """By the share's number: the instance that it was given last."""

    @property
    def name(self) -> str:
        """Name of the container's spec: a CDI device's name and a file's."""
        return spec_name(self.pod_uid, self.container, self.vendor)


def spec_name(pod_uid: str, container: str, vendor: str) -> str:
    """The CDI device that stands for a container's shares of one vendor."""
    return f"{pod_uid}.{container}.{vendor}"


def cdi_name(name: str) -> str:
    """The name as kubelet passes it on."""
    return f"{KIND}={name}"


def spec_of(name: str, edits: ContainerEdits, exists: Callable[[str], bool]) -> bytes:
    """The CDI spec that brings ``edits`` into a container; ``exists`` tells of optional nodes."""
    found: Mapping[str, object] = {
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
    document = {
        "cdiVersion": CDI_VERSION,
        "kind": KIND,
        "devices": [
            {"name": name, "containerEdits": {key: part for key, part in found.items() if part}}
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def _node(node: DeviceNode) -> Edits:
    return {
        "path": node.container_path,
        "hostPath": node.host_path,
        "permissions": node.permissions,
    }
