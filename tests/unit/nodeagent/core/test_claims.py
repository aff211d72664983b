# SPDX-License-Identifier: Apache-2.0
"""Matching of Allocate calls to containers.

The property that covers whole admissions is in tests/property/nodeagent.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from hami_common.model.device import Profile
from hami_nodeagent.core.claims import (
    TRUST_ALL,
    Claim,
    Code,
    Confirmed,
    ListedPod,
    Refuse,
    Wait,
    decide,
    decide_all,
    grant_of,
)
from tests.unit.nodeagent.core.builders import GPU, NPU, Container, Given, device, request, view

FETCH_AND_MAIN: tuple[Container, ...] = (("fetch", "init", {GPU: 1}), ("main", "app", {GPU: 1}))


def claimed(decision: object) -> tuple[str, str]:
    assert isinstance(decision, Claim), decision
    return decision.pod.uid, decision.container


def code_of(decision: object, kind: type = Refuse) -> Code:
    assert isinstance(decision, kind), decision
    code: Code = decision.code  # type: ignore[attr-defined]  # Wait and Refuse have it
    return code


def test_the_only_listed_pod_without_devices_is_chosen() -> None:
    served, waiting, unlisted = Given("served"), Given("waiting"), Given("unlisted")
    seen = view(served, waiting, unlisted, grants=(served.grant("main", "x"),))
    listing = [served.listed({"main": {GPU: {"x"}}}), waiting.listed()]
    decision = decide(seen, listing, request())
    assert claimed(decision) == (waiting.uid, "main")
    assert isinstance(decision, Claim)
    assert decision.entry == waiting.entry
    assert [one.uuid for one in decision.devices] == ["nvidia-0"]


def test_init_container_is_chosen_before_app_as_own_grants_show() -> None:
    pod = Given("pod", *FETCH_AND_MAIN)
    first = view(pod)
    assert claimed(decide(first, [pod.listed()], request())) == (pod.uid, "fetch")
    second = view(pod, grants=(pod.grant("fetch", "a"),))
    # Kubelet names the ids of the init container again: identity is not by id.
    assert claimed(decide(second, [pod.listed()], request("a"))) == (pod.uid, "main")


def test_sidecar_is_served_in_its_place_between_init_containers() -> None:
    pod = Given(
        "pod",
        ("one", "init", {GPU: 1}),
        ("log", "sidecar", {GPU: 1}),
        ("two", "init", {GPU: 1}),
        ("main", "app", {GPU: 1}),
    )
    order = []
    grants: list[Any] = []
    ids: dict[str, dict[str, set[str]]] = {}
    for number in range(4):
        decision = decide(
            view(pod, grants=tuple(grants)), [pod.listed(ids)], request(f"id-{number}")
        )
        _, container = claimed(decision)
        order.append(container)
        grants.append(pod.grant(container, f"id-{number}"))
        ids[container] = {GPU: {f"id-{number}"}}
    assert order == ["one", "log", "two", "main"]


def test_only_containers_of_the_requested_vendor_count() -> None:
    pod = Given("pod", ("a", "app", {NPU: 1}), ("b", "app", {GPU: 1}))
    assert claimed(decide(view(pod), [pod.listed()], request())) == (pod.uid, "b")
    decision = decide(view(pod), [pod.listed()], request(resource=NPU))
    assert isinstance(decision, Claim)
    assert [share.vendor for share in decision.own] == ["ascend"]


def test_gpu_only_init_container_needs_no_listed_container() -> None:
    pod = Given("pod", ("fetch", "init", {GPU: 1}), ("main", "app", {}))
    assert claimed(decide(view(pod), [pod.listed()], request())) == (pod.uid, "fetch")
    served = view(pod, grants=(pod.grant("fetch", "a"),))
    assert code_of(decide(served, [pod.listed()], request("b")), Wait) == "no-pending-container"


def test_listed_pod_unknown_to_the_watch_is_read() -> None:
    pod, stranger = Given("pod"), Given("stranger")
    listing = [pod.listed(), stranger.listed()]
    decision = decide(view(pod), listing, request(), Confirmed())
    assert code_of(decision, Wait) == "pod-unknown"
    assert isinstance(decision, Wait)
    assert decision.confirm is not None
    assert decision.confirm.title == "default/stranger"
    assert "default/stranger" in decision.text
    read = Confirmed(names=frozenset({("default", "stranger"), ("default", "pod")}))
    assert claimed(decide(view(pod), listing, request(), read)) == (pod.uid, "main")


def test_many_listed_pods_unknown_to_the_watch_are_read_in_one_list() -> None:
    listing = [Given(f"stranger-{i}").listed() for i in range(4)]
    decision = decide(view(), listing, request(), Confirmed())
    assert code_of(decision, Wait) == "pod-unknown"
    assert isinstance(decision, Wait)
    assert decision.confirm_all


def test_pod_of_kubelets_own_does_not_block_the_one_that_is_admitted() -> None:
    """A pod from a file on the node, whose mirror the API server refused."""
    pod, stranger = Given("pod"), Given("stranger")
    listing = [pod.listed(), stranger.listed()]
    everything = Confirmed(everything=True)
    assert claimed(decide(view(pod), listing, request(), everything)) == (pod.uid, "main")
    alone = decide(view(), [stranger.listed()], request(), everything)
    assert code_of(alone, Wait) == "pod-unknown"
    two = decide(
        view(pod, Given("other")), [*listing, Given("other").listed()], request(), everything
    )
    assert code_of(two, Wait) == "ambiguous"


def test_unknown_pod_is_preferred_to_one_that_was_admitted_before() -> None:
    """Kubelet lost its checkpoint, and a pod was deleted before its update arrived."""
    pod, stranger = Given("pod"), Given("stranger")
    listing = [pod.listed(), stranger.listed()]
    facts = replace(pod.facts, admitted=True)
    admitted = view(pod, pods_by_name={("default", "pod"): (facts,)})
    decision = decide(admitted, listing, request(), Confirmed(everything=True))
    assert code_of(decision, Wait) == "pod-unknown"
    old = view(pod, lists_active_only=False)
    decision = decide(old, listing, request(), Confirmed(everything=True))
    assert code_of(decision, Wait) == "pod-unknown"
    settled = [pod.listed(), stranger.listed(settled=True)]
    assert claimed(decide(admitted, settled, request())) == (pod.uid, "main")


def test_two_waiting_pods_are_ambiguous_even_with_equal_shares() -> None:
    one, two = Given("one"), Given("two")
    decision = decide(view(one, two), [one.listed(), two.listed()], request())
    assert code_of(decision, Wait) == "ambiguous"
    assert isinstance(decision, Wait)
    assert "default/one, default/two" in decision.text


def test_many_waiting_pods_are_named_briefly() -> None:
    pods = [Given(f"pod-{number}") for number in range(5)]
    decision = decide(view(*pods), [pod.listed() for pod in pods], request())
    assert isinstance(decision, Wait)
    assert decision.text.endswith("default/pod-0, default/pod-1, default/pod-2 and 2 more")


def test_number_of_ids_distinguishes_candidates() -> None:
    one, two = Given("one"), Given("two", ("main", "app", {GPU: 2}))
    listing = [one.listed(), two.listed()]
    assert claimed(decide(view(one, two), listing, request("a", "b"))) == (two.uid, "main")
    decision = decide(view(one, two), listing, request("a", "b", "c"))
    assert code_of(decision, Wait) == "count-mismatch"
    assert isinstance(decision, Wait)
    assert "default/one container main asks for 1" in decision.text


def test_finished_pod_blocks_no_other() -> None:
    rejected, pod = Given("rejected", finished=True), Given("pod")
    listing = [rejected.listed(), pod.listed()]
    seen = view(rejected, pod, lists_active_only=False)
    assert claimed(decide(seen, listing, request())) == (pod.uid, "main")


def test_pod_whose_grant_kubelet_dropped_in_this_run_blocks_no_other() -> None:
    rejected, pod = Given("rejected"), Given("pod")
    listing = [rejected.listed(), pod.listed()]
    seen = view(rejected, pod, grants=(rejected.grant("main", "x"),))
    assert claimed(decide(seen, listing, request())) == (pod.uid, "main")


def test_repeated_call_with_the_same_ids_is_answered_again() -> None:
    pod = Given("pod")
    seen = view(pod, grants=(pod.grant("main", "x", "y"),))
    other = view(pod, grants=(pod.grant("main", "x"),))
    assert code_of(decide(seen, [pod.listed()], request("z")), Wait) == "no-pending-container"
    assert claimed(decide(other, [pod.listed()], request("x"))) == (pod.uid, "main")


def test_id_that_kubelet_gives_twice_leaves_each_pod_its_own_share() -> None:
    running, waiting = Given("running"), Given("waiting")
    seen = view(running, waiting, grants=(running.grant("main", "x"),))
    listing = [running.listed({"main": {GPU: {"x"}}}), waiting.listed()]
    decision = decide(seen, listing, request("x"))
    assert claimed(decision) == (waiting.uid, "main")
    assert isinstance(decision, Claim)
    assert decision.entry == waiting.entry


def test_repeated_call_for_an_init_container_is_answered_again() -> None:
    pod = Given("pod", ("fetch", "init", {GPU: 1}), ("main", "app", {}))
    seen = view(pod, grants=(pod.grant("fetch", "x"),))
    assert claimed(decide(seen, [pod.listed()], request("x"))) == (pod.uid, "fetch")


def test_grant_of_an_earlier_kubelet_run_leaves_open_which_container_is_next() -> None:
    pod = Given("pod", *FETCH_AND_MAIN)
    restarted = (pod.grant("fetch", "x", kubelet="run-0"),)
    # Equal shares, limits that travel with the pod: whichever is meant gets the same.
    assert claimed(decide(view(pod, grants=restarted), [pod.listed()], request())) == (
        pod.uid,
        "main",
    )
    different = replace(
        pod.record,
        containers=(
            pod.record.containers[0],
            replace(pod.record.containers[1], priority=3),
        ),
    )
    seen = view(
        pod,
        grants=restarted,
        entries_by_uid={pod.uid: replace(pod.entry, record=replace(different, op="resize"))},
    )
    decision = decide(seen, [pod.listed()], request())
    assert code_of(decision, Wait) == "ambiguous"
    assert isinstance(decision, Wait)
    assert "container fetch or main of pod default/pod" in decision.text


def test_containers_differ_in_effect_when_the_agent_mounts_their_limits() -> None:
    pod = Given("pod", *FETCH_AND_MAIN, limits_mounted=frozenset())
    seen = view(pod, grants=(pod.grant("fetch", "x", kubelet="run-0"),))
    assert code_of(decide(seen, [pod.listed()], request()), Wait) == "ambiguous"


def test_containers_differ_in_effect_when_one_has_no_share() -> None:
    pod = Given("pod", *FETCH_AND_MAIN)
    less = replace(pod.record, op="resize", containers=pod.record.containers[1:])
    seen = view(
        pod,
        grants=(pod.grant("fetch", "x", kubelet="run-0"),),
        entries_by_uid={pod.uid: replace(pod.entry, record=less)},
    )
    assert code_of(decide(seen, [pod.listed()], request()), Wait) == "ambiguous"


def test_init_only_pod_of_an_earlier_run_yields_to_a_pod_that_surely_waits() -> None:
    old = Given("old", ("fetch", "init", {GPU: 1}), ("main", "app", {}), admitted=True)
    fresh = Given("fresh")
    grants = (old.grant("fetch", "x", kubelet="run-0"),)
    listing = [old.listed(), fresh.listed()]
    assert claimed(decide(view(old, fresh, grants=grants), listing, request())) == (
        fresh.uid,
        "main",
    )
    alone = decide(view(old, grants=grants), [old.listed()], request())
    assert claimed(alone) == (old.uid, "fetch")


def test_pod_that_kubelet_forgot_is_served_again_after_its_checkpoint_was_lost() -> None:
    pod = Given("pod", admitted=True)
    seen = view(pod, grants=(pod.grant("main", "x", kubelet="run-0"),))
    assert claimed(decide(seen, [pod.listed()], request("y"))) == (pod.uid, "main")


def test_listed_name_identifies_the_pod_of_its_ids() -> None:
    old = Given("db-0", uid="old", gone=True)
    new = Given("db-0", uid="new")
    shows_old = [old.listed({"main": {GPU: {"x"}}})]
    grants = (old.grant("main", "x"),)
    decision = decide(view(old, new, grants=grants), shows_old, request("y"))
    assert code_of(decision, Wait) == "no-pending-container"
    shows_new = [new.listed()]
    assert claimed(decide(view(old, new, grants=grants), shows_new, request("y"))) == (
        "new",
        "main",
    )


def test_two_pods_of_one_name_without_evidence_are_ambiguous() -> None:
    old = Given("db-0", uid="old", gone=True)
    new = Given("db-0", uid="new")
    decision = decide(view(old, new), [new.listed()], request())
    assert code_of(decision, Wait) == "ambiguous"


def test_listed_containers_distinguish_pods_of_one_name() -> None:
    old = Given("db-0", ("other", "app", {GPU: 1}), uid="old", gone=True)
    new = Given("db-0", uid="new")
    assert claimed(decide(view(old, new), [new.listed()], request())) == ("new", "main")
    finished = Given("db-0", uid="old", gone=True, finished=True)
    assert claimed(decide(view(finished, new), [new.listed()], request())) == ("new", "main")


def test_name_that_may_still_be_the_served_predecessor_yields_to_a_sure_candidate() -> None:
    init_only: tuple[Container, ...] = (("fetch", "init", {GPU: 1}), ("main", "app", {}))
    old = Given("db-0", *init_only, uid="old", gone=True)
    new = Given("db-0", *init_only, uid="new")
    sure = Given("web")
    grants = (old.grant("fetch", "x"),)
    listing = [new.listed(), sure.listed()]
    assert claimed(decide(view(old, new, sure, grants=grants), listing, request())) == (
        sure.uid,
        "main",
    )
    legacy = view(old, new, sure, grants=grants, lists_active_only=False)
    assert code_of(decide(legacy, listing, request()), Wait) == "ambiguous"
    alone = decide(view(old, new, grants=grants), [new.listed()], request())
    assert claimed(alone) == ("new", "fetch")


def test_list_with_uids_needs_no_evidence() -> None:
    old = Given("db-0", uid="old", gone=True)
    new = Given("db-0", uid="new")
    listing = [ListedPod(namespace="default", name="db-0", uid="new")]
    assert claimed(decide(view(old, new), listing, request())) == ("new", "main")
    rejected = Given("rejected", finished=True)
    named = Confirmed(names=frozenset({("default", "db-0")}))
    doubtful = decide(view(new, rejected), listing, request(), named)
    assert isinstance(doubtful, Wait)
    assert doubtful.confirm_all  # refused pods may be listed too
    both = [ListedPod(namespace="default", name="db-0")]
    assert code_of(decide(view(old, new), both, request()), Wait) == "ambiguous"


def test_chosen_pod_must_be_confirmed() -> None:
    pod = Given("pod")
    decision = decide(view(pod), [pod.listed()], request(), Confirmed())
    assert isinstance(decision, Wait)
    assert (decision.code, decision.confirm) == ("api-unavailable", pod.facts)
    names = Confirmed(names=frozenset({("default", "pod")}))
    assert claimed(decide(view(pod), [pod.listed()], request(), names)) == (pod.uid, "main")


def test_doubtful_candidates_and_old_kubelets_need_all_pods_confirmed() -> None:
    pod = Given("pod", ("fetch", "init", {GPU: 1}), ("main", "app", {}), admitted=True)
    names = Confirmed(names=frozenset({("default", "pod")}))
    doubtful = decide(view(pod), [pod.listed()], request(), names)
    assert isinstance(doubtful, Wait)
    assert doubtful.confirm_all
    sure = Given("pod")
    old = decide(view(sure, lists_active_only=False), [sure.listed()], request(), names)
    assert isinstance(old, Wait)
    assert old.confirm_all


@pytest.mark.parametrize(
    ("facts", "more", "code", "kind"),
    [
        ({"gone": True}, {}, "pod-gone", Refuse),
        ({"signed": None}, {}, "no-allocation", Refuse),
        ({"signed": None, "annotation_problem": "bad"}, {}, "annotation-invalid", Refuse),
        ({}, {"entries_by_uid": {}}, "ledger-unknown", Wait),
        ({}, {"devices_by_uuid": {}}, "device-unknown", Wait),
        ({}, {"faulty": {"nvidia-0"}}, "device-unhealthy", Refuse),
        (
            {},
            {"devices_by_uuid": {"nvidia-0": device(0, healthy=False)}},
            "device-unhealthy",
            Wait,  # the driver has not reported yet
        ),
    ],
)
def test_claim_is_refused_with_a_stable_code(
    facts: dict[str, Any], more: dict[str, Any], code: str, kind: type
) -> None:
    pod = Given("pod", **facts)
    assert code_of(decide(view(pod, **more), [pod.listed()], request()), kind) == code


@pytest.mark.parametrize(
    ("is_prepared", "fix"),
    [
        (False, "in a namespace without the label hami.io/webhook=ignore"),
        (True, "leave the Binding to hami-scheduler"),
    ],
)
def test_pod_that_the_scheduler_did_not_place_is_refused_with_the_fix(
    fix: str, *, is_prepared: bool
) -> None:
    pod = Given("pod", signed=None, is_prepared=is_prepared)
    refusal = decide(view(pod), [pod.listed()], request())
    assert isinstance(refusal, Refuse)
    assert refusal.text.startswith("pod default/pod was not placed by hami-scheduler, ")
    assert fix in refusal.text


def test_recovered_device_is_allocated_before_the_registry_is_updated() -> None:
    pod = Given("pod")
    canonical = {"nvidia-0": device(0, healthy=False)}
    seen = view(pod, devices_by_uuid=canonical, sound={"nvidia-0"})
    assert isinstance(decide(seen, [pod.listed()], request()), Claim)
    worse = view(pod, devices_by_uuid=canonical, sound={"nvidia-0"}, faulty={"nvidia-0"})
    assert code_of(decide(worse, [pod.listed()], request()), Refuse) == "device-unhealthy"


@pytest.mark.parametrize(
    ("change", "sequence", "code", "kind"),
    [
        ({"op": "release", "containers": ()}, 2, "allocation-released", Refuse),
        ({"allocation_id": "another"}, 2, "ledger-mismatch", Refuse),
        ({"allocation_id": "an-earlier-one"}, 0, "ledger-unknown", Wait),
        ({"containers": ()}, 1, "ledger-mismatch", Refuse),
        ({"origin": "hami"}, 1, "no-allocation", Refuse),
        ({"claim": "c"}, 1, "no-allocation", Refuse),
        ({"op": "resize", "containers": ()}, 2, "not-in-allocation", Refuse),
    ],
)
def test_record_must_be_the_one_that_the_annotation_names(
    change: dict[str, Any], sequence: int, code: str, kind: type
) -> None:
    pod = Given("pod", sequence=1)
    entry = replace(pod.entry, record=replace(pod.record, **change), sequence=sequence)
    seen = view(pod, entries_by_uid={pod.uid: entry})
    assert code_of(decide(seen, [pod.listed()], request()), kind) == code


def test_pod_with_a_claim_gets_nothing_without_the_ledger_either() -> None:
    pod = Given("pod")
    assert pod.facts.signed is not None
    pod.facts = replace(pod.facts, signed=replace(pod.facts.signed, claim="c"))
    seen = view(pod, entries_by_uid={}, bus_connected=False)
    refusal = decide(seen, [pod.listed()], request())
    assert isinstance(refusal, Refuse)
    assert refusal.text == (
        "pod default/pod gets its devices by claim c, and by no resource of its containers; "
        "remove the resource"
    )


def test_resized_record_gives_its_new_shares() -> None:
    pod = Given("pod")
    shares = pod.record.containers[0]
    larger = replace(shares, shares=(replace(shares.shares[0], memory_mib=99),))
    entry = replace(pod.entry, record=replace(pod.record, op="resize", containers=(larger,)))
    decision = decide(view(pod, entries_by_uid={pod.uid: entry}), [pod.listed()], request())
    assert isinstance(decision, Claim)
    assert decision.own[0].memory_mib == 99


def test_record_of_a_rebuilt_ledger_counts_though_its_sequence_is_smaller() -> None:
    pod = Given("pod", sequence=40)
    seen = view(pod, entries_by_uid={pod.uid: replace(pod.entry, sequence=3)})
    assert claimed(decide(seen, [pod.listed()], request())) == (pod.uid, "main")


def test_failed_allocation_is_refused_but_not_for_another_reservation() -> None:
    pod = Given("pod")
    failed = pod.state("failed", code="share-lost")
    seen = view(pod, states_by_uid={pod.uid: failed})
    decision = decide(seen, [pod.listed()], request())
    assert code_of(decision) == "state-failed"
    assert isinstance(decision, Refuse)
    assert decision.text.endswith("failed: share-lost")
    other = view(pod, states_by_uid={pod.uid: replace(failed, allocation_id="old")})
    assert claimed(decide(other, [pod.listed()], request())) == (pod.uid, "main")


def test_allocation_with_another_number_of_devices_is_refused() -> None:
    pod = Given("pod", ("main", "app", {GPU: 2}))
    shares = pod.record.containers[0]
    one = replace(shares, shares=shares.shares[:1])
    entry = replace(pod.entry, record=replace(pod.record, op="resize", containers=(one,)))
    seen = view(pod, entries_by_uid={pod.uid: entry})
    assert code_of(decide(seen, [pod.listed()], request("a", "b"))) == "count-mismatch"


@pytest.mark.parametrize(("ids", "is_right"), [(("a", "b", "c"), True), (("a", "b"), False)])
def test_ids_may_count_the_units_of_a_partition(ids: tuple[str, ...], *, is_right: bool) -> None:
    pod = Given("pod", ("main", "app", {GPU: len(ids)}))
    shares = pod.record.containers[0]
    share = replace(shares.shares[0], profile="3c")
    one = replace(shares, shares=(share,))
    entry = replace(pod.entry, record=replace(pod.record, op="resize", containers=(one,)))
    sizes = (
        Profile(name="1c", memory_mib=250, resources={"cores": 1}),
        Profile(name="3c", memory_mib=750, resources={"cores": 3}),
    )
    seen = view(
        pod,
        entries_by_uid={pod.uid: entry},
        devices_by_uuid={"nvidia-0": device(0, partitions=sizes)},
    )
    decision = decide(seen, [pod.listed()], request(*ids))
    if is_right:
        assert claimed(decision) == (pod.uid, "main")
    else:
        assert code_of(decision) == "count-mismatch"


def test_share_of_a_card_that_was_switched_meanwhile_is_not_given() -> None:
    pod = Given("pod")
    for change in ({"mode": "mig"}, {"mode": "soft"}):
        part = replace(pod.record.containers[0].shares[0], profile="1g", start=0)
        shares = (part,) if change["mode"] == "soft" else pod.record.containers[0].shares
        one = replace(pod.record.containers[0], shares=shares)
        entry = replace(pod.entry, record=replace(pod.record, op="resize", containers=(one,)))
        seen = view(
            pod,
            entries_by_uid={pod.uid: entry},
            devices_by_uuid={"nvidia-0": device(0, **change)},
        )
        assert code_of(decide(seen, [pod.listed()], request()), Wait) == "mode-changed"


@pytest.mark.parametrize("ids", [(), ("a", "a")])
def test_call_without_ids_or_with_repeated_ones_is_malformed(ids: tuple[str, ...]) -> None:
    pod = Given("pod")
    malformed = replace(request(), ids=ids)
    assert code_of(decide(view(pod), [pod.listed()], malformed)) == "request-invalid"


def test_no_share_is_allocated_without_kubelets_list() -> None:
    pod = Given("pod")
    assert code_of(decide(view(pod), None, request()), Wait) == "list-unavailable"


def test_several_requests_of_one_call_are_several_containers_in_order() -> None:
    pod = Given("pod", ("fetch", "init", {GPU: 1}), ("a", "app", {GPU: 1}), ("b", "app", {GPU: 1}))
    other = Given("other", ("main", "app", {}))
    listing = [pod.listed(), other.listed()]
    decision = decide_all(
        view(pod, other), listing, [request("1"), request("1"), request("2")], TRUST_ALL
    )
    assert isinstance(decision, tuple)
    assert [claim.container for claim in decision] == ["fetch", "a", "b"]
    too_many = decide_all(view(pod), [pod.listed()], [request(str(n)) for n in range(4)])
    assert code_of(too_many, Wait) == "no-pending-container"


def test_one_call_is_never_for_two_pods() -> None:
    one, two = Given("one"), Given("two", ("main", "app", {GPU: 2}))
    listing = [one.listed(), two.listed()]
    decision = decide_all(view(one, two), listing, [request("1"), request("2", "3")])
    assert code_of(decision) == "ambiguous"


def test_grant_keeps_the_answer() -> None:
    pod = Given("pod", ("main", "app", {GPU: 2}))
    seen = view(pod)
    asked = request("z", "a")
    decision = decide(seen, [pod.listed()], asked)
    assert isinstance(decision, Claim)
    grant = grant_of(decision, asked, seen, time_s=5.0)
    assert grant.ids == ("a", "z")
    assert grant.uuids == ("nvidia-0", "nvidia-1")
    assert grant.kubelet == seen.kubelet
    assert grant.allocation_id == pod.record.allocation_id


def test_refusal_codes_are_stable() -> None:
    assert sorted(Code) == [
        "allocation-released",
        "ambiguous",
        "annotation-invalid",
        "api-unavailable",
        "count-mismatch",
        "device-unhealthy",
        "device-unknown",
        "devices-overridden",
        "host-failed",
        "internal",
        "ledger-mismatch",
        "ledger-unknown",
        "ledger-unreadable",
        "limiter-missing",
        "limits-hidden",
        "list-unavailable",
        "mode-changed",
        "no-allocation",
        "no-pending-container",
        "not-granted",
        "not-in-allocation",
        "partition-changed",
        "partition-not-ready",
        "pod-gone",
        "pod-unknown",
        "pod-unreadable",
        "request-invalid",
        "state-failed",
    ]


NEUTRAL = "hami.io/accelerators"


@pytest.mark.parametrize(("resource", "vendor"), [(GPU, "nvidia"), (NPU, "ascend")])
def test_neutral_resource_gives_the_shares_of_the_vendor_that_the_ledger_names(
    resource: str, vendor: str
) -> None:
    """Kubelet counts neutral devices; the vendor's may be another number of them."""
    pod = Given("pod", ("main", "app", {resource: 2}))
    asks = {NEUTRAL: (replace(pod.facts.asks_by_resource[resource][0], count=1),)}
    pod.facts = replace(pod.facts, asks_by_resource=asks)
    seen = view(pod)
    asked = replace(request("x"), vendor="", resource=NEUTRAL)
    decision = decide(seen, [pod.listed()], asked)
    assert isinstance(decision, Claim)
    assert decision.vendor == vendor
    assert [one.uuid for one in decision.own] == [f"{vendor}-0", f"{vendor}-1"]
    grant = grant_of(decision, asked, seen)
    assert (grant.vendor, grant.resource, grant.ids) == (vendor, NEUTRAL, ("x",))


def test_neutral_resource_of_a_container_without_shares_is_refused() -> None:
    pod = Given("pod", ("main", "app", {}))
    ask = replace(Given("other").facts.asks_by_resource[GPU][0], count=1)
    pod.facts = replace(pod.facts, asks_by_resource={NEUTRAL: (ask,)})
    decision = decide(view(pod), [pod.listed()], replace(request("x"), vendor="", resource=NEUTRAL))
    assert code_of(decision) == Code.NOT_IN_ALLOCATION
    assert isinstance(decision, Refuse)
    assert "holds no share for container main" in decision.text
