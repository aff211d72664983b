# SPDX-License-Identifier: Apache-2.0
"""Kueue itself beside an installation, without its webhooks, and objects of its API.

Its CustomResourceDefinitions come from the same module as the program. One version of each is
served: the conversion between versions is a webhook of Kueue. It reads its serving certificates
from fixed paths below ``/etc``, which get files of the test in a mount namespace of its own.
"""

import os
import shutil
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from hami_sim.kubernetes.pki import HOST
from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.cluster import build
from tests.cluster.needs import is_required
from tests.support.installed import SLEEPER, Installed
from tests.support.kubeclient import StatusError
from tests.support.provisioning import CLASS

Obj = dict[str, Any]
GROUP = "kueue.x-k8s.io"
VERSION = "v1beta2"
CHECK = "hami"
OTHER_CHECK = "other"
"""A check of another controller: a Workload in a queue with it is not admitted."""
QUEUE = "main"
REQUESTS_CHECK = "requests"
"""Kueue's own check, which creates ProvisioningRequests of our class."""
REQUESTS_QUEUE = "requests"
"""A queue with that check alone."""
RACKS_QUEUE = "racks"
"""A queue with both checks, whose pods Kueue assigns to racks and nodes."""
RACK_LABEL, POOL_LABEL = "example.com/rack", "example.com/pool"
WAITING_QUEUE = "waiting"
"""A queue with both checks."""
NAMESPACE = "default"
START_S = 120.0
_BASE = f"/apis/{GROUP}/{VERSION}"


