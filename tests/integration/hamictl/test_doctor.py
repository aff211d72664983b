# SPDX-License-Identifier: Apache-2.0
"""Broken set-ups, each with one fault: the doctor names it, and nothing else that is not so.

The hosts are directories that look like a node's root, the cluster is the simulated API server with
a webhook of its own. Costs about 6 s.
"""

import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp.web
import anyio.to_thread
import pytest
import tomli_w
import yaml
from msgspec.structs import replace

from hami_common.admission.configuration import Client, mutating_webhook_configuration
from hami_common.dra.names import CLAIMS_CDI, CLASSES, pool_name
from hami_common.errors import Conflict
from hami_common.events.asking import CheckAnswer, Finding
from hami_common.events.inventory import NodeDevices
from hami_common.runtime import kubeio
from hami_nodeagent.settings import DraSettings
from hami_nodeagent.shell.hostcheck import HostCheck
from hami_sim.apiserver import ApiServer, Settings
from hami_sim.apiserver.auth import RequestInfo, User
from hami_sim.apiserver.discovery import VERSION
from hami_sim.certs import CertificateAuthority
from hamictl.checks import Checks, ClusterDoctor, diagnose, from_agents
from hamictl.commands.bootstrap import Installation, create_missing
from tests.support.hosts import ENVVAR, dpkg_status, make_host, write
from tests.unit.nodeagent.shell.support import make_site

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
NODE = "node-1"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
NOW_S = datetime(2026, 3, 1, tzinfo=UTC).timestamp()
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def no_devices(root: Path) -> None:
    (root / "proc/driver/nvidia/version").unlink()


HOST_FAULTS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    # name: (fault to inject, check, verdict, a word of the finding)
    "driver-not-loaded": (no_devices, "driver", "FAIL", "not loaded"),
    "driver-too-old": (
        lambda root: write(
            root / "proc/driver/nvidia/version", "NVRM: NVIDIA Kernel Module  418.152  x\n"
        ),
        "driver",
        "FAIL",
        "418.152",
    ),
    "no-runtime-handler": (
        lambda root: write(root / "etc/containerd/config.toml", "version = 2\n"),
        "runtime-handler",
        "FAIL",
        "no handler nvidia",
    ),
    "toolkit-takes-environment": (
        lambda root: write(root / "etc/nvidia-container-runtime/config.toml", f"{ENVVAR} = true\n"),
        "toolkit-envvar",
        "FAIL",
        "NVIDIA_VISIBLE_DEVICES",
    ),
    "toolkit-takes-environment-by-default": (
        lambda root: write(root / "etc/nvidia-container-runtime/config.toml", "x = 1\n"),
        "toolkit-envvar",
        "FAIL",
        "NVIDIA_VISIBLE_DEVICES",
    ),
    "toolkit-takes-mounts": (
        lambda root: write(
            root / "etc/nvidia-container-runtime/config.toml",
            f"{ENVVAR} = false\naccept-nvidia-visible-devices-as-volume-mounts = true\n",
        ),
        "toolkit-envvar",
        "FAIL",
        "mounts them by name",
    ),
    "no-cdi-specification": (
        lambda root: (root / "etc/cdi/nvidia.yaml").unlink(),
        "cdi",
        "FAIL",
        "no CDI specification",
    ),
    "cdi-turned-off": (
        lambda root: write(
            root / "etc/containerd/config.toml",
            '[plugins."x"]\nenable_cdi = false\n[plugins."x".containerd.runtimes.nvidia]\na = 1\n',
        ),
        "cdi",
        "FAIL",
        "turns CDI off",
    ),
    "second-plugin-socket": (
        lambda root: write(root / "var/lib/kubelet/device-plugins/nvidia-gpu.sock", ""),
        "second-plugin",
        "FAIL",
        "nvidia-gpu.sock",
    ),
    "toolkit-too-old": (
        lambda root: write(root / "var/lib/dpkg/status", dpkg_status("1:1.5.1-1")),
        "toolkit-version",
        "FAIL",
        "1.5",
    ),
    "cgroup-v1": (
        lambda root: (root / "sys/fs/cgroup/cgroup.controllers").unlink(),
        "cgroups",
        "WARN",
        "1.35",
    ),
    "glibc-too-old": (
        lambda root: write(
            root / "usr/lib64/libc.so.6", "GNU C Library stable release version 2.12, by R"
        ),
        "glibc",
        "FAIL",
        "2.12",
    ),
}


