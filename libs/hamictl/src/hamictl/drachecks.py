# SPDX-License-Identifier: Apache-2.0
"""Checks that a cluster can serve ResourceClaims, for ``hamictl doctor`` (docs/dra.md).

Only clusters with the setting ``dra.enabled`` are checked. Feature gates are found by a dry run,
because the API server drops fields of features that are off. These are the gates of the API server
alone; those of kube-scheduler and kubelet cannot be read. Container runtimes are judged by the
version that kubelet reports, unless the agent found the setting on its host. Outside documents:
``resource.k8s.io/v1``, feature gates and authorization of Kubernetes 1.37.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from hami_common import documents
from hami_common.dra.names import (
    CLAIMS_CDI,
    CLASSES,
    DRIVER,
    GROUP,
    VERSION,
)
from hami_common.dra.podclaims import claims_profile
from hami_common.errors import Denied, HamiError, NotFound, SettingsInvalid
from hami_common.events.asking import CheckAnswer, Finding
from hami_common.ports import KubeApi
from hamictl import installation
from hamictl.nodechecks import CDI_SINCE, version_of

Document = dict[str, Any]
Release = tuple[int, int, int]

CHECK: Final = "claims"
OLDEST: Final[Release] = (1, 36, 2)
OLDEST_KUBELET: Final = (1, 36)
PLUGIN: Final = "DynamicResources"
"""Plugin of kube-scheduler that allocates devices to claims."""
CDI_ON_SINCE: Final = (2, 0)
"""First containerd that has CDI on by default; from 1.7 it has the setting ``enable_cdi``."""
SCHEDULER_ENV: Final = "HAMI_SCHEDULER_DRA__ENABLED"
AGENT_ENV: Final = "HAMI_NODEAGENT_DRA__ENABLED"
SCHEDULER_FILE: Final = "scheduler.toml"
SCHEDULER: Final = "hami-scheduler"
KUBE_SCHEDULER: Final = "hami-kube-scheduler"
COMPONENT: Final = "apply the component deploy/kustomize/components/dra"
KUBE_SCHEDULER_FIX: Final = (
    "apply deploy/kustomize: its ClusterRoleBinding hami-kube-scheduler to system:kube-scheduler"
)
API: Final = f"/apis/{GROUP}/{VERSION}"
REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
HTTP_INVALID: Final = (400, 422)
"""HTTP status of an object that the API server does not take."""
_RELEASE = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """One permission of a service account in the group ``resource.k8s.io``."""

    verb: str
    resource: str
    """``resource`` or ``resource/subresource``."""
    name: str = ""


def _rights(verbs: str, resource: str, name: str = "") -> tuple[Right, ...]:
    return tuple(Right(verb=verb, resource=resource, name=name) for verb in verbs.split())


SCHEDULER_RIGHTS: Final = (
    *_rights("get list watch create patch", "resourceclaims"),
    *_rights("patch", "resourceclaims/status"),
    *_rights("patch", "resourceclaims/binding"),
    *_rights("arbitrary-node:patch", "resourceclaims/driver", DRIVER),
)
"""Rights of the scheduler's account, in ``components/dra/scheduler-rbac.yaml``."""
AGENT_RIGHTS: Final = (
    *_rights("get list watch create update delete", "resourceslices"),
    *_rights("get", "resourceclaims"),
)
"""Rights of the agents' account, in ``components/dra/agent-rbac.yaml``."""
KUBE_SCHEDULER_RIGHTS: Final = (
    *_rights("list watch", "deviceclasses"),
    *_rights("list watch", "resourceslices"),
    *_rights("get list watch update", "resourceclaims"),
    *_rights("update patch", "resourceclaims/status"),
    *_rights("update patch", "resourceclaims/binding"),
)
"""Rights of kube-scheduler's account, which it has by the role ``system:kube-scheduler``."""


