# SPDX-License-Identifier: Apache-2.0
"""Snapshots and recorded stimuli, and their replay."""