async def look_at(
    root: Path, *, served: bool = True, devices: bool = True, **more: Any
) -> list[Finding]:
    """Return the findings of this host's agent; ``more``: settings."""
    site = make_site(
        root / "state",
        injection="cdi",
        host_root=str(root),
        host_proc=str(root / "proc"),
        device_plugin_dir=str(root / "var/lib/kubelet/device-plugins"),
        **more,
    )
    site.picture.note_served("nvidia", served=served)
    if not devices:
        site.picture.canonical_by_vendor["nvidia"] = NodeDevices(
            node=NODE, vendor="nvidia", boot_id="", seq=2, time_s=0, config_generation=1
        )
    check = HostCheck(site=site, resources={"nvidia.com/gpu": "nvidia"})
    return list(await check.check())


def bad(found: list[Finding]) -> list[tuple[str, str]]:
    return [(one.check, one.verdict) for one in found if one.verdict != "PASS"]


async def test_sound_host_has_no_finding(tmp_path: Path) -> None:
    await anyio.to_thread.run_sync(make_host, tmp_path)
    found = await look_at(tmp_path)
    assert bad(found) == []
    assert {one.check for one in found} == {
        *("kubelet", "second-plugin", "driver", "runtime-handler"),
        *("toolkit-envvar", "toolkit-version", "cdi", "glibc", "cgroups"),
    }


@pytest.mark.parametrize("name", HOST_FAULTS)
async def test_fault_of_a_host_is_named(tmp_path: Path, name: str) -> None:
    spoil, check, verdict, word = HOST_FAULTS[name]
    await anyio.to_thread.run_sync(make_host, tmp_path)
    spoil(tmp_path)
    found = await look_at(tmp_path, devices=name != "driver-not-loaded")
    assert bad(found) == [(check, verdict)]
    told = next(one for one in found if one.check == check)
    assert word in told.text
    assert told.fix
    assert told.node


@pytest.mark.parametrize(
    ("setting", "expected"), [("", []), ("true", ["PASS"]), ("false", ["FAIL"])]
)
async def test_cdi_for_claims_is_judged_by_the_runtimes_setting(
    tmp_path: Path, setting: str, expected: list[str]
) -> None:
    await anyio.to_thread.run_sync(make_host, tmp_path)
    text = f'[plugins."x"]\nenable_cdi = {setting}\n' if setting else "version = 3\n"
    await anyio.to_thread.run_sync(write, tmp_path / "etc/containerd/config.toml", text)
    found = await look_at(tmp_path, dra=DraSettings(enabled=True))
    assert [one.verdict for one in found if one.check == CLAIMS_CDI] == expected
    off = await look_at(tmp_path)
    assert CLAIMS_CDI not in {one.check for one in off}


async def test_plugin_that_kubelet_did_not_take_is_named(tmp_path: Path) -> None:
    await anyio.to_thread.run_sync(make_host, tmp_path)
    assert bad(await look_at(tmp_path, served=False)) == [("kubelet", "FAIL")]


async def test_unreadable_host_is_a_finding_and_not_a_pass(tmp_path: Path) -> None:
    found = await look_at(tmp_path / "nothing")
    assert {one.check for one in found if one.verdict == "PASS"} <= {"kubelet", "driver"}


# --- findings of agents and registry --------------------------------------------------------------

SOUND = Checks(
    time_s=NOW_S,
    version="1.0",
    items=(CheckAnswer(node=NODE, time_s=NOW_S, version="1.0"),),
    findings=(Finding(check="bus", verdict="PASS", text="all there"),),
)


