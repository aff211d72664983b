# SPDX-License-Identifier: Apache-2.0
"""What vendors' tools print, turned into facts: one pure module per vendor, shared forms beside."""
