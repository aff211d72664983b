# SPDX-License-Identifier: Apache-2.0
"""Quarantine messages: a service cannot handle an object, retries it and goes on with the others.

Each replica publishes its own on ``hami.v1.event.quarantine.<service>.<replica>``: at the first
failure, while the object stays in quarantine at least every ``REPEAT_MOST_S``, and once when it is
over. A replica that ended sends nothing, so consumers drop entries that were not repeated for
``STALE_S``. Times in Unix seconds.
"""

from typing import Final, Literal

from msgspec import Struct

from hami_common.bounds import Counter, Label, Name, Text, UnixS, Word

QuarantineService = Literal["scheduler", "registry", "nodeagent", "webhook"]

REPEAT_LEAST_S: Final = 60.0
"""Shortest time between two messages about one object that stays in quarantine."""
REPEAT_MOST_S: Final = 300.0
"""Longest time between two messages about one object that stays in quarantine."""
STALE_S: Final = 900.0
"""Age after which a message no longer counts: its replica ended, or later messages were lost."""


class QuarantineRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One object in quarantine at one replica; equal service, replica, kind and key: the same."""

    service: QuarantineService
    replica: Name
    """Name of the replica; of an agent, its node."""
    kind: Word
    """Kind of the object, one word of a closed set of the service, such as `pod` or `record`."""
    key: Text
    """Identifies the object among its kind: a uid, a bucket key, a subject."""
    namespace: Label = ""
    """Namespace of the Kubernetes object concerned; empty where it has none or is not known."""
    name: Name = ""
    """Name of the Kubernetes object concerned; empty where there is none or it is not known."""
    problem: Text
    """Type and text of the last error."""
    failures: Counter
    """Attempts that failed, at least 1."""
    first_s: UnixS
    """Time of the first failed attempt."""
    last_s: UnixS
    """Time of the last failed attempt."""
    is_over: bool = False
    """The object was handled, or it is gone: it left quarantine."""
