# SPDX-License-Identifier: Apache-2.0
"""The API server with Kueue's kinds, in memory, and Kueue's part in the life of a Workload.

Kueue's transitions are those that v0.15 writes (pkg/workload: quota reserved, evicted, admitted);
its queues and quotas are not here. ``tests/e2e/test_kueue.py`` runs Kueue itself.
"""

from typing import Any

from tests.unit.scheduler.shell.fakegroup import FakeGroup

Obj = dict[str, Any]
API = "/apis/kueue.x-k8s.io/v1beta2"
KINDS = ("workloads", "admissionchecks", "resourceflavors")
CHECK = "placement"
TIME = "2026-01-01T00:00:00Z"


class FakeKueue(FakeGroup):
    """Pods, nodes, leases and Kueue's objects by path."""

    def __init__(self) -> None:
        super().__init__(API, KINDS)

    def add_check(self, name: str = CHECK, *, controller: str = "hami.io/placement") -> None:
        spec = {"controllerName": controller}
        self.put(f"{API}/admissionchecks/{name}", {"metadata": {"name": name}, "spec": spec})

    def submit(self, name: str, *pod_sets: Obj, namespace: str = "default") -> str:
        """A Workload in its queue; returns its path."""
        path = f"{API}/namespaces/{namespace}/workloads/{name}"
        metadata = {"name": name, "namespace": namespace, "uid": f"wl-{name}"}
        self.put(path, {"metadata": metadata, "spec": {"podSets": list(pod_sets)}, "status": {}})
        return path

    def reserve(self, path: str, *, flavor: str = "any", hosts: Obj | None = None) -> None:
        """Kueue reserves quota, on a number of pods by host if given, and asks the check."""
        names = [one["name"] for one in self.objects[path]["spec"]["podSets"]]
        flavors = {"nvidia.com/gpu": flavor}
        topology = {
            "levels": ["kubernetes.io/hostname"],
            "slices": [
                {
                    "domainCount": 1,
                    "valuesPerLevel": [{"universal": host}],
                    "podCounts": {"universal": count},
                }
                for host, count in (hosts or {}).items()
            ],
        }
        more = {} if hosts is None else {"topologyAssignment": topology}
        assigned = [{"name": name, "flavors": flavors, **more} for name in names]
        check = {"name": CHECK, "state": "Pending", "message": "", "lastTransitionTime": TIME}
        self._conditions(path, QuotaReserved="True", Evicted="False")
        self.change(
            path,
            status={"admission": {"podSetAssignments": assigned}, "admissionChecks": [check]},
        )

    def admit(self, path: str) -> None:
        """Kueue admits a Workload whose checks are all ready."""
        assert self.check(path)["state"] == "Ready"
        self._conditions(path, Admitted="True")

    def take_quota(self, path: str) -> None:
        """Kueue takes the quota back, and resets the check."""
        reset = {
            "name": CHECK,
            "state": "Pending",
            "message": f"Reset to Pending after eviction. Previously: {self.check(path)['state']}",
            "lastTransitionTime": TIME,
        }
        self.change(path, status={"admissionChecks": [reset]})
        self._conditions(path, QuotaReserved="False", Evicted="True", Admitted="False")

    def finish(self, path: str) -> None:
        self._conditions(path, Finished="True")

    def check(self, path: str) -> Obj:
        """State of our check."""
        entry: Obj = next(
            one for one in self.objects[path]["status"]["admissionChecks"] if one["name"] == CHECK
        )
        return entry

    def active(self) -> Obj:
        """Condition of our AdmissionCheck; empty without one."""
        status = self.objects[f"{API}/admissionchecks/{CHECK}"].get("status") or {}
        return next(iter(status.get("conditions") or ()), {})

    def _conditions(self, path: str, **by_type: str) -> None:
        old = self.objects[path]["status"].get("conditions") or []
        kept = [one for one in old if one["type"] not in by_type]
        new = [{"type": key, "status": value} for key, value in by_type.items()]
        self.change(path, status={"conditions": [*kept, *new]})