def told(checks: Checks, *, own_version: str = "1.0", now_s: float = NOW_S) -> list[Finding]:
    return list(from_agents(checks, own_version=own_version, now_s=now_s))


def test_sound_answers_have_no_finding() -> None:
    assert bad(told(SOUND)) == []


def test_silent_agent_skewed_clocks_and_mixed_versions_are_named() -> None:
    assert bad(told(replace(SOUND, silent=("node-2",)))) == [("agent", "FAIL")]
    late = CheckAnswer(node=NODE, time_s=NOW_S - 90, version="1.0")
    found = told(replace(SOUND, items=(late,)))
    assert bad(found) == [("clock", "FAIL")]
    assert "90 s behind" in next(one for one in found if one.verdict == "FAIL").text
    assert bad(told(SOUND, now_s=NOW_S + 10)) == [("clock", "WARN")]
    assert bad(told(SOUND, own_version="0.9")) == [("versions", "WARN")]
    missing = Finding(check="bus", verdict="FAIL", text="stream HAMI_EVENTS: not found", fix="x")
    assert bad(told(replace(SOUND, findings=(missing,)))) == [("bus", "FAIL")]


def test_worst_comes_first_and_all_is_counted() -> None:
    found = diagnose(
        Finding(check=verdict.lower(), verdict=verdict, text="")
        for verdict in ("PASS", "FAIL", "WARN", "PASS")
    )
    assert [one.verdict for one in found.findings] == ["FAIL", "WARN", "PASS", "PASS"]
    assert (found.failed, found.warned, found.passed) == (1, 1, 2)


# --- the cluster ----------------------------------------------------------------------------------


class Cluster:
    """A simulated cluster with a webhook that assigns pods to this project's scheduler."""

    def __init__(self, kube: kubeio.KubeClient, authority: CertificateAuthority, url: str) -> None:
        self.kube = kube
        self.authority = authority
        self.url = url

    async def put(self, path: str, document: dict[str, Any]) -> None:
        try:
            await self.kube.create(path, json.dumps(document).encode())
        except Conflict:
            name = document["metadata"]["name"]
            await self.kube.patch(f"{path}/{name}", json.dumps(document).encode())

    async def configure(self, **client: str) -> None:
        """Point the API server at the webhook."""
        own = Client(url=self.url, ca_bundle=base64.b64encode(self.authority.pem).decode())
        where = replace(own, **client)
        document = mutating_webhook_configuration(["nvidia.com/gpu"], where)
        await self.put(HOOKS, document)

    async def add_scheduler(
        self, change: Callable[[dict[str, Any]], None], *, of: str = "base"
    ) -> None:
        """Add kube-scheduler's configuration of this directory, after a change."""
        text = (ROOT / "deploy/kustomize" / of / "kube-scheduler.yaml").read_text()
        document = yaml.safe_load(text)
        change(document)
        await self.put(
            "/api/v1/namespaces/hami-system/configmaps",
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "hami-kube-scheduler", "namespace": "hami-system"},
                "data": {"config.yaml": yaml.safe_dump(document)},
            },
        )

    def doctor(self, agents: Checks | None = SOUND, *, now_s: float = NOW_S) -> ClusterDoctor:
        return ClusterDoctor(self.kube, namespace="hami-system", now_s=now_s, agents=agents)


async def _answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
    review = await request.json()
    patch = [{"op": "add", "path": "/metadata/labels", "value": {"hami.io/managed": "true"}}]
    response = {
        "uid": review["request"]["uid"],
        "allowed": True,
        "patchType": "JSONPatch",
        "patch": base64.b64encode(json.dumps(patch).encode()).decode(),
    }
    return aiohttp.web.json_response(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    )


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    authority = CertificateAuthority()
    certificate, key, _ = authority.issue_files(tmp_path / "tls", ["127.0.0.1", "localhost"])
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ApiServer(Settings()))
        server.kubeconfig(tmp_path / "kubeconfig")
        kube = await stack.enter_async_context(kubeio.connect(str(tmp_path / "kubeconfig")))
        app = aiohttp.web.Application()
        app.router.add_post("/mutate", _answer)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        context = _serving(certificate, key)
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        port = runner.addresses[0][1]
        found = Cluster(kube, authority, f"https://127.0.0.1:{port}/mutate")
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        system = {"metadata": {"name": "hami-system", "labels": labels}}
        await found.put("/api/v1/namespaces", system)
        await found.configure()
        yield found


