# SPDX-License-Identifier: Apache-2.0
r"""Reads Markdown: commands, snippets, links and headings of a page, without judging them.

Conventions of our pages. A fenced block ``sh`` contains commands, one a line; ``\`` at its end
joins the next. In a block ``console`` lines that begin with ``$ `` are commands, the others their
output. An indented line or a piece of inline code is a command when it begins with one of
``PROGRAMS``. A comment ``<!-- not run: REASON -->`` before a block gives the reason for not running
it. Lines are counted from 1.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

PROGRAMS = (
    *("./dev", "hamictl", "kubectl", "python", "nats", "curl", "git", "pytest", ".venv/bin/pytest"),
    "sha256sum",
)
_FENCE = re.compile(r"^(`{3,})(\w*)\s*$")
_HEADING = re.compile(r"^#{1,6} +(.*?)\s*$")
_MARK = re.compile(r"^<!-- not run: (.+) -->$")
_LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line of a page."""

    page: str
    line: int
    text: str
    mark: str = ""
    """Reason on the page for not running it; empty: a test runs it."""
    inline: bool = False
    """It is part of a sentence or a table."""
    printed: tuple[str, ...] = ()
    """Output that the page shows for it."""

    @property
    def words(self) -> list[str]:
        """Words as a shell would split them, up to a pipe or ``>``."""
        words: list[str] = []
        for word in shlex.split(self.text, comments=True):
            if word in ("|", ">", ">>", "&&", ";"):
                break
            words.append(word)
        return words

    @property
    def program(self) -> str:
        """The first word; ``hamictl`` also by its other name."""
        return "hamictl" if self.words[:2] == ["kubectl", "hami"] else self.words[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """A fenced block that is no shell."""

    page: str
    line: int
    language: str
    text: str
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.language}"


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link to a file of ours, or a heading in it."""

    page: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.target}"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Checkable content of a page."""

    name: str
    commands: tuple[Command, ...]
    snippets: tuple[Snippet, ...]
    links: tuple[Link, ...]
    anchors: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class _Line:
    number: int
    text: str
    language: str | None
    """``None`` outside a fenced block."""
    mark: str


def read(root: Path, name: str) -> Page:
    """The page ``name``, a path relative to ``root``."""
    return parse((root / name).read_text(encoding="utf-8"), name=name)


def parse(text: str, *, name: str) -> Page:
    """A page from its text."""
    lines = list(_lines(text))
    prose = [line for line in lines if line.language is None]
    return Page(
        name=name,
        commands=tuple(sorted(_commands(lines, name), key=lambda one: one.line)),
        snippets=tuple(_snippets(lines, name)),
        links=tuple(_links(prose, name)),
        anchors=frozenset(_anchors(prose)),
    )


def _lines(text: str) -> Iterator[_Line]:
    """Yield every line except fences, with the block that contains it."""
    fence, language, mark = "", None, ""
    for number, line in enumerate(text.splitlines(), start=1):
        found = _FENCE.match(line.strip())
        if found and not fence:
            fence, language = found[1], found[2]
        elif found and found[1] == fence and not found[2]:
            fence, language, mark = "", None, ""
        else:
            marked = _MARK.match(line) if language is None else None
            if marked:
                mark = marked[1]
            yield _Line(number=number, text=line, language=language, mark=mark)
            if language is None and not marked and line.strip() and not line.startswith("    "):
                mark = ""


def _commands(lines: list[_Line], name: str) -> Iterator[Command]:
    begun: Command | None = None
    for line in lines:
        text = line.text.strip()
        if begun is not None and line.language is not None:
            if begun.text.endswith("\\"):
                begun = replace(begun, text=f"{begun.text[:-1].rstrip()} {text}")
                continue
            if line.language == "console" and not text.startswith("$ "):
                begun = replace(begun, printed=(*begun.printed, text))
                continue
        if begun is not None:
            yield begun
            begun = None
        if line.language is None and not line.text.startswith("    "):
            yield from _inline(line, name)
        elif text := _begins(line, text):
            begun = Command(page=name, line=line.number, text=text, mark=line.mark)
    if begun is not None:
        yield begun


def _begins(line: _Line, text: str) -> str:
    """Return the command that a line of a block begins, if any."""
    if line.language == "console":
        return text.removeprefix("$ ") if text.startswith("$ ") else ""
    if line.language in ("sh", "bash"):
        return "" if text.startswith("#") else text
    return text if line.language is None and _is_command(text) else ""


def _inline(line: _Line, name: str) -> Iterator[Command]:
    for code in _CODE.findall(line.text):
        if _is_command(code) and " " in code:
            yield Command(page=name, line=line.number, text=code, inline=True)


def _is_command(text: str) -> bool:
    return text.split(" ", maxsplit=1)[0] in PROGRAMS


def _snippets(lines: list[_Line], name: str) -> Iterator[Snippet]:
    block: list[_Line] = []
    for line in [*lines, _Line(number=0, text="", language=None, mark="")]:
        follows = block and line.number == block[-1].number + 1 and line.language is not None
        if block and not follows:
            first = block[0]
            if first.language not in ("", "sh", "bash", "console", "text", None):
                yield Snippet(
                    page=name,
                    line=first.number,
                    language=str(first.language),
                    text="\n".join(one.text for one in block) + "\n",
                    mark=first.mark,
                )
            block = []
        if line.language is not None:
            block.append(line)


def _links(prose: list[_Line], name: str) -> Iterator[Link]:
    for line in prose:
        for target in _LINK.findall(_CODE.sub("", line.text)):
            if "://" not in target and not target.startswith("mailto:"):
                yield Link(page=name, line=line.number, target=target)


def _anchors(prose: list[_Line]) -> Iterator[str]:
    """Names of the headings, as the forges that show Markdown make them."""
    seen: dict[str, int] = {}
    for line in prose:
        found = _HEADING.match(line.text)
        if not found:
            continue
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found[1]).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        yield f"{slug}-{count}" if count else slug
