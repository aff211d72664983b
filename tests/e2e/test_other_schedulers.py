# SPDX-License-Identifier: Apache-2.0
"""Other schedulers on a real control plane: their Bindings get exact shares of the one ledger.

The shipped manifests with the component bind-admission. The other schedulers are the cluster's own
kube-scheduler, and users who post Bindings by kubectl or as Volcano does. Memory in MiB.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import yaml

from hami_common.pods import annotations as keys
from hami_sim.kube import Access
from tests.cluster.needs import control_plane_or_skip
from tests.e2e.conftest import small_pod
from tests.support.bindings import binding
from tests.support.checker import lasting_problems, ledger_of
from tests.support.hami_site import DEFAULT_SCHEDULER, start_default_scheduler
from tests.support.installed import OVERLAYS, SLEEPER, SPEC, Installed, run_installed
from tests.support.kubeclient import KubeClient, StatusError
from tests.support.kustomize import overlay

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

COMPONENT = OVERLAYS.parent / "components" / "bind-admission"
NAMESPACE = "default"
NODES = tuple(node.name for node in SPEC.nodes)
VOLCANO = "system:serviceaccount:volcano-system:volcano-scheduler"
JANE = "jane"
"""May create Bindings, and is configured as a binder."""
BOB = "bob"
"""May create Bindings, and is not."""
LEASE_S = 3
LIMIT_S = 90.0
Obj = dict[str, Any]


class Site:
    """The installation, and clients of the users."""

    def __init__(self, installed: Installed, clients: dict[str, KubeClient]) -> None:
        self.installed = installed
        self.admin = installed.client
        self.clients = clients

    async def post(self, user: str, document: Obj, **query: str) -> str:
        """Create a Binding at ``pods/binding``; returns the error, empty on success."""
        name = document["metadata"]["name"]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/binding"
        try:
            await self.clients[user].call("POST", path, body=document, query=query)
        except StatusError as error:
            return str(error)
        return ""

    async def waiting(
        self, name: str, *, memory_mib: int = 1000, scheduler: str = "volcano"
    ) -> Obj:
        """Create a pod that waits for its Binding."""
        pod = small_pod(name, memory_mib=memory_mib, schedulerName=scheduler)
        made: Obj = await self.admin.create("pods", pod, NAMESPACE)
        assert made["spec"]["schedulerName"] == scheduler
        assert made["metadata"]["labels"][keys.MANAGED_LABEL] == "true"
        return made

    async def runs(self, name: str) -> None:
        """Wait until the pod runs with its allocation."""

        async def is_running() -> bool:
            story = await self.installed.story_of(name)
            return story["phase"] == "Running" and "running" in story["states"]

        await self.installed.until(f"{name} runs", is_running, limit_s=LIMIT_S)

    async def hears_agents(self) -> None:
        """Wait until the scheduler, started a moment ago, would place a pod on each node."""
        await self.waiting("probe")

        async def are_heard() -> bool:
            probes = [await self.post(JANE, binding("probe", n), dryRun="All") for n in NODES]
            return not any(probes)

        await self.installed.until("the scheduler hears the agents", are_heard, limit_s=LIMIT_S)
        await self.admin.delete("pods", "probe", NAMESPACE)

    async def records_of(self, uid: str) -> list[str]:
        """Last operation in the ledger by node, of one pod."""
        records = (await ledger_of(self.installed)).values()
        return [record.op for record in records if record.pod_uid == uid]

    async def until_released(self, uid: str) -> None:
        """Wait until the lease has returned the pod's share."""

        async def is_released() -> bool:
            return await self.records_of(uid) == ["release"]

        await self.installed.until("the share is released", is_released, limit_s=LIMIT_S)

    async def clear(self) -> None:
        """Delete all pods, and wait until the ledger holds nothing."""
        for pod in (await self.admin.list("pods", NAMESPACE))["items"]:
            name = pod["metadata"]["name"]
            await self.admin.delete("pods", name, NAMESPACE)

        async def is_empty() -> bool:
            records = (await ledger_of(self.installed)).values()
            pods = (await self.admin.list("pods", NAMESPACE))["items"]
            return not pods and all(record.op == "release" for record in records)

        await self.installed.until("nothing is allocated", is_empty, limit_s=LIMIT_S)

    async def problems(self) -> list[str]:
        verifier = self.installed.verifier()
        return await lasting_problems(self.installed, verifier, namespace=NAMESPACE)


