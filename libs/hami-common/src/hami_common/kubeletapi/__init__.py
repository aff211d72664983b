# SPDX-License-Identifier: Apache-2.0
"""Kubelet's gRPC interfaces, one short name per module.

- `deviceplugin`: device plugin v1beta1
- `podresources`: PodResources v1
- `pluginregistration`: registration of DRA drivers
- `dra`, `dra_v1beta1`: calls to a DRA driver, and the older version of them
- `drahealth`, `drahealth_v1alpha1`: health of a DRA driver's devices, and the older version of it

The `*_pb2*` files beside this one are generated (tools/gen_kubeletapi.py, from proto/). Importing
this package imports grpc, so only shells and the simulated kubelet may do it.
"""

from hami_common.kubeletapi import deviceplugin_pb2 as deviceplugin
from hami_common.kubeletapi import deviceplugin_pb2_grpc as deviceplugin_grpc
from hami_common.kubeletapi import dra_pb2 as dra
from hami_common.kubeletapi import dra_pb2_grpc as dra_grpc
from hami_common.kubeletapi import dra_v1beta1_pb2 as dra_v1beta1
from hami_common.kubeletapi import dra_v1beta1_pb2_grpc as dra_v1beta1_grpc
from hami_common.kubeletapi import drahealth_pb2 as drahealth
from hami_common.kubeletapi import drahealth_pb2_grpc as drahealth_grpc
from hami_common.kubeletapi import drahealth_v1alpha1_pb2 as drahealth_v1alpha1
from hami_common.kubeletapi import drahealth_v1alpha1_pb2_grpc as drahealth_v1alpha1_grpc
from hami_common.kubeletapi import pluginregistration_pb2 as pluginregistration
from hami_common.kubeletapi import pluginregistration_pb2_grpc as pluginregistration_grpc
from hami_common.kubeletapi import podresources_pb2 as podresources
from hami_common.kubeletapi import podresources_pb2_grpc as podresources_grpc

__all__ = [
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
