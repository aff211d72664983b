# SPDX-License-Identifier: Apache-2.0
"""Registry: device reports in, canonical inventory out, and the query API over it.

Decides which devices the cluster has and what each offers, by the device configuration. Places no
pod and changes no allocation.
"""
