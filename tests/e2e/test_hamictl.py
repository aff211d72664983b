# SPDX-License-Identifier: Apache-2.0
"""The operator's command line against a running cluster."""

import io
import json
import shutil
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml
from click.shell_completion import get_completion_class
from click.testing import CliRunner
from msgspec import Struct

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hamictl.cli import main
from hamictl.errors import EXIT_NO
from tests.e2e.conftest import small_pod
from tests.support.docs import filled, missing_lines
from tools import check_docs

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]


PLANTED = "hunter2-planted-Zk9"


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    host = tmp_path_factory.mktemp("host")
    make_host(host)
    spec = ClusterSpec(
        injection="devices",
        nodes=(NodeSpec(name="gpu-t4", profile="4xT4"),),
        backoff_s=0.2,
        settings={"nodeagent": {"host_root": str(host)}},
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("hamictl")) as running:
        yield running


def make_host(root: Path) -> None:
    """A node's root file system without findings where injection is ``devices``."""
    files = {
        "etc/containerd/config.toml": "[plugins.x.containerd.runtimes.nvidia]\na = 1\n",
        "etc/nvidia-container-runtime/config.toml": (
            "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
            "accept-nvidia-visible-devices-as-volume-mounts = false\n"
        ),
        "usr/lib64/libc.so.6": "GNU C Library (GNU libc) stable release version 2.36.",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True)
        path.write_text(text)


class Done(Struct):
    """Result of a command."""

    returncode: int
    stdout: bytes
    stderr: bytes


async def hamictl(cluster: Cluster, *words: str) -> Done:
    """Run a command in this process: a new one costs a second of loading."""
    environment = {
        "HAMICTL_REGISTRY": cluster.url("registry"),
        "HAMICTL_SCHEDULER": cluster.url("scheduler"),
        "HAMICTL_NATS": cluster.nats.url,
        "KUBECONFIG": str(cluster.kubeconfig),
    }

    def run() -> Done:
        done = CliRunner().invoke(main, words, env=environment, prog_name="hamictl")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Done(done.exit_code, done.stdout_bytes, done.stderr_bytes)

    return await anyio.to_thread.run_sync(run)


