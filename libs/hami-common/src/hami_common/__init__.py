# SPDX-License-Identifier: Apache-2.0
"""What all HAMi services share; import its modules, nothing lives here."""
