# SPDX-License-Identifier: Apache-2.0
"""Code shared by all HAMi services; import its modules, the package itself is empty."""
