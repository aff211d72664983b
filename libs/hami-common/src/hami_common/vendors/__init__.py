# SPDX-License-Identifier: Apache-2.0
"""The pure half of each accelerator vendor: what a pod may ask for and what a Share becomes."""
