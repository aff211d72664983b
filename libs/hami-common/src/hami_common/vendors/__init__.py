# SPDX-License-Identifier: Apache-2.0
"""The pure half of each vendor: resource names, request parsing, selection, rendering of shares.

Decides what a container requests from a vendor and what it needs to use its share. Knows neither
the devices of a node nor which ones are free. No I/O, no clock, no logging.
"""
