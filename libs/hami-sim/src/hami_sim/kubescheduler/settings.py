# SPDX-License-Identifier: Apache-2.0
"""Settings of the simulated kube-scheduler, in code or from a KubeSchedulerConfiguration file.

Names follow ``kubescheduler.config.k8s.io/v1``. Times in seconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Self

import msgspec

from hami_common.dra.podclaims import claims_profile
from hami_common.vendors.catalog import Catalog
from hami_sim.apiserver.errors import Obj

HAMI_PROFILE: Final = "hami-scheduler"
CLAIMS_PROFILE: Final = claims_profile(HAMI_PROFILE)
CLAIMS_PLUGIN: Final = "DynamicResources"
DEFAULT_PROFILE: Final = "default-scheduler"
OUR_RESOURCES: Final = tuple(sorted(Catalog.from_settings().resource_names()))
_DURATION: Final = re.compile(r"([0-9.]+)(ms|s|m|h)")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class ManagedResource(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A resource that makes a pod interesting to an extender."""

    name: str
    ignored_by_scheduler: bool = False
    """True if the scheduler leaves the check of this resource to the extender."""


class ExtenderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One extender; an empty verb means that it does not offer the call."""

    url: str
    filter_verb: str = "filter"
    prioritize_verb: str = "prioritize"
    bind_verb: str = "bind"
    weight: int = 1
    node_cache_capable: bool = True
    managed: tuple[ManagedResource, ...] = ()
    """Empty means that every pod is interesting."""
    ignorable: bool = False
    timeout_s: float = 30.0


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One process with its profiles."""

    profiles: tuple[str, ...] = (HAMI_PROFILE, DEFAULT_PROFILE)
    """Pods whose schedulerName is not listed are left alone."""
    without_claims: frozenset[str] = frozenset()
    """Profiles in which the plugin DynamicResources is disabled at all its extension points."""
    extenders: tuple[ExtenderSettings, ...] = ()
    """Extenders belong to the process; pods reach them by what they request, not by profile."""
    ignored: tuple[str, ...] = ()
    """Resources that NodeResourcesFit does not check (``ignoredResources``)."""
    initial_backoff_s: float = 1.0
    max_backoff_s: float = 2.0
    unschedulable_flush_s: float = 300.0
    """After this long an unschedulable pod is tried again without any event."""
    binds_at_once: int = 1000
    seed: int = 0
    """Of the choice among nodes with equal score."""

    @classmethod
    def for_extender(
        cls,
        url: str,
        *,
        resources: tuple[str, ...] = OUR_RESOURCES,
        initial_backoff_s: float = 1.0,
        max_backoff_s: float = 2.0,
        timeout_s: float = 30.0,
        dra: bool = False,
    ) -> Self:
        """Build the usual set-up: one extender that manages the named resources alone.

        ``dra``: as in the component of that name, every pod meets the extender, kube-scheduler
        ignores the resources by NodeResourcesFit, and a further profile ignores claims.
        """
        managed = () if dra else resources
        extender = ExtenderSettings(
            url=url,
            managed=tuple(
                ManagedResource(name=name, ignored_by_scheduler=True) for name in managed
            ),
            timeout_s=timeout_s,
        )
        profiles = (HAMI_PROFILE, DEFAULT_PROFILE)
        return cls(
            profiles=(*profiles, CLAIMS_PROFILE) if dra else profiles,
            without_claims=frozenset({CLAIMS_PROFILE} if dra else ()),
            extenders=(extender,),
            ignored=resources if dra else (),
            initial_backoff_s=initial_backoff_s,
            max_backoff_s=max_backoff_s,
        )

    @property
    def ignored_resources(self) -> frozenset[str]:
        """List the resources whose amounts only an extender counts."""
        return frozenset(self.ignored) | frozenset(
            resource.name
            for extender in self.extenders
            for resource in extender.managed
            if resource.ignored_by_scheduler
        )


def _seconds(text: object, default_s: float) -> float:
    if not text:
        return default_s
    parts = _DURATION.findall(str(text))
    if not parts:
        msg = f"not a duration: {text!r}; write for example 30s"
        raise ValueError(msg)
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def _extender(raw: Obj) -> ExtenderSettings:
    return ExtenderSettings(
        url=raw["urlPrefix"],
        filter_verb=raw.get("filterVerb", ""),
        prioritize_verb=raw.get("prioritizeVerb", ""),
        bind_verb=raw.get("bindVerb", ""),
        weight=int(raw.get("weight", 1)),
        node_cache_capable=bool(raw.get("nodeCacheCapable", False)),
        managed=tuple(
            msgspec.convert(item, ManagedResource) for item in raw.get("managedResources") or ()
        ),
        ignorable=bool(raw.get("ignorable", False)),
        timeout_s=_seconds(raw.get("httpTimeout"), 5.0),
    )


def _ignored(profile: Obj) -> tuple[str, ...]:
    """Return the resources that a profile's NodeResourcesFit ignores."""
    return tuple(
        name
        for plugin in profile.get("pluginConfig") or ()
        if plugin["name"] == "NodeResourcesFit"
        for name in plugin["args"].get("ignoredResources") or ()
    )


def _disables_claims(profile: Obj) -> bool:
    points = (profile.get("plugins") or {}).get("multiPoint") or {}
    return any(one["name"] in (CLAIMS_PLUGIN, "*") for one in points.get("disabled") or ())


def load(path: Path) -> SchedulerSettings:
    """Read a KubeSchedulerConfiguration; fields that this simulation does not know are skipped."""
    raw = msgspec.yaml.decode(path.read_bytes())
    if not isinstance(raw, dict) or raw.get("kind") != "KubeSchedulerConfiguration":
        msg = f"{path}: not a KubeSchedulerConfiguration"
        raise ValueError(msg)
    profiles = raw.get("profiles") or [{}]
    return SchedulerSettings(
        profiles=tuple(one.get("schedulerName", DEFAULT_PROFILE) for one in profiles),
        without_claims=frozenset(
            one.get("schedulerName", DEFAULT_PROFILE) for one in profiles if _disables_claims(one)
        ),
        ignored=tuple(name for one in profiles for name in _ignored(one)),
        extenders=tuple(_extender(item) for item in raw.get("extenders") or ()),
        initial_backoff_s=float(raw.get("podInitialBackoffSeconds", 1)),
        max_backoff_s=float(raw.get("podMaxBackoffSeconds", 10)),
    )
