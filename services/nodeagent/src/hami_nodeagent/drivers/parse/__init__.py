# SPDX-License-Identifier: Apache-2.0
"""Parsers of vendors' tools: one pure module per vendor, and the formats that they share."""
