# SPDX-License-Identifier: Apache-2.0
"""Node agent: devices of one node, the kubelet's device plugin protocol, and injection.

Decides which container a call of kubelet is for, and the health and partitions of the node's
devices. Never chooses devices: it gives what the ledger says.
"""
