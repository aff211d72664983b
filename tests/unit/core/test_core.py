# SPDX-License-Identifier: Apache-2.0
"""One entry point to the core: every method that changes or decides is an input."""

import inspect
import re

import pytest

from hami_common.errors import InvariantBroken
from hami_core.core import Core
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import (
    DevicesPut,
    FilterAsked,
    Input,
    QuotaAsked,
    ShortlistAsked,
    Stimulus,
)
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.verdicts import Verdicts
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.resourcequota import Asker
from hami_core.quota.verdicts import QuotaVerdicts
from hami_core.replay.stimuluslog import KINDS
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable
from tests.support import builders
from tests.support.core_entrance import ANSWERED, PARTS, READS, WITHIN, guard_entrance


def core() -> Core:
    table = DeviceTable()
    return Core(
        ledger=Ledger(table, writer="s1"),
        inventory=Inventory(table, heartbeat_timeout_s=15.0),
        quota=QuotaLedger(),
    )


def test_every_public_method_of_the_parts_is_an_input_or_a_read() -> None:
    public = {
        f"{part.__name__}.{name}"
        for part in PARTS
        for name, value in vars(part).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }
    assert public - ANSWERED - READS - WITHIN == set()
    assert (ANSWERED | READS | WITHIN) - public == set()


def test_every_input_names_its_method_and_is_a_kind_of_the_log() -> None:
    for kind in Input.__subclasses__():
        assert kind.__name__ in KINDS
        named = re.match(r"``(\w+\.\w+)``", kind.__doc__ or "")
        assert named or kind in Stimulus.__args__, kind


def test_answers_are_those_of_the_parts() -> None:
    scheduler = core()
    for number, node in enumerate(("n1", "n2", "n3"), start=1):
        devices = builders.node_devices(node, [builders.device(f"{node}-0")])
        assert scheduler.answer(DevicesPut(devices=devices, revision=number, now_s=1.0))
    names = NodeNames.of(["n1", "n2", "n3", "n4"])
    request = builders.pod(builders.container(builders.ask(1, mib=1000)))
    filtered = scheduler.answer(FilterAsked(request=request), names)
    alone = Verdicts(scheduler.table)
    assert filtered.feasible == alone.filter(request, names).feasible == ["n1", "n2", "n3"]
    best = scheduler.answer(ShortlistAsked(request=request, count=2))
    expected = alone.shortlist(request, filtered.left, 2)
    assert list(best.strings()) == list(expected.strings())
    asked = QuotaAsked(request=request, asker=Asker())
    allowed = QuotaVerdicts(scheduler.table, QuotaLedger()).allowed(
        request, filtered, Asker(), waiting=()
    )
    assert scheduler.answer(asked).classes() == allowed.classes()


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (FilterAsked(request=builders.pod()), "no candidate nodes"),
        (QuotaAsked(request=builders.pod(), asker=Asker()), "before any filter"),
        (ShortlistAsked(request=builders.pod(), count=1), "before any filter"),
    ],
)
def test_inputs_with_unknown_references_are_refused(asked: Input[object], what: str) -> None:
    with pytest.raises(InvariantBroken, match=what):
        core().answer(asked)


def test_guard_reports_a_service_that_bypasses_the_entrance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard_entrance(monkeypatch)
    ledger = core().ledger
    elsewhere = {"__name__": "hami_scheduler.shell.somewhere", "ledger": ledger}
    with pytest.raises(pytest.fail.Exception, match=r"somewhere calls Ledger\.forget"):
        exec("ledger.forget('n1', 'uid-1')", elsewhere)  # noqa: S102
    ledger.forget("n1", "uid-1")
