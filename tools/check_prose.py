# SPDX-License-Identifier: Apache-2.0
"""Report house words, free relatives and long paragraphs in what people read.

Reads pages (Markdown), Python (docstrings, comments, texts, names of tests), C (comments, texts),
and comments of TOML, YAML and the justfile. The words are data, ``tools/house_words.toml``: they
are phrases with context, which codespell's dictionaries cannot hold; codespell remains the gate for
spelling. Rules:

- no house word;
- a sentence that begins with What, Who, Whether … asks something (ends with ``?``);
- a docstring begins with a verb or a noun, not with How, Where or Why;
- a paragraph of a page has at most ``PARAGRAPH_LINES`` lines of at most ``LINE_COLUMNS`` columns.

Texts and pages, which users and operators read, have no finding. Docstrings, comments and names of
tests of a file may have as many as ``tools/prose_debt.toml`` records, never more; the file only
shrinks: ``--update`` lowers its counts and refuses to raise one.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEBT = ROOT / "tools/prose_debt.toml"
WORDS = ROOT / "tools/house_words.toml"

PARAGRAPH_LINES = 5
LINE_COLUMNS = 120

RECORDS = ("docs/adr/", "docs/design.md")
"""Pages that record history: they may have debt like comments."""
NOT_PROSE = re.compile(
    r"_pb2(_grpc)?\.pyi?$|^tools/(house_words|prose_debt)\.toml$|^tools/check_prose\.py$"
    r"|^requirements/|^tests/unit/tools/test_check_prose\.py$"
)
GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end of ", re.DOTALL | re.MULTILINE)
PRODUCT = ("services/", "libs/")
TEXT = "text"
COMMENT = "comment"


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A piece of prose: a paragraph, docstring, comment or string of a file."""

    kind: str
    """``TEXT``, which users read, or ``COMMENT``, which developers read."""
    line: int
    text: str
    is_docstring: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A place that breaks a rule."""

    name: str
    line: int
    kind: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}:{self.line}: {self.problem}"


@cache
def _house_words() -> tuple[re.Pattern[str], dict[str, str]]:
    words: dict[str, str] = tomllib.loads(WORDS.read_text(encoding="utf-8"))["words"]
    spaced = (word.replace(" ", r"\s+") for word in words)
    groups = "|".join(f"(?P<w{number}>{word})" for number, word in enumerate(spaced))
    advice = {f"w{number}": better for number, better in enumerate(words.values())}
    return re.compile(rf"(?<![\w`/.-])(?:{groups})(?![\w`/-])", re.IGNORECASE), advice


@cache
def _relatives() -> tuple[re.Pattern[str], re.Pattern[str]]:
    first = tomllib.loads(WORDS.read_text(encoding="utf-8"))["relatives"]
    anywhere, docstring = "|".join(first["first"]), "|".join([*first["first"], *first["docstring"]])
    sentence = re.compile(rf"(?:^|(?<=[.;!?] )|(?<=\n\n))(?:{anywhere})\b[^.?!]*[.?!]?")
    return sentence, re.compile(rf"(?:{docstring})\b[^?]*$", re.DOTALL)


def findings_of(name: str, content: str) -> Iterator[Finding]:
    """All places of the file ``name`` (path relative to the repository) that break a rule."""
    if name.endswith(".md"):
        passages = _page(name, content)
        yield from _long_paragraphs(name, content)
    elif name.endswith(".py"):
        passages = _python(name, content)
    elif name.endswith((".c", ".h")):
        passages = _c(content)
    elif name.endswith((".toml", ".yaml", ".yml", "justfile", "/dev", "Containerfile")):
        passages = _hash_comments(name, content)
    else:
        return
    for passage in passages:
        yield from _problems(name, passage)


def _problems(name: str, passage: Passage) -> Iterator[Finding]:
    pattern, advice = _house_words()
    for found in pattern.finditer(passage.text):
        line = passage.line + passage.text.count("\n", 0, found.start())
        better = advice[found.lastgroup or ""]
        problem = f"house word {found[0]!r}; write: {better}"
        yield Finding(name=name, line=line, kind=passage.kind, problem=problem)
    sentence, docstring = _relatives()
    if passage.is_docstring and docstring.match(passage.text.split("\n\n")[0].strip()):
        word = passage.text.split(maxsplit=1)[0]
        problem = f"a docstring begins with {word!r}; begin with a verb or noun"
        yield Finding(name=name, line=passage.line, kind=passage.kind, problem=problem)
        return
    for found in sentence.finditer(passage.text):
        if not found[0].endswith("?") and " " in found[0]:
            line = passage.line + passage.text.count("\n", 0, found.start())
            problem = f"a sentence begins with {found[0].split()[0]!r}; name the subject"
            yield Finding(name=name, line=line, kind=passage.kind, problem=problem)


def _page(name: str, content: str) -> Iterator[Passage]:
    kind = COMMENT if name.startswith(RECORDS) else TEXT
    for first, lines in _paragraphs(content):
        if not lines[0].lstrip().startswith(("#", "<!--")):
            cells = [re.sub(r"`[^`]*`", "`x`", one) for one in lines]
            text = "\n".join(re.sub(r"^\s*(?:[-*|>]|\d+\.)?\s*", "", one) for one in cells)
            yield Passage(kind=kind, line=first, text=text)


def _long_paragraphs(name: str, content: str) -> Iterator[Finding]:
    kind = COMMENT if name.startswith(RECORDS) else TEXT
    content = GENERATED.sub(lambda part: "\n" * part[0].count("\n"), content)
    for first, lines in _paragraphs(content):
        if lines[0].lstrip().startswith(("|", "<", "#")):
            continue
        if len(lines) > PARAGRAPH_LINES:
            problem = f"a paragraph of {len(lines)} lines; make it a list, a table or a figure"
            yield Finding(name=name, line=first, kind=kind, problem=problem)
        for number, line in enumerate(lines, start=first):
            if len(line) > LINE_COLUMNS and "](" not in line:
                problem = f"{len(line)} columns; wrap at {LINE_COLUMNS}"
                yield Finding(name=name, line=number, kind=kind, problem=problem)


def _paragraphs(content: str) -> Iterator[tuple[int, list[str]]]:
    """Paragraphs, items of lists, rows of tables and headings, with the number of the first line.

    Fenced and indented blocks are left out.
    """
    block: list[str] = []
    start, fence = 0, ""
    for number, line in enumerate([*content.splitlines(), ""], start=1):
        opened = re.match(r"\s*(`{3,})", line)
        is_code = bool(fence or opened) or (not block and line.startswith("    "))
        begins = re.match(r"\s*(?:[-*] |\d+\. |#|\||>|<!--)", line)
        if block and (is_code or begins or not line.strip()):
            yield start, block
            block = []
        if opened:
            fence = "" if fence and opened[1] == fence else fence or opened[1]
        elif not is_code and line.strip():
            start = start if block else number
            block.append(line)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _python(name: str, content: str) -> Iterator[Passage]:
    tree = ast.parse(content)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant):
                docstrings.add(id(value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                text = re.sub(r"``[^`]*``", "``x``", node.value)
                yield Passage(kind=COMMENT, line=node.lineno, text=text, is_docstring=True)
            elif name.startswith(PRODUCT) and " " in node.value.strip():
                yield Passage(kind=TEXT, line=node.lineno, text=node.value)
        elif isinstance(node, _FUNCTIONS) and node.name.startswith("test_"):
            yield Passage(kind=COMMENT, line=node.lineno, text=node.name.replace("_", " "))
    comments = [
        (token.start[0], token.string.lstrip("#: "))
        for token in tokenize.generate_tokens(io.StringIO(content).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from _joined(comments, COMMENT)


_C_TOKEN = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def _c(content: str) -> Iterator[Passage]:
    for found in _C_TOKEN.finditer(content):
        line = content.count("\n", 0, found.start()) + 1
        is_text = found[0].startswith('"')
        text = found[0].strip('"') if is_text else re.sub(r"\n\s*\* ?", "\n", found[0][2:])
        yield Passage(kind=TEXT if is_text else COMMENT, line=line, text=text.strip("/* "))


def _hash_comments(name: str, content: str) -> Iterator[Passage]:
    kind = TEXT if name.startswith(("deploy/", "examples/")) else COMMENT
    lines = enumerate(content.splitlines(), start=1)
    found = ((number, re.search(r"(?:^|\s)#+ (.*)", line)) for number, line in lines)
    yield from _joined([(number, one[1]) for number, one in found if one], kind)


def _joined(comments: list[tuple[int, str]], kind: str) -> Iterator[Passage]:
    """Comments on consecutive lines as one passage each."""
    block: list[str] = []
    start = 0
    for number, text in [*comments, (-1, "")]:
        if block and number != start + len(block):
            yield Passage(kind=kind, line=start, text="\n".join(block))
            block = []
        start = start if block else number
        block.append(text)


def tracked() -> list[str]:
    """Names of the files that git tracks, sorted."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return sorted(listing.stdout.decode().rstrip("\0").split("\0"))


