# SPDX-License-Identifier: Apache-2.0
"""Simulated hardware, kubelet and API server for the demo, the tests and what-if runs.

Decides how the surroundings of the services behave, faults included. Knows no service: it speaks
their protocols.
"""
