# SPDX-License-Identifier: Apache-2.0
"""Huawei Ascend: reader, parser, library binding and partitioner."""
