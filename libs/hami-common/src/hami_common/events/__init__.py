# SPDX-License-Identifier: Apache-2.0
"""Every message on the bus: one frozen Struct per subject and version.

Published versions never change meaning.
"""
