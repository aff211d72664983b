# SPDX-License-Identifier: Apache-2.0
"""Contract of every driver that calls a vendor's library: the tool's facts, and error cases."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from hami_common.errors import SettingsInvalid
from hami_common.model.device import DeviceFacts
from hami_nodeagent.drivers.catalog import DRIVERS, build_driver
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceHung,
    DriverError,
    DriverMissing,
    LibraryUnusable,
)
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.drivers.tool import Answer, Tool
from hami_nodeagent.libraries import loading
from tests.contract.drivers.conftest import LIBRARIES, library_of
from tests.fakes.vendortools import VendorTools
from tests.support.fake_library import FakeLibrary, LibraryFake

pytestmark = pytest.mark.anyio

_QUICK = {"answer_age_s": 0.0, "confirm_s": 0.001}
REFUSALS = [
    (name, *refusal) for name, fake in sorted(LIBRARIES.items()) for refusal in fake.refusals
]


def driver_of(machine: FakeLibrary | VendorTools, vendor: str, **settings: object) -> Driver:
    return build_driver(vendor, {**machine.settings, **_QUICK, **settings})


def told(facts: DeviceFacts, fake: LibraryFake) -> DeviceFacts:
    """The facts that both interfaces report."""
    own = fake.only_library | fake.only_tool
    attributes = {key: value for key, value in facts.attributes.items() if key not in own}
    return replace(facts, attributes=attributes)


def tools_of(
    fake: LibraryFake, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 2
) -> VendorTools:
    """A machine with the vendor's tools, which run in this process instead of as programs."""
    (folder / "tools").mkdir()
    tools = VendorTools(folder / "tools", fake.vendor, count)

    async def run(tool: Tool, *arguments: str, **_: object) -> Answer:
        await anyio.lowlevel.checkpoint()
        if arguments[:2] == ("-I", "-m"):
            text, complaint, status = loading.run(fake.program, arguments[3:])
            return Answer(text=text, complaint=complaint, status=status)
        said = tools.say(tool.name, arguments)
        return Answer(text=said.text, complaint=said.complaint, status=said.status)

    monkeypatch.setattr(Tool, "run", run)
    return tools


@functools.cache
def empty_library() -> Path:
    """A library without any call."""
    target = Path(tempfile.mkdtemp(prefix="empty-")) / "empty.so"
    subprocess.run(["cc", "-shared", "-o", str(target), "-xc", "/dev/null"], check=True)
    return target


async def test_library_and_tool_report_the_same_facts(
    library_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = LIBRARIES[library_name]
    tools = tools_of(fake, tmp_path, monkeypatch, 5)
    through_tool = await driver_of(tools, fake.vendor, interface="tool").discover()
    machine = library_of(library_name, tmp_path, 5)
    machine.answer_in_process(monkeypatch)
    through_library = await driver_of(machine, fake.vendor).discover()
    assert through_library.problems == through_tool.problems == ()
    assert through_library.driver_version == through_tool.driver_version
    for ours, theirs in zip(through_library.devices, through_tool.devices, strict=True):
        assert ours.attributes.keys() >= fake.only_library
        if fake.vendor == "ascend":  # templates are in no call of the library, see its own tests
            ours, theirs = (replace(one, partitions=()) for one in (ours, theirs))  # noqa: PLW2901
        assert told(ours, fake) == told(theirs, fake)
    if fake.same_links:
        assert through_library.links == through_tool.links


async def test_a_child_process_isolates_noise_crashes_and_hangs(
    library_name: str, tmp_path: Path
) -> None:
    machine = library_of(library_name, tmp_path, 2)
    vendor = machine.fake.vendor
    machine.chatter()
    inventory = await driver_of(machine, vendor).discover()
    assert [facts.uuid for facts in inventory.devices] == [machine.uuid_of(0), machine.uuid_of(1)]
    assert inventory.driver_version == machine.make.version
    machine.crash()
    with pytest.raises(AnswerUnknown):
        await driver_of(machine, vendor).discover()
    machine.hang()
    driver = driver_of(machine, vendor, query_limit_s=0.5)
    with anyio.fail_after(30), pytest.raises(DeviceHung, match="no answer within"):
        await driver.discover()
    assert not driver.is_stuck


async def test_missing_library_falls_back_to_the_tool(
    library_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = LIBRARIES[library_name]
    tools = tools_of(fake, tmp_path, monkeypatch)
    nowhere = str(tmp_path / "none" / fake.program.files[0])
    inventory = await driver_of(tools, fake.vendor, library_path=nowhere).discover()
    assert [facts.uuid for facts in inventory.devices] == [tools.uuid_of(0), tools.uuid_of(1)]
    only = driver_of(tools, fake.vendor, library_path=nowhere, interface="library")
    with pytest.raises(DriverMissing, match="is not there"):
        await only.discover()


@pytest.mark.parametrize("how", ["no library", "too old"])
async def test_a_library_that_cannot_be_used_gives_way_to_the_tool(
    library_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    fake = LIBRARIES[library_name]
    tools = tools_of(fake, tmp_path, monkeypatch)
    library = tmp_path / fake.program.files[0]
    if how == "no library":
        library.write_bytes(b"not a library")
    else:
        shutil.copy(empty_library(), library)
    driver = driver_of(tools, fake.vendor, library_path=str(library))
    for _ in range(2):
        inventory = await driver.discover()
        assert [facts.uuid for facts in inventory.devices] == [tools.uuid_of(0), tools.uuid_of(1)]
    assert caplog.text.count("library cannot be used, its tool is asked") == 1
    only = driver_of(tools, fake.vendor, library_path=str(library), interface="library")
    with pytest.raises(LibraryUnusable):
        await only.discover()


@pytest.mark.parametrize(("name", "call", "code", "kind"), REFUSALS)
async def test_codes_become_errors_that_keep_them_and_do_not_change_the_way(
    name: str,
    call: str,
    code: int,
    kind: type[DriverError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = library_of(name, tmp_path, 1)
    machine.answer_in_process(monkeypatch)
    driver = driver_of(machine, machine.fake.vendor, interface="auto")
    await driver.discover()
    machine.refuse(call, code)
    fresh = driver_of(machine, machine.fake.vendor, interface="auto")
    with pytest.raises(kind) as caught:
        await fresh.discover()
    assert type(caught.value) is kind
    assert (caught.value.code, call in caught.value.detail) == (code, True)
    machine.heal()
    assert [facts.uuid for facts in (await driver.discover()).devices] == [machine.uuid_of(0)]


async def test_answers_that_cannot_be_change_no_state(
    library_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = library_of(library_name, tmp_path, 2)
    machine.answer_in_process(monkeypatch)
    driver = driver_of(machine, machine.fake.vendor)
    before = await driver.discover()
    machine.garble("garbage")
    assert await driver.probe() == ()
    stale = await driver.discover()
    assert [facts.healthy for facts in stale.devices] == [True, True]
    assert {facts.attributes["stale"] for facts in stale.devices} == {"true"}
    with pytest.raises(AnswerUnknown):
        await driver_of(machine, machine.fake.vendor).discover()
    machine.heal()
    assert await driver.discover() == before


def test_only_vendors_with_a_library_accept_the_setting() -> None:
    with_library = {fake.vendor for fake in LIBRARIES.values()}
    for kind in DRIVERS:
        if kind.signs is None or kind.name in with_library:
            continue
        with pytest.raises(SettingsInvalid, match="interface"):
            build_driver(kind.name, {"interface": "library"})
    with pytest.raises(SettingsInvalid, match="interface"):
        build_driver("hygon", {"interface": "guess"})
