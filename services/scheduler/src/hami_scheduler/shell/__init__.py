# SPDX-License-Identifier: Apache-2.0
"""Input and output of this service; every decision about placement is left to ``hami_core``.

Decides only the order and the retries of calls to bus and API server.
"""
