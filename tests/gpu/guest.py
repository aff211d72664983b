# SPDX-License-Identifier: Apache-2.0
"""Runs one guest in a tenant's process and passes its answers to the runner.

A guest is a generator of ``tests/gpu/guests``, named ``module:function``. It gets its arguments
from the command line and yields JSON objects; each further object is the answer to the next line of
standard input. Answers go to a pipe of their own, because frameworks print on standard output.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
Steps = Generator[Answer, Any, None]
"""A guest: yields answers, is sent requests."""

ANSWERS = "GPU_GUEST_ANSWERS"
"""Variable with the descriptor of the pipe."""
MISSING = "missing"
"""Key of the answer that names a package which is not installed."""
OWN = frozenset({"tests", "tools"})


def serve(name: str, arguments: str) -> None:
    """Run the guest until it ends or standard input does."""
    with os.fdopen(int(os.environ.pop(ANSWERS)), "w", encoding="ascii") as answers:
        try:
            for answer in _answers(name, json.loads(arguments)):
                print(json.dumps(answer), file=answers, flush=True)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in OWN or missing.startswith("hami_"):
                raise
            print(json.dumps({MISSING: missing}), file=answers, flush=True)


def waited_ns() -> int:
    """Time for which this process's threads were runnable and had no processor; 0: not known."""
    waited = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended, or the kernel has no figures
            waited += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    return waited


def _answers(name: str, arguments: dict[str, Any]) -> Iterator[Any]:
    module, _, function = name.partition(":")
    guest = getattr(importlib.import_module(f"tests.gpu.guests.{module}"), function)
    steps = guest(**arguments)
    request: Any = None
    while True:
        try:
            yield steps.send(request)
        except StopIteration:
            return
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
