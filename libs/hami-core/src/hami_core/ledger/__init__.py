# SPDX-License-Identifier: Apache-2.0
"""Reservations and allocations: their states, and the stimuli that change them.

Decides which record is appended under which condition, which state may follow, and how ledger and
pods are reconciled. Knows no bus: the scheduler's shell writes what it plans.
"""
