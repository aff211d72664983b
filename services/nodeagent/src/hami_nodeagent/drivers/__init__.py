# SPDX-License-Identifier: Apache-2.0
"""Node halves of the vendors: one package per vendor, and their common modules.

``catalog`` lists them. This file and those of the vendors' packages import nothing, so that a
vendor's ``binding`` starts as a program in a few hundredths of a second.
"""
