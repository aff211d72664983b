# SPDX-License-Identifier: Apache-2.0
"""Restricts the MIG profiles that are chosen by size to those that the operator allows per model.

A profile that the list leaves out stays in the device's table as ``by_name_only``: existing
instances of it keep their size, and pods that request it by name still get it. Independent of
drivers and disk.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from msgspec.structs import replace

from hami_common.errors import SettingsInvalid
from hami_common.model.device import DeviceFacts

Allowed = Mapping[str, tuple[str, ...]]
"""Patterns of profile names by model, see ``drivers.nvidia.mig_allowed_profiles``."""
_DIVIDED = "mig"


def check_allowed(allowed: Allowed, *, field: str) -> None:
    """Raise ``SettingsInvalid`` for a model or a pattern without text."""
    for model, patterns in allowed.items():
        if not re.search(r"\w", model):
            raise SettingsInvalid(
                field=f"{field}[{model!r}]",
                problem="the model has no letter or digit",
                fix='write words of the device type, such as "A100-SXM4-40GB"',
            )
        if not patterns or not all(patterns):
            raise SettingsInvalid(
                field=f"{field}[{model}]",
                problem="the list, or a name in it, is empty",
                fix='list profiles as NVML names them, such as ["1g.5gb", "2g.*"]',
            )


def model_of(device_type: str, allowed: Allowed) -> str | None:
    """Return the longest model that occurs in the device type as whole words, in any case."""
    found = [model for model in allowed if _occurs(model, device_type)]
    return max(found, key=len, default=None)


def _occurs(model: str, device_type: str) -> bool:
    return bool(re.search(rf"(?<![^\W_]){re.escape(model)}(?![^\W_])", device_type, re.IGNORECASE))


def restrict(facts: DeviceFacts, allowed: Allowed) -> tuple[DeviceFacts, str]:
    """Return the device without the choice of profiles that are not allowed, and a problem.

    The problem is empty unless the list of the device's model leaves no profile to choose.
    """
    model = model_of(facts.type, allowed) if facts.mode == _DIVIDED else None
    if model is None:
        return facts, ""
    partitions = tuple(
        replace(
            profile,
            by_name_only=profile.by_name_only
            or not any(fnmatchcase(profile.name, pattern) for pattern in allowed[model]),
        )
        for profile in facts.partitions
    )
    restricted = replace(facts, partitions=partitions)
    plain = [profile.name for profile in facts.partitions if not profile.by_name_only]
    if not plain or not all(profile.by_name_only for profile in partitions):
        return restricted, ""
    return restricted, (
        f"device {facts.index}: drivers.nvidia.mig_allowed_profiles[{model}] allows none of"
        f" {', '.join(plain)}"
    )
