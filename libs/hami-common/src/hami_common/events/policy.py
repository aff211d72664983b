# SPDX-License-Identifier: Apache-2.0
"""Rollback of a canary policy, as the schedulers share it.

Stored in the bucket ``hami_policies`` under ``<policy>.<digest>``, once for each definition of a
canary, and copied to ``hami.v1.event.policy``.
"""

from msgspec import Struct

from hami_common.bounds import Count, Duration, Label, Text, UnixS, Word


class RollbackRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A canary policy was rolled back: its namespaces have the default policy again."""

    policy: Label
    digest: Word
    """Hash of the canary's definition; another definition is another canary."""
    time_s: UnixS
    reason: Text
    """The objective that was missed, with its figures."""
    window_s: Duration = 0.0
    canary_pods: Count = 0
    """Pods in the window; of the control group below likewise."""
    control_pods: Count = 0
    writer: Word = ""
