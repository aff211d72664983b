# SPDX-License-Identifier: Apache-2.0
"""Renders a claim as the response that kubelet passes to the container runtime (design D8, D10).

The vendor returns the edits that inject a container's shares; this module converts them to
protobuf, in the vendor's units and order. A container whose pod did not pass our webhook gets its
limits file from the host.
"""

from collections.abc import Sequence
from pathlib import Path

from hami_common.kubeletapi import deviceplugin as api
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods import limits
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import BindMount, ContainerEdits, RenderContext
from hami_nodeagent.core.claims import Claim
from hami_nodeagent.core.holders import needs_library, uses_managed_memory
from hami_nodeagent.settings import Settings


class Renderer:
    """Renders claims with this node's settings."""

    def __init__(self, catalog: Catalog, settings: Settings) -> None:
        self._catalog = catalog
        self._settings = settings

    def render(
        self,
        claim: Claim,
        *,
        vendor: str,
        limits_directory: Path | None,
        library_mounts: Sequence[BindMount] = (),
    ) -> api.ContainerAllocateResponse:
        """Return the response for one container and vendor."""
        context = self.context(claim, library_mounts)
        edits = self.edits(vendor, claim.shares, claim.devices, context)
        return self.response(edits, limits_directory=limits_directory)

    def edits(
        self,
        vendor: str,
        shares: ContainerShares,
        devices: Sequence[Device],
        context: RenderContext,
    ) -> ContainerEdits:
        """Return the environment, devices and mounts that show the container its shares."""
        return self._catalog.vendor(vendor).render(shares, devices, context)

    def response(
        self, edits: ContainerEdits, *, limits_directory: Path | None
    ) -> api.ContainerAllocateResponse:
        """Return the edits as protobuf, with a mount of ``limits_directory`` if there is one."""
        mounts = [*edits.mounts]
        if limits_directory is not None:
            mounts.append(
                BindMount(host_path=str(limits_directory), container_path=limits.DIRECTORY)
            )
        return api.ContainerAllocateResponse(
            envs=edits.env,
            annotations=edits.annotations,
            mounts=[
                api.Mount(
                    host_path=mount.host_path,
                    container_path=mount.container_path,
                    read_only=mount.read_only,
                )
                for mount in mounts
            ],
            devices=[
                api.DeviceSpec(
                    host_path=node.host_path,
                    container_path=node.container_path,
                    permissions=node.permissions,
                )
                for node in edits.devices
                if not node.optional or Path(node.host_path).exists()
            ],
            cdi_devices=[api.CDIDevice(name=name) for name in edits.cdi_devices],
        )

    def context(self, claim: Claim, library_mounts: Sequence[BindMount]) -> RenderContext:
        """Return the input for rendering: this node's settings and the volumes of the pod."""
        has_region = claim.container in claim.pod.region_volumes
        return self.context_of(claim.own, claim.devices, library_mounts, has_region=has_region)

    def context_of(
        self,
        own: Sequence[Share],
        devices: Sequence[Device],
        library_mounts: Sequence[BindMount],
        *,
        has_region: bool,
    ) -> RenderContext:
        """Return the input for rendering shares of one vendor and their devices."""
        settings = self._settings
        return RenderContext(
            mode=settings.injection,
            is_limited=needs_library(own, devices),
            region_file=limits.REGION_FILE if has_region else "",
            memory_oversubscribed=uses_managed_memory(devices),
            library_log_level=settings.library_log_level,
            core_policy=settings.core_policy,
            mps_dir=settings.drivers.nvidia.mps_dir,
            library_mounts=tuple(library_mounts),
        )
