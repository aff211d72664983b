# SPDX-License-Identifier: Apache-2.0
"""Laws of admission in both allocation modes, for any pod that asks for shares.

A second admission changes nothing, but for the name of the claim; the pod asks for the same in both
modes; no container uses a request that it does not ask for.
"""

import copy
from typing import Any

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonpatch import apply_patch

from hami_common.dra.podclaims import claim_name, claim_of, is_claimed, requests_of, restored
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, Verdict, mutate

CATALOG = Catalog.from_settings()
POLICY = AdmissionPolicy(dra_enabled=True, hide_devices_from_others=True)
NAMES = ("main", "side", "init-0", "init-1")
Pod = dict[str, Any]
Amounts = st.SearchStrategy[dict[str, str]]
_none: Amounts = st.just({})

_nvidia: Amounts = st.fixed_dictionaries(
    {},
    optional={
        "nvidia.com/gpu": st.sampled_from(["0", "1", "2"]),
        "nvidia.com/gpumem": st.sampled_from(["500", "3000", "3k"]),
        "nvidia.com/gpumem-percentage": st.sampled_from(["10", "50"]),
        "nvidia.com/gpucores": st.sampled_from(["10", "100"]),
        "nvidia.com/priority": st.sampled_from(["0", "1"]),
    },
)
_hygon: Amounts = st.fixed_dictionaries(
    {"hygon.com/dcunum": st.sampled_from(["1", "2"])},
    optional={"hygon.com/dcumem": st.sampled_from(["500", "3000"])},
)
_plain: Amounts = st.fixed_dictionaries(
    {}, optional={"cpu": st.just("1"), "memory": st.just("1Gi")}
)
_limits: Amounts = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    _plain,
    _nvidia,
    _none | _hygon,
)


@st.composite
def pods(draw: st.DrawFn) -> Pod:
    """A pod of up to four containers, with claims, variables and annotations of the user."""
    made: list[Pod] = []
    for name in NAMES:
        one: Pod = {"name": name, "image": "i"}
        limits = draw(_limits)
        flags: list[bool] = draw(st.lists(st.booleans(), min_size=5, max_size=5))
        resources: Pod = {"limits": limits} if limits or flags[0] else {}
        if limits and flags[1]:
            resources["requests"] = dict(limits)
        if flags[2]:
            resources["claims"] = [{"name": "nic"}]
        if resources or flags[3]:
            one["resources"] = resources
        if flags[4]:
            one["envFrom"] = [{"configMapRef": {"name": "c"}}]
        made.append(one)
    made[2] |= draw(st.sampled_from([{}, {"restartPolicy": "Always"}]))
    count, inits = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    spec: Pod = {
        "containers": made[:count],
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nic"}],
    }
    if inits:
        spec["initContainers"] = made[2 : 2 + inits]
    return {"metadata": {"name": "p"}, "spec": spec}


def review(pod: Pod, mode: str, claim: str) -> Verdict:
    at = Circumstances(traceparent="", claim=claim, namespace_mode=mode)
    view = msgspec.convert(pod, PodView)
    return mutate(pod, view, catalog=CATALOG, policy=POLICY, at=at)


def admitted(pod: Pod, mode: str, claim: str = "") -> Pod:
    verdict = review(pod, mode, claim or claim_name("first"))
    assume(verdict.allowed)
    made: Pod = apply_patch(copy.deepcopy(pod), list(verdict.operations))
    return made


def view_of(pod: Pod) -> PodView:
    return msgspec.convert(pod, PodView)


@given(pods(), st.sampled_from(["dra", "device-plugin"]))
def test_second_admission_changes_nothing(pod: Pod, mode: str) -> None:
    once = admitted(pod, mode)
    again = review(once, mode, claim_name("first"))
    assert again.allowed, again.message
    assert again.operations == ()


@given(pods())
def test_another_admission_changes_the_name_of_the_claim_alone(pod: Pod) -> None:
    once = admitted(pod, "dra")
    twice = admitted(once, "dra", claim_name("second"))
    if is_claimed(view_of(once)):
        assert claim_of(view_of(twice)) == claim_name("second")
        (entry,) = (one for one in twice["spec"]["resourceClaims"] if one["name"] == "hami")
        entry["resourceClaimName"] = claim_name("first")
    assert twice == once


@given(pods())
def test_pod_asks_for_the_same_in_both_modes(pod: Pod) -> None:
    by_claim, by_plugin = (view_of(admitted(pod, mode)) for mode in ("dra", "device-plugin"))
    assert CATALOG.parse_pod(restored(by_claim)) == CATALOG.parse_pod(by_plugin)
    assert CATALOG.parse_pod(by_plugin) == CATALOG.parse_pod(view_of(pod))


@given(pods())
def test_pod_of_one_mode_becomes_that_of_the_other(pod: Pod) -> None:
    for first, then in (("dra", "device-plugin"), ("device-plugin", "dra")):
        changed = admitted(admitted(pod, first), then)
        direct = admitted(pod, then)
        assert CATALOG.parse_pod(restored(view_of(changed))) == CATALOG.parse_pod(
            restored(view_of(direct))
        )
        assert is_claimed(view_of(changed)) == is_claimed(view_of(direct))
        for where in ("volumes", "resourceClaims"):
            assert changed["spec"].get(where, []) == direct["spec"].get(where, [])


@given(pods())
def test_containers_use_the_requests_that_they_ask_for(pod: Pod) -> None:
    made = admitted(pod, "dra")
    view = view_of(made)
    assume(is_claimed(view))
    request = CATALOG.parse_pod(restored(view))
    assert request is not None
    expected = {(name, one.name) for one in requests_of(request) for name in one.users}
    found = [
        (container.name, use.request)
        for _, container in view.containers_in_order()
        if container.resources
        for use in container.resources.claims or []
        if use.name == "hami"
    ]
    assert len(found) == len(set(found))
    assert set(found) == expected
    names = CATALOG.resource_names()
    for _, container in view.containers_in_order():
        assert not names & (container.limits().keys() | container.requests().keys())
    assert "volumes" not in made["spec"]
