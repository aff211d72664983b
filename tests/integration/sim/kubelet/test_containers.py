# SPDX-License-Identifier: Apache-2.0
"""Containers of the simulated kubelet: what they see, what they cannot write, how they end."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hami_common.kubeletapi import deviceplugin as api
from hami_sim.kubelet.launcher import permits_namespaces
from tests.contract.kubelet.support import SLEEP, Node, Obj, asks, until
from tests.integration.sim.kubelet.conftest import Bench

pytestmark = pytest.mark.anyio

isolated = pytest.mark.skipif(
    not permits_namespaces(), reason="this machine permits no mount and pid namespaces"
)
by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")
END = "echo; echo end; exec sleep 1000"


async def printed(node: Node, script: str, **more: Any) -> str:
    """Run a script in a container and return what it printed."""
    spec = {key: more.pop(key) for key in ("volumes", "securityContext") if key in more}
    pod = await node.run([asks(script=f"{script}; {END}", **more)], **spec)
    return await node.prints(pod, "\nend\n")


@isolated
async def test_container_has_a_small_root_of_its_own(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    async with bench() as (node, _):
        text = await printed(
            node, f"ls /; cat {tmp_path}/secret; hostname; tr '\\0' ' ' < /proc/1/cmdline"
        )
    lines = text.splitlines()
    for expected in ("dev", "etc", "proc", "sys", "tmp", "usr"):
        assert expected in lines
    assert "home" not in lines
    assert "of the host" not in text
    assert "simrun" in text  # its own pid 1
    assert any(line.startswith("pod-") for line in lines)


@isolated
async def test_writes_stay_in_the_container(bench: Bench) -> None:
    paths = ("/usr/hami-test", "/usr/local/hami-test", "/tmp/hami-test", "/hami-test")
    async with bench() as (node, _):
        text = await printed(node, "; ".join(f"echo x > {p} && cat {p}" for p in paths))
        assert text.count("x\n") == len(paths)
        assert not any(Path(path).exists() for path in paths)


@isolated
async def test_kernel_settings_and_host_mounts_are_out_of_reach(bench: Bench) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    async with bench() as (node, _):
        text = await printed(
            node,
            "echo 1 > /proc/sys/kernel/printk || echo no-sysctl; "
            "mount -t tmpfs none /mnt || echo no-mount; "
            "echo x > /etc/passwd || echo no-passwd",
        )
        assert all(word in text for word in ("no-sysctl", "no-mount", "no-passwd"))
        assert Path("/proc/self/mountinfo").read_text() == before


@isolated
@by_root
async def test_container_runs_as_the_user_it_names(bench: Bench) -> None:
    async with bench() as (node, _):
        text = await printed(
            node,
            "id; grep CapEff /proc/self/status",
            securityContext={"runAsUser": 1000, "runAsGroup": 2000, "supplementalGroups": [3000]},
        )
    assert "uid=1000" in text
    assert "gid=2000" in text
    assert "3000" in text
    assert "CapEff:\t0000000000000000" in text


@isolated
async def test_working_directory_is_made_when_missing(bench: Bench) -> None:
    async with bench() as (node, _):
        assert "/made/place\n" in await printed(node, "pwd", workingDir="/made/place")


async def test_container_without_command_prints_its_limits(bench: Bench) -> None:
    volume = {
        "name": "limits",
        "downwardAPI": {
            "items": [
                {"path": "limits", "fieldRef": {"fieldPath": "metadata.annotations['c.limits/v1']"}}
            ]
        },
    }
    mount = {"name": "limits", "mountPath": "/etc/hami", "readOnly": True}
    async with bench(namespaces=permits_namespaces()) as (node, _):
        pod = await node.run(
            [{"name": "main", "volumeMounts": [mount]}],
            volumes=[volume],
            metadata={"annotations": {"c.limits/v1": "hami-limits/1\n"}},
        )
        if permits_namespaces():
            await node.prints(pod, "hami-limits/1\n")
        await node.in_phase(pod, "Running")


async def test_image_names_the_command_where_the_manifest_does_not(bench: Bench) -> None:
    async with bench(commands={"tools": ("echo", "from the image")}) as (node, _):
        pod = await node.run([{"name": "main", "image": "tools:1.2", "args": ["and the args"]}])
        await node.in_phase(pod, "Succeeded")
        assert await node.logs(pod, "main") == "from the image and the args\n"


async def test_program_that_does_not_exist_is_a_start_error(bench: Bench) -> None:
    async with bench() as (node, _):
        pod = await node.run([{"name": "main", "command": ["no-such-program"]}])
        failed = await node.in_phase(pod, "Failed")
    state = failed["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["exitCode"], state["reason"]) == (128, "StartError")
    assert "no-such-program" in state["message"]


async def _waiting(node: Node, pod: str, reason: str) -> str:
    async def state() -> Obj:
        found = await node.pod(pod)
        assert found is not None
        statuses = found["status"].get("containerStatuses") or [{"state": {}}]
        waiting: Obj = statuses[0]["state"].get("waiting", {})
        return waiting

    return str((await until(state, lambda found: found.get("reason") == reason)).get("message", ""))


@isolated
async def test_mount_of_a_missing_host_path_keeps_the_container_waiting(bench: Bench) -> None:
    async with bench() as (node, _), node.plugin(["a"]) as plugin:

        async def answer(ids: Sequence[str]) -> api.ContainerAllocateResponse:
            mount = api.Mount(container_path="/x", host_path="/no/such/path")
            return api.ContainerAllocateResponse(mounts=[mount])

        plugin.answer = answer
        await node.joined(plugin, 1)
        pod = await node.run([asks(plugin.resource)])
        message = await _waiting(node, pod, "CreateContainerError")
    assert "/no/such/path" in message


@isolated
async def test_device_missing_on_this_machine_is_provided(bench: Bench) -> None:
    async with bench() as (node, _), node.plugin(["a"]) as plugin:

        async def answer(ids: Sequence[str]) -> api.ContainerAllocateResponse:
            device = api.DeviceSpec(
                container_path="/dev/nvidia0", host_path="/dev/nvidia7", permissions="rw"
            )
            return api.ContainerAllocateResponse(devices=[device])

        plugin.answer = answer
        await node.joined(plugin, 1)
        pod = await node.run([asks(plugin.resource, script=f"test -e /dev/nvidia0 && {END}")])
        await node.prints(pod, "end")
        assert not Path("/dev/nvidia7").exists()


@isolated
async def test_cdi_names_are_resolved_when_the_container_starts(
    bench: Bench, tmp_path: Path
) -> None:
    spec = {
        "cdiVersion": "0.8.0",
        "kind": "example.com/gpu",
        "devices": [
            {
                "name": "one",
                "containerEdits": {
                    "env": ["FROM_CDI=yes"],
                    "deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/null"}],
                    "mounts": [
                        {"hostPath": str(tmp_path), "containerPath": "/data", "options": ["ro"]}
                    ],
                },
            }
        ],
    }
    (tmp_path / "file").write_text("text")
    async with (
        bench(cdi_directories=(str(tmp_path / "cdi"),)) as (node, _),
        node.plugin(["a"]) as plugin,
    ):

        async def answer(ids: Sequence[str]) -> api.ContainerAllocateResponse:
            return api.ContainerAllocateResponse(
                cdi_devices=[api.CDIDevice(name="example.com/gpu=one")]
            )

        plugin.answer = answer
        await node.joined(plugin, 1)
        script = f"echo $FROM_CDI $(cat /data/file); test -c /dev/gpu0 && {END}"
        pod = await node.run([asks(plugin.resource, script=script)])
        assert "unresolvable" in await _waiting(node, pod, "CreateContainerError")
        (tmp_path / "cdi").mkdir()
        (tmp_path / "cdi" / "one.json").write_bytes(msgspec.json.encode(spec))
        assert "yes text\n" in await node.prints(pod, "end")


async def test_overfull_empty_dir_ends_the_pod(bench: Bench) -> None:
    async with bench(eviction_s=0.2) as (node, kubelet):
        pod = await node.run(
            [asks(volumeMounts=[{"name": "region", "mountPath": "/run/hami"}])],
            volumes=[{"name": "region", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}}],
        )
        await node.in_phase(pod, "Running")
        (kubelet.volume_path(pod, "region") / "file").write_bytes(b"x" * 200_000)
        failed = await node.in_phase(pod, "Failed")
    assert failed["status"]["reason"] == "Evicted"
    assert failed["status"]["message"] == (
        'Usage of EmptyDir volume "region" exceeds the limit "64Ki". '
    )


@isolated
@by_root
async def test_mounted_memory_volume_is_full_at_its_limit_and_unmounted_at_the_end(
    bench: Bench,
) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    async with bench(mounts_tmpfs=True) as (node, kubelet):
        pod = await node.run(
            [
                asks(
                    script=f"head -c 200000 /dev/zero > /run/hami/file || echo full; {END}",
                    volumeMounts=[{"name": "region", "mountPath": "/run/hami"}],
                )
            ],
            volumes=[{"name": "region", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}}],
        )
        assert "full" in await node.prints(pod, "end")
        assert (kubelet.volume_path(pod, "region") / "file").stat().st_size == 64 * 1024
        await node.delete(pod)
        await node.gone(pod)
        await until(_mounts, before.__eq__)


async def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


async def test_config_map_and_secret_volumes_follow_their_objects(bench: Bench) -> None:
    async with bench(sync_s=0.1) as (node, kubelet):
        config: Obj = {"metadata": {"name": "c"}, "data": {"key": "one"}}
        secret: Obj = {"metadata": {"name": "s"}, "stringData": {"word": "hidden"}}
        await node.client.create("configmaps", config, node.namespace)
        await node.client.create("secrets", secret, node.namespace)
        pod = await node.run(
            [asks()],
            volumes=[
                {"name": "config", "configMap": {"name": "c"}},
                {"name": "secret", "secret": {"secretName": "s", "defaultMode": 0o400}},
            ],
        )
        await node.in_phase(pod, "Running")
        path = kubelet.volume_path(pod, "secret") / "word"
        assert path.read_text() == "hidden"
        assert path.stat().st_mode & 0o777 == 0o400
        await node.client.patch("configmaps", "c", {"data": {"key": "two"}}, namespace="default")

        async def shown() -> str:
            return (kubelet.volume_path(pod, "config") / "key").read_text()

        await until(shown, "two".__eq__)


async def test_volume_kind_that_is_not_simulated_leaves_an_event_and_a_waiting_pod(
    bench: Bench,
) -> None:
    async with bench() as (node, _):
        pod = await node.run(
            [asks()], volumes=[{"name": "disk", "nfs": {"server": "a", "path": "/"}}]
        )

        async def reasons() -> set[str]:
            events = (await node.client.list("events", node.namespace))["items"]
            return {
                event["message"]
                for event in events
                if event["involvedObject"]["name"] == pod and event["reason"] == "FailedMount"
            }

        [message] = await until(reasons, bool)
        found = await node.pod(pod)
    assert "nfs" in message
    assert found is not None
    assert found["status"]["phase"] == "Pending"


async def test_without_namespaces_the_limits_are_named_by_a_variable(bench: Bench) -> None:
    volume = {
        "name": "limits",
        "downwardAPI": {"items": [{"path": "limits", "fieldRef": {"fieldPath": "metadata.name"}}]},
    }
    mount = {"name": "limits", "mountPath": "/etc/hami", "readOnly": True}
    async with bench(namespaces=False) as (node, _):
        pod = await node.run(
            [asks(script=f"cat $HAMI_LIMITS_DIR/limits; {END}", volumeMounts=[mount])],
            volumes=[volume],
        )
        assert pod in await node.prints(pod, "end")
        running = await node.in_phase(pod, "Running")
        assert "without namespaces" in running["status"]["message"]


@pytest.mark.parametrize("namespaces", [pytest.param(True, marks=isolated), False])
async def test_background_processes_end_with_their_container(
    bench: Bench,
    tmp_path: Path,
    namespaces: bool,  # noqa: FBT001 - table case
) -> None:
    shared = {"name": "shared", "mountPath": str(tmp_path)}
    script = f"setsid sleep 1000 & echo $! > {tmp_path}/pid; echo up; exec sleep 1000"
    async with bench(namespaces=namespaces) as (node, kubelet):
        pod = await node.run(
            [asks(script=script, volumeMounts=[shared])],
            volumes=[{"name": "shared", "hostPath": {"path": str(tmp_path)}}],
        )
        await node.prints(pod, "up")
        await node.in_phase(pod, "Running")
        root = kubelet.containers(pod)["main"].pid
        before = _sleepers(root)
        assert before
        await node.delete(pod)
        await node.gone(pod)
        assert not any(Path(f"/proc/{pid}/fd").exists() for pid in before)


def _sleepers(pid: int) -> list[int]:
    """Pids in the same pid namespace as a process, or below it, that run `sleep 1000`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                space = (entry / "ns/pid").readlink() == Path(f"/proc/{pid}/ns/pid").readlink()
            except OSError:
                continue
            if words == b"sleep\x001000\x00" and space:
                found.append(int(entry.name))
    return found


