# SPDX-License-Identifier: Apache-2.0
"""An agent's token against ResourceSlices of others, on a real API server with the shipped policy.

The rights of an agent are cluster-wide; the policy limits them to the node of the agent's pod, to
which its token is bound.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from hami_common.dra import names
from hami_sim.kube import Access
from hami_sim.kubernetes import run_control_plane
from tests.cluster.needs import control_plane_or_skip
from tests.support.kubeclient import KubeClient, StatusError

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.shares_cluster]

COMPONENT = Path(__file__).parents[2] / "deploy" / "kustomize" / "components" / "dra"
SLICES = f"resourceslices.{names.GROUP}"
AGENTS, ACCOUNT, NODE = "hami-agents", "hami-nodeagent", "node-a"
COLLECTIONS = {
    "ClusterRole": "clusterroles.rbac.authorization.k8s.io",
    "ClusterRoleBinding": "clusterrolebindings.rbac.authorization.k8s.io",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies.admissionregistration.k8s.io",
    "ValidatingAdmissionPolicyBinding": (
        "validatingadmissionpolicybindings.admissionregistration.k8s.io"
    ),
}
KNOWN_S = 60.0
"""The API server follows new policies within seconds."""
Obj = dict[str, Any]


def slice_of(name: str, *, node: str = NODE, driver: str = names.DRIVER) -> Obj:
    pool = {"name": names.pool_name(node), "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": []}
    return {"metadata": {"name": name}, "spec": spec}


async def refusal_of(client: KubeClient, wanted: Obj) -> str:
    """Return why the API server would not create the slice; empty if it would."""
    try:
        await client.create(SLICES, wanted, dryRun="All")
    except StatusError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
async def clients(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[KubeClient, KubeClient]]:
    """An administrator, and the agent of node-a by a token that is bound to its pod."""
    programs = control_plane_or_skip()
    folder = tmp_path_factory.mktemp("slices")
    async with run_control_plane(folder, programs) as plane, KubeClient(plane.access()) as admin:
        for node in (NODE, "node-b"):
            await admin.create("nodes", {"metadata": {"name": node}})
        await admin.create("namespaces", {"metadata": {"name": AGENTS}})
        await admin.create("serviceaccounts", {"metadata": {"name": ACCOUNT}}, AGENTS)
        for file in ("agent-rbac.yaml", "slices-policy.yaml"):
            for document in yaml.safe_load_all((COMPONENT / file).read_text(encoding="utf-8")):
                await admin.create(COLLECTIONS[document["kind"]], document)
        pod = {
            "metadata": {"name": "agent"},
            "spec": {
                "serviceAccountName": ACCOUNT,
                "nodeName": NODE,
                "containers": [{"name": "agent", "image": "agent"}],
            },
        }
        made = await admin.create("pods", pod, AGENTS)
        reference = {"kind": "Pod", "name": "agent", "uid": made["metadata"]["uid"]}
        bound = {"boundObjectRef": {"apiVersion": "v1", **reference}}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": bound}
        token = (await admin.act("serviceaccounts", ACCOUNT, "token", request, AGENTS))["status"]
        server = plane.access()
        access = Access(
            url=server.url,
            token=token["token"],
            ca_pem=server.ca_pem,
            insecure=server.insecure,
        )
        async with KubeClient(access) as agent:
            with anyio.fail_after(KNOWN_S):
                while not await refusal_of(agent, slice_of("other", node="node-b")):
                    await anyio.sleep(0.05)
            yield admin, agent


@pytest.mark.parametrize(
    ("node", "driver", "problem"),
    [
        (NODE, names.DRIVER, ""),
        ("node-b", names.DRIVER, "of its own node only"),
        (NODE, "gpu.example.com", "of the driver gpu.hami.io only"),
    ],
)
async def test_agent_creates_slices_of_its_node_and_driver_only(
    clients: tuple[KubeClient, KubeClient], node: str, driver: str, problem: str
) -> None:
    text = await refusal_of(clients[1], slice_of("tried", node=node, driver=driver))
    assert problem in text
    assert bool(text) == bool(problem)


async def test_agent_neither_changes_nor_deletes_slices_of_other_nodes(
    clients: tuple[KubeClient, KubeClient],
) -> None:
    admin, agent = clients
    other = await admin.create(SLICES, slice_of("of-node-b", node="node-b"))
    other["spec"]["pool"]["generation"] = 2
    with pytest.raises(StatusError, match="own node only"):
        await agent.replace(SLICES, other)
    with pytest.raises(StatusError, match="own node only"):
        await agent.delete(SLICES, "of-node-b")
    own = await agent.create(SLICES, slice_of("of-node-a"))
    own["spec"]["pool"]["generation"] = 2
    await agent.replace(SLICES, own)
    await agent.delete(SLICES, "of-node-a")
