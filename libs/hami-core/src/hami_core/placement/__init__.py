# SPDX-License-Identifier: Apache-2.0
"""Placement of pods: nodes and devices that fit, their scores, and the reasons of refusals.

Decides for one pod on the table as it is. Knows neither other waiting pods nor quotas, and books
nothing.
"""
