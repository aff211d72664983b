# SPDX-License-Identifier: Apache-2.0
"""``hamictl policy test`` on the shipped example, and its answers to mistakes of people."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from click.testing import CliRunner, Result

from hamictl.cli import main
from tests.support.stimuli_drive import Drive

EXAMPLES = Path(__file__).parents[3] / "examples" / "policies"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the shipped policies with their traces."""
    shutil.copytree(EXAMPLES, tmp_path / "policies")
    return tmp_path / "policies" / "policies.toml"


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["policy", "test", *map(str, words)])


def test_the_shipped_example_passes() -> None:
    result = run(EXAMPLES / "policies.toml", "-o", "wide")
    assert result.exit_code == 0, result.output
    assert "2 passed, 0 failed" in result.output
    assert "ok: cost ≤ 15.1147, 80 % of recorded (is 11.0966)" in result.output


def test_another_policy_fails_it_with_figures_placements_and_junit(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    example.write_text(text.replace('"binpack"', '"spread"'), encoding="utf-8")
    junit = example.parent / "junit.xml"
    result = run(example, "--junit", junit)
    assert result.exit_code == 1
    assert "1 passed, 1 failed" in result.output
    assert "failed: cost ≤ 15.1147, 80 % of recorded (is " in result.output
    assert "failed: placements as in traces/afternoon-packed.golden" in result.output
    assert "        -serving/chat-1 gpu-1 GPU-gpu-1-0" in result.output
    root = ET.parse(junit).getroot()  # noqa: S314 - our own file
    assert (root.get("tests"), root.get("failures")) == ("2", "1")
    (failure,) = root.iter("failure")
    assert failure.text is not None
    assert "cost" in failure.text
    answer = json.loads(run(example, "-o", "json").output)
    assert [one["passed"] for one in answer["items"][0]["tests"]] == [False, True]


def test_golden_placements_are_written_on_request(example: Path) -> None:
    golden = example.parent / "traces" / "afternoon-packed.golden"
    before = golden.read_text(encoding="utf-8")
    golden.unlink()
    assert "no such file; --update writes it" in run(example).output
    assert run(example, "--update").exit_code == 0
    assert golden.read_text(encoding="utf-8") == before


def test_yaml_and_a_snapshot_with_pods(example: Path) -> None:
    containers = [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]
    pods = [
        {
            "kind": "Pod",
            "metadata": {"name": f"job-{number}", "namespace": "training"},
            "spec": {"containers": containers},
        }
        for number in range(4)
    ]
    (example.parent / "pods.yaml").write_text(yaml.safe_dump_all(pods), encoding="utf-8")
    expect = [
        {"measure": "placed", "namespace": "training", "least": 4},
        {"measure": "devices_used_peak", "most": 6},
    ]
    test = {"name": "jobs", "trace": ["traces/afternoon.json"], "pods": ["pods.yaml"]}
    document = {"policies": {"packed": {"node": "binpack"}}, "tests": [{**test, "expect": expect}]}
    file = example.parent / "policies.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    result = run(file)
    # Three nodes have two devices each.
    assert result.exit_code == 1, result.output
    assert "failed: placed of training ≥ 4 (is 3)" in result.output
    assert "devices_used_peak" not in result.output
    expect[0] = {"measure": "wait_p95_s", "most": 1}
    file.write_text(yaml.safe_dump({**document, "tests": [{**test, "expect": expect}]}))
    assert "test 'jobs': wait_p95_s: a snapshot is one moment and does not have it" in (
        run(file).output
    )


@pytest.mark.anyio
async def test_a_stimulus_log_is_a_trace_and_replay_compares_it(tmp_path: Path) -> None:
    drive = Drive(tmp_path / "log", 4)
    for _ in range(3):
        for _ in range(40):
            drive.step()
        await drive.recorder.drain()
    file = tmp_path / "policies.toml"
    file.write_text(
        '[policies.packed]\nnode = "binpack"\n[[tests]]\nname = "log"\ntrace = ["log"]\n'
        '[[tests.expect]]\nmeasure = "placed"\nleast = 1\n',
        encoding="utf-8",
    )
    result = run(file, "-o", "wide")
    assert result.exit_code == 0, result.output
    prices = tmp_path / "registry.toml"
    prices.write_text('[prices]\ncurrency = "EUR"\ndevice_hour = { "*" = 2.0 }\n')
    words = ["replay", str(tmp_path / "log"), "--policy", "node=binpack", "--policy", "node=spread"]
    compared = CliRunner().invoke(main, [*words, "--prices", str(prices), "-o", "json"])
    assert compared.exit_code == 0, compared.output
    answer = json.loads(compared.output)
    placed = answer["results"][0]["placed_at_once"] + answer["results"][0]["waited"]
    assert placed == answer["arrivals"] > 0
    assert answer["results"][0]["cost"] == pytest.approx(
        2 * answer["results"][0]["device_hours"], abs=1e-3
    )
    table = CliRunner().invoke(main, [*words, "--prices", str(prices)]).output
    assert "DEVICE HOURS   COST" in table
    assert "as recorded" in table


BEGIN = '[policies.packed]\nnode = "binpack"\n'
TEST = '[[tests]]\nname = "t"\ntrace = ["traces/afternoon.jsonl", "traces/afternoon.json"]\n'
PLACED = '[[tests.expect]]\nmeasure = "placed"\n'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (BEGIN, "no test; write [[tests]]"),
        ("[policies]\n", "policies: has 0 policies"),
        (
            '[policies.p]\nnod = "binpack"\n',
            "policies.p.nod: is not a known key; did you mean node",
        ),
        ('[policies.p]\nnode = "pack"\n', "policies[...].node: Invalid enum value 'pack'"),
        (
            '[policies.p]\ndevice = ["binpack", "binpack"]\n',
            "policies.p.device: names binpack twice",
        ),
        ("[policies.p.weights]\nslot=0\ncore=0\nmemory=0\n", "policies.p.weights: are all 0"),
        ('[policies.Packed]\nnode = "spread"\n', "policies.Packed: is not a name"),
        (BEGIN + TEST, "tests[0]: expects nothing"),
        (BEGIN + TEST + PLACED, "tests[0].expect[0]: has no bound"),
        (BEGIN + TEST + PLACED + "most = 1\nmots = 2\n", "expect[0].mots: is not a known key"),
        (BEGIN + TEST + 'policy = "x"\n' + PLACED, "tests[0].policy: 'x' is not in the file"),
        (
            BEGIN + TEST + '[[tests.expect]]\nmeasure = "cost"\nmost = 1\n',
            "tests[0].expect[0].measure: cost needs prices",
        ),
        (
            BEGIN + TEST + '[[tests.expect]]\nmeasure = "packing_pct"\nnamespace = "a"\nmost = 1\n',
            "tests[0].expect[0].namespace: does not apply to packing_pct",
        ),
        (
            BEGIN + TEST + PLACED + 'namespace = "absent"\nmost = 1\n',
            "placed: namespace: no pod of absent arrives in the trace",
        ),
        (BEGIN + TEST.replace('.json"]', '.txt"]') + PLACED + "most = 1\n", "give a stimulus log"),
        (BEGIN + TEST.replace('afternoon.json"', 'none.json"') + PLACED + "most = 1\n", "No such"),
    ],
)
def test_mistakes_name_the_field_and_the_fix(example: Path, content: str, problem: str) -> None:
    example.write_text(content, encoding="utf-8")
    result = run(example)
    assert result.exit_code == 2, result.output
    assert problem in result.output
