# SPDX-License-Identifier: Apache-2.0
"""Nouns of the system: frozen Structs with no behavior beyond arithmetic.

No I/O, no clock, no randomness, no logging.
"""
