# SPDX-License-Identifier: Apache-2.0
"""Allocates a small share to a pod and checks each step of its way, for ``hamictl verify``.

Steps: ``admitted`` by the webhook, ``placed`` by the scheduler with a trusted signature,
``started`` by kubelet with the agent's answer, ``limited`` inside of the container, ``removed``.
The pod satisfies the Pod Security level ``restricted``. It is deleted in every case; one that a
killed run left behind ends by its own deadline and is deleted by the next run. Memory in MiB, times
in seconds.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.errors import Denied, HamiError, NotFound, RequestInvalid, WireInvalid
from hami_common.model.placement import Placement
from hami_common.pods import annotations, limits
from hami_common.pods.podview import ContainerView
from hami_common.pods.signing import Verifier
from hami_common.ports import Clock, KubeApi
from hami_common.runtime.tasks import finish_within
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import ResourceNames, Vendor
from hamictl import installation

Document = dict[str, Any]

LABEL: Final = "hami.io/verify"
"""Label of the pods that this module creates, value ``true``."""
CONTAINER: Final = "probe"
POLL_S: Final = 0.2
REMOVE_S: Final = 30.0
CLEANUP_S: Final = 15.0
"""Limit of the clean-up of an interrupted run."""
IMAGE_REASONS: Final = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")

SHELL_PROBE: Final = f"""\
cat {limits.DIRECTORY}/{limits.FILE_NAME}
grep -q libvgpu /proc/self/maps && echo limiter
exit 0
"""
PYTHON_PROBE: Final = f"""\
import ctypes
try:
    print(open("{limits.DIRECTORY}/{limits.FILE_NAME}").read(), end="")
except OSError:
    pass
if "libvgpu" in open("/proc/self/maps").read():
    print("limiter")
try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2() == 0:
        device, amounts = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        if nvml.nvmlDeviceGetMemoryInfo(device, amounts) == 0:
            print("visible", amounts[0] >> 20)
except (AttributeError, OSError):
    pass
"""
"""Print the limits file, ``limiter`` if the library is loaded, and the memory that NVML shows."""


class Request(Struct, frozen=True, kw_only=True):
    """Amounts to allocate, the image and the place."""

    vendor: str
    resources: dict[str, str]
    image: str
    is_python: bool
    """The image has Python, as the agents' image does; else it needs a shell."""
    pull_policy: str = ""
    namespace: str = "default"
    node: str = ""
    """Empty: the scheduler chooses."""
    limit_s: float = 120.0


