# SPDX-License-Identifier: Apache-2.0
"""Conditions of Kubernetes objects, and times as Kubernetes writes them. Unix seconds."""

from datetime import UTC, datetime
from math import inf

from msgspec import Struct

from hami_common.bounds import ObjectText, Word


class Condition(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One condition."""

    type: Word
    status: Word = ""
    reason: Word = ""
    message: ObjectText = ""
    last_transition_time: Word = ""


def unix_s(text: str | None) -> float:
    """Return the Unix seconds of a Kubernetes time; without one infinity, so nothing ends then."""
    return datetime.fromisoformat(text).timestamp() if text else inf


def kube_time(now_s: float) -> str:
    """Return the time as Kubernetes writes it, in whole seconds."""
    return datetime.fromtimestamp(int(now_s), tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
