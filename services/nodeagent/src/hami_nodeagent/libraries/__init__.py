# SPDX-License-Identifier: Apache-2.0
"""Shared code of the programs that call vendors' C libraries, one process per command.

The programs are the modules ``drivers.<vendor>.binding``. They import only the standard library and
``loading``, so that a run starts in a few hundredths of a second.
"""
