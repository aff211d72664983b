# SPDX-License-Identifier: Apache-2.0
"""The only input and output in this library; imported by app and shell modules alone."""
