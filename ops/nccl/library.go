//go:build nccl && cgo

package nccl

/*
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct { char bytes[128]; } uniqueID;

// The first fields of ncclConfig_t, as in NCCL 2.17. NCCL accepts shorter structs than its own. That of NCCL
// 2.14 has 24 bytes and ends with blocking.
typedef struct {
	size_t size;
	unsigned magic, version;
	int blocking, cgaClusterSize, minCTAs, maxCTAs;
	const char *netName;
} config;

// The functions of NCCL, in the order of the list functions in Go.
typedef struct {
	int (*getVersion)(int *);
	int (*getUniqueID)(uniqueID *);
	const char *(*getErrorString)(int);
	const char *(*getLastError)(void *);
	int (*commInitRankConfig)(void **, int, uniqueID, int, config *);
	int (*commDestroy)(void *);
	int (*commAbort)(void *);
	int (*commGetAsyncError)(void *, int *);
	int (*groupStart)(void);
	int (*groupEnd)(void);
	int (*allReduce)(const void *, void *, size_t, int, int, void *, void *);
	int (*reduce)(const void *, void *, size_t, int, int, int, void *, void *);
	int (*broadcast)(const void *, void *, size_t, int, int, void *, void *);
	int (*allGather)(const void *, void *, size_t, int, void *, void *);
	int (*reduceScatter)(const void *, void *, size_t, int, int, void *, void *);
	int (*send)(const void *, size_t, int, int, void *, void *);
	int (*recv)(void *, size_t, int, int, void *, void *);
	int (*redOpCreatePreMulSum)(int *, void *, int, int, void *);
	int (*redOpDestroy)(int, void *);
} functions;

static int gohvdVersion(functions *f, int *v) { return f->getVersion(v); }
static int gohvdUniqueID(functions *f, uniqueID *id) { return f->getUniqueID(id); }
static const char *gohvdErrorText(functions *f, int code) { return f->getErrorString(code); }
static const char *gohvdLastError(functions *f) { return f->getLastError(NULL); }
// If maxCTAs is 0, NCCL chooses.
static int gohvdInit(functions *f, void **comm, int n, uniqueID *id, int rank, int maxCTAs) {
	config c = {sizeof c, 0xcafebeef, 21700, 1, INT_MIN, INT_MIN, maxCTAs, NULL}; // 1: calls block
	if (maxCTAs == 0) {
		c.size = 24;
		c.version = 21400;
	}
	return f->commInitRankConfig(comm, n, *id, rank, &c);
}
static int gohvdDestroy(functions *f, void *comm) { return f->commDestroy(comm); }
static int gohvdAbort(functions *f, void *comm) { return f->commAbort(comm); }
static int gohvdAsyncError(functions *f, void *comm) {
	int code, failed = f->commGetAsyncError(comm, &code);
	return failed ? failed : code;
}
static int gohvdGroupStart(functions *f) { return f->groupStart(); }
static int gohvdGroupEnd(functions *f) { return f->groupEnd(); }
static int gohvdAllReduce(functions *f, void *in, void *out, size_t n, int type, int op, void *comm,
		uintptr_t stream) {
	return f->allReduce(in, out, n, type, op, comm, (void *)stream);
}
static int gohvdReduce(functions *f, void *in, void *out, size_t n, int type, int op, int root, void *comm,
		uintptr_t stream) {
	return f->reduce(in, out, n, type, op, root, comm, (void *)stream);
}
static int gohvdBroadcast(functions *f, void *in, void *out, size_t n, int root, void *comm,
		uintptr_t stream) {
	return f->broadcast(in, out, n, 1, root, comm, (void *)stream);
}
static int gohvdAllGather(functions *f, void *in, void *out, size_t n, void *comm, uintptr_t stream) {
	return f->allGather(in, out, n, 1, comm, (void *)stream);
}
static int gohvdReduceScatter(functions *f, void *in, void *out, size_t n, int type, int op, void *comm,
		uintptr_t stream) {
	return f->reduceScatter(in, out, n, type, op, comm, (void *)stream);
}
static int gohvdSend(functions *f, void *p, size_t n, int peer, void *comm, uintptr_t stream) {
	return f->send(p, n, 1, peer, comm, (void *)stream);
}
static int gohvdRecv(functions *f, void *p, size_t n, int peer, void *comm, uintptr_t stream) {
	return f->recv(p, n, 1, peer, comm, (void *)stream);
}
static int gohvdPreMulSum(functions *f, int *op, void *factor, int type, void *comm) {
	return f->redOpCreatePreMulSum(op, factor, type, 1, comm); // 1: the factor is in host memory
}
static int gohvdRedOpDestroy(functions *f, int op, void *comm) { return f->redOpDestroy(op, comm); }
*/
import "C"

