# SPDX-License-Identifier: Apache-2.0
"""Placement of pods: nodes and devices that fit, their scores, and the reasons of refusals."""
