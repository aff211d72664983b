# SPDX-License-Identifier: Apache-2.0
"""The devices of the cluster as columns, and the capacity that is booked on them.

Decides which devices exist and are usable, and how much of each is free. Knows no pod, only the
shares that are booked.
"""
