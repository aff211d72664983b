# SPDX-License-Identifier: Apache-2.0
"""The objects of deploy/kustomize on a real API server: accepted, working, and enforced.

One installation serves all tests (``tests.support.installed``), because it costs seconds. Its
services work first (``tests.e2e.work``); then the tests check their actions, the rights of their
roles and those of tenants. At the end the webhook's configuration is removed, so that only the
admission policies protect the allocation annotation.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from hami_common.admission.policies import ENVIRONMENT_ALLOWED, ENVIRONMENT_LABEL
from hami_common.pods import annotations, limits
from hami_common.pods.limits import HEADER
from hami_common.roles import ROLES
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import Vendor
from hami_registry.core import busaccess
from hami_sim.cluster import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from hamictl import verification
from hamictl.commands.bootstrap import AGENTS_COPIES
from tests.cluster.needs import control_plane_or_skip
from tests.e2e.people import TestPeople
from tests.e2e.tenancy import TestTenancy
from tests.e2e.work import NAMESPACE, Worked, bind, work
from tests.support.installed import OVERLAYS, Installed, run_installed
from tests.support.kubeclient import KubeClient, StatusError
from tests.support.kustomize import overlay, pinned_copy
from tests.support.rbac import (
    ACCOUNT,
    COLLECTIONS,
    Policy,
    Request,
    Right,
    RoleRef,
    audited,
    judge,
)

__all__ = ["TestPeople", "TestTenancy"]

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

AUDITOR = "auditor"
OURS = (SYSTEM_NAMESPACE, AGENTS_NAMESPACE)
SELDOM = {
    # An Event that repeats another one of the same pod within ten minutes raises its count, by the
    # recorder that agents use as well (tests/unit/common/runtime); here no pod is preempted for
    # twice.
    Right(
        role=RoleRef(kind="ClusterRole", name="hami-scheduler"),
        verb="patch",
        group="",
        resource="events",
    ): Request(
        user=f"{ACCOUNT}:{SYSTEM_NAMESPACE}:hami-scheduler",
        verb="patch",
        group="",
        resource="events",
        namespace="default",
        name="urgent",
    )
}
"""Rights that the work of this test may not need, each with a request that needs it."""
LIMITS = "main.limits.hami.io/v1"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
RBAC = ("clusterroles", "clusterrolebindings", "roles", "rolebindings")
ADMISSION = (
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
    "mutatingwebhookconfigurations",
)
ACTIVE_S = 60.0
"""The API server begins to enforce a new policy within seconds."""

Obj = dict[str, Any]


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Installed]:
    control_plane_or_skip()
    async with run_installed(tmp_path_factory.mktemp("inst")) as installed:
        await installed.client.create("namespaces", {"metadata": {"name": NAMESPACE}})
        yield installed


@pytest.fixture(scope="module")
async def worked(site: Installed) -> Worked:
    """Results of the services' work."""
    return await work(site)


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
    """Return the refusal of the API server, empty when it accepted."""
    try:
        await call
    except StatusError as error:
        return str(error)
    return ""


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = ACTIVE_S) -> None:
    with anyio.fail_after(limit_s):
        while not await condition():
            await anyio.sleep(0.05)


async def versions(site: Installed) -> dict[str, str]:
    """Return the generation of each object of ours, or its version if only we write it."""
    ours = f"namespaces/{SYSTEM_NAMESPACE}/"
    agents = f"namespaces/{AGENTS_NAMESPACE}/"
    found = {}
    for path in (
        *(f"/api/v1/{ours}{kind}" for kind in ("configmaps", "services", "serviceaccounts")),
        *(f"/api/v1/{agents}{kind}" for kind in ("configmaps", "serviceaccounts")),
        *(f"/apis/apps/v1/{ours}{kind}" for kind in ("deployments", "statefulsets")),
        f"/apis/apps/v1/{agents}daemonsets",
        *(f"/apis/batch/v1/{ours}{kind}" for kind in ("jobs", "cronjobs")),
        f"/apis/policy/v1/{ours}poddisruptionbudgets",
        *(f"/apis/rbac.authorization.k8s.io/v1/{kind}" for kind in RBAC),
        "/apis/scheduling.k8s.io/v1/priorityclasses",
        *(f"/apis/admissionregistration.k8s.io/v1/{kind}" for kind in ADMISSION),
    ):
        for one in (await site.client.call("GET", path))["items"]:
            metadata = one["metadata"]
            if "hami" in metadata["name"]:
                at = metadata.get("generation") or metadata["resourceVersion"]
                found[f"{path} {metadata['name']}"] = str(at)
    return found


