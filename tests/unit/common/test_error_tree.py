# SPDX-License-Identifier: Apache-2.0
"""The drawing of the errors' tree shows the classes as they are."""

import re

from hami_common import errors

BRANCH = re.compile(r"^    (?P<indent>(?:│   |    )*)[├└]── (?P<name>\w+)", re.MULTILINE)


def drawn() -> set[tuple[str, str]]:
    """Pairs of a class and its base in the drawing."""
    path = ["HamiError"]
    pairs = set()
    for branch in BRANCH.finditer(errors.__doc__ or ""):
        del path[len(branch["indent"]) // 4 + 1 :]
        pairs.add((branch["name"], path[-1]))
        path.append(branch["name"])
    return pairs


def test_the_drawing_names_every_class_below_its_base() -> None:
    classes = {one for one in vars(errors).values() if isinstance(one, type)}
    tree = {one for one in classes if issubclass(one, errors.HamiError)} - {errors.HamiError}
    assert drawn() == {(one.__name__, one.__mro__[1].__name__) for one in tree}


def test_the_drawing_has_one_class_a_line_with_its_meaning() -> None:
    text = errors.__doc__ or ""
    lines = [line for line in text.splitlines() if "──" in line]
    assert len(lines) == len(drawn())
    assert all(re.search(r"\w+ {2,}\w", line) for line in lines)
