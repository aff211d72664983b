# SPDX-License-Identifier: Apache-2.0
"""What deploy/kustomize installs, on a real API server: accepted, applied, and holding its laws.

One control plane serves all tests, in their order: the overlay is applied, its keys are made under
the account that the manifests give to that, and then the webhook's configuration is taken away, so
that only the admission policies stand between a user and an allocation annotation.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from hami_common import annotations
from hami_sim.apiserver.client import KubeClient, StatusError
from hami_sim.kubernetes import ControlPlane, configuration, run_control_plane
from hami_webhook.core.policies import ENVIRONMENT_ALLOWED, ENVIRONMENT_LABEL
from tests.cluster.needs import control_plane_or_skip

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]

OVERLAYS = configuration.shipped_directory().parent / "overlays"
NAMESPACE = "tenant"
LIMITS = "main.limits.hami.io/v1"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
PROGRAM_S = 60.0
ACTIVE_S = 30.0
"""The API server begins to enforce a new policy within seconds."""

Obj = dict[str, Any]


async def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A program that asks the API server, whose answers this loop may have to give."""
    with anyio.fail_after(PROGRAM_S):
        ended = await anyio.run_process(command, check=False)
    told = subprocess.CompletedProcess(
        command, ended.returncode, ended.stdout.decode(), ended.stderr.decode()
    )
    assert not check or told.returncode == 0, told.stderr
    return told


class Site:
    """A control plane to which the manifests are applied."""

    def __init__(self, plane: ControlPlane, client: KubeClient) -> None:
        self.plane = plane
        self.client = client
        self._kubectl = plane.programs.path("kubectl")

    async def kubectl(
        self, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return await run(
            self._kubectl, f"--kubeconfig={self.plane.kubeconfig}", *arguments, check=check
        )


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    programs = control_plane_or_skip()
    async with (
        run_control_plane(tmp_path_factory.mktemp("deploy"), programs) as plane,
        KubeClient(plane.access()) as client,
    ):
        await client.create("namespaces", {"metadata": {"name": NAMESPACE}})
        yield Site(plane, client)


def pod(name: str, *, env: list[Obj] | None = None, **metadata: Any) -> Obj:
    container: Obj = {"name": "main", "image": "app"}
    if env is not None:
        container["env"] = env
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **metadata},
        "spec": {"schedulerName": "nobody", "containers": [container]},
    }


async def refusal(call: Awaitable[object]) -> str:
    """Why the API server refused, empty when it did not."""
    try:
        await call
    except StatusError as error:
        return str(error)
    return ""


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = ACTIVE_S) -> None:
    with anyio.fail_after(limit_s):
        while not await condition():
            await anyio.sleep(0.2)


