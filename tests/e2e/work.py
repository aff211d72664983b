# SPDX-License-Identifier: Apache-2.0
"""Executes all interactions of an installation's services with the Kubernetes API, once.

Quota, resize and release in a tenant's namespace, preemption and gangs in another, a device that
fails twice, certificates and keys that are renewed. The results are kept for the tests' assertions.
Memory in MiB.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
from msgspec import Struct

from hami_common.runtime import kubeio
from hami_common.runtime.clock import SystemClock
from hami_sim.cluster import AGENTS_NAMESPACE, SYSTEM_NAMESPACE, Document
from hamictl.commands.bootstrap import Installation, create_missing
from tests.e2e.conftest import small_pod
from tests.support.checker import inventory_of
from tests.support.installed import Installed
from tests.support.rbac import audited

NAMESPACE = "tenant"
PLAN = Installation(namespace=SYSTEM_NAMESPACE, service="hami-webhook", webhook="hami-webhook")
LIMIT_S = 90.0
LARGE_MIB = 20_000
"""One of these fits on a device, two do not."""


class Worked(Struct, kw_only=True):
    """Observations during the work."""

    first: Document = {}
    """History of the tenant's first pod, once it ran."""
    refusal: str = ""
    """Refusal of the second pod while the quota was used up."""
    resized: list[tuple[int, Document]] = []
    """Answers to a resize: of a user without the right, and of one with it."""
    seen_mib: int = 0
    """Memory of the first pod's share in its last ledger record."""
    second: Document = {}
    """History of the second pod, once capacity was free."""
    read: int = 0
    """Status of the registry's answer to a tenant about its allocations."""
    leases: tuple[str, ...] = ()
    """Leases of background tasks that the registry lists to an administrator."""
    renewed: list[str] = []
    """Output of the renewal of keys and certificates."""


async def work(site: Installed) -> Worked:
    """Execute the work; each step has its deadline."""
    worked = Worked()
    for account in ("reader", "stranger", "admin"):
        await site.client.create("serviceaccounts", {"metadata": {"name": account}}, NAMESPACE)
    await bind(site, "RoleBinding", "edit", "reader")
    await bind(site, "ClusterRoleBinding", "cluster-admin", "admin")
    await _quota(site, worked)
    await _preemption(site)
    await _gangs(site)
    await _faults(site)
    await _renewal(site, worked)
    return worked


async def bind(site: Installed, kind: str, role: str, account: str) -> None:
    """Give a role to an account of the tenant's namespace, everywhere or there."""
    plural = "clusterrolebindings" if kind == "ClusterRoleBinding" else "rolebindings"
    group = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": kind,
        "metadata": {"name": f"{account}-{role}"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
    }
    where = "" if kind == "ClusterRoleBinding" else f"/namespaces/{NAMESPACE}"
    await site.client.call("POST", f"/apis/{group}/v1{where}/{plural}", body=binding)


async def until_runs(site: Installed, name: str, namespace: str) -> Document:
    """Return the pod's history once its containers have printed and the node has reported it."""
    story: Document = {}

    async def runs() -> bool:
        nonlocal story
        story = await site.story_of(name, namespace=namespace)
        has_printed = all(container["stdout"] for container in story["containers"])
        return story["phase"] == "Running" and "running" in story["states"] and has_printed

    await site.until(f"{name} runs", runs, limit_s=LIMIT_S)
    return story


async def until_told(site: Installed, name: str, text: str, namespace: str) -> str:
    """Return the pod's condition once it has the text."""
    said = ""

    async def told() -> bool:
        nonlocal said
        pod = await site.pod(name, namespace=namespace)
        said = " ".join(one.message for one in pod.status.conditions or [])
        return text in said

    await site.until(f"{name} is told: {text}", told, limit_s=LIMIT_S)
    return said


async def until_gone(site: Installed, name: str, namespace: str) -> None:
    """Delete a pod and wait for it."""
    await site.delete_pod(name, namespace=namespace)

    async def gone() -> bool:
        return await site.pod_is_gone(name, namespace=namespace)

    await site.until(f"{name} is gone", gone, limit_s=LIMIT_S)


async def _quota(site: Installed, worked: Worked) -> None:
    quota = {
        "metadata": {"name": "gpu"},
        "spec": {"hard": {"limits.nvidia.com/gpumem": "10k"}},
    }
    await site.client.create("resourcequotas", quota, NAMESPACE)
    await site.create_pod(small_pod("first", memory_mib=4000), namespace=NAMESPACE)
    await until_runs(site, "first", NAMESPACE)
    wish = {"namespace": NAMESPACE, "pod": "first", "memory_mib": 4500}
    for account in ("stranger", "admin"):
        token = await site.token(account, namespace=NAMESPACE)
        worked.resized.append(await _resize(site, wish, token))
    worked.first = await until_runs(site, "first", NAMESPACE)
    placed = (await site.ledger_of(worked.first["node"], worked.first["uid"]))[-1][1]
    worked.seen_mib = placed.containers[0].shares[0].memory_mib
    await site.create_pod(small_pod("second", memory_mib=8000), namespace=NAMESPACE)
    worked.refusal = await until_told(site, "second", "ResourceQuotaNotFit", NAMESPACE)
    await until_gone(site, "first", NAMESPACE)
    worked.second = await until_runs(site, "second", NAMESPACE)
    token = await site.token("reader", namespace=NAMESPACE)
    worked.read, _ = await site.registry(f"/v1/allocations?namespace={NAMESPACE}", token)
    admin = await site.token("admin", namespace=NAMESPACE)
    status, text = await site.registry("/v1/system", admin)
    assert status == 200, text
    worked.leases = tuple(one["name"] for one in json.loads(text)["leases"])


