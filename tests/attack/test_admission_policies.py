# SPDX-License-Identifier: Apache-2.0
"""Attacks on admission by a tenant with role ``edit``, on a real API server.

The API server has the shipped admission policies and a webhook with its rendered configuration.
Every attack is tried through both, and then with the policies alone, as while the webhook's
configuration is missing. Manifests that tenants really write pass.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from hami_common.dra.podclaims import claim_name, encode_resources
from hami_common.pods import annotations
from hami_sim.certs import CertificateAuthority
from hami_sim.kube import Access
from hami_sim.kubernetes import run_control_plane
from hami_webhook.shell.render import FLAG, render
from tests.cluster.needs import control_plane_or_skip
from tests.support.kubeclient import KubeClient, StatusError
from tests.support.webhook import run_webhook

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.shares_cluster]

POLICIES = Path(__file__).parents[2] / "deploy" / "kustomize" / "base" / "admission-policies.yaml"
GROUP = "admissionregistration.k8s.io"
HOOKS = f"mutatingwebhookconfigurations.{GROUP}"
COLLECTIONS = {
    "ValidatingAdmissionPolicy": f"validatingadmissionpolicies.{GROUP}",
    "ValidatingAdmissionPolicyBinding": f"validatingadmissionpolicybindings.{GROUP}",
}
BINDINGS = "rolebindings.rbac.authorization.k8s.io"
NAMESPACE, TENANT = "tenant", "tess"
KNOWN_S = 60.0
"""The API server follows new policies and configurations within seconds."""
SCHEDULER = "hami-scheduler"
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
PLACES = ("containers", "initContainers")

Obj = dict[str, Any]


class Site:
    """One API server, as an administrator and as the tenant."""

    def __init__(self, admin: KubeClient, tenant: KubeClient) -> None:
        self.admin = admin
        self.tenant = tenant

    async def created(self, pod: Obj) -> tuple[Obj, str]:
        """The pod as the API server would store it for the tenant, or why it does not."""
        try:
            made = await self.tenant.create("pods", pod, NAMESPACE, dryRun="All")
        except StatusError as error:
            return {}, str(error)
        return made, ""

    async def is_prepared(self) -> bool:
        """Report if a webhook prepares the tenant's pods."""
        made, _ = await self.created(pod([share()]))
        volumes = made.get("spec", {}).get("volumes", [])
        return any(volume["name"] == "hami-limits-main" for volume in volumes)

    async def until_refused(self, pod: Obj) -> None:
        with anyio.fail_after(KNOWN_S):
            while not (await self.created(pod))[1]:
                await anyio.sleep(0.05)


def container(name: str = "main", **more: Any) -> Obj:
    return {"name": name, "image": "app", **more}


def share(name: str = "main", **more: Any) -> Obj:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    return container(name, resources={"limits": limits}, **more)


def pod(containers: Sequence[Obj], *, labels: dict[str, str] | None = None, **spec: Any) -> Obj:
    return {
        "metadata": {"generateName": "p-", "labels": labels or {}},
        "spec": {"schedulerName": SCHEDULER, "containers": list(containers), **spec},
    }


