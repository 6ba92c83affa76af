"""Memory and events of CUDA devices that the sidecar opens, so that it works on tensors of devices in place.

Only the driver library, libcuda.so.1, is called. All copies of the CUDA runtime in a process use this library, so no
other must be found, and the streams and the memory of every framework are valid in it. Its errors do not appear in
later calls of the runtime. docs/sidecar.md describes what the sidecar expects.

The driver exports whole *allocations*. A framework puts many tensors into one allocation, so a tensor is described by
its allocation and its offset there. The driver gives every allocation of a process a number of its own. With it
``Exports`` notices that an allocation has been freed, even if a new one has the same address.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import functools
import threading
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Optional, Tuple

from . import _wire as wire
from ._arena import new_number
from .exceptions import HorovodInternalError

if TYPE_CHECKING:
    from ._client import Client, Pending

_LIBRARY = "libcuda.so.1"

_Handle = c_char * 64  # a CUipcMemHandle or a CUipcEventHandle
_FUNCTIONS: Dict[str, Tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcGetEventHandle": (POINTER(_Handle), c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
}
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID, the number of the allocation
_EVENT_FLAGS = 2 | 4  # CU_EVENT_DISABLE_TIMING and CU_EVENT_INTERPROCESS


class DriverError(Exception):
    """Raised if a function of the driver returns an error."""


class Unshareable(HorovodInternalError):
    """Raised if the sidecar cannot work on memory of a device. ``kind`` is the same for all errors with one reason."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class _Driver:
    """The functions of the driver library."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(_LIBRARY)
            self._functions = {name: getattr(library, name) for name in _FUNCTIONS}
        except (OSError, AttributeError) as e:
            raise Unshareable("driver", f"the CUDA driver cannot be used: {e}") from e
        for name, types in _FUNCTIONS.items():
            self._functions[name].argtypes = types
        try:
            self.call("cuInit", 0)
        except DriverError as e:
            raise Unshareable("driver", f"the CUDA driver cannot be used: {e}") from e

    def call(self, name: str, *args: Any) -> None:
        code = self._functions[name](*args)
        if code:
            text = c_char_p()
            self._functions["cuGetErrorString"](code, byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


@functools.lru_cache(maxsize=None)
def _driver() -> _Driver:
    return _Driver()


class _Device:
    """A device of this process. In a ``with`` block it is the current device of the thread."""

    def __init__(self, ordinal: int) -> None:
        self.driver = _driver()
        device, text = c_int(), ctypes.create_string_buffer(32)
        self._context = c_void_p()
        self.driver.call("cuDeviceGet", byref(device), ordinal)
        self.driver.call("cuDeviceGetPCIBusId", text, len(text), device)
        # The primary context is the one that the CUDA runtime uses. It is never released.
        self.driver.call("cuDevicePrimaryCtxRetain", byref(self._context), device)
        self.bus_id = text.value.decode()

    def __enter__(self) -> _Device:
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def buffer_id(self, address: int) -> int:
        """Returns the number of the allocation that contains the address, or 0 if there is none."""
        number = c_uint64()
        try:
            self.driver.call("cuPointerGetAttribute", byref(number), _BUFFER_ID, address)
        except DriverError:
            return 0
        return number.value


class _Allocation:
    """An allocation of a device. number is its arena, or refusal says why the sidecar cannot use it."""

    __slots__ = ("base", "size", "ident", "number", "refusal")

    def __init__(self, base: int, size: int, ident: int) -> None:
        self.base, self.size, self.ident = base, size, ident
        self.number = 0
        self.refusal: Optional[Tuple[str, str]] = None  # the arguments of Unshareable


class Event:
    """An event of a device that the sidecar has opened under a number."""

    __slots__ = ("device", "handle", "number")

    def __init__(self, device: _Device, handle: c_void_p, number: int) -> None:
        self.device, self.handle, self.number = device, handle, number

    def record(self, stream: int) -> None:
        """Records the event on a stream of its device, which is a CUstream."""
        self._call("cuEventRecord", self.handle, stream)

    def make_wait(self, stream: int) -> None:
        """Makes a stream wait for the last record of the event, in whichever process it was."""
        self._call("cuStreamWaitEvent", stream, self.handle, 0)

    def _call(self, name: str, *args: Any) -> None:
        try:
            with self.device as on:
                on.driver.call(name, *args)
        except DriverError as e:
            raise HorovodInternalError(str(e)) from e


class Exports:
    """The allocations and events of devices that the sidecar of one connection has opened.

    ``_lock`` is taken before the locks of the client.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._devices: Dict[int, _Device] = {}
        self._allocations: List[_Allocation] = []  # sorted by address
        self._bases: List[int] = []
        self._events: Dict[_Device, List[Event]] = {}  # those that no operation uses
        # Finalizers give events back. They take no lock, so they only append the events here.
        self._returned: Deque[Event] = collections.deque()

    def ready(self, ordinal: int) -> None:
        """Raises Unshareable if the sidecar cannot use a device or its events."""
        if ordinal not in self._devices:
            with self._lock:
                self._device(ordinal)

    def place(self, ordinal: int, address: int) -> Tuple[int, int]:
        """Returns the arena that has the memory at an address of a device, and the offset in this arena. Raises
        Unshareable if the sidecar cannot use the memory.
        """
        with self._lock, self._device(ordinal) as device:
            ident = device.buffer_id(address)
            if ident == 0:
                raise Unshareable(*_not_shared(f"{address:#x} is not in an allocation"))
            i = bisect.bisect(self._bases, address) - 1
            known = self._allocations[i] if i >= 0 else None
            if known is None or known.ident != ident or address >= known.base + known.size:
                self._drop_freed(device)
                known = self._export(device, address, ident)
        if known.refusal is not None:
            raise Unshareable(*known.refusal)
        return known.number, address - known.base

    def _device(self, ordinal: int) -> _Device:
        device = self._devices.get(ordinal)
        if device is None:
            try:
                device = _Device(ordinal)
            except DriverError as e:
                raise Unshareable("driver", f"the driver cannot use device {ordinal}: {e}") from e
            with device:
                self._events[device] = [self._new_event(device)]
            self._devices[ordinal] = device
        return device

    def _drop_freed(self, device: _Device) -> None:
        """Makes the sidecar close allocations that the program has freed. Until then their memory stays in use."""
        freed = [a for a in self._allocations if device.buffer_id(a.base) != a.ident]
        if freed:
            self._allocations = [a for a in self._allocations if a not in freed]
            self._bases = [a.base for a in self._allocations]
            self._drop([a.number for a in freed if a.number])

    def _drop(self, numbers: List[int]) -> None:
        """Makes the sidecar close arenas, and waits until it has. An error only means that it keeps them."""
        requests: List[Pending] = []
        for number in numbers:
            requests.append(self._client.request(lambda i, number=number: wire.drop_arena(i, number)))
        for request in requests:
            try:
                self._client.wait(request)
            except ValueError:
                pass

    def _export(self, device: _Device, address: int, ident: int) -> _Allocation:
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        try:
            device.driver.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        except DriverError as e:
            raise Unshareable(*_not_shared(e)) from e
        allocation = _Allocation(base.value, size.value, ident)
        try:
            device.driver.call("cuIpcGetMemHandle", byref(handle), base.value)
            number = new_number()
            self._client.call(lambda i: wire.device_arena(i, number, device.bus_id, size.value, memory=bytes(handle)))
            allocation.number = number
        except DriverError as e:
            allocation.refusal = _not_shared(e)
        except ValueError as e:
            allocation.refusal = _unopened(e)
        i = bisect.bisect(self._bases, allocation.base)
        self._allocations.insert(i, allocation)
        self._bases.insert(i, allocation.base)
        return allocation

    def take_event(self, ordinal: int) -> Event:
        """Returns an event of a device that no operation uses. Raises Unshareable if the sidecar cannot open it."""
        with self._lock, self._device(ordinal) as device:
            while self._returned:
                event = self._returned.popleft()
                self._events[event.device].append(event)
            unused = self._events[device]
            return unused.pop() if unused else self._new_event(device)

    def _new_event(self, device: _Device) -> Event:
        event, handle, number = c_void_p(), _Handle(), new_number()
        try:
            device.driver.call("cuEventCreate", byref(event), _EVENT_FLAGS)
        except DriverError as e:
            raise Unshareable("event", f"the driver makes no event for several processes ({e})") from e
        try:
            device.driver.call("cuIpcGetEventHandle", byref(handle), event)
            self._client.call(lambda i: wire.device_arena(i, number, device.bus_id, event=bytes(handle)))
        except (DriverError, ValueError) as e:
            device.driver.call("cuEventDestroy_v2", event)
            if isinstance(e, ValueError):
                raise Unshareable(*_unopened(e)) from e
            raise Unshareable("event", f"the driver does not share events ({e})") from e
        return Event(device, event, number)

    def give_event(self, event: Event) -> None:
        """Gives back an event that take_event has returned. Finalizers may call it, because it takes no lock."""
        self._returned.append(event)

    def after_fork(self) -> None:
        """Replaces the lock in a forked process, because no thread exists there that could release the old one."""
        self._lock = threading.Lock()


def _not_shared(reason: object) -> Tuple[str, str]:
    return (
        "export",
        f"the driver does not share memory of this allocator ({reason}); with torch, do not set expandable_segments or "
        "backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF",
    )


def _unopened(reason: ValueError) -> Tuple[str, str]:
    return (
        "open",
        f"the sidecar cannot open it ({reason}); the sidecar must see the same devices as the program, and both must be in "
        "the same IPC and PID namespaces",
    )
