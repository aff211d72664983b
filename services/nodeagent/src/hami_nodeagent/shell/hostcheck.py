# SPDX-License-Identifier: Apache-2.0
"""Checks the node's files for problems with device sharing, and names the fix of each.

Reads only, below the host's root file system as the agent sees it (``host_root``): configuration of
the container runtime and of the vendor's toolkit, CDI specifications, kubelet's directory of
plugins, the C library. Unreadable files are skipped; a check that can read none of the files
that it needs reports WARN or FAIL. The driver check also passes without the driver's version file
if the registry lists devices. Calls block for reads of small files, so they run in a thread.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread

from hami_common import documents
from hami_common.dra.names import CLAIMS_CDI
from hami_common.errors import SettingsInvalid
from hami_common.events.asking import Finding, Verdict
from hami_common.runtime.quarantine import sift
from hami_nodeagent.settings import Settings
from hami_nodeagent.shell.site import Site

OLDEST_GLIBC = (2, 17)
"""The oldest C library that the in-container library and the vendor's toolkit run on."""
OLDEST_DRIVER = (440, 0)
OLDEST_TOOLKIT = (1, 12)
"""The first release that writes CDI specifications (nvidia-ctk cdi generate)."""
NVIDIA = "nvidia"
CDI_KINDS = ("nvidia.com/gpu",)
CONTAINERD = (
    "etc/containerd/config.toml",
    "var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "var/snap/microk8s/current/args/containerd.toml",
)
CONTAINERD_DROP_INS = ("etc/containerd/conf.d", "etc/containerd/config.d")
CRIO = ("etc/crio/crio.conf", "usr/share/crio/crio.conf")
CRIO_DROP_INS = ("etc/crio/crio.conf.d", "usr/share/crio/crio.conf.d")
TOOLKIT = (
    "etc/nvidia-container-runtime/config.toml",
    "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
)
CDI_DIRECTORIES = ("etc/cdi", "var/run/cdi", "run/cdi")
C_LIBRARIES = (
    "lib64/libc.so.6",
    "usr/lib64/libc.so.6",
    "lib/x86_64-linux-gnu/libc.so.6",
    "usr/lib/x86_64-linux-gnu/libc.so.6",
    "lib/aarch64-linux-gnu/libc.so.6",
    "usr/lib/aarch64-linux-gnu/libc.so.6",
)
CGROUPS = "sys/fs/cgroup"
DPKG_STATUS = "var/lib/dpkg/status"
_MOST_BYTES = 16 << 20
_TOOLKIT_PACKAGE = re.compile(
    r"^Package: nvidia-container-toolkit\n(?:.+\n)*?Version: (?:\d+:)?(\d+)\.(\d+)", re.MULTILINE
)
_GLIBC = re.compile(rb"GNU C Library [^\n]*?version (\d+)\.(\d+)")
_DRIVER = re.compile(r"Kernel Module[^\n]*?\s(\d+)\.(\d+)")
_KIND = re.compile(r"""^[\s{]*["']?kind["']?\s*:\s*["']?([^\s"',]+)""", re.MULTILINE)
"""The kind of a CDI specification, in YAML or JSON."""
_ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"

_log = logging.getLogger(__name__)


