# SPDX-License-Identifier: Apache-2.0
"""``hamictl get claims`` and ``hamictl explain claim``: claims, their records and refusals."""

from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest
from click.testing import CliRunner, Result

from hami_common.dra.names import BOOKED
from hami_common.errors import NotFound
from hami_common.model.placement import ContainerShares, Share
from hamictl import claimviews, client, kube
from hamictl.cli import main
from hamictl.client import Allocation
from hamictl.errors import Absent
from tests.support import claims
from tests.support.claims import result

Obj = dict[str, Any]
GPU = "GPU-n1-0"


def read(document: Obj) -> claimviews.Claim:
    return msgspec.convert(document, claimviews.Claim)


def refused(name: str, reason: str, message: str) -> Obj:
    found = claims.claim(name, result(GPU))
    condition = {"type": BOOKED, "status": "False", "reason": reason, "message": message}
    found["status"]["devices"] = [{**result(GPU), "conditions": [condition]}]
    return found


def record(name: str, state: str, allocation_id: str = "", **more: Any) -> Allocation:
    share = Share(vendor="nvidia", uuid=GPU, memory_mib=1000, core_pct=10)
    given = {"origin": "claim", "pod_uid": f"uid-{name}"} | more
    return Allocation(
        namespace="default",
        pod=name,
        node="n1",
        state=state,
        allocation_id=allocation_id or read(claims.claim(name, result(GPU))).allocation_id(),
        ledger_seq=1,
        reserved_s=0.0,
        containers=(ContainerShares(name="gpu", kind="app", shares=(share,)),),
        **given,
    )


@pytest.mark.parametrize(
    ("recorded", "state", "reason"),
    [
        ([], "Waiting", ""),
        ([record("c", "reserved")], "Booked", ""),
        ([record("c", "bound")], "Booked", ""),
        ([record("c", "prepared")], "Prepared", ""),
        ([record("c", "prepared", code="unprepared")], "Unprepared", ""),
        ([record("c", "failed", reason="device lost")], "Failed", "device lost"),
        ([record("c", "released")], "Waiting", ""),
        ([record("c", "prepared", origin="")], "Waiting", ""),
    ],
)
def test_state_is_that_of_the_record(recorded: list[Allocation], state: str, reason: str) -> None:
    document = claims.claim("c", result(GPU, memory="1500Mi"), reserved_for=["p", "q"])
    if recorded:
        own = read(document).allocation_id()
        recorded = [msgspec.structs.replace(one, allocation_id=own) for one in recorded]
    (found,) = claimviews.views([read(document)], recorded)
    assert (found.state, found.reason) == (state, reason)
    assert (found.node, found.devices, found.pods) == ("n1", (result(GPU)["device"],), ("p", "q"))
    assert (found.memory_mib, found.core_pct) == (1500, 10)


def test_amounts_are_summed_over_the_devices() -> None:
    results = [result(f"GPU-{n}", memory="1000Mi", cores="20") for n in range(3)]
    (found,) = claimviews.views([read(claims.claim("c", *results))], [])
    assert (found.memory_mib, found.core_pct, len(found.devices)) == (3000, 60, 3)


def test_partition_has_the_amounts_of_the_record() -> None:
    part = {
        key: value for key, value in result(GPU).items() if key in ("request", "driver", "pool")
    }
    document = read(claims.claim("c", {**part, "device": "mig-1-1g-10gb-6"}))
    (waiting,) = claimviews.views([document], [])
    assert (waiting.state, waiting.memory_mib) == ("Waiting", 0)
    booked = record("c", "prepared", allocation_id=document.allocation_id())
    (found,) = claimviews.views([document], [booked])
    assert (found.devices, found.memory_mib, found.core_pct) == (("mig-1-1g-10gb-6",), 1000, 10)


def test_refused_claim_has_the_reason_of_its_condition() -> None:
    (found,) = claimviews.views([read(refused("c", "CardCordoned", "CardCordoned: no"))], [])
    assert (found.state, found.reason) == ("Refused", "CardCordoned: no")


def test_claim_of_a_pod_has_the_state_of_the_pods_record() -> None:
    of_pod = record("p", "prepared", allocation_id="of the pod", origin="", claim="hami-1")
    document = read(claims.claim("hami-1", result(GPU), reserved_for=["p"]))
    (found,) = claimviews.views([document], [of_pod])
    assert (found.claim, found.state) == ("hami-1", "Prepared")
    assert claimviews.views([], [of_pod]) == []
    assert of_pod.holder == "p (claim hami-1)"


def test_record_of_another_allocation_is_releasing() -> None:
    document = read(claims.claim("c", result(GPU)))
    old = record("c", "prepared", allocation_id="old")
    assert [one.state for one in claimviews.views([document], [old])] == ["Waiting", "Releasing"]
    (gone,) = claimviews.views([], [old])
    assert (gone.state, gone.claim, gone.devices, gone.memory_mib) == (
        *("Releasing", "c"),
        (GPU,),
        1000,
    )


