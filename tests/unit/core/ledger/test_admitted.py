# SPDX-License-Identifier: Apache-2.0
"""Pods that bypassed admission: our scheduler gives them what admission does, or a text."""

from typing import Any

import msgspec
import pytest

from hami_common.errors import RequestInvalid
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.pods.signing import Signer, Verifier
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.podfacts import PodFacts, PodReader
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, mutate

CATALOG = Catalog.from_settings()
READER = PodReader(catalog=CATALOG, verifier=Verifier.from_pems([Signer.generate().public_pem()]))
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def pod(limits: dict[str, str]) -> dict[str, Any]:
    container = {"name": "main", "image": "app", "resources": {"limits": limits}}
    spec = {"schedulerName": "hami-scheduler", "containers": [container]}
    return {"metadata": {"name": "p", "namespace": "ns", "uid": "u1"}, "spec": spec}


def facts(document: dict[str, Any]) -> PodFacts:
    return READER.facts_of(msgspec.convert(document, PodView))


def is_prepared(document: dict[str, Any]) -> bool:
    """True if admission gives the pod a share."""
    verdict = mutate(
        document,
        msgspec.convert(document, PodView),
        catalog=CATALOG,
        policy=AdmissionPolicy(),
        at=Circumstances(traceparent=TRACEPARENT, claim=""),
    )
    return any(annotations.MANAGED_LABEL in str(one) for one in verdict.operations)


@pytest.mark.parametrize("name", sorted(CATALOG.resource_names()))
def test_pod_that_admission_would_prepare_is_refused(name: str) -> None:
    """The resource is a count, or an amount from which admission makes a count."""
    document = pod({name: "4"})
    seen = facts(document)
    assert seen.problem.startswith("PodNotAdmitted: ") is is_prepared(document)
    assert seen.request is None


@pytest.mark.parametrize("name", ["nvidia.com/gpumem", "enflame.com/gcu-memory"])
def test_memory_without_a_count_is_refused_with_the_fix(name: str) -> None:
    problem = facts(pod({name: "4"})).problem
    assert problem.startswith("PodNotAdmitted: metadata.labels[hami.io/managed]: is missing")
    assert "in a namespace without the label hami.io/webhook=ignore" in problem


def test_fix_names_the_container_whose_limits_are_not_mounted() -> None:
    document = pod({"nvidia.com/gpu": "1"})
    document["metadata"]["labels"] = {annotations.MANAGED_LABEL: "true"}
    view = msgspec.convert(document, PodView)
    with pytest.raises(RequestInvalid, match="container main: volumeMounts"):
        READER.request_of(view)
