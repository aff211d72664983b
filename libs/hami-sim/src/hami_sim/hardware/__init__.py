# SPDX-License-Identifier: Apache-2.0
"""Simulated hardware: profiles of machines, and the files that steer fake drivers.

Decides what a fake driver library reports and executes. Knows neither the agent nor its drivers,
which load the library as they load the vendor's.
"""
