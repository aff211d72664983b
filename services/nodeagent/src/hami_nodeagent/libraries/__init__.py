# SPDX-License-Identifier: Apache-2.0
"""Small programs that speak to vendors' C libraries, one process for each command.

They import the standard library and ``loading`` only, and lie beside ``drivers`` instead of in it,
so that a run starts in a few hundredths of a second: importing ``drivers`` builds every driver.
"""
