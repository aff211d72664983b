# SPDX-License-Identifier: Apache-2.0
"""Simulated hardware: profiles of machines, and the files that steer fake drivers."""
