# SPDX-License-Identifier: Apache-2.0
"""Wakes processes that wait on a word of a file that they have mapped (futex(2))."""

import ctypes
import platform

_FUTEX_WAKE = 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_ALL = (1 << 31) - 1
_libc = ctypes.CDLL(None)


def wake_all(address: int) -> None:
    """Wake all waiters on the word that this process has mapped at ``address``.

    Without effect on other architectures, where waiters see the change at their next look.
    """
    if _FUTEX_CALL is not None:
        pointer = ctypes.c_void_p(address)
        _libc.syscall(_FUTEX_CALL, pointer, _FUTEX_WAKE, _ALL, None, None, 0)
