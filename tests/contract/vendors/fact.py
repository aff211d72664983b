# SPDX-License-Identifier: Apache-2.0
"""The form of one fact about a request: what a pod asks, on which devices, and what it gets.

``outcome_of`` takes the pod through admission, parsing, placement and rendering, as the services
do. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jsonpatch
import msgspec
from msgspec.structs import replace

from hami_common.model.device import Device
from hami_common.model.placement import Placement, Share
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.protocol import BindMount, RenderContext
from hami_core.placement.pick import pick
from hami_core.placement.reasons import NodeRefusal
from hami_core.table.table import DeviceTable
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, mutate
from tests.support import builders

TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
NODE = "node"
LIBRARY = BindMount(host_path="/library", container_path="/library")
"""Stands for the in-container library that the agent mounts beside a limited share."""

Limits = Mapping[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One request and its outcome: exactly one of ``gives``, ``rejected``, ``waits``."""

    why: str
    """The rule, in a few words."""
    on: Device | tuple[Device, ...]
    """The node's devices."""
    limits: Limits
    more: tuple[Limits, ...] = ()
    """Limits of further containers."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment in the manifest."""
    settings: VendorSettings = field(default_factory=VendorSettings)
    before: int = 0
    """Number of equal pods that have their devices already."""
    gives: tuple[str, ...] | None = None
    """Shares as ``INDEX: MIB MiB, PERCENT %``, then partition, class, ``whole``."""
    sees: Mapping[str, str | None] = field(default_factory=dict)
    """Some of the first container's environment; ``None``: absent."""
    becomes: Mapping[str, str] = field(default_factory=dict)
    """Some of the first container's limits after admission."""
    rejected: str = ""
    """Part of the text with which admission rejects the pod."""
    waits: str = ""
    """Beginning of the text with which the scheduler refuses the node."""
    warns: str = ""
    """Part of a warning of admission; empty: there may be none."""
    differs: str = ""
    """Key in ``tools.hami_differences``; empty: HAMi 2.10 has the same outcome."""


class Outcome(NamedTuple):
    """Everything that a fact states an expectation of."""

    gives: tuple[str, ...] | None = None
    env: Mapping[str, str] = {}
    limits: Mapping[str, str] = {}
    rejected: str = ""
    waits: str = ""
    warnings: tuple[str, ...] = ()


def copies(device: Device, count: int) -> tuple[Device, ...]:
    """``count`` devices of a node, equal but for their identity."""
    return tuple(
        replace(device, uuid=f"{device.vendor}-{i}", index=i, minor=i) for i in range(count)
    )


def outcome_of(fact: Fact) -> Outcome:
    """Admit, place and render the pod of ``fact``."""
    catalog = Catalog.from_settings(fact.settings)
    devices = fact.on if isinstance(fact.on, tuple) else (fact.on,)
    table = DeviceTable()
    table.upsert_node(builders.node_devices(NODE, list(devices), vendor=devices[0].vendor))
    outcome = Outcome()
    for number in range(fact.before + 1):
        outcome = _one(fact, f"pod-{number}", catalog, table, devices)
        assert outcome.gives is not None or number == fact.before, outcome
    return outcome


def _one(
    fact: Fact, uid: str, catalog: Catalog, table: DeviceTable, devices: tuple[Device, ...]
) -> Outcome:
    document = _document(fact, uid)
    verdict = mutate(
        document,
        msgspec.convert(document, PodView),
        catalog=catalog,
        policy=AdmissionPolicy(),
        at=Circumstances(traceparent=TRACE, claim=""),
    )
    if not verdict.allowed:
        return Outcome(rejected=verdict.message)
    admitted: dict[str, Any] = jsonpatch.apply_patch(document, list(verdict.operations))
    first = admitted["spec"]["containers"][0]
    env = {variable["name"]: variable["value"] for variable in first.get("env") or []}
    outcome = Outcome(env=env, limits=first["resources"]["limits"], warnings=verdict.warnings)
    request = catalog.parse_pod(msgspec.convert(admitted, PodView))
    if request is None:
        return outcome._replace(gives=())
    found = pick(table, request, NODE)
    if isinstance(found, NodeRefusal):
        return outcome._replace(waits=found.text)
    assert isinstance(found, Placement)
    assert table.book(NODE, found.containers) == ()
    table.check()
    by_uuid = {device.uuid: device for device in devices}
    container = found.containers[0]
    given = [by_uuid[share.uuid] for share in container.shares]
    limited = any(not share.exclusive for share in container.shares)
    context = RenderContext(
        mode="env", is_limited=limited, library_mounts=(LIBRARY,) if limited else ()
    )
    edits = catalog.vendor(devices[0].vendor).render(container, given, context)
    shares = [share for one in found.containers for share in one.shares]
    return outcome._replace(
        gives=tuple(_words(share, by_uuid[share.uuid]) for share in shares),
        env={**edits.env, **env},
    )


def _document(fact: Fact, uid: str) -> dict[str, Any]:
    containers = [
        {
            "name": f"c{number}",
            "resources": {"limits": {name: str(value) for name, value in limits.items()}},
        }
        for number, limits in enumerate((fact.limits, *fact.more))
    ]
    variables = [{"name": name, "value": value} for name, value in fact.variables.items()]
    return {
        "metadata": {
            "name": uid,
            "namespace": "ns",
            "uid": uid,
            "annotations": dict(fact.annotations),
        },
        "spec": {"containers": [{**containers[0], "env": variables}, *containers[1:]]},
    }


def _words(share: Share, device: Device) -> str:
    amounts = f"{device.index}: {share.memory_mib} MiB, {share.core_pct} %"
    kind = share.kind if share.kind != share.profile else ""
    return ", ".join(filter(None, (amounts, share.profile, kind, "whole" * share.exclusive)))
