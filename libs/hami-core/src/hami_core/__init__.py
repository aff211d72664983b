# SPDX-License-Identifier: Apache-2.0
"""Scheduling decisions as pure functions and state machines: no clock, no log, no await.

The packages form layers; each imports only those before it: ``table``, ``placement``, ``quota``,
``ledger``, ``planning``, ``replay``. The scheduler runs them on live data, hamictl on snapshots
and recorded logs.
"""
