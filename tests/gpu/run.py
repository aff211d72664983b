# SPDX-License-Identifier: Apache-2.0
"""Validates the limiter and the agent's NVIDIA code on a machine with a GPU: ``./dev gpu``.

    python3 tests/gpu/run.py [--fake [--fault]] [--json FILE] [ID…]

Needs Python 3.11 or newer, a C compiler and NVIDIA's driver; frameworks are used where they are
installed. Each check prints one JSON line; a table of verdicts follows. The exit code is 1 if a
check failed. ``--fake`` runs the same checks on the fake driver (needs ``.venv``), with ``--fault``
each under the fault that it has to detect.

The runner itself is in ``runner``; tenant processes start here too, with ``--guest``.
"""

import importlib
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def find_packages() -> None:
    """Make the packages of this repository importable: ``tests`` and ``tools`` before installed
    packages of the same name, those of the services after them.
    """
    for name in ("tests", "tools"):
        module = types.ModuleType(name)
        module.__path__ = [str(ROOT / name)]
        sys.modules[name] = module
    for folder in ("libs", "services"):
        sys.path += [str(path) for path in sorted((ROOT / folder).glob("*/src"))]


if __name__ == "__main__":
    find_packages()
    words = sys.argv[1:]
    if words[:1] == ["--guest"]:
        importlib.import_module("tests.gpu.guest").serve(*words[1:])
    else:
        sys.exit(importlib.import_module("tests.gpu.runner").main(words))
