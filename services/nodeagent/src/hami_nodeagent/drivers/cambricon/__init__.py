# SPDX-License-Identifier: Apache-2.0
"""Cambricon: reader, parser, library binding and partitioner."""