import (
	"fmt"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/tensor"
)

// functions are the names of the functions in C's struct of the same name, in its order.
var functions = []string{
	"ncclGetVersion", "ncclGetUniqueId", "ncclGetErrorString", "ncclGetLastError", "ncclCommInitRankConfig",
	"ncclCommDestroy", "ncclCommAbort", "ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd",
	"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter", "ncclSend",
	"ncclRecv", "ncclRedOpCreatePreMulSum", "ncclRedOpDestroy",
}

// These are values of ncclRedOp_t.
const (
	redSum C.int = iota
	redProd
	redMax
	redMin
	redAvg
)

// Library is NCCL together with the CUDA runtime.
type Library struct {
	CUDA *cuda.Runtime
	// Devices marks the streams of the program.
	Devices *cuda.Devices
	// File is the path of NCCL.
	File string
	// Version is NCCL's version: 10000 times the major, plus 100 times the minor, plus the patch number.
	Version int
	// EndTimeout bounds how long backends wait for the end of work on a device after they have aborted it,
	// and how long they wait at the end for other ranks. Load sets it to 5 s.
	EndTimeout time.Duration
	f          *C.functions
	// ranges returns nil unless a tool such as Nsight Systems watches. The first call looks for the library
	// of NVTX.
	ranges func() *cuda.Ranges

	mu      sync.Mutex
	devices map[place]*device
	pinned  map[reduction]pinned // neutral elements in pinned memory
	// next is the Order of the next operation that may be launched. err is the error of the first operation
	// that has failed. Later operations do not wait for it, but fail with it. turn is notified when one of
	// them changes.
	next uint64
	err  error
	turn sync.Cond
	// failedAt is when err was set. comms are the communicators that Fail aborts then.
	failedAt time.Time
	comms    []*communicator
	// late are communicators that are made or aborted although no backend has them any more.
	late []*communicator
}

// Load loads NCCL from the file at path, or from where this process finds it if path is "" (cuda.Places), and
// likewise the CUDA runtime from cudaPath. It returns an error if NCCL is older than 2.14, or if the driver
// is too old for the runtime. It does not look for devices (cuda.Runtime.Count).
func Load(path, cudaPath string) (*Library, error) {
	runtime, err := cuda.Load(cudaPath)
	if err != nil {
		return nil, err
	}
	l, err := open(path)
	if err != nil {
		return nil, err
	}
	if err := runtime.CheckDriver(); err != nil {
		return nil, fmt.Errorf("nccl: %w", err)
	}
	l.CUDA, l.Devices = runtime, cuda.NewDevices(runtime)
	return l, nil
}

// open loads NCCL from the file at path, or the first one that is new enough from where this process finds it
// if path is "". If all are too old, open returns an error and a Library with only the file and the version
// of the first.
func open(path string) (*Library, error) {
	names := []string{path}
	if path == "" {
		names = cuda.Candidates("libnccl.so.2*", "libnccl.so.2")
	}
	var found *Library
	var tooOld error
	old := new(Library)
	err := cuda.OpenLibrary(func(file *cuda.Library) (err error) {
		if found, err = newLibrary(file); err != nil && old.File == "" {
			old, tooOld = found, err
		}
		return err
	}, names...)
	switch {
	case err == nil:
		return found, nil
	case tooOld != nil:
		return old, tooOld
	}
	return old, fmt.Errorf("nccl: %w", err)
}

// newLibrary returns the NCCL in the file, also if it is too old.
func newLibrary(file *cuda.Library) (l *Library, err error) {
	// The table is memory of C, which a Library that is new enough keeps for ever: at each call cgo would
	// check all pointers of one in Go.
	l = &Library{File: file.File, f: (*C.functions)(C.malloc(C.sizeof_functions)),
		EndTimeout: 5 * time.Second, ranges: sync.OnceValue(cuda.OpenRanges),
		devices: make(map[place]*device), pinned: make(map[reduction]pinned)}
	*l.f = C.functions{}
	l.turn.L = &l.mu
	table := unsafe.Slice((*unsafe.Pointer)(unsafe.Pointer(l.f)), len(functions))
	missing := file.Symbols(table, functions)
	if table[0] != nil {
		var v C.int
		C.gohvdVersion(l.f, &v)
		l.Version = int(v)
	}
	if len(missing) > 0 {
		err = fmt.Errorf("nccl: %s has version %s, want at least 2.14: it lacks %s", l.File,
			versionText(l.Version), strings.Join(missing, ", "))
		C.free(unsafe.Pointer(l.f))
		l.f = nil
	}
	return l, err
}