def all_findings() -> list[Finding]:
    """Findings of all tracked files."""
    found: list[Finding] = []
    for name in tracked():
        if not NOT_PROSE.search(name) and (ROOT / name).is_file():
            content = (ROOT / name).read_bytes()
            if b"\0" not in content:
                found += findings_of(name, content.decode("utf-8", "replace"))
    return found


def judge(findings: list[Finding], debt: dict[str, int]) -> list[str]:
    """Problems to print: findings in texts, and in files with more than their recorded debt."""
    problems = [str(one) for one in findings if one.kind == TEXT]
    comments = Counter(one.name for one in findings if one.kind == COMMENT)
    grown = {name for name, count in comments.items() if count > debt.get(name, 0)}
    problems += [str(one) for one in findings if one.kind == COMMENT and one.name in grown]
    stale = sorted(name for name, count in debt.items() if comments[name] < count)
    if stale:
        problems.append(
            f"{DEBT.relative_to(ROOT)} records more than there is, for example of {stale[0]}:"
            " run python -m tools.check_prose --update"
        )
    return problems


def main(arguments: list[str]) -> int:
    """Check, count or update; returns the exit code."""
    parser = argparse.ArgumentParser(prog="check_prose", description="Check the project's prose.")
    parser.add_argument("--count", action="store_true", help="print the findings per kind")
    parser.add_argument("--update", action="store_true", help="lower the recorded debt")
    parser.add_argument("names", nargs="*", help="only show the findings of these paths")
    options = parser.parse_args(arguments)
    findings = all_findings()
    if options.names:
        shown = [one for one in findings if one.name.startswith(tuple(options.names))]
        print("\n".join(f"{one} ({one.kind})" for one in shown))
        return 1 if shown else 0
    debt: dict[str, int] = tomllib.loads(DEBT.read_text(encoding="utf-8"))["debt"]
    if options.count:
        kinds = Counter(one.kind for one in findings)
        print(f"texts and pages {kinds[TEXT]}, docstrings and comments {kinds[COMMENT]}")
        return 0
    if options.update:
        comments = Counter(one.name for one in findings if one.kind == COMMENT)
        _write({name: min(count, comments[name]) for name, count in debt.items() if comments[name]})
        return 0
    problems = judge(findings, debt)
    print("\n".join(problems), file=sys.stderr if problems else sys.stdout)
    return 1 if problems else 0


def _write(debt: dict[str, int]) -> None:
    lines = [f'"{name}" = {count}\n' for name, count in sorted(debt.items())]
    head = DEBT.read_text(encoding="utf-8").split("[debt]")[0]
    DEBT.write_text(f"{head}[debt]\n{''.join(lines)}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