def _serving(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


async def test_sound_cluster_has_no_finding(cluster: Cluster) -> None:
    await cluster.add_scheduler(lambda _: None)
    await cluster.put("/api/v1/nodes", node(hami=True))
    found = await cluster.doctor().findings()
    assert bad(found) == []
    assert {one.check for one in found} >= {"webhook", "certificates", "kube-scheduler"}


async def test_agents_of_an_older_release_and_an_open_namespace_are_found(
    cluster: Cluster,
) -> None:
    labels = {"app.kubernetes.io/name": "hami-nodeagent"}
    old = {"metadata": {"name": "hami-nodeagent-nvidia", "labels": labels}, "spec": {}}
    await cluster.put("/apis/apps/v1/namespaces/hami-system/daemonsets", old)
    await cluster.kube.patch(
        "/api/v1/namespaces/hami-system",
        b'{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"privileged"}}}',
    )
    found = {one.verdict: one for one in await cluster.doctor().namespaces()}
    assert found.keys() == {"FAIL", "WARN"}
    assert found["FAIL"].fix == "kubectl -n hami-system delete daemonset hami-nodeagent-nvidia"
    assert found["WARN"].fix.endswith("pod-security.kubernetes.io/enforce=restricted")


def node(*, hami: bool, name: str = NODE) -> dict[str, Any]:
    labels = {"nvidia.com/gpu.present": "true"} | ({"hami.io/nvidia": "true"} if hami else {})
    return {"metadata": {"name": name, "labels": labels}}


async def test_nodes_without_label_or_agent_are_named(cluster: Cluster) -> None:
    await cluster.put("/api/v1/nodes", node(hami=False))
    await cluster.put("/api/v1/nodes", node(hami=True, name="node-9"))
    found = await cluster.doctor().nodes()
    assert sorted((one.check, one.node) for one in found) == [
        ("agent", "node-9"),
        ("node-labels", NODE),
    ]
    assert "kubectl label node node-1" in next(o.fix for o in found if o.check == "node-labels")


def daemonset(name: str, labels: dict[str, str], **pod: Any) -> dict[str, Any]:
    containers = [{"name": "plugin", "image": "plugin"}]
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers, **pod}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


async def with_hamis_label(cluster: Cluster) -> None:
    """An agent that accepts the label of HAMi's chart, and one node with that label of two."""
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["on"]}]}]
    await cluster.put("/api/v1/namespaces", {"metadata": {"name": "hami-agents"}})
    await cluster.put(
        "/apis/apps/v1/namespaces/hami-agents/daemonsets",
        daemonset(
            "hami-nodeagent-nvidia",
            {"app.kubernetes.io/name": "hami-nodeagent", "hami.io/vendor": "nvidia"},
            affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}},
        ),
    )
    chosen = node(hami=False)
    chosen["metadata"]["labels"]["gpu"] = "on"
    await cluster.put("/api/v1/nodes", chosen)
    await cluster.put("/api/v1/nodes", node(hami=False, name="node-9"))


async def test_nodes_are_checked_against_the_labels_that_the_agents_daemonset_selects(
    cluster: Cluster,
) -> None:
    await with_hamis_label(cluster)
    found = await cluster.doctor().nodes()
    assert [(one.check, one.node) for one in found] == [("node-labels", "node-9")]


