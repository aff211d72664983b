# SPDX-License-Identifier: Apache-2.0
"""Documents of a commit, and the evaluation of a pod after an attempt."""

import json

import pytest

from hami_common.pods import annotations
from hami_common.pods.limits import decode as decode_limits
from hami_common.pods.signing import Signer, Verifier
from hami_core.ledger import binding
from hami_core.ledger.podfacts import PodFacts
from tests.unit.core.facts import pod_facts, record, signed


@pytest.mark.parametrize(
    ("pod", "allocation_id", "fate"),
    [
        (None, "a1", "gone"),
        (pod_facts(uid="other"), "a1", "gone"),
        (pod_facts(), "a1", "free"),
        (pod_facts(is_deleting=True), "a1", "deleting"),
        (pod_facts(is_finished=True), "a1", "finished"),
        (pod_facts(node="n2", signed=signed("a1", node="n2")), "a1", "elsewhere"),
        (pod_facts(node="n1", signed=signed("a1")), "a1", "ours"),
        (pod_facts(node="n1", signed=signed("a2")), "a1", "same-node"),
        (pod_facts(node="n1"), "a1", "elsewhere"),
        (pod_facts(node="n1"), "", "same-node"),
        (pod_facts(node="n1", mistrust="who signed this"), "a1", "unreadable"),
        (pod_facts(node="n1", mistrust="who signed this"), "", "unreadable"),
    ],
)
def test_outcome_of_an_attempt(
    pod: PodFacts | None, allocation_id: str, fate: binding.Fate
) -> None:
    assert binding.fate_of(pod, uid="u1", node="n1", allocation_id=allocation_id) == fate


def test_binding_takes_effect_only_on_this_version_of_the_pod() -> None:
    document = json.loads(
        binding.binding_document(
            pod=pod_facts(resource_version="77"), node="n1", annotations={"k": "v"}
        )
    )
    assert document["kind"] == "Binding"
    assert document["target"]["name"] == "n1"
    assert document["metadata"] == {
        "name": "p",
        "namespace": "ns",
        "uid": "u1",
        "resourceVersion": "77",
        "annotations": {"k": "v"},
    }
    plain = json.loads(binding.binding_document(pod=pod_facts(), node="n1"))
    assert "annotations" not in plain["metadata"]


def test_allocation_annotations_hold_signature_and_limits_of_every_container() -> None:
    signer = Signer.generate()
    found = binding.allocation_annotations(record("a1"), ledger_seq=12, signer=signer)
    verified = Verifier.from_pems([signer.public_pem()]).verify(
        found[annotations.ALLOCATION], pod_uid="u1", node="n1"
    )
    assert (verified.allocation_id, verified.ledger_seq) == ("a1", 12)
    assert verified.placement.containers == record("a1").containers
    limits = decode_limits(found[annotations.limits("main")])
    assert (limits.allocation_id, limits.devices[0].memory_mib) == ("a1", 1000)


def test_fence_differs_between_records_of_one_allocation() -> None:
    first = binding.fence_document(uid="u1", allocation_id="a1", ledger_seq=3)
    second = binding.fence_document(uid="u1", allocation_id="a1", ledger_seq=4)
    assert first != second
    assert json.loads(first)["metadata"]["uid"] == "u1"


def test_patches_name_what_they_change_and_nothing_else() -> None:
    label = json.loads(binding.label_document(uid="u1"))
    assert label == {"metadata": {"uid": "u1", "labels": {annotations.MANAGED_LABEL: "true"}}}
    touch = json.loads(binding.touch_document(stamp="5"))
    assert touch == {"metadata": {"annotations": {annotations.CAPACITY_RETURNED: "5"}}}
    assert binding.binding_path("ns", "p") == "/api/v1/namespaces/ns/pods/p/binding"
