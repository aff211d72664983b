# SPDX-License-Identifier: Apache-2.0
"""Vastai: reader and parser."""