def mounting(*mounts: Obj, place: str = "containers") -> Obj:
    """A pod with a share that mounts volumes of its own, in the container with the share."""
    volumes: list[Obj] = [
        {"name": name, "emptyDir": {}} for name in sorted({mount["name"] for mount in mounts})
    ]
    asking = share(volumeMounts=list(mounts))
    if place == "containers":
        return pod([asking], volumes=volumes)
    made = pod([container("app")], volumes=volumes)
    made["spec"][place] = [asking]
    return made


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    programs = control_plane_or_skip()
    folder = tmp_path_factory.mktemp("admission")
    async with (
        run_control_plane(folder, programs) as plane,
        KubeClient(plane.access()) as admin,
        KubeClient(Access.from_kubeconfig(plane.kubeconfig_for(TENANT))) as tenant,
        run_webhook(folder / "tls", CertificateAuthority()) as webhook,
    ):
        for name in (NAMESPACE, "other"):
            await admin.create("namespaces", {"metadata": {"name": name}})
            with contextlib.suppress(StatusError):  # the controller may be faster
                await admin.create("serviceaccounts", {"metadata": {"name": "default"}}, name)
        group = "rbac.authorization.k8s.io"
        role = {
            "metadata": {"name": "edit"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "edit"},
            "subjects": [{"apiGroup": group, "kind": "User", "name": TENANT}],
        }
        await admin.create(BINDINGS, role, NAMESPACE)
        for document in yaml.safe_load_all(POLICIES.read_text(encoding="utf-8")):
            await admin.create(COLLECTIONS[document["kind"]], document)
        authority = str(folder / "tls" / "ca.crt")
        rendered = render([FLAG, "--url", webhook.url, "--ca-file", authority])
        await admin.create(HOOKS, yaml.safe_load(rendered))
        site = Site(admin, tenant)
        site_is_up = pod([container(env=[{"name": VARIABLE, "value": "all"}])])
        await site.until_refused(site_is_up)
        with anyio.fail_after(KNOWN_S):  # the webhook is called
            while not await site.is_prepared():
                await anyio.sleep(0.05)
        yield site


@pytest.fixture(params=["webhook", "policies-alone"], scope="module")
async def guarded(request: pytest.FixtureRequest, site: Site) -> Site:
    """The site with all its guards, then without the webhook."""
    if request.param == "policies-alone":
        await site.admin.delete(HOOKS, "hami-webhook")
        with anyio.fail_after(KNOWN_S):
            while await site.is_prepared():
                await anyio.sleep(0.05)
    return site


async def test_policies_are_checked_by_the_api_server_without_a_warning(guarded: Site) -> None:
    collection = COLLECTIONS["ValidatingAdmissionPolicy"]
    with anyio.fail_after(KNOWN_S):
        while True:
            items = (await guarded.admin.list(collection))["items"]
            statuses = [item.get("status", {}) for item in items]
            if all("typeChecking" in status for status in statuses):
                break
            await anyio.sleep(0.1)
    assert [s["typeChecking"].get("expressionWarnings") for s in statuses] == [None] * len(items)


OPT_OUT = {annotations.WEBHOOK_LABEL: annotations.WEBHOOK_IGNORE}


async def test_label_of_a_tenant_does_not_bypass_admission(guarded: Site) -> None:
    for attempt in (
        pod([share()], labels=OPT_OUT),
        pod([container()], labels=OPT_OUT),
        pod([share()], labels=OPT_OUT) | {"spec": {"containers": [share()]}},
    ):
        _, why = await guarded.created(attempt)
        assert "take the label off" in why


async def test_label_on_pods_without_devices_has_no_effect(guarded: Site) -> None:
    """HAMi's own pods carry it."""
    plain = pod([container()], labels=OPT_OUT)
    plain["spec"]["schedulerName"] = "default-scheduler"
    assert (await guarded.created(plain))[1] == ""


async def test_tenant_cannot_exempt_its_namespace(guarded: Site) -> None:
    with pytest.raises(StatusError) as refused:
        await guarded.tenant.patch("namespaces", NAMESPACE, {"metadata": {"labels": OPT_OUT}})
    assert refused.value.code == 403


