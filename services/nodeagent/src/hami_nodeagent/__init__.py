# SPDX-License-Identifier: Apache-2.0
"""Node agent: devices of one node, the kubelet's device plugin protocol, and injection."""
