# SPDX-License-Identifier: Apache-2.0
"""What namespaces and queues may hold, and what they hold."""