class TestInstallation:
    """The operator's view."""

    async def test_overlay_is_applied(
        self, site: Installed, record_property: Callable[[str, object], None]
    ) -> None:
        record_property("installation_s", {k: round(s, 1) for k, s in site.timings_s.items()})
        assert len(site.applied) > 30
        assert all(line.split()[-1] == "created" for line in site.applied)

    async def test_keys_are_made_under_the_account_for_that(self, site: Installed) -> None:
        assert any("CA bundle of MutatingWebhookConfiguration" in line for line in site.made)
        secret = await site.client.get("secrets", "hami-webhook-tls", SYSTEM_NAMESPACE)
        assert secret["type"] == "kubernetes.io/tls"

    async def test_second_application_changes_nothing(self, site: Installed) -> None:
        before = await versions(site)
        assert len(before) > 30
        # kubectl sends some fields again although they are the same, and says "configured" then.
        applied = (await site.kubectl("apply", "-k", str(OVERLAYS / "dev"))).stdout
        assert " created" not in applied
        assert await versions(site) == before

    async def test_production_overlay_is_accepted_with_what_may_be_added(
        self, site: Installed, tmp_path: Path
    ) -> None:
        mirrors = ("hami-mirrors", "hami-mirrors-nodes")
        others = ("bind-admission", "volcano", "volcano-extender")
        added = ("otel", "advertise-amounts", "hami-take-over", *mirrors, *others)
        copy = pinned_copy(tmp_path)
        components = [copy / "components" / name for name in added]
        # The Job of the installation has another image, and a Job never changes.
        name = {"name": "hami-bootstrap", "namespace": SYSTEM_NAMESPACE}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": name}
        production = copy / "overlays" / "prod"
        names = [copy / "components" / "bind-admission" / "example.yaml"]
        directory = overlay(tmp_path / "mine", production, components, without=[job], files=names)
        arguments = ("apply", "--dry-run=server", "-k", str(directory))
        accepted = (await site.kubectl(*arguments)).stdout
        assert "hami-nothing-else created (server dry run)" in accepted
        assert "hami-otel-collector created (server dry run)" in accepted
        assert "hami-webhook configured (server dry run)" in accepted

    async def test_policies_have_no_warnings_of_the_type_checker(self, site: Installed) -> None:
        async def checked() -> bool:
            items = (await site.client.call("GET", POLICIES))["items"]
            return all("typeChecking" in item.get("status", {}) for item in items)

        await until(checked)
        for item in (await site.client.call("GET", POLICIES))["items"]:
            assert not item["status"]["typeChecking"].get("expressionWarnings"), item["metadata"]


