# SPDX-License-Identifier: Apache-2.0
"""The page of proofs lists each test at the level at which it runs, and no claim without one."""

import json
from pathlib import Path

import pytest
from msgspec import Struct

from hami_common.vendors.protocol import Capability, HardwareRun
from tools.gen_proof import CatalogInvalid, generate
from tools.named_tests import Level, UnknownTest, level_of

PLAIN = "def test_a() -> None: ...\n"
REAL = "import pytest\npytestmark = [pytest.mark.anyio, pytest.mark.real]\n"
FILES = {
    "unit/test_plain.py": PLAIN + "class TestB:\n    async def test_c(self) -> None: ...\n",
    "contract/test_plane.py": REAL + PLAIN,
    "contract/test_kubelet.py": f"from tests.support.nodes import run\n{REAL}{PLAIN}",
    "contract/suite.py": "class Contract:\n    def test_a(self) -> None: ...\n",
    "contract/test_suite.py": (
        f"from tests.contract.suite import Contract\n{REAL}class TestA(Contract):\n    pass\n"
    ),
    "contract/test_one_real.py": f"import pytest\n@pytest.mark.real\n{PLAIN}def test_b(): ...\n",
    "support/nodes.py": "from tests.cluster.node.node import run\n",
    "cluster/node/node.py": "run = 1\n",
    "e2e/conftest.py": 'ON_REAL_PLANE = {"test_sim": set(), "test_part": {"killed"}}\n',
    "e2e/test_both.py": (
        f"from hami_sim.cluster import Cluster\n{PLAIN}def test_sim(): ...\ndef test_part(): ...\n"
    ),
    "e2e/classes.py": "class TestMore:\n    def test_a(self): ...\n",
    "e2e/test_imports.py": f"from tests.e2e.classes import TestMore\n{REAL}",
    "e2e/test_no_cluster.py": PLAIN,
    "install/test_pods.py": REAL + PLAIN,
    "contract/test_gpu.py": f"import pytest\n@pytest.mark.gpu\n{PLAIN}",
    "unit/test_skipped.py": f"import pytest\n@pytest.mark.skip(reason='x')\n{PLAIN}",
    "unit/test_skips_some.py": f"import pytest\n@pytest.mark.skipif(True, reason='x')\n{PLAIN}",
}
RUN = {
    "device": "H200",
    "driver": "580.159",
    "date": "2026-12-01",
    "checks": [{"check": "7", "verdict": "pass"}, {"check": "8", "verdict": "fail"}],
}
TESTED = HardwareRun(device="H200", driver="580.159", date="2026-12-01")


class Maker(Struct, frozen=True):
    """Stand-in for a vendor: all that the page reads of one."""

    name: str
    capability: Capability = Capability()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("unit/test_plain.py", Level.SIMULATED),
        ("unit/test_plain.py::test_a", Level.SIMULATED),
        ("unit/test_plain.py::TestB::test_c", Level.SIMULATED),
        ("contract/test_plane.py::test_a", Level.CONTROL_PLANE),
        ("contract/test_kubelet.py", Level.NODE),
        ("contract/test_suite.py::TestA", Level.CONTROL_PLANE),
        ("contract/test_one_real.py::test_a", Level.CONTROL_PLANE),
        ("contract/test_one_real.py::test_b", Level.SIMULATED),
        ("contract/test_one_real.py", Level.SIMULATED),
        ("e2e/test_both.py::test_a", Level.CONTROL_PLANE),
        ("e2e/test_both.py::test_part", Level.CONTROL_PLANE),
        ("e2e/test_both.py::test_sim", Level.SIMULATED),
        ("e2e/test_both.py", Level.SIMULATED),
        ("e2e/test_imports.py::TestMore::test_a", Level.CONTROL_PLANE),
        ("e2e/test_no_cluster.py", Level.SIMULATED),
        ("install/test_pods.py", Level.POD),
        ("unit/test_skips_some.py", Level.SIMULATED),
    ],
)
def test_level_follows_from_where_a_test_runs(root: Path, name: str, level: Level) -> None:
    assert level_of(f"tests/{name}", root=root) is level


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tests/unit/test_gone.py", "there is no file"),
        ("tools/gen.py", "there is no file"),
        ("tests/unit/test_plain.py::test_b", "has no test test_b"),
        ("tests/unit/test_plain.py::TestB::test_d", "has no test TestB::test_d"),
        ("tests/unit/test_plain.py::test_a::test_b", "has no test"),
        ("tests/e2e/classes.py::test_a", "has no test"),
        ("tests/support/nodes.py", "has no test"),
        ("tests/contract/test_gpu.py::test_a", "marked gpu"),
        ("tests/unit/test_skipped.py", "marked skip"),
    ],
)
def test_name_without_a_running_test_is_refused(root: Path, name: str, reason: str) -> None:
    with pytest.raises(UnknownTest, match=reason):
        level_of(name, root=root)