async def _resize(site: Installed, wish: Document, token: str) -> tuple[int, Document]:
    """Return the answer once the scheduler's watch has delivered that the pod runs."""
    answer: tuple[int, Document] = (0, {})

    async def decided() -> bool:
        nonlocal answer
        answer = await _post(site, "/v1/resize", wish, token)
        return "wait until all its containers run" not in str(answer[1])

    await site.until("the scheduler knows that the pod runs", decided, limit_s=LIMIT_S)
    return answer


async def _post(site: Installed, path: str, body: Document, token: str) -> tuple[int, Document]:
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{site.url('scheduler')}{path}"
    async with site.session.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def _preemption(site: Installed) -> None:
    for name, value in (("low", -10), ("high", 1000)):
        path = "/apis/scheduling.k8s.io/v1/priorityclasses"
        await site.client.call("POST", path, body={"metadata": {"name": name}, "value": value})
    names = [f"low-{number}" for number in range(3)]
    for name in names:
        pod = small_pod(name, memory_mib=LARGE_MIB, priorityClassName="low")
        await site.create_pod(pod)
    for name in names:
        await until_runs(site, name, "default")
    await site.create_pod(small_pod("urgent", memory_mib=LARGE_MIB, priorityClassName="high"))
    await until_runs(site, "urgent", "default")


async def _gangs(site: Installed) -> None:
    """Create pods of groups whose kinds are not installed: they wait."""
    labels = {
        "scheduling.x-k8s.io": {"labels": {"scheduling.x-k8s.io/pod-group": "g"}},
        "scheduling.volcano.sh": {"annotations": {"scheduling.k8s.io/group-name": "g"}},
    }
    for number, more in enumerate(labels.values()):
        pod = small_pod(f"gang-{number}", memory_mib=100)
        pod["metadata"].update(more)
        await site.create_pod(pod)

    async def asked() -> bool:
        log = audited(site.plane.audit_log, namespaces=[SYSTEM_NAMESPACE])
        groups = {one.group for one in log.allowed if one.resource == "podgroups"}
        return groups == labels.keys()

    await site.until("groups of pods are asked for", asked, limit_s=LIMIT_S)
    for number in range(len(labels)):
        await until_gone(site, f"gang-{number}", "default")


async def _faults(site: Installed) -> None:
    """Fail the device of a running pod twice: the second raises the count of the first Event."""
    story = await until_runs(site, "second", NAMESPACE)
    uuid = story["containers"][0]["devices"][0]["uuid"]
    index = next(
        device.index
        for node in await inventory_of(site)
        for device in node.devices
        if device.uuid == uuid
    )
    for count in (1, 2):
        site.hardware[story["node"]].lose(index)
        await _until_event(site, "DeviceUnhealthy", count)
        site.hardware[story["node"]].restore(index)
        await _until_event(site, "DeviceRecovered", count)


async def _until_event(site: Installed, reason: str, count: int) -> None:
    async def told() -> bool:
        events = (await site.client.list("events", NAMESPACE))["items"]
        return any(event["reason"] == reason and event["count"] == count for event in events)

    await site.until(f"{reason} is told {count} times", told, limit_s=LIMIT_S)


async def _renewal(site: Installed, worked: Worked) -> None:
    """Renew shortly before all expires, and after the public part was changed by hand."""
    for namespace, name, data in (
        (SYSTEM_NAMESPACE, "hami-trusted-keys", {}),
        (SYSTEM_NAMESPACE, "hami-bus-accounts", {"accounts.conf": ""}),
        (AGENTS_NAMESPACE, "hami-trusted-keys", {}),
    ):
        path = f"/api/v1/namespaces/{namespace}/configmaps/{name}"
        found: dict[str, Any] = await site.client.call("GET", path)
        found["data"] = data
        await site.client.call("PUT", path, body=found)
    late = datetime.fromtimestamp(SystemClock().now_s(), tz=UTC) + PLAN.authority_valid
    login = await site.plane.login("bootstrap", "renewal")
    async with kubeio.connect(str(login), start_timeout_s=LIMIT_S) as kube:
        with anyio.fail_after(LIMIT_S):
            worked.renewed = await create_missing(kube, PLAN, now=late - timedelta(days=10))


async def events_of(site: Installed, environment: Mapping[str, str]) -> list[Document]:
    """Return hamictl's output for the second pod's events."""
    told = await site.hamictl(
        *("events", "--from", "1", "--pod", f"{NAMESPACE}/second", "-o", "json"), env=environment
    )
    return [json.loads(line) for line in told.stdout.splitlines()]
