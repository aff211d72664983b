# SPDX-License-Identifier: Apache-2.0
"""Checks an installation and names each fault with its fix, for ``hamictl doctor``.

Two sources. Agents check their own nodes and the registry checks the bus (``GET /v1/checks``); the
Kubernetes API has the objects: nodes and their resources, the webhook and its certificates,
kube-scheduler's configuration, the versions that run. The webhook is tested by creating a pod in a
dry run. Nothing is changed. A source that is unavailable is a finding of its own, never a pass.
Times in Unix seconds.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hami_common import certificates, documents, namespaces
from hami_common.errors import Denied, HamiError, NotFound, SettingsInvalid, Unavailable
from hami_common.events.asking import CheckAnswer, Finding, Verdict
from hami_common.pods import annotations
from hami_common.ports import KubeApi
from hami_common.vendors.catalog import Catalog
from hamictl import drachecks, installation, nodechecks
from hamictl.nodeselection import selects

WEBHOOK = "hami-webhook"
POD_SECURITY = "pod-security.kubernetes.io/enforce"
ENFORCED_LEVELS = ("baseline", "restricted")
BUS_TLS = "hami-nats-tls"
PROBE = "hami-doctor-probe"
NODE_LABEL = "hami.io/nvidia"
HAMI_LABEL = ("gpu", "on")
HAMI_PLUGIN = "hami-device-plugin"
"""Component of HAMi's chart whose pods serve NVIDIA devices."""
GPU_LABELS = (
    ("feature.node.kubernetes.io/pci-10de.present", "true"),
    ("feature.node.kubernetes.io/pci-0302_10de.present", "true"),
    ("nvidia.com/gpu.present", "true"),
)
"""Labels that node-feature-discovery and the GPU operator set on nodes with NVIDIA devices."""
SOON_S = 14 * 86400.0
SKEW_S = 5.0
SKEW_FAIL_S = 60.0

