# SPDX-License-Identifier: Apache-2.0
"""Output of the programs that call libraries: failures as errors, and lists of devices."""

import json

import pytest

from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceBusy,
    DeviceGone,
    DriverError,
    DriverMissing,
    DriverTransient,
    LibraryUnusable,
)
from hami_nodeagent.drivers.parse.library import ERROR_BY_KIND, Told, devices, failure
from hami_nodeagent.drivers.parse.seen import Condition
from hami_nodeagent.drivers.rules import Neighbour
from hami_nodeagent.libraries.loading import Kind


def listed(*changes: dict[str, object], **rest: object) -> str:
    own = [
        {"index": at, "uuid": f"U-{at}", "name": "Acme", "memory_mib": 1024, **change}
        for at, change in enumerate(changes)
    ]
    return json.dumps({"devices": own, **rest})


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_is_an_error_by_its_status_and_by_its_name(kind: Kind) -> None:
    error = failure("acme list", "acme", "acme: acme_list: BAD (error -3)\n", kind)
    assert (type(error), error.code) == (ERROR_BY_KIND[kind], -3)
    assert error.detail == "acme: acme_list: BAD (error -3)"
    told = Told(kind=kind.name.lower(), words="acme_list: BAD", code=9).error("acme list")
    assert (type(told), told.code) == (ERROR_BY_KIND[kind], 9)


@pytest.mark.parametrize(
    ("complaint", "status", "kind"),
    [
        ("[warning] card 3\nacme: no such call\n", Kind.UNUSABLE, LibraryUnusable),
        ("acme: driver not loaded\n", 1, DriverMissing),
        ("Traceback (most recent call last):\n", 1, AnswerUnknown),
        ("", -11, AnswerUnknown),
    ],
)
def test_other_exit_codes_are_classified_by_their_text(
    complaint: str, status: int, kind: type[DriverError]
) -> None:
    error = failure("acme list", "acme", complaint, status)
    assert type(error) is kind
    assert "warning" not in error.detail


def test_an_unknown_error_name_is_transient() -> None:
    assert type(Told(kind="sad", words="hm").error("look")) is DriverTransient
    assert isinstance(Told(kind="busy", words="hm").error("look"), DeviceBusy)
    assert isinstance(Told(kind="gone", words="hm").error("look"), DeviceGone)


def test_a_device_is_broken_lost_doubtful_or_good() -> None:
    sight = devices(
        listed(
            {},
            {"broken": "7 errors"},
            {"trouble": {"kind": "gone", "words": "fell off"}},
            {"trouble": {"kind": "transient", "words": "no data", "code": 3}},
        )
    )
    assert [(one.condition, one.reason) for one in sight.devices] == [
        (Condition.GOOD, ""),
        (Condition.BAD, "7 errors"),
        (Condition.BAD, "fell off"),
        (Condition.DOUBTFUL, "no data"),
    ]


def test_links_hold_in_both_directions_and_use_out_of_range_is_unknown() -> None:
    sight = devices(
        listed(
            {"core_pct": 4e9, "temperature_c": 65535, "power_w": 91.24, "numa": -1},
            {"core_pct": 12.6, "numa": 1, "processes": [[7, None], [8, 30]]},
            links=[[0, 1, "node", 2]],
        )
    )
    first, second = sight.devices
    assert (first.core_pct, first.temperature_c, first.power_w) == (None, None, 91.24)
    assert (first.numa, second.numa, second.core_pct) == (None, 1, 13)
    assert [(one.pid, one.used_mib) for one in second.processes or ()] == [(7, None), (8, 30)]
    view = Neighbour(level="node", fabric_links=2)
    assert sight.views == {("0", "1"): view, ("1", "0"): view}


@pytest.mark.parametrize(
    "text",
    [
        listed({}, {"index": 0}),
        listed({}, {"uuid": "U-0"}),
        listed({"index": -1}),
        listed({"uuid": "a b"}),
        listed({"memory_mib": 1 << 40}),
        listed({"bus_id": "somewhere"}),
        listed({"mode": "SGPU!"}),
        listed({"processes": [[-1, 3]]}),
        listed({}, links=[[0, 1, "node", 1]]),
        listed({}, {}, links=[[0, 1, "near", 1]]),
        listed({}, {}, links=[[0, 1, "node", 900]]),
        '{"devices": [',
    ],
)
def test_a_list_that_cannot_be_is_no_answer(text: str) -> None:
    with pytest.raises(AnswerUnknown):
        devices(text)
