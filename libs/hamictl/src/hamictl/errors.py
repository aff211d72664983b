# SPDX-License-Identifier: Apache-2.0
"""Errors of commands and their exit codes.

0: success. 1: negative result, for example a pod was not found, a replay differs, no plan exists,
or a pod was refused under ``--strict``. 2: invalid usage or input. 3: a service does not answer.
4: a stimulus log has a gap and was identical up to it.
"""

import click

EXIT_NO = 1
EXIT_INPUT = 2
EXIT_UNREACHABLE = 3
EXIT_GAP = 4


class Absent(click.ClickException):
    """The requested object does not exist."""

    exit_code = EXIT_NO


class Refused(click.ClickException):
    """A service refused the request; the text has the reason."""

    exit_code = EXIT_NO


class InputRefused(click.ClickException):
    """A file or argument is invalid; the text has the fix."""

    exit_code = EXIT_INPUT


class Unreachable(click.ClickException):
    """A service does not answer, or not as expected."""

    exit_code = EXIT_UNREACHABLE
