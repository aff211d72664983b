# SPDX-License-Identifier: Apache-2.0
"""Reads a Containerfile: stages, their copies and commands, entry points and users.

Supports the part of the format that ours uses. Outside document: Dockerfile reference.
"""

import json
import shlex
from pathlib import Path

from msgspec import Struct


class Step(Struct, frozen=True):
    """One instruction with its words as written."""

    word: str
    rest: str


class Stage(Struct, frozen=True, kw_only=True):
    """One stage."""

    name: str
    base: str
    """Image or earlier stage."""
    steps: tuple[Step, ...]

    def of(self, word: str) -> list[str]:
        """Return the arguments of each instruction of a kind."""
        return [step.rest for step in self.steps if step.word == word]


class Containerfile:
    """One file."""

    def __init__(self, path: Path) -> None:
        """Read ``path``."""
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        self.stages: dict[str, Stage] = {}
        name, base, steps = "", "", list[Step]()
        for line in [*text.splitlines(), "FROM end AS end"]:
            word, _, rest = line.strip().partition(" ")
            if not word or word.startswith("#"):
                continue
            if word != "FROM":
                steps.append(Step(word, rest.strip()))
                continue
            if name:
                self.stages[name] = Stage(name=name, base=base, steps=tuple(steps))
            base, _, name = rest.partition(" AS ")
            steps = []

    def images(self) -> list[str]:
        """Return the stages with an entry point."""
        return [name for name, stage in self.stages.items() if stage.of("ENTRYPOINT")]

    def line_of(self, name: str) -> list[Stage]:
        """Return a stage with the stages that it is based on, the first one first."""
        found: list[Stage] = []
        while name in self.stages:
            found.insert(0, self.stages[name])
            name = self.stages[name].base
        return found

    def copied(self) -> dict[str, list[str]]:
        """Sources from the repository, by stage."""
        return {
            name: [
                source
                for rest in stage.of("COPY")
                if not rest.startswith("--")
                for source in shlex.split(rest)[:-1]
            ]
            for name, stage in self.stages.items()
        }

    def entry_point(self, name: str) -> list[str]:
        """Command line of an image."""
        words: list[str] = json.loads(self.stages[name].of("ENTRYPOINT")[-1])
        return words

    def user(self, name: str) -> str:
        """Return its user, as ``uid:gid``."""
        return [rest for stage in self.line_of(name) for rest in stage.of("USER")][-1]
