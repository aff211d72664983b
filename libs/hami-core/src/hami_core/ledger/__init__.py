# SPDX-License-Identifier: Apache-2.0
"""Reservations and allocations: their states, and the stimuli that change them."""
