# SPDX-License-Identifier: Apache-2.0
"""One table of facts per vendor: requests, devices and outcomes, HAMi's rules among them.

A fact that HAMi 2.10 answers differently names its entry in ``tools.hami_differences``, from which
docs/migration.md is generated, so the page and the behavior cannot diverge.
"""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from msgspec import structs

from hami_common.vendors.catalog import Catalog
from tests.contract.vendors.fact import Fact, outcome_of
from tools.hami_differences import DIFFERENCES

ROOT = Path(__file__).resolve().parents[3]
VENDORS = tuple(vendor.name for vendor in Catalog.from_settings().vendors)
FACTS: dict[str, tuple[Fact, ...]] = {
    name: import_module(f"tests.contract.vendors.facts.{name}").FACTS for name in VENDORS
}
ROWS = [(name, fact) for name, facts in FACTS.items() for fact in facts]


def renamed(vendor: str, fact: Fact) -> Fact | None:
    """Return the fact under other resource names; ``None`` if it uses a name that is no setting."""
    section = getattr(fact.settings, vendor)
    fields = {
        field: (value, f"example.com/{field.replace('_', '-')}")
        for field, value in structs.asdict(section).items()
        if field.endswith("_name") and value
    }
    names = dict(fields.values())
    if not all(set(limits) <= names.keys() for limits in (fact.limits, *fact.more)):
        return None
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))

    def text(old: str) -> str:
        return pattern.sub(lambda match: names[match.group()], old)

    changed = structs.replace(section, **{field: name for field, (_, name) in fields.items()})
    return replace(
        fact,
        limits={text(name): amount for name, amount in fact.limits.items()},
        more=tuple({text(name): n for name, n in limits.items()} for limits in fact.more),
        becomes={text(name): amount for name, amount in fact.becomes.items()},
        rejected=text(fact.rejected),
        waits=text(fact.waits),
        warns=text(fact.warns),
        settings=structs.replace(fact.settings, **{vendor: changed}),
    )


OTHER_NAMES = [(name, other) for name, fact in ROWS if (other := renamed(name, fact))]


@pytest.mark.parametrize(
    ("vendor", "fact"), ROWS, ids=[f"{name}: {fact.why}" for name, fact in ROWS]
)
def test_request_has_the_outcome_of_its_table(vendor: str, fact: Fact) -> None:
    del vendor
    check(fact)


@pytest.mark.parametrize(
    ("vendor", "fact"), OTHER_NAMES, ids=[f"{name}: {fact.why}" for name, fact in OTHER_NAMES]
)
def test_outcome_is_the_same_under_other_resource_names(vendor: str, fact: Fact) -> None:
    assert all(name.startswith("example.com/") for name in fact.limits), vendor
    check(fact)


def check(fact: Fact) -> None:
    """Compare the outcome with every expectation that the fact states."""
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
