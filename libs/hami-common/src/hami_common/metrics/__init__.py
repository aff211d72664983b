# SPDX-License-Identifier: Apache-2.0
"""Metric families: names and exposition.

Decides how a table of rows is written for Prometheus, under HAMi's names as well. The rows and
their values are the services'.
"""
