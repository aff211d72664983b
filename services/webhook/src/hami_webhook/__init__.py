# SPDX-License-Identifier: Apache-2.0
"""Admission webhook: validates and completes pods that request accelerators."""
