# SPDX-License-Identifier: Apache-2.0
"""Dynamic Resource Allocation: devices as ResourceSlices, shares as ResourceClaims.

Decides how devices, requests and allocations are written in these objects, and which claims are
ours. Knows no API server and no kubelet: services read and write the objects.
"""
