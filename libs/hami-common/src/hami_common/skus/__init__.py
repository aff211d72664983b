# SPDX-License-Identifier: Apache-2.0
"""Catalog of SKUs, and pods that ask for devices of any vendor (ADR 45).

Decides whether a catalog is valid, and which request of which vendor a SKU means. Reads no file
(``runtime.skufile``) and knows no device.
"""
