# SPDX-License-Identifier: Apache-2.0
"""Keeps the memory of a small service small: one heap, and no buffers of the start.

Importing modules and reading the first lists needs buffers that are freed but stay in the
allocator's heap. Objects that live until the end are excluded from later garbage collections, which
otherwise touch each of them. glibc gives each thread that allocates an arena of half a MiB or more;
a service whose threads mostly wait needs one. Measured by ``bench agent``. Outside document:
malloc_trim(3) and mallopt(3) of glibc; other C libraries are left as they are.
"""

import ctypes
import gc
from collections.abc import Callable

_M_ARENA_MAX = -8


def use_one_arena() -> bool:
    """Let all threads that start later share one heap; return whether the C library can."""
    limit = _function("mallopt")
    return limit is not None and limit(_M_ARENA_MAX, 1) == 1


def settle() -> None:
    """Collect garbage, exclude what is left from later collections, return free memory."""
    gc.collect()
    gc.freeze()
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Callable[..., int] | None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function
