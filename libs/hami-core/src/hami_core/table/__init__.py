# SPDX-License-Identifier: Apache-2.0
"""The devices of the cluster as columns, and the capacity that is booked on them."""