Document = dict[str, Any]


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the registry's ``/v1/checks``."""

    time_s: float
    version: str
    items: tuple[CheckAnswer, ...]
    findings: tuple[Finding, ...] = ()
    silent: tuple[str, ...] = ()


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, the worst first."""

    failed: int
    warned: int
    passed: int
    findings: tuple[Finding, ...]


def diagnose(findings: Iterable[Finding]) -> Diagnosis:
    """Sort and count the findings."""
    order: dict[Verdict, int] = {"FAIL": 0, "WARN": 1, "PASS": 2}
    found = sorted(findings, key=lambda one: (order[one.verdict], one.check, one.node))
    return Diagnosis(
        failed=sum(one.verdict == "FAIL" for one in found),
        warned=sum(one.verdict == "WARN" for one in found),
        passed=sum(one.verdict == "PASS" for one in found),
        findings=tuple(found),
    )


def from_agents(checks: Checks, *, own_version: str, now_s: float) -> Iterator[Finding]:
    """Yield findings of agents and registry, and compare their clocks and versions."""
    yield from checks.findings
    for node in checks.silent:
        yield Finding(
            check="agent",
            verdict="FAIL",
            text="the node has devices and its agent does not answer",
            fix="check the agent's pod on this node and its connection to NATS",
            node=node,
        )
    for answer in checks.items:
        yield from answer.findings
        yield _clock(answer.time_s - checks.time_s, node=answer.node)
    yield _clock(checks.time_s - now_s, node="")
    versions = {answer.version for answer in checks.items} | {checks.version, own_version}
    versions.discard("")
    if len(versions) > 1:
        yield Finding(
            check="versions",
            verdict="WARN",
            text=f"several versions are in use: {', '.join(sorted(versions))}",
            fix="finish the upgrade: agents, registry and hamictl of one version",
        )
    else:
        yield Finding(check="versions", verdict="PASS", text=f"all are {min(versions)}")


def _clock(skew_s: float, *, node: str) -> Finding:
    clock = "the node's clock" if node else "the registry's clock"
    reference = "the registry" if node else "this machine"
    if abs(skew_s) < SKEW_S:
        return Finding(check="clock", verdict="PASS", text=f"{clock} is in sync", node=node)
    return Finding(
        check="clock",
        verdict="FAIL" if abs(skew_s) >= SKEW_FAIL_S else "WARN",
        text=f"{clock} is {abs(skew_s):.0f} s "
        f"{'ahead of' if skew_s > 0 else 'behind'} {reference}'s",
        fix="synchronize it with chrony or systemd-timesyncd",
        node=node,
    )


def _labels(node: Document) -> Mapping[str, str]:
    labels: Mapping[str, str] = node["metadata"].get("labels") or {}
    return labels


class ClusterDoctor:
    """The checks that ask the Kubernetes API."""

    def __init__(
        self,
        kube: KubeApi,
        *,
        namespace: str,
        agents_namespace: str = namespaces.AGENTS,
        now_s: float,
        agents: Checks | None,
    ) -> None:
        """``agents``: the registry's checks; ``None`` if it is unavailable."""
        self._kube = kube
        self._namespace = namespace
        self._agents_namespace = agents_namespace
        self._now_s = now_s
        self._agents = agents

    async def findings(self) -> list[Finding]:
        """Run every check; a check that fails to run becomes a finding."""
        found: list[Finding] = []
        for name, check in (
            ("node-labels", self.nodes),
            ("node-versions", self.platform),
            ("storage", self.storage),
            ("second-plugin", self.second_plugin),
            ("namespaces", self.namespaces),
            ("webhook", self.webhook),
            ("certificates", self.certificates),
            ("kube-scheduler", self.kube_scheduler),
            ("versions", self.images),
            (drachecks.CHECK, self.claims),
        ):
            try:
                found += await check()
            except NotFound as error:
                found.append(
                    Finding(
                        check=name,
                        verdict="FAIL",
                        text=str(error),
                        fix="apply deploy/kustomize, or name the right --namespace",
                    )
                )
            except HamiError as error:
                found.append(
                    Finding(
                        check=name,
                        verdict="WARN",
                        text=f"the check failed to run: {error}",
                        fix="use an account with permission to read it",
                    )
                )
        return found

    async def _get(self, path: str) -> Document:
        return await installation.get(self._kube, path)

    async def _list(self, path: str) -> list[Document]:
        return await installation.items(self._kube, path)

    # --- nodes -----------------------------------------------------------------------------------

    async def nodes(self) -> list[Finding]:
        """Find nodes with devices but no label, and labelled nodes without an agent."""
        known = (
            None
            if self._agents is None
            else {one.node for one in self._agents.items} | set(self._agents.silent)
        )
        found = []
        labelled = 0
        agent, plugins = await self._device_plugins()
        for node in await self._list("/api/v1/nodes"):
            name = node["metadata"]["name"]
            labels: Mapping[str, str] = node["metadata"].get("labels") or {}
            is_labelled = selects(agent, labels)
            labelled += is_labelled
            if is_labelled and any(selects(plugin, labels) for plugin in plugins):
                found.append(
                    Finding(
                        check="second-plugin",
                        verdict="FAIL",
                        text="HAMi's device plugin and the NVIDIA agent both select the node",
                        fix=f"hamictl migrate node {name}, without the component hami-node-label",
                        node=name,
                    )
                )
            if (
                not is_labelled
                and labels.get(HAMI_LABEL[0]) == HAMI_LABEL[1]
                and not any(selects(plugin, labels) for plugin in plugins)
            ):
                found.append(
                    Finding(
                        check="node-labels",
                        verdict="FAIL",
                        text=f"the node has HAMi's label {'='.join(HAMI_LABEL)}, which no agent"
                        " selects",
                        fix=f"kubectl label node {name} {NODE_LABEL}=true, or add the component"
                        " hami-node-label to the overlay",
                        node=name,
                    )
                )
            elif not is_labelled and any(labels.get(key) == value for key, value in GPU_LABELS):
                found.append(
                    Finding(
                        check="node-labels",
                        verdict="FAIL",
                        text="the node has NVIDIA devices and lacks the label of their agent,"
                        f" {NODE_LABEL}=true",
                        fix=f"kubectl label node {name} {NODE_LABEL}=true",
                        node=name,
                    )
                )
            if is_labelled and known is not None and name not in known:
                found.append(
                    Finding(
                        check="agent",
                        verdict="FAIL",
                        text="the node is labelled for the NVIDIA agent, and no agent has reported"
                        " from it",
                        fix="check the agent's pod on this node: kubectl -n"
                        f" {self._agents_namespace} get pods -o wide",
                        node=name,
                    )
                )
        if not found:
            found.append(
                Finding(check="node-labels", verdict="PASS", text=f"{labelled} nodes are labelled")
            )
        return found

    async def _device_plugins(self) -> tuple[Document, list[Document]]:
        """Return the pod specifications of the NVIDIA agent and of HAMi's device plugins.

        An overlay may change the labels that the agent selects; without its DaemonSet, the
        specification selects ``NODE_LABEL``.
        """
        agent: Document = {"nodeSelector": {NODE_LABEL: "true"}}
        plugins: list[Document] = []
        for item in await self._list("/apis/apps/v1/daemonsets"):
            template = item["spec"].get("template") or {}
            labels = (template.get("metadata") or {}).get("labels") or {}
            spec: Document = template.get("spec") or {}
            names = (item["metadata"].get("namespace"), item["metadata"]["name"])
            if names == (self._agents_namespace, f"{installation.AGENT}-nvidia"):
                agent = spec
            elif labels.get("app.kubernetes.io/component") == HAMI_PLUGIN:
                plugins.append(spec)
        return agent, plugins

    async def platform(self) -> list[Finding]:
        """Check the versions of nodes that an agent of any vendor selects."""
        agents = await installation.agents(self._kube, self._agents_namespace)
        nodes = [
            node
            for node in await self._list("/api/v1/nodes")
            if any(agent.selects(node) for agent in agents)
        ]
        settings = await installation.settings(
            self._kube, self._agents_namespace, installation.AGENT_FILE
        )
        return list(nodechecks.platform(nodes, injection=settings.get("injection", "cdi")))

    async def storage(self) -> list[Finding]:
        """Check the volume claims of the services."""
        claims = await self._list(f"/api/v1/namespaces/{self._namespace}/persistentvolumeclaims")
        classes = await self._list("/apis/storage.k8s.io/v1/storageclasses")
        return list(nodechecks.storage(claims, classes))

    async def second_plugin(self) -> list[Finding]:
        """Find DaemonSets of other device plugins and of NVIDIA's MIG manager on our nodes."""
        nvidia, _ = await self._device_plugins()
        agents = await installation.agents(self._kube, self._agents_namespace)
        nodes = [
            node
            for node in await self._list("/api/v1/nodes")
            if selects(nvidia, _labels(node)) or any(agent.selects(node) for agent in agents)
        ]
        found: list[Finding] = []
        for item in await self._list("/apis/apps/v1/daemonsets"):
            metadata = item["metadata"]
            is_running = (item.get("status") or {}).get("desiredNumberScheduled", 1) > 0
            if metadata.get("namespace") == self._agents_namespace or not is_running:
                continue
            found += nodechecks.neighbors(
                f"{metadata['namespace']}/{metadata['name']}",
                item["spec"]["template"]["spec"],
                [(node["metadata"]["name"], _labels(node)) for node in nodes],
            )
        return found or [
            Finding(
                check="second-plugin",
                verdict="PASS",
                text="no other device plugin runs on a node with an agent",
            )
        ]

    async def namespaces(self) -> list[Finding]:
        """Find agents of an older release, and a namespace that admits privileged pods."""
        found = []
        for item in await self._list(f"/apis/apps/v1/namespaces/{self._namespace}/daemonsets"):
            metadata = item["metadata"]
            if (metadata.get("labels") or {}).get("app.kubernetes.io/name") == installation.AGENT:
                name = metadata["name"]
                found.append(
                    Finding(
                        check="namespaces",
                        verdict="FAIL",
                        text=f"DaemonSet {name} of an older release is left in namespace"
                        f" {self._namespace}: agents run in {self._agents_namespace}",
                        fix=f"kubectl -n {self._namespace} delete daemonset {name}",
                    )
                )
        one = await self._get(f"/api/v1/namespaces/{self._namespace}")
        level = (one["metadata"].get("labels") or {}).get(POD_SECURITY, "")
        if level not in ENFORCED_LEVELS:
            found.append(
                Finding(
                    check="namespaces",
                    verdict="WARN",
                    text=f"namespace {self._namespace} enforces no Pod Security level",
                    fix=f"kubectl label namespace {self._namespace} {POD_SECURITY}=restricted",
                )
            )
        return found or [
            Finding(
                check="namespaces",
                verdict="PASS",
                text=f"namespace {self._namespace} enforces Pod Security level {level}",
            )
        ]

    # --- admission -------------------------------------------------------------------------------

    async def webhook(self) -> list[Finding]:
        """Check that a pod with a device request passes the webhook."""
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/" + WEBHOOK
        configuration = await self._get(path)
        found = [
            Finding(
                check="webhook",
                verdict="FAIL",
                text=f"webhook {hook.get('name')} has failurePolicy Ignore: while it is"
                " unavailable, pods get devices without any limit",
                fix="apply deploy/kustomize/base/webhook-configuration.yaml",
            )
            for hook in configuration.get("webhooks") or []
            if hook.get("failurePolicy") != "Fail"
        ]
        return [*found, await self._probe()]

    async def _probe(self) -> Finding:
        expected = await installation.webhook_settings(self._kube, self._namespace)
        vendors = expected.vendors
        names = (vendors.nvidia.resource_count_name, vendors.nvidia.resource_memory_name)
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": PROBE, "namespace": "default"},
            "spec": {
                "containers": [
                    {
                        "name": "probe",
                        "image": "probe",
                        "resources": {"limits": dict.fromkeys(names, "1")},
                    }
                ]
            },
        }
        try:
            answer = await self._kube.create(
                "/api/v1/namespaces/default/pods?dryRun=All", json.dumps(body).encode()
            )
        except Denied as error:
            return _refused(error)
        except Unavailable as error:
            return _refused(Denied(peer="API server", detail=error.detail))
        pod = msgspec.json.decode(answer)
        if (pod["metadata"].get("labels") or {}).get(annotations.MANAGED_LABEL) != "true":
            scheduler = pod["spec"].get("schedulerName")
            return Finding(
                check="webhook",
                verdict="FAIL",
                text=f"a pod with a device request bypasses the webhook and goes to {scheduler}",
                fix="check the matchConditions and selectors of the webhook configuration, and the"
                " labels of namespace default",
            )
        return Finding(
            check="webhook", verdict="PASS", text="a pod with a device request is admitted"
        )

    async def certificates(self) -> list[Finding]:
        """Check the lifetime of the webhook's certificate and that the API server trusts it."""
        configuration = await self._get(
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/" + WEBHOOK
        )
        webhooks: Sequence[Document] = configuration.get("webhooks") or []
        bundles = {str(hook.get("clientConfig", {}).get("caBundle") or "") for hook in webhooks}
        if not any("service" in hook.get("clientConfig", {}) for hook in webhooks):
            return [self._life(_decoded(one), "the webhook's CA") for one in sorted(bundles)]
        secret = await self._get(f"/api/v1/namespaces/{self._namespace}/secrets/{WEBHOOK}-tls")
        serving = _decoded((secret.get("data") or {}).get("tls.crt", ""))
        found = [self._life(serving, f"the webhook's certificate in Secret {WEBHOOK}-tls")]
        found += await self._bus_certificate()
        names = [f"{WEBHOOK}.{self._namespace}.svc"]
        for bundle in sorted(bundles):
            authority = _decoded(bundle)
            found.append(self._life(authority, "the CA in the webhook configuration"))
            if not certificates.serves(serving, names, authority=authority):
                found.append(
                    Finding(
                        check="certificates",
                        verdict="FAIL",
                        text=f"the CA in the webhook configuration did not issue the certificate of"
                        f" {names[0]}",
                        fix="run hamictl bootstrap, or check cert-manager's CA injector",
                    )
                )
        return found

    async def _bus_certificate(self) -> list[Finding]:
        """Check the certificate of NATS, if the installation has one."""
        try:
            secret = await self._get(f"/api/v1/namespaces/{self._namespace}/secrets/{BUS_TLS}")
        except NotFound:
            return []
        serving = _decoded((secret.get("data") or {}).get("tls.crt", ""))
        return [self._life(serving, f"the bus's certificate in Secret {BUS_TLS}")]

    def _life(self, certificate: bytes, what: str) -> Finding:
        ends = certificates.ends(certificate)
        if ends is None:
            return Finding(
                check="certificates",
                verdict="FAIL",
                text=f"{what} is missing or not a certificate",
                fix="run hamictl bootstrap",
            )
        left_s = ends.timestamp() - self._now_s
        if left_s <= 0:
            return Finding(
                check="certificates",
                verdict="FAIL",
                text=f"{what} expired on {ends:%Y-%m-%d %H:%M}",
                fix="run hamictl bootstrap, and check the CronJob that renews it",
            )
        if left_s < SOON_S:
            return Finding(
                check="certificates",
                verdict="WARN",
                text=f"{what} expires in {left_s / 86400:.0f} days",
                fix="check the CronJob that renews it",
            )
        return Finding(
            check="certificates",
            verdict="PASS",
            text=f"{what} is valid for {left_s / 86400:.0f} days",
        )

    # --- kube-scheduler --------------------------------------------------------------------------

    async def kube_scheduler(self) -> list[Finding]:
        """Check that a kube-scheduler calls the extender for the profile."""
        texts = await installation.kube_scheduler_texts(self._kube, self._namespace)
        if not texts:
            return [
                Finding(
                    check="kube-scheduler",
                    verdict="FAIL",
                    text=f"no KubeSchedulerConfiguration in namespace {self._namespace}",
                    fix="apply deploy/kustomize",
                )
            ]
        expected = await installation.webhook_settings(self._kube, self._namespace)
        name, vendors = expected.scheduler_name, expected.vendors
        resources = Catalog.from_settings(vendors).resource_names()
        problems = [
            problem for text in texts for problem in _scheduler_problems(text, name, resources)
        ]
        if problems:
            return [
                Finding(check="kube-scheduler", verdict="FAIL", text=text, fix=fix)
                for text, fix in problems
            ]
        return [
            Finding(
                check="kube-scheduler",
                verdict="PASS",
                text=f"profile {name} calls the extender",
            )
        ]

    # --- claims ----------------------------------------------------------------------------------

    async def claims(self) -> list[Finding]:
        """Check that the cluster serves ResourceClaims, where that is on."""
        agents = self._agents
        return await drachecks.ClaimsDoctor(
            self._kube,
            namespace=self._namespace,
            agents_namespace=self._agents_namespace,
            answers=() if agents is None else agents.items,
            silent=() if agents is None else agents.silent,
        ).findings()

    # --- versions --------------------------------------------------------------------------------

    async def images(self) -> list[Finding]:
        """Check that all services run images of one version, and kube-scheduler the cluster's."""
        tags: dict[str, str] = {}
        found: list[Finding] = []
        server = str((await self._get("/version")).get("gitVersion", ""))
        for namespace, kind in (
            (self._namespace, "deployments"),
            (self._agents_namespace, "daemonsets"),
        ):
            for item in await self._list(f"/apis/apps/v1/namespaces/{namespace}/{kind}"):
                for container in item["spec"]["template"]["spec"].get("containers") or []:
                    image = str(container.get("image", ""))
                    if container.get("name") == "kube-scheduler":
                        found += nodechecks.kube_scheduler(_version_of(image), server)
                    if "hami" in image:
                        name = f"{item['metadata']['name']}/{container['name']}"
                        tags[name] = _version_of(image)
        if len(set(filter(None, tags.values()))) > 1:
            listed = ", ".join(f"{name} {tag}" for name, tag in sorted(tags.items()))
            found.append(
                Finding(
                    check="versions",
                    verdict="WARN",
                    text=f"images of several versions: {listed}",
                    fix="finish the upgrade",
                )
            )
        return found