class TestInstallation:
    """In the order in which an operator goes."""

    async def test_overlay_is_applied(self, site: Site) -> None:
        applied = (await site.kubectl("apply", "-k", str(OVERLAYS / "dev"))).stdout.splitlines()
        assert len(applied) > 30
        assert all(line.split()[-1] in ("created", "configured") for line in applied)

    async def test_keys_are_made_under_the_account_for_that(self, site: Site) -> None:
        login = await site.plane.kubeconfig_for_account("hami-bootstrap", name="hami-bootstrap")
        made: list[str] = []

        async def is_made() -> bool:
            # As the Job does: the rights that were just granted are known after a moment.
            told = await run(
                *(sys.executable, "-m", "hamictl", "bootstrap", "--kubeconfig", str(login)),
                check=False,
            )
            made.extend(told.stdout.splitlines())
            return told.returncode == 0

        await until(is_made)
        assert any("told MutatingWebhookConfiguration" in line for line in made)
        secret = await site.client.get("secrets", "hami-webhook-tls", "hami-system")
        assert secret["type"] == "kubernetes.io/tls"

    async def test_second_application_would_change_nothing(self, site: Site) -> None:
        difference = await site.kubectl("diff", "-k", str(OVERLAYS / "dev"), check=False)
        assert difference.returncode == 0, difference.stdout + difference.stderr
        difference = await site.kubectl("diff", "-k", str(OVERLAYS / "dev"), check=False)
        assert difference.returncode == 0, difference.stdout + difference.stderr
        # kubectl sends some fields again although they are the same, and says "configured" then.
        applied = (await site.kubectl("apply", "-k", str(OVERLAYS / "dev"))).stdout
        assert " created" not in applied
        difference = await site.kubectl("diff", "-k", str(OVERLAYS / "dev"), check=False)
        assert difference.returncode == 0, difference.stdout + difference.stderr

    async def test_production_overlay_is_accepted(self, site: Site) -> None:
        arguments = ("apply", "--dry-run=server", "-k", str(OVERLAYS / "prod"))
        assert (
            "hami-nothing-else created (server dry run)" in (await site.kubectl(*arguments)).stdout
        )

    async def test_collector_of_traces_is_accepted(self, site: Site, tmp_path: Path) -> None:
        dev = os.path.relpath(OVERLAYS / "dev", tmp_path.resolve())
        otel = os.path.relpath(OVERLAYS.parent / "components" / "otel", tmp_path.resolve())
        (tmp_path / "kustomization.yaml").write_text(
            json.dumps(
                {
                    "apiVersion": "kustomize.config.k8s.io/v1beta1",
                    "kind": "Kustomization",
                    "resources": [dev],
                    "components": [otel],
                }
            )
        )
        arguments = ("apply", "--dry-run=server", "-k", str(tmp_path))
        accepted = (await site.kubectl(*arguments)).stdout
        assert "hami-otel-collector created (server dry run)" in accepted
        assert "hami-webhook configured (server dry run)" in accepted

    async def test_policies_have_no_warnings_of_the_type_checker(self, site: Site) -> None:
        async def checked() -> bool:
            items = (await site.client.call("GET", POLICIES))["items"]
            return all("typeChecking" in item.get("status", {}) for item in items)

        await until(checked)
        for item in (await site.client.call("GET", POLICIES))["items"]:
            assert not item["status"]["typeChecking"].get("expressionWarnings"), item["metadata"]


@pytest.fixture(scope="class")
async def without_webhook(site: Site) -> Site:
    """Only the policies are left; they are in force."""
    await site.kubectl(
        "delete", "mutatingwebhookconfiguration", "hami-webhook", "--ignore-not-found"
    )

    async def in_force() -> bool:
        forged = pod("probe", annotations={annotations.ALLOCATION: "{}"})
        called = site.client.create("pods", forged, NAMESPACE, dryRun="All")
        grabs = pod("probe", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
        also = site.client.create("pods", grabs, NAMESPACE, dryRun="All")
        return "written by its scheduler" in await refusal(
            called
        ) and "asks for none" in await refusal(also)

    await until(in_force)
    return site


@pytest.mark.usefixtures("without_webhook")
class TestAllocationAnnotations:
    """The calls are an administrator's, whom no role refuses anything."""

    @pytest.mark.parametrize(
        "key", [*sorted(annotations.RESERVED), LIMITS, "hami.io/x-devices-allocated"]
    )
    async def test_pod_with_one_is_not_created(self, site: Site, key: str) -> None:
        call = site.client.create("pods", pod("forged", annotations={key: "{}"}), NAMESPACE)
        assert "take hami.io/allocation and its like out" in await refusal(call)

    @pytest.mark.parametrize("subresource", ["", "status", "ephemeralcontainers", "resize"])
    async def test_no_write_of_a_pod_adds_one(self, site: Site, subresource: str) -> None:
        name = f"plain-{subresource or 'whole'}"
        await site.client.create("pods", pod(name), NAMESPACE)
        patch = {"metadata": {"annotations": {annotations.ALLOCATION: "{}", LIMITS: "x"}}}
        arguments = [f"--subresource={subresource}"] if subresource else []
        await site.kubectl(
            *("patch", "pod", name, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(patch)),
            *arguments,
            check=False,
        )
        marks = (await site.client.get("pods", name, NAMESPACE))["metadata"].get("annotations", {})
        assert not {key for key in marks if annotations.is_reserved(key)}

    async def test_binding_with_one_is_the_schedulers_alone(self, site: Site) -> None:
        await site.client.create("nodes", {"metadata": {"name": "n1"}})
        await site.client.create("pods", pod("bound"), NAMESPACE)
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/bound/binding"
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": "bound",
                "annotations": {annotations.ALLOCATION: "{}", LIMITS: "x"},
            },
            "target": {"kind": "Node", "name": "n1"},
        }
        for where in (path, f"/api/v1/namespaces/{NAMESPACE}/bindings"):
            refused = await refusal(site.client.call("POST", where, body=binding))
            assert "written by its scheduler" in refused
        async with KubeClient(await scheduler_access(site)) as scheduler:
            await scheduler.call("POST", path, body=binding)
        marks = (await site.client.get("pods", "bound", NAMESPACE))["metadata"]["annotations"]
        assert marks[LIMITS] == "x"

    @pytest.mark.parametrize(
        ("change", "said"), [({LIMITS: None}, "put them back"), ({LIMITS: "y"}, "take hami.io/")]
    )
    async def test_annotations_of_a_bound_pod_stay_as_they_are(
        self, site: Site, change: Obj, said: str
    ) -> None:
        call = site.client.patch(
            "pods", "bound", {"metadata": {"annotations": change}}, namespace=NAMESPACE
        )
        assert said in await refusal(call)

    async def test_everybody_else_goes_on(self, site: Site) -> None:
        other = {"metadata": {"annotations": {"team": "x"}, "labels": {"a": "b"}}}
        assert await refusal(site.client.patch("pods", "bound", other, namespace=NAMESPACE)) == ""
        status = {"status": {"phase": "Running"}}
        patched = await site.kubectl(
            *("patch", "pod", "bound", "-n", NAMESPACE, "--subresource=status"),
            *("--type=merge", "-p", json.dumps(status)),
        )
        assert "patched" in patched.stdout


