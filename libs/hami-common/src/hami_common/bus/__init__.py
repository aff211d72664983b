# SPDX-License-Identifier: Apache-2.0
"""Names on the bus, and the permissions and keys of its logins.

Decides which service may publish and read which subject. Knows neither the messages
(``events``) nor a connection (``runtime.natsio``).
"""
