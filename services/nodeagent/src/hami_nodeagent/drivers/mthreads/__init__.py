# SPDX-License-Identifier: Apache-2.0
"""Moore Threads: reader, parser and library binding."""