HIDING_MOUNTS: dict[str, Obj] = {
    "double-slash": {"mountPath": "/etc//ld.so.preload", "subPath": "empty"},
    "leading-slashes": {"mountPath": "//etc//hami"},
    "dot": {"mountPath": "/etc/./hami/limits", "subPath": "x"},
    "dots": {"mountPath": "/etc/../etc/ld.so.preload", "subPath": "x"},
    "dots-at-the-end": {"mountPath": "/etc/hami/x/.."},
    "slash-at-the-end": {"mountPath": "/etc/hami/"},
    "relative": {"mountPath": "etc/hami"},
    "below": {"mountPath": "/etc/hami/..data"},
    "region": {"mountPath": "/run//hami/x"},
    "alias-of-run": {"mountPath": "/var/run/hami"},
    "over-the-alias-of-run": {"mountPath": "/var/run"},
    "over-run": {"mountPath": "/run"},
    "links-of-the-kernel": {"mountPath": "/proc/self/root/etc/hami"},
    "share-of-hygon": {"mountPath": "/etc/vdev"},
    "share-of-ascend": {"mountPath": "/hami-vnpu-shmem/x"},
    "priorities": {"mountPath": "/run/hami-priority"},
    "alias-of-priorities": {"mountPath": "/var/run/hami-priority/"},
    "library": {"mountPath": "/usr/local/vgpu/libvgpu.so", "subPath": "empty"},
    "library-folder": {"mountPath": "/usr/local/vgpu"},
    "above-the-library": {"mountPath": "/usr/local"},
    "above-the-limits": {"mountPath": "/etc"},
    "device-list": {"mountPath": "/var/run/nvidia-container-devices/all"},
    "our-volume-elsewhere": {
        "name": "hami-region-main",
        "mountPath": "/etc/ld.so.preload",
        "subPath": "empty",
    },
    "our-volume-with-subpath": {
        "name": "hami-region-main",
        "mountPath": "/run/hami",
        "subPath": "x",
    },
    "volume-of-another-container": {"name": "hami-limits-other", "mountPath": "/etc/hami"},
    "false-limits": {"name": "hami-limits-main", "mountPath": "/etc/hami"},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trick", HIDING_MOUNTS)
async def test_no_mount_hides_the_limiter(guarded: Site, trick: str, place: str) -> None:
    mount = {"name": "v", **HIDING_MOUNTS[trick]}
    made, why = await guarded.created(mounting(mount, place=place))
    if trick == "false-limits" and made:  # the webhook replaces what only looks like its own
        (volume,) = (v for v in made["spec"]["volumes"] if v["name"] == "hami-limits-main")
        assert "downwardAPI" in volume
        return
    assert why


@pytest.mark.parametrize("trick", HIDING_MOUNTS)
async def test_no_mount_of_an_ephemeral_container_hides_the_limiter(
    guarded: Site, trick: str
) -> None:
    mount = {"name": "v", **HIDING_MOUNTS[trick]}
    target = pod([share()], volumes=[{"name": "v", "emptyDir": {}}])
    target["spec"]["containers"].append(share("other"))
    made = await guarded.admin.create("pods", target, NAMESPACE)
    known = {volume["name"] for volume in made["spec"]["volumes"]}
    if mount["name"] not in known or trick == "false-limits":
        mount["name"] = "v"  # there is no volume of ours to be misused
    debug = {"name": "debug", "image": "sh", "targetContainerName": "main", "volumeMounts": [mount]}
    body = {"spec": {"ephemeralContainers": [debug]}}
    with pytest.raises(StatusError):
        await guarded.admin.patch(
            "pods",
            made["metadata"]["name"],
            body,
            namespace=NAMESPACE,
            subresource="ephemeralcontainers",
        )
    await guarded.admin.delete("pods", made["metadata"]["name"], NAMESPACE, gracePeriodSeconds="0")


async def test_mounts_that_tenants_really_write_pass(guarded: Site) -> None:
    paths = [
        *("/data", "/data/x/", "/etc/nginx", "/etc/hami-tools", "/etc/localtime", "/run/secrets/x"),
        *(
            "/var/run/secrets/y",
            "/var/run/docker.sock",
            "/tmp",
            "/dev/shm",
            "/usr/local/bin",
        ),
        *("/usr/local/nvidia", "/usr/local/vgpu-tools", "/var", "/opt/a..b", "/models/...x"),
    ]
    made, why = await guarded.created(
        mounting(*({"name": f"v{i}", "mountPath": path} for i, path in enumerate(paths)))
    )
    assert why == ""
    stored = {mount["mountPath"] for mount in made["spec"]["containers"][0]["volumeMounts"]}
    assert stored >= set(paths)


GRABS: dict[str, Obj] = {
    "zero-devices": pod(
        [
            container(
                resources={"limits": {"nvidia.com/gpu": "0"}},
                env=[{"name": VARIABLE, "value": "all"}],
            )
        ]
    ),
    "priority-alone": pod(
        [
            container(
                resources={"limits": {"nvidia.com/priority": "0"}},
                env=[{"name": VARIABLE, "value": "all"}],
            )
        ]
    ),
    "other-vendor": pod([share(env=[{"name": "AMD_VISIBLE_DEVICES", "value": "all"}])]),
    "beside-a-share": pod([share(), container("side", env=[{"name": VARIABLE, "value": "all"}])]),
    "value-from": pod(
        [
            share(),
            container(
                "side",
                env=[
                    {
                        "name": VARIABLE,
                        "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "all"}},
                    }
                ],
            ),
        ]
    ),
}


def gives(made: Obj) -> list[str]:
    """Variables of a stored pod that could give devices, by container."""
    found = []
    for one in [*made["spec"]["containers"], *made["spec"].get("initContainers", [])]:
        values = {v["name"]: v.get("value", "") for v in one.get("env", []) if "valueFrom" not in v}
        for variable in one.get("env", []):
            if variable["name"].endswith("_VISIBLE_DEVICES"):
                value = variable.get("value", "from" if "valueFrom" in variable else "")
                if value not in ("", "none", "void"):
                    found.append(f"{one['name']}: {variable['name']}={value}")
        if "envFrom" in one and VARIABLE not in values:
            found.append(f"{one['name']}: envFrom")
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("grab", GRABS)
async def test_no_variable_gives_devices_without_a_share(
    guarded: Site, grab: str, place: str
) -> None:
    attempt = {**GRABS[grab], "spec": dict(GRABS[grab]["spec"])}
    if place != "containers":
        attempt["spec"][place] = attempt["spec"]["containers"]
        attempt["spec"]["containers"] = [container("app")]
    made, why = await guarded.created(attempt)
    assert why or gives(made) == []


@pytest.mark.parametrize("source", [{}, {"prefix": "NVIDIA_"}])
@pytest.mark.parametrize("which", ["share", "zero", "side"])
async def test_env_from_gives_no_devices(guarded: Site, which: str, source: Obj) -> None:
    taken = [{**source, "configMapRef": {"name": "cm"}}]
    attempt = {
        "share": pod([share(envFrom=taken)]),
        "zero": pod(
            [container(resources={"limits": {"nvidia.com/gpu": "0"}}, envFrom=taken)],
        ),
        "side": pod([share(), container("side", envFrom=taken)]),
    }[which]
    made, why = await guarded.created(attempt)
    assert why or gives(made) == []


async def test_env_from_with_its_own_prefix_is_admitted(guarded: Site) -> None:
    taken = [{"prefix": "APP_", "configMapRef": {"name": "cm"}}]
    made, why = await guarded.created(pod([share(envFrom=taken)]))
    assert why == ""
    assert "env" not in made["spec"]["containers"][0]


def claimed(**more: Any) -> Obj:
    """A pod with the annotation, label and claim that the webhook writes in mode ``dra``."""
    use = {"name": "hami", "request": "main-nvidia"}
    made = pod(
        [container(resources={"claims": [use]}, **more)],
        labels={annotations.MANAGED_LABEL: "true"},
        resourceClaims=[{"name": "hami", "resourceClaimName": claim_name("of another pod")}],
    )
    resources = encode_resources({"main": {"nvidia.com/gpu": "1"}})
    made["metadata"]["annotations"] = {annotations.CLAIMED_RESOURCES: resources}
    return made


async def test_forged_use_of_a_claim_is_held_to_the_rules_of_a_share(guarded: Site) -> None:
    hiding: Obj = {"name": "v", "mountPath": "/etc/hami"}
    empty = {"name": "v", "emptyDir": {}}
    over = claimed(volumeMounts=[hiding])
    over["spec"]["volumes"] = [empty]
    of_ours = claimed(volumeMounts=[{**hiding, "name": "hami-limits-main"}])
    of_ours["spec"]["volumes"] = [{**empty, "name": "hami-limits-main"}]
    for attempt in (over, of_ours):
        made, why = await guarded.created(attempt)
        mounts = made.get("spec", {"containers": [{}]})["containers"][0].get("volumeMounts", [])
        assert why or not any(mount["name"] == "v" for mount in mounts)
        volumes = made.get("spec", {}).get("volumes", [])
        assert why or not any("emptyDir" in one for one in volumes if "limits" in one["name"])
    made, why = await guarded.created(claimed(envFrom=[{"configMapRef": {"name": "cm"}}]))
    assert why or gives(made) == []
    _, why = await guarded.created(claimed() | {"metadata": {"name": "p", "labels": OPT_OUT}})
    assert "take the label off" in why


async def test_resources_of_a_claim_are_not_changed_after_creation(guarded: Site) -> None:
    plain = pod([container()])
    plain["spec"]["schedulerName"] = "default-scheduler"
    made = await guarded.tenant.create("pods", plain, NAMESPACE)
    change = {"metadata": {"annotations": claimed()["metadata"]["annotations"]}}
    with pytest.raises(StatusError) as refused:
        await guarded.tenant.patch("pods", made["metadata"]["name"], change, namespace=NAMESPACE)
    assert refused.value.code == 403
    assert "settle" in str(refused.value)
    await guarded.tenant.delete("pods", made["metadata"]["name"], NAMESPACE)


async def test_pod_of_thousands_of_containers_is_refused_at_once(guarded: Site) -> None:
    huge = pod(
        [container(f"c{i}", resources={"limits": {"nvidia.com/gpu": "1"}}) for i in range(3000)]
    )
    started_s = time.monotonic()
    _, why = await guarded.created(huge)
    assert "200 containers" in why
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("what", ["volumes", "volumeMounts", "env"])
async def test_pod_of_thousands_of_entries_is_refused(guarded: Site, what: str) -> None:
    numbers = range(4000)
    volumes: list[Obj] = [{"name": f"v{i}", "emptyDir": {}} for i in numbers]
    one = share()
    if what == "env":
        volumes, one["env"] = [], [{"name": f"X{i}", "value": "1"} for i in numbers]
    if what == "volumeMounts":
        volumes = volumes[:1]
        one["volumeMounts"] = [{"name": "v0", "mountPath": f"/m{i}"} for i in numbers]
    _, why = await guarded.created(pod([one], volumes=volumes))
    assert f"{what}: a pod that asks for devices may have 1000" in why


async def test_largest_pod_within_the_bounds_is_admitted(guarded: Site) -> None:
    volumes = [{"name": f"v{i}", "emptyDir": {}} for i in range(1000)]
    containers = [
        share(
            f"c{i}",
            volumeMounts=[
                {"name": f"v{5 * i + j}", "mountPath": f"/{'m' * 120}{j}"} for j in range(4)
            ],
            env=[{"name": f"X{j}", "value": "1"} for j in range(5)],
        )
        for i in range(200)
    ]
    started_s = time.monotonic()
    _, why = await guarded.created(pod(containers, volumes=volumes))
    assert why == ""
    assert time.monotonic() - started_s < 5


async def test_other_pods_are_admitted_beside_huge_pods(guarded: Site) -> None:
    huge = pod(
        [container(f"c{i}", resources={"limits": {"nvidia.com/gpu": "1"}}) for i in range(3000)]
    )
    waits: list[float] = []

    async def attack() -> None:
        await guarded.created(huge)

    async def neighbour() -> None:
        started_s = time.monotonic()
        await guarded.admin.create("pods", pod([share()]), "other", dryRun="All")
        waits.append(time.monotonic() - started_s)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(attack)
        for _ in range(4):
            await neighbour()
    assert max(waits) < 5