class TestServices:
    """As processes, configured by the manifests, on the bus with accounts and TLS."""

    async def test_pod_lives_from_admission_to_release(
        self, site: Installed, worked: Worked
    ) -> None:
        first = worked.first
        assert first["states"] == ["reserved", "bound", "prepared", "running"]
        (container,) = first["containers"]
        assert HEADER in container["stdout"]
        assert limits.decode(container["stdout"]).devices[0].memory_mib == 4000
        last = (await site.ledger_of(first["node"], first["uid"]))[-1][1]
        assert last.op == "release"
        assert worked.second["states"][-1] == "running"
        assert worked.second["trace_id"]
        assert worked.read == 200

    async def test_quota_refuses_in_words(self, worked: Worked) -> None:
        assert 'quota "gpu" limits.nvidia.com/gpumem: 8000 MiB wanted' in worked.refusal

    async def test_share_is_resized_by_who_may(self, worked: Worked) -> None:
        (refused, why), (done, told) = worked.resized
        assert refused == 403, why
        assert done == 200, told
        assert worked.seen_mib == 4500

    async def test_leases_of_background_tasks_are_listed(self, worked: Worked) -> None:
        assert "hami-kube-scheduler" in worked.leases

    async def test_keys_and_certificates_are_renewed_under_the_account_for_that(
        self, worked: Worked
    ) -> None:
        told = " ".join(worked.renewed)
        servings = ("webhook", "nats", "registry", "bind-admission")
        for what in ("hami-ca", *(f"hami-{one}-tls" for one in servings)):
            assert f"made Secret {what}" in told
        for what in (
            *("hami-trusted-keys", "hami-bus-accounts", "hami-ca"),
            *(f"{AGENTS_NAMESPACE}/{name}" for name in AGENTS_COPIES),
        ):
            assert f"ConfigMap {what}" in told
        assert "made Secret hami-signing-key" not in told


async def template_of(site: Installed, kind: str, name: str, namespace: str) -> Obj:
    """A pod as the controller of its owner would create it."""
    path = f"/apis/{'batch' if kind in ('jobs', 'cronjobs') else 'apps'}/v1/namespaces/{namespace}"
    spec = (await site.client.call("GET", f"{path}/{kind}/{name}"))["spec"]
    template = spec.get("jobTemplate", {}).get("spec", spec)["template"]
    pod: Obj = template["spec"]
    for claim in spec.get("volumeClaimTemplates", ()):
        name = claim["metadata"]["name"]
        pod["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": name}})
    # Without the labels of the template: its owner would adopt the pod.
    return {"metadata": {"name": f"probe-{name}"}, "spec": pod}


class TestNamespaces:
    """Pod Security as the API server enforces it, by dry runs of the pods of every owner."""

    async def test_services_are_admitted_under_the_level_restricted(self, site: Installed) -> None:
        found = await site.client.get("namespaces", SYSTEM_NAMESPACE)
        assert found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        for kind, name in (
            *(("deployments", f"hami-{one}") for one in ("webhook", "scheduler", "registry")),
            ("statefulsets", "hami-nats"),
            ("jobs", "hami-bootstrap"),
            ("cronjobs", "hami-bootstrap"),
        ):
            pod = await template_of(site, kind, name, SYSTEM_NAMESPACE)
            created = site.client.create("pods", pod, SYSTEM_NAMESPACE, dryRun="All")
            assert await refusal(created) == "", name

    async def test_pod_with_a_hosts_path_is_refused_beside_the_services(
        self, site: Installed
    ) -> None:
        grabs = pod("grabs")
        grabs["spec"]["volumes"] = [{"name": "host", "hostPath": {"path": "/"}}]
        refused = await refusal(site.client.create("pods", grabs, SYSTEM_NAMESPACE, dryRun="All"))
        assert "violates PodSecurity" in refused

    async def test_agents_pod_is_admitted_in_its_own_namespace_alone(self, site: Installed) -> None:
        agent = await template_of(site, "daemonsets", "hami-nodeagent-nvidia", AGENTS_NAMESPACE)
        await site.client.call(
            "POST",
            "/apis/node.k8s.io/v1/runtimeclasses",
            body={"metadata": {"name": "nvidia"}, "handler": "nvidia"},
        )

        async def is_admitted() -> bool:
            created = site.client.create("pods", agent, AGENTS_NAMESPACE, dryRun="All")
            return await refusal(created) == ""

        await until(is_admitted)
        elsewhere = agent | {"spec": agent["spec"] | {"serviceAccountName": "hami-registry"}}
        refused = await refusal(
            site.client.create("pods", elsewhere, SYSTEM_NAMESPACE, dryRun="All")
        )
        assert "forbidden" in refused