def write_overlay(directory: Path) -> Path:
    """The overlay of an operator: dev, the component, and a copy of its example."""
    example = yaml.safe_load((COMPONENT / "example.yaml").read_text())
    example["data"] = {
        "schedulers": "volcano,default-scheduler",
        "binders": f"{VOLCANO},system:kube-scheduler,{JANE}",
    }
    names = directory / "other-schedulers.yaml"
    names.write_text(yaml.safe_dump(example))
    return overlay(directory / "mine", OVERLAYS / "dev", [COMPONENT], files=[names])


@asynccontextmanager
async def refused_by_policy(site: Site, note: str) -> AsyncIterator[None]:
    """Let the API server refuse Bindings with an annotation, after mutating webhooks."""
    name = "refuses.example.com"
    group = "admissionregistration.k8s.io"
    refuses = f"!has(object.metadata.annotations) || !('{note}' in object.metadata.annotations)"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"]}
    policy = {
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": [{**rule, "resources": ["pods/binding"]}]},
            "validations": [{"expression": refuses, "message": "refused by a policy"}],
        },
    }
    bound = {
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    policies = f"validatingadmissionpolicies.{group}"
    bindings = f"validatingadmissionpolicybindings.{group}"
    await site.admin.create(policies, policy)
    await site.admin.create(bindings, bound)
    await site.admin.create("pods", plain_pod("probe"), NAMESPACE)

    async def is_active() -> bool:
        probe = binding("probe", NODES[0], annotations={note: "yes"})
        return "refused by a policy" in await site.post(BOB, probe, dryRun="All")

    await site.installed.until("the policy is active", is_active, limit_s=LIMIT_S)
    try:
        yield
    finally:
        await site.admin.delete(bindings, name)
        await site.admin.delete(policies, name)


def plain_pod(name: str) -> Obj:
    """A pod without devices that waits for a Binding."""
    pod = small_pod(name, schedulerName="volcano")
    del pod["spec"]["containers"][0]["resources"]
    pod["spec"]["containers"][0]["command"] = SLEEPER
    return pod


async def allow_to_bind(admin: KubeClient, users: Sequence[str]) -> None:
    """Give users the role of a scheduler."""
    group = "rbac.authorization.k8s.io"
    subjects = [{"apiGroup": group, "kind": "User", "name": user} for user in users]
    role = {"apiGroup": group, "kind": "ClusterRole", "name": "system:kube-scheduler"}
    document = {"metadata": {"name": "binders"}, "roleRef": role, "subjects": subjects}
    await admin.create(f"clusterrolebindings.{group}", document)


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    control_plane_or_skip()
    folder = tmp_path_factory.mktemp("o")  # sockets of a node: 107 bytes at most
    shortened = {"lease_s": str(LEASE_S), "fence_delay_s": "0.5"}
    scheduler = {**SPEC.settings["scheduler"], **shortened}
    spec = msgspec.structs.replace(SPEC, settings={**SPEC.settings, "scheduler": scheduler})
    mine = write_overlay(folder)
    async with (
        run_installed(folder / "site", spec, overlay=mine) as up,
        AsyncExitStack() as stack,
    ):
        clients = {}
        for user in (VOLCANO, JANE, BOB):
            access = Access.from_kubeconfig(up.plane.control.kubeconfig_for(user))
            clients[user] = await stack.enter_async_context(KubeClient(access))
        await allow_to_bind(up.client, list(clients))
        site = Site(up, clients)
        await site.hears_agents()
        yield site


@pytest.fixture(autouse=True)
async def cleared(site: Site) -> AsyncIterator[None]:
    yield
    await site.clear()


async def test_binding_of_another_scheduler_runs_with_its_share(site: Site) -> None:
    made = await site.waiting("a", memory_mib=2000)
    metadata = made["metadata"]
    # Volcano up to 1.15 copies all annotations of the pod, among them those that others wrote.
    copied = {**metadata["annotations"], keys.FENCE: "x/1", keys.ALLOCATION: "copied"}
    document = binding("a", NODES[0], uid=metadata["uid"], annotations=copied)
    assert await site.post(VOLCANO, document) == ""
    await site.runs("a")
    pod = await site.installed.pod_document("a")
    assert keys.FENCE not in pod["metadata"]["annotations"]
    site.installed.verifier().verify(
        pod["metadata"]["annotations"][keys.ALLOCATION], pod_uid=metadata["uid"], node=NODES[0]
    )

    async def is_shown() -> bool:
        return "2000" in await site.installed.container_log("a", "main")

    await site.installed.until("the container shows its limit", is_shown, limit_s=LIMIT_S)
    assert await site.problems() == []


async def test_kubectl_creates_a_binding_with_a_share(site: Site, tmp_path: Path) -> None:
    await site.waiting("a")
    file = tmp_path / "binding.json"
    forged = binding("a", NODES[1], annotations={keys.ALLOCATION: "forged"})
    file.write_text(json.dumps(forged))
    control = site.installed.plane.control

    def create(user: str, *options: str) -> list[str]:
        login = f"--kubeconfig={control.kubeconfig_for(user)}"
        kubectl = [str(control.programs.path("kubectl")), login]
        return [*kubectl, "create", "--validate=false", "-f", str(file), *options]

    denied = await anyio.run_process(create(BOB), check=False)
    assert denied.returncode != 0
    assert b"are written by its scheduler alone" in denied.stderr
    await anyio.run_process(create(JANE, "--dry-run=server"))
    pod = await site.installed.pod_document("a")
    assert "nodeName" not in pod["spec"]
    assert await site.records_of(pod["metadata"]["uid"]) == []
    await anyio.run_process(create(JANE))
    await site.runs("a")
    assert await site.problems() == []


async def test_binder_may_not_write_an_allocation_elsewhere(site: Site) -> None:
    """The exception is for Bindings alone."""
    await site.waiting("a")
    group = "rbac.authorization.k8s.io"
    subject = {"apiGroup": group, "kind": "User", "name": JANE}
    role = {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"}
    document = {"metadata": {"name": "jane-admin"}, "roleRef": role, "subjects": [subject]}
    await site.admin.create(f"clusterrolebindings.{group}", document)
    forged = {"metadata": {"annotations": {keys.ALLOCATION: "forged"}}}
    with pytest.raises(StatusError, match="403"):
        await site.clients[JANE].patch("pods", "a", forged, namespace=NAMESPACE)


async def test_refusal_is_the_answer_to_the_binding_and_reserves_nothing(site: Site) -> None:
    made = await site.waiting("a", memory_mib=20_000)
    other = await site.waiting("b", memory_mib=20_000)
    third = await site.waiting("c", memory_mib=20_000)
    assert await site.post(JANE, binding("a", NODES[0])) == ""
    assert await site.post(JANE, binding("b", NODES[0])) == ""
    error = await site.post(JANE, binding("c", NODES[0]))
    assert 'admission webhook "bindings.hami.io" denied the request' in error
    assert f"node {NODES[0]}: CardInsufficientMemory: 20000 MiB wanted" in error
    assert await site.records_of(third["metadata"]["uid"]) == []
    assert await site.post(JANE, binding("c", NODES[1])) == ""
    for name in ("a", "b", "c"):
        await site.runs(name)
    assert await site.problems() == []
    assert made["metadata"]["uid"] != other["metadata"]["uid"]


async def test_binding_that_the_api_server_refuses_returns_its_share(site: Site) -> None:
    made = await site.waiting("a")
    stale = binding("a", NODES[0], resourceVersion="1")
    assert "Precondition failed" in await site.post(JANE, stale)
    assert await site.records_of(made["metadata"]["uid"]) == []
    # Refused after our answer: by a policy, which sees what the webhook has made of the Binding.
    async with refused_by_policy(site, "refused"):
        refused = binding("a", NODES[0], annotations={"refused": "yes"})
        assert "refused by a policy" in await site.post(JANE, refused)
        # The lease may end before this test looks.
        assert await site.records_of(made["metadata"]["uid"]) in (["reserve"], ["release"])
        await site.until_released(made["metadata"]["uid"])
    assert await site.post(JANE, binding("a", NODES[1])) == ""
    await site.runs("a")
    assert await site.problems() == []


async def test_pods_of_the_default_scheduler_get_exact_shares(site: Site) -> None:
    """It counts sums, and so tries more whole devices than are idle.

    It places no pod with a resource that nodes do not offer, and a whole device includes its
    compute: the nodes get that amount here by hand.
    """
    amounts = {"nvidia.com/gpucores": "200"}
    for node in NODES:
        status = {"status": {"capacity": amounts, "allocatable": amounts}}
        await site.admin.patch("nodes", node, status, subresource="status")
    await site.waiting("small")
    assert await site.post(JANE, binding("small", NODES[0])) == ""
    await start_default_scheduler(site.installed)
    names = [f"card-{number}" for number in range(4)]
    try:
        for name in names:
            pod = small_pod(name, schedulerName="default-scheduler")
            container = pod["spec"]["containers"][0]
            container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
            # It would prefer the node that has the image, whether or not a device is idle there.
            container["image"] = name
            made = await site.admin.create("pods", pod, NAMESPACE)
            assert made["spec"]["schedulerName"] == "default-scheduler"
            assert made["metadata"]["labels"][keys.MANAGED_LABEL] == "true"
        left: set[str] = set()

        async def three_run() -> bool:
            nonlocal left
            left = {name for name in names if not await site.installed.pod_is(name, "Running")}
            return len(left) == 1

        await site.installed.until("three pods run", three_run, limit_s=LIMIT_S)
        (last,) = left

        async def is_shown() -> bool:
            conditions = (await site.installed.pod(last)).status.conditions or []
            return any("CardInsufficientMemory" in one.message for one in conditions)

        await site.installed.until("the pod shows the reason", is_shown, limit_s=LIMIT_S)
        assert await site.problems() == []
        await site.admin.delete("pods", "small", NAMESPACE)
        await site.runs(last)
        assert await site.problems() == []
    finally:
        await site.installed.processes[DEFAULT_SCHEDULER].stop()


async def test_race_of_three_schedulers_and_a_crash_allocates_nothing_twice(site: Site) -> None:
    """Two others and ours want more than there is; the scheduler is killed in the middle."""
    memory_mib = 9_000
    pods: dict[str, Obj] = {}
    for number in range(12):
        name = f"theirs-{number}"
        pods[name] = await site.waiting(name, memory_mib=memory_mib)
    errors: dict[str, str] = {}

    async def try_to_bind(name: str, user: str, node: str) -> None:
        document = binding(name, node, uid=pods[name]["metadata"]["uid"])
        errors[name] = await site.post(user, document)

    async def one_round() -> None:
        async with anyio.create_task_group() as group:
            for number, name in enumerate(pods):
                if errors.get(name) == "":
                    continue
                for user in (VOLCANO, JANE):  # both want every pod
                    group.start_soon(try_to_bind, name, user, NODES[number % len(NODES)])

    for number in range(6):
        pod = small_pod(f"ours-{number}", memory_mib=memory_mib, schedulerName="hami-scheduler")
        await site.admin.create("pods", pod, NAMESPACE)
    process = site.installed.processes["scheduler"]
    async with anyio.create_task_group() as group:
        group.start_soon(one_round)
        await anyio.sleep(0.15)
        await process.kill()
    process.start()
    await site.installed.ready("scheduler")

    # Two fit on each of the four cards: eight pods have one, and no other ever will.
    async def is_full() -> bool:
        await one_round()
        placed = [pod for pod in await site.installed.pods() if pod.spec.node_name]
        return len(placed) == 8

    await site.installed.until("eight pods are placed", is_full, limit_s=LIMIT_S)

    assert await site.problems() == []
    assert len([pod for pod in await site.installed.pods() if pod.spec.node_name]) == 8


async def test_only_bindings_of_binders_wait_for_the_scheduler(site: Site) -> None:
    await site.waiting("a")
    for name in ("b", "c"):
        await site.admin.create("pods", plain_pod(name), NAMESPACE)
    scheduler = site.installed.processes["scheduler"]
    await scheduler.kill()
    try:
        assert 'failed calling webhook "bindings.hami.io"' in await site.post(
            JANE, binding("a", NODES[0])
        )
        assert "failed calling webhook" in await site.post(JANE, binding("b", NODES[0]))
        assert await site.post(BOB, binding("c", NODES[0])) == ""
        await site.installed.until(
            "c runs", partial(site.installed.pod_is, "c", "Running"), limit_s=LIMIT_S
        )
    finally:
        scheduler.start()
        await site.installed.ready("scheduler")
    await site.hears_agents()
    assert await site.post(JANE, binding("a", NODES[0])) == ""
    assert await site.post(JANE, binding("b", NODES[0])) == ""
    await site.runs("a")
    assert await site.problems() == []
