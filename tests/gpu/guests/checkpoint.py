# SPDX-License-Identifier: Apache-2.0
"""A helper that moves another process's device memory to the host and back."""

import ctypes
import time
from ctypes import byref, c_int

from tests.gpu.guest import Steps
from tests.support import cuda_guest as cu

_LOCK_MS = 5000


class _Arguments(ctypes.Structure):
    """CUcheckpointLockArgs; the other calls take the same size or NULL."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved", ctypes.c_uint),
        ("more", ctypes.c_uint64 * 7),
    )


def control(*, pid: int) -> Steps:
    """``out`` locks and checkpoints, ``back`` restores and unlocks; each with its seconds."""
    cu.ask("cuInit", 0)
    request = yield {}
    while True:
        began = time.monotonic()
        if request["do"] == "out":
            lock = _Arguments(timeout_ms=_LOCK_MS)
            code = cu.code("cuCheckpointProcessLock", c_int(pid), byref(lock))
            code = code or cu.code("cuCheckpointProcessCheckpoint", c_int(pid), None)
        else:
            code = cu.code("cuCheckpointProcessRestore", c_int(pid), None)
            code = code or cu.code("cuCheckpointProcessUnlock", c_int(pid), None)
        request = yield {"code": code, "seconds": time.monotonic() - began}