async def test_log_of_an_ended_pod_stays_until_the_pod_is_deleted(bench: Bench) -> None:
    async with bench() as (node, kubelet):
        pod = await node.run([asks(script="echo last words")])
        await node.in_phase(pod, "Succeeded")
        await kubelet.restart()

        async def log() -> str:
            return kubelet.logs(pod, "main")

        await until(log, "last words\n".__eq__)
        await node.delete(pod)
        await node.gone(pod)
        await until(log, "".__eq__)


async def test_restarted_kubelet_remembers_how_containers_ended(bench: Bench) -> None:
    async with bench() as (node, kubelet):
        pod = await node.run(
            [asks(script="exit 5", name="short"), asks(name="long")], restartPolicy="Never"
        )
        await node.in_phase(pod, "Running")
        await until(_code_of(node, pod, "short"), (5).__eq__)
        await kubelet.restart()
        await node.delete(pod)
        await node.gone(pod)


def _code_of(node: Node, pod: str, container: str) -> Callable[[], Awaitable[int | None]]:
    async def read() -> int | None:
        found = await node.pod(pod)
        assert found is not None
        for status in found["status"].get("containerStatuses") or []:
            if status["name"] == container and "terminated" in status["state"]:
                return int(status["state"]["terminated"]["exitCode"])
        return None

    return read


