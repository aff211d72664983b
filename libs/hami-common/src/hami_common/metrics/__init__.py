# SPDX-License-Identifier: Apache-2.0
"""Metric families: names and exposition."""
