# SPDX-License-Identifier: Apache-2.0
"""Admission of one pod as pure functions: its checks, its defaults, and the patch.

Decides what is denied, with the field and the fix. No clock, no log, no await: ``shell`` speaks
HTTP and publishes events.
"""
