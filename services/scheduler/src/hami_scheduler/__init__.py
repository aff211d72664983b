# SPDX-License-Identifier: Apache-2.0
"""Scheduler extender: chooses nodes and devices, and keeps the ledger of shares.

Its decisions are those of ``hami_core``; this service feeds them with events and executes their
effects. Knows no device driver and no other service.
"""
