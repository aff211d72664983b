# SPDX-License-Identifier: Apache-2.0
"""Defines metric families, the sets of names, and the exposition text of samples.

Sets: ``hami`` are the names and labels of HAMi's newer exporters, ``legacy`` those of its older
ones, ``volcano`` those of Volcano's vGPU plugin. Each exporter shows the sets its settings name.
HAMi's families have the constant label ``zone``. The text is Prometheus' exposition format 0.0.4.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Generic, Literal, TypeVar

from msgspec import Struct

NameSet = Literal["hami", "legacy", "volcano"]
Kind = Literal["gauge", "counter"]
T = TypeVar("T")

ZONE: Final = "vGPU"
"""Value of the label ``zone``, the same for every series of HAMi's."""


class Family(Struct, frozen=True, kw_only=True):
    """One metric: its name as it is scraped, type and help text."""

    name: str
    text: str
    kind: Kind = "gauge"
    replaces: str = ""
    """HAMi's older name for the same metric."""


class Group(Struct, Generic[T], frozen=True, kw_only=True):
    """Families with the same labels, and the functions that compute both from one object."""

    names: NameSet | None = None
    """The set that must be enabled for it; ``None``: always shown."""
    labels: tuple[str, ...]
    values: Callable[[T], tuple[str, ...]]
    """Values of the labels, in their order."""
    families: tuple[tuple[Family, Callable[[T], float | None]], ...]
    """With the value; ``None``: no sample."""

    def is_shown(self, sets: Collection[str]) -> bool:
        """True when an exporter that shows ``sets`` shows this group."""
        return self.names is None or self.names in sets


def head(family: Family) -> str:
    """The lines that precede a family's samples."""
    text = family.text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n"


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """``{a="1",b="2"}``."""
    pairs = zip(names, values, strict=True)
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def add_samples(group: Group[T], thing: T, lines: Mapping[str, list[str]]) -> None:
    """Append the samples of ``thing`` to the lines of each family, by family name."""
    labels = label_text(group.labels, group.values(thing))
    for family, figure in group.families:
        value = figure(thing)
        if value is not None:
            lines[family.name].append(f"{family.name}{labels} {value}\n")


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return value