// Find reports what Load would load from the paths. Only if devices is set, it counts the devices, so that
// CUDA starts its driver in this process. A process that is forked afterwards cannot use CUDA.
func Find(path, cudaPath string, devices bool) cuda.Found {
	found := cuda.Found{Built: true}
	if r, err := cuda.Load(cudaPath); err != nil {
		found.CUDA.Error = err.Error()
	} else {
		found.CUDA = cuda.FoundLibrary{File: r.Library.File, Code: r.Version,
			Version: cuda.VersionText(r.Version)}
		if devices {
			if found.Devices, err = r.Count(); err != nil {
				found.NoDevice = err.Error()
			}
		}
		if r.DriverVersion > 0 {
			found.Driver = cuda.VersionText(r.DriverVersion)
		}
	}
	l, err := open(path)
	found.NCCL = cuda.FoundLibrary{File: l.File, Code: l.Version}
	if l.Version > 0 {
		found.NCCL.Version = versionText(l.Version)
	}
	if err != nil {
		found.NCCL.Error = err.Error()
	}
	return found
}

// Count returns the number of devices of this host that the process may use, at least 1. CUDA starts its
// driver in this process then (cuda.Runtime.Count).
func (l *Library) Count() (int, error) {
	n, err := l.CUDA.Count()
	if err != nil {
		return 0, fmt.Errorf("nccl: %s has version %s, but this host has no CUDA device that the process may "+
			"use: %w", l.File, versionText(l.Version), err)
	}
	return n, nil
}

// versionText formats the code of a version, which is different before NCCL 2.9.
func versionText(v int) string {
	if v < 10000 {
		return fmt.Sprintf("%d.%d.%d", v/1000, v/100%10, v%100)
	}
	return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100)
}

// check returns the error for a result of the function that is called call.
func (l *Library) check(call string, code C.int) error {
	if code == 0 {
		return nil
	}
	return &Error{Call: call, Code: int(code), Text: C.GoString(C.gohvdErrorText(l.f, code)),
		Detail: C.GoString(C.gohvdLastError(l.f))}
}

// idBytes is the size of a unique id.
const idBytes = 128

// newID stores a new unique id in id.
func (l *Library) newID(id *[idBytes]byte) error {
	return l.check("ncclGetUniqueId", C.gohvdUniqueID(l.f, (*C.uniqueID)(unsafe.Pointer(id))))
}

// initialize makes the communicator with the unique id. It waits until all ranks have called it.
func (l *Library) initialize(c *communicator, id *[idBytes]byte, maxCTAs int) error {
	code := C.gohvdInit(l.f, &c.handle, C.int(c.n), (*C.uniqueID)(unsafe.Pointer(id)), C.int(c.rank),
		C.int(maxCTAs))
	err := l.check("ncclCommInitRankConfig", code)
	if code == inProgress {
		l.abort(c)
		err = fmt.Errorf("%w: the communicator is nonblocking: unset NCCL_COMM_BLOCKING, which overrides what gohvd "+
			"asks for", err)
	}
	return err
}

// inProgress is the code of ncclInProgress, with which the functions for nonblocking communicators return.
const inProgress = 7

// asyncError returns the error that the communicator reports, or nil.
func (l *Library) asyncError(c *communicator) error {
	return l.check("the communicator", C.gohvdAsyncError(l.f, c.handle))
}

func (l *Library) abort(c *communicator) { C.gohvdAbort(l.f, c.handle) }

func (l *Library) destroy(c *communicator) { C.gohvdDestroy(l.f, c.handle) }

func (c *communicator) check(call string, code C.int) error { return c.library.check(call, code) }

// These are the codes of errors that this rank has caused: ncclUnhandledCudaError and ncclInvalidArgument.
const (
	unhandledCUDAError = 1
	invalidArgument    = 4
)

// isLocal reports whether this rank has caused the error. Otherwise NCCL does not say which rank has.
func (e *Error) isLocal() bool { return e.Code == unhandledCUDAError || e.Code == invalidArgument }

