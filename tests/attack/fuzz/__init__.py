# SPDX-License-Identifier: Apache-2.0
"""Fuzzers: random hostile input for everything that takes bytes from outside.

``./dev fuzz`` runs them at full size; the tier ``attack`` runs a few cases of each.
"""
