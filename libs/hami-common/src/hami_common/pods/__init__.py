# SPDX-License-Identifier: Apache-2.0
"""Pod documents: the fields we read, annotations, mounts, variables, the limits file."""
