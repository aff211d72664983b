# SPDX-License-Identifier: Apache-2.0
"""Registry: device reports in, canonical inventory out, and the query API over it."""
