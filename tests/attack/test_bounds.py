# SPDX-License-Identifier: Apache-2.0
"""Values out of range from pods, agents, tools and files: each is refused, and services continue.

A value beyond its range is refused where it enters, with the field. The scheduler goes on placing
pods, a parser ends in time, and an unusable file is an error that a service can report.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hami_common.bus import subjects
from hami_common.errors import HamiError, RequestInvalid, SettingsInvalid, WireInvalid
from hami_common.events import codec
from hami_common.events.inventory import NodeReport
from hami_common.pods import annotations
from hami_common.pods.podview import MetadataView, PodView
from hami_common.runtime import settings as settings_loader
from hami_common.runtime.httpd import Request
from hami_core.planning import gangs
from hami_nodeagent.drivers.enflame import parse as enflame
from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.metax import parse as metax
from hami_scheduler.settings import Settings
from hami_scheduler.shell import extender_wire
from hamictl import manifests
from hamictl.commands import import_config
from hamictl.errors import InputRefused
from tests.support.memorybus import MemoryBucket
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio

PARSE_LIMIT_S = 0.5
"""Processor time of one parser; the code before took more than 2 s."""
FILE_LIMIT_S = 60.0
DIGITS = "9" * 5000
OUT_OF_RANGE = [
    ("index", 2**31),
    ("index", 10**20),
    ("index", 4096),
    ("index", -1),
    ("numa", 2**31),
    ("numa", 1024),
    ("memory_mib", 2**63),
    ("memory_mib", 2**31),
    ("core_pct", 10**20),
    ("minor", 2**40),
]


# --- reports and records of devices ---------------------------------------------------------------


def report(**facts: object) -> bytes:
    device = {"uuid": "GPU-1", "vendor": "nvidia", "index": 0, "type": "A", "memory_mib": 1000}
    document = {"node": "n1", "vendor": "nvidia", "boot_id": "b", "seq": 1, "time_s": 1.0}
    return json.dumps({**document, "devices": [device | facts]}).encode()


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_report_out_of_range_never_reaches_the_inventory(field: str, value: int) -> None:
    subject = subjects.report("n1", "nvidia")
    assert codec.decode(report(), NodeReport, what=subject).devices[0].uuid == "GPU-1"
    with pytest.raises(WireInvalid, match=rf"devices\[0\]\.{field}"):
        codec.decode(report(**{field: value}), NodeReport, what=subject)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("boot_id", "b" * 10_000),
        ("seq", 10**20),
        ("seq", -1),
        ("node", "n" * 10_000),
        ("time_s", 1e300),
        ("devices", [{}] * 5000),
    ],
)
def test_report_with_an_endless_word_or_list_is_refused(field: str, value: object) -> None:
    document = json.loads(report())
    data = json.dumps({**document, field: value}).encode()
    with pytest.raises(WireInvalid, match=field):
        codec.decode(data, NodeReport, what=subjects.report("n1", "nvidia"))


async def fits(s: Running, node: str) -> bool:
    return bool((await s.filter(builders.pod("probe"), [node]))["NodeNames"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index", 2**31),
        ("index", 10**20),
        ("numa", 2**31),
        ("memory_mib", 2**63),
        ("capacity_mib", 2**63),
        ("capacity_core_pct", 2**31),
        ("slots", 2**31),
    ],
)
async def test_stored_devices_out_of_range_are_skipped_and_scheduling_continues(
    field: str, value: int
) -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    document = json.loads(codec.encode(builders.devices("n2")))
    document["devices"][0][field] = value
    bucket = MemoryBucket(world.bus, subjects.DEVICES_BUCKET)
    async with world.scheduler() as s:
        await bucket.append("n2.nvidia", json.dumps(document).encode())
        await quiet()
        assert await fits(s, "n1")
        assert not await fits(s, "n2")
        assert s.value("hami_scheduler_undecodable_messages_total", source="inventory") == 1
        await world.add_devices(builders.devices("n3"))
        await quiet()
        assert await fits(s, "n3")


async def test_partition_resources_out_of_range_do_not_stop_the_scheduler() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    document = json.loads(codec.encode(builders.devices("n2")))
    profile = {"name": "1g", "memory_mib": 1, "resources": {"slices": 40_000}}
    document["devices"][0] |= {"partitions": [profile], "resources": {"slices": 2**40}}
    async with world.scheduler() as s:
        bucket = MemoryBucket(world.bus, subjects.DEVICES_BUCKET)
        await bucket.append("n2.nvidia", json.dumps(document).encode())
        await quiet()
        assert await fits(s, "n1")


async def test_devices_of_all_vendors_on_a_node_are_bounded_together() -> None:
    world = World()
    async with world.scheduler() as s:
        bucket = MemoryBucket(world.bus, subjects.DEVICES_BUCKET)
        for word in ("nvidia", "amd", "hygon"):
            document = json.loads(codec.encode(builders.devices("n1", count=256)))
            document["vendor"] = word
            for number, device in enumerate(document["devices"]):
                device |= {"vendor": word, "uuid": f"{word}-{number}"}
            await bucket.append(f"n1.{word}", json.dumps(document).encode())
        await quiet()
        await world.agents_beat()
        assert await fits(s, "n1")
        assert s.value("hami_scheduler_undecodable_messages_total", source="inventory") == 1
        found = s.scheduler.state.table.place("n1")
        assert found is not None
        assert len(found.rows) == 512


# --- pods -----------------------------------------------------------------------------------------

WEIGHTS = [f"slot={DIGITS},core=1,memory=1", f"slot={'9' * 400},core=1,memory=1"]


def weighted(name: str, weights: str) -> builders.Obj:
    pod = builders.pod(name)
    pod["metadata"]["annotations"][annotations.SCORING_WEIGHTS] = weights
    return pod


@pytest.mark.parametrize("weights", WEIGHTS, ids=["5000 digits", "400 digits"])
async def test_weights_of_many_digits_are_refused_for_their_pod_only(weights: str) -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    async with world.scheduler() as s:
        pod = world.add_pod(weighted("attacker", weights))
        await quiet()
        facts = s.scheduler.state.pods.get(pod["metadata"]["uid"])
        assert facts is not None
        assert annotations.SCORING_WEIGHTS in facts.problem
        answer = await s.filter(pod, ["n1"])
        told = answer["Error"] + str(answer["FailedNodes"]) + str(answer)
        assert annotations.SCORING_WEIGHTS in told
        assert DIGITS not in told
        assert annotations.SCORING_WEIGHTS in await s.bind(pod, "n1")
        assert await s.bind(world.add_pod(builders.pod("other")), "n1") == ""


@pytest.mark.parametrize(
    "name",
    [
        "../../../../../../api/v1/pods?limit=500&x=",
        "../../../../../../api/v1/namespaces/hami-system/secrets/hami-signing-key?x=",
        "a/b",
        "..",
        "a b",
        "A" * 300,
    ],
)
@pytest.mark.parametrize(
    "key",
    ["scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group"],
)
async def test_name_of_a_pod_group_never_becomes_another_path(key: str, name: str) -> None:
    pod = builders.pod("attacker")
    pod["metadata"]["annotations"][key] = name
    world = World()
    await world.add_devices(builders.devices("n1"))
    async with world.scheduler() as s:
        asked: list[str] = []
        get = world.kube.get

        async def seen(path: str) -> bytes:
            asked.append(path)
            return await get(path)

        world.kube.get = seen  # type: ignore[method-assign]  # a spy, not another answer
        answer = await s.filter(world.add_pod(pod), ["n1"])
        assert key in str(answer)
        assert [path for path in asked if "podgroups" in path or name in path] == []
        assert await fits(s, "n1")


def test_path_of_a_pod_group_keeps_a_name_in_one_part() -> None:
    ref = gangs.GangRef(key="tenant/../../secrets/x?y=", kind="volcano")
    path = ref.path()
    assert "?" not in path
    assert path.count("/") == "/apis/GROUP/VERSION/namespaces/NAMESPACE/podgroups/NAME".count("/")


# --- nesting --------------------------------------------------------------------------------------

DEEP = 50_000
FILES: dict[str, str] = {
    "lists.toml": "x = " + "[" * DEEP,
    "tables.toml": "x = " + "{a=" * DEEP,
    "keys.toml": "a." * DEEP + "b = 1",
    "digits.toml": f"[defaults]\nslots = {DIGITS}",
    "hexadecimal.toml": f"[defaults]\nslots = 0x{'f' * 5000}",
    "flow.yaml": "[" * DEEP,
    "maps.yaml": "{a: " * DEEP,
    "block.yaml": "- " * DEEP + "x",
    "digits.yaml": f"defaults: {{slots: {DIGITS}}}",
    "tag.yaml": "rules: !!bool x",
    "itself.yaml": "rules: &a\n- nodes: *a\n",
    "laughs.yaml": "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in ("ab", "bc", "cd", "de", "ef")
    ),
}
_CHILD = """
import sys
from pathlib import Path
from hami_common.errors import HamiError
from hami_registry.core.device_config import parse
path = Path(sys.argv[1])
try:
    parse(path.read_bytes(), name=path.name)
