# SPDX-License-Identifier: Apache-2.0
"""Installs simulated NVIDIA hardware on a site's node: driver, toolkit, CDI specification.

The driver is the fake one of native/libvgpu/tests/fakedrv, so the agent's NVML code and the limiter
run as on hardware. Files stand where an administrator finds them: the driver's libraries below
``DRIVER``, the toolkit's configuration and the CDI specification in /etc. ``profile`` names a
machine of hami_sim.hardware.
"""

import json
import shutil
import sys
from pathlib import Path

from hami_sim.hardware import profile as profiles
from hami_sim.hardware.fake_nvml import FakeNvml
from tests.cluster.node.driver import CONTROL_NODES, specification
from tools.build_native_fakes import CUDA, DEFAULT_OUT, NVML, build

DRIVER = Path("/var/lib/nvidia")
"""On the node: lib/ with the libraries, state/ with what the cards are, toolkit/."""
HARDENED = """\
accept-nvidia-visible-devices-envvar-when-unprivileged = false
accept-nvidia-visible-devices-as-volume-mounts = false
"""
"""Configuration of the container toolkit, as docs/install.md demands of nodes."""
HANDLER = "nvidia"
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
        described = specification(
            self.profile,
            self.uuids,
            libraries=DRIVER / "lib",
            state=DRIVER / "state" / "machine",
        )
        cdi.write_text(json.dumps(described, indent=1))
        toolkit_settings = etc / "nvidia-container-runtime" / "config.toml"
        toolkit_settings.parent.mkdir(parents=True, exist_ok=True)
        toolkit_settings.write_text(HARDENED)
