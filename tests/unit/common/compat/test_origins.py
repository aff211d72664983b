# SPDX-License-Identifier: Apache-2.0
"""Pods that Volcano's device plugin gave devices are read completely or conservatively."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from hami_common.compat import adoption, volcano
from hami_common.compat.origins import HAMI, ORIGINS, VOLCANO, title_of
from hami_common.errors import WireInvalid
from hami_common.model.device import Profile
from hami_common.model.placement import Share
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from tests.support.builders import device

WORD = VOLCANO.words[0]
ONE = {
    "volcano.sh/vgpu-number": "1",
    "volcano.sh/vgpu-memory": "3000",
    "volcano.sh/vgpu-cores": "20",
}
_decoder = msgspec.json.Decoder(PodView)


def pod(containers: Sequence[Mapping[str, str]], text: str, *, inits: int = 0) -> PodView:
    """A pod on node ``n1``; its first ``inits`` containers are init containers."""
    specs: list[dict[str, Any]] = [
        {"name": f"c{i}", "resources": {"limits": dict(limits)}}
        for i, limits in enumerate(containers)
    ]
    notes = {volcano.POD_IDS: text, volcano.POD_NODE: "n1"}
    document = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u", "annotations": notes},
        "spec": {
            "nodeName": "n1",
            "initContainers": specs[:inits],
            "containers": specs[inits:],
        },
        "status": {"phase": "Running"},
    }
    return _decoder.decode(json.dumps(document))


def read(view: PodView, *, factor: int = 1, **more: Any) -> adoption.Adopted:
    """Read on a node of two devices."""
    settings = NvidiaSettings(dialects=("volcano",), memory_factor=factor)
    devices = [device(f"GPU-{i}", index=i, **more) for i in range(2)]
    mark = adoption.TakenOver(origin="volcano", pods=("u",))
    node = adoption.NodeView(name="n1", devices={"nvidia": devices}, mark=mark)
    return adoption.read(view, node, Catalog.from_settings(VendorSettings(nvidia=settings)))


def held(found: adoption.Adopted) -> dict[str, list[tuple[str, int, int]]]:
    return {
        one.name: [(share.uuid, share.memory_mib, share.core_pct) for share in one.shares]
        for one in found.containers
    }


def test_shares_are_those_of_the_containers_that_request_any() -> None:
    text = "GPU-1,NVIDIA,3000,20:;GPU-0,NVIDIA,3000,20:GPU-1,NVIDIA,3000,20:"
    two = {**ONE, "volcano.sh/vgpu-number": "2"}
    found = read(pod([{}, ONE, {}, two], text, inits=1))
    assert not found.problems
    assert held(found) == {
        "c1": [("GPU-1", 3000, 20)],
        "c3": [("GPU-0", 3000, 20), ("GPU-1", 3000, 20)],
    }


def test_memory_is_in_units_of_the_memory_factor() -> None:
    limits = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3"}
    assert held(read(pod([limits], "GPU-1,NVIDIA,3,0:"), factor=1024)) == {
        "c0": [("GPU-1", 3072, 0)]
    }


def test_whole_device_rounded_down_to_units_is_no_doubt() -> None:
    whole = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": "100"}
    found = read(pod([whole], "GPU-1,NVIDIA,39,100:"), factor=1000, memory_mib=39_999)
    assert not found.problems
    (container,) = found.containers
    assert container.shares == (
        Share(vendor="nvidia", uuid="GPU-1", memory_mib=39_999, core_pct=100, exclusive=True),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("GPU-1,NVIDIA,3000,20", "cut off"),
        ("GPU-1,NVIDIA,3000:", "is not <id>,<type>,<MiB>,<cores>"),
        (",NVIDIA,3000,20:", "names no device"),
        ("GPU-1,NVIDIA,-3,20:", "is no amount"),
        ("GPU-1,NVIDIA,3000,20:;GPU-0,NVIDIA,3000,20:", "2 shares, 1 containers"),
        (";" * 600, "601 containers"),
        ("GPU-7,NVIDIA,3000,20:", "no device GPU-7"),
        ("", "nothing says which devices"),
    ],
)
def test_doubtful_share_counts_on_every_device(text: str, problem: str) -> None:
    found = read(pod([ONE], text))
    assert any(problem in one for one in found.problems), found.problems
    assert held(found) == {"c0": [("GPU-0", 3000, 20), ("GPU-1", 3000, 20)]}


def test_init_container_that_requests_a_device_is_in_doubt() -> None:
    """Volcano counts none; its device plugin gives it the next container's devices."""
    found = read(pod([ONE, ONE], "GPU-1,NVIDIA,3000,20:", inits=1))
    assert found.problems == ("container c0: nothing says which devices of nvidia it holds",)
    assert held(found)["c1"] == [("GPU-1", 3000, 20)]


