# SPDX-License-Identifier: Apache-2.0
"""Every message on the bus: one frozen Struct per subject and version.

Decides the wire format; published versions never change meaning. Knows no connection and none of
the services that send or receive a message.
"""
