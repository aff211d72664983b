# SPDX-License-Identifier: Apache-2.0
"""Reads the option ``--add-nodes``: a template, with or without a number of nodes."""

import re
from collections.abc import Container
from pathlib import Path
from typing import Final, NamedTuple

from hami_core.planning.scaling import NODES_MOST, NodeTemplate
from hamictl.errors import InputRefused
from hamictl.manifests import read_as

_COUNTED: Final = re.compile(r"(.+)x([0-9]+)")


class Added(NamedTuple):
    """Nodes to add."""

    template: NodeTemplate | str
    """A template, or the name of a node."""
    nodes: int | None
    """``None``: the least number."""


def parse(text: str, known: Container[str] = ()) -> Added:
    """Parse ``TEMPLATE`` or ``TEMPLATExN``; a file or a known node has precedence as a whole."""
    if text in known or Path(text).is_file():
        return Added(_template(text), None)
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        return Added(_template(text), None)
    nodes = int(counted[2])
    if nodes > NODES_MOST:
        message = f"--add-nodes {text}: write at most {NODES_MOST} nodes"
        raise InputRefused(message)
    return Added(_template(counted[1]), nodes)


def _template(text: str) -> NodeTemplate | str:
    return read_as(Path(text), NodeTemplate) if Path(text).is_file() else text
