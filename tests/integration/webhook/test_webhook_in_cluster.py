# SPDX-License-Identifier: Apache-2.0
"""The webhook behind a simulated API server, registered by the configuration it renders itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from hami_common.errors import Denied, HamiError
from hami_common.pods import annotations as keys
from hami_common.runtime import kubeio
from hami_sim.apiserver import ApiServer, Settings
from hami_sim.certs import CertificateAuthority
from hami_webhook.core.mutate import AdmissionPolicy
from hami_webhook.shell.render import FLAG, render
from tests.support.admission import asking_pod
from tests.support.webhook import RunningWebhook, run_webhook

pytestmark = pytest.mark.anyio
PODS = "/api/v1/namespaces/team-a/pods"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


@asynccontextmanager
async def cluster(
    tmp_path: Path, *flags: str, policy: AdmissionPolicy | None = None
) -> AsyncIterator[tuple[kubeio.KubeClient, RunningWebhook]]:
    async with (
        ApiServer(Settings(controllers=False)) as server,
        kubeio.connect(str(server.kubeconfig(tmp_path / "kubeconfig"))) as api,
        run_webhook(
            tmp_path / "tls", CertificateAuthority(), policy=policy or AdmissionPolicy()
        ) as webhook,
    ):
        await api.create("/api/v1/namespaces", b'{"metadata":{"name":"team-a"}}')
        for namespace in ("team-a", "kube-system"):
            path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
            await api.create(path, b'{"metadata":{"name":"default"}}')
        authority = str(tmp_path / "tls" / "ca.crt")
        text = render([FLAG, "--url", webhook.url, "--ca-file", authority, *flags])
        await api.create(WEBHOOKS, msgspec.json.encode(yaml.safe_load(text)))
        yield api, webhook


async def create(api: kubeio.KubeClient, pod: dict[str, Any]) -> dict[str, Any]:
    created: dict[str, Any] = msgspec.json.decode(await api.create(PODS, msgspec.json.encode(pod)))
    return created


async def unreachable(api: kubeio.KubeClient) -> None:
    """Let the API server call the webhook where nothing answers."""
    document = msgspec.json.decode(await api.get(f"{WEBHOOKS}/hami-webhook"))
    for entry in document["webhooks"]:
        entry["clientConfig"]["url"] = "https://127.0.0.1:1/mutate"
    await api.replace(f"{WEBHOOKS}/hami-webhook", msgspec.json.encode(document))


def metadata_of(pod: dict[str, Any]) -> dict[str, Any]:
    """Metadata that a user copies from a live pod."""
    return {key: pod["metadata"][key] for key in ("namespace", "labels", "annotations")}


def idle_pod(name: str) -> dict[str, Any]:
    pod = asking_pod(name)
    del pod["spec"]["containers"][0]["resources"]
    return pod


async def test_pod_with_devices_is_prepared_and_others_bypass_the_webhook(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, webhook):
        plain = await create(api, idle_pod("plain"))
        assert plain["spec"]["schedulerName"] == "default-scheduler"
        ours = await create(api, asking_pod("train", gpu="1", gpumem="3000"))
        assert ours["spec"]["schedulerName"] == "hami-scheduler"
        assert ours["metadata"]["labels"][keys.MANAGED_LABEL] == "true"
        assert ours["metadata"]["annotations"][keys.TRACEPARENT]
        name = "hami_webhook_admissions_total"
        assert webhook.sample(name, operation="create", outcome="changed") == 1
        assert webhook.sample(name, operation="create", outcome="allowed") == 0


async def test_label_of_a_namespace_switches_its_pods_to_claims(tmp_path: Path) -> None:
    policy = AdmissionPolicy(dra_enabled=True)
    async with cluster(tmp_path, "--with-modes", policy=policy) as (api, webhook):
        plain = await create(api, asking_pod("plain", gpu="1"))
        assert "resourceClaims" not in plain["spec"]
        label = {"metadata": {"labels": {keys.ALLOCATION_MODE: "dra"}}}
        await api.patch("/api/v1/namespaces/team-a", msgspec.json.encode(label))
        pods = [await create(api, asking_pod(f"p{n}", gpu="1", gpumem="3000")) for n in range(2)]
        names = set()
        for pod in pods:
            (entry,) = pod["spec"]["resourceClaims"]
            names.add(entry["resourceClaimName"])
            (container,) = pod["spec"]["containers"]
            use = {"name": "hami", "request": "main-nvidia"}
            assert container["resources"] == {"claims": [use]}
            assert pod["metadata"]["labels"][keys.MANAGED_LABEL] == "true"
        assert len(names) == 2
        # The YAML of a live pod, as its owner would apply it again.
        again = await create(api, pods[0] | {"metadata": {**metadata_of(pods[0]), "name": "again"}})
        assert again["spec"]["resourceClaims"][0]["resourceClaimName"] not in names
        name = "hami_webhook_admissions_total"
        assert webhook.sample(name, operation="create", outcome="changed") == 4


async def test_refusal_reaches_the_user_with_its_message(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, _):
        with pytest.raises(Denied) as caught:
            await create(api, asking_pod("train", gpu="1", gpumem="3Gi"))
        assert "the unit is MiB, not bytes: write 3072" in str(caught.value)


async def test_pod_of_kube_system_is_prepared(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, webhook):
        pod = asking_pod("plugin-test")
        pod["metadata"]["namespace"] = "kube-system"
        made = msgspec.json.decode(
            await api.create(PODS.replace("team-a", "kube-system"), msgspec.json.encode(pod))
        )
        assert made["spec"]["schedulerName"] == "hami-scheduler"
        assert made["metadata"]["labels"][keys.MANAGED_LABEL] == "true"
        name = "hami_webhook_admissions_total"
        assert webhook.sample(name, operation="create", outcome="changed") == 1


async def test_essential_pod_of_kube_system_does_not_need_the_webhook(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, webhook):
        await unreachable(api)
        pod = idle_pod("coredns")
        pod["metadata"]["namespace"] = "kube-system"
        pod["spec"]["priorityClassName"] = "system-cluster-critical"
        system_pods = PODS.replace("team-a", "kube-system")
        await api.create(system_pods, msgspec.json.encode(pod))
        label = {"metadata": {"labels": {"patched": "yes"}}}
        await api.patch(f"{system_pods}/coredns", msgspec.json.encode(label))
        assert webhook.sample("hami_webhook_admission_seconds_count") == 0


@pytest.mark.parametrize("name", ["MR-V100-poddemo", "npu_pod"])
async def test_invalid_container_name_is_the_only_error_of_the_answer(
    tmp_path: Path, name: str
) -> None:
    async with cluster(tmp_path) as (api, _):
        pod = asking_pod("demo")
        pod["spec"]["containers"][0]["name"] = name
        with pytest.raises(Denied) as caught:
            await create(api, pod)
        assert caught.value.status == 422
        assert f'spec.containers[0].name: Invalid value: "{name}"' in str(caught.value)
        assert "volume" not in str(caught.value).lower()


async def test_container_name_that_is_too_long_is_named_in_the_answer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, _):
        pod = asking_pod("demo")
        pod["spec"]["containers"][0]["name"] = "c" * 64
        with pytest.raises(Denied) as caught:
            await create(api, pod)
        assert str(caught.value).endswith(
            "request.object: is not a valid pod: Expected `str` of length <= 63 - at "
            "`$.spec.containers[0].name`"
        )


async def test_forged_annotation_is_refused_on_update_of_managed_pods_only(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, _):
        await create(api, asking_pod("train"))
        forged = {"metadata": {"annotations": {keys.ALLOCATION: "mine"}}}
        with pytest.raises(Denied) as caught:
            await api.patch(f"{PODS}/train", msgspec.json.encode(forged))
        assert caught.value.status == 403
        harmless = {"metadata": {"annotations": {"team": "a"}}}
        await api.patch(f"{PODS}/train", msgspec.json.encode(harmless))


async def test_unavailable_webhook_blocks_only_pods_with_devices(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, webhook):
        await unreachable(api)
        with pytest.raises(HamiError):
            await create(api, asking_pod("train"))
        await create(api, idle_pod("plain"))
        assert webhook.sample("hami_webhook_admission_seconds_count") == 0
