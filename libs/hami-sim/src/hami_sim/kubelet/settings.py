# SPDX-License-Identifier: Apache-2.0
"""Settings of one simulated kubelet. Times in seconds; quantities as Kubernetes writes them.

Defaults are kubelet 1.34's, except where a shorter wait makes a simulation usable; each such field
states kubelet's default.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from hami_sim.kubelet.toolkit import DriverFiles

LIMITS_COMMAND = ("sh", "-c", "cat /etc/hami/limits 2>/dev/null; exec sleep 1000000")
"""Command of a container without one: it prints its limits and keeps running."""


class KubeletSettings(Struct, frozen=True, kw_only=True):
    """Resources of the node, and intervals of kubelet's loops."""

    cpu: str = "64"
    memory: str = "512Gi"
    pods: int = 110
    labels: Mapping[str, str] = {}
    taints: tuple[Mapping[str, str], ...] = ()
    host: str = "127.0.0.1"
    """Address of kubelet's HTTP server; the port is chosen by the kernel."""
    node_status_s: float = 10.0
    """Period of node status reports; a changed capacity is reported at once (kubelet: waits)."""
    lease_s: float = 10.0
    """Period of lease renewals; the lease itself lasts four times as long."""
    sync_s: float = 1.0
    """Interval at which volumes follow changed annotations (kubelet: 60 to 90)."""
    retry_s: float = 1.0
    """Wait after a container could not be created (kubelet: 10) or claims not be prepared (kubelet:
    60 to 90)."""
    backoff_s: float = 10.0
    """First wait before an ended container runs again; doubles each time."""
    backoff_max_s: float = 300.0
    plugin_grace_s: float = 300.0
    """Time for which the devices of a disconnected plugin count in the capacity."""
    prestart_timeout_s: float = 30.0
    slices_wipe_s: float = 30.0
    """Wait before the ResourceSlices of a DRA driver without connection are deleted."""
    claims_sync_s: float = 60.0
    """Interval at which claims of vanished pods are unprepared and devices' health is refreshed."""
    pod_resources_per_s: float = 100.0
    """Requests per second that PodResources answers, others get RESOURCE_EXHAUSTED; 0: all."""
    pod_resources_burst: int = 10
    seed: int = 0
    """Start of the random order in which free device ids are taken."""
    namespaces: bool | None = None
    """Containers in namespaces of their own: True, False, or what the machine permits."""
    owner_pid: int = 0
    """Process with which all containers end; 0: they outlive every process, as real ones do."""
    host_paths: tuple[str, ...] = ()
    """Directories of the host that containers see read-only, besides the system's programs."""
    pretended_paths: tuple[str, ...] = ()
    """Paths below which vendors keep their drivers: what plugins mount from there is there, empty
    where this machine lacks it."""
    driver: DriverFiles | None = None
    """Driver of the machine, given to containers that ask for devices; None: there is none."""
    cdi_directories: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")
    """Directories that are searched for CDI specs, later ones first."""
    mounts_tmpfs: bool = False
    """Mount emptyDirs of medium Memory on the host, as on a real node.

    Off, they are directories, and a full one shows as eviction instead of ENOSPC. On, a killed
    simulation leaves mounts until the next start or clean-up."""
    eviction_s: float = 10.0
    """Interval at which emptyDirs are compared with their sizeLimit."""
    commands: Mapping[str, tuple[str, ...]] = {}
    """Image name (without tag) to command, for containers that name none."""
    events: bool = True
    """Write Kubernetes events."""
