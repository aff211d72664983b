# SPDX-License-Identifier: Apache-2.0
"""The kubelet as a process: killed and restarted, stopped, cleaned up after; its owner's end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from hami_sim.kube import Access
from hami_sim.kubelet import clean_up
from hami_sim.kubelet.runtime import shims_below
from tests.contract.kubelet.support import Obj, asks, until
from tests.support.kubeclient import KubeClient

pytestmark = pytest.mark.anyio

READY_S = 40.0


@pytest.fixture
def kubeconfig(access: Access, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_bytes(
        msgspec.yaml.encode(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": access.url}}],
                "users": [{"name": "u", "user": {"token": access.token}}],
            }
        )
    )
    return path


@asynccontextmanager
async def kubelet(
    kubeconfig: Path, root: Path, *more: str, nodes: str = "node-a"
) -> AsyncIterator[tuple[Process, list[Obj]]]:
    """A running kubelet process and its output at readiness."""
    command = [sys.executable, "-m", "hami_sim.kubelet", "--kubeconfig", str(kubeconfig)]
    command += ["--root", str(root), "--node", nodes, *more]
    async with await anyio.open_process(command, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        told: list[Obj] = []
        text = ""
        with anyio.fail_after(READY_S):
            async for piece in TextReceiveStream(process.stdout):
                text += piece
                if text.count("\n") == len(nodes.split(",")):
                    break
        told = [json.loads(line) for line in text.splitlines()]
        try:
            yield process, told
        finally:
            if process.returncode is None:
                process.kill()


@contextmanager
def no_leftovers(root: Path) -> Iterator[None]:
    """Ensure that nothing below the root survives the test."""
    try:
        yield
    finally:
        for pid in shims_below(root):
            os.kill(pid, signal.SIGKILL)


async def run_pod(client: KubeClient, name: str = "p") -> Obj:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"nodeName": "node-a", "containers": [{**asks(), "image": "simulated"}]},
    }
    await client.create("pods", pod, "default")
    return await until(
        lambda: client.get("pods", name, "default"),
        lambda found: found["status"].get("phase") == "Running",
    )


def pid_of(pod: Obj) -> int:
    return int(pod["status"]["containerStatuses"][0]["containerID"].removeprefix("sim://"))


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def is_dead(pid: int) -> bool:
    return not lives(pid)


async def test_killed_kubelet_leaves_containers_and_the_next_one_takes_them_over(
    kubeconfig: Path, client: KubeClient, short_path: Path
) -> None:
    with no_leftovers(short_path):
        async with kubelet(kubeconfig, short_path) as (process, _):
            pod = await run_pod(client)
            process.kill()
            await process.wait()
        assert lives(pid_of(pod))
        async with kubelet(kubeconfig, short_path) as (process, [told]):
            session = client.session
            rows: list[Obj] = []

            async def seen() -> list[Obj]:
                async with session.get(f"{told['url']}/sim/containers") as reply:
                    return list(await reply.json())

            rows = await until(seen, bool)
            assert [row["pid"] for row in rows] == [pid_of(pod)]
            await client.delete("pods", "p", "default")
            await until(lambda: is_dead(pid_of(pod)), bool)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


async def test_stopped_kubelet_leaves_containers_without_kill_on_exit(
    kubeconfig: Path, client: KubeClient, short_path: Path
) -> None:
    with no_leftovers(short_path):
        async with kubelet(kubeconfig, short_path) as (process, _):
            pod = await run_pod(client)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert lives(pid_of(pod))
        async with kubelet(kubeconfig, short_path, "--kill-on-exit") as (process, _):
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert not lives(pid_of(pod))
        assert not (short_path / "node-a").exists()


async def test_cleanup_ends_processes_of_a_killed_kubelet(
    kubeconfig: Path, client: KubeClient, short_path: Path
) -> None:
    with no_leftovers(short_path):
        async with kubelet(kubeconfig, short_path) as (process, _):
            pod = await run_pod(client)
            process.kill()
            await process.wait()
        command = [sys.executable, "-m", "hami_sim.kubelet", "--cleanup", "--root", str(short_path)]
        assert (await anyio.run_process(command)).returncode == 0
        assert not lives(pid_of(pod))
        assert not short_path.exists()
        short_path.mkdir()


async def test_containers_end_with_the_process_that_owns_them(
    kubeconfig: Path, client: KubeClient, short_path: Path
) -> None:
    with no_leftovers(short_path):
        async with await anyio.open_process(["sleep", "1000"]) as owner:
            async with kubelet(
                kubeconfig, short_path, "--owner-pid", str(owner.pid), nodes="node-a,node-b"
            ) as (process, told):
                assert [line["node"] for line in told] == ["node-a", "node-b"]
                pod = await run_pod(client)
                process.kill()
                await process.wait()
            assert lives(pid_of(pod))
            owner.kill()
            await owner.wait()
            await until(lambda: is_dead(pid_of(pod)), bool)


async def test_orphans_of_deleted_pods_are_ended_at_the_next_start(
    kubeconfig: Path, client: KubeClient, short_path: Path
) -> None:
    with no_leftovers(short_path):
        async with kubelet(kubeconfig, short_path) as (process, _):
            pod = await run_pod(client)
            process.kill()
            await process.wait()
        options = {"gracePeriodSeconds": 0}
        await client.delete("pods", "p", "default", body=options)
        async with kubelet(kubeconfig, short_path):
            await until(lambda: is_dead(pid_of(pod)), bool)
        await clean_up(short_path)


async def test_missing_arguments_are_reported(short_path: Path) -> None:
    command = [sys.executable, "-m", "hami_sim.kubelet", "--root", str(short_path)]
    result = await anyio.run_process(command, check=False)
    assert result.returncode == 2
    assert b"--kubeconfig and --node are needed" in result.stderr
