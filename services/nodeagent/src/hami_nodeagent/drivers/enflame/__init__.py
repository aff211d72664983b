# SPDX-License-Identifier: Apache-2.0
"""Enflame: reader, parser, library binding and partitioner."""
