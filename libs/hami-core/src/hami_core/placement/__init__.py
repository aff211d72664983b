# SPDX-License-Identifier: Apache-2.0
"""Which nodes and devices fit a pod, how well they fit, and why others do not."""
