# SPDX-License-Identifier: Apache-2.0
"""Reading HAMi's or Volcano's annotations, whatever they contain, raises only our own error.

A successful read books at least the pod's requests, on devices of its own node alone; and our
annotations in HAMi's form are read back unchanged.
"""

import json
from collections.abc import Callable
from typing import Literal

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from hami_common.compat import adoption, hamiformat, mirrors, volcano
from hami_common.compat.hamiformat import Given, Registered
from hami_common.compat.origins import HAMI, ORIGINS, VOLCANO
from hami_common.errors import WireInvalid
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from tests.support.builders import device

CATALOG = Catalog.from_settings()
DEVICES = {
    "nvidia": [device(f"GPU-{n}", index=n) for n in range(3)],
    "hygon": [device(f"DCU-{n}", vendor="hygon", index=n) for n in range(2)],
}
NODE = adoption.NodeView(name="n1", devices=DEVICES)
_decoder = msgspec.json.Decoder(PodView)

WORDS = st.sampled_from([*'0123456789,,,:::;;;[]{}"', "GPU-0", "NVIDIA", "DCU-1", "3000", "🙂"])
TEXTS = st.text(max_size=40) | st.lists(WORDS, max_size=25).map("".join)
NUMBERS = st.integers(0, 2**31 - 1)
NAMES = st.text("abcXYZ-._/ 0129", min_size=1, max_size=20).map(str.strip).filter(bool)
GIVEN = st.builds(Given, id=NAMES, type=NAMES, memory_mib=NUMBERS, cores=NUMBERS)
POD_KEYS = {
    origin.name: [*(word.allocated for word in origin.words), origin.mig or "x", origin.node]
    for origin in ORIGINS.values()
}


def attempt(read: Callable[[], object]) -> None:
    """Read; a rejected text is rejected by name."""
    problem = "annotation"
    try:
        read()
    except WireInvalid as error:
        problem = str(error)
    assert "annotation" in problem


@given(TEXTS)
@example("a,b,٣,1:;")
@example("a,b,²,1:;")
@example("\ud800;")
def test_parsers_raise_nothing_but_our_own_error(text: str) -> None:
    attempt(lambda: hamiformat.decode_shares(text, what="annotation x"))
    attempt(lambda: hamiformat.decode_mig(text, what="annotation x"))
    attempt(lambda: volcano.decode_shares(text, "x"))
    attempt(lambda: volcano.decode_register(text, VOLCANO.words[0]))
    attempt(lambda: adoption.decode_mark(text))
    for word in hamiformat.WORDS:
        if word.register:
            attempt(lambda word=word: hamiformat.decode_register(text, word))  # type: ignore[misc]  # bound at once
        hamiformat.number_in(text, word, "n1")


@given(st.lists(st.lists(GIVEN, max_size=3), max_size=4))
def test_shares_come_back_as_they_were_written(containers: list[list[Given]]) -> None:
    text = hamiformat.encode_shares(containers)
    assert [list(one) for one in hamiformat.decode_shares(text, what="x")] == containers


@given(
    st.lists(
        st.builds(
            Registered,
            id=NAMES,
            index=st.integers(0, 63),
            count=NUMBERS,
            memory_mib=NUMBERS,
            cores=NUMBERS,
            type=NAMES,
            numa=st.integers(0, 7),
            mode=st.sampled_from(["hami-core", "mig"]),
            healthy=st.booleans(),
        ),
        max_size=4,
    ),
    st.sampled_from([word for word in hamiformat.WORDS if word.register]),
)
def test_registrations_come_back_as_they_were_written(
    devices: list[Registered], word: hamiformat.Word
) -> None:
    text = hamiformat.encode_register(devices, word)
    assert list(hamiformat.decode_register(text, word)) == devices


