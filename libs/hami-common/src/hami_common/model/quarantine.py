# SPDX-License-Identifier: Apache-2.0
"""An object in quarantine, as the registry's HTTP API lists it."""

from msgspec import Struct


class QuarantinedObject(Struct, frozen=True, kw_only=True):
    """One object that a replica cannot handle and retries."""

    service: str
    replica: str
    """Name of the replica; of an agent, its node."""
    kind: str
    """Kind of the object, such as `pod` or `record`."""
    key: str
    """Identifies the object among its kind: a uid, a bucket key, a subject."""
    namespace: str
    """Namespace of the Kubernetes object concerned; empty where it has none or is not known."""
    name: str
    """Name of the Kubernetes object concerned; empty where there is none or it is not known."""
    problem: str
    """Type and text of the last error."""
    failures: int
    """Attempts that failed."""
    first_s: float
    """Unix time of the first failure."""
    last_s: float
    """Unix time of the last failure that was reported."""
