# SPDX-License-Identifier: Apache-2.0
"""Dynamic Resource Allocation: devices as ResourceSlices, shares as ResourceClaims."""
