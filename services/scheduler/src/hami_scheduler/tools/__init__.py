# SPDX-License-Identifier: Apache-2.0
"""Tools for people: they decide with the scheduler's core on recorded state, and change nothing."""
