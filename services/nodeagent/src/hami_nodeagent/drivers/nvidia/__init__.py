# SPDX-License-Identifier: Apache-2.0
"""NVIDIA: driver, NVML calls, MIG and its partitioner. Empty, so that an import stays cheap."""
