# SPDX-License-Identifier: Apache-2.0
"""Imitates the OCI runtime of NVIDIA's container toolkit on the node of a site.

Called as runc is. Before ``create`` it applies the edits of the CDI specification for the devices
in NVIDIA_VISIBLE_DEVICES to the bundle's config.json, then it becomes runc. As the toolkit does, it
ignores the variable in a container without CAP_SYS_ADMIN where the toolkit's configuration does not
accept it from unprivileged containers. Runs by itself on the node, with the standard library only.
Facts: NVIDIA container toolkit 1.17, ``internal/config/image``.
"""

import json
import os
import shutil
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
SPECIFICATION = Path("/etc/cdi/nvidia.yaml")
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
ACCEPT = "accept-nvidia-visible-devices-envvar-when-unprivileged"
NO_DEVICES = ("", "void")


def wanted(bundle: dict[str, Any], config: dict[str, Any]) -> list[str] | None:
    """Return the names of the devices to inject; ``None``: the container is left as it is."""
    process = bundle["process"]
    environment = dict(word.partition("=")[::2] for word in process.get("env") or ())
    names = environment.get(VARIABLE, "")
    if names in NO_DEVICES:
        return None
    bounding = (process.get("capabilities") or {}).get("bounding") or ()
    if "CAP_SYS_ADMIN" not in bounding and not config.get(ACCEPT, True):
        return None
    return [] if names == "none" else [name.strip() for name in names.split(",") if name.strip()]


def apply(bundle: dict[str, Any], specification: dict[str, Any], names: list[str]) -> None:
    """Add the edits of the named devices, and those common to all, to an OCI configuration."""
    edits = {device["name"]: device["containerEdits"] for device in specification["devices"]}
    unknown = [name for name in names if name not in edits]
    if unknown:
        sys.exit(f"unresolvable CDI devices {', '.join(unknown)}")
    for edit in (specification["containerEdits"], *(edits[name] for name in names)):
        bundle["process"].setdefault("env", []).extend(edit.get("env", ()))
        for mount in edit.get("mounts", ()):
            bundle["mounts"].append(
                {
                    "destination": mount["containerPath"],
                    "source": mount["hostPath"],
                    "type": "bind",
                    "options": mount["options"],
                }
            )
        for node in edit.get("deviceNodes", ()):
            _add_device(bundle["linux"], node["path"])


def _add_device(linux: dict[str, Any], path: str) -> None:
    status = Path(path).stat()
    assert stat.S_ISCHR(status.st_mode), f"{path} is no character device"
    numbers = {"major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
    linux.setdefault("devices", []).append(
        {"path": path, "type": "c", "fileMode": 0o666, "uid": 0, "gid": 0, **numbers}
    )
    rules = linux.setdefault("resources", {}).setdefault("devices", [])
    rules.append({"allow": True, "type": "c", "access": "rw", **numbers})


def main(arguments: list[str]) -> None:
    """Edit the bundle of ``create``, then become runc."""
    bundle_file = Path(arguments[arguments.index("--bundle") + 1]) / "config.json"
    bundle = json.loads(bundle_file.read_text())
    config = tomllib.loads(CONFIG.read_text()) if CONFIG.exists() else {}
    names = wanted(bundle, config)
    if names is not None:
        apply(bundle, json.loads(SPECIFICATION.read_text()), names)
        bundle_file.write_text(json.dumps(bundle))
    runc = shutil.which("runc") or "/usr/sbin/runc"
    os.execv(runc, [runc, *arguments])  # noqa: S606 - the toolkit's runtime becomes runc


if __name__ == "__main__":
    main(sys.argv[1:])
