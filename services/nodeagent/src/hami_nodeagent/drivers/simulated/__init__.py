# SPDX-License-Identifier: Apache-2.0
"""Simulated devices of any vendor, from a profile: for tests and demonstrations."""