except HamiError as error:
    print(type(error).__name__, str(error)[:200])
"""


@pytest.mark.parametrize("name", FILES)
def test_device_configuration_out_of_bounds_is_an_error_with_a_fix(
    name: str, tmp_path: Path
) -> None:
    """Runs in a process of its own, because libyaml ends the process."""
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)],
        capture_output=True,
        text=True,
        timeout=FILE_LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-400:]
    assert run.stdout.startswith("SettingsInvalid")


TOML = [name for name in FILES if name.endswith(".toml") and "tables" not in name]


@pytest.mark.parametrize("name", TOML)
def test_settings_file_out_of_bounds_is_an_error_with_a_fix(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    with pytest.raises(SettingsInvalid, match=name):
        settings_loader.load(
            Settings, service="scheduler", argv=["--config", str(path)], environ={}
        )


@pytest.mark.parametrize("text", [DIGITS, "1e999", "nan"])
def test_setting_from_the_environment_is_a_number_in_range(text: str) -> None:
    with pytest.raises(SettingsInvalid, match="grace_s"):
        settings_loader.load(
            Settings, service="scheduler", argv=["--set", f"grace_s={text}"], environ={}
        )


async def test_queues_file_out_of_bounds_is_an_error_with_a_fix(tmp_path: Path) -> None:
    path = tmp_path / "queues.toml"
    path.write_text("[[queue]]\nname = 'a'\n", encoding="utf-8")
    world = World()
    async with world.scheduler(queues_file=str(path)) as s:
        keeper = s.scheduler.quota
        for name in TOML:
            with pytest.raises(SettingsInvalid, match="queues_file"):
                keeper._tree_of(FILES[name].encode())  # noqa: SLF001 - what the reloading calls


@pytest.mark.parametrize("name", ["digits.yaml", "tag.yaml", "itself.yaml", "block.yaml"])
def test_configuration_of_hami_out_of_bounds_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    with pytest.raises(InputRefused, match=name):
        import_config.read_hami(device_config=path, node_config=None, values=None)


@pytest.mark.parametrize(
    "text",
    ['{"items": ' + "[" * DEEP, f'{{"x": {DIGITS}}}', FILES["block.yaml"], FILES["digits.yaml"]],
    ids=["json lists", "json digits", "yaml lists", "yaml digits"],
)
def test_manifest_out_of_bounds_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pods"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputRefused, match="pods"):
        manifests.read_pods(path)


NESTED = b'{"x": ' + b"[" * 100_000
DECODERS: dict[str, Callable[[bytes], object]] = {
    "filter": extender_wire.ArgsDecoder().decode,
    "bind": extender_wire.decode_bind,
    "preempt": extender_wire.decode_preemption,
    "record": lambda data: codec.decode(data, PodView, what="x"),
}


@pytest.mark.parametrize("name", DECODERS)
def test_nested_json_raises_an_error_of_the_project(name: str) -> None:
    with pytest.raises(HamiError, match="nested"):
        DECODERS[name](NESTED)


@pytest.mark.parametrize("verb", ["filter", "prioritize", "bind", "preempt"])
async def test_nested_call_of_the_extender_is_no_server_error(verb: str) -> None:
    """The answer names the problem of the body; the handler raises an error of this project."""
    world = World()
    async with world.scheduler() as s:
        handler = s.scheduler.extender.routes()["POST", f"/{verb}"]
        with pytest.raises(WireInvalid, match="nested"):
            await handler(request_of(verb, NESTED))


def request_of(verb: str, body: bytes) -> Request:
    return Request(method="POST", path=f"/{verb}", query={}, headers={}, body=body, params={})


# --- vendors' tools -------------------------------------------------------------------------------

EXTREMES = {
    "empty lines": "\n" * 200_000,
    "digits": "9" * 100_000,
    "blanks": " " * 200_000,
    "bars": "|\n" * 20_000,
    "watts": "1W " * 60_000,
}
PARSERS: dict[str, Callable[[str], object]] = {
    "metax table": metax.table,
    "metax list": metax.listed,
    "enflame table": enflame.table,
    "enflame details": enflame.details,
    "enflame profiles": enflame.profiles,
}


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", EXTREMES)
def test_parser_of_a_vendors_tool_ends_in_time(parser: str, text: str) -> None:
    begun_s = time.process_time()
    with pytest.raises(DriverError):
        PARSERS[parser](EXTREMES[text])
    assert time.process_time() - begun_s < PARSE_LIMIT_S


def test_error_names_the_field_and_stays_short() -> None:
    with pytest.raises(RequestInvalid) as caught:
        gangs.gang_of(PodView(metadata=MetadataView(annotations={"hami.io/gang": "x/" * 10_000})))
    assert caught.value.field == "metadata.annotations[hami.io/gang]"
    assert len(str(caught.value)) < 400