RESTRICTED = "restricted-tenant"
CATALOG = Catalog.from_settings()


@pytest.fixture(scope="class")
async def restricted(site: Installed) -> str:
    """A tenant's namespace that enforces the level ``restricted``, in force."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await site.client.create("namespaces", {"metadata": {"name": RESTRICTED, "labels": labels}})
    await until(lambda: _is_ready(site, RESTRICTED))
    return RESTRICTED


async def _is_ready(site: Installed, namespace: str) -> bool:
    """The namespace has the ServiceAccount that every pod needs."""
    found = await site.client.list("serviceaccounts", namespace)
    return bool(found["items"])


class TestRestrictedTenants:
    """Pods with shares in namespaces under Pod Security ``restricted``, through the webhook."""

    @pytest.mark.parametrize("vendor", CATALOG.vendors, ids=lambda vendor: vendor.name)
    async def test_pod_with_a_share_is_admitted(
        self, site: Installed, restricted: str, vendor: Vendor
    ) -> None:
        request = verification.Request(
            vendor=vendor.name,
            resources=verification.default_resources(vendor, memory_mib=1024, core_pct=10),
            image="app",
            is_python=False,
        )
        asking = verification.pod_of(request, f"share-{vendor.name}")
        del asking["metadata"]["namespace"]
        made = await site.client.create("pods", asking, restricted, dryRun="All")
        assert made["spec"]["schedulerName"] == "hami-scheduler"
        added = {kind for one in made["spec"]["volumes"] for kind in one if kind != "name"}
        assert added == {"downwardAPI", "emptyDir"}

    async def test_level_is_in_force_there(self, site: Installed, restricted: str) -> None:
        asking = pod("asks")
        asking["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        refused = await refusal(site.client.create("pods", asking, restricted, dryRun="All"))
        assert "violates PodSecurity" in refused


class TestTwoAccountsOfTheSchedulersPod:
    """Rights of each container's token, as the API server reports them."""

    @pytest.mark.parametrize(
        ("right", "extender", "kube_scheduler"),
        [
            (("patch", "", "pods"), True, False),
            (("create", "", "pods/eviction"), True, False),
            (("patch", "", "nodes"), True, False),
            (("create", "", "pods/binding"), True, True),
            (("delete", "", "pods"), False, True),
            (("list", "", "persistentvolumes"), False, True),
            (("update", "", "persistentvolumeclaims"), False, True),
            (("list", "storage.k8s.io", "csinodes"), False, True),
            (("update", "coordination.k8s.io", "leases"), False, True),
            (("get", "", "secrets"), False, False),
            (("create", "", "serviceaccounts/token"), False, False),
            (("create", "", "pods"), False, False),
        ],
    )
    async def test_each_may_what_its_container_does(
        self,
        site: Installed,
        right: tuple[str, str, str],
        extender: bool,  # noqa: FBT001 - a column of the table
        kube_scheduler: bool,  # noqa: FBT001 - a column of the table
    ) -> None:
        verb, group, resource = right
        name = "hami-kube-scheduler" if resource == "leases" else ""
        for account, wanted in (("scheduler", extender), ("kube-scheduler", kube_scheduler)):
            request = Request(
                user=f"{ACCOUNT}:{SYSTEM_NAMESPACE}:hami-{account}",
                verb=verb,
                group=group,
                resource=resource,
                namespace=SYSTEM_NAMESPACE,
                name=name,
            )
            assert await _is_allowed(site, request) is wanted, account

    async def test_each_container_mounts_its_own_token_and_kubelet_mounts_none(
        self, site: Installed
    ) -> None:
        spec = (await template_of(site, "deployments", "hami-scheduler", SYSTEM_NAMESPACE))["spec"]
        assert spec["automountServiceAccountToken"] is False
        volume_by_container = {
            container["name"]: [
                mount["name"] for mount in container["volumeMounts"] if "account" in mount["name"]
            ]
            for container in spec["containers"]
        }
        assert volume_by_container == {
            "scheduler": ["account"],
            "kube-scheduler": ["kube-scheduler-account"],
        }
        users = {}
        for name in ("scheduler", "kube-scheduler"):
            kubeconfig = yaml.safe_load((site.directory / f"{name}.kubeconfig").read_text())
            review = {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": kubeconfig["users"][0]["user"]["token"]},
            }
            path = "/apis/authentication.k8s.io/v1/tokenreviews"
            answer = await site.client.call("POST", path, body=review)
            users[name] = answer["status"]["user"]["username"].rpartition(":")[2]
        assert users == {
            "scheduler": "hami-scheduler",
            "kube-scheduler": "hami-kube-scheduler",
        }