def _version_of(image: str) -> str:
    """Return the tag of an image; empty for a digest, which has no version."""
    named, _, digest = image.rpartition("/")[2].partition("@")
    return named.partition(":")[2] or ("" if digest else "latest")


def _refused(error: Denied) -> Finding:
    text = error.detail
    if "webhook" not in text and "x509" not in text:
        return Finding(
            check="webhook",
            verdict="WARN",
            text=f"creating a pod in a dry run failed: {text}",
            fix="use an account with permission to create pods in namespace default",
        )
    if "x509" in text or "certificate" in text:
        return Finding(
            check="webhook",
            verdict="FAIL",
            text=f"the API server does not trust the webhook: {text}",
            fix="run hamictl bootstrap: it writes the CA into the webhook configuration",
        )
    if "denied the request" in text:
        return Finding(
            check="webhook",
            verdict="WARN",
            text=f"the webhook denies a minimal pod: {text}",
            fix="check the webhook's settings",
        )
    return Finding(
        check="webhook",
        verdict="FAIL",
        text=f"the API server does not reach the webhook: {text}",
        fix="check the pods and endpoints of Service hami-webhook, and network policies",
    )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def rows_of(found: Sequence[Finding], *, is_wide: bool) -> list[list[object]]:
    """Return rows of a table, without passed checks unless wide."""
    return [
        [one.verdict, one.check, one.node or "-", one.text, one.fix or "-"]
        for one in found
        if is_wide or one.verdict != "PASS"
    ]


