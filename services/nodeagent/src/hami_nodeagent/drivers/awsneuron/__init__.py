# SPDX-License-Identifier: Apache-2.0
"""AWS Neuron: reader and parser."""