// group calls f between ncclGroupStart and ncclGroupEnd. The thread of the caller must be locked.
func (c *communicator) group(f func() error) error {
	if err := c.check("ncclGroupStart", C.gohvdGroupStart(c.library.f)); err != nil {
		return err
	}
	err := f()
	if end := c.check("ncclGroupEnd", C.gohvdGroupEnd(c.library.f)); err == nil {
		err = end
	}
	return err
}

func address(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

func (c *communicator) allReduce(in, out []byte, dt tensor.DType, op C.int) error {
	t, n := elements(in, dt)
	return c.check("ncclAllReduce", C.gohvdAllReduce(c.library.f, address(in), address(out), n, t, op, c.handle,
		C.uintptr_t(c.stream.Handle())))
}

// reduce reduces in. The root gets the result in out, which other ranks do not use.
func (c *communicator) reduce(in, out []byte, dt tensor.DType, op C.int, root int) error {
	t, n := elements(in, dt)
	return c.check("ncclReduce", C.gohvdReduce(c.library.f, address(in), address(out), n, t, op, C.int(root),
		c.handle, C.uintptr_t(c.stream.Handle())))
}

// reduceScatter reduces in, which has a block of the same size for each rank. This rank gets its block of the
// result in out.
func (c *communicator) reduceScatter(in, out []byte, dt tensor.DType, op C.int) error {
	t, n := elements(out, dt)
	return c.check("ncclReduceScatter", C.gohvdReduceScatter(c.library.f, address(in), address(out), n, t, op,
		c.handle, C.uintptr_t(c.stream.Handle())))
}

// broadcast copies the in of the root to the out of every rank.
func (c *communicator) broadcast(in, out []byte, root int) error {
	return c.check("ncclBroadcast", C.gohvdBroadcast(c.library.f, address(in), address(out),
		C.size_t(len(out)), C.int(root), c.handle, C.uintptr_t(c.stream.Handle())))
}

// allGather stores the in of all ranks, which have the same size, in out.
func (c *communicator) allGather(in, out []byte) error {
	return c.check("ncclAllGather", C.gohvdAllGather(c.library.f, address(in), address(out),
		C.size_t(len(in)), c.handle, C.uintptr_t(c.stream.Handle())))
}

func (c *communicator) send(buf []byte, peer int) error {
	return c.check("ncclSend", C.gohvdSend(c.library.f, address(buf), C.size_t(len(buf)), C.int(peer),
		c.handle, C.uintptr_t(c.stream.Handle())))
}

func (c *communicator) recv(buf []byte, peer int) error {
	return c.check("ncclRecv", C.gohvdRecv(c.library.f, address(buf), C.size_t(len(buf)), C.int(peer),
		c.handle, C.uintptr_t(c.stream.Handle())))
}

// preMulSum returns a reduction that multiplies the contributions by factor and adds them.
func (c *communicator) preMulSum(dt tensor.DType, factor float64) (op C.int, err error) {
	t, _ := elements(nil, dt)
	var value [8]byte
	switch dt {
	case tensor.Float16:
		*(*half.Float16)(unsafe.Pointer(&value)) = half.Float16FromFloat32(float32(factor))
	case tensor.BFloat16:
		*(*half.BFloat16)(unsafe.Pointer(&value)) = half.BFloat16FromFloat32(float32(factor))
	case tensor.Float32:
		*(*float32)(unsafe.Pointer(&value)) = float32(factor)
	default:
		*(*float64)(unsafe.Pointer(&value)) = factor
	}
	err = c.check("ncclRedOpCreatePreMulSum",
		C.gohvdPreMulSum(c.library.f, &op, unsafe.Pointer(&value), t, c.handle))
	return op, err
}

func (c *communicator) destroyOp(op C.int) error {
	return c.check("ncclRedOpDestroy", C.gohvdRedOpDestroy(c.library.f, op, c.handle))
}

// types are the values of ncclDataType_t. NCCL has no type for 16-bit integers. A bool is a uint8.
var types = map[tensor.DType]C.int{
	tensor.Int8: 0, tensor.Uint8: 1, tensor.Bool: 1, tensor.Int32: 2, tensor.Int64: 4, tensor.Float16: 6,
	tensor.Float32: 7, tensor.Float64: 8, tensor.BFloat16: 9,
}

// elements returns the NCCL type of dt and the number of elements in buf.
func elements(buf []byte, dt tensor.DType) (t C.int, n C.size_t) {
	return types[dt], C.size_t(len(buf) / dt.Size())
}
