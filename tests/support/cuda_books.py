# SPDX-License-Identifier: Apache-2.0
"""The fake driver's own books, for children of tests that use ``cuda_guest``.

``card`` is what the driver gave this process; ``agree`` compares it with the limiter's figure.
"""

import os
from pathlib import Path

from hami_sim.hardware.fake_cuda import FakeCard
from tests.support.cuda_guest import used, uuid


def card(device: int = 0) -> int:
    """Bytes of the device that this process has, by the fake driver's own books."""
    return _books(device, "used_bytes")


def peak(device: int = 0) -> int:
    """Return its peak."""
    return _books(device, "peak_bytes")


def _books(device: int, field: str) -> int:
    """Read the books in a child: locks show which processes are alive, and a process does not see
    its own.
    """
    own, name = os.getpid(), uuid(device)
    answer, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with FakeCard(Path(os.environ["FAKE_NVML_STATE"])) as books:
            total = sum(getattr(use, field) for use in books.uses(name) if use.pid == own)
        os.write(tell, str(total).encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(answer) as text:
        total = int(text.read())
    os.waitpid(child, 0)
    return total


def agree(device: int = 0) -> int:
    """Return the bytes used, after verifying that limiter and driver report the same."""
    seen, real = used(), card(device)
    if seen != real:
        raise AssertionError(f"limiter says {seen}, driver says {real}")
    return seen
