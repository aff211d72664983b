# SPDX-License-Identifier: Apache-2.0
"""Scheduler extender: chooses nodes and devices, and keeps the ledger of Shares."""
