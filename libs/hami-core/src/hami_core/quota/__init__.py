# SPDX-License-Identifier: Apache-2.0
"""Quotas and queues: limits of namespaces, and the amounts in use.

Decides whether a request stays within every limit that applies, and which pod of a queue is next.
Knows no device and no node.
"""