def kueue_or_skip() -> Path:
    """The directory of the program; skips or fails without it, and without the right to mount."""
    reason = ""
    found = build.find_kueue()
    if found is None:
        reason = "Kueue is not built: run `./dev cluster build`"
    elif os.geteuid() != 0 or shutil.which("unshare") is None:
        reason = "Kueue needs a mount namespace: run as root, with unshare"
    if found is not None and not reason:
        return found
    if is_required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Kueue:
    """Kueue of one installation."""

    def __init__(self, site: Installed, programs: Path) -> None:
        """Run the program of ``programs`` beside ``site``."""
        self.site = site
        self._programs = programs
        self._directory = site.directory / "kueue"
        self._probe_port = free_port()

    async def install(self, transformations: Sequence[Obj] = ()) -> None:
        """Create its kinds, and start it."""
        for file in sorted((self._programs / "bases").glob("*.yaml")):
            document = yaml.safe_load(file.read_text())
            versions = document["spec"]["versions"]
            kept = [one for one in versions if one["name"] == VERSION] or versions[:1]
            document["spec"]["versions"] = [{**one, "storage": True} for one in kept]
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            await self.site.client.call("POST", path, body=document)
        for kind in ("admissionchecks", "clusterqueues", "localqueues", "workloads"):
            await self.site.until(f"{kind} are served", partial(self._serves, kind))
        self._write_files(transformations)
        etc = self._directory / "etc"
        self.site.processes["kueue"] = Process(
            "kueue",
            [
                *(shutil.which("unshare") or "", "--mount", "sh", "-c"),
                'mount --bind "$0" /etc && exec "$@"',
                *(
                    str(etc),
                    str(self._programs / "kueue"),
                    f"--config={etc / 'kueue' / 'config.yaml'}",
                ),
                f"--kubeconfig={self.site.kubeconfig}",
                "--zap-log-level=2",
            ],
            log=self.site.directory / "logs" / "kueue.log",
        )
        await self.site.until("Kueue is ready", self._is_ready, limit_s=START_S)

    async def stop(self) -> None:
        """End it."""
        await self.site.processes["kueue"].stop()

    async def _is_ready(self) -> bool:
        """Report if it is ready; starts it, also again as kubelet would.

        It ends while the API server's discovery does not have all of its new kinds yet.
        """
        self.site.processes["kueue"].start()
        try:
            async with self.site.session.get(f"http://{HOST}:{self._probe_port}/readyz") as answer:
                return answer.status == HTTPStatus.OK
        except aiohttp.ClientError:
            return False

    async def _serves(self, kind: str) -> bool:
        try:
            await self.call("GET", kind)
        except StatusError:
            return False
        return True

    def _write_files(self, transformations: Sequence[Obj]) -> None:
        """Write what Kueue reads below ``/etc``, and its configuration."""
        pki = self.site.plane.control.pki
        certificates = self._directory / "etc" / "kueue" / "metrics" / "certs"
        certificates.mkdir(parents=True)
        shutil.copy(pki.file("apiserver.crt"), certificates / "tls.crt")
        shutil.copy(pki.file("apiserver.key"), certificates / "tls.key")
        configuration = {
            "apiVersion": f"config.{GROUP}/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": f"{HOST}:{self._probe_port}"},
            "metrics": {"bindAddress": f"{HOST}:{free_port()}"},
            "webhook": {"host": HOST, "port": free_port(), "certDir": str(certificates)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job"]},
            "featureGates": {"VisibilityOnDemand": False},
            "resources": {"transformations": list(transformations)},
        }
        file = self._directory / "etc" / "kueue" / "config.yaml"
        file.write_text(yaml.safe_dump(configuration))

    # ---------------------------------------------------------------- objects

    async def call(self, verb: str, kind: str, *names: str, body: Obj | None = None) -> Obj:
        """Call the API about one object, or a kind; ``names``: namespace, if any, and name."""
        where = f"/namespaces/{names[0]}" if len(names) > 1 else ""
        name = f"/{names[-1]}" if names and names[-1] else ""
        path = f"{_BASE}{where}/{kind}{name}"
        answer: Obj = await self.site.client.call(verb, path, body=body)
        return answer

    async def make_checks(self) -> None:
        """Create a flavor, our check, and one that only tests answer."""
        await self.create("ResourceFlavor", "resourceflavors", "any", {})
        for name, controller in ((CHECK, "hami.io/placement"), (OTHER_CHECK, "example.com/other")):
            await self.create(
                "AdmissionCheck", "admissionchecks", name, {"controllerName": controller}
            )
        active = {"type": "Active", "status": "True", "reason": "Test", "message": ""}
        active["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        await self.site.client.call(
            "PATCH",
            f"{_BASE}/admissionchecks/{OTHER_CHECK}/status",
            body={"status": {"conditions": [active]}},
            headers={"Content-Type": "application/merge-patch+json"},
        )

    async def make_requests_check(self) -> None:
        """Create Kueue's own check for ProvisioningRequests, as docs/kueue.md shows it."""
        configuration = {
            "provisioningClassName": CLASS,
            "managedResources": ["nvidia.com/gpu"],
            "parameters": {"noRetry": "true"},
            "retryStrategy": {
                "backoffLimitCount": 50,
                "backoffBaseSeconds": 1,
                "backoffMaxSeconds": 2,
            },
        }
        await self.create(
            "ProvisioningRequestConfig", "provisioningrequestconfigs", "hami", configuration
        )
        parameters = {"apiGroup": GROUP, "kind": "ProvisioningRequestConfig", "name": "hami"}
        controller = {
            "controllerName": "kueue.x-k8s.io/provisioning-request",
            "parameters": parameters,
        }
        await self.create("AdmissionCheck", "admissionchecks", REQUESTS_CHECK, controller)

    async def make_racks(self) -> None:
        """Give each node a rack of its own, and create the flavor ``racks`` with this topology."""
        for number, node in enumerate(self.site.spec.nodes):
            labels = {RACK_LABEL: f"r{number}", POOL_LABEL: "racks"}
            await self.site.client.call(
                "PATCH",
                f"/api/v1/nodes/{node.name}",
                body={"metadata": {"labels": labels}},
                headers={"Content-Type": "application/merge-patch+json"},
            )
        levels = [{"nodeLabel": label} for label in (RACK_LABEL, "kubernetes.io/hostname")]
        await self.create("Topology", "topologies", "racks", {"levels": levels})
        flavor = {"nodeLabels": {POOL_LABEL: "racks"}, "topologyName": "racks"}
        await self.create("ResourceFlavor", "resourceflavors", "racks", flavor)

    async def make_queue(
        self, name: str, amounts: Obj, *, checks: Sequence[str] = (CHECK,), flavor: str = "any"
    ) -> None:
        """Create a queue with a quota of ``amounts``."""
        resources = [{"name": name, "nominalQuota": value} for name, value in amounts.items()]
        flavors = [{"name": flavor, "resources": resources}]
        queue: Obj = {
            "namespaceSelector": {},
            "queueingStrategy": "BestEffortFIFO",
            "resourceGroups": [{"coveredResources": list(amounts), "flavors": flavors}],
        }
        named = [{"name": check} for check in checks]
        queue["admissionChecksStrategy"] = {"admissionChecks": named}
        await self.create("ClusterQueue", "clusterqueues", name, queue)
        local = {"metadata": {"name": name}, "spec": {"clusterQueue": name}}
        document = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "LocalQueue", **local}
        await self.call("POST", "localqueues", NAMESPACE, "", body=document)

    async def create(self, kind: str, plural: str, name: str, spec: Obj) -> None:
        """Create an object without a namespace."""
        document = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        await self.call("POST", plural, body=document)

    async def workload_of(self, job: str) -> Obj | None:
        """The Workload of a Job."""
        for one in (await self.call("GET", "workloads", NAMESPACE, ""))["items"]:
            owners = one["metadata"].get("ownerReferences") or ()
            if any(owner["name"] == job for owner in owners):
                found: Obj = one
                return found
        return None

    async def submit(
        self,
        name: str,
        *limits: Obj,
        pods: int = 1,
        queue: str = QUEUE,
        annotations: Obj | None = None,
        **spec: Any,
    ) -> Obj:
        """Create a suspended Job whose pods stay; ``limits``: of each container."""
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": {f"{GROUP}/queue-name": queue}},
            "spec": {
                "suspend": True,
                "parallelism": pods,
                "completions": pods,
                "template": {
                    "metadata": {"annotations": annotations or {}},
                    "spec": {
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": 1,
                        "containers": [
                            container(f"c{number}", one) for number, one in enumerate(limits)
                        ],
                        **spec,
                    },
                },
            },
        }
        path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
        made: Obj = await self.site.client.call("POST", path, body=job)
        return made

    async def pass_other_check(self, workload: Obj) -> None:
        """Answer the check of the other controller, so that the Workload is admitted."""
        metadata = workload["metadata"]
        entry = {"name": OTHER_CHECK, "state": "Ready", "message": ""}
        entry["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        path = f"{_BASE}/namespaces/{metadata['namespace']}/workloads/{metadata['name']}/status"
        await self.site.client.call(
            "PATCH",
            f"{path}?fieldManager=other&force=true",
            body={
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": "Workload",
                "metadata": {"name": metadata["name"]},
                "status": {"admissionChecks": [entry]},
            },
            headers={"Content-Type": "application/apply-patch+yaml"},
        )

    async def deactivate(self, workload: Obj) -> None:
        """Evict a Workload for good, as ``kueuectl stop workload`` does."""
        metadata = workload["metadata"]
        await self.site.client.call(
            "PATCH",
            f"{_BASE}/namespaces/{metadata['namespace']}/workloads/{metadata['name']}",
            body={"spec": {"active": False}},
            headers={"Content-Type": "application/merge-patch+json"},
        )

    async def delete_job(self, name: str) -> None:
        """Delete a Job and its pods."""
        path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{name}"
        await self.site.client.call("DELETE", path, body={"propagationPolicy": "Background"})


def container(name: str, limits: Obj, **more: Any) -> Obj:
    """A container that stays."""
    resources = {"limits": limits}
    return {"name": name, "image": "app", "command": SLEEPER, "resources": resources, **more}


def has(workload: Obj | None, condition: str) -> bool:
    """Report if a condition of a Workload is True."""
    found = ((workload or {}).get("status") or {}).get("conditions") or ()
    return any(one["type"] == condition and one["status"] == "True" for one in found)


def check_of(workload: Obj | None, name: str = CHECK) -> Obj:
    """State of an AdmissionCheck, by default ours; empty without one."""
    found = ((workload or {}).get("status") or {}).get("admissionChecks") or ()
    return next((one for one in found if one["name"] == name), {})