def release_of(text: str) -> Release | None:
    """Return major, minor and patch number of a version; ``None``: it has none."""
    found = _RELEASE.match(text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def _finding(verdict: str, text: str, fix: str = "", *, node: str = "") -> Finding:
    return msgspec.convert(
        {"check": CHECK, "verdict": verdict, "text": text, "fix": fix, "node": node}, Finding
    )


# --- pure checks ----------------------------------------------------------------------------------


def is_on(pod: Document, variable: str, settings: Mapping[str, Any]) -> bool:
    """Return whether ``dra.enabled`` is set for a pod: by a variable, or else by its file."""
    for container in pod.get("containers") or ():
        for one in container.get("env") or ():
            if one.get("name") == variable:
                return str(one.get("value", "")).lower() in ("true", "1")
    table = settings.get("dra")
    return isinstance(table, dict) and table.get("enabled") is True


def releases(server: str, tags: Iterable[str]) -> Iterator[Finding]:
    """Check the versions of the API server and of our kube-scheduler, as far as they have one."""
    for what, text in (("API server", server), *(("the image kube-scheduler", t) for t in tags)):
        found = release_of(text)
        if found is not None and found < OLDEST:
            yield _finding(
                "FAIL",
                f"{what} is {text}: before 1.36 shared devices are off, and kube-scheduler before"
                " 1.36.2 can allocate a device twice",
                "upgrade the control plane to Kubernetes 1.36.2 or newer",
            )


def probe() -> Document:
    """Return a ResourceSlice that uses the fields that we need, for a dry run."""
    device = {
        "name": "probe",
        "allowMultipleAllocations": True,
        "capacity": {
            "memory": {
                "value": "2Mi",
                "requestPolicy": {"default": "2Mi", "validRange": {"min": "1Mi", "step": "1Mi"}},
            }
        },
        "taints": [{"key": f"{DRIVER}/probe", "effect": "NoSchedule"}],
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "ResourceSlice",
        "metadata": {"name": f"hami-doctor-probe-{DRIVER}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": "hami-doctor-probe",
            "pool": {"name": "hami-doctor-probe", "generation": 1, "resourceSliceCount": 1},
            "devices": [device],
        },
    }


def gates(stored: Document) -> Iterator[Finding]:
    """Check which fields of ``probe`` the API server kept."""
    (device,) = (stored.get("spec") or {}).get("devices") or [{}]
    memory = (device.get("capacity") or {}).get("memory") or {}
    for gate, is_kept in (
        (
            "DRAConsumableCapacity",
            device.get("allowMultipleAllocations") is True and "requestPolicy" in memory,
        ),
        ("DRADeviceTaints", bool(device.get("taints"))),
    ):
        if not is_kept:
            yield _finding(
                "FAIL",
                f"the API server's feature gate {gate} is off: it drops fields of ResourceSlices",
                f"set --feature-gates={gate}=true at kube-apiserver, kube-scheduler,"
                " kube-controller-manager and kubelet, or remove =false",
            )


def profile(configurations: Iterable[str], scheduler_name: str) -> Iterator[Finding]:
    """Check that a kube-scheduler leaves the claims of pods in allocation mode dra to HAMi."""
    name, found = claims_profile(scheduler_name), []
    for text in configurations:
        try:
            document = documents.yaml_one(text, field="configuration") or {}
        except SettingsInvalid:  # the check of kube-scheduler names it
            continue
        profiles = document.get("profiles") or []
        found += [one for one in profiles if one.get("schedulerName") == name]
    problem = ""
    if not found:
        problem = f"kube-scheduler has no profile {name}: pods in allocation mode dra wait"
    elif not all(_disables_claims(one) for one in found):
        problem = (
            f"kube-scheduler's profile {name} has the plugin {PLUGIN}: its pods wait for claims"
            " that are created only when they are bound"
        )
    if problem:
        fix = "add the profile to your configuration as in its kube-scheduler.yaml"
        yield _finding("FAIL", problem, f"{COMPONENT}, or {fix}")


def _disables_claims(one: Document) -> bool:
    points = (one.get("plugins") or {}).get("multiPoint") or {}
    return any(plugin.get("name") in (PLUGIN, "*") for plugin in points.get("disabled") or [])


def of_node(node: Document, answer: CheckAnswer | None) -> Iterator[Finding]:
    """Check kubelet and container runtime of a node whose agent serves claims.

    ``answer``: what its agent found on the host, if it answered.
    """
    name = node["metadata"]["name"]
    info: Mapping[str, str] = (node.get("status") or {}).get("nodeInfo") or {}
    kubelet = info.get("kubeletVersion", "")
    if (version_of(kubelet) or OLDEST_KUBELET) < OLDEST_KUBELET:
        yield _finding(
            "FAIL",
            f"kubelet is {kubelet}, older than 1.36",
            "upgrade the node to Kubernetes 1.36.2 or newer",
            node=name,
        )
    word, _, text = info.get("containerRuntimeVersion", "").partition("://")
    found, oldest = version_of(text), CDI_SINCE.get(word)
    if found is None:
        return
    if oldest is None:
        yield _finding(
            "WARN",
            f"{word} {text} is not known to add devices by CDI, which claims need",
            "use containerd 1.7 or newer, or CRI-O",
            node=name,
        )
    elif found < oldest:
        yield _finding(
            "FAIL",
            f"{word} {text} has no CDI, so containers would start without the devices of claims",
            f"upgrade {word} to {oldest[0]}.{oldest[1]} or newer",
            node=name,
        )
    elif word == "containerd" and found < CDI_ON_SINCE and not _knows_cdi(answer):
        yield _finding(
            "WARN",
            f"containerd {text} has CDI off by default, and no enable_cdi was found on the node",
            'set enable_cdi = true under [plugins."io.containerd.grpc.v1.cri"] and restart it',
            node=name,
        )


def _knows_cdi(answer: CheckAnswer | None) -> bool:
    return answer is not None and any(one.check == CLAIMS_CDI for one in answer.findings)


def slices(
    nodes: Collection[str], silent: Collection[str], found: Sequence[Document]
) -> Iterator[Finding]:
    """Compare nodes whose agents serve claims with the slices of our driver.

    ``silent``: nodes whose agent does not answer, which is a finding of its own.
    """
    with_slices = {(one.get("spec") or {}).get("nodeName", "") for one in found}
    for node in sorted(set(nodes) - with_slices - set(silent)):
        yield _finding(
            "FAIL",
            f"no ResourceSlice of driver {DRIVER} is there, so no claim gets a device of the node",
            "search the agent's log for 'ResourceSlices not written', and see that kubelet"
            f" registered {DRIVER}: /var/lib/kubelet/plugins_registry",
            node=node,
        )
    for node in sorted(with_slices - set(nodes)):
        yield _finding(
            "FAIL",
            f"ResourceSlices of driver {DRIVER} are there, and no agent that serves claims: pods"
            " with claims can be bound to the node and never start",
            f"kubectl delete resourceslices --field-selector spec.driver={DRIVER},"
            f"spec.nodeName={node}",
            node=node,
        )


# --- the cluster ----------------------------------------------------------------------------------


class ClaimsDoctor:
    """The checks of claims that ask the Kubernetes API."""

    def __init__(
        self,
        kube: KubeApi,
        *,
        namespace: str,
        agents_namespace: str,
        answers: Sequence[CheckAnswer],
        silent: Sequence[str],
    ) -> None:
        """``answers`` and ``silent``: agents that answered the registry, and nodes that did not."""
        self._kube = kube
        self._namespace = namespace
        self._agents_namespace = agents_namespace
        self._answers = {one.node: one for one in answers}
        self._silent = silent

    async def findings(self) -> list[Finding]:
        """Run the checks; one that passes in general if no fault was found."""
        scheduler = await self._scheduler()
        file = await installation.settings(self._kube, self._namespace, SCHEDULER_FILE)
        is_booked = is_on(scheduler, SCHEDULER_ENV, file)
        file = await installation.settings(
            self._kube, self._agents_namespace, installation.AGENT_FILE
        )
        agents = await installation.agents(self._kube, self._agents_namespace)
        serving = [one for one in agents if is_on(one.pod, AGENT_ENV, file)]
        if not is_booked and not serving:
            return [_finding("PASS", "not needed: dra.enabled is off")]
        found: list[Finding] = []
        if is_booked != bool(serving):
            on, off = ("scheduler", "agents") if is_booked else ("agents", "scheduler")
            text = f"dra.enabled is on for the {on} and off for the {off}: no claim is prepared"
            found.append(_finding("FAIL", text, COMPONENT))
        server = str((await installation.get(self._kube, "/version")).get("gitVersion", ""))
        found += releases(server, _kube_scheduler_tags(scheduler))
        try:
            await self._kube.get(API)
        except NotFound:
            text = f"the API server has no {GROUP}/{VERSION}"
            fix = "upgrade the control plane to Kubernetes 1.36.2 or newer, and remove"
            found.append(_finding("FAIL", text, f"{fix} --runtime-config={GROUP}/{VERSION}=false"))
            return found
        for check in (
            self._gates,
            self._classes,
            self._rights,
            self._profile,
            lambda: self._nodes(serving),
        ):
            found += await _tried(check)
        if any(one.verdict != "PASS" for one in found):
            return found
        return [_finding("PASS", "the cluster serves claims")]

    async def _scheduler(self) -> Document:
        try:
            found = await installation.get(
                self._kube, f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{SCHEDULER}"
            )
        except NotFound:
            return {}
        pod: Document = found["spec"]["template"]["spec"]
        return pod

    async def _gates(self) -> list[Finding]:
        body = msgspec.json.encode(probe())
        try:
            stored = await self._kube.create(f"{API}/resourceslices?dryRun=All", body)
        except Denied as error:
            if error.status not in HTTP_INVALID:
                raise
            text = f"the API server refuses a ResourceSlice with shared devices: {error}"
            return [_finding("FAIL", text, "upgrade it to Kubernetes 1.36.2 or newer")]
        return list(gates(msgspec.json.decode(stored)))

    async def _classes(self) -> list[Finding]:
        found = []
        for name in CLASSES:
            try:
                await self._kube.get(f"{API}/deviceclasses/{name}")
            except NotFound:
                found.append(_finding("FAIL", f"the DeviceClass {name} is missing", COMPONENT))
        return found

    async def _profile(self) -> list[Finding]:
        texts = await installation.kube_scheduler_texts(self._kube, self._namespace)
        webhook = await installation.webhook_settings(self._kube, self._namespace)
        return list(profile(texts, webhook.scheduler_name))

    async def _rights(self) -> list[Finding]:
        return [
            finding
            for namespace, account, rights, fix in (
                (self._namespace, SCHEDULER, SCHEDULER_RIGHTS, COMPONENT),
                (self._agents_namespace, installation.AGENT, AGENT_RIGHTS, COMPONENT),
                (self._namespace, KUBE_SCHEDULER, KUBE_SCHEDULER_RIGHTS, KUBE_SCHEDULER_FIX),
            )
            for finding in await self._missing(namespace, account, rights, fix)
        ]

    async def _missing(
        self, namespace: str, account: str, rights: Sequence[Right], fix: str
    ) -> list[Finding]:
        missing = [one for one in rights if not await self._is_allowed(namespace, account, one)]
        if not missing:
            return []
        shown = ", ".join(
            f"{one.verb} {one.resource}" + (f" {one.name}" if one.name else "") for one in missing
        )
        text = f"ServiceAccount {namespace}/{account} may not: {shown} (group {GROUP})"
        return [_finding("FAIL", text, fix)]

    async def _is_allowed(self, namespace: str, account: str, right: Right) -> bool:
        resource, _, subresource = right.resource.partition("/")
        attributes = {"group": GROUP, "resource": resource, "verb": right.verb}
        if subresource:
            attributes["subresource"] = subresource
        if right.name:
            attributes["name"] = right.name
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{namespace}:{account}",
                "groups": [*groups, "system:authenticated"],
                "resourceAttributes": attributes,
            },
        }
        answer = msgspec.json.decode(await self._kube.create(REVIEWS, msgspec.json.encode(review)))
        return bool((answer.get("status") or {}).get("allowed"))

    async def _nodes(self, agents: Sequence[installation.Agent]) -> list[Finding]:
        nodes = [
            node
            for node in await installation.items(self._kube, "/api/v1/nodes")
            if any(agent.selects(node) for agent in agents)
        ]
        found = [
            finding
            for node in nodes
            for finding in of_node(node, self._answers.get(node["metadata"]["name"]))
        ]
        pages = await self._kube.list_pages(
            f"{API}/resourceslices", field_selector=f"spec.driver={DRIVER}"
        )
        ours = [item for page in pages for item in msgspec.json.decode(page).get("items") or []]
        return found + list(slices([n["metadata"]["name"] for n in nodes], self._silent, ours))


async def _tried(check: Callable[[], Any]) -> list[Finding]:
    """Run a check; one that fails to run becomes a finding, and the others still run."""
    try:
        found: list[Finding] = await check()
    except HamiError as error:
        text = f"the check failed to run: {error}"
        return [_finding("WARN", text, "use an account with permission to read it")]
    return found


def _kube_scheduler_tags(pod: Document) -> Iterator[str]:
    for container in pod.get("containers") or ():
        if container.get("name") == "kube-scheduler":
            yield str(container.get("image", "")).rpartition(":")[2]
