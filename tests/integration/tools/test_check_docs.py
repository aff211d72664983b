# SPDX-License-Identifier: Apache-2.0
"""The checker of the pages finds each kind of problem, and none in this project's pages."""

import textwrap
from pathlib import Path

import pytest

from tests.support.docs import missing_lines
from tools import check_docs
from tools.docs_text import Command, Page, parse


def page(text: str, name: str = "docs/shown.md") -> Page:
    return parse(textwrap.dedent(text), name=name)


def wrong(text: str) -> list[str]:
    """Problems of a page, without their positions."""
    return [problem.split(": ", 2)[-1] for problem in check_docs.problems([page(text)])]


def test_pages_of_the_project_have_no_problem() -> None:
    assert list(check_docs.problems(check_docs.pages())) == []


def test_every_command_is_run_or_says_why_not() -> None:
    fates = {str(one): check_docs.fate_of(one) for one in check_docs.commands()}
    assert [text for text, fate in fates.items() if fate is None] == []
    run = [fate for fate in fates.values() if fate is not None and fate.run_by[0]]
    assert len(run) > len(fates) / 2, "most of them are run"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("hamictl get nodes --registri x", "No such option"),
        ("hamictl get gadgets", "No such command"),
        ("hamictl explain pod -n team", "Missing argument"),
        ("kubectl hami top nodes -o tree", "'tree' is not one of"),
        ("./dev demo --onse", "unrecognized arguments: --onse"),
        ("./dev bench nothing", "there is no module tests.bench.nothing"),
        ("./dev tset", "there is no recipe tset"),
        ("./dev check hard", "check takes no arguments"),
        ("./dev test tests/unit/gone.py", "there is no tests/unit/gone.py"),
        ("pytest tests/native/gone.py", "there is no tests/native/gone.py"),
        ("python -m hami_nobody --check", "there is no module hami_nobody"),
        ("git status", "nobody runs it"),
        ('hamictl get "nodes', "is not what a shell reads"),
    ],
)
def test_mistyped_command_is_found(command: str, problem: str) -> None:
    (told,) = wrong(f"```sh\n{command}\n```\n")
    assert problem in told


@pytest.mark.parametrize(
    "text", ["```sh\n{}\n```\n", "```console\n$ {}\nout\n```\n", "Say:\n\n    {}\n"]
)
def test_commands_are_found_in_every_kind_of_block(text: str) -> None:
    found = page(text.format("hamictl get nodes  # all of them"))
    assert [one.words for one in found.commands] == [["hamictl", "get", "nodes"]]


def test_joined_line_is_one_command() -> None:
    (one,) = page("```sh\nhamictl get nodes \\\n  -o wide\n```\n").commands
    assert one.words == ["hamictl", "get", "nodes", "-o", "wide"]


def test_mark_says_why_a_block_is_not_run_and_holds_for_it_alone() -> None:
    text = "<!-- not run: needs a moon -->\n```sh\nnats pub a b\n```\n\n```sh\nnats pub c\n```\n"
    first, second = page(text).commands
    assert (first.mark, second.mark) == ("needs a moon", "")
    fate = check_docs.fate_of(first)
    assert fate is not None
    assert fate.why_not == "needs a moon"


@pytest.mark.parametrize(
    ("text", "is_form"),
    [
        ("`hamictl explain pod NAME`", True),
        ("`hamictl explain pod`", True),
        ("`kubectl describe pod`", True),
        ("`hamictl get nodes`", False),
        ("`kubectl get pods -o wide`", False),
    ],
)
def test_command_within_a_sentence_may_only_show_a_form(text: str, *, is_form: bool) -> None:
    (one,) = page(f"Say {text} then.\n").commands
    assert check_docs.is_form(one) is is_form
    assert check_docs.command_problem(one) == ""


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("yaml", "limits:\n  nvidia.com/gpumem: 3Gi\n", "gpumem"),
        ("yaml", "limits:\n  nvidia.com/gpumen: 3000\n", "asks for no device of ours"),
        ("yaml", "spec: {a: [{resourcesPerNode: {limits: {nvidia.com/gpumem: 3Gi}}}]}\n", "gpumem"),
        ("yaml", "kind: ResourceQuota\nspec: {hard: {limits.nvidia.com/mem: 1}}\n", "no resource"),
        ("yaml", "a: [\n", "expected"),
        ("toml", "[defaults]\nslotz = 4\n", "slotz"),
        ("toml", "[[queue]]\nnam = 'a'\n", "did you mean"),
        ("toml", "[drivers]\nserv = []\n", "did you mean drivers.serve?"),
        ("toml", "a =\n", "Invalid"),
        ("json", "{,}\n", "Expecting"),
        ("python", "def\n", "invalid syntax"),
        ("rust", "fn main() {}\n", "nobody checks rust"),
    ],
)
def test_mistake_in_a_snippet_is_found(language: str, text: str, problem: str) -> None:
    (told,) = wrong(f"```{language}\n{text}```\n")
    assert problem in told


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[a](gone.md)", "there is no docs/gone.md"),
        ("[a](terms.md#gone)", "docs/terms.md has no heading #gone"),
        ("[a](#gone)", "docs/shown.md has no heading #gone"),
        ("[a](../README.md)", ""),
        ("`[a](gone.md)`", ""),
        ("[a](#one-and-two)", ""),
    ],
)
def test_broken_link_is_found(link: str, problem: str) -> None:
    found = [page(f"# One `and` two\n\n{link}\n"), page("# Terms\n", name="docs/terms.md")]
    told = list(check_docs.link_problems(found))
    assert len(told) == bool(problem)
    assert problem in "".join(told)


def test_reference_to_a_missing_test_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fate = check_docs.Fate(pattern="x", run_by=("tests/e2e/test_demo.py", "no such thing"))
    monkeypatch.setattr(check_docs, "FATES", (fate,))
    assert wrong("# A\n") == ["there is no no such thing"]


def test_output_shown_in_a_page_is_compared_in_order() -> None:
    command = Command(page="p", line=1, text="x", printed=("a … c", "d  e"))
    assert missing_lines(command, "a b c\nd e\n") == []
    assert missing_lines(command, "d e\na b c\n") == ["d  e"]
    assert missing_lines(command, "a b\n") == ["a … c"]


def test_pages_are_those_of_the_repository() -> None:
    names = {one.name for one in check_docs.pages()}
    assert {"README.md", "docs/quickstart.md", "examples/README.md"} <= names
    assert not any(Path(name).parts[0].startswith(".") for name in names)