def test_less_than_requested_counts_as_requested() -> None:
    found = read(pod([ONE], "GPU-1,NVIDIA,1000,0:"))
    assert len(found.problems) == 1
    assert held(found) == {"c0": [("GPU-1", 3000, 20)]}


def test_share_on_a_mig_instance_counts_by_its_device() -> None:
    profile = Profile(name="1g.6gb", memory_mib=6000, core_pct=25, starts=(0, 1, 2, 3), size=1)
    view = pod([ONE], "GPU-1[group1-0],NVIDIA,6000,0:")
    found = read(view, memory_mib=24_000, partitions=(profile,))
    assert [share.uuid for one in found.containers for share in one.shares] == ["GPU-1"]
    assert any("nothing says where partition" in one for one in found.problems)
    assert VOLCANO.uses_mig(view.annotations())


def test_registration_has_devices_by_position() -> None:
    text = "GPU-a,10,24576,NVIDIA-NVIDIA A30,true,hami-core:GPU-b,4,24576,NVIDIA-X,false,mig:"
    first, second = volcano.decode_register(text, WORD)
    assert (first.id, first.index, first.count, first.memory_mib) == ("GPU-a", 0, 10, 24_576)
    assert (first.type, first.healthy, first.mode) == ("NVIDIA A30", True, "hami-core")
    assert (second.index, second.type, second.healthy, second.mode) == (1, "X", False, "mig")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("GPU-a,10,24576,NVIDIA-A30,true:", "fewer than 6 fields"),
        (",10,24576,NVIDIA-A30,true,hami-core:", "fewer than 6 fields"),
        ("GPU-a,x,24576,NVIDIA-A30,true,hami-core:", "is no amount"),
        ("GPU-a" * 100_000, "characters"),
    ],
)
def test_unreadable_registration_is_rejected_with_its_key(text: str, problem: str) -> None:
    with pytest.raises(WireInvalid, match=problem) as error:
        volcano.decode_register(text, WORD)
    assert volcano.REGISTER in str(error.value)


def test_registration_of_our_agent_is_not_volcanos() -> None:
    ours = volcano.of_node([device("GPU-0")], unit_mib=1, time_s=0)
    assert not VOLCANO.registers(ours)
    assert VOLCANO.registers({**ours, volcano.HANDSHAKE: "Reported 2026-08-01 10:00:00"})
    assert not HAMI.registers(ours)


def test_mark_keeps_its_origin_and_is_hamis_without_one() -> None:
    for origin in ORIGINS:
        mark = adoption.TakenOver(origin=origin, pods=("u",))  # type: ignore[arg-type]  # keys
        assert adoption.decode_mark(adoption.encode_mark(mark)) == mark
    assert adoption.decode_mark('{"pods": ["u"]}').origin == "hami"
    with pytest.raises(WireInvalid, match=r"hami\.io/taken-over"):
        adoption.decode_mark('{"origin": "other"}')


def test_unknown_origin_is_named_as_it_is() -> None:
    assert [title_of(name) for name in ("hami", "volcano", "x")] == ["HAMi", "Volcano", "x"]