async def test_node_that_both_systems_select_is_named(cluster: Cluster) -> None:
    await with_hamis_label(cluster)
    plugin = daemonset(
        "hami-device-plugin",
        {"app.kubernetes.io/component": "hami-device-plugin"},
        nodeSelector={"gpu": "on"},
    )
    await cluster.put("/apis/apps/v1/namespaces/kube-system/daemonsets", plugin)
    found = await cluster.doctor().nodes()
    assert [(one.check, one.node) for one in found] == [
        ("second-plugin", NODE),
        ("node-labels", "node-9"),
    ]


OPERATOR = "/apis/apps/v1/namespaces/gpu-operator/daemonsets"
DEPLOY = "nvidia.com/gpu.deploy.device-plugin"


async def with_gpu_operator(cluster: Cluster, **labels: str) -> None:
    """A node with an agent and these labels, and the operator's DaemonSets, as it creates them."""
    for namespace in ("gpu-operator", "hami-agents"):
        await cluster.put("/api/v1/namespaces", {"metadata": {"name": namespace}})
    ours = node(hami=True)
    ours["metadata"]["labels"] |= {
        DEPLOY: "true",
        "nvidia.com/gpu.deploy.mig-manager": "true",
        **labels,
    }
    await cluster.put("/api/v1/nodes", ours)
    for part, image in (
        ("device-plugin", "registry.example.com/nvidia/k8s-device-plugin:v0.17"),
        ("mig-manager", "registry.example.com/nvidia/cloud-native/k8s-mig-manager:v0.12"),
        ("dcgm-exporter", "registry.example.com/nvidia/k8s/dcgm-exporter:4.4"),
    ):
        document = daemonset(
            f"nvidia-{part}-daemonset",
            {"app": f"nvidia-{part}"},
            nodeSelector={f"nvidia.com/gpu.deploy.{part}": "true"},
        )
        document["spec"]["template"]["spec"]["containers"][0]["image"] = image
        await cluster.put(OPERATOR, document)


async def test_gpu_operators_plugin_and_mig_manager_are_named_with_the_labels_to_set(
    cluster: Cluster,
) -> None:
    await with_gpu_operator(cluster, **{"nvidia.com/mig.config": "all-disabled"})
    labels = "nvidia.com/gpu.deploy.mig-manager=false nvidia.com/mig.config-"
    found = await cluster.doctor().second_plugin()
    assert [(one.verdict, one.check, one.node, one.fix) for one in found] == [
        (
            "FAIL",
            "second-plugin",
            NODE,
            f"kubectl label --overwrite node {NODE} nvidia.com/gpu.deploy.device-plugin=false",
        ),
        (
            "FAIL",
            "second-plugin",
            NODE,
            f"kubectl label --overwrite node {NODE} {labels}",
        ),
    ]
    assert "gpu-operator/nvidia-device-plugin-daemonset" in found[0].text


async def test_gpu_operator_beside_ours_passes_with_these_labels(cluster: Cluster) -> None:
    await with_gpu_operator(
        cluster,
        **{
            "nvidia.com/gpu.deploy.device-plugin": "false",
            "nvidia.com/gpu.deploy.mig-manager": "false",
            "nvidia.com/mig.config": "all-disabled",
        },
    )
    found = await cluster.doctor().second_plugin()
    assert [(one.verdict, one.check) for one in found] == [("PASS", "second-plugin")]


async def test_plugin_without_the_operator_is_named_only_on_nodes_with_an_agent(
    cluster: Cluster,
) -> None:
    plugin = daemonset("plugin", {"app": "plugin"}, nodeSelector={"pool": "nvidia"})
    plugin["spec"]["template"]["spec"]["containers"][0]["image"] = "nvidia/k8s-device-plugin:1"
    await cluster.put("/apis/apps/v1/namespaces/kube-system/daemonsets", plugin)
    theirs = node(hami=False, name="node-9")
    theirs["metadata"]["labels"]["pool"] = "nvidia"
    await cluster.put("/api/v1/nodes", theirs)
    ours = node(hami=True)
    await cluster.put("/api/v1/nodes", ours)
    assert bad(await cluster.doctor().second_plugin()) == []
    ours["metadata"]["labels"]["pool"] = "nvidia"
    await cluster.put("/api/v1/nodes", ours)
    found = await cluster.doctor().second_plugin()
    assert bad(found) == [("second-plugin", "FAIL")]
    assert "kube-system/plugin" in found[0].text
    assert DEPLOY in found[0].fix


