# SPDX-License-Identifier: Apache-2.0
"""Reports the devices' health to kubelet (kubelet's DRAResourceHealth v1, v1alpha1).

Kubelet shows it in ``allocatedResourcesStatus`` of the containers that have the devices by claims.
Each message is the complete list. Kubelet takes a device as Unknown after 30 s without a message,
so the list is repeated. Placement follows the taints in the slices, not this.
"""

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from hami_common.dra import names
from hami_common.kubeletapi import (
    drahealth,
    drahealth_grpc,
    drahealth_v1alpha1,
    drahealth_v1alpha1_grpc,
)
from hami_nodeagent.core.slices import DeviceHealth, health_of
from hami_nodeagent.shell.site import Site

VERSIONS: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
REPEAT_S: Final = 10.0
"""Interval between two equal lists in seconds."""

_Context = grpc.aio.ServicerContext[Any, Any]


class Health(drahealth_grpc.DRAResourceHealthServicer):
    """The service in version v1."""

    def __init__(self, site: Site) -> None:
        self._picture = site.picture
        self._clock = site.clock

    async def NodeWatchResources(  # noqa: N802 - the protocol's name
        self, request: drahealth.NodeWatchResourcesRequest, context: _Context
    ) -> AsyncIterator[drahealth.NodeWatchResourcesResponse]:
        """Send the list whenever it changes, and repeat it; nothing before devices are known."""
        del request, context
        picture = self._picture
        sent: tuple[DeviceHealth, ...] = ()
        repeat_s = 0.0
        while True:
            changed, view = picture.changed, picture.view
            found = health_of(view.devices_by_uuid.values(), faulty=view.faulty, sound=view.sound)
            now_s = self._clock.monotonic_s()
            if found and (found != sent or now_s >= repeat_s):
                sent, repeat_s = found, now_s + REPEAT_S
                yield self._response(found)
            await picture.wait_change(changed, max(0.0, repeat_s - now_s) if sent else REPEAT_S)

    def _response(self, devices: tuple[DeviceHealth, ...]) -> drahealth.NodeWatchResourcesResponse:
        pool, now_s = names.pool_name(self._picture.node), int(self._clock.now_s())
        return drahealth.NodeWatchResourcesResponse(
            devices=[
                drahealth.DeviceHealth(
                    device=drahealth.DeviceIdentifier(pool_name=pool, device_name=one.name),
                    health=drahealth.HEALTHY if one.is_healthy else drahealth.UNHEALTHY,
                    last_updated_time=now_s,
                    message=one.message,
                )
                for one in devices
            ]
        )


class HealthV1alpha1(drahealth_v1alpha1_grpc.DRAResourceHealthServicer):
    """The same in version v1alpha1, whose messages have the same form on the wire."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def NodeWatchResources(  # noqa: N802 - the protocol's name
        self, request: drahealth_v1alpha1.NodeWatchResourcesRequest, context: _Context
    ) -> AsyncIterator[drahealth_v1alpha1.NodeWatchResourcesResponse]:
        """Send the lists of version v1."""
        del request
        async for found in self._health.NodeWatchResources(
            drahealth.NodeWatchResourcesRequest(), context
        ):
            yield drahealth_v1alpha1.NodeWatchResourcesResponse.FromString(
                found.SerializeToString()
            )
