# SPDX-License-Identifier: Apache-2.0
"""Plans over many pods: gangs, preemption, resizing, defragmentation, simulation.

Decides which pods are placed together, moved or evicted, by trying it on the ledger and undoing it.
Executes nothing: the scheduler's shell evicts, reserves and patches.
"""