async def _away(cluster: Cluster) -> None:
    await cluster.configure(url="https://127.0.0.1:1/mutate")


async def _other_authority(cluster: Cluster) -> None:
    other = base64.b64encode(CertificateAuthority().pem).decode()
    await cluster.configure(ca_bundle=other)


async def _ignored(cluster: Cluster) -> None:
    document = mutating_webhook_configuration(
        ["nvidia.com/gpu"],
        Client(url=cluster.url, ca_bundle=base64.b64encode(cluster.authority.pem).decode()),
    )
    for hook in document["webhooks"]:
        hook["failurePolicy"] = "Ignore"
    await cluster.put(HOOKS, document)


async def _not_called(cluster: Cluster) -> None:
    document = mutating_webhook_configuration(
        ["amd.com/gpu"],
        Client(url=cluster.url, ca_bundle=base64.b64encode(cluster.authority.pem).decode()),
    )
    await cluster.put(HOOKS, document)


WEBHOOK_FAULTS: dict[str, tuple[Callable[[Cluster], Awaitable[None]], str]] = {
    "away": (_away, "does not reach the webhook"),
    "other-authority": (_other_authority, "does not trust the webhook"),
    "failures-ignored": (_ignored, "failurePolicy Ignore"),
    "not-called": (_not_called, "bypasses the webhook"),
}


@pytest.mark.parametrize("name", WEBHOOK_FAULTS)
async def test_fault_of_the_webhook_is_named(cluster: Cluster, name: str) -> None:
    spoil, word = WEBHOOK_FAULTS[name]
    await spoil(cluster)
    found = [one for one in await cluster.doctor().webhook() if one.verdict != "PASS"]
    assert found, "nothing was found"
    assert {one.verdict for one in found} == {"FAIL"}
    assert word in found[0].text
    assert found[0].fix


async def test_certificates_that_end_or_do_not_match_are_named(cluster: Cluster) -> None:
    where = Client(namespace="hami-system", service="hami-webhook")
    await cluster.put(HOOKS, mutating_webhook_configuration(["nvidia.com/gpu"], where))
    plan = Installation(namespace="hami-system", service="hami-webhook", webhook="hami-webhook")
    made = datetime.fromtimestamp(NOW_S, tz=UTC)
    await create_missing(cluster.kube, plan, now=made)
    assert bad(await cluster.doctor().certificates()) == []
    soon_s = NOW_S + timedelta(days=85).total_seconds()
    # Every certificate that was made ends: the webhook's, the bus's, the registry's.
    assert set(bad(await cluster.doctor(now_s=soon_s).certificates())) == {("certificates", "WARN")}
    over_s = NOW_S + timedelta(days=91).total_seconds()
    assert set(bad(await cluster.doctor(now_s=over_s).certificates())) == {("certificates", "FAIL")}
    other = mutating_webhook_configuration(
        ["nvidia.com/gpu"],
        replace(where, ca_bundle=base64.b64encode(CertificateAuthority().pem).decode()),
    )
    await cluster.put(HOOKS, other)
    found = await cluster.doctor().certificates()
    assert "did not issue" in " ".join(one.text for one in found if one.verdict == "FAIL")


def _no_extender(document: dict[str, Any]) -> None:
    del document["extenders"]


def _sampled(document: dict[str, Any]) -> None:
    del document["percentageOfNodesToScore"]


def _ignorable(document: dict[str, Any]) -> None:
    document["extenders"][0]["ignorable"] = True


def _no_profile(document: dict[str, Any]) -> None:
    document["profiles"] = [{"schedulerName": "default-scheduler"}]


