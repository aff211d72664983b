# SPDX-License-Identifier: Apache-2.0
"""Guests that use frameworks. Each imports its own: they are installed on few machines.

Answers have the form of the driver-level guests that take their place on the fake driver.
"""

import hashlib
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from tests.gpu.guest import Steps, waited_ns

MIB = 1 << 20
_SEED = 7
_QUEUED = 16


def torch_fill(*, block_mib: float) -> Steps:
    """Tensors until the allocator is out of memory; then free them and go on."""
    torch = importlib.import_module("torch")
    size, kept, text = int(block_mib * MIB), [], ""
    total = torch.cuda.mem_get_info()[1]
    try:
        while True:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        text = str(error)
    yield {
        "pid": os.getpid(),
        "count": len(kept),
        "code": 2,
        "total_mib": total / MIB,
        "free_mib": torch.cuda.mem_get_info()[0] / MIB,
        "reserved_mib": torch.cuda.memory_reserved() / MIB,
        "text": text[:400],
    }
    kept.clear()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.empty(size, dtype=torch.uint8, device="cuda")
    yield {"again": 0, "free_mib": torch.cuda.mem_get_info()[0] / MIB}


def _operation(torch: Any, name: str) -> Callable[[], Any]:
    """One piece of work on the device."""
    torch.manual_seed(_SEED)

    def new(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if name == "matmul":
        a, b = new(4096, 4096), new(4096, 4096)
        return lambda: torch.matmul(a, b)
    if name == "attention":
        q, k, v = (new(8, 32, 2048, 64) for _ in range(3))
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    if name == "convolution":
        image, weight = new(16, 64, 128, 128), new(64, 64, 3, 3)
        return lambda: torch.nn.functional.conv2d(image, weight, padding=1)
    a, b = new(1 << 28), new(1 << 28)
    return lambda: torch.add(a, b, out=a)


def torch_load(*, names: list[str], is_graph: bool = False) -> Steps:
    """Repeat operations for ``seconds`` of each request: part of the time that their kernels took.

    Kernels are timed by the profiler. Events around a launch would also time the limiter's wait.
    """
    torch = importlib.import_module("torch")
    operations = [_operation(torch, name) for name in names]
    for operation in operations:
        operation()
    torch.cuda.synchronize()
    run = operations
    if is_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for operation in operations:
                operation()
        run = [graph.replay]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    request = yield {"pid": os.getpid()}
    while True:
        count = 0
        with torch.profiler.profile(activities=activities) as profile:
            began = time.monotonic()
            while time.monotonic() - began < request["seconds"]:
                for _ in range(_QUEUED):
                    for operation in run:
                        operation()
                count += _QUEUED
                torch.cuda.synchronize()
            wall_s = time.monotonic() - began
        busy_us = sum(one.self_device_time_total for one in profile.key_averages())
        request = yield {"busy_pct": busy_us / 1e4 / wall_s, "count": count}


def torch_start() -> Steps:
    """Seconds for the import and the first product."""
    began = time.monotonic()
    torch = importlib.import_module("torch")
    _operation(torch, "matmul")()
    torch.cuda.synchronize()
    yield {"pid": os.getpid(), "start_s": time.monotonic() - began, "load_s": 0.0}


def torch_compile() -> Steps:
    """Seconds to compile a small model and run it once."""
    torch = importlib.import_module("torch")
    layers = [torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)] * 4
    model = torch.nn.Sequential(*layers).cuda()
    value = torch.randn(64, 512, device="cuda")
    torch.cuda.synchronize()
    began = time.monotonic()
    torch.compile(model, fullgraph=True)(value).sum().backward()
    torch.cuda.synchronize()
    yield {"pid": os.getpid(), "load_s": time.monotonic() - began, "start_s": 0.0}


def torch_libraries() -> Steps:
    """Use cuBLAS, cuDNN and attention once each."""
    torch = importlib.import_module("torch")
    for name in ("matmul", "convolution", "attention"):
        _operation(torch, name)()
    torch.cuda.synchronize()
    yield {"pid": os.getpid(), "reserved_mib": torch.cuda.memory_reserved() / MIB, "kinds": 3}


def jax_preallocation() -> Steps:
    """Let JAX take its part of the visible memory and compute a product."""
    jax = importlib.import_module("jax")
    numpy = importlib.import_module("jax.numpy")
    product = jax.jit(lambda a: a @ a)(numpy.ones((2048, 2048)))
    yield {"pid": os.getpid(), "correct": bool(product[0, 0] == 2048)}


def cupy_pools() -> Steps:
    """CuPy with its pool and with the driver's."""
    cupy = importlib.import_module("cupy")
    first = float(cupy.arange(1 << 20, dtype=cupy.float64).sum())
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    second = float(cupy.arange(1 << 20, dtype=cupy.float64).sum())
    yield {"pid": os.getpid(), "correct": first == second == (1 << 19) * ((1 << 20) - 1.0)}


def _llama(torch: Any, layers: int) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(_SEED)
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def llama_content(*, mib: int) -> Steps:
    """Generate 128 tokens with random weights; the digest of the logits after them."""
    torch = importlib.import_module("torch")
    model = _llama(torch, 22)
    prompt = torch.arange(1, 65, device="cuda").reshape(1, -1)
    with torch.no_grad():
        tokens = model.generate(prompt, max_new_tokens=128, do_sample=False)
        logits = model(tokens).logits.float().cpu().numpy().tobytes()
    yield {"digest": hashlib.sha256(logits).hexdigest(), "mib": mib}


def llama_server(*, units: int) -> Steps:
    """A resident model, batch 8: tokens per second of each request's ``seconds``."""
    torch = importlib.import_module("torch")
    model = _llama(torch, 22)
    prompt = torch.arange(1, 513, device="cuda").reshape(8, 64)
    with torch.no_grad():
        model.generate(prompt, max_new_tokens=16, do_sample=False)
        torch.cuda.synchronize()
        request = yield {"pid": os.getpid(), "units": units}
        while request:
            before, began, tokens = waited_ns(), time.monotonic(), 0
            while time.monotonic() - began < request["seconds"]:
                tokens += 8 * 8
                model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            torch.cuda.synchronize()
            seconds = time.monotonic() - began
            waited = (waited_ns() - before) / (seconds * 1e9)
            request = yield {"rate": tokens / seconds, "waited": waited}


def torch_train(*, gib: float) -> Steps:
    """Hold memory and train; per request, ten steps and their losses."""
    torch = importlib.import_module("torch")
    torch.manual_seed(_SEED)
    held = torch.empty(int(gib * 1024) * MIB, dtype=torch.uint8, device="cuda")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    value, target = torch.randn(64, 256, device="cuda"), torch.randn(64, 1, device="cuda")
    yield {"pid": os.getpid(), "held": held.numel()}
    while True:
        losses = []
        for _ in range(10):
            loss = torch.nn.functional.mse_loss(model(value), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        yield {"losses": losses}