def _scheduler_problems(
    text: str, name: str, resources: frozenset[str]
) -> Iterator[tuple[str, str]]:
    try:
        configuration = documents.yaml_one(text, field="configuration") or {}
    except SettingsInvalid as error:
        yield f"the configuration {error.problem}", "apply deploy/kustomize"
        return
    profiles = [p.get("schedulerName") for p in configuration.get("profiles") or []]
    if name not in profiles:
        yield (
            f"no profile {name}",
            f"add a profile with schedulerName {name}",
        )
    extenders = [
        one
        for one in configuration.get("extenders") or []
        if one.get("filterVerb") and one.get("bindVerb")
    ]
    if not extenders:
        yield "no extender with filterVerb and bindVerb", "add the extender of deploy/kustomize"
        return
    managed = {r.get("name") for one in extenders for r in one.get("managedResources") or []}
    missing = sorted(resources - managed) if managed else []
    if missing:
        yield (
            f"the extender does not manage {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),  # noqa: PLR2004
            "list every resource under managedResources, with ignoredByScheduler: true",
        )
    if any(one.get("ignorable") for one in extenders):
        yield (
            "the extender is ignorable: during an outage, pods are placed without a share",
            "set ignorable: false",
        )
    if configuration.get("percentageOfNodesToScore") != 100:  # noqa: PLR2004 - percent
        yield (
            "percentageOfNodesToScore is not 100: a pod may stay pending beside a free device",
            "set percentageOfNodesToScore: 100",
        )
