# SPDX-License-Identifier: Apache-2.0
"""One table of facts per vendor: requests, devices and outcomes, HAMi's rules among them.

A fact that HAMi 2.10 answers differently names its entry in ``tools.hami_differences``, from which
docs/migration.md is generated, so the page and the behavior cannot diverge.
"""

from importlib import import_module
from pathlib import Path

import pytest

from hami_common.vendors.catalog import Catalog
from tests.contract.vendors.fact import Fact, outcome_of
from tools.hami_differences import DIFFERENCES

ROOT = Path(__file__).resolve().parents[3]
VENDORS = tuple(vendor.name for vendor in Catalog.from_settings().vendors)
FACTS: dict[str, tuple[Fact, ...]] = {
    name: import_module(f"tests.contract.vendors.facts.{name}").FACTS for name in VENDORS
}
ROWS = [(name, fact) for name, facts in FACTS.items() for fact in facts]


@pytest.mark.parametrize(
    ("vendor", "fact"), ROWS, ids=[f"{name}: {fact.why}" for name, fact in ROWS]
)
def test_request_has_the_outcome_of_its_table(vendor: str, fact: Fact) -> None:
    del vendor
    found = outcome_of(fact)
    assert found.gives == fact.gives, found
    if fact.rejected:
        assert fact.rejected in found.rejected
    if fact.waits:
        assert found.waits.startswith(fact.waits), found.waits
    assert bool(found.rejected) is bool(fact.rejected)
    assert bool(found.waits) is bool(fact.waits)
    assert {name: found.env.get(name) for name in fact.sees} == dict(fact.sees)
    assert {name: found.limits.get(name) for name in fact.becomes} == dict(fact.becomes)
    if fact.warns:
        assert any(fact.warns in text for text in found.warnings), found.warnings
    else:
        assert found.warnings == ()


def test_every_fact_states_one_outcome() -> None:
    for name, fact in ROWS:
        stated = (fact.gives is not None, bool(fact.rejected), bool(fact.waits))
        assert sum(stated) == 1, (name, fact.why)


def test_every_difference_from_hami_has_a_fact_or_a_test() -> None:
    used = {fact.differs: name for name, fact in ROWS if fact.differs}
    assert used.keys() <= DIFFERENCES.keys()
    for key, difference in DIFFERENCES.items():
        assert (key in used) is (not difference.checked_by), key
        assert not difference.checked_by or (ROOT / difference.checked_by).is_file(), key
    for name, fact in ROWS:
        if fact.differs:
            assert DIFFERENCES[fact.differs].vendor in (name, "all"), fact.why
