# SPDX-License-Identifier: Apache-2.0
"""The check of prose finds house words, free relatives and long paragraphs, and little else."""

import pytest

from tools.check_prose import COMMENT, TEXT, Finding, findings_of, judge

MODULE = "libs/x/src/x/a.py"


def found(name: str, content: str) -> list[tuple[int, str, str]]:
    """Line, kind and problem of each finding."""
    return [(one.line, one.kind, one.problem) for one in findings_of(name, content)]


def test_house_word_in_a_page_is_reported_with_its_line_and_the_fields_word() -> None:
    ((line, kind, problem),) = found("docs/a.md", "# Title\n\nFine.\nThe agent is told.\n")
    assert (line, kind) == (4, TEXT)
    assert problem.startswith("house word 'told'; write: reported")


def test_phrase_is_found_across_the_end_of_a_line() -> None:
    ((line, _, problem),) = found("docs/a.md", "It waits for\never.\n")
    assert line == 1
    assert "for\\never" in problem


@pytest.mark.parametrize(
    "page",
    [
        "Run `tell nobody` now.\n",
        "```sh\ntell nobody\n```\n",
        "    tell nobody\n",
        "Call the intelligence, foretold.\n",
        "# What it does\n",
        "What is a lease? A record that expires.\n",
        "<!-- not run: What needs a GPU -->\n",
    ],
)
def test_code_headings_questions_and_other_words_pass(page: str) -> None:
    assert found("docs/a.md", page) == []


@pytest.mark.parametrize("first", ["What is stale", "Who loses", "Whether it fits", "Whoever asks"])
def test_sentence_that_begins_with_a_free_relative_is_reported(first: str) -> None:
    problems = [problem for *_, problem in found("docs/a.md", f"Fine. {first} is dropped.\n")]
    assert any(problem.startswith("a sentence begins with 'Wh") for problem in problems)


def test_paragraph_of_six_lines_is_reported_and_a_list_of_six_items_is_not() -> None:
    assert found("docs/a.md", "A line.\n" * 5) == []
    ((line, _, problem),) = found("docs/a.md", "\n" + "A line.\n" * 6)
    assert (line, problem.split(";")[0]) == (2, "a paragraph of 6 lines")
    assert found("docs/a.md", "- An item.\n" * 6) == []


def test_line_beyond_the_width_is_reported_unless_a_link_or_a_table_needs_it() -> None:
    ((_, _, problem),) = found("docs/a.md", "x " * 61)
    assert problem == "122 columns; wrap at 120"
    assert found("docs/a.md", f"| {'x ' * 61} |\n") == []
    assert found("docs/a.md", f"[x](a/{'x' * 120})\n") == []


def test_docstrings_comments_and_names_of_tests_are_comments() -> None:
    source = (
        '"""Tell the peer."""\n'
        "# told\n"
        "def test_nobody_waits() -> None:\n"
        '    """How it waits."""\n'
        '    x = "``told``"\n'
    )
    lines = sorted((line, kind) for line, kind, _ in found(MODULE, source))
    assert lines == [(1, COMMENT), (2, COMMENT), (3, COMMENT), (4, COMMENT)]


def test_strings_of_products_are_texts_and_identifiers_are_not() -> None:
    source = 'told = {"told": "the agent was told"}\n'
    assert [kind for _, kind, _ in found(MODULE, source)] == [TEXT]
    assert found("tests/unit/x.py", source) == []


def test_comments_and_texts_of_c_are_read() -> None:
    source = '/* The agent\n * is told. */\nint told; // anew\nchar *s = "told now";\n'
    kinds = [(line, kind) for line, kind, _ in found("native/a.c", source)]
    assert kinds == [(2, COMMENT), (3, COMMENT), (4, TEXT)]


def test_comments_of_manifests_are_texts() -> None:
    assert [kind for _, kind, _ in found("deploy/a.yaml", "a: b # told\n")] == [TEXT]
    assert [kind for _, kind, _ in found("pyproject.toml", "# told\n")] == [COMMENT]


def finding(kind: str, name: str = "a.py") -> Finding:
    return Finding(name=name, line=1, kind=kind, problem="p")


def test_texts_have_no_debt_and_comments_only_what_is_recorded() -> None:
    assert judge([finding(TEXT)], {"a.py": 1})[:1] == ["a.py:1: p"]
    assert judge([finding(COMMENT)], {"a.py": 1}) == []
    assert judge([finding(COMMENT)] * 2, {"a.py": 1}) == ["a.py:1: p"] * 2
    assert judge([finding(COMMENT)], {}) == ["a.py:1: p"]


def test_debt_that_is_paid_must_be_lowered() -> None:
    (problem,) = judge([], {"a.py": 1})
    assert "--update" in problem
