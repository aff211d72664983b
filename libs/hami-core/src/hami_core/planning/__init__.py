# SPDX-License-Identifier: Apache-2.0
"""Plans over many pods: gangs, preemption, resizing, defragmentation, simulation."""