class HostCheck:
    """The checks of one node."""

    def __init__(
        self,
        *,
        site: Site,
        resources: Mapping[str, str],
        more: Sequence[Callable[[], Finding]] = (),
    ) -> None:
        """``resources``: count resources that this agent serves → vendor; ``more``: checks.

        The neutral resource, which has no vendor, is left out.
        """
        settings = site.settings
        self._site = site
        self._resources = {name: vendor for name, vendor in resources.items() if vendor}
        self._more = tuple(more)
        self._proc = Path(settings.host_proc)
        self._root = host_root(settings)
        self._plugins = Path(settings.device_plugin_dir)
        self._injection = settings.injection

    async def check(self) -> tuple[Finding, ...]:
        """Every finding of this node."""
        findings = [found for _, found in await anyio.to_thread.run_sync(self._look)]
        return tuple(findings)

    def findings(self) -> Iterator[Finding]:
        """The same, one after the other."""
        return (found for _, found in self._look())

    def _look(self) -> list[tuple[Callable[[], Finding], Finding]]:
        looks: list[Callable[[], Finding]] = [self.kubelet, self.second_plugin]
        if NVIDIA in self._resources.values():
            looks += [self.driver, self.runtime_handler, self.toolkit, self.cdi]
            if self._toolkit_package() is not None:
                looks.append(self.toolkit_version)
        if self._site.settings.dra.enabled and any(self._cdi_settings()):
            looks.append(self.claims_cdi)
        looks += [self.glibc, self.cgroups, *self._more]
        handled, failed = sift(looks, lambda look: look())
        for look, error in failed:
            _log.error("check failed", extra={"check": look.__name__}, exc_info=error)
            text = f"the check failed: {type(error).__name__}"
            handled.append((look, self._say(look.__name__, "FAIL", text, "see the agent's log")))
        return handled

    def _say(self, check: str, verdict: Verdict, text: str, fix: str = "") -> Finding:
        return Finding(check=check, verdict=verdict, text=text, fix=fix, node=self._site.node)

    # --- kubelet ---------------------------------------------------------------------------------

    def kubelet(self) -> Finding:
        """Check that kubelet has accepted our plugins."""
        missing = sorted(set(self._resources.values()) - self._site.picture.served)
        if missing:
            return self._say(
                "kubelet",
                "FAIL",
                f"kubelet has not taken the device plugin of {', '.join(missing)}",
                f"see that {self._plugins}/kubelet.sock exists and the agent's log",
            )
        return self._say("kubelet", "PASS", "kubelet has taken all device plugins")

    def second_plugin(self) -> Finding:
        """Sockets of other device plugins for the same vendors."""
        words = {resource.partition(".")[0] for resource in self._resources} | set(
            self._resources.values()
        )
        try:
            names = sorted(path.name for path in self._plugins.iterdir() if path.suffix == ".sock")
        except OSError as error:
            return self._say(
                "second-plugin",
                "WARN",
                f"{self._plugins} cannot be read: {error.strerror}",
                "mount kubelet's directory of device plugins into the agent",
            )
        foreign = [
            name
            for name in names
            if not name.startswith(("hami", "kubelet")) and any(word in name for word in words)
        ]
        if foreign:
            return self._say(
                "second-plugin",
                "FAIL",
                f"another device plugin has a socket here: {', '.join(foreign)}",
                "remove the other plugin from this node (with NVIDIA's GPU operator: kubectl label"
                f" --overwrite node {self._site.node} nvidia.com/gpu.deploy.device-plugin=false)."
                " If the socket remains, restart kubelet",
            )
        return self._say("second-plugin", "PASS", "no other device plugin has a socket here")

    # --- driver ----------------------------------------------------------------------------------

    def driver(self) -> Finding:
        """Check that the driver is loaded and recent enough."""
        known = self._site.picture.canonical_by_vendor.get(NVIDIA)
        try:
            text = (self._proc / "driver" / "nvidia" / "version").read_text(encoding="utf-8")
        except (OSError, ValueError):
            text = ""
        found = _DRIVER.search(text)
        if found is not None and (int(found[1]), int(found[2])) < OLDEST_DRIVER:
            return self._say(
                "driver",
                "FAIL",
                f"the NVIDIA driver is {found[1]}.{found[2]}",
                f"install {OLDEST_DRIVER[0]} or newer",
            )
        if known is None or not known.devices:
            is_loaded = "is loaded, but shows no device" if text else "is not loaded"
            return self._say(
                "driver",
                "FAIL",
                f"the NVIDIA driver {is_loaded}",
                "install the driver, run nvidia-smi on the node, and see dmesg for NVRM lines",
            )
        version = f" {found[1]}.{found[2]}" if found is not None else ""
        return self._say("driver", "PASS", f"driver{version} shows {len(known.devices)} devices")

    # --- runtime and toolkit ---------------------------------------------------------------------

    def runtime_handler(self) -> Finding:
        """Check that the container runtime has the handler ``nvidia``."""
        documents = list(self._runtime_files())
        if not documents:
            return self._say(
                "runtime-handler",
                "WARN",
                "no configuration of containerd or CRI-O was found",
                "see that the runtime has a handler nvidia: nvidia-ctk runtime configure",
            )
        if any(NVIDIA in _handlers(document) for _, document in documents):
            return self._say("runtime-handler", "PASS", "the container runtime has handler nvidia")
        names = ", ".join(f"/{name}" for name, _ in documents)
        return self._say(
            "runtime-handler",
            "FAIL",
            f"the container runtime has no handler nvidia in {names}",
            "run nvidia-ctk runtime configure for the runtime and restart it",
        )

    def toolkit(self) -> Finding:
        """Check that the toolkit gives no container devices by a variable or a mount.

        A container without a share may take variables from a ConfigMap or its image, which
        admission does not see, so the toolkit must not accept them.
        """
        for name in TOOLKIT:
            document = _toml(self._root / name)
            if document is None:
                continue
            if document.get(_MOUNTS, False) is not False:
                return self._say(
                    "toolkit-envvar",
                    "FAIL",
                    f"/{name} gives devices to any container that mounts them by name",
                    f"set {_MOUNTS} = false",
                )
            is_accepted = document.get(_ENVVAR, True) is not False
            if is_accepted:
                also = "" if self._injection != "env" else "injection = cdi (or devices) and "
                return self._say(
                    "toolkit-envvar",
                    "FAIL",
                    f"/{name} gives devices to any container that sets NVIDIA_VISIBLE_DEVICES",
                    f"set {also}{_ENVVAR} = false",
                )
            if self._injection == "env":
                return self._say(
                    "toolkit-envvar",
                    "FAIL",
                    f"/{name} refuses the variable by which devices are injected here",
                    "set injection = cdi (or devices)",
                )
            return self._say("toolkit-envvar", "PASS", f"/{name} fits injection {self._injection}")
        return self._say(
            "toolkit-envvar",
            "WARN",
            "no configuration of the NVIDIA container toolkit was found",
            "install nvidia-container-toolkit, or set the path of the host's root",
        )

    def toolkit_version(self) -> Finding:
        """Check the toolkit's version as the Debian package gives it."""
        version = self._toolkit_package() or OLDEST_TOOLKIT
        shown = f"nvidia-container-toolkit is {version[0]}.{version[1]}"
        if version < OLDEST_TOOLKIT:
            return self._say(
                "toolkit-version",
                "FAIL",
                f"{shown}, older than {OLDEST_TOOLKIT[0]}.{OLDEST_TOOLKIT[1]}",
                "upgrade the package nvidia-container-toolkit",
            )
        return self._say("toolkit-version", "PASS", shown)

    def _toolkit_package(self) -> tuple[int, int] | None:
        """Return the toolkit's version; ``None`` where no Debian package installed it."""
        try:
            text = (self._root / DPKG_STATUS).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        found = _TOOLKIT_PACKAGE.search(text)
        return None if found is None else (int(found[1]), int(found[2]))

    def cdi(self) -> Finding:
        """Check that devices can be injected by their CDI names."""
        if self._injection != "cdi":
            return self._say("cdi", "PASS", f"not needed: injection is {self._injection}")
        for name, is_on in self._cdi_settings():
            if not is_on:
                return self._say(
                    "cdi", "FAIL", f"/{name} turns CDI off", "set enable_cdi = true and restart it"
                )
        kinds = {kind for place in CDI_DIRECTORIES for kind in _cdi_kinds(self._root / place)}
        if not kinds & set(CDI_KINDS):
            return self._say(
                "cdi",
                "FAIL",
                "no CDI specification of nvidia.com/gpu in /etc/cdi or /var/run/cdi",
                "run nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
            )
        return self._say("cdi", "PASS", "there is a CDI specification of nvidia.com/gpu")

    def claims_cdi(self) -> Finding:
        """Check that no configuration of the container runtime turns CDI off, which claims need.

        Without the setting there is no finding: the default depends on the runtime's version, which
        kubelet reports.
        """
        for name, is_on in self._cdi_settings():
            if not is_on:
                return self._say(
                    CLAIMS_CDI,
                    "FAIL",
                    f"/{name} turns CDI off, by which containers get the devices of claims",
                    "set enable_cdi = true and restart the container runtime",
                )
        return self._say(CLAIMS_CDI, "PASS", "the container runtime has enable_cdi = true")

    def _cdi_settings(self) -> Iterator[tuple[str, bool]]:
        """(file, value) of each ``enable_cdi``."""
        for name, document in self._runtime_files():
            yield from ((name, value) for value in _cdi_values(document))

    def _runtime_files(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Configuration files of the container runtime that can be read, relative to the root."""
        names = [*CONTAINERD, *CRIO]
        for place in (*CONTAINERD_DROP_INS, *CRIO_DROP_INS):
            directory = self._root / place
            try:
                names += sorted(f"{place}/{path.name}" for path in directory.iterdir())
            except OSError:
                continue
        for name in names:
            document = _toml(self._root / name)
            if document is not None:
                yield name, document

    # --- host ------------------------------------------------------------------------------------

    def cgroups(self) -> Finding:
        """Check that a newer kubelet will start on the node."""
        place = self._root / CGROUPS
        if (place / "cgroup.controllers").is_file():
            return self._say("cgroups", "PASS", "the node uses cgroup v2")
        if not place.is_dir():
            return self._say(
                "cgroups",
                "WARN",
                f"/{CGROUPS} cannot be read",
                "see that the agent can read the host's root",
            )
        return self._say(
            "cgroups",
            "WARN",
            "the node uses cgroup v1, on which kubelet 1.35 and newer do not start by default",
            "move the node to cgroup v2, or set failCgroupV1: false in kubelet's configuration",
        )

    def glibc(self) -> Finding:
        """Check that the host's C library is recent enough."""
        for name in C_LIBRARIES:
            try:
                with (self._root / name).open("rb") as file:
                    found = _GLIBC.search(file.read(_MOST_BYTES))
            except OSError:
                continue
            if found is None:
                continue
            version = (int(found[1]), int(found[2]))
            text = f"the host's glibc is {version[0]}.{version[1]}"
            if version < OLDEST_GLIBC:
                return self._say(
                    "glibc",
                    "FAIL",
                    f"{text}, older than {OLDEST_GLIBC[0]}.{OLDEST_GLIBC[1]}",
                    "use a newer operating system on this node",
                )
            return self._say("glibc", "PASS", text)
        return self._say(
            "glibc",
            "WARN",
            "the host's C library was not found, or is none of GNU's",
            "see that the agent can read the host's root; on musl hosts look at the driver's notes",
        )


def _toml(path: Path) -> Mapping[str, Any] | None:
    try:
        with path.open("rb") as file:
            return documents.toml(file.read(_MOST_BYTES), field=str(path))
    except (OSError, SettingsInvalid):
        return None


def _handlers(document: object) -> set[str]:
    """Names under any table ``runtimes`` of a configuration."""
    if not isinstance(document, dict):
        return set()
    names: set[str] = set()
    for key, value in document.items():
        if key == "runtimes" and isinstance(value, dict):
            names |= set(value)
        names |= _handlers(value)
    return names


def _cdi_values(document: object) -> Iterator[bool]:
    """Values of ``enable_cdi`` in any table of a configuration."""
    if not isinstance(document, dict):
        return
    for key, value in document.items():
        if key == "enable_cdi" and isinstance(value, bool):
            yield value
        yield from _cdi_values(value)


def _cdi_kinds(directory: Path) -> Iterator[str]:
    """Kinds of the specifications in a directory."""
    return (kind for kind, _ in cdi_texts(directory))


def cdi_texts(directory: Path) -> Iterator[tuple[str, str]]:
    """(kind, text) of each CDI specification in a directory."""
    try:
        paths = sorted(directory.iterdir())
    except OSError:
        return
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        found = _KIND.search(text)
        if found is not None:
            yield found[1], text


def host_root(settings: Settings) -> Path:
    """The host's root file system as this agent sees it."""
    if settings.host_root:
        return Path(settings.host_root)
    return Path(settings.host_proc) / "1" / "root"
