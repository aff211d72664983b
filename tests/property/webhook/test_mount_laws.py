# SPDX-License-Identifier: Apache-2.0
"""Admission, its policies in CEL and the node agent judge mounts beside a share alike.

A pod that the agent would refuse on its node never passes admission, with the webhook or with the
policies alone.
"""

from typing import Any

import jsonpatch
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hami_common.pods.podview import PodView
from hami_common.pods.signing import Signer, Verifier
from hami_common.vendors.catalog import Catalog
from hami_nodeagent.core.podfacts import facts_of
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, mutate
from tests.unit.common.admission.test_policies import pod, refusals, share

CATALOG = Catalog.from_settings()
VERIFIER = Verifier.from_pems([Signer.generate().public_pem()])
POLICY = AdmissionPolicy()
AT = Circumstances(traceparent="", claim="")
KEYS = {"volumeMounts": "mountPath", "volumeDevices": "devicePath"}

REFUSED = [
    *("/", "/etc", "/etc/", "/usr", "/usr/local", "/usr/local/", "/run", "/run/", "/var/run"),
    *("/etc/hami", "/etc/hami/", "/etc/hami/limits", "/etc/hami/..data", "/run/hami/x"),
    *("/run/hami", "/var/run/hami", "/run/hami-priority", "/var/run/hami-priority/page"),
    *("/etc/ld.so.preload", "/etc/ld.so.preload/x", "/usr/local/vgpu", "/usr/local/vgpu/x.so"),
    *("/etc/vdev", "/etc/vdev/docker", "/hami-vnpu-shmem", "/hami-vnpu-shmem/x"),
    *("/run/nvidia-container-devices", "/var/run/nvidia-container-devices/all"),
    *("/proc/self", "/proc/self/root", "/proc/1/root/etc/hami", "/proc/thread-self/cwd"),
    *("/dev/fd", "/dev/fd/3", "/etc/../etc/hami", "/data/..", "/..", "/data/../etc"),
    *("//etc/hami", "/etc//hami", "/etc/./hami", "etc/hami", "run", "///", "", "/var//run"),
]
"""Paths that the agent refuses."""
PASSED = [
    *("/data", "/data/", "/etc/hami-x", "/etc/nginx", "/etc/vdevs", "/run/x", "/run/secrets/x"),
    *("/var", "/var/run/x", "/var/running", "/usr/local/bin", "/usr/local/vgpus", "/usr/lib"),
    *("/proc/driver", "/proc/selfish", "/dev/shm", "/dev/fda", "/a..b", "/...x", "/hami"),
]
"""Paths that all of them let pass."""


def judged(path: str, field: str) -> tuple[bool, bool, bool]:
    """Return True per judge that refuses the path: agent, webhook and policies."""
    more: dict[str, Any] = {field: [{"name": "v", KEYS[field]: path}]}
    document = pod(share(**more), volumes=[{"name": "v"}])
    view = msgspec.convert(document, PodView)
    verdict = mutate(document, view, catalog=CATALOG, policy=POLICY, at=AT)
    stored = jsonpatch.apply_patch(document, list(verdict.operations))
    facts = facts_of(msgspec.convert(stored, PodView), node="n", resources=(), verifier=VERIFIER)
    return "main" in facts.hidden_limits, not verdict.allowed, bool(refusals(document))


@pytest.mark.parametrize("field", KEYS)
@pytest.mark.parametrize("path", REFUSED)
def test_path_that_the_agent_refuses_is_refused_at_admission(path: str, field: str) -> None:
    assert judged(path, field) == (True, True, True)


@pytest.mark.parametrize("field", KEYS)
@pytest.mark.parametrize("path", PASSED)
def test_path_beside_ours_passes_everywhere(path: str, field: str) -> None:
    assert judged(path, field) == (False, False, False)


PARTS = (
    *("", ".", "..", "etc", "hami", "ld.so.preload", "vdev", "run", "var", "hami-priority"),
    *("proc", "self", "1", "root", "dev", "fd", "usr", "local", "vgpu", "x"),
    *("nvidia-container-devices", "hami-vnpu-shmem"),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=6).map("/".join), st.sampled_from(list(KEYS)))
@example("/proc/self/root/etc", "volumeMounts")
def test_admission_refuses_all_that_the_agent_refuses(path: str, field: str) -> None:
    agent, webhook, policies = judged(path, field)
    assert webhook or not agent
    assert policies == webhook
