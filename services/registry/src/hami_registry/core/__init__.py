# SPDX-License-Identifier: Apache-2.0
"""Canonical devices, and the answers of the query API, as pure functions and state machines.

Decides what a report changes, and how stored records become rows of use, cost and time. No clock,
no log, no await: ``shell`` reads the bus and answers HTTP.
"""
