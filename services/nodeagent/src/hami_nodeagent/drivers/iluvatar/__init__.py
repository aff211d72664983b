# SPDX-License-Identifier: Apache-2.0
"""Iluvatar: reader, parser and library binding."""
