# SPDX-License-Identifier: Apache-2.0
"""Calls are read and answers written alike for every form of the nodes' names."""

import json
import random

import pytest

from hami_common.errors import WireInvalid
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from hami_scheduler.shell import extender_wire as wire
from tests.support.builders import ask, devices, held, pod, share
from tests.unit.scheduler.shell import builders

COUNT = 300


def compact(pod_object: builders.Obj, names: list[str]) -> bytes:
    """A call as Go writes it."""
    body = {"Pod": pod_object, "Nodes": None, "NodeNames": names}
    return json.dumps(body, separators=(",", ":")).encode()


def table_of_some() -> tuple[DeviceTable, list[str]]:
    """Nodes of two widths, every third of which is nearly full; and one that is unknown."""
    table, names = DeviceTable(), [f"node-{number:05d}.pool" for number in range(COUNT)]
    for number, name in enumerate(names[:-1]):
        table.upsert_node(devices(name, 1 + number % 2))
        if number % 3 == 0:
            table.book(name, [held(share(f"{name}-nvidia-0", 39_000))])
    return table, names


@pytest.mark.parametrize("mib", [500, 3_000, 50_000])
def test_answers_are_the_same_for_text_and_for_strings(mib: int) -> None:
    table, names = table_of_some()
    verdicts, request = Verdicts(table), pod(ask(mib=mib))
    chance, decoder = random.Random(mib), wire.ArgsDecoder()
    for _ in range(3):
        chance.shuffle(names)
        plain = verdicts.filter(request, names)
        _, candidates = decoder.decode(compact(builders.pod("p"), names))
        filtered = verdicts.filter(request, candidates.names)
        groups = [(refusal.text, places) for refusal, places in filtered.groups()]
        answer = json.loads(wire.encode_filter(candidates, filtered.left, groups))
        assert answer["NodeNames"] == plain.feasible == filtered.feasible
        assert answer["FailedNodes"] == plain.refused() == filtered.refused()
        assert filtered.classes() == plain.classes()
        assert (answer["Nodes"], answer["FailedAndUnresolvableNodes"]) == (None, {})
        _, candidates = decoder.decode(compact(builders.pod("p"), answer["NodeNames"]))
        scored = verdicts.prioritize(request, candidates.names)
        told = json.loads(wire.encode_priorities(candidates.names, scored.priorities(highest=10)))
        listed = verdicts.prioritize(request, plain.feasible)
        numbers = dict(zip(plain.feasible, listed.priorities(highest=10).tolist(), strict=True))
        least = min(numbers.values(), default=0)
        over = {name: number - least for name, number in numbers.items() if number > least}
        assert {entry["Host"]: entry["Score"] for entry in told} == (
            over or dict.fromkeys(plain.feasible[:1], 0)
        )
        assert scored.best(7) == listed.best(7)


def test_repeated_list_of_names_is_evaluated_again_after_the_cluster_changed() -> None:
    table, names = table_of_some()
    verdicts, request = Verdicts(table), pod(ask(mib=3_000))

    def refused() -> set[str]:
        _, candidates = wire.ArgsDecoder().decode(compact(builders.pod("p"), names))
        return set(verdicts.filter(request, candidates.names).refused())

    before = refused()
    assert refused() == before
    table.upsert_node(devices(names[-1], 1))
    assert refused() == before - {names[-1]}
    table.remove_node(names[1])
    table.book(names[2], [held(share(f"{names[2]}-nvidia-0", 39_000))])
    assert refused() == before - {names[-1]} | {names[1], names[2]}


def test_pod_of_a_pair_of_calls_is_read_once() -> None:
    decoder = wire.ArgsDecoder()
    first, _ = decoder.decode(compact(builders.pod("p"), ["a", "b"]))
    again, candidates = decoder.decode(compact(builders.pod("p"), ["b"]))
    assert again is first
    assert candidates.names.strings() == ["b"]
    other, _ = decoder.decode(compact(builders.pod("q"), ["b"]))
    assert other is not first


@pytest.mark.parametrize(
    "text",
    ['"NodeNames":["x"]', '\\"NodeNames\\":[\\"x\\"]', "NodeNames", '{"NodeNames":["x","y"]}', "]"],
)
def test_names_are_those_of_the_call_whatever_the_pod_says(text: str) -> None:
    pod_object = builders.pod("p", annotated={"note": text, '"NodeNames":[': text})
    for body in (
        compact(pod_object, ["a", "b"]),
        json.dumps({"NodeNames": ["a", "b"], "Pod": pod_object}).encode(),
        json.dumps({"NodeNames": ["a", "b"], "Pod": pod_object}, separators=(",", ":")).encode(),
    ):
        view, candidates = wire.ArgsDecoder().decode(body)
        assert candidates.names.strings() == ["a", "b"]
        assert view.annotations()["note"] == text


def test_names_inside_the_pod_are_not_those_of_the_call() -> None:
    pod_object = builders.pod("p") | {"NodeNames": ["x"]}
    body = json.dumps({"Pod": pod_object, "NodeNames": ["a"]}, separators=(",", ":")).encode()
    assert wire.ArgsDecoder().decode(body)[1].names.strings() == ["a"]
    only = json.dumps({"Pod": pod_object}, separators=(",", ":")).encode()
    with pytest.raises(WireInvalid, match="neither NodeNames nor Nodes"):
        wire.ArgsDecoder().decode(only)


@pytest.mark.parametrize("names", ['["a",1]', '["a"', '["a",]', '["a]"]x', "[nothing]"])
def test_names_that_are_no_list_of_names_are_refused(names: str) -> None:
    body = f'{{"Pod":{{}},"NodeNames":{names}}}'.encode()
    with pytest.raises(WireInvalid, match="ExtenderArgs"):
        wire.ArgsDecoder().decode(body)[1].names.strings()
