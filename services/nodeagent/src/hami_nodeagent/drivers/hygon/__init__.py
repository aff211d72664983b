# SPDX-License-Identifier: Apache-2.0
"""Hygon: reader, parser, library binding and partitioner."""
