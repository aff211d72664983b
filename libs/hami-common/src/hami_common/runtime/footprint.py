# SPDX-License-Identifier: Apache-2.0
"""Returns memory of the start to the kernel, once a service is ready.

Importing modules and reading the first lists needs buffers that are freed but stay in the
allocator's heap: about 10 MiB in the node agent. Objects that live until the end are also excluded
from later garbage collections, which otherwise touch each of them. Measured by ``bench agent``.
Outside document: malloc_trim(3) of glibc; other C libraries are left as they are.
"""

import ctypes
import gc


def settle() -> None:
    """Collect garbage, exclude what is left from later collections, return free memory."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
