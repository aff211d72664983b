# SPDX-License-Identifier: Apache-2.0
"""The node agent gives no share to a container that would hide its limits or name other devices.

In process: a pod as the API server shows it, past admission, up to kubelet's answer.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hami_common.pods.limits import decode as decode_limits
from hami_common.pods.podview import PodView
from hami_common.pods.signing import Signer, Verifier
from hami_nodeagent.core.claims import Refuse
from hami_nodeagent.core.podfacts import PodFacts, facts_of
from tests.unit.nodeagent.core.builders import GPU, NODE, Given
from tests.unit.nodeagent.shell.support import enforcing, know
from tests.unit.nodeagent.shell.test_allocate import Answered, Desk

pytestmark = pytest.mark.anyio

VERIFIER = Verifier.from_pems([Signer.generate().public_pem()])
FIELD = "metadata.annotations['main.limits.hami.io/v1']"
ITEM = {"path": "limits", "fieldRef": {"apiVersion": "v1", "fieldPath": FIELD}}
OURS = {"name": "hami-limits-main", "downwardAPI": {"items": [ITEM]}}
REGION = {"name": "hami-region-main", "emptyDir": {"medium": "Memory"}}
CONFIG = {"name": "cm", "configMap": {"name": "cm"}}
SCRATCH = {"name": "scratch", "emptyDir": {}}
OUR_MOUNTS = [
    {"name": "hami-limits-main", "mountPath": "/etc/hami", "readOnly": True},
    {"name": "hami-region-main", "mountPath": "/run/hami"},
]


def shown(given: Given, volumes: list[dict[str, Any]], **container: Any) -> PodFacts:
    """The facts that the agent reads from the pod's object."""
    limits = {"resources": {"limits": {GPU: 1}}}
    document = {
        "metadata": {"name": given.name, "namespace": "default", "uid": given.uid},
        "spec": {"containers": [{"name": "main", **limits, **container}], "volumes": volumes},
    }
    view = msgspec.json.decode(msgspec.json.encode(document), type=PodView)
    found = facts_of(view, node=NODE, resources={GPU}, verifier=VERIFIER)
    return replace(found, signed=given.facts.signed)


async def asked(
    directory: Path, volumes: list[dict[str, Any]], **container: Any
) -> tuple[Answered | Refuse, Desk]:
    """The answer to kubelet for the pod on a node that enforces shares."""
    given = Given("pod")
    desk = Desk(directory, given, **enforcing(directory))
    know(desk.site, given)
    facts = shown(given, volumes, **container)
    desk.site.picture.pods.put(facts, revision=given.entry.sequence + 1, now_s=0)
    return await desk.ask("nvidia-0-0"), desk


async def test_pod_as_admission_writes_it_gets_its_share(tmp_path: Path) -> None:
    outcome, _ = await asked(
        tmp_path,
        [OURS, REGION, SCRATCH],
        volumeMounts=[*OUR_MOUNTS, {"name": "scratch", "mountPath": "/tmp"}],
    )
    assert not isinstance(outcome, Refuse), outcome
    assert "/etc/hami" not in {mount.container_path for mount in outcome[1][0].mounts}


async def test_pod_without_limits_volume_gets_the_nodes_limits_file(tmp_path: Path) -> None:
    outcome, desk = await asked(tmp_path, [])
    assert not isinstance(outcome, Refuse), outcome
    (mount,) = [one for one in outcome[1][0].mounts if one.container_path == "/etc/hami"]
    text = (Path(mount.host_path) / "limits").read_text()
    record = desk.site.picture.entries_by_uid["uid-pod"].record
    assert decode_limits(text).allocation_id == record.allocation_id


