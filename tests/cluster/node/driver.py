# SPDX-License-Identifier: Apache-2.0
"""Gives containers of a node the fake NVIDIA driver: a CDI specification, and an image to use it.

The driver is that of native/libvgpu/tests/fakedrv, so the limiter runs as on hardware. Obeys:
Container Device Interface 0.5.0.
"""

import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hami_sim.hardware.fake_nvml import NODES_VARIABLE, STATE_VARIABLE
from hami_sim.hardware.profile import Profile
from tests.cluster.node.image import Image, busybox_images, find_busybox
from tools.build_native_fakes import CUDA, DEFAULT_OUT, NVML, build

CONTROL_NODES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
CDI_KIND: Final = "nvidia.com/gpu"
DRIVE_IMAGE: Final = "localhost/hami/cuda:1"
"""Has /bin/drive, a program that uses the CUDA driver on command, beside sh."""
_LIBRARIES = Path(f"/usr/lib/{platform.machine()}-linux-gnu")
"""In containers: on the search path of Debian's images."""


def specification(
    profile: Profile, uuids: Sequence[str], *, libraries: Path, state: Path
) -> dict[str, Any]:
    """Return the CDI specification as the toolkit's generator writes it.

    ``libraries``: directory of the driver's libraries on the node; ``state``: the machine's state
    file there, in a directory of its own that containers of any user write to.
    """
    nodes = [f"/dev/nvidia{device.minor}" for device in profile.devices]
    named = [
        ("all", nodes),
        *((str(index), [node]) for index, node in enumerate(nodes)),
        *((uuid, [node]) for uuid, node in zip(uuids, nodes, strict=True)),
    ]
    return {
        "cdiVersion": "0.5.0",
        "kind": CDI_KIND,
        "devices": [
            {
                "name": name,
                "containerEdits": {"deviceNodes": [{"path": path} for path in paths]},
            }
            for name, paths in named
        ],
        "containerEdits": {
            "env": [
                "NVIDIA_VISIBLE_DEVICES=void",
                f"{STATE_VARIABLE}={state}",
                f"{NODES_VARIABLE}=/dev/nvidia",
            ],
            "deviceNodes": [{"path": f"/dev/{name}"} for name in CONTROL_NODES],
            "mounts": [
                *(
                    {
                        "hostPath": str(libraries / library),
                        "containerPath": str(_LIBRARIES / library),
                        "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                    }
                    for library in (NVML, CUDA)
                ),
                {
                    "hostPath": str(state.parent),
                    "containerPath": str(state.parent),
                    "options": ["rw", "nosuid", "nodev", "rbind", "rprivate"],
                },
            ],
        },
    }


def drive_image() -> Image:
    """Return ``DRIVE_IMAGE``: busybox, the test program ``drive``, and its C library."""
    busybox = find_busybox()
    assert busybox is not None
    app, _ = busybox_images(busybox)
    drive = build(Path(DEFAULT_OUT)) / "drive"
    needed = subprocess.run(["ldd", drive], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"(/\S+/(?:ld-linux|libc|libdl|libm|libpthread)\S*)", needed)
    files = {
        **app.files,
        "bin/drive": drive.read_bytes(),
        **{library.lstrip("/"): Path(library).read_bytes() for library in libraries},
    }
    return Image(name=DRIVE_IMAGE, files=files, links=app.links, command=["/bin/sh"])
