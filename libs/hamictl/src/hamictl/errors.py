# SPDX-License-Identifier: Apache-2.0
"""How commands fail, and with which exit code.

0 done, 1 the answer is no (a pod was not found, a replay differs, a plan was not found, or not all
pods of a simulation were placed and ``--strict`` was given), 2 wrong usage or unreadable input, 3 a
service does not answer, 4 a log has a gap, and was the same up to there.
"""

import click

EXIT_NO = 1
EXIT_INPUT = 2
EXIT_UNREACHABLE = 3
EXIT_GAP = 4


class Absent(click.ClickException):
    """The thing asked for does not exist."""

    exit_code = EXIT_NO


class Refused(click.ClickException):
    """A service says no; the text says why."""

    exit_code = EXIT_NO


class InputRefused(click.ClickException):
    """A file or argument cannot be used; the text says what to write instead."""

    exit_code = EXIT_INPUT


class Unreachable(click.ClickException):
    """A service does not answer as it should."""

    exit_code = EXIT_UNREACHABLE
