# SPDX-License-Identifier: Apache-2.0
"""Roles of people in an installation, judged by its API server; run by ``test_deploy``."""

import json
import os
from pathlib import Path

import anyio
import yaml

from hami_common.runtime import kubeio
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.kubeauth import KubeAuth
from hami_sim.cluster import Document
from hami_sim.kubernetes import configuration
from hami_sim.kubernetes.pki import write_kubeconfig
from tests.e2e.conftest import small_pod
from tests.e2e.work import until_runs
from tests.support.installed import REGISTRY, Installed, run
from tests.support.people import OTHER, OWN, SUBJECTS, check, guarded_by
from tests.support.rbac import COLLECTIONS, GROUP

COMPONENT = configuration.shipped_directory().parent / "components" / "default-tenant"
HOME, USER = "hami-default", "hami-user"
IN_FORCE_S = 60.0
"""Longest time until the API server judges by new bindings."""
KUBERNETES = {
    "view": ("tenant-viewer", "RoleBinding"),
    "edit": ("tenant-developer", "RoleBinding"),
    "admin": ("tenant-developer", "RoleBinding"),
    "cluster-admin": ("platform-admin", "ClusterRoleBinding"),
}
"""Kubernetes' own ClusterRole: the subject of the matrix with the same access."""


async def _bind(site: Installed, kind: str, role: str, account: str) -> None:
    binding: Document = {
        "metadata": {"name": f"people-{account}"},
        "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": OWN}],
    }
    namespace = OWN if kind == "RoleBinding" else ""
    await site.client.create(COLLECTIONS[kind], binding, namespace)


class TestPeople:
    """Every role of the page on every route, and one person with a token alone."""

    async def test_api_server_grants_each_role_its_routes(self, site: Installed) -> None:
        for namespace in (OWN, OTHER):
            await site.client.create("namespaces", {"metadata": {"name": namespace}})
        for account in (*SUBJECTS, *KUBERNETES):
            await site.client.create("serviceaccounts", {"metadata": {"name": account}}, OWN)
        for account, (role, is_everywhere) in SUBJECTS.items():
            if role:
                kind = "ClusterRoleBinding" if is_everywhere else "RoleBinding"
                await _bind(site, kind, role, account)
        for account, (_, kind) in KUBERNETES.items():
            await _bind(site, kind, account, account)
        tokens = {one: await site.token(one, namespace=OWN) for one in (*SUBJECTS, *KUBERNETES)}
        like = {account: subject for account, (subject, _) in KUBERNETES.items()}
        async with kubeio.connect(
            str(site.kubeconfig), user_agent="people", request_timeout_s=20, start_timeout_s=20
        ) as kube:
            compared, ends_s = 0, anyio.current_time() + IN_FORCE_S
            while True:  # the API server begins to judge by new bindings after a moment
                auth = KubeAuth(lambda: kube, clock=SystemClock(), ttl_s=300, refused_ttl_s=300)
                for token in tokens.values():
                    assert await auth.caller(token) is not None
                try:
                    compared = await check(guarded_by(auth), tokens, like=like)
                except AssertionError:
                    if anyio.current_time() > ends_s:
                        raise
                else:
                    break
        assert compared > 600
        for account, expected in (("viewer", 200), ("tenant-viewer", 403), ("stranger", 403)):
            status, _ = await site.registry("/v1/nodes", tokens[account])
            assert status == expected, account

    async def test_session_lists_what_the_registry_answers(self, site: Installed) -> None:
        token = await site.token("tenant-developer", namespace=OWN)
        for query, paths in (
            ("", {}),
            (
                f"?namespace={OWN}",
                {
                    f"/v1/allocations?namespace={OWN}": "GET /v1/allocations",
                    f"/v1/quotas?namespace={OWN}": "GET /v1/quotas",
                    f"/v1/consumption?namespace={OWN}": "GET /v1/consumption",
                },
            ),
        ):
            status, text = await site.registry(f"/v1/session{query}", token)
            assert status == 200
            routes = json.loads(text)["routes"]
            assert "GET /v1/nodes" not in routes
            assert ("POST /v1/resize" in routes) == bool(query)
            for path, route in paths.items():
                assert route in routes
                assert (await site.registry(path, token))[0] == 200, path
        assert (await site.registry("/v1/nodes", token))[0] == 403

    async def test_person_of_the_default_tenant_needs_a_token_only(
        self, site: Installed, tmp_path: Path
    ) -> None:
        document = {"kind": "Kustomization", "components": [os.path.relpath(COMPONENT, tmp_path)]}
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(document))
        await site.kubectl("apply", "-k", str(tmp_path))
        token = await site.token(USER, namespace=HOME)
        admin = yaml.safe_load(site.kubeconfig.read_text())["clusters"][0]["cluster"]
        kubeconfig = write_kubeconfig(
            tmp_path / "person",
            server=admin["server"],
            ca_file=admin["certificate-authority"],
            token=token,
        )
        kubectl = [site.plane.control.programs.path("kubectl"), f"--kubeconfig={kubeconfig}"]
        for name, memory_mib in (("mine", 4000), ("large", 16000)):
            file = tmp_path / f"{name}.yaml"
            file.write_text(yaml.safe_dump(small_pod(name, memory_mib=memory_mib)))
            await run(*kubectl, "-n", HOME, "create", "-f", str(file), check=True)
            if name == "mine":
                await until_runs(site, name, HOME)
        registry = f"https://{REGISTRY}:{site.ports['registry-tls']}"
        env = {
            **os.environ,
            "HAMICTL_REGISTRY": registry,
            "HAMICTL_SCHEDULER": registry,
            "HAMICTL_CA_FILE": str(site.ca_file),
            "HAMICTL_TOKEN": token,
            "KUBECONFIG": str(kubeconfig),
        }

        async def answer(*words: str) -> Document:
            done = await site.hamictl(*words, "-n", HOME, "-o", "json", env=env)
            found: Document = json.loads(done.stdout)
            return found

        shares: list[Document] = []

        async def is_listed() -> bool:
            shares[:] = (await answer("get", "allocations"))["items"]
            return [one["state"] for one in shares] == ["running"]

        await site.until("the share is listed", is_listed)
        (share,) = shares
        assert (share["namespace"], share["pod"]) == (HOME, "mine")
        quotas = (await answer("get", "quotas"))["items"]
        memory = next(row for row in quotas if row["key"] == "limits.nvidia.com/gpumem")
        assert (memory["used"], memory["limit"]) == (4000, 16000)

        async def is_refused() -> bool:
            explained = await answer("explain", "pod", "large")
            return "ResourceQuotaNotFit" in json.dumps(explained)

        await site.until("the large pod is over the quota", is_refused)

        async def is_counted() -> bool:
            return HOME in json.dumps(await answer("usage"))

        await site.until("the use is counted", is_counted)
        workload = await answer("get", "workload", "mine")
        assert workload["containers"][0]["devices"]

        async def is_traced() -> bool:
            steps = [line["what"] for line in (await answer("trace", "mine"))["lines"]]
            return "decision bind: placed" in steps

        await site.until("the trace has the decision", is_traced)
        for path in ("/v1/nodes", "/v1/allocations", f"/v1/allocations?namespace={OWN}"):
            assert (await site.registry(path, token))[0] == 403, path
        for path in ("nodes", "secrets", f"pods -n {OWN}"):
            refused = await run(*kubectl, "-n", HOME, "get", *path.split(), check=False)
            assert "Forbidden" in refused.stderr, path
        await run(
            *kubectl, "-n", HOME, "delete", "pod", "mine", "large", "--wait=false", check=True
        )