async def test_operator_sees_explains_and_tries(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.create_pod(small_pod("web", memory_mib=3000))
    await cluster.create_pod(small_pod("huge", memory_mib=90000))

    async def settled() -> bool:
        known, web = await cluster.explain("huge"), await cluster.explain("web")
        states = [one["state"] for one in web.get("allocations", ())]
        return states == ["running"] and bool(known.get("decisions"))

    await cluster.until("one pod runs and one is refused", settled)

    nodes = await hamictl(cluster, "get", "nodes")
    assert nodes.returncode == 0, nodes.stderr
    assert b"gpu-t4" in nodes.stdout
    assert b"3000/" in nodes.stdout
    wide = await hamictl(cluster, "get", "nodes", "-o", "wide")
    assert b"nvidia: from the vendor's documentation, not yet run" in wide.stdout
    devices = json.loads((await hamictl(cluster, "get", "devices", "-o", "json")).stdout)
    assert sum(one["booked_mib"] for one in devices["items"]) == 3000
    held = await hamictl(cluster, "get", "allocations", "-n", "default", "-o", "wide")
    assert b"main: 1 x 3000 MiB" in held.stdout
    why = await hamictl(cluster, "explain", "pod", "huge")
    assert b"refused, 0 of 1 nodes fit" in why.stdout
    assert b"90000" in why.stdout
    assert b"closest fit: container main: memory_mib 1" in why.stdout, why.stdout

    second = small_pod("second", memory_mib=14000)
    second["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "4"
    await cluster.create_pod(second)

    async def is_detailed() -> bool:
        known = await cluster.explain("second")
        return any(one.get("closest") for one in known.get("decisions", ()))

    await cluster.until("the refusal is recorded device by device", is_detailed)
    decisions = (await cluster.explain("second"))["decisions"]
    (node,) = next(one["closest"] for one in decisions if one.get("closest"))
    assert (node["node"], node["code"]) == ("gpu-t4", "AllocatedCardsInsufficientRequest")
    *fitting, device = node["devices"]
    assert [one.get("code", "") for one in fitting] == ["", "", ""]
    assert device["code"] == "CardInsufficientMemory"
    assert device["free"]["memory_mib"] < device["wanted"]["memory_mib"] == 14000
    (holder,) = device["holders"]
    assert (holder["namespace"], holder["name"], holder["memory_mib"]) == ("default", "web", 3000)
    shown = (await hamictl(cluster, "explain", "pod", "second")).stdout.decode()
    assert "default/web 3000 MiB" in shown
    ways = [line.strip() for line in shown.splitlines() if "closest fit" in line]
    assert len(ways) == 4, shown
    assert "memory_mib 1" in ways[0]
    assert "count 3 instead of 4" in ways[1]
    assert "wait until default/web (3000 MiB, started " in ways[2]
    assert "add a node like gpu-t4, empty and healthy" in ways[3]
    placed = await hamictl(cluster, "explain", "pod", "web")
    assert b"running on gpu-t4" in placed.stdout

    picky = small_pod("picky", memory_mib=3000)
    picky["spec"]["nodeSelector"] = {"zone": "elsewhere"}
    await cluster.create_pod(picky)

    async def is_excluded() -> bool:
        done = await hamictl(cluster, "explain", "pod", "picky")
        return b"now: 0 of 1 nodes fit" in done.stdout and (
            b"1 nodes: excluded by the pod's nodeSelector" in done.stdout
        )

    await cluster.until("the pod's node selector is obeyed", is_excluded)

    snapshot, pods = tmp_path / "snapshot.json", tmp_path / "pods.yaml"
    saved = await hamictl(cluster, "snapshot", str(snapshot))
    assert saved.returncode == 0, saved.stderr
    pods.write_text(yaml.safe_dump({"kind": "Pod", **small_pod("again", memory_mib=90000)}))
    tried = await hamictl(cluster, "simulate", "--snapshot", str(snapshot), "--pods", str(pods))
    assert b"closest fit: container main: memory_mib 1" in tried.stdout, tried.stdout

    absent = await hamictl(cluster, "explain", "pod", "nobody")
    assert absent.returncode == 1
    assert b"nobody" in absent.stderr
    away = await hamictl(cluster, "get", "nodes", "--registry", "http://127.0.0.1:1")
    assert away.returncode == 3
    assert b"http://127.0.0.1:1 does not answer" in away.stderr
    wrong = await hamictl(cluster, "get", "gadgets")
    assert wrong.returncode == 2


@pytest.fixture(scope="module")
async def web(cluster: Cluster) -> str:
    """A pod that runs."""
    await cluster.create_pod(small_pod("runner", memory_mib=2000))

    async def runs() -> bool:
        states = (await cluster.story_of("runner"))["states"]
        return bool(states) and states[-1] == "running"

    await cluster.until("the pod runs", runs)
    return "runner"


async def test_top_shows_use_against_share_and_what_nothing_holds(
    cluster: Cluster, web: str
) -> None:
    shares: list[Any] = []

    async def is_listed() -> bool:
        found = await hamictl(cluster, "top", "pods", "-o", "json")
        assert found.returncode == 0, found.stderr
        shares[:] = [
            one
            for node in json.loads(found.stdout)["items"]
            for one in node["shares"]
            if one["pod"] == web
        ]
        return bool(shares)

    await cluster.until("the agent has looked", is_listed)
    (share,) = shares
    assert (share["memory_mib"], share["used_mib"], share["is_held"]) == (2000, 0, False)
    table = await hamictl(cluster, "top", "pods")
    assert b"NO: nothing limits it" in table.stdout, "no library is given in this cluster"
    for kind in ("nodes", "devices"):
        shown = await hamictl(cluster, "top", kind, "-o", "wide")
        assert (shown.returncode, b"gpu-t4" in shown.stdout) == (0, True), shown.stderr
        yaml_text = (await hamictl(cluster, "top", kind, "-o", "yaml")).stdout
        assert sum(one["unheld"] for one in yaml.safe_load(yaml_text)["items"]) >= 1


async def test_trace_shows_the_pods_way_in_order(cluster: Cluster, web: str) -> None:
    wanted = ["admission allowed", "decision bind: placed", "state bound", "state prepared"]
    wanted += ["state running"]
    story: dict[str, Any] = {}

    async def is_complete() -> bool:
        """The events of a pod are published a moment after it runs."""
        found = await hamictl(cluster, "trace", web, "-o", "json")
        assert found.returncode == 0, found.stderr
        story.update(json.loads(found.stdout))
        kinds = [line["what"] for line in story["lines"]]
        return {*wanted, "container main runs"} <= {*kinds}

    await cluster.until("the way is complete", is_complete)
    assert story["missing"] == []
    assert story["trace_id"] == (await cluster.story_of(web))["trace_id"]
    kinds = [line["what"] for line in story["lines"]]
    assert [what for what in kinds if what in wanted] == wanted
    assert "container main runs" in kinds
    nowhere = ("--nats", "nats://127.0.0.1:1", "--kubeconfig", str(cluster.directory / "none"))
    away = await hamictl(cluster, "trace", web, *nowhere)
    assert away.returncode == 0
    assert b"Unavailable: integration stream" in away.stderr
    assert b"state running" in away.stdout
    assert (await hamictl(cluster, "trace", "nobody")).returncode == 1


async def test_events_go_on_where_they_stopped(cluster: Cluster, web: str, tmp_path: Path) -> None:
    position = tmp_path / "position"
    every = ("events", "--kind", "state", "--pod", f"default/{web}")
    words = (*every, "--position", str(position))

    async def is_copied() -> bool:
        return len((await hamictl(cluster, *every, "--from", "1")).stdout.splitlines()) >= 3

    await cluster.until("the states are events", is_copied)
    first = await hamictl(cluster, *words, "-o", "json")
    assert first.returncode == 0, first.stderr
    states = [json.loads(line)["record"]["state"] for line in first.stdout.splitlines()]
    assert states == ["bound", "prepared", "running"]
    assert (await hamictl(cluster, *words)).stdout == b""
    again = await hamictl(cluster, "events", "--from", "1", "--pod", web, "-o", "wide")
    assert b"admission" in again.stdout
    position.write_text("far")
    assert (await hamictl(cluster, *words)).returncode == 2


async def test_share_is_resized_and_refused_with_the_reason(cluster: Cluster, web: str) -> None:
    done = Done(1, b"", b"")

    async def is_resized() -> bool:
        """The scheduler reads a moment after the agent has written that the pod runs."""
        nonlocal done
        done = await hamictl(cluster, "resize", web, "--memory", "2500", "--cores", "20")
        return b"its allocation is" not in done.stderr

    await cluster.until("the scheduler knows that the pod runs", is_resized)
    assert done.returncode == 0, done.stderr
    assert b"2000 -> 2500" in done.stdout
    refused = await hamictl(cluster, "resize", web, "--memory", "999999")
    assert refused.returncode == 1
    assert b"do not fit" in refused.stderr
    assert (await hamictl(cluster, "resize", web)).returncode == 2
    assert (await hamictl(cluster, "resize", web, "--claim", "c", "--cores", "5")).returncode == 2
    refused = await hamictl(cluster, "resize", "--claim", "none", "--memory", "5")
    assert refused.returncode == 1
    assert b"claim default/none" in refused.stderr
    assert (await hamictl(cluster, "resize", "nobody", "--memory", "5")).returncode == 1


async def test_cordoned_device_takes_no_new_pod_and_keeps_the_old(
    cluster: Cluster, web: str
) -> None:
    uuid = (await cluster.story_of(web))["containers"][0]["devices"][0]["uuid"]
    done = await hamictl(cluster, "cordon", "device", uuid, "--reason", "fan is loud")
    assert done.returncode == 0, done.stderr
    notes = (await cluster.request("GET", "/api/v1/nodes/gpu-t4"))["metadata"]["annotations"]
    assert notes["hami.io/device-cordon"] == uuid
    assert json.loads(notes["hami.io/device-cordon-reasons"])[uuid]["reason"] == "fan is loud"
    again = await hamictl(cluster, "cordon", "device", uuid)
    assert b"already cordoned: fan is loud" in again.stdout

    async def is_cordoned() -> bool:
        listed = await hamictl(cluster, "get", "devices", "-o", "json")
        return [d["uuid"] for d in json.loads(listed.stdout)["items"] if d["cordoned"]] == [uuid]

    await cluster.until("the registry knows", is_cordoned)
    for number in range(3):
        await cluster.create_pod(small_pod(f"new-{number}", memory_mib=1000))

    async def all_run() -> bool:
        names = [f"new-{number}" for number in range(3)]
        return all([await cluster.pod_is(name, "Running") for name in names])

    await cluster.until("new pods run", all_run)
    for number in range(3):
        story = await cluster.story_of(f"new-{number}")
        assert story["containers"][0]["devices"][0]["uuid"] != uuid
        await cluster.delete_pod(f"new-{number}")
    assert await cluster.pod_is(web, "Running")
    assert (await hamictl(cluster, "uncordon", "device", uuid)).returncode == 0
    notes = (await cluster.request("GET", "/api/v1/nodes/gpu-t4"))["metadata"].get("annotations")
    assert "hami.io/device-cordon" not in (notes or {})
    assert (await hamictl(cluster, "cordon", "device", "GPU-none")).returncode == 1


async def test_doctor_fails_on_a_fault_and_passes_without(cluster: Cluster) -> None:
    found = await hamictl(cluster, "doctor", "-o", "json")
    assert found.returncode == 1
    report = json.loads(found.stdout)
    assert {one["check"] for one in report["findings"] if one["verdict"] == "FAIL"} == {
        "kube-scheduler"
    }, report
    text = Path(__file__).parents[2] / "deploy" / "kustomize" / "base" / "kube-scheduler.yaml"
    await cluster.create(
        "/api/v1/namespaces/hami-system/configmaps",
        {
            "metadata": {"name": "hami-kube-scheduler"},
            "data": {"config.yaml": text.read_text(encoding="utf-8")},
        },
    )
    well = await hamictl(cluster, "doctor")
    assert well.returncode == 0, well.stdout
    assert b"0 failed" in well.stdout
    wide = await hamictl(cluster, "doctor", "-o", "wide")
    assert b"PASS" in wide.stdout
    away = await hamictl(cluster, "doctor", "--registry", "http://127.0.0.1:1")
    assert away.returncode == 1
    assert b"the registry does not answer" in away.stdout


async def test_support_bundle_has_everything_but_the_secrets(
    cluster: Cluster, web: str, tmp_path: Path
) -> None:
    await cluster.create(
        "/api/v1/namespaces/hami-system/configmaps",
        {
            "metadata": {"name": "settings"},
            "data": {"a.toml": f"nats_urls = ['nats://me:{PLANTED}@nats']\npassword = '{PLANTED}'"},
        },
    )
    await cluster.create(
        "/api/v1/namespaces/hami-system/secrets",
        {"metadata": {"name": "secret"}, "stringData": {"key": PLANTED}},
    )
    file = tmp_path / "hami.tar.gz"
    done = await hamictl(cluster, "support-bundle", str(file))
    assert done.returncode == 0, done.stderr
    with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as archive:
        contents = {
            member.name.partition("/")[2]: archive.extractfile(member).read()  # type: ignore[union-attr]  # files only
            for member in archive.getmembers()
        }
    assert set(contents) >= {
        *("versions.json", "registry/allocations.json", "registry/checks.json"),
        *("scheduler/snapshot.json", "scheduler/metrics.txt", "bus/events.json"),
        *("kubernetes/configmaps.json", "kubernetes/nodes.json", "problems.txt"),
    }
    assert web.encode() in contents["registry/allocations.json"]
    assert b"running" in contents["bus/events.json"]
    assert [name for name, data in contents.items() if PLANTED.encode() in data] == []
    assert b"password = 'REDACTED'" in contents["kubernetes/configmaps.json"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_completion_is_the_parsers_own(cluster: Cluster, shell: str) -> None:
    script = await hamictl(cluster, "completion", shell)
    assert script.returncode == 0
    assert b"_HAMICTL_COMPLETE" in script.stdout
    source = script.stdout.decode()
    kind = get_completion_class(shell)
    assert kind is not None
    assert source.strip() == kind(main, {}, "hamictl", "_HAMICTL_COMPLETE").source().strip()
    offered = kind(main, {}, "hamictl", "_HAMICTL_COMPLETE").get_completions(["top"], "d")
    assert [one.value for one in offered] == ["devices"]


async def test_kubectl_finds_the_plugin(cluster: Cluster) -> None:
    plugin = Path(sys.executable).parent / "kubectl-hami"
    done = await anyio.run_process(
        [str(plugin), "get", "nodes", "--registry", cluster.url("registry")], check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"gpu-t4" in done.stdout


WORLD = (("default", "memory", 3000), ("default", "too-large", 500000), ("team", "train-0", 1500))
"""Pods that the pages name."""


@pytest.fixture
async def world(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Names in the pages' commands, and their names here; they run in a folder of it."""
    for namespace in ("team", "team-a"):
        await cluster.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    for namespace, name, memory_mib in (*WORLD, ("team-a", "train", 1500)):
        pod = {"kind": "Pod", **small_pod(name, memory_mib=memory_mib)}
        await cluster.create(f"/api/v1/namespaces/{namespace}/pods", pod)
    for name, memory_mib in (("deployment.yaml", 1000), ("big.yaml", 12000)):
        pod = {"kind": "Pod", **small_pod(name[0], memory_mib=memory_mib)}
        (tmp_path / name).write_text(yaml.safe_dump(pod))
    quota = Path(__file__).parents[2] / "examples" / "quota"
    shutil.copy(quota / "queues.toml", tmp_path)
    shutil.copy(quota / "namespace.yaml", tmp_path / "quota.yaml")
    (tmp_path / "examples").symlink_to(quota.parent)
    (tmp_path / "registry.toml").write_text(
        '[prices]\ncurrency = "EUR"\ndevice_hour = { "*" = 0.5 }\n'
    )
    pods = await cluster.request("GET", "/api/v1/pods")
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    assert (await hamictl(cluster, "snapshot", str(tmp_path / "cluster.json"))).returncode == 0

    async def decided() -> bool:
        return bool((await cluster.explain("too-large")).get("decisions"))

    await cluster.until("one pod runs and one is refused", decided)
    await cluster.until("memory runs", lambda: cluster.pod_is("memory", "Running"))
    monkeypatch.chdir(tmp_path)
    return {"gpu-1": "gpu-t4", "gpu-1x2": "gpu-t4x2", "gpu-7": "gpu-t4"}


async def test_commands_of_the_docs_do_what_they_say(
    cluster: Cluster, world: dict[str, str]
) -> None:
    """Verify that each command ends with an answer, also a negative one, and prints the page's
    output.
    """
    wrong: list[str] = []
    for command in check_docs.to_run(check_docs.HAMICTL_TESTS):
        words = command.words[2 if command.words[0] == "kubectl" else 1 :]
        done = await hamictl(cluster, *filled(words, world))
        told = (done.stdout + done.stderr).decode()
        if done.returncode not in (0, EXIT_NO):
            wrong.append(f"{command}: {done.returncode}: {told}")
        wrong += [f"{command}: lacks {line!r}\n{told}" for line in missing_lines(command, told)]
    assert not wrong, "\n".join(wrong)
