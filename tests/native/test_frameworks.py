# SPDX-License-Identifier: Apache-2.0
"""Published wheels of frameworks with the limiter preloaded, on the fake driver and without one.

JAX computes on the CPU, which the library must not change. tinygrad and NVIDIA's cuda.core call the
driver themselves, so their own allocators meet the limit; kernels compute nothing there, copies do
copy. The first run on a machine fetches the wheels (150 MB). Takes about 15 s after that.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from hami_sim.hardware.fake_nvml import FakeNvml
from tests.support.cuda_child import ROOT, CudaChild
from tools.cached_packages import installed

FETCH_S = 120
COMPUTE_S = 60

pytestmark = pytest.mark.timeout(FETCH_S + COMPUTE_S)

JAX = """
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

matrix = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def loss(a):
    return jnp.tanh(a @ a.T + jnp.fft.fft2(a).real).sum()


value, gradient = jax.jit(jax.value_and_grad(loss))(matrix)
digest = hashlib.sha256(np.asarray(gradient).tobytes()).hexdigest()
print(jax.default_backend(), float(value), digest)
"""


@pytest.fixture(scope="module")
def packages() -> str:
    """PYTHONPATH with the frameworks."""
    return f"{ROOT}:{installed('frameworks')}"


@pytest.mark.parametrize("has_driver", [False, True], ids=["absent", "present"])
def test_jax_computes_the_same_with_the_limiter(
    guest: CudaChild, packages: str, tmp_path: Path, *, has_driver: bool
) -> None:
    results = []
    for preload in ("", guest.environment["LD_PRELOAD"]):
        environment = guest.environment | {
            "HOME": str(tmp_path),
            "LD_PRELOAD": preload,
            "PYTHONPATH": packages,
        }
        if not has_driver:
            del environment["LD_LIBRARY_PATH"]
        done = subprocess.run(
            [sys.executable, "-c", JAX],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMPUTE_S,
        )
        results.append((done.returncode, done.stdout, done.stderr))
    assert results[0][0] == 0, results[0][2]
    assert results[0][1].startswith("cpu ")
    assert results[1] == results[0]


@pytest.fixture
def tinygrad(packages: str, tmp_path: Path) -> dict[str, str]:
    """Environment of tinygrad's CUDA back end, which writes its kernels as PTX itself."""
    return {"DEV": "CUDA:PTX", "HOME": str(tmp_path), "PYTHONPATH": packages}


def test_tinygrad_computes_and_copies_the_same_with_the_limiter(
    guest: CudaChild, tinygrad: dict[str, str]
) -> None:
    body = """
        import numpy as np
        from tinygrad import Tensor, TinyJit
        data = np.arange(MIB, dtype=np.float32)
        tensor = Tensor(data).realize()
        step = TinyJit(lambda value: (value * 2 + 1).sum().realize())
        for _ in range(4):
            step(tensor)
        told = [bool((tensor.numpy() == data).all()), card() >> 20]
        """
    with_limiter = guest(body, **tinygrad)
    assert with_limiter[0] is True
    assert with_limiter == guest(body, **tinygrad, LD_PRELOAD="")


def test_tinygrad_frees_its_cache_at_the_limit_and_continues(
    guest: CudaChild, tinygrad: dict[str, str]
) -> None:
    told = guest(
        """
        import numpy as np
        from tinygrad import Tensor

        def block(mib):
            return Tensor(np.zeros(mib * MIB, dtype=np.uint8)).realize()

        kept = []
        try:
            while True:
                kept.append(block(16))
        except MemoryError as error:
            text = str(error)
        told = [len(kept), agree() // MIB, text.startswith("Allocation of 16.00 MB failed on CUDA")]
        del kept[-4:]
        told.append(agree() // MIB)
        larger = block(40)
        told.append(agree() // MIB)
        """,
        **tinygrad,
    )
    assert told == [15, 8 + 15 * 16, True, 8 + 15 * 16, 8 + 11 * 16 + 40]


def test_cuda_core_meets_the_limit_with_each_of_its_resources(
    guest: CudaChild, machine: FakeNvml, packages: str
) -> None:
    """Its pool keeps memory without a threshold, until a request by other means needs it."""
    machine.cuda_version(13000)
    told = guest(
        """
        from cuda.core import Device, DeviceMemoryResource, VirtualMemoryResource
        device = Device(0)
        device.set_current()
        stream = device.create_stream()
        told = [agree() // MIB]
        for resource in (DeviceMemoryResource(device), VirtualMemoryResource(device)):
            buffer = resource.allocate(200 * MIB, stream=stream)
            told.append(agree() // MIB)
            try:
                resource.allocate(64 * MIB, stream=stream)
            except Exception as error:
                told.append(str(error).partition(":")[0])
            told.append(agree() // MIB)
            buffer.close()
            stream.sync()
        """,
        PYTHONPATH=packages,
    )
    assert told == [8, *[208, "CUDA_ERROR_OUT_OF_MEMORY", 208] * 2]