def made(root: Path, rows: str, *vendors: Maker, run: object = None) -> str:
    """The page from a catalog with ``rows``, and one run on a GPU if given."""
    (root / "tests/proof.toml").write_text(f'[[areas]]\ntitle = "Shares"\n{rows}')
    if run is not None:
        (root / "docs/gpu").mkdir(parents=True)
        (root / "docs/gpu/H200-580.159-2026-12-01.json").write_text(json.dumps(run))
    return generate(root, vendors)  # type: ignore[arg-type]  # the page reads no more of a vendor


def row(id_: str, text: str) -> str:
    return f'[areas.rows."{id_}"]\nname = "Limit"\n{text}\n'


def test_row_links_the_files_of_its_tests_in_the_column_of_their_level(root: Path) -> None:
    tests = 'tests = ["tests/unit/test_plain.py::test_a", "tests/install/test_pods.py"]'
    text = made(root, row("1.1", f'{tests}\nalso = ["2.1"]\nmissing = "the other part"'))
    unit, pods = "[unit/plain](../tests/unit/test_plain.py)", "[install/pods](../tests/install"
    assert f"| 1.1, 2.1 | Limit | {unit} | | | {pods}/test_pods.py) | |" in text
    assert "\nMissing:\n\n- 1.1: the other part\n" in text
    assert "| image as pod | 1 | 1 |" in text
    assert "Every capability has a test." in text


def test_capability_without_a_test_is_listed_as_not_proved(root: Path) -> None:
    text = made(root, row("1.1", 'missing = "not implemented"'))
    assert "## Not proved\n\n- 1.1 Limit: not implemented\n" in text
    assert "| not proved | 1 | |" in text


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (row("1.1", ""), "1.1: it names no test"),
        (row("1.1", 'tests = ["tests/unit/test_gone.py"]'), "1.1: tests/unit/test_gone.py"),
        (row("1.1", 'also = ["1.1"]\nmissing = "x"'), "1.1: the id occurs twice"),
        (row("1.1", 'vendors = ["nvida"]\nmissing = "x"'), "1.1: no vendor nvida"),
    ],
)
def test_catalog_that_disagrees_with_the_tree_is_refused(
    root: Path, rows: str, problem: str
) -> None:
    with pytest.raises(CatalogInvalid, match=problem):
        made(root, rows)


def test_checks_on_a_gpu_prove_with_device_driver_and_date(root: Path) -> None:
    vendor = Maker("nvidia", Capability(hardware_tested=(TESTED,)))
    rows = row("1.1", 'gpu = ["7"]') + row("1.2", 'gpu = ["7", "8"]\nmissing = "x"')
    rows = rows.replace('gpu = ["7"]', 'gpu = ["7"]\ntests = ["tests/unit/test_plain.py"]')
    text = made(root, rows, vendor, run=RUN)
    assert "| | | | H200 (driver 580.159, 2026-12-01) |" in text
    assert "| 1.2 | Limit | | | | | not yet run |" in text
    assert "| real GPU | 1 | 0 |" in text


def test_runs_and_the_vendors_list_of_them_agree(root: Path) -> None:
    rows = row("1.1", 'missing = "x"')
    listed = Maker("nvidia", Capability(hardware_tested=(TESTED,)))
    with pytest.raises(CatalogInvalid, match="of `hardware_tested` has no results"):
        made(root, rows, listed)
    with pytest.raises(CatalogInvalid, match=r"nvidia: add H200 .driver 580\.159, 2026-12-01. of"):
        made(root, rows, Maker("nvidia"), run=RUN)


def test_check_that_no_run_has_is_refused(root: Path) -> None:
    vendor = Maker("nvidia", Capability(hardware_tested=(TESTED,)))
    with pytest.raises(CatalogInvalid, match=r"1\.1: no run in docs/gpu has a check 70"):
        made(root, row("1.1", 'gpu = ["70"]\nmissing = "x"'), vendor, run=RUN)


def test_driver_of_a_vendor_proves_once_it_ran_on_its_hardware(root: Path) -> None:
    rows = row("3.2", 'vendors = ["ascend"]\ntests = ["tests/unit/test_plain.py"]')
    assert "| not yet run |" in made(root, rows, Maker("ascend"))
    run = {**RUN, "vendor": "ascend"}
    tested = Maker("ascend", Capability(hardware_tested=(TESTED,)))
    assert "| H200 (driver 580.159, 2026-12-01) |" in made(root, rows, tested, run=run)
