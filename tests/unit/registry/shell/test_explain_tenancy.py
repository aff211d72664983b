# SPDX-License-Identifier: Apache-2.0
"""Holders of devices in other namespaces are named only to callers who may read everything."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hami_common.events.decision import (
    Amounts,
    DecisionRecord,
    DeviceHolder,
    RefusedDevice,
    RefusedNode,
)
from hami_common.runtime.httpd import Request, Response
from hami_registry.core.projection import Projection
from hami_registry.shell.api import Api

pytestmark = pytest.mark.anyio


def refused(*holders: DeviceHolder) -> DecisionRecord:
    device = RefusedDevice(uuid="GPU-0", wanted=Amounts(), free=Amounts(), holders=holders)
    return DecisionRecord(
        verb="filter",
        namespace="team-a",
        pod="train",
        pod_uid="u",
        time_s=0.0,
        verdict="refused",
        snapshot_id="1.1",
        closest=(RefusedNode(node="n", code="CardInsufficientMemory", devices=(device,)),),
    )


OWN = DeviceHolder(namespace="team-a", name="mine", memory_mib=100)
OTHER = DeviceHolder(
    kind="claim", namespace="team-b", name="secret", memory_mib=300, core_pct=20, slots=1
)


async def explained(*, sees_everything: bool) -> Any:
    projection = Projection(liveness_s=15)
    projection.decision_seen(refused(OTHER, OWN))
    bucket = SimpleNamespace(sequence=1)
    views: Any = SimpleNamespace(
        projection=projection, ledger=bucket, states=bucket, devices=bucket
    )
    nothing: Any = None
    system: Any = SimpleNamespace(quarantined=nothing)
    api = Api(
        views=views,
        fleet=nothing,
        writer=nothing,
        config_file=nothing,
        agents=nothing,
        system=system,
        questions=nothing,
        clock=nothing,
    )

    async def sees() -> bool:
        return sees_everything

    request = Request(
        method="GET",
        path="/v1/explain/team-a/train",
        query={},
        headers={},
        body=b"",
        params={"namespace": "team-a", "pod": "train"},
    )
    request.sees_everything = sees
    response = await api.explain(request)
    assert isinstance(response, Response)
    return msgspec.json.decode(response.body)["decisions"][0]["closest"][0]["devices"][0]["holders"]


async def test_operator_reads_all_holders() -> None:
    assert [one["name"] for one in await explained(sees_everything=True)] == ["secret", "mine"]


async def test_tenant_reads_amounts_of_other_namespaces_only() -> None:
    other, own = await explained(sees_everything=False)
    assert other == {"kind": "", "memory_mib": 300, "core_pct": 20, "slots": 1}
    assert own == {"namespace": "team-a", "name": "mine", "memory_mib": 100}


def test_decisions_that_led_to_another_are_narrowed_too() -> None:
    bind = msgspec.structs.replace(refused(), verb="bind", closest=(), before=(refused(OTHER),))
    assert b"team-b" not in msgspec.json.encode(bind.for_namespace())
    plain = refused(OWN)
    assert plain.for_namespace() is plain