def pod(requests: list[tuple[int, int, int] | None], notes: dict[str, str]) -> PodView:
    """Containers that ask for (count, MiB, percent) of NVIDIA's devices, or for nothing."""
    containers = [
        {"name": f"c{place}", "resources": {"limits": limits}}
        for place, limits in enumerate(
            {}
            if one is None
            else {
                "nvidia.com/gpu": str(one[0]),
                "nvidia.com/gpumem": str(one[1]),
                "nvidia.com/gpucores": str(one[2]),
            }
            for one in requests
        )
    ]
    metadata = {"name": "p", "namespace": "default", "uid": "u", "annotations": notes}
    document = {
        "metadata": metadata,
        "spec": {"nodeName": "n1", "containers": containers},
        "status": {"phase": "Running"},
    }
    return _decoder.decode(json.dumps(document))


REQUESTS = st.lists(
    st.none() | st.tuples(st.integers(1, 3), st.integers(1, 40_000), st.integers(0, 99)),
    min_size=1,
    max_size=3,
)


@given(
    REQUESTS,
    st.sampled_from([HAMI.name, VOLCANO.name]).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.dictionaries(st.sampled_from(POD_KEYS[name]), TEXTS, max_size=4),
        )
    ),
)
def test_any_annotation_books_what_is_asked_and_nothing_elsewhere(
    requests: list[tuple[int, int, int] | None],
    origin_and_notes: tuple[Literal["hami", "volcano"], dict[str, str]],
) -> None:
    origin, notes = origin_and_notes
    node = msgspec.structs.replace(NODE, mark=adoption.TakenOver(origin=origin))
    found = adoption.read(pod(requests, notes), node, CATALOG)
    own = {one.uuid for one in DEVICES["nvidia"]}
    by_name = {container.name: container.shares for container in found.containers}
    for place, asked in enumerate(requests):
        shares = by_name.get(f"c{place}", ())
        assert {share.uuid for share in shares} <= own
        if asked is None:
            assert not shares
            continue
        count, memory_mib, core_pct = asked
        assert shares
        assert all(share.memory_mib >= memory_mib for share in shares)
        assert all(share.core_pct >= core_pct for share in shares)
        # Either as many as requested, or a doubt is reported.
        assert len(shares) == count or found.problems


@given(
    st.lists(
        st.none()
        | st.lists(
            st.tuples(
                st.sampled_from(DEVICES["nvidia"]), st.integers(1, 39_999), st.integers(0, 99)
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda one: one[0].uuid,
        ),
        min_size=1,
        max_size=3,
    ).filter(any)
)
def test_mirror_of_a_pod_is_read_as_what_was_given(
    given_shares: list[list[tuple[Device, int, int]] | None],
) -> None:
    # One request has one amount for all its devices, so the first device's counts.
    requests = [None if one is None else (len(one), one[0][1], one[0][2]) for one in given_shares]
    containers = tuple(
        ContainerShares(
            name=f"c{place}",
            kind="app",
            shares=tuple(
                Share(vendor="nvidia", uuid=held.uuid, memory_mib=own[0][1], core_pct=own[0][2])
                for held, _, _ in own
            ),
        )
        for place, own in enumerate(given_shares)
        if own
    )
    mirror = mirrors.of_pod(
        [f"c{place}" for place in range(len(given_shares))],
        containers,
        node="n1",
        devices={one.uuid: one for one in DEVICES["nvidia"]},
        mark=adoption.TakenOver(),
        time_s=1_785_578_400.0,
    )
    assert annotations.ALLOCATION not in mirror.annotations
    found = adoption.read(pod(requests, mirror.annotations), NODE, CATALOG)
    assert found == adoption.Adopted(containers=containers)
    for_volcano = volcano.of_pod(containers, vendor="nvidia", node="n1", unit_mib=1)
    node = msgspec.structs.replace(NODE, mark=adoption.TakenOver(origin="volcano"))
    found = adoption.read(pod(requests, for_volcano), node, CATALOG)
    assert found == adoption.Adopted(containers=containers)
