# SPDX-License-Identifier: Apache-2.0
"""Installs simulated NVIDIA hardware on a site's node: driver, toolkit, CDI specification.

The driver is the fake one of native/libvgpu/tests/fakedrv, so the agent's NVML code and the limiter
run as on hardware. Files stand where an administrator finds them: the driver's libraries below
``DRIVER``, the toolkit's configuration and the CDI specification in /etc. ``profile`` names a
machine of hami_sim.hardware. Obeys: Container Device Interface 0.5.0.
"""

import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from hami_sim.hardware import profile as profiles
from hami_sim.hardware.fake_nvml import NODES_VARIABLE, STATE_VARIABLE, FakeNvml
from tools.build_native_fakes import CUDA, DEFAULT_OUT, NVML, build

DRIVER = Path("/var/lib/nvidia")
"""On the node: lib/ with the libraries, state/ with what the cards are, toolkit/."""
HARDENED = """\
accept-nvidia-visible-devices-envvar-when-unprivileged = false
accept-nvidia-visible-devices-as-volume-mounts = false
"""
"""Configuration of the container toolkit, as docs/install.md demands of nodes."""
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
CDI_KIND = "nvidia.com/gpu"
HANDLER = "nvidia"
_LIBRARIES = Path(f"/usr/lib/{platform.machine()}-linux-gnu")
"""In containers: on the search path of Debian's images."""
_WRAPPER = """#!/bin/sh
# Only `create` reads the bundle.
case " $* " in
*" create "*) exec {python} -I -S {toolkit} "$@" ;;
esac
exec {runc} "$@"
"""


class Hardware:
    """The cards of one node, which survive its reboots."""

    def __init__(self, profile: str, node: str) -> None:
        self.profile = profiles.load(profile)
        self._node = node
        self.uuids = [
            self.profile.uuid_of(node, index) for index in range(len(self.profile.devices))
        ]
        self.nvml: FakeNvml | None = None
        """Set once it is installed: what befalls the cards."""

    @property
    def runtime(self) -> Path:
        """The toolkit's OCI runtime on the node."""
        return DRIVER / "toolkit" / "nvidia-container-runtime"

    @property
    def device_nodes(self) -> tuple[str, ...]:
        """Names in the node's /dev."""
        return (*(f"nvidia{device.minor}" for device in self.profile.devices), *CONTROL_NODES)

    def install(self, var_lib: Path, etc: Path) -> None:
        """Write all files; ``var_lib`` and ``etc`` are the node's, seen from here."""
        root = var_lib / DRIVER.relative_to("/var/lib")
        for name in ("lib", "state", "toolkit"):
            (root / name).mkdir(parents=True, exist_ok=True)
        fakes = build(Path(DEFAULT_OUT))
        for library in (NVML, CUDA):
            shutil.copy2(fakes / library, root / "lib" / library)
        # Containers of any user share the cards.
        (root / "state").chmod(0o1777)
        self.nvml = FakeNvml(root / "state" / "machine", self.profile, self._node)
        toolkit = root / "toolkit" / "toolkit.py"
        shutil.copy2(Path(__file__).with_name("toolkit.py"), toolkit)
        wrapper = root / "toolkit" / self.runtime.name
        wrapper.write_text(
            _WRAPPER.format(
                python=sys.executable,
                toolkit=DRIVER / "toolkit" / toolkit.name,
                runc=shutil.which("runc"),
            )
        )
        wrapper.chmod(0o755)
        cdi = etc / "cdi" / "nvidia.yaml"
        cdi.parent.mkdir(parents=True, exist_ok=True)
        cdi.write_text(json.dumps(self._cdi(), indent=1))
        toolkit_settings = etc / "nvidia-container-runtime" / "config.toml"
        toolkit_settings.parent.mkdir(parents=True, exist_ok=True)
        toolkit_settings.write_text(HARDENED)

    def _cdi(self) -> dict[str, Any]:
        """Specification as the toolkit's generator writes it; JSON is YAML too."""
        nodes = [f"/dev/nvidia{device.minor}" for device in self.profile.devices]
        named = [
            ("all", nodes),
            *((str(index), [node]) for index, node in enumerate(nodes)),
            *((uuid, [node]) for uuid, node in zip(self.uuids, nodes, strict=True)),
        ]
        state = DRIVER / "state"
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
                    f"{STATE_VARIABLE}={state}/machine",
                    f"{NODES_VARIABLE}=/dev/nvidia",
                ],
                "deviceNodes": [{"path": f"/dev/{name}"} for name in CONTROL_NODES],
                "mounts": [
                    *(
                        {
                            "hostPath": str(DRIVER / "lib" / library),
                            "containerPath": str(_LIBRARIES / library),
                            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                        }
                        for library in (NVML, CUDA)
                    ),
                    {
                        "hostPath": str(state),
                        "containerPath": str(state),
                        "options": ["rw", "nosuid", "nodev", "rbind", "rprivate"],
                    },
                ],
            },
        }
