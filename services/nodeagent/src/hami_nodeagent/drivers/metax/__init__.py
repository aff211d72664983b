# SPDX-License-Identifier: Apache-2.0
"""MetaX: reader, parser, library binding and partitioner."""