def _unmanaged(document: dict[str, Any]) -> None:
    extender = document["extenders"][0]
    extender["managedResources"] = [
        one for one in extender["managedResources"] if one["name"] != "nvidia.com/gpumem"
    ]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_no_extender, "no extender"),
        (_sampled, "percentageOfNodesToScore"),
        (_ignorable, "ignorable"),
        (_no_profile, "no profile"),
        (_unmanaged, "nvidia.com/gpumem"),
    ],
)
async def test_fault_of_kube_schedulers_configuration_is_named(
    cluster: Cluster, change: Callable[[dict[str, Any]], None], word: str
) -> None:
    await cluster.add_scheduler(change)
    found = await cluster.doctor().kube_scheduler()
    assert bad(found) == [("kube-scheduler", "FAIL")]
    assert word in found[0].text


async def test_imported_names_are_expected(cluster: Cluster) -> None:
    """The webhook's settings name scheduler and resources; older ConfigMaps are left over."""

    def named(document: dict[str, Any]) -> None:
        document["profiles"] = [{"schedulerName": "my-sched"}]
        managed = document["extenders"][0]["managedResources"]
        managed.append({"name": "my.com/gpu", "ignoredByScheduler": True})

    await cluster.add_scheduler(named)
    assert bad(await cluster.doctor().kube_scheduler()) == [("kube-scheduler", "FAIL")]
    settings = {
        "policy": {"scheduler_name": "my-sched"},
        "vendors": {"nvidia": {"resource_count_name": "my.com/gpu"}},
    }
    await cluster.put(
        "/api/v1/namespaces/hami-system/configmaps",
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "hami-webhook-config-1", "namespace": "hami-system"},
            "data": {"webhook.toml": tomli_w.dumps(settings)},
        },
    )
    assert bad(await cluster.doctor().kube_scheduler()) == []


async def test_missing_configuration_is_a_fault_and_no_crash(cluster: Cluster) -> None:
    await cluster.kube.delete(f"{HOOKS}/hami-webhook")
    found = await cluster.doctor().findings()
    assert {one.check for one in found if one.verdict == "FAIL"} >= {
        *("webhook", "certificates", "kube-scheduler"),
    }


# --- claims ---------------------------------------------------------------------------------------

RESOURCE = "/apis/resource.k8s.io/v1"
ON = {"scheduler": "true", "agent": "true"}


async def add_dra(cluster: Cluster, **on: str) -> None:
    """Add the objects of the component ``dra`` for one node; ``on`` replaces the settings."""
    on = ON | on
    scheduler = {"name": "HAMI_SCHEDULER_DRA__ENABLED", "value": on["scheduler"]}
    agent = {"name": "HAMI_NODEAGENT_DRA__ENABLED", "value": on["agent"]}
    for path, name, labels, pod in (
        ("hami-system/deployments", "hami-scheduler", {}, {"containers": [{"env": [scheduler]}]}),
        (
            "hami-agents/daemonsets",
            "hami-nodeagent-nvidia",
            {"app.kubernetes.io/name": "hami-nodeagent"},
            {"containers": [{"env": [agent]}], "nodeSelector": {"hami.io/nvidia": "true"}},
        ),
    ):
        spec = {"template": {"spec": pod}}
        document = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        await cluster.put(f"/apis/apps/v1/namespaces/{path}", document)
    await cluster.put("/api/v1/nodes", node(hami=True))
    selector = {"cel": {"expression": 'device.driver == "gpu.hami.io"'}}
    for name in CLASSES:
        one = {"metadata": {"name": name}, "spec": {"selectors": [selector]}}
        await cluster.put(f"{RESOURCE}/deviceclasses", one)
    await cluster.put(f"{RESOURCE}/resourceslices", slice_of(NODE))
    await cluster.add_scheduler(lambda _: None, of="components/dra")


def slice_of(name: str) -> dict[str, Any]:
    pool = {"name": pool_name(name), "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.hami.io", "nodeName": name, "pool": pool, "devices": []}
    return {"metadata": {"name": f"{name}-gpu.hami.io-0"}, "spec": spec}


