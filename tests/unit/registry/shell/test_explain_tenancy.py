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
    Moment,
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


def api_of(projection: Projection) -> Api:
    bucket = SimpleNamespace(sequence=1)
    views: Any = SimpleNamespace(
        projection=projection, ledger=bucket, states=bucket, devices=bucket
    )
    nothing: Any = None
    system: Any = SimpleNamespace(quarantined=nothing)
    return Api(
        views=views,
        fleet=nothing,
        writer=nothing,
        config_file=nothing,
        agents=nothing,
        system=system,
        questions=nothing,
        clock=nothing,
    )


def asked(*, sees_everything: bool, **query: str) -> Request:
    async def sees() -> bool:
        return sees_everything

    request = Request(
        method="GET",
        path="/v1/explain/team-a/train",
        query=query,
        headers={},
        body=b"",
        params={"namespace": "team-a", "pod": "train"},
    )
    request.sees_everything = sees
    return request


async def explained(*, sees_everything: bool) -> Any:
    projection = Projection(liveness_s=15)
    projection.decision_seen(refused(OTHER, OWN))
    api = api_of(projection)
    response = await api.explain(asked(sees_everything=sees_everything))
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


async def test_a_past_time_is_answered_by_the_scheduler_and_narrowed() -> None:
    decision = refused(OTHER)
    moment = Moment(
        decision=decision,
        nodes=decision.closest,
        nodes_feasible=0,
        compared=1,
        differing=(),
        assumed=0,
    )

    async def scheduler(request: Request, path: str) -> Response:
        assert path == "/v1/whatif/moments/team-a/train"
        if request.query["at"] == "never":
            return Response(body=b"{}", status=404)
        return Response(body=msgspec.json.encode(moment))

    api = api_of(Projection(liveness_s=15))
    api.ask_scheduler = scheduler
    for sees_everything, name in ((True, "secret"), (False, None)):
        response = await api.explain(asked(sees_everything=sees_everything, at="2026-01-31T08:00Z"))
        assert isinstance(response, Response)
        found = msgspec.json.decode(response.body)["moment"]
        (holder,) = found["nodes"][0]["devices"][0]["holders"]
        assert holder.get("name") == name
        (same,) = found["decision"]["closest"][0]["devices"][0]["holders"]
        assert same.get("name") == name
    response = await api.explain(asked(sees_everything=True, at="never"))
    assert isinstance(response, Response)
    assert response.status == 404
