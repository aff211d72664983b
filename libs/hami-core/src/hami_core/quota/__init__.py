# SPDX-License-Identifier: Apache-2.0
"""Quotas and queues: limits of namespaces, and the amounts in use."""