@pytest.fixture
async def serving(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster with all that claims need."""
    monkeypatch.setitem(VERSION, "gitVersion", "v1.37.2")
    await add_dra(cluster)
    return cluster


async def claims_faults(cluster: Cluster) -> list[tuple[str, str]]:
    """(node, text) of each finding of the check ``claims`` that did not pass."""
    found = [one for one in await cluster.doctor().findings() if one.check == "claims"]
    assert all(one.fix for one in found if one.verdict != "PASS")
    return [(one.node, one.text) for one in found if one.verdict != "PASS"]


async def test_cluster_that_serves_claims_passes_and_leaves_no_probe(serving: Cluster) -> None:
    assert await claims_faults(serving) == []
    slices = await serving.kube.list_pages(f"{RESOURCE}/resourceslices")
    assert b"probe" not in slices[0]


async def test_cluster_without_claims_is_not_checked(
    serving: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERSION, "gitVersion", "v1.30.0")
    await add_dra(serving, scheduler="false", agent="false")
    assert await claims_faults(serving) == []


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ({"scheduler": "false"}, "on for the agents and off for the scheduler"),
        ({"agent": "false"}, "on for the scheduler and off for the agents"),
    ],
)
async def test_claims_on_for_one_service_alone_are_a_fault(
    serving: Cluster, on: dict[str, str], words: str
) -> None:
    await add_dra(serving, **on)
    assert any(words in text for _, text in await claims_faults(serving))


async def test_old_control_plane_is_named(
    serving: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERSION, "gitVersion", "v1.36.1")
    ((_, text),) = await claims_faults(serving)
    assert text.startswith("API server is v1.36.1")


async def test_missing_class_and_slices_and_slices_without_agent_are_named(
    serving: Cluster,
) -> None:
    await serving.kube.delete(f"{RESOURCE}/deviceclasses/hami-whole")
    await serving.kube.delete(f"{RESOURCE}/resourceslices/{NODE}-gpu.hami.io-0")
    await serving.put(f"{RESOURCE}/resourceslices", slice_of("left"))
    found = await claims_faults(serving)
    assert {name for name, _ in found} == {"", NODE, "left"}
    assert "the DeviceClass hami-whole is missing" in {text for _, text in found}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one["profiles"].pop(), "has no profile hami-scheduler-claims"),
        (lambda one: one["profiles"][1].pop("plugins"), "has the plugin DynamicResources"),
    ],
)
async def test_kube_scheduler_that_does_not_leave_claims_to_hami_is_named(
    serving: Cluster, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    await serving.add_scheduler(change, of="components/dra")
    ((_, text),) = await claims_faults(serving)
    assert words in text


class Refusing:
    """Allows everything but one verb on one resource for one account."""

    def __init__(self, account: str, verb: str, resource: str) -> None:
        self._account, self._verb, self._resource = account, verb, resource

    def __call__(self, user: User, info: RequestInfo) -> bool:
        resource = f"{info.resource}/{info.subresource}" if info.subresource else info.resource
        asked = (user.name.rpartition(":")[2], info.verb, resource)
        return asked != (self._account, self._verb, self._resource)


@pytest.mark.parametrize(
    ("account", "verb", "resource"),
    [
        ("hami-scheduler", "watch", "resourceclaims"),
        ("hami-nodeagent", "create", "resourceslices"),
        ("hami-kube-scheduler", "update", "resourceclaims/binding"),
    ],
)
async def test_missing_right_is_named(
    tmp_path: Path, account: str, verb: str, resource: str
) -> None:
    authorize = Refusing(account, verb, resource)
    async with ApiServer(Settings(authorize=authorize)) as server:
        server.kubeconfig(tmp_path / "kubeconfig")
        async with kubeio.connect(str(tmp_path / "kubeconfig")) as kube:
            cluster = Cluster(kube, CertificateAuthority(), "")
            await add_dra(cluster)
            texts = [one.text for one in await cluster.doctor().claims()]
    (text,) = [one for one in texts if "may not" in one]
    assert f"/{account} may not: {verb} {resource} (" in text
