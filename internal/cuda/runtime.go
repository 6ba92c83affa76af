//go:build nccl && cgo

package cuda

/*
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// The functions of the runtime and of the driver, in the order of the lists functions and driverFunctions in
// Go.
typedef struct {
	int (*getDeviceCount)(int *);
	int (*getLastError)(void);
	const char *(*getErrorName)(int);
	const char *(*getErrorString)(int);
	int (*runtimeGetVersion)(int *);
	int (*deviceGetAttribute)(int *, int, int);
	int (*memGetInfo)(size_t *, size_t *);
	int (*malloc)(void **, size_t);
	int (*free)(void *);
	int (*hostAlloc)(void **, size_t, unsigned);
	int (*freeHost)(void *);
	int (*memcpyAsync)(void *, const void *, size_t, int, void *);
	int (*memsetAsync)(void *, int, size_t, void *);
	int (*getStreamPriorityRange)(int *, int *);
	int (*streamCreateWithPriority)(void **, unsigned, int);
	int (*streamDestroy)(void *);
	int (*streamSynchronize)(void *);
	int (*streamWaitEvent)(void *, void *, unsigned);
	int (*streamIsCapturing)(void *, int *);
	int (*eventCreateWithFlags)(void **, unsigned);
	int (*eventRecord)(void *, void *);
	int (*eventQuery)(void *);
	int (*eventDestroy)(void *);
	int (*threadExchangeStreamCaptureMode)(int *);
	int (*primaryCtxRetain)(void **, int);
	int (*ctxPushCurrent)(void *);
	int (*ctxPopCurrent)(void **);
	int (*driverGetVersion)(int *);
} functions;

// A cudaMemcpyAttributes. The headers of CUDA 12.8, 12.9, 13.0 and 13.5 all have this layout. A hint is a
// cudaMemLocation, a type and a number. CUDA reads it only if the memory is managed or of the host.
typedef struct {
	int srcAccessOrder, srcLocHint[2], dstLocHint[2];
	unsigned flags;
} copyAttributes;

// cudaMemcpyBatchAsync of CUDA 12 and of CUDA 13.
typedef int batch12(void **, void **, size_t *, size_t, copyAttributes *, size_t *, size_t, size_t *, void *);
typedef int batch13(void *const *, const void *const *, const size_t *, size_t, copyAttributes *, size_t *,
	size_t, void *);

// ON calls a function of the runtime with the given context of a device as the current one of the thread.
// Afterwards the thread has its old context again, or none. cudaSetDevice cannot do that: in a thread without
// a context it would have to return to device 0, and would make a context there. An error is cleared, so that
// it does not appear in a later call of the program. If another thread captures a stream for a graph, CUDA
// would refuse calls such as cudaEventQuery and cudaMalloc, and invalidate the capture. In the capture mode 2
// (relaxed) of the calling thread it does neither.
#define ON(context, call) \
	int mode = 2, code = f->ctxPushCurrent(context); \
	if (code != 0) \
		return code; \
	code = f->threadExchangeStreamCaptureMode(&mode); \
	if (code == 0) { \
		code = (call); \
		f->threadExchangeStreamCaptureMode(&mode); \
	} \
	if (code != 0) \
		f->getLastError(); \
	f->ctxPopCurrent(&context); \
	return code

static int gohvdCount(functions *f, int *n) { return f->getDeviceCount(n); }
static int gohvdVersion(functions *f, int *runtime) { return f->runtimeGetVersion(runtime); }
// cudaDriverGetVersion would start the driver.
static int gohvdDriverVersion(functions *f, int *driver) { return f->driverGetVersion(driver); }
static const char *gohvdErrorName(functions *f, int code) { return f->getErrorName(code); }
static const char *gohvdErrorText(functions *f, int code) { return f->getErrorString(code); }
static int gohvdProcessors(functions *f, int device, int *n) {
	return f->deviceGetAttribute(n, 16, device); // 16: cudaDevAttrMultiProcessorCount
}
static int gohvdRetain(functions *f, int device, void **context) {
	return f->primaryCtxRetain(context, device);
}
// gohvdPush does for the calls until gohvdPop what ON does for one call. It returns the capture mode before.
typedef struct { int code, mode; } pushed;
static pushed gohvdPush(functions *f, void *context) {
	pushed p = {f->ctxPushCurrent(context), 2};
	if (p.code == 0)
		f->threadExchangeStreamCaptureMode(&p.mode);
	return p;
}
static void gohvdPop(functions *f, int mode) {
	void *context;
	f->threadExchangeStreamCaptureMode(&mode);
	f->ctxPopCurrent(&context);
}
static int gohvdFree(functions *f, void *context, void *p) { ON(context, f->free(p)); }
static int gohvdAlloc(functions *f, void *context, void **p, size_t n) { ON(context, f->malloc(p, n)); }
static int gohvdAllocHost(functions *f, void *context, void **p, size_t n) {
	ON(context, f->hostAlloc(p, n, 1)); // 1: all devices can read it
}
static int gohvdFreeHost(functions *f, void *context, void *p) { ON(context, f->freeHost(p)); }
static int gohvdMemory(functions *f, void *context, size_t *unused, size_t *total) {
	ON(context, f->memGetInfo(unused, total));
}
static int gohvdCopy(functions *f, void *context, void *to, const void *from, size_t n, uintptr_t stream) {
	ON(context, f->memcpyAsync(to, from, n, 4, (void *)stream)); // 4: the addresses say where the memory is
}
// list has the n addresses to write, the n addresses to read, and the n sizes. If the call fails, it may set
// failed to the number of a copy.
static int gohvdCopyAll(functions *f, void *batch, int version, int device, void *context, uintptr_t *list,
		size_t n, size_t *failed, uintptr_t stream) {
	// The first 1: the stream orders the reads too. The others: the memory is on the device.
	copyAttributes attributes = {1, {1, device}, {1, device}, 0};
	size_t first = 0;
	void **to = (void **)list, **from = to + n;
	size_t *sizes = list + 2 * n;
	if (version < 13000) {
		ON(context, ((batch12 *)batch)(to, from, sizes, n, &attributes, &first, 1, failed, (void *)stream));
	}
	ON(context, ((batch13 *)batch)(to, (const void *const *)from, sizes, n, &attributes, &first, 1,
		(void *)stream));
}
static int gohvdFill(functions *f, void *context, void *to, int value, size_t n, uintptr_t stream) {
	ON(context, f->memsetAsync(to, value, n, (void *)stream));
}
static int newStream(functions *f, int greatest, uintptr_t *stream) {
	int least, most, code = f->getStreamPriorityRange(&least, &most);
	if (code == 0) // 1: it does not wait for the default stream
		code = f->streamCreateWithPriority((void **)stream, 1, greatest ? most : least);
	return code;
}
static int gohvdNewStream(functions *f, void *context, int greatest, uintptr_t *stream) {
	ON(context, newStream(f, greatest, stream));
}
static int gohvdDestroyStream(functions *f, void *context, uintptr_t stream) {
	ON(context, f->streamDestroy((void *)stream));
}
static int gohvdSynchronize(functions *f, void *context, uintptr_t stream) {
	ON(context, f->streamSynchronize((void *)stream));
}
static int gohvdWaitEvent(functions *f, void *context, uintptr_t stream, void *event) {
	ON(context, f->streamWaitEvent((void *)stream, event, 0));
}
// unlessCapturing returns code, or 0 with capturing set if code is an error because of a capture, which may
// have begun after the question whether there is one. The default stream has such an error if a stream that
// waits for it is being captured.
static int unlessCapturing(functions *f, int code, int *capturing) {
	if (code < 900 || code > 908) // cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread
		return code;
	f->getLastError();
	*capturing = 1;
	return 0;
}
static int follow(functions *f, void *stream, void *event, int *capturing) {
	int code = f->streamIsCapturing(stream, capturing);
	return unlessCapturing(f, code || *capturing ? code : f->streamWaitEvent(stream, event, 0), capturing);
}
static int gohvdFollow(functions *f, void *context, uintptr_t stream, void *event, int *capturing) {
	ON(context, follow(f, (void *)stream, event, capturing));
}
static int gohvdNewEvent(functions *f, void *context, void **event) {
	ON(context, f->eventCreateWithFlags(event, 2)); // 2: it measures no time
}
static int gohvdRecord(functions *f, void *context, void *event, uintptr_t stream) {
	ON(context, f->eventRecord(event, (void *)stream));
}
static int mark(functions *f, void *event, void *stream, int *capturing) {
	int code = f->streamIsCapturing(stream, capturing);
	return unlessCapturing(f, code || *capturing ? code : f->eventRecord(event, stream), capturing);
}
static int gohvdMark(functions *f, void *context, void *event, uintptr_t stream, int *capturing) {
	ON(context, mark(f, event, (void *)stream, capturing));
}
static int gohvdQuery(functions *f, void *context, void *event) { ON(context, f->eventQuery(event)); }
static int gohvdDestroyEvent(functions *f, void *context, void *event) {
	ON(context, f->eventDestroy(event));
}
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"unsafe"
)

// functions are the names of the functions in C's struct of the same name, in its order.
var functions = []string{
	"cudaGetDeviceCount", "cudaGetLastError", "cudaGetErrorName", "cudaGetErrorString",
	"cudaRuntimeGetVersion", "cudaDeviceGetAttribute",
	"cudaMemGetInfo", "cudaMalloc",
	"cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMemcpyAsync", "cudaMemsetAsync",
	"cudaDeviceGetStreamPriorityRange", "cudaStreamCreateWithPriority", "cudaStreamDestroy",
	"cudaStreamSynchronize", "cudaStreamWaitEvent", "cudaStreamIsCapturing",
	"cudaEventCreateWithFlags", "cudaEventRecord",
	"cudaEventQuery", "cudaEventDestroy", "cudaThreadExchangeStreamCaptureMode",
}

// driverFunctions are the names of the functions of libcuda in C's struct.
var driverFunctions = []string{"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
	"cuDriverGetVersion"}

// batchFunction is the name of the function for several copies, which older runtimes lack.
const batchFunction = "cudaMemcpyBatchAsync"

// notReady is the code of cudaErrorNotReady.
const notReady = 600

// Runtime is the CUDA runtime library. Its methods may be called by any goroutine.
type Runtime struct {
	Library *Library
	// Version and DriverVersion are 1000 times the major plus 10 times the minor version. DriverVersion is
	// the newest version that the driver supports, or 0 if there is no driver.
	Version, DriverVersion int
	noDriver               error // why there is no driver
	f                      *C.functions
	// batch is cudaMemcpyBatchAsync, or nil if the runtime or the driver is older than CUDA 12.8, or if the
	// runtime is so new that its parameters are not known.
	batch unsafe.Pointer

	// count counts the devices at its first call.
	count func() (int, error)

	mu       sync.Mutex
	contexts map[C.int]unsafe.Pointer // the primary contexts of the devices that the process uses
}

// Count returns the number of devices of this host that the process may use. If it is 0, the error says why.
// CUDA starts its driver in this process when Count or Device is called for the first time. From then on,
// CUDA_VISIBLE_DEVICES has no effect, and a process that is forked cannot use CUDA.
func (r *Runtime) Count() (int, error) { return r.count() }

// countDevices implements Count.
func (r *Runtime) countDevices() (int, error) {
	var n C.int
	if err := r.check("cudaGetDeviceCount", C.gohvdCount(r.f, &n)); err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, errors.New("cuda: cudaGetDeviceCount has counted 0 devices")
	}
	return int(n), r.noDriver
}

// table returns the places of the functions.
func (r *Runtime) table() []unsafe.Pointer {
	return unsafe.Slice((*unsafe.Pointer)(unsafe.Pointer(r.f)), len(functions)+len(driverFunctions))
}

// Load loads the CUDA runtime from the file at path. If path is "", it loads what this process or its
// packages of pip use (Places), or else what the dynamic loader finds, and of several runtimes the first one
// for which the driver is new enough. It returns an error if the library lacks a function that this package
// needs. A host without devices or without a driver is no error.
func Load(path string) (*Runtime, error) {
	names := []string{path}
	if path == "" {
		names = Candidates("libcudart.so.1?*", "libcudart.so", "libcudart.so.13", "libcudart.so.12",
			"libcudart.so.11.0")
	}
	var first, found *Runtime
	err := OpenLibrary(func(l *Library) (err error) {
		if found, err = newRuntime(l); err != nil {
			return err
		}
		if first == nil {
			first = found
		}
		return found.CheckDriver()
	}, names...)
	switch {
	case err == nil:
		return found, nil
	case first != nil:
		return first, nil
	}
	return nil, fmt.Errorf("cuda: %w", err)
}

// newRuntime returns the runtime in l.
func newRuntime(l *Library) (_ *Runtime, err error) {
	// The table is memory of C, which a Runtime keeps for ever: at each call cgo would check all pointers of
	// one in Go.
	r := &Runtime{Library: l, f: (*C.functions)(C.malloc(C.sizeof_functions)),
		contexts: make(map[C.int]unsafe.Pointer)}
	*r.f = C.functions{}
	defer func() {
		if err != nil {
			C.free(unsafe.Pointer(r.f))
		}
	}()
	r.count = sync.OnceValues(r.countDevices)
	if err := l.load(r.table(), functions); err != nil {
		return nil, err
	}
	var version, driver C.int
	if err := r.check("cudaRuntimeGetVersion", C.gohvdVersion(r.f, &version)); err != nil {
		return nil, err
	}
	r.noDriver = OpenLibrary(func(l *Library) error {
		if err := l.load(r.table()[len(functions):], driverFunctions); err != nil {
			return err
		}
		return r.check("cuDriverGetVersion", C.gohvdDriverVersion(r.f, &driver))
	}, "libcuda.so.1")
	r.Version, r.DriverVersion = int(version), int(driver)
	if min(r.Version, r.DriverVersion) >= 12080 && r.Version < 14000 {
		l.Symbols(unsafe.Slice(&r.batch, 1), []string{batchFunction})
	}
	return r, nil
}

// CheckDriver returns an error if there is no driver, or one that is too old for the runtime.
func (r *Runtime) CheckDriver() error {
	switch {
	case r.noDriver != nil:
		return fmt.Errorf("cuda: this host has no driver for CUDA: %w", r.noDriver)
	case r.DriverVersion/1000 < r.Version/1000:
		return fmt.Errorf("cuda: %s has version %s, but the driver supports CUDA only up to %s: install a "+
			"newer driver or an older runtime (HVD_CUDART_LIBRARY)", r.Library.File, VersionText(r.Version),
			VersionText(r.DriverVersion))
	}
	return nil
}

// VersionText formats the number of a version of CUDA.
func VersionText(v int) string { return fmt.Sprintf("%d.%d", v/1000, v/10%100) }

// check returns the error for a result of the function that is called call.
func (r *Runtime) check(call string, code C.int) error {
	if code == 0 {
		return nil
	}
	return &Error{Call: call, Code: int(code), Name: C.GoString(C.gohvdErrorName(r.f, code)),
		Text: C.GoString(C.gohvdErrorText(r.f, code))}
}

// Device is a device of this host.
type Device struct {
	runtime *Runtime
	index   C.int
	context unsafe.Pointer
}

// Device returns the device with the given index. The process then has its primary context, the one that the
// CUDA runtime and so PyTorch use, until it ends.
func (r *Runtime) Device(index int) (*Device, error) {
	n, err := r.Count()
	if err != nil {
		return nil, err
	}
	if index < 0 || index >= n {
		return nil, fmt.Errorf("cuda: got device %d, want a number below %d, the number of devices", index, n)
	}
	d := &Device{r, C.int(index), nil}
	r.mu.Lock()
	defer r.mu.Unlock()
	d.context = r.contexts[d.index]
	if d.context == nil {
		code := C.gohvdRetain(r.f, d.index, &d.context)
		if err := r.check("cuDevicePrimaryCtxRetain", code); err != nil {
			return nil, fmt.Errorf("%w: device %d", err, index)
		}
		r.contexts[d.index] = d.context
	}
	return d, nil
}

// Index returns the index of the device.
func (d *Device) Index() int { return int(d.index) }

// Use calls f with the device as the current device of the thread, and as the methods that call CUDA do if a
// stream is being captured. Afterwards the thread has its old device again.
func (d *Device) Use(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := C.gohvdPush(d.runtime.f, d.context)
	if err := d.check("cuCtxPushCurrent", before.code); err != nil {
		return err
	}
	defer C.gohvdPop(d.runtime.f, before.mode)
	return f()
}

func (d *Device) check(call string, code C.int) error { return d.runtime.check(call, code) }

// Processors returns the number of multiprocessors of the device.
func (d *Device) Processors() (int, error) {
	var n C.int
	err := d.check("cudaDeviceGetAttribute", C.gohvdProcessors(d.runtime.f, d.index, &n))
	return int(n), err
}

// Memory returns the numbers of free bytes and of all bytes of the device's memory.
func (d *Device) Memory() (unused, total int64, err error) {
	var u, t C.size_t
	err = d.check("cudaMemGetInfo", C.gohvdMemory(d.runtime.f, d.context, &u, &t))
	return int64(u), int64(t), err
}

// Alloc returns n bytes of memory of the device, with undefined contents.
func (d *Device) Alloc(n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	var p unsafe.Pointer
	err := d.check("cudaMalloc", C.gohvdAlloc(d.runtime.f, d.context, &p, C.size_t(n)))
	if err != nil {
		return nil, fmt.Errorf("%w: %d bytes on device %d", err, n, d.index)
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// Free frees memory that Alloc has returned. It waits for all work of the device.
func (d *Device) Free(memory []byte) error {
	if len(memory) == 0 {
		return nil
	}
	return d.check("cudaFree", C.gohvdFree(d.runtime.f, d.context, address(memory)))
}

// AllocHost returns n bytes of memory of the host from which devices can copy while the program goes on. The
// program can read and write it.
func (d *Device) AllocHost(n int) ([]byte, error) {
	var p unsafe.Pointer
	err := d.check("cudaHostAlloc", C.gohvdAllocHost(d.runtime.f, d.context, &p, C.size_t(n)))
	if err != nil {
		return nil, fmt.Errorf("%w: %d bytes", err, n)
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// FreeHost frees memory that AllocHost has returned.
func (d *Device) FreeHost(memory []byte) error {
	return d.check("cudaFreeHost", C.gohvdFreeHost(d.runtime.f, d.context, address(memory)))
}

// address returns the address of the first byte of b, or nil if b is empty.
func address(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// Stream is a queue of work for a device, which executes the work in order.
type Stream struct {
	Device *Device
	// handle is a cudaStream_t. It is no pointer in Go, because special streams have small numbers.
	handle C.uintptr_t

	list   []C.uintptr_t // memory for CopyAll
	failed C.size_t
}

// NewStream makes a stream. It does not wait for work of the default stream.
func (d *Device) NewStream() (*Stream, error) { return d.newStream(0) }

// NewUrgentStream makes a stream whose work the device begins before that of other streams. The kernels of
// the program would otherwise delay the exchange for which other ranks wait.
func (d *Device) NewUrgentStream() (*Stream, error) { return d.newStream(1) }

func (d *Device) newStream(greatest C.int) (*Stream, error) {
	s := &Stream{Device: d}
	return s, d.check("cudaStreamCreateWithPriority",
		C.gohvdNewStream(d.runtime.f, d.context, greatest, &s.handle))
}

// OfHandle returns the stream of the device with the given cudaStream_t, which another library has made.
func (d *Device) OfHandle(handle uintptr) *Stream {
	return &Stream{Device: d, handle: C.uintptr_t(handle)}
}

// Handle returns the stream as a cudaStream_t.
func (s *Stream) Handle() uintptr { return uintptr(s.handle) }

// Copy enqueues a copy of from to to, which have the same length. Each may be memory of the host or of a
// device. It must stay valid until the copy has ended.
func (s *Stream) Copy(to, from []byte) error {
	if len(to) != len(from) {
		return fmt.Errorf("cuda: copy: got %d bytes for %d bytes", len(from), len(to))
	}
	return s.check("cudaMemcpyAsync", C.gohvdCopy(s.f(), s.Device.context, address(to), address(from),
		C.size_t(len(to)), s.handle))
}

// CopyAll enqueues copies within the memory of the device, with one call of CUDA if the runtime has a
// function for that. The copies begin after the work that is on the stream, and may run in any order, so none
// may write what another one reads or writes. Several copies must not be empty. The memory must stay valid
// until they have ended. It must not be called by two goroutines at a time.
func (s *Stream) CopyAll(copies []Copy) error {
	r := s.Device.runtime
	if r.batch == nil || len(copies) < 2 {
		for _, c := range copies {
			if err := s.Copy(c.To, c.From); err != nil {
				return err
			}
		}
		return nil
	}
	n := len(copies)
	s.list = slices.Grow(s.list[:0], 3*n)[:3*n]
	list := s.list
	for i, c := range copies {
		if len(c.To) != len(c.From) || len(c.To) == 0 {
			return fmt.Errorf("cuda: copy %d of %d: got %d bytes for %d bytes, want the same number, at least 1", i,
				n, len(c.From), len(c.To))
		}
		list[i], list[n+i] = C.uintptr_t(uintptr(address(c.To))), C.uintptr_t(uintptr(address(c.From)))
		list[2*n+i] = C.uintptr_t(len(c.To))
	}
	s.failed = ^C.size_t(0)
	err := s.check(batchFunction, C.gohvdCopyAll(r.f, r.batch, C.int(r.Version), s.Device.index,
		s.Device.context, &list[0], C.size_t(n), &s.failed, s.handle))
	if err != nil && s.failed < C.size_t(n) {
		return fmt.Errorf("%w: copy %d of %d, of %d bytes", err, s.failed, n, len(copies[s.failed].To))
	}
	return err
}

// Fill enqueues work that sets every byte of to.
func (s *Stream) Fill(to []byte, value byte) error {
	return s.check("cudaMemsetAsync", C.gohvdFill(s.f(), s.Device.context, address(to), C.int(value),
		C.size_t(len(to)), s.handle))
}

// Wait enqueues work that waits until the work before the last Record of e has ended. If e was never
// recorded, it does not wait.
func (s *Stream) Wait(e *Event) error {
	return s.check("cudaStreamWaitEvent", C.gohvdWaitEvent(s.f(), s.Device.context, s.handle, e.handle))
}

// Follow does the same as Wait, unless the stream is being captured for a graph, and reports whether it has
// done so. CUDA refuses the wait then, and ends the capture. So a capture that another thread begins during
// Follow may end.
func (s *Stream) Follow(e *Event) (waits bool, err error) {
	code := C.gohvdFollow(s.f(), s.Device.context, s.handle, e.handle, &e.capturing)
	return code == 0 && e.capturing == 0, s.check("cudaStreamWaitEvent", code)
}

// Synchronize waits until all work of the stream has ended. It blocks a thread.
func (s *Stream) Synchronize() error {
	return s.check("cudaStreamSynchronize", C.gohvdSynchronize(s.f(), s.Device.context, s.handle))
}

// Close destroys the stream when its work has ended.
func (s *Stream) Close() error {
	return s.check("cudaStreamDestroy", C.gohvdDestroyStream(s.f(), s.Device.context, s.handle))
}

func (s *Stream) f() *C.functions { return s.Device.runtime.f }

func (s *Stream) check(call string, code C.int) error { return s.Device.check(call, code) }

// Event marks a position in a stream.
type Event struct {
	device *Device
	handle unsafe.Pointer
	// stream is the cudaStream_t for which Mark has recorded the event. number is greater than that of each
	// event whose work was on the stream before.
	stream uintptr
	number uint64
	// capturing is set by mark and Follow.
	capturing C.int
}

// NewEvent makes an event.
func (d *Device) NewEvent() (*Event, error) {
	e := &Event{device: d}
	return e, d.check("cudaEventCreateWithFlags", C.gohvdNewEvent(d.runtime.f, d.context, &e.handle))
}

// Record moves the event to the end of the work of s.
func (e *Event) Record(s *Stream) error {
	return s.check("cudaEventRecord", C.gohvdRecord(s.f(), s.Device.context, e.handle, s.handle))
}

// mark does the same as Record, unless the stream is being captured for a graph. The record would become a
// part of the graph then.
func (e *Event) mark(s *Stream) error {
	code := C.gohvdMark(s.f(), s.Device.context, e.handle, s.handle, &e.capturing)
	if code == 0 && e.capturing != 0 {
		return fmt.Errorf("cuda: the stream %#x is being captured for a CUDA graph, of which operations of gohvd "+
			"cannot be a part: submit them outside of the capture", uintptr(s.handle))
	}
	return s.check("cudaEventRecord", code)
}

// Query reports whether the work before the last Record has ended. Before the first Record it returns true.
func (e *Event) Query() (bool, error) {
	code := C.gohvdQuery(e.device.runtime.f, e.device.context, e.handle)
	if code == notReady {
		return false, nil
	}
	return code == 0, e.device.check("cudaEventQuery", code)
}

// Close destroys the event.
func (e *Event) Close() error {
	return e.device.check("cudaEventDestroy",
		C.gohvdDestroyEvent(e.device.runtime.f, e.device.context, e.handle))
}
