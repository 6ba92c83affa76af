#!/usr/bin/env python3
"""Prints what CUDA and NCCL do on this machine, without gohvd: a line for each fact that gohvd relies on or that decides
between two ways. It needs torch, and the files in HVD_NCCL_LIBRARY and HVD_CUDART_LIBRARY. A fact that fails prints why.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

_driver = ctypes.CDLL("libcuda.so.1")
_runtime = ctypes.CDLL(os.environ["HVD_CUDART_LIBRARY"])
_nccl = ctypes.CDLL(os.environ["HVD_NCCL_LIBRARY"])


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Config(ctypes.Structure):  # ncclConfig_t as in NCCL 2.14
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int)]


def check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name} returned {code}")


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def contexts() -> Any:
    """MiB that the context of another process takes."""
    before = used()
    program = "import torch; torch.zeros(1, device='cuda'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        after = used()
        child.stdin.close()
    return after - before


def push_and_pop() -> Any:
    """Is the primary context that of torch; does a new thread have none afterwards; ns of a push and a pop."""
    primary, mine, popped, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(1)
    check("cuDevicePrimaryCtxRetain", _driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0))
    check("cuCtxGetCurrent", _driver.cuCtxGetCurrent(ctypes.byref(mine)))
    times = []

    def work() -> None:
        for _ in range(1000):
            start = time.perf_counter_ns()
            _driver.cuCtxPushCurrent_v2(primary)
            _driver.cuCtxPopCurrent_v2(ctypes.byref(popped))
            times.append(time.perf_counter_ns() - start)
        _driver.cuCtxGetCurrent(ctypes.byref(found))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return mine.value == primary.value, found.value is None, sorted(times)[500]


def priorities() -> Any:
    """The least and the greatest priority of a stream."""
    least, greatest = ctypes.c_int(), ctypes.c_int()
    check("range", _runtime.cudaDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)))
    return least.value, greatest.value


def capture() -> Any:
    """While a stream is captured: its status and that of stream 0, code and status (want 0, 1 and an error)."""
    stream, status, other = torch.cuda.Stream(), ctypes.c_int(), ctypes.c_int()
    check("begin", _runtime.cudaStreamBeginCapture(ctypes.c_void_p(stream.cuda_stream), 0))
    codes = [_runtime.cudaStreamIsCapturing(ctypes.c_void_p(s), ctypes.byref(to))
             for s, to in ((stream.cuda_stream, status), (0, other))]  # fmt: skip
    graph = ctypes.c_void_p()
    _runtime.cudaStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph))
    _runtime.cudaGetLastError()
    return (codes[0], status.value), (codes[1], other.value)


def event() -> Any:
    """us until a CPU sees an event after an empty kernel: median and 99 %."""
    x, times = torch.zeros(1, device="cuda"), []
    for _ in range(500):
        e = torch.cuda.Event()
        start = time.perf_counter()
        x.zero_()
        e.record()
        while not e.query():
            pass
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return round(times[250], 1), round(times[495], 1)


def communicator(blocking: int) -> ctypes.c_void_p:
    uid, comm, code = UniqueId(), ctypes.c_void_p(), ctypes.c_int(7)
    config = Config(24, 0xCAFEBEEF, 21400, blocking)
    check("ncclGetUniqueId", _nccl.ncclGetUniqueId(ctypes.byref(uid)))
    made = _nccl.ncclCommInitRankConfig(ctypes.byref(comm), 1, uid, 0, ctypes.byref(config))
    while made in (0, 7) and code.value == 7:
        _nccl.ncclCommGetAsyncError(comm, ctypes.byref(code))
    check("ncclCommInitRankConfig", code.value or made % 7)
    return comm


def allreduce(comm: ctypes.c_void_p, x: torch.Tensor, stream: ctypes.c_void_p) -> None:
    at = ctypes.c_void_p(x.data_ptr())
    _nccl.ncclAllReduce(at, at, ctypes.c_size_t(x.numel()), 7, 0, comm, stream)


def launches() -> Any:
    """us of a call of ncclAllReduce of one rank out of 1000, blocking and nonblocking."""
    stream, x, result = torch.cuda.Stream(), torch.zeros(1024, device="cuda"), []
    for blocking in (1, 0):
        comm, code, at = communicator(blocking), ctypes.c_int(), ctypes.c_void_p(stream.cuda_stream)
        start = time.perf_counter()
        for _ in range(1000):
            allreduce(comm, x, at)
            code.value = 0 if blocking else 7
            while code.value == 7:
                _nccl.ncclCommGetAsyncError(comm, ctypes.byref(code))
        result.append(round((time.perf_counter() - start) * 1e3, 1))
        torch.cuda.synchronize()
    return result


def fused() -> Any:
    """us on the device for 64 tensors of 64 KiB: a group of allreduces in place; copies, one allreduce, copies."""
    stream, comm = torch.cuda.Stream(), communicator(1)
    tensors = [torch.zeros(16384, device="cuda") for _ in range(64)]
    buffer, at = torch.zeros(64 * 16384, device="cuda"), ctypes.c_void_p(stream.cuda_stream)
    parts = list(buffer.split(16384))

    def group() -> None:
        _nccl.ncclGroupStart()
        for x in tensors:
            allreduce(comm, x, at)
        _nccl.ncclGroupEnd()

    def copies() -> None:
        torch._foreach_copy_(parts, tensors)
        allreduce(comm, buffer, at)
        torch._foreach_copy_(tensors, parts)

    def timed(f: Callable[[], None]) -> float:
        with torch.cuda.stream(stream):
            for _ in range(5):
                f()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(50):
                f()
            end.record()
            end.synchronize()
        return round(begin.elapsed_time(end) * 20, 1)

    return timed(group), timed(copies)


def main() -> int:
    torch.zeros(1, device="cuda")
    failed = 0
    for fact in (contexts, push_and_pop, priorities, capture, event, launches, fused):
        try:
            result = fact()
        except Exception as e:  # the other facts are of use too
            failed, result = 1, f"failed: {e}"
        assert fact.__doc__
        print(f"{fact.__doc__.rstrip('.')}: {result}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
