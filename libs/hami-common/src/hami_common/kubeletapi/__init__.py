# SPDX-License-Identifier: Apache-2.0
"""Kubelet's gRPC interfaces: device plugin v1beta1 and PodResources v1, one short name per module.

The `*_pb2*` files beside this one are generated (tools/gen_kubeletapi.py, from proto/). Importing
this package imports grpc, so only shells and the simulated kubelet may do it.
"""

from hami_common.kubeletapi import deviceplugin_pb2 as deviceplugin
from hami_common.kubeletapi import deviceplugin_pb2_grpc as deviceplugin_grpc
from hami_common.kubeletapi import podresources_pb2 as podresources
from hami_common.kubeletapi import podresources_pb2_grpc as podresources_grpc

__all__ = ["deviceplugin", "deviceplugin_grpc", "podresources", "podresources_grpc"]
