# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/runbook/refusals.md from the code; ``--check`` only compares.

Also fails when a refusal code of the scheduler is not explained there.
"""

import ast
import inspect
import sys
from enum import StrEnum
from typing import get_args

from hami_core.ledger.states import TRANSITIONS
from hami_core.placement.reasons import RefusalCode
from hami_nodeagent.core import claims, resourceclaims
from tools.generated import DOCS, write_parts


def agent_codes(codes: type[StrEnum]) -> str:
    """Codes of the node agent with their docstrings."""
    body = ast.parse(inspect.getsource(codes)).body[0]
    if not isinstance(body, ast.ClassDef):
        raise TypeError(codes)
    rows = ["| code | what it means |", "| --- | --- |"]
    for name, text in zip(body.body[1:-1], body.body[2:], strict=True):
        if isinstance(name, ast.Assign) and isinstance(text, ast.Expr):
            target, value = name.targets[0], text.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                words = " ".join(str(value.value).split())
                rows.append(f"| `{codes[target.id].value}` | {words} |")
    if len(rows) != len(codes) + 2:
        raise ValueError("a code of the agent has no docstring")
    return "\n".join(rows)


def transitions() -> str:
    """Every change of state, with its writer and reason."""
    rows = ["| from | to | written by | meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| {a} | {b} | {t.writer} | {t.meaning} |" for (a, b), t in TRANSITIONS.items()]
    return "\n".join(rows)


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    page = DOCS / "runbook/refusals.md"
    text = page.read_text(encoding="utf-8")
    missing = [code for code in get_args(RefusalCode) if f"`{code}`" not in text]
    if missing:
        print(f"{page.name} does not explain {', '.join(missing)}", file=sys.stderr)
        return 1
    return write_parts(
        page,
        {
            "agent codes": agent_codes(claims.Code),
            "claim codes": agent_codes(resourceclaims.Code),
            "transitions": transitions(),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
