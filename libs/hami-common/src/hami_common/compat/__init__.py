# SPDX-License-Identifier: Apache-2.0
"""HAMi's annotation formats: read, written, and adopted as our allocations."""
