# SPDX-License-Identifier: Apache-2.0
"""Code that all services share: wire types, admission rules, vendors, and adapters in ``runtime``.

Import its modules; the package itself is empty. It decides nothing for one service and knows none.
"""
