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
    """While a stream of torch is captured: its status and that of stream 0, code and status (want 0, 1 and 0, 0)."""
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


def unstarted() -> Any:
    """After the calls of gohvd's init, is CUDA_VISIBLE_DEVICES="" obeyed: the error of cudaGetDeviceCount (want 100)."""
    program = """
import ctypes, os
runtime, n = ctypes.CDLL(os.environ["HVD_CUDART_LIBRARY"]), ctypes.c_int()
runtime.cudaRuntimeGetVersion(ctypes.byref(n))
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(n))
ctypes.CDLL(os.environ["HVD_NCCL_LIBRARY"]).ncclGetVersion(ctypes.byref(n))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
print(runtime.cudaGetDeviceCount(ctypes.byref(n)))
"""
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def unique_id() -> bytes:
    uid = UniqueId()
    check("ncclGetUniqueId", _nccl.ncclGetUniqueId(ctypes.byref(uid)))
    return bytes(uid)


def communicator(blocking: int, uid: bytes, rank: int) -> ctypes.c_void_p:
    comm, code = ctypes.c_void_p(), ctypes.c_int(7)
    config = Config(24, 0xCAFEBEEF, 21400, blocking)
    made = _nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, UniqueId.from_buffer_copy(uid), rank, ctypes.byref(config))
    while made in (0, 7) and code.value == 7:
        check("ncclCommGetAsyncError", _nccl.ncclCommGetAsyncError(comm, ctypes.byref(code)))
    check("ncclCommInitRankConfig", code.value or made % 7)
    return comm


def launch(rank: int, uids: list[bytes]) -> None:
    """Prints the us of a call of ncclAllReduce, blocking and nonblocking. Before that, rank 0 prints the unique ids."""
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python", "tests"))
    from devices import share

    torch.cuda.set_device(share(torch.cuda.device_count()))
    if rank == 0:
        uids = [unique_id(), unique_id()]
        print(*(uid.hex() for uid in uids), flush=True)
    stream, x, result = torch.cuda.Stream(), torch.zeros(1024, device="cuda"), []
    for blocking, uid in zip((1, 0), uids):
        comm, code = communicator(blocking, uid, rank), ctypes.c_int()
        for count in 5, 100:  # NCCL connects the ranks in the first call
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                at = ctypes.c_void_p(x.data_ptr())
                _nccl.ncclAllReduce(at, at, ctypes.c_size_t(x.numel()), 7, 0, comm, ctypes.c_void_p(stream.cuda_stream))
                code.value = 0 if blocking else 7
                while code.value == 7:
                    _nccl.ncclCommGetAsyncError(comm, ctypes.byref(code))
            took = time.perf_counter() - start
        result.append(round(took * 1e4, 1))
        torch.cuda.synchronize()
    print(*result)


def launches() -> Any:
    """us of a call of ncclAllReduce of two ranks out of 100, blocking and nonblocking."""
    # One rank in place would show nothing, because NCCL has nothing to do then.
    ranks: list[subprocess.Popen[str]] = []
    ids = ""
    try:
        for rank in 0, 1:
            env = {**os.environ, "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2"}
            command = [sys.executable, __file__, str(rank), *ids.split()]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
            if rank == 0:
                assert ranks[0].stdout is not None
                ids = ranks[0].stdout.readline()
        return ranks[0].communicate(timeout=60)[0].strip()
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def main() -> int:
    torch.zeros(1, device="cuda")
    failed = 0
    for fact in (contexts, push_and_pop, priorities, capture, event, unstarted, launches):
        try:
            result = fact()
        except Exception as e:  # the other facts are of use too
            failed, result = 1, f"failed: {e}"
        assert fact.__doc__
        print(f"{fact.__doc__.rstrip('.')}: {result}", flush=True)
    return failed


if __name__ == "__main__":
    if len(sys.argv) > 1:
        launch(int(sys.argv[1]), [bytes.fromhex(uid) for uid in sys.argv[2:]])
    else:
        sys.exit(main())
