# SPDX-License-Identifier: Apache-2.0
"""Directories that look like the root of a node, for the checks of ``hamictl doctor``."""

from pathlib import Path

ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def dpkg_status(version: str) -> str:
    """Database of Debian packages with the toolkit of this version."""
    others = "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\n\n"
    toolkit = (
        "Package: nvidia-container-toolkit\nStatus: install ok installed\nPriority: optional\n"
    )
    return f"{others}{toolkit}Version: {version}\nDepends: libc6\n\n"


def make_host(root: Path) -> None:
    """A node without a fault."""
    handler = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]\nruntime_type = "x"'
    write(root / "etc/containerd/config.toml", f"version = 2\n{handler}\n")
    write(root / "etc/nvidia-container-runtime/config.toml", f"{ENVVAR} = false\n")
    write(root / "etc/cdi/nvidia.yaml", "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices: []\n")
    write(root / "usr/lib64/libc.so.6", "\0GNU C Library (GNU libc) stable release version 2.36.\n")
    write(root / "var/lib/dpkg/status", dpkg_status("1.17.8-1"))
    write(root / "sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    write(root / "proc/driver/nvidia/version", "NVRM: NVIDIA UNIX Kernel Module  570.86  Release\n")
    write(root / "var/lib/kubelet/device-plugins/hami-nvidia.sock", "")
    write(root / "var/lib/kubelet/device-plugins/kubelet.sock", "")
