# SPDX-License-Identifier: Apache-2.0
"""Admission webhook: validates and completes pods that request accelerators.

Decides whether a pod is admitted and how it is patched, from the pod and the settings alone. Keeps
no state, and knows no device and no node.
"""