class Roles:
    """The shipped roles and bindings, and the services' requests."""

    def __init__(self, shipped: Policy, policy: Policy, log: frozenset[Request]) -> None:
        self.ours = shipped.rules
        self.policy = policy
        self.finding = judge(policy, self.ours, log)


@pytest.fixture(scope="module")
async def roles(site: Installed, worked: Worked) -> Roles:
    del worked  # it has been done
    rendered = (await site.kubectl("kustomize", str(OVERLAYS / "dev"))).stdout
    people = {role.name for role in ROLES}
    documents = [
        document
        for document in yaml.safe_load_all(rendered)
        if document and document["metadata"]["name"] not in people
    ]
    shipped = Policy(documents)
    for role in {binding.role for binding in shipped.bindings} - shipped.rules.keys():
        name, namespace = role.name, role.namespace
        documents.append(
            {"kind": role.kind, **await site.client.get(COLLECTIONS[role.kind], name, namespace)}
        )
    # No account has the role of an integration as shipped.
    await bind(site, "ClusterRoleBinding", "hami-integration", AUDITOR)
    log = audited(site.plane.audit_log, namespaces=OURS)
    return Roles(shipped, Policy(documents), log.allowed | log.forbidden)


class TestRoles:
    """Sufficient, as the services did all their work under them; and minimal."""

    async def test_nothing_was_refused_to_a_service(self, site: Installed, roles: Roles) -> None:
        assert roles.finding.refused == []
        log = audited(site.plane.audit_log, namespaces=OURS)
        # Rights that were just granted take effect after a moment.
        assert log.forbidden - log.allowed == frozenset()

    async def test_every_right_and_every_binding_was_needed(self, roles: Roles) -> None:
        assert [right for right in roles.finding.idle if right not in SELDOM] == []
        assert roles.finding.idle_bindings == []

    async def test_without_any_one_right_something_is_refused(
        self, site: Installed, roles: Roles
    ) -> None:
        """Remove each right on the API server, which then refuses the request that needed it."""
        removed = 0
        for role in roles.ours:
            rights = roles.policy.rights(role)
            try:
                for right in rights:
                    request = roles.finding.need.get(right) or _not_seen(right)
                    await until(partial(_is_allowed, site, request))
                    await _rewrite(site, role, [r.rule() for r in rights if r != right])
                    await until(partial(_is_refused, site, request))
                    removed += 1
            finally:
                await _rewrite(site, role, roles.ours[role])
        assert removed == sum(len(roles.policy.rights(role)) for role in roles.ours)
        for request in roles.finding.need.values():
            await until(partial(_is_allowed, site, request))

    async def test_without_any_one_binding_something_is_refused(
        self, site: Installed, roles: Roles
    ) -> None:
        for binding in roles.policy.bindings:
            request = roles.finding.need_binding[binding]
            where = (COLLECTIONS[binding.kind], binding.name, binding.namespace)
            kept = await site.client.get(*where)
            await site.client.delete(*where)
            await until(partial(_is_refused, site, request))
            del kept["metadata"]["resourceVersion"], kept["metadata"]["uid"]
            await site.client.create(COLLECTIONS[binding.kind], kept, binding.namespace)
            await until(partial(_is_allowed, site, request))


