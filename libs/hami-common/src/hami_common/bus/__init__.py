# SPDX-License-Identifier: Apache-2.0
"""Names on the bus, and the permissions and keys of its logins."""
