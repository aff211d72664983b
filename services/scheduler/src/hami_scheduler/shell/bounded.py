# SPDX-License-Identifier: Apache-2.0
"""Bounds every call to a peer in time. Seconds."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from hami_common.errors import Unavailable


@contextmanager
def answer_within(limit_s: float, *, peer: str) -> Iterator[None]:
    """Bound one call to a peer; silence is ``Unavailable``."""
    try:
        with anyio.fail_after(limit_s):
            yield
    except TimeoutError as error:
        raise Unavailable(peer=peer, detail=f"no answer in {limit_s:g} s") from error
