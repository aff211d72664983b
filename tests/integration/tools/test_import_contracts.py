# SPDX-License-Identifier: Apache-2.0
"""Each import contract of the root pyproject.toml reports the import that it forbids."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"

VIOLATIONS = {
    "Services meet only in events and subjects": (
        "services/webhook/src/hami_webhook/shell/bad.py",
        "import hami_scheduler",
    ),
    "Services know neither the simulation nor the operator's command line": (
        "services/registry/src/hami_registry/shell/bad.py",
        "import hami_sim",
    ),
    "Common code knows no service": (
        "libs/hami-common/src/hami_common/bad.py",
        "import hami_registry",
    ),
    "The simulation knows no service": ("libs/hami-sim/src/hami_sim/bad.py", "import hami_webhook"),
    "The operator's command line imports no service": (
        "libs/hamictl/src/hamictl/bad.py",
        "import hami_scheduler.shell",
    ),
    "The scheduling core knows neither services nor command line": (
        "services/registry/src/hami_registry/shell/bad.py",
        "import hami_core",
    ),
    "The floors of the scheduling core": (
        "libs/hami-core/src/hami_core/table/bad.py",
        "import hami_core.ledger",
    ),
    "Decisions are pure": ("libs/hami-core/src/hami_core/bad.py", "import time"),
    "wiring knows the shell, the shell knows drivers and core": (
        "services/nodeagent/src/hami_nodeagent/core/bad.py",
        "import hami_nodeagent.shell",
    ),
    "Programs that speak to vendors' libraries start quickly": (
        "services/nodeagent/src/hami_nodeagent/libraries/bad.py",
        "import msgspec",
    ),
    "Input and output of the common library": (
        "libs/hamictl/src/hamictl/bad.py",
        "import hami_common.runtime",
    ),
    "numpy stays": ("services/registry/src/hami_registry/core/bad.py", "import numpy"),
    "talks to NVML": ("services/nodeagent/src/hami_nodeagent/shell/bad.py", "import pynvml"),
}

MORE_VIOLATIONS = (
    (
        "Programs that speak to vendors' libraries start quickly",
        "services/nodeagent/src/hami_nodeagent/drivers/hygon/binding.py",
        "import hami_nodeagent.drivers.errors",
    ),
    (
        "Programs that speak to vendors' libraries start quickly",
        "services/nodeagent/src/hami_nodeagent/drivers/hygon/binding.py",
        "import hami_nodeagent.drivers.hygon.reader",
    ),
    (
        "wiring knows the shell, the shell knows drivers and core",
        "services/nodeagent/src/hami_nodeagent/core/bad.py",
        "import hami_nodeagent.drivers.protocol",
    ),
    (
        "wiring knows the shell, the shell knows drivers and core",
        "services/nodeagent/src/hami_nodeagent/drivers/bad.py",
        "import hami_nodeagent.shell",
    ),
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the product's sources with its contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for source in [*ROOT.glob("libs/*/src"), *ROOT.glob("services/*/src")]:
        shutil.copytree(source, tmp_path / source.relative_to(ROOT))
    return tmp_path


def broken_contracts(copy: Path) -> set[str]:
    """Names of the contracts of ``VIOLATIONS`` that the tool reports as broken."""
    path = [*copy.glob("libs/*/src"), *copy.glob("services/*/src")]
    run = subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache"],
        cwd=copy,
        env={"PYTHONPATH": ":".join(map(str, path)), "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert any("Contracts:" in line for line in lines), run.stdout + run.stderr
    return {
        name for name in VIOLATIONS if any(name in line and " BROKEN" in line for line in lines)
    }


@pytest.mark.parametrize(
    ("name", "file", "statement"),
    [*((name, *violation) for name, violation in VIOLATIONS.items()), *MORE_VIOLATIONS],
)
def test_contract_reports_what_it_forbids(name: str, file: str, statement: str, copy: Path) -> None:
    (copy / file).write_text(f"{statement}\n")
    assert name in broken_contracts(copy)


def test_every_contract_has_an_import_that_breaks_it() -> None:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = [contract["name"] for contract in tables["contracts"]]
    assert [name for name in names if not any(known in name for known in VIOLATIONS)] == []


def test_operators_command_line_may_use_the_schedulers_core(copy: Path) -> None:
    (copy / "libs/hamictl/src/hamictl/good.py").write_text("import hami_core\n")
    assert broken_contracts(copy) == set()
