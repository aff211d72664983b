# SPDX-License-Identifier: Apache-2.0
"""Adapters: bus, API server, HTTP, files, clock, logs and metrics; the only I/O in this library.

Decides when a failed call is repeated and when a peer is unavailable, never what is allocated.
Imported by app and shell modules alone.
"""
