# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests that run the commands of pages: stand-ins for names, and expected output."""

import re
from collections.abc import Mapping, Sequence

from tools.docs_text import Command


def filled(words: Sequence[str], stand_ins: Mapping[str, str]) -> list[str]:
    """Return ``words`` with the names of the test's cluster."""
    return [stand_ins.get(word, word) for word in words]


def missing_lines(command: Command, output: str) -> list[str]:
    """Return lines that the page shows after a command and that ``output`` lacks, in their order.

    ``…`` on the page stands for anything within a line, and spaces for any number of them.
    """
    lines = iter(output.splitlines())
    missing = []
    for shown in command.printed:
        parts = [re.escape(part.strip()) for part in shown.split("…")]
        pattern = r".*".join(re.sub(r"(\\ )+", r"\\s+", part) for part in parts)
        if not any(re.search(pattern, line) for line in lines):
            missing.append(shown)
            break
    return missing
