# SPDX-License-Identifier: Apache-2.0
"""A process that makes the calls of the driver that arrive on a socket; run by tests/support/calls.

One JSON message per call. An argument is ``int`` (a number, 64 bits wide), ``out`` (a pointer to
so many zeroed bytes, returned afterwards; ``fd``: a descriptor, passed on and closed here), ``in``
(a pointer to these bytes), ``value`` (a structure of these bytes by value) or ``fd`` (a descriptor
that came with the message). Each thread that a message names is started at its first call and
makes the primary context of device 0 current. ``cuda_guest`` loads the driver.
"""

import ctypes
import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from tests.support.cuda_guest import Process, ask, begin, code, cuda, nvml, nvml_device

_PROCESSES = 64
_FD_BYTES = 4


class _Value(ctypes.Structure):
    """CUipcMemHandle, the one structure that the driver takes by value."""

    _fields_ = (("raw", c_uint64 * 8),)


def _call(message: dict[str, Any], received: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Make one call; its CUresult, the content of its out-parameters, descriptors among these."""
    arguments: list[Any] = []
    buffers: list[tuple[Any, Any]] = []
    for kind, value in message["arguments"]:
        if kind == "int":
            arguments.append(c_uint64(value))
        elif kind == "fd":
            arguments.append(c_uint64(received[0]))
        elif kind == "in":
            arguments.append(ctypes.create_string_buffer(bytes.fromhex(value)))
        elif kind == "value":
            arguments.append(_Value.from_buffer_copy(bytes.fromhex(value)))
        else:
            size = _FD_BYTES if value == "fd" else value
            buffer = ctypes.create_string_buffer(size)
            buffers.append((value, buffer))
            arguments.append(buffer)
    result = int(getattr(cuda, message["call"])(*arguments))
    for descriptor in received:
        os.close(descriptor)
    outs: list[str] = []
    sent: list[int] = []
    for value, buffer in buffers:
        outs.append(bytes(buffer)[: len(buffer)].hex())
        if value == "fd" and result == 0:
            sent.append(int.from_bytes(bytes(buffer)[:_FD_BYTES], sys.byteorder))
    return {"code": result, "outs": outs}, sent


def _figures() -> dict[str, Any]:
    """Free and total of cuMemGetInfo, total, free and used of NVML, its list of processes."""
    free, total = c_size_t(), c_size_t()
    result = code("cuMemGetInfo_v2", byref(free), byref(total))
    device = nvml_device()
    memory = (c_uint64 * 3)()
    nvml.nvmlDeviceGetMemoryInfo(device, memory)
    count, found = c_uint(_PROCESSES), (Process * _PROCESSES)()
    nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), found)
    return {
        "code": result,
        "driver": [total.value, free.value],
        "nvml": list(memory),
        "processes": [[one.pid, one.bytes] for one in found[: count.value]],
    }


def _answer(message: dict[str, Any], received: list[int]) -> tuple[dict[str, Any], list[int]]:
    if message["call"] == "figures":
        return _figures(), []
    return _call(message, received)


def main() -> None:
    """Serve until the other side closes the socket.

    Arguments: the socket's number, the size of the largest message in bytes.
    """
    number, message_bytes = map(int, sys.argv[1:])
    with socket.socket(fileno=number) as link:
        begin()
        context = c_void_p()
        ask("cuCtxGetCurrent", byref(context))
        threads: dict[str, ThreadPoolExecutor] = {}
        while True:
            data, received, _, _ = socket.recv_fds(link, message_bytes, 1)
            if not data:
                break
            message = json.loads(data)
            name = message["thread"]
            if name not in threads:
                threads[name] = ThreadPoolExecutor(
                    1, initializer=ask, initargs=("cuCtxSetCurrent", context)
                )
            reply, sent = threads[name].submit(_answer, message, received).result()
            socket.send_fds(link, [json.dumps(reply).encode()], sent)
            for descriptor in sent:
                os.close(descriptor)


if __name__ == "__main__":
    main()
