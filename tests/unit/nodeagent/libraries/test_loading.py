# SPDX-License-Identifier: Apache-2.0
"""The file loaded as a vendor's library, and the report of how a command ended."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hami_nodeagent
from hami_nodeagent.libraries import loading
from hami_nodeagent.libraries.loading import USAGE, Errors, Kind, Library, Program, Trouble, run

LIBC = "libc.so.6"
BINDINGS = sorted(
    path.parent.name for path in Path(hami_nodeagent.__file__).parent.glob("drivers/*/binding.py")
)


def program(**changes: Any) -> Program:
    own = Program(
        vendor="acme",
        word="acme",
        files=("libacme.so",),
        folders=("$ACME_HOME/lib",),
        errors=Errors(
            names={7: "BUSY"}, kinds={7: Kind.BUSY}, of_call={("acme_init", 7): Kind.MISSING}
        ),
        open=lambda library: library,
        commands={},
    )
    return own._replace(**changes)


def names(found: list[Path], root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in found if path.is_relative_to(root)]


def test_listed_folders_go_before_the_vendors_and_the_newest_version_first(tmp_path: Path) -> None:
    for name in ("a/libacme.so.9", "a/libacme.so.10.1", "a/libacme.so.bak", "home/lib/libacme.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    environment = {
        "LD_LIBRARY_PATH": f"{tmp_path}/none::{tmp_path}/a",
        "ACME_HOME": str(tmp_path / "home"),
    }
    found = loading.candidates(program(), "", environment)
    assert names(found, tmp_path) == ["a/libacme.so.10.1", "a/libacme.so.9", "home/lib/libacme.so"]
    del environment["ACME_HOME"]
    (tmp_path / "a/libacme.so").touch()
    assert names(loading.candidates(program(), "", environment), tmp_path) == ["a/libacme.so"]


def test_a_path_of_the_settings_is_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "libacme.so").touch()
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    there, gone = tmp_path / "other.so", tmp_path / "gone.so"
    there.touch()
    assert loading.candidates(program(), str(there), environment) == [there]
    assert loading.candidates(program(), str(gone), environment) == []
    with pytest.raises(Trouble, match=r"gone\.so is not there") as caught:
        Library(program(), str(gone))
    assert caught.value.kind is Kind.UNUSABLE


def test_a_call_that_is_needed_and_missing_makes_a_library_too_old() -> None:
    libc = program(files=(LIBC,), needed=("abs", "acme_init"))
    with pytest.raises(Trouble, match="too old, it has no acme_init") as caught:
        Library(libc)
    assert caught.value.kind is Kind.UNUSABLE


def test_calls_are_made_and_their_codes_reported() -> None:
    libc = Library(program(files=(LIBC,)))
    assert libc.has("abs")
    assert not libc.has("acme_init")
    assert libc.code("abs", -7) == 7
    assert libc.told("abs", 0)
    assert not libc.told("abs", 1)
    assert not libc.told("acme_init")
    with pytest.raises(Trouble, match=r"abs: BUSY \(error 7\)") as caught:
        libc.call("abs", 7)
    assert (caught.value.kind, caught.value.code) == (Kind.BUSY, 7)
    with pytest.raises(Trouble, match=r"abs: UNKNOWN \(error 8\)") as caught:
        libc.call("abs", 8)
    assert caught.value.plain() == {
        "kind": "transient", "words": "abs: UNKNOWN (error 8)", "code": 8,
    }  # fmt: skip
    with pytest.raises(Trouble, match="acme_init: FUNCTION_NOT_FOUND") as caught:
        libc.call("acme_init")
    assert caught.value.kind is Kind.UNSUPPORTED


def test_one_number_may_mean_something_else_of_one_call() -> None:
    errors = program().errors
    assert [errors.kind(call, 7) for call in ("acme_init", "acme_list")] == [
        Kind.MISSING,
        Kind.BUSY,
    ]


def test_a_command_ends_with_json_or_nothing_or_the_kind_of_its_error() -> None:
    def refuse(library: Library, number: str) -> None:
        library.call("abs", int(number))

    commands = {
        "list": lambda library: {"two": library.code("abs", -2)},
        "make": lambda _: None,
        "refuse": refuse,
    }
    libc = program(files=(LIBC,), commands=commands)
    assert run(libc, ("", "list")) == ('{"two": 2}\n', "", 0)
    assert run(libc, ("", "make")) == ("", "", 0)
    assert run(libc, ("", "refuse", "7")) == ("", "acme: abs: BUSY (error 7)\n", Kind.BUSY)
    for wrong in ((), ("",), ("", "sing")):
        text, complaint, status = run(libc, wrong)
        assert (text, complaint, status) == ("", "usage: acme FILE list | make | refuse\n", USAGE)


@pytest.mark.parametrize("vendor", BINDINGS)
def test_a_program_starts_with_the_standard_library_only(vendor: str) -> None:
    code = (
        f"import sys, hami_nodeagent.drivers.{vendor}.binding;"
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True
    )
    foreign = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize"))}
    assert foreign == {"hami_nodeagent"}