def _not_seen(right: Right) -> Request:
    """Requests of the registry about an integration, and rare requests of services."""
    if right in SELDOM:
        return SELDOM[right]
    assert right.role.name == "hami-integration", right
    return Request(
        user=f"{ACCOUNT}:{NAMESPACE}:{AUDITOR}",
        verb=busaccess.INTEGRATION_VERB,
        group=busaccess.INTEGRATION_GROUP,
        resource=busaccess.INTEGRATION_RESOURCE,
    )


async def _rewrite(site: Installed, role: RoleRef, rules: Any) -> None:
    await site.client.patch(
        COLLECTIONS[role.kind], role.name, {"rules": list(rules)}, namespace=role.namespace
    )


async def _is_allowed(site: Installed, request: Request) -> bool:
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    answer = await site.client.call("POST", path, body=request.review())
    return bool(answer["status"]["allowed"])


async def _is_refused(site: Installed, request: Request) -> bool:
    return not await _is_allowed(site, request)


@pytest.fixture(scope="class")
async def without_webhook(site: Installed) -> Installed:
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
    """The calls are an administrator's, whom no role restricts."""

    @pytest.mark.parametrize(
        "key", [*sorted(annotations.RESERVED), LIMITS, "hami.io/x-devices-allocated"]
    )
    async def test_pod_with_one_is_not_created(self, site: Installed, key: str) -> None:
        call = site.client.create("pods", pod("forged", annotations={key: "{}"}), NAMESPACE)
        assert "take hami.io/allocation and its like out" in await refusal(call)

    @pytest.mark.parametrize("subresource", ["", "status", "ephemeralcontainers", "resize"])
    async def test_no_write_of_a_pod_adds_one(self, site: Installed, subresource: str) -> None:
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

    async def test_binding_with_one_is_the_schedulers_alone(self, site: Installed) -> None:
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
        self, site: Installed, change: Obj, said: str
    ) -> None:
        call = site.client.patch(
            "pods", "bound", {"metadata": {"annotations": change}}, namespace=NAMESPACE
        )
        assert said in await refusal(call)

    async def test_other_logins_continue(self, site: Installed) -> None:
        other = {"metadata": {"annotations": {"team": "x"}, "labels": {"a": "b"}}}
        assert await refusal(site.client.patch("pods", "bound", other, namespace=NAMESPACE)) == ""
        status = {"status": {"phase": "Running"}}
        patched = await site.kubectl(
            *("patch", "pod", "bound", "-n", NAMESPACE, "--subresource=status"),
            *("--type=merge", "-p", json.dumps(status)),
        )
        assert "patched" in patched.stdout


async def scheduler_access(site: Installed) -> Any:
    access = site.plane.access()
    token = await site.token("hami-scheduler")
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
        self, site: Installed, variable: Obj, *, is_refused: bool
    ) -> None:
        call = site.client.create("pods", pod("grabs", env=[variable]), NAMESPACE, dryRun="All")
        assert ("asks for none" in await refusal(call)) is is_refused

    async def test_container_that_asks_may_set_it(self, site: Installed) -> None:
        asking = pod("asks", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
        asking["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        assert await refusal(site.client.create("pods", asking, NAMESPACE, dryRun="All")) == ""

    async def test_namespace_may_be_exempt(self, site: Installed) -> None:
        labels = {ENVIRONMENT_LABEL: ENVIRONMENT_ALLOWED}
        await site.client.create("namespaces", {"metadata": {"name": "drivers", "labels": labels}})
        grabs = pod("installer", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])

        async def is_allowed() -> bool:
            return await refusal(site.client.create("pods", grabs, "drivers", dryRun="All")) == ""

        await until(is_allowed)

    async def test_debug_container_gets_nothing(self, site: Installed) -> None:
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