async def test_http_shows_pods_logs_and_containers(bench: Bench) -> None:
    async with bench() as (node, kubelet):
        pod = await node.run([asks(script=f"echo one; echo two; {SLEEP}")])
        await node.prints(pod, "two")
        await node.in_phase(pod, "Running")
        session = node.client.session
        async with session.get(f"{kubelet.url}/pods") as reply:
            document = await reply.json()
        assert [item["metadata"]["name"] for item in document["items"]] == [pod]
        base = f"{kubelet.url}/containerLogs/default/{pod}/main"
        async with session.get(base, params={"tailLines": "1"}) as reply:
            assert await reply.text() == "two\n"
        async with session.get(f"{base}x") as reply:
            assert reply.status == 404
        async with session.get(f"{kubelet.url}/sim/containers") as reply:
            [row] = await reply.json()
        assert row["pid"] == kubelet.containers(pod)["main"].pid
        assert row["is_running"]
        order = {"refuse_label": "test=refused", "refuse_reason": "OutOfmemory"}
        async with session.post(f"{kubelet.url}/sim/faults", json=order) as reply:
            assert reply.status == 200
        other = await node.run([asks()], metadata={"labels": {"test": "refused"}})
        failed = await node.in_phase(other, "Failed")
        assert failed["status"]["reason"] == "OutOfmemory"
        async with session.post(f"{kubelet.url}/sim/faults", json={"nonsense": 1}) as reply:
            assert reply.status == 400
