# SPDX-License-Identifier: Apache-2.0
"""Biren: reader, parser and library binding."""
