# SPDX-License-Identifier: Apache-2.0
"""Decisions of this service as pure functions and state machines; no clock, no log, no await."""
