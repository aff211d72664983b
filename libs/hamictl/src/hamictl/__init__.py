# SPDX-License-Identifier: Apache-2.0
"""The operator's command line: asks the services, and replays scheduler decisions offline.

Decides what is shown and which checks run; decisions about placement are those of ``hami_core``.
Knows the services by their HTTP APIs only.
"""
