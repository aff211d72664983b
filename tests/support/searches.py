# SPDX-License-Identifier: Apache-2.0
"""Runs searches of the core without pauses."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def result_of(search: Generator[None, None, T]) -> T:
    """Return the result of a search that yields between its steps."""
    while True:
        try:
            next(search)
        except StopIteration as end:
            result: T = end.value
            return result
