# SPDX-License-Identifier: Apache-2.0
"""What tests need to run the commands of the pages: stand-ins for names, and what pages promise."""

import re
from collections.abc import Mapping, Sequence

from tools.docs_text import Command


def filled(words: Sequence[str], stand_ins: Mapping[str, str]) -> list[str]:
    """``words`` with what the cluster of a test calls it instead."""
    return [stand_ins.get(word, word) for word in words]


def missing_lines(command: Command, output: str) -> list[str]:
    """Lines that the page shows after a command and that ``output`` has not, in their order.

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