async def scheduler_access(site: Site) -> Any:
    access = site.plane.access()
    token = await site.plane.token_for("hami-scheduler")
    return type(access)(url=access.url, token=token, ca_pem=access.ca_pem)


@pytest.mark.usefixtures("without_webhook")
class TestDeviceEnvironment:
    @pytest.mark.parametrize(
        ("variable", "is_refused"),
        [
            ({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, True),
            ({"name": "ASCEND_VISIBLE_DEVICES", "value": "0-3"}, True),
            (
                {
                    "name": "NVIDIA_VISIBLE_DEVICES",
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                },
                True,
            ),
            ({"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}, False),
            ({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}, False),
            ({"name": "NVIDIA_VISIBLE_DEVICES"}, False),
            ({"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}, False),
        ],
    )
    async def test_container_that_asks_for_nothing_gets_nothing(
        self, site: Site, variable: Obj, *, is_refused: bool
    ) -> None:
        call = site.client.create("pods", pod("grabs", env=[variable]), NAMESPACE, dryRun="All")
        assert ("asks for none" in await refusal(call)) is is_refused

    async def test_container_that_asks_may_set_it(self, site: Site) -> None:
        asking = pod("asks", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
        asking["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        assert await refusal(site.client.create("pods", asking, NAMESPACE, dryRun="All")) == ""

    async def test_namespace_may_be_exempt(self, site: Site) -> None:
        labels = {ENVIRONMENT_LABEL: ENVIRONMENT_ALLOWED}
        await site.client.create("namespaces", {"metadata": {"name": "drivers", "labels": labels}})
        grabs = pod("installer", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])

        async def is_allowed() -> bool:
            return await refusal(site.client.create("pods", grabs, "drivers", dryRun="All")) == ""

        await until(is_allowed)

    async def test_debug_container_gets_nothing(self, site: Site) -> None:
        await site.client.create("pods", pod("target"), NAMESPACE)
        debug = {
            "name": "debug",
            "image": "app",
            "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
        }
        patched = await site.kubectl(
            *("patch", "pod", "target", "-n", NAMESPACE, "--subresource=ephemeralcontainers"),
            *("-p", json.dumps({"spec": {"ephemeralContainers": [debug]}})),
            check=False,
        )
        assert patched.returncode != 0
        assert "asks for none" in patched.stderr