@pytest.mark.parametrize(
    ("volume", "more"),
    [
        (CONFIG, {"readOnly": True}),
        ({"name": "hami-limits-main", "configMap": {"name": "x"}}, {"readOnly": True}),
        (
            {
                "name": "l",
                "downwardAPI": {
                    "items": [{**ITEM, "fieldRef": {"fieldPath": "metadata.annotations['mine']"}}]
                },
            },
            {"readOnly": True},
        ),
        ({**OURS, "name": "l"}, {"readOnly": True, "subPath": "x"}),
        ({**OURS, "name": "l"}, {}),
        (SCRATCH, {}),
    ],
)
async def test_limits_file_of_a_tenant_is_rejected(
    tmp_path: Path, volume: dict[str, Any], more: dict[str, Any]
) -> None:
    mount = {"name": volume["name"], "mountPath": "/etc/hami", **more}
    outcome, desk = await asked(tmp_path, [volume], volumeMounts=[mount])
    assert isinstance(outcome, Refuse)
    assert outcome.code == "limits-hidden"
    for word in ("default/pod", "container main", "volumeMounts[/etc/hami]", "mount it elsewhere"):
        assert word in outcome.text
    assert len(desk.site.picture.grants) == 0


@pytest.mark.parametrize(
    "mount",
    [
        {"name": "cm", "mountPath": "/etc//ld.so.preload", "subPath": "empty"},
        {"name": "cm", "mountPath": "/etc/../etc/ld.so.preload", "subPath": "empty"},
        {"name": "hami-region-main", "mountPath": "/etc/ld.so.preload", "subPath": "empty"},
        {"name": "cm", "mountPath": "/usr/local/vgpu/libvgpu.so", "subPath": "empty"},
        {"name": "scratch", "mountPath": "/usr/local/vgpu"},
        {"name": "scratch", "mountPath": "/run/hami-priority"},
        {"name": "scratch", "mountPath": "/var/run/hami-priority"},
        {"name": "scratch", "mountPath": "/var/run"},
        {"name": "scratch", "mountPath": "/run"},
        {"name": "scratch", "mountPath": "/etc"},
        {"name": "scratch", "mountPath": "/usr/local"},
        {"name": "scratch", "mountPath": "/proc/1/root/etc/ld.so.preload"},
        {"name": "cm", "mountPath": "/var/run/nvidia-container-devices/all"},
    ],
    ids=lambda mount: f"{mount['name']} at {mount['mountPath']}",
)
async def test_share_is_refused_where_a_mount_would_hide_the_limiter(
    tmp_path: Path, mount: dict[str, Any]
) -> None:
    outcome, desk = await asked(
        tmp_path, [OURS, REGION, CONFIG, SCRATCH], volumeMounts=[*OUR_MOUNTS, mount]
    )
    assert isinstance(outcome, Refuse)
    assert outcome.code == "limits-hidden"
    assert f"volumeMounts[{mount['mountPath']}]" in outcome.text
    assert len(desk.site.picture.grants) == 0


@pytest.mark.parametrize(
    "variable",
    [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-of-somebody-else"},
        {"name": "AMD_VISIBLE_DEVICES", "value": "all"},
        {
            "name": "NVIDIA_VISIBLE_DEVICES",
            "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "devices"}},
        },
    ],
)
async def test_container_never_names_devices_beside_its_share(
    tmp_path: Path, variable: dict[str, Any]
) -> None:
    outcome, _ = await asked(
        tmp_path, [OURS, REGION], volumeMounts=OUR_MOUNTS, env=[variable, {"name": "A"}]
    )
    assert isinstance(outcome, Refuse)
    assert outcome.code == "devices-overridden"
    assert f"env[{variable['name']}]" in outcome.text


@pytest.mark.parametrize("value", ["", "none", "void"])
async def test_variable_that_hides_devices_is_no_reason_to_refuse(
    tmp_path: Path, value: str
) -> None:
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]
    outcome, _ = await asked(tmp_path, [OURS, REGION], volumeMounts=OUR_MOUNTS, env=env)
    assert not isinstance(outcome, Refuse), outcome
