# SPDX-License-Identifier: Apache-2.0
"""AMD: reader, parser, library binding and partitioner."""
