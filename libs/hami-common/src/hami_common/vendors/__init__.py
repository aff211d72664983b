# SPDX-License-Identifier: Apache-2.0
"""The pure half of each vendor: resource names, request parsing, selection, rendering of shares.

No I/O, no clock, no logging.
"""
