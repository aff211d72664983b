# SPDX-License-Identifier: Apache-2.0
"""Claims of the class ``hami-whole`` that ask for a part, on a real API server with the policy."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from hami_common.dra.names import GROUP
from hami_sim.kubernetes import run_control_plane
from tests.cluster.needs import control_plane_or_skip
from tests.support.kubeclient import KubeClient, StatusError

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.shares_cluster]

POLICY = Path(__file__).parents[2] / "deploy/kustomize/components/dra/whole-policy.yaml"
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
        for document in yaml.safe_load_all(POLICY.read_text(encoding="utf-8")):
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
