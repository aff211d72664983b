# SPDX-License-Identifier: Apache-2.0
"""Kubelet's protocols on the wire: names and numbers that a real kubelet expects."""

import pytest
from google.protobuf.message import Message

from hami_common import kubeletapi
from hami_common.kubeletapi import (
    deviceplugin,
    dra,
    dra_v1beta1,
    drahealth,
    drahealth_v1alpha1,
    pluginregistration,
    podresources,
)


def test_short_names_are_all_that_is_exported() -> None:
    assert sorted(kubeletapi.__all__) == [
        "deviceplugin",
        "deviceplugin_grpc",
        "dra",
        "dra_grpc",
        "dra_v1beta1",
        "dra_v1beta1_grpc",
        "drahealth",
        "drahealth_grpc",
        "drahealth_v1alpha1",
        "drahealth_v1alpha1_grpc",
        "pluginregistration",
        "pluginregistration_grpc",
        "podresources",
        "podresources_grpc",
    ]
    assert all(hasattr(kubeletapi, name) for name in kubeletapi.__all__)


@pytest.mark.parametrize(
    ("module", "service", "methods"),
    [
        (deviceplugin, "v1beta1.Registration", ["Register"]),
        (
            deviceplugin,
            "v1beta1.DevicePlugin",
            [
                "GetDevicePluginOptions",
                "ListAndWatch",
                "GetPreferredAllocation",
                "Allocate",
                "PreStartContainer",
            ],
        ),
        (podresources, "v1.PodResourcesLister", ["List", "GetAllocatableResources", "Get"]),
        (
            pluginregistration,
            "pluginregistration.Registration",
            ["GetInfo", "NotifyRegistrationStatus"],
        ),
        (
            dra,
            "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
            ["NodePrepareResources", "NodeUnprepareResources"],
        ),
        (
            dra_v1beta1,
            "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
            ["NodePrepareResources", "NodeUnprepareResources"],
        ),
        (drahealth, "v1.DRAResourceHealth", ["NodeWatchResources"]),
        (drahealth_v1alpha1, "v1alpha1.DRAResourceHealth", ["NodeWatchResources"]),
    ],
)
def test_services_have_kubelets_names(module: object, service: str, methods: list[str]) -> None:
    services = module.DESCRIPTOR.services_by_name  # type: ignore[attr-defined]  # a pb2 module
    found = services[service.rpartition(".")[2]]
    assert found.full_name == service
    assert [method.name for method in found.methods] == methods


