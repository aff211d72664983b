# SPDX-License-Identifier: Apache-2.0
"""Catalog of SKUs, and pods that ask for devices of any vendor (ADR 45)."""
