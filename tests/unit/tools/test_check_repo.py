# SPDX-License-Identifier: Apache-2.0
"""The repository check refuses what must not be committed, with the place."""

import pytest

from tools.check_repo import MAX_BYTES, problems_of

SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
DOT = "."


def problems(name: str, text: str) -> list[str]:
    return list(problems_of(name, text.encode()))


@pytest.mark.parametrize(
    "host",
    ["pypi" + DOT + "org", "files.pythonhosted" + DOT + "org", "registry.NPMJS" + DOT + "org"],
)
def test_registry_host_is_refused_with_its_line(host: str) -> None:
    (problem,) = problems("docs/a.md", f"first\nsee {host} for it\n")
    assert problem.startswith("docs/a.md:2: names a registry host")


@pytest.mark.parametrize(
    "text",
    [
        "/" + "work/main/x",
        "cd /" + "root/.cache",
        '"/' + 'home/anna/hami"',
        "/" + "Users/bo/x",
        "(/" + "tmp/hami/x)",
    ],
)
def test_path_of_one_machine_is_refused(text: str) -> None:
    (problem,) = problems("a.toml", text)
    assert "names a path of one machine" in problem


@pytest.mark.parametrize(
    "text", ["/workspace/x", "docs/work/plan", "$HOME/work/x", "/tmp/x", "example.com/home/x"]
)
def test_ordinary_paths_pass(text: str) -> None:
    assert problems("a.toml", text) == []


def test_lock_file_with_an_address_is_refused() -> None:
    (problem,) = problems("x/other.lock", 'source = "https://example.com/simple"')
    assert "lock file" in problem
    assert problems("x/readme.md", "https://example.com/simple") == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME"])
@pytest.mark.parametrize("folder", ["services/a", "libs/b", "native/c"])
def test_unfinished_product_code_is_refused(word: str, folder: str) -> None:
    (problem,) = problems(f"{folder}/x.py", f"{SPDX}# {word}: later\n")
    assert problem.startswith(f"{folder}/x.py:2: unfinished code")


def test_unwritten_function_is_refused_except_in_generated_code() -> None:
    body = SPDX + "raise NotImplemented" + "Error('x')\n"
    assert problems("libs/a/x.py", body) == [
        "libs/a/x.py:2: unwritten code: NotImplemented" + "Error"
    ]
    assert problems("libs/a/x_pb2_grpc.py", body) == []


def test_words_that_contain_a_marker_word_pass() -> None:
    assert problems("libs/a/x.py", SPDX + "mastodons = hacksaw\n") == []


@pytest.mark.parametrize("suffix", ["py", "c", "h", "proto", "sh"])
def test_source_without_licence_line_is_refused(suffix: str) -> None:
    (problem,) = problems(f"a.{suffix}", "first\n")
    assert "SPDX" in problem
    assert problems(f"a.{suffix}", "#!/bin/sh\n" + SPDX) == []


def test_file_over_the_limit_is_refused() -> None:
    assert problems("a.bin", "x" * MAX_BYTES) == []
    (problem,) = problems("a.bin", "x" * (MAX_BYTES + 1))
    assert "more than" in problem


def test_binary_content_is_not_searched() -> None:
    assert list(problems_of("a.bin", b"\0 /" + b"work/main")) == []