@pytest.mark.parametrize(
    ("request_", "states"),
    [
        ({"exactly": {"deviceClassName": "hami-share"}}, ["Pending"]),
        ({"firstAvailable": [{"deviceClassName": "hami-whole"}]}, ["Pending"]),
        ({"exactly": {"deviceClassName": "hami-mig"}}, ["Pending"]),
        ({"exactly": {"deviceClassName": "gpu.example.com"}}, []),
    ],
)
def test_claim_without_devices_is_listed_if_it_names_a_class_of_ours(
    request_: Obj, states: list[str]
) -> None:
    document = claims.claim("c")
    document["spec"] = {"devices": {"requests": [{"name": "gpu", **request_}]}}
    assert [one.state for one in claimviews.views([read(document)], [])] == states


# --- the commands ---------------------------------------------------------------------------------


class FakeApi:
    """The claims of one cluster."""

    def __init__(self, *documents: Obj) -> None:
        self.documents = documents

    async def get(self, path: str) -> bytes:
        for one in self.documents:
            if path == claims.path(one["metadata"]["name"]):
                return msgspec.json.encode(one)
        raise NotFound(what=path)

    async def list_pages(self, path: str) -> list[bytes]:
        assert path.endswith("/resourceclaims")
        return [msgspec.json.encode({"items": list(self.documents)})]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command with claims, records and decisions."""

    def invoke(
        *words: str, documents: list[Obj], recorded: list[Allocation], decisions: list[Obj]
    ) -> Result:
        def read_one(kind: type[Any], base: str, path: str, **_: str) -> Any:
            del base
            if path == "/v1/allocations":
                return kind(items=tuple(recorded))
            if not recorded and not decisions:
                raise Absent(path)
            name = path.rpartition("/")[2]
            body = {"namespace": "default", "pod": name, "decisions": decisions}
            body["allocations"] = msgspec.to_builtins(recorded)
            return msgspec.convert(body, kind)

        def with_kube(_: str, work: Any) -> Any:
            try:
                return anyio.run(work, FakeApi(*documents))
            except NotFound as error:
                raise Absent(str(error)) from error

        monkeypatch.setattr(client, "read", read_one)
        monkeypatch.setattr(kube, "with_kube", with_kube)
        return CliRunner().invoke(main, [*words, "--registry", "http://r"])

    return invoke


def decision(name: str, verdict: str, **more: Any) -> Obj:
    known = {"verb": "bind", "namespace": "default", "pod": name, "pod_uid": f"uid-{name}"}
    return {**known, "time_s": 0.0, "verdict": verdict, "snapshot_id": "1.1", **more}


def test_claims_are_listed_with_pods_devices_and_state(run: Callable[..., Result]) -> None:
    documents = [
        claims.claim("a", result(GPU), reserved_for=["p"]),
        refused("b", "CardCordoned", "CardCordoned: no"),
    ]
    done = run(
        "get", "claims", documents=documents, recorded=[record("a", "prepared")], decisions=[]
    )
    assert done.exit_code == 0, done.output
    heading, first, second = done.output.splitlines()
    assert heading.split()[:4] == ["NAMESPACE", "CLAIM", "PODS", "NODE"]
    assert first.split() == [
        *("default", "a", "p", "n1"),
        *(result(GPU)["device"], "1000", "10", "Prepared"),
    ]
    assert second.endswith("Refused: CardCordoned: no")


def test_explained_claim_shows_its_own_decisions_and_status(run: Callable[..., Result]) -> None:
    error = "CardCordoned: device x is cordoned"
    decisions = [
        decision("c", "refused", node="n1", error=error),
        decision("c", "placed", node="n9", pod_uid="uid of a pod c"),
    ]
    done = run(
        *("explain", "claim", "c"),
        documents=[refused("c", "CardCordoned", error)],
        recorded=[],
        decisions=decisions,
    )
    assert done.exit_code == 0, done.output
    assert done.output.startswith("Claim default/c\n")
    assert f"bind: refused on n1: {error}" in done.output
    assert f"now: Refused: {error}" in done.output
    assert "n9" not in done.output


def test_unknown_claim_is_an_error(run: Callable[..., Result]) -> None:
    done = run("explain", "claim", "c", documents=[], recorded=[], decisions=[])
    assert done.exit_code == 1
    assert "c" in done.output


def test_deleted_claim_is_explained_by_its_records(run: Callable[..., Result]) -> None:
    done = run(
        *("explain", "claim", "c"),
        documents=[],
        recorded=[record("c", "released")],
        decisions=[decision("c", "placed", node="n1")],
    )
    assert done.exit_code == 0, done.output
    assert "released on n1" in done.output
    assert "placed on n1" in done.output


def test_allocation_of_a_claim_is_marked(run: Callable[..., Result]) -> None:
    recorded = [record("c", "prepared"), record("p", "prepared", origin="")]
    done = run("get", "allocations", documents=[], recorded=recorded, decisions=[])
    assert [line.split()[1:4] for line in done.output.splitlines()[1:]] == [
        ["c", "(claim)", "n1"],
        ["p", "n1", "prepared"],
    ]
