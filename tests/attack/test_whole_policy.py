# SPDX-License-Identifier: Apache-2.0
"""Claims against the policies of the component ``dra``, on a real API server.

Claims of the class ``hami-whole`` that ask for a part, and pods that name the claim of another.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest
import yaml

from hami_common.dra.names import DRIVER, GROUP, pool_name
from hami_common.pods.annotations import MANAGED_LABEL
from hami_sim.kubernetes import run_control_plane
from tests.cluster.needs import control_plane_or_skip
from tests.support.kubeclient import KubeClient, StatusError

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.shares_cluster]

DRA = Path(__file__).parents[2] / "deploy/kustomize/components/dra"
CLAIMS = f"resourceclaims.{GROUP}"
COLLECTIONS = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies.admissionregistration.k8s.io",
    "ValidatingAdmissionPolicyBinding": (
        "validatingadmissionpolicybindings.admissionregistration.k8s.io"
    ),
}
KNOWN_S = 60.0
"""The API server follows new policies within seconds."""
Obj = dict[str, Any]
PART: Obj = {"capacity": {"requests": {"memory": "4Gi"}}}


def exactly(name: str, **more: Any) -> Obj:
    return {"exactly": {"deviceClassName": name, **more}}


def first(name: str, **more: Any) -> Obj:
    return {"firstAvailable": [{"name": "a", "deviceClassName": name, **more}]}


async def refusal_of(client: KubeClient, kind: str, *requests: Obj) -> str:
    """Return why the API server would not create the claim or template; empty if it would."""
    named = [{"name": f"r{number}", **one} for number, one in enumerate(requests)]
    spec: Obj = {"devices": {"requests": named}}
    if kind == "resourceclaimtemplates":
        spec = {"spec": spec}
    document = {"metadata": {"name": "tried"}, "spec": spec}
    try:
        await client.create(f"{kind}.{GROUP}", document, "default", dryRun="All")
    except StatusError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubeClient]:
    programs = control_plane_or_skip()
    folder = tmp_path_factory.mktemp("whole")
    async with run_control_plane(folder, programs) as plane, KubeClient(plane.access()) as admin:
        for name in ("whole-policy.yaml", "pod-claims-policy.yaml"):
            for document in yaml.safe_load_all((DRA / name).read_text(encoding="utf-8")):
                await admin.create(COLLECTIONS[document["kind"]], document)
        with anyio.fail_after(KNOWN_S):
            while not await refusal_of(admin, "resourceclaims", exactly("hami-whole", **PART)):
                await anyio.sleep(0.05)
        yield admin


@pytest.mark.parametrize("kind", ["resourceclaims", "resourceclaimtemplates"])
@pytest.mark.parametrize(
    ("requests", "problem"),
    [
        ([exactly("hami-whole")], ""),
        ([exactly("hami-whole"), exactly("hami-share", **PART)], ""),
        ([exactly("other", **PART)], ""),
        ([exactly("hami-share"), exactly("hami-whole", **PART)], "exactly.capacity"),
        ([first("hami-whole", **PART)], "firstAvailable[].capacity"),
        ([first("hami-whole")], ""),
    ],
)
async def test_request_of_a_whole_device_names_no_amount(
    client: KubeClient, kind: str, requests: list[Obj], problem: str
) -> None:
    text = await refusal_of(client, kind, *requests)
    assert problem in text
    assert bool(text) == bool(problem)


OTHER = str(UUID(int=2))


async def claim_of(client: KubeClient, name: str, **metadata: Any) -> None:
    request = {"name": "r", "exactly": {"deviceClassName": "hami-share"}}
    document = {
        "metadata": {"name": name, **metadata},
        "spec": {"devices": {"requests": [request]}},
    }
    await client.create(CLAIMS, document, "default")
    result = {"request": "r", "driver": DRIVER, "pool": pool_name("n"), "device": "gpu-0"}
    await client.patch(
        CLAIMS,
        name,
        {"status": {"allocation": {"devices": {"results": [result]}}}},
        namespace="default",
        subresource="status",
    )


async def reserved(client: KubeClient, name: str, *uids: str) -> str:
    """Reserve a claim for pods, as kube-scheduler does; returns why it is refused."""
    users = [{"resource": "pods", "name": f"pod-{uid[-1]}", "uid": uid} for uid in uids]
    status = {"status": {"reservedFor": users}}
    try:
        await client.patch(CLAIMS, name, status, namespace="default", subresource="status")
    except StatusError as error:
        return str(error)
    return ""


async def test_claim_of_a_pod_is_reserved_for_no_other(client: KubeClient) -> None:
    spec = {"containers": [{"name": "main", "image": "x"}], "automountServiceAccountToken": False}
    pod = await client.create("pods", {"metadata": {"name": "pod-1"}, "spec": spec}, "default")
    own_uid = pod["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "pod-1", "uid": own_uid, "controller": True}
    ours = {MANAGED_LABEL: "true"}
    await claim_of(client, "own", labels=ours, ownerReferences=[owner])
    await claim_of(client, "of-user", labels=ours)
    await claim_of(client, "generated", ownerReferences=[owner])
    with anyio.fail_after(KNOWN_S):
        while not await reserved(client, "own", OTHER):
            await reserved(client, "own")
            await anyio.sleep(0.05)
    assert await reserved(client, "own", own_uid) == ""
    refusal = await reserved(client, "own", own_uid, OTHER)
    assert "the claim belongs to another pod" in refusal
    assert await reserved(client, "own") == ""
    for shared in ("of-user", "generated"):
        assert await reserved(client, shared, own_uid, OTHER) == "", shared
