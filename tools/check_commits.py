# SPDX-License-Identifier: Apache-2.0
"""Check that subjects of commits read ``component: imperative summary``, at most 72 characters.

Checks the commits since ``SINCE``, when the rule became a gate, up to HEAD; a shallow clone has
fewer of them. A pattern cannot verify English grammar, so only common mistakes are refused: a past
or progressive form, a third person, an article, a capital letter.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SINCE = "2026-11-23T21:10:00Z"
LENGTH_MOST = 72

SUBJECT = re.compile(r"[a-z][\w.-]*(?:(?:, ?| and )[a-z][\w.-]*)*: (?P<verb>\S+) \S")
NO_VERB = re.compile(r"(?:a|an|the|no|not|all|every|each|this|it|its)$|.*(?:ed|ing|s)$|.*[^a-z-]")
VERB = re.compile(
    r".*(?:ss|eed)$|(?:bring|embed|shed|wed|ping|ring|sing|string|swing|focus|bias|alias|re-?[a-z]+ss)$"
)


def problem_of(subject: str) -> str:
    """Return the violation of the rule in ``subject``; empty if it has none."""
    if len(subject) > LENGTH_MOST:
        return f"{len(subject)} characters, more than {LENGTH_MOST}"
    found = SUBJECT.match(subject)
    if not found:
        return "not of the form 'component: imperative summary'"
    verb = found["verb"]
    if NO_VERB.match(verb) and not VERB.match(verb):
        return f"{verb!r} is not an imperative; begin with a verb such as 'add' or 'fix'"
    return ""


def main() -> int:
    """Check the commits since ``SINCE``; returns the exit code."""
    log = ["git", "log", f"--since-as-filter={SINCE}", "--format=%h %s"]
    listing = subprocess.run(log, cwd=ROOT, capture_output=True, check=True, text=True)
    problems = []
    for line in listing.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        if problem := problem_of(subject):
            problems.append(f"commit {commit} {subject!r}: {problem}")
    print("\n".join(problems), file=sys.stderr if problems else sys.stdout)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