class Step(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step and its result."""

    name: str
    passed: bool
    duration_s: float
    text: str
    fix: str = ""


class Verdict(Struct, frozen=True, kw_only=True):
    """The steps of one pod."""

    vendor: str
    node: str
    pod: str
    passed: bool
    steps: tuple[Step, ...]


class Verdicts(Struct, frozen=True, kw_only=True):
    """All pods of one run."""

    passed: int
    failed: int
    items: tuple[Verdict, ...]


class Expected(Struct, frozen=True, kw_only=True):
    """Promises of the installation."""

    scheduler_name: str
    verifier: Verifier | None
    """``None``: the trusted keys cannot be read."""
    memory_enforced: str
    """The vendor's mechanism; empty: none."""
    has_limiter: bool
    """The in-container library enforces shares."""


class StepFailed(Exception):
    """A step failed; the text is its cause."""

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.text = text
        self.fix = fix


def default_resources(vendor: Vendor, *, memory_mib: int, core_pct: int) -> dict[str, str]:
    """Return the limits of a small share of one device, in the vendor's units.

    Compute, and then memory, is left out where the vendor's rules accept none.
    """
    names: ResourceNames = vendor.families[0]
    wanted = {names.count: "1"}
    if names.memory:
        unit = names.memory_unit_mib
        wanted[names.memory] = str(-(-memory_mib // unit) if unit else core_pct)
    if names.cores:
        wanted[names.cores] = str(max(1, core_pct * names.core_units // 100))
    while len(wanted) > 1:
        resources = {"limits": wanted, "requests": wanted}
        container = msgspec.convert({"name": CONTAINER, "resources": resources}, ContainerView)
        try:
            vendor.parse_request(container)
        except RequestInvalid:
            wanted.popitem()
        else:
            break
    return wanted


def expected(
    catalog: Catalog,
    vendor: str,
    *,
    webhook: installation.WebhookSettings,
    agent: Mapping[str, Any],
    verifier: Verifier | None,
) -> Expected:
    """Return what holds for a share of this vendor; ``agent`` are the agents' settings."""
    enforcement = agent.get("enforcement", "libvgpu")
    return Expected(
        scheduler_name=webhook.scheduler_name,
        verifier=verifier,
        memory_enforced=catalog.vendor(vendor).capability.memory_enforced,
        has_limiter=vendor == "nvidia" and enforcement == "libvgpu",
    )


def pod_of(request: Request, name: str) -> Document:
    """Return the manifest of the pod."""
    command = (
        ["python", "-c", PYTHON_PROBE] if request.is_python else ["/bin/sh", "-c", SHELL_PROBE]
    )
    amounts = {**request.resources, "cpu": "100m", "memory": "128Mi"}
    container: Document = {
        "name": CONTAINER,
        "image": request.image,
        "command": command,
        "resources": {"limits": amounts},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    if request.pull_policy:
        container["imagePullPolicy"] = request.pull_policy
    spec: Document = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(request.limit_s) + 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # Nodes with devices often carry a taint.
        "tolerations": [{"operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
    }
    if request.node:
        field = {"key": "metadata.name", "operator": "In", "values": [request.node]}
        term = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": term}
        spec["affinity"] = {"nodeAffinity": required}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": request.namespace, "labels": {LABEL: "true"}},
        "spec": spec,
    }


async def remove_old(kube: KubeApi, namespace: str) -> None:
    """Delete finished pods that earlier runs left behind."""
    found = await installation.items(
        kube, f"/api/v1/namespaces/{namespace}/pods", label_selector=f"{LABEL}=true"
    )
    for pod in found:
        if _phase(pod) in ("Succeeded", "Failed"):
            await _delete(kube, namespace, pod["metadata"]["name"])


class Verification:
    """The way of one pod."""

    def __init__(
        self,
        kube: KubeApi,
        request: Request,
        wanted: Expected,
        *,
        name: str,
        clock: Clock,
        report: Callable[[Step], None],
    ) -> None:
        """``report`` receives each step when it has ended."""
        self._kube = kube
        self._request = request
        self._wanted = wanted
        self._name = name
        self._clock = clock
        self._report = report
        self._steps: list[Step] = []
        self._pod: Document = {}
        self._may_exist = True
        self._placement: Placement | None = None

    async def run(self) -> Verdict:
        """Create the pod, check every step, and delete the pod, also when cancelled."""
        try:
            passed = await self._step("admitted", self._admit)
            for name, check in (
                ("placed", self._place),
                ("started", self._start),
                ("limited", self._limit),
            ):
                passed = passed and await self._step(name, check)
        except BaseException:
            with finish_within(CLEANUP_S):
                await _delete(self._kube, self._request.namespace, self._name)
            raise
        if self._may_exist:
            passed = await self._step("removed", self._remove) and passed
        return Verdict(
            vendor=self._request.vendor,
            node=str((self._pod.get("spec") or {}).get("nodeName") or self._request.node),
            pod=f"{self._request.namespace}/{self._name}",
            passed=passed,
            steps=tuple(self._steps),
        )

    async def _step(self, name: str, check: Callable[[], Any]) -> bool:
        begun_s = self._clock.monotonic_s()
        text, fix, passed = "", "", False
        try:
            text = await check()
            passed = True
        except StepFailed as failed:
            text, fix = failed.text, failed.fix
        except HamiError as error:
            text, fix = str(error), "check the API server and the rights of the account"
        step = Step(
            name=name,
            passed=passed,
            duration_s=round(self._clock.monotonic_s() - begun_s, 3),
            text=text,
            fix=fix,
        )
        self._steps.append(step)
        self._report(step)
        return passed

    # --- the steps -------------------------------------------------------------------------------

    async def _admit(self) -> str:
        path = api_path("api", "v1", "namespaces", self._request.namespace, "pods")
        body = json.dumps(pod_of(self._request, self._name)).encode()
        try:
            self._pod = json.loads(await self._kube.create(path, body))
        except NotFound as error:
            self._may_exist = False
            raise StepFailed(str(error), "give an existing --namespace") from error
        except Denied as error:
            self._may_exist = False
            raise StepFailed(
                error.detail, "run hamictl doctor, which names faults of the webhook and its policy"
            ) from error
        labels = self._pod["metadata"].get("labels") or {}
        scheduler = self._pod["spec"].get("schedulerName")
        if labels.get(annotations.MANAGED_LABEL) != "true":
            raise StepFailed(
                f"the pod bypassed the webhook and goes to {scheduler}",
                "check the webhook configuration, and that the namespace has no label"
                " hami.io/webhook=ignore",
            )
        return f"by the webhook, for {scheduler}"

    async def _place(self) -> str:
        pod = await self._until(lambda pod: bool(pod["spec"].get("nodeName")))
        if pod is None:
            raise StepFailed(
                await self._why_pending(),
                f"hamictl explain pod {self._name} -n {self._request.namespace} lists the reasons"
                " of each node while such a pod is pending",
            )
        node, notes = pod["spec"]["nodeName"], pod["metadata"].get("annotations") or {}
        text = notes.get(annotations.ALLOCATION, "")
        if not text:
            raise StepFailed(
                f"the pod is bound to {node} without an allocation",
                "see that no other scheduler serves profile " + self._wanted.scheduler_name,
            )
        if self._wanted.verifier is None:
            raise StepFailed(
                "the trusted keys cannot be read",
                "run hamictl bootstrap, or give the right --system-namespace",
            )
        try:
            signed = self._wanted.verifier.verify(text, pod_uid=pod["metadata"]["uid"], node=node)
        except WireInvalid as error:
            raise StepFailed(str(error), "see docs/install.md, Rotate the signing key") from error
        self._placement = signed.placement
        shares = [share for one in signed.placement.containers for share in one.shares]
        devices = ", ".join(f"{share.memory_mib} MiB of {share.uuid}" for share in shares)
        return f"on {node}: {devices}, with a trusted signature"

    async def _start(self) -> str:
        node = self._pod["spec"]["nodeName"]
        pod = await self._until(lambda pod: _phase(pod) in ("Succeeded", "Failed"))
        agent = f"see the agent's log on {node}"
        if pod is None:
            waiting = _state(self._pod).get("waiting") or {}
            reason, message = waiting.get("reason", ""), waiting.get("message", "")
            fix = agent
            if reason in IMAGE_REASONS:
                fix = "give --image with an image that the node has or can pull"
            text = ": ".join(part for part in (reason, message) if part) or "no status of kubelet"
            raise StepFailed(f"the container did not run on {node}: {text}", fix)
        status = pod.get("status") or {}
        if status.get("reason"):  # kubelet refused the pod
            raise StepFailed(f"{status['reason']}: {status.get('message', '')}", agent)
        ended = _state(pod).get("terminated") or {}
        if ended.get("exitCode") != 0:
            text = f"the container ended with code {ended.get('exitCode')}"
            more = ended.get("message") or ended.get("reason") or ""
            raise StepFailed(
                f"{text}: {more}" if more else text,
                "give an --image with /bin/sh" if not self._request.is_python else agent,
            )
        return f"by kubelet on {node}, with the agent's answer"

    async def _limit(self) -> str:
        path = api_path(
            *("api", "v1", "namespaces", self._request.namespace, "pods", self._name, "log")
        )
        output = (await self._kube.get(path)).decode(errors="replace")
        assert self._placement is not None  # noqa: S101 - set by the step before
        return judge(output, self._placement, self._wanted)

    async def _remove(self) -> str:
        namespace = self._request.namespace
        await _delete(self._kube, namespace, self._name)
        path = api_path("api", "v1", "namespaces", namespace, "pods", self._name)
        with anyio.move_on_after(REMOVE_S):
            while True:
                try:
                    await self._kube.get(path)
                except NotFound:
                    return "and its share released"
                await anyio.sleep(POLL_S)
        raise StepFailed(
            f"the pod is still there after {REMOVE_S:g} s", f"kubectl -n {namespace} describe pod"
        )

    # --- waiting ---------------------------------------------------------------------------------

    async def _until(self, holds: Callable[[Document], bool]) -> Document | None:
        """Return the pod once it ``holds``; ``None`` after the limit, or if it is ended before."""
        path = api_path("api", "v1", "namespaces", self._request.namespace, "pods", self._name)
        with anyio.move_on_after(self._request.limit_s):
            while True:
                self._pod = json.loads(await self._kube.get(path))
                if holds(self._pod):
                    return self._pod
                waiting = _state(self._pod).get("waiting") or {}
                if _phase(self._pod) == "Failed" or waiting.get("reason") in IMAGE_REASONS:
                    return None
                await anyio.sleep(POLL_S)
        return None

    async def _why_pending(self) -> str:
        for condition in (self._pod.get("status") or {}).get("conditions") or []:
            if condition.get("type") == "PodScheduled" and condition.get("message"):
                return str(condition["message"])
        events = await installation.items(
            self._kube, api_path("api", "v1", "namespaces", self._request.namespace, "events")
        )
        texts = [
            str(event.get("message", ""))
            for event in events
            if (event.get("involvedObject") or {}).get("name") == self._name
            and event.get("type") == "Warning"
        ]
        return texts[-1] if texts else f"no scheduler answered in {self._request.limit_s:g} s"


def judge(output: str, placement: Placement, wanted: Expected) -> str:
    """Compare the probe's output with the placement; ``StepFailed`` where they differ."""
    lines = output.splitlines()
    shares = [share for one in placement.containers for share in one.shares]
    booked = {share.uuid: share.memory_mib for share in shares}
    text = "\n".join(one for one in lines if "=" in one or one == limits.HEADER)
    try:
        found = limits.decode(f"{text}\n")
    except HamiError as error:
        raise StepFailed(
            f"no limits file {limits.DIRECTORY}/{limits.FILE_NAME} in the container: {error}",
            "see that the webhook and the scheduler run the same version",
        ) from error
    given = {device.uuid: device.memory_mib for device in found.devices}
    if given != booked:
        raise StepFailed(
            f"the limits file has {given}, the placement {booked}", "report this fault"
        )
    if not wanted.has_limiter:
        how = wanted.memory_enforced or "nothing: the vendor offers no enforcement"
        return f"limits file as placed; memory is enforced by {how}"
    if "limiter" not in lines:
        raise StepFailed(
            "the limiter is not loaded in the container",
            "see that the image uses glibc, and the agent's log for limiter not installed",
        )
    visible = [int(one.split()[1]) for one in lines if one.startswith("visible ")]
    total = sum(booked.values())
    if visible and visible[0] > total:
        raise StepFailed(
            f"NVML shows {visible[0]} MiB in the container, the limit is {total} MiB",
            "see the container's log with LIBCUDA_LOG_LEVEL=3",
        )
    seen = f", NVML shows {visible[0]} MiB" if visible else ""
    return f"limits file as placed, limiter loaded{seen}"


def _phase(pod: Document) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _state(pod: Document) -> Document:
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    state: Document = statuses[0].get("state") or {}
    return state


async def _delete(kube: KubeApi, namespace: str, name: str) -> None:
    path = api_path("api", "v1", "namespaces", namespace, "pods", name)
    try:
        await kube.delete(path, body=json.dumps({"gracePeriodSeconds": 1}).encode())
    except NotFound:
        return
