# SPDX-License-Identifier: Apache-2.0
"""Snapshots and recorded stimuli, and their replay.

Decides what a question about another cluster, policy or time means, and whether a repeated decision
equals the recorded one. Changes no live state.
"""
