# SPDX-License-Identifier: Apache-2.0
"""Admission rules that the API server enforces: webhook configuration and policies, as objects.

Decides which pods reach the webhook, and which fields tenants may not write. The webhook enforces
the same bounds and mount rules; ``hamictl import-config`` writes the objects. No I/O.
"""
