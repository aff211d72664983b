# SPDX-License-Identifier: Apache-2.0
"""Input and output of this service; every decision is left to core."""
