# SPDX-License-Identifier: Apache-2.0
"""Pod documents: the fields we read, annotations, mounts, variables, the limits file.

Decides how a share is written in a pod and read back, and whether its signature is valid. Knows no
API server, and not where a pod is placed.
"""
