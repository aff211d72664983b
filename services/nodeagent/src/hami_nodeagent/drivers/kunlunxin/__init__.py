# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin: reader, parser, library binding and partitioner."""
