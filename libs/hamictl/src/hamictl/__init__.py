# SPDX-License-Identifier: Apache-2.0
"""The operator's command line; asks the registry, and replays scheduler decisions offline."""
