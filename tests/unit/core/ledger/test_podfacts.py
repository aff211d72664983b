# SPDX-License-Identifier: Apache-2.0
"""Facts kept from a pod document, and the annotations that are trusted."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hami_common.model.request import options
from hami_common.pods import annotations
from hami_common.pods.podview import PodView, ResourcesView
from hami_common.pods.signing import Signer, Verifier
from hami_common.skus.expansion import Alternative, Expansion, encode
from hami_common.vendors.catalog import Catalog
from hami_core.ledger import binding, podfacts
from hami_core.ledger.podfacts import PodReader, pod_path
from hami_core.quota.resourcequota import Resource, amounts_of
from tests.support.builders import held, share
from tests.unit.core.facts import record, signed

SIGNER = Signer.generate()


def reader(*, trusted: Signer = SIGNER) -> PodReader:
    return PodReader(
        catalog=Catalog.from_settings(), verifier=Verifier.from_pems([trusted.public_pem()])
    )


def pod(
    *, gpumem: str = "1000", spec: Any = None, status: Any = None, **annotation_values: str
) -> PodView:
    document = {
        "metadata": {
            "name": "p",
            "namespace": "ns",
            "uid": "u1",
            "resourceVersion": "5",
            "labels": {annotations.MANAGED_LABEL: "true"},
            "annotations": annotation_values,
        },
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "resources": {"limits": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": gpumem}},
                    "volumeMounts": [{"name": "hami-limits-main", "mountPath": "/etc/hami"}],
                }
            ],
            "volumes": [{"name": "hami-limits-main"}],
            **(spec or {}),
        },
        "status": status or {},
    }
    return msgspec.convert(document, PodView)


def allocation() -> str:
    return binding.allocation_annotations(record("a1"), ledger_seq=1, signer=SIGNER)[
        annotations.ALLOCATION
    ]


def test_unassigned_pod_is_parsed_and_waits() -> None:
    facts = reader().facts_of(pod(**{annotations.FENCE: "a9/12", annotations.TRACEPARENT: "t"}))
    assert facts.request is not None
    assert facts.is_waiting()
    assert (facts.fence, facts.traceparent, facts.resource_version) == ("a9", "t", "5")
    assert facts.is_labelled
    assert facts.path() == pod_path("ns", "p") == "/api/v1/namespaces/ns/pods/p"


def test_invalid_request_becomes_a_problem_that_names_the_fix() -> None:
    facts = reader().facts_of(pod(gpumem="3Gi"))
    assert facts.request is None
    assert "write 3072" in facts.problem
    assert not facts.is_waiting()


def test_signed_allocation_of_an_assigned_pod_is_trusted() -> None:
    view = pod(spec={"nodeName": "n1"}, **{annotations.ALLOCATION: allocation()})
    facts = reader().facts_of(view)
    assert facts.signed == signed("a1")
    assert facts.request is None
    assert not facts.is_waiting()


@pytest.mark.parametrize(
    ("node", "annotation", "trusted"),
    [
        ("n2", allocation(), SIGNER),
        ("n1", "{}", SIGNER),
        ("n1", allocation(), Signer.generate()),
    ],
    ids=["other-node", "no-envelope", "stranger"],
)
def test_allocation_that_does_not_verify_is_mistrusted(
    node: str, annotation: str, trusted: Signer
) -> None:
    view = pod(spec={"nodeName": node}, **{annotations.ALLOCATION: annotation})
    facts = reader(trusted=trusted).facts_of(view)
    assert facts.signed is None
    assert facts.mistrust


def test_allocation_on_an_unassigned_pod_is_ignored() -> None:
    facts = reader().facts_of(pod(**{annotations.ALLOCATION: allocation()}))
    assert (facts.signed, facts.mistrust) == (None, "")


def test_own_allocation_is_trusted_without_verification_on_its_pod_and_node_only() -> None:
    text = allocation()
    forged = text.replace('"sig":"', '"sig":"A')  # would not verify: what we vouched for counts
    facts = reader()
    facts.vouch(forged, signed("a1"), key_id=SIGNER.key_id)
    elsewhere = pod(spec={"nodeName": "n2"}, **{annotations.ALLOCATION: forged})
    assert facts.facts_of(elsewhere).signed is None
    facts.vouch(forged, signed("a1"), key_id=SIGNER.key_id)
    here = pod(spec={"nodeName": "n1"}, **{annotations.ALLOCATION: forged})
    assert facts.facts_of(here).signed == signed("a1")
    assert facts.facts_of(here).signed is None, "vouched for once"


def test_allocation_signed_with_a_key_that_is_not_trusted_cannot_be_vouched_for() -> None:
    facts = reader(trusted=Signer.generate())
    facts.vouch(allocation(), signed("a1"), key_id=SIGNER.key_id)
    view = pod(spec={"nodeName": "n1"}, **{annotations.ALLOCATION: allocation()})
    assert facts.facts_of(view).signed is None


def test_cached_own_annotations_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(podfacts, "VOUCHED_MOST", 1)
    facts = reader()
    for text in ("{}", "[]"):
        facts.vouch(text, signed("a1"), key_id=SIGNER.key_id)
    first, last = (
        facts.facts_of(pod(spec={"nodeName": "n1"}, **{annotations.ALLOCATION: text})).signed
        for text in ("{}", "[]")
    )
    assert (first, last) == (None, signed("a1"))


def test_verified_allocation_is_not_verified_again_until_it_changes() -> None:
    view = pod(spec={"nodeName": "n1"}, **{annotations.ALLOCATION: allocation()})
    known = reader().facts_of(view)
    stranger = reader(trusted=Signer.generate())
    assert stranger.facts_of(view, known=known).signed == known.signed
    changed = pod(spec={"nodeName": "n1"}, **{annotations.ALLOCATION: allocation() + " "})
    assert stranger.facts_of(changed, known=known).signed is None


@pytest.mark.parametrize(
    ("status", "started"),
    [
        ({}, False),
        ({"phase": "Pending"}, False),
        ({"phase": "Running"}, True),
        ({"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {}}]}, False),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [{"name": "i", "state": {"running": {}}}],
            },
            True,
        ),
        (
            {"phase": "Pending", "containerStatuses": [{"name": "c", "state": {"terminated": {}}}]},
            True,
        ),
        ({"phase": "Pending", "containerStatuses": [{"name": "c"}]}, False),
    ],
)
def test_started_means_that_containers_exist(status: dict[str, Any], *, started: bool) -> None:
    assert reader().facts_of(pod(status=status)).is_started is started


def test_finished_pod_and_deleting_pod_do_not_wait() -> None:
    assert not reader().facts_of(pod(status={"phase": "Failed"})).is_waiting()
    view = pod()
    deleting = msgspec.structs.replace(
        view, metadata=msgspec.structs.replace(view.metadata, deletion_timestamp="now")
    )
    assert not reader().facts_of(deleting).is_waiting()


def test_recorded_labels_are_those_of_the_setting() -> None:
    found = PodReader(
        catalog=Catalog.from_settings(),
        verifier=Verifier.from_pems([SIGNER.public_pem()]),
        usage_labels=("team", "app", "absent"),
    )
    labels = {"team": "vision", "app": "", "other": "x"}
    view = msgspec.convert({"metadata": {"uid": "u", "name": "p", "labels": labels}}, PodView)
    assert found.facts_of(view).labels == (("app", ""), ("team", "vision"))
    assert reader().facts_of(view).labels == ()


def neutral() -> PodView:
    """A pod of SKU ``s@2`` that NVIDIA or one kind of Ascend chip can serve."""
    expansion = Expansion(
        sku="s@2",
        service_class="spot",
        alternatives=(
            Alternative(
                vendor="nvidia",
                limits={"main": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "500"}},
            ),
            Alternative(
                vendor="ascend",
                limits={"main": {ASCEND: "1", f"{ASCEND}-memory": "500"}},
            ),
        ),
    )
    made = pod(**{annotations.ALTERNATIVES: encode(expansion)})
    container = made.spec.containers[0]
    limits: dict[str, str | int | float] = {"hami.io/accelerators": "1", "hami.io/memory": "500"}
    container = replace(container, resources=ResourcesView(limits=limits))
    return replace(made, spec=replace(made.spec, containers=[container]))


ASCEND = "huawei.com/Ascend910B4"


def test_neutral_pod_has_its_sku_and_both_requests_before_and_after_its_bind() -> None:
    waiting = reader().facts_of(neutral())
    assert (waiting.sku, waiting.service_class, waiting.problem) == ("s@2", "spot", "")
    assert waiting.request is not None
    vendors = [one.containers[0].requests[0].vendor for one in options(waiting.request)]
    assert vendors == ["nvidia", "ascend"]
    bound = neutral()
    bound = replace(bound, spec=replace(bound.spec, node_name="n"))
    facts = reader().facts_of(bound)
    assert (facts.sku, facts.service_class, facts.request) == ("s@2", "spot", None)


def test_quotas_count_a_neutral_pod_under_the_resource_of_the_vendor_that_was_booked() -> None:
    account = reader().account_of(neutral())
    assert account is not None
    assert ("main", "ascend", ASCEND) in account.resources
    of_ascend = held(share("NPU-1", 500, vendor="ascend"))
    counted = amounts_of([of_ascend], account)
    assert counted[Resource(ASCEND, "memory_mib")] == 500
    assert counted[Resource("ascend", "memory_mib")] == 500
    of_nvidia = amounts_of([held(share("GPU-1", 500))], account)
    assert {resource.vendor for resource in of_nvidia} <= {"", "nvidia", "nvidia.com/gpu"}