def test_lists_of_devices_and_of_their_health_are_streams() -> None:
    files = (deviceplugin, dra, dra_v1beta1, drahealth, drahealth_v1alpha1, podresources)
    methods = [
        method
        for module in files
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert [method.full_name for method in methods if method.server_streaming] == [
        "v1beta1.DevicePlugin.ListAndWatch",
        "v1.DRAResourceHealth.NodeWatchResources",
        "v1alpha1.DRAResourceHealth.NodeWatchResources",
    ]


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (
            deviceplugin.RegisterRequest(
                version="v1beta1",
                endpoint="a",
                resource_name="b",
                options=deviceplugin.DevicePluginOptions(
                    pre_start_required=True, get_preferred_allocation_available=True
                ),
            ),
            b"\x0a\x07v1beta1\x12\x01a\x1a\x01b\x22\x04\x08\x01\x10\x01",
        ),
        (
            deviceplugin.Device(
                ID="u-0",
                health="Healthy",
                topology=deviceplugin.TopologyInfo(nodes=[deviceplugin.NUMANode(ID=1)]),
            ),
            b"\x0a\x03u-0\x12\x07Healthy\x1a\x04\x0a\x02\x08\x01",
        ),
        (
            deviceplugin.ContainerAllocateResponse(
                envs={"E": "1"},
                mounts=[deviceplugin.Mount(container_path="c", host_path="h", read_only=True)],
                devices=[
                    deviceplugin.DeviceSpec(container_path="c", host_path="h", permissions="rw")
                ],
                annotations={"A": "2"},
                cdi_devices=[deviceplugin.CDIDevice(name="v/c=d")],
            ),
            (
                b"\x0a\x06\x0a\x01E\x12\x011"
                b"\x12\x08\x0a\x01c\x12\x01h\x18\x01"
                b"\x1a\x0a\x0a\x01c\x12\x01h\x1a\x02rw"
                b"\x22\x06\x0a\x01A\x12\x012"
                b"\x2a\x07\x0a\x05v/c=d"
            ),
        ),
        (
            deviceplugin.ContainerPreferredAllocationRequest(
                available_deviceIDs=["a"], must_include_deviceIDs=["b"], allocation_size=2
            ),
            b"\x0a\x01a\x12\x01b\x18\x02",
        ),
        (
            podresources.PodResources(
                name="p",
                namespace="n",
                containers=[
                    podresources.ContainerResources(
                        name="c",
                        devices=[
                            podresources.ContainerDevices(resource_name="r", device_ids=["d"])
                        ],
                        cpu_ids=[3],
                    )
                ],
            ),
            b"\x0a\x01p\x12\x01n\x1a\x0e\x0a\x01c\x12\x06\x0a\x01r\x12\x01d\x1a\x01\x03",
        ),
        (
            podresources.DynamicResource(
                claim_name="c",
                claim_namespace="n",
                claim_resources=[
                    podresources.ClaimResource(
                        cdi_devices=[podresources.CDIDevice(name="x")],
                        driver_name="d",
                        pool_name="p",
                        device_name="e",
                    )
                ],
            ),
            b"\x12\x01c\x1a\x01n\x22\x0e\x0a\x03\x0a\x01x\x12\x01d\x1a\x01p\x22\x01e",
        ),
        (
            pluginregistration.PluginInfo(
                type="DRAPlugin", name="d", endpoint="e", supported_versions=["v1.DRAPlugin"]
            ),
            b"\x0a\x09DRAPlugin\x12\x01d\x1a\x01e\x22\x0cv1.DRAPlugin",
        ),
        (
            pluginregistration.RegistrationStatus(plugin_registered=True, error="x"),
            b"\x08\x01\x12\x01x",
        ),
        *(
            (
                module.NodePrepareResourcesRequest(
                    claims=[module.Claim(namespace="n", uid="u", name="c")]
                ),
                b"\x0a\x09\x0a\x01n\x12\x01u\x1a\x01c",
            )
            for module in (dra, dra_v1beta1)
        ),
        *(
            (
                module.NodePrepareResourceResponse(
                    devices=[
                        module.Device(
                            request_names=["r"],
                            pool_name="p",
                            device_name="d",
                            cdi_device_ids=["i"],
                        )
                    ],
                    error="e",
                ),
                b"\x0a\x0c\x0a\x01r\x12\x01p\x1a\x01d\x22\x01i\x12\x01e",
            )
            for module in (dra, dra_v1beta1)
        ),
        (
            dra.NodePrepareResourcesResponse(
                claims={"u": dra.NodePrepareResourceResponse(devices=[dra.Device(share_id="s")])}
            ),
            b"\x0a\x0a\x0a\x01u\x12\x05\x0a\x03\x2a\x01s",
        ),
        *(
            (
                module.NodeUnprepareResourcesResponse(
                    claims={"u": module.NodeUnprepareResourceResponse(error="e")}
                ),
                b"\x0a\x08\x0a\x01u\x12\x03\x0a\x01e",
            )
            for module in (dra, dra_v1beta1)
        ),
        *(
            (
                module.NodeWatchResourcesResponse(
                    devices=[
                        module.DeviceHealth(
                            device=module.DeviceIdentifier(pool_name="p", device_name="d"),
                            health=module.UNHEALTHY,
                            last_updated_time=1,
                            health_check_timeout_seconds=2,
                            message="m",
                        )
                    ]
                ),
                b"\x0a\x11\x0a\x06\x0a\x01p\x12\x01d\x10\x02\x18\x01\x20\x02\x2a\x01m",
            )
            for module in (drahealth, drahealth_v1alpha1)
        ),
    ],
)
def test_fields_have_kubelets_numbers(message: Message, wire: bytes) -> None:
    assert message.SerializeToString(deterministic=True) == wire
