// Command libgohvd is built as a shared library, libgohvd.so, with which programs in other languages than Go
// run a rank in their own process (make libgohvd). gohvd.h declares its functions, and docs/c-api.md is their
// reference.
//
// The functions of gohvd.h are written in C, in gate.c. They refuse what must not reach Go, such as a call in
// a forked process, and call the functions that this package exports.
package main

/*
#include <stdlib.h>
#include "gohvd.h"
#include "gate.h"
extern char **environ;

static void *gohvd_allocate(void *(*f)(void *, uint32_t, uint64_t), void *context, uint32_t tensor,
		uint64_t bytes) {
	return f(context, tensor, bytes);
}
*/
import "C"

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/commits"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/library"
	"github.com/gohvd/gohvd/internal/ps/node"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/transport/tcp"
)

// process is the state of this process. hvdd may be in the folder of the library, or in the folder bin beside
// that one, as in a wheel.
var process = library.New(func() []string {
	folder := filepath.Dir(stringOf(C.gohvd_path))
	return []string{folder, filepath.Join(filepath.Dir(folder), "bin")}
}, memory)

// memory provides memory that the program frees with hvd_free_result.
var memory = library.Memory{
	Alloc: func(numBytes int) ([]byte, error) {
		p := C.malloc(C.size_t(max(numBytes, 1)))
		if p == nil {
			return nil, fmt.Errorf("there is no memory for a result of %d bytes", numBytes)
		}
		return unsafe.Slice((*byte)(p), numBytes), nil
	},
	Free: func(b []byte) { C.free(unsafe.Pointer(unsafe.SliceData(b))) },
}

func init() {
	C.gohvd_restore_limit()
	config.Environ = environ
	findPoller()
	tcp.ListInodes(unsafe.Slice((*uint64)(&C.gohvd_inodes[0]), len(C.gohvd_inodes)))
}

// findPoller sets gohvd_poller. The poller is the one that has the ends of a new pipe.
func findPoller() {
	r, w, err := os.Pipe()
	if err != nil {
		return
	}
	defer r.Close()
	defer w.Close()
	info, err := r.Stat()
	if err != nil {
		return
	}
	inode := fmt.Sprintf(" ino:%x ", info.Sys().(*syscall.Stat_t).Ino)
	links, _ := filepath.Glob("/proc/self/fd/*")
	for _, link := range links {
		if target, _ := os.Readlink(link); target != "anon_inode:[eventpoll]" {
			continue
		}
		file := "/proc/self/fdinfo/" + filepath.Base(link)
		if list, _ := os.ReadFile(file); strings.Contains(string(list), inode) {
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&C.gohvd_poller[0])), len(C.gohvd_poller)-1), file)
		}
	}
}

// environ returns the environment of the process as it is now. Go has copied it when the library was loaded.
func environ() (all []string) {
	next := unsafe.Pointer(C.environ) // it is nil after clearenv
	for next != nil && *(**C.char)(next) != nil {
		all = append(all, C.GoString(*(**C.char)(next)))
		next = unsafe.Add(next, unsafe.Sizeof(next))
	}
	return all
}

// misuse returns the error of a wrong call of the function op.
func misuse(op, format string, args ...any) error {
	return &engine.UsageError{Op: op, Err: fmt.Errorf(format, args...)}
}

// settingsOf reads settings in the form NAME=value.
func settingsOf(op string, all **C.char, n C.uint32_t) (map[string]string, error) {
	settings := make(map[string]string)
	for i, p := range unsafe.Slice(all, int(n)) {
		if p == nil {
			return nil, misuse(op, "setting %d is a null pointer", i)
		}
		setting := C.GoString(p)
		name, value, found := strings.Cut(setting, "=")
		if !found || name == "" {
			return nil, misuse(op, "got the setting %q, want NAME=value", setting)
		}
		settings[name] = value
	}
	return settings, nil
}

// optionsOf reads the options of op. o may be nil.
func optionsOf(op string, o *C.hvd_init_options_t) (options library.InitOptions, err error) {
	if o == nil {
		return options, nil
	}
	if options.Settings, err = settingsOf(op, o.settings, o.num_settings); err != nil {
		return options, err
	}
	for _, set := range unsafe.Slice(o.process_sets, int(o.num_process_sets)) {
		options.Sets = append(options.Sets, ranksOf(&set))
	}
	if o.mpi_comm != nil {
		comm := int32(*o.mpi_comm)
		options.MPIComm = &comm
	}
	return options, nil
}

func ranksOf(r *C.hvd_ranks_t) []int {
	all := make([]int, 0, int(r.num_ranks))
	for _, n := range unsafe.Slice(r.ranks, int(r.num_ranks)) {
		all = append(all, int(n))
	}
	return all
}

// stringOf returns a text of the program. p may be nil.
func stringOf(p *C.char) string {
	if p == nil {
		return ""
	}
	return C.GoString(p)
}

// limitOf converts a number of seconds. Every negative number means that there is no limit.
func limitOf(seconds C.double) (time.Duration, error) {
	switch s := float64(seconds); {
	case math.IsNaN(s):
		return 0, misuse("wait", "got a time limit that is not a number")
	case s < 0, s > math.MaxInt64/1e9:
		return library.Forever, nil
	default:
		return time.Duration(s * 1e9), nil
	}
}

// begun gives the program the handle h. If there is no place for it, begun waits.
func begun(h library.Handle, into *C.hvd_handle_t) C.hvd_status_t {
	if into == nil {
		return status(process.Wait(h, library.Forever, nil))
	}
	*into = C.hvd_handle_t(h)
	return C.HVD_SUCCESS
}

//export gohvdMPIBuilt
func gohvdMPIBuilt() C.int { return truth(config.BuiltMPI) }

//export gohvdGPULibraries
func gohvdGPULibraries(countDevices C.int32_t, text **C.char) C.hvd_status_t {
	found, err := library.GPULibraries(countDevices != 0)
	return give(found, err, text)
}

// truth returns 1 for true and 0 for false.
func truth(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

//export gohvdInit
func gohvdInit(o *C.hvd_init_options_t, handle *C.hvd_handle_t) C.hvd_status_t {
	options, err := optionsOf("init", o)
	if err != nil {
		return status(err)
	}
	return begun(process.Init(options), handle)
}

//export gohvdShutdown
func gohvdShutdown(reason *C.char, flags C.uint32_t, handle *C.hvd_handle_t) C.hvd_status_t {
	if flags&^C.HVD_FAILED != 0 {
		return status(misuse("shutdown", "got the flags %#x, want HVD_FAILED or 0", uint32(flags)))
	}
	if flags == 0 {
		return begun(process.Shutdown(validText(reason), false), handle)
	}
	text, err := failureOf("shutdown", reason)
	if err != nil {
		return status(err)
	}
	return begun(process.Shutdown(text, true), handle)
}

// failureOf returns the reason for the failure of the program. It must not be empty.
func failureOf(op string, reason *C.char) (text string, err error) {
	if text = validText(reason); text == "" {
		err = misuse(op, "got no reason for the failure of the program")
	}
	return text, err
}

// validText returns a text of the program as valid UTF-8. p may be nil.
func validText(p *C.char) string { return strings.ToValidUTF8(stringOf(p), "\uFFFD") }

//export gohvdCheck
func gohvdCheck() C.hvd_status_t { return status(process.Check()) }

//export gohvdFact
func gohvdFact(which C.int) C.int64_t {
	r := process.Rank()
	if r == nil {
		if which == C.GOHVD_EPOCH {
			return 0
		}
		return -1
	}
	switch p := &r.Place; which {
	case C.GOHVD_RANK:
		return C.int64_t(p.Rank)
	case C.GOHVD_SIZE:
		return C.int64_t(p.Size)
	case C.GOHVD_LOCAL_RANK:
		return C.int64_t(p.LocalRank)
	case C.GOHVD_LOCAL_SIZE:
		return C.int64_t(p.LocalSize)
	case C.GOHVD_CROSS_RANK:
		return C.int64_t(p.CrossRank)
	case C.GOHVD_CROSS_SIZE:
		return C.int64_t(p.CrossSize)
	case C.GOHVD_HOMOGENEOUS:
		return C.int64_t(truth(r.Homogeneous))
	case C.GOHVD_DEVICES:
		if r.Devices != nil && r.AsyncCompletion {
			return 2
		}
		return C.int64_t(truth(r.Devices != nil))
	default:
		return C.int64_t(r.Epoch)
	}
}

//export gohvdNewUniqueID
func gohvdNewUniqueID(o *C.hvd_init_options_t, text **C.char) C.hvd_status_t {
	options, err := optionsOf("new unique id", o)
	if err != nil {
		return status(err)
	}
	id, err := process.NewUniqueID(options)
	return give([]byte(id), err, text)
}

// give gives the program a text, or the error err.
func give(b []byte, err error, text **C.char) C.hvd_status_t {
	if err != nil {
		return status(err)
	}
	*text = C.CString(string(b))
	return C.HVD_SUCCESS
}

// one backs the slices of an operation on one tensor, so that they are on the stack of the caller.
type one struct {
	tensors [1]rank.TensorSpec
	places  [1]library.Place
}

// read returns the operation c, whose name has nameBytes bytes. It refers to the memory of c.
func read(c *C.hvd_op_t, nameBytes C.size_t, one *one) (o library.Op, err error) {
	const known = C.HVD_GROUPED | C.HVD_ERROR_FEEDBACK | C.HVD_EMPTY | C.HVD_ON_DEVICE
	switch {
	case c.flags&^known != 0:
		return o, misuse("submit", "got the flags %#x, of which %#x are unknown", uint32(c.flags),
			uint32(c.flags&^known))
	case c.device < -1:
		return o, misuse("submit", "got device %d, want a number from 0, or -1 for host memory",
			int32(c.device))
	case c.num_tensors > rank.MaxTensors:
		return o, misuse("submit", "got %d tensors, want at most %d", uint32(c.num_tensors), rank.MaxTensors)
	case c.num_tensors > 0 && c.tensors == nil, c.num_splits > 0 && c.splits == nil:
		return o, misuse("submit", "got a null pointer for the tensors or for the splits")
	}
	if r := process.Rank(); r != nil && int(c.num_splits) > r.Place.Size {
		return o, misuse("submit", "got %d splits, want at most one for each of %d ranks", uint32(c.num_splits),
			r.Place.Size)
	}
	o.OnDevice, o.Device, o.Stream = c.device >= 0, int(c.device), uintptr(c.stream)
	if o.OnDevice && c.size == C.sizeof_hvd_op_t {
		if f, context := c.allocate, c.context; f != nil {
			o.Allocate = func(i, numBytes int) unsafe.Pointer {
				return C.gohvd_allocate(f, context, C.uint32_t(i), C.uint64_t(numBytes))
			}
		}
		o.Launched, o.ResultStream = c.flags&C.HVD_ON_DEVICE != 0, uintptr(c.result_stream)
	}
	s := &o.Spec
	s.Name = unsafe.String((*byte)(unsafe.Pointer(c.name)), int(nameBytes))
	s.Kind, s.DType, s.ReduceOp, s.Wire = uint32(c.kind), uint32(c.dtype), uint32(c.reduction),
		uint32(c.compression)
	s.Prescale, s.Postscale, s.TimeoutSeconds = float64(c.prescale), float64(c.postscale),
		float64(c.timeout_seconds)
	s.Set, s.Root, s.Peer, s.Tag = int(c.process_set), int(c.root), int(c.peer), int(c.tag)
	s.Grouped, s.ErrorFeedback, s.Empty = c.flags&C.HVD_GROUPED != 0, c.flags&C.HVD_ERROR_FEEDBACK != 0,
		c.flags&C.HVD_EMPTY != 0
	s.Splits = unsafe.Slice((*int64)(c.splits), int(c.num_splits))
	o.Spec.Tensors, o.Places = one.tensors[:], one.places[:]
	if c.num_tensors != 1 {
		o.Spec.Tensors = make([]rank.TensorSpec, int(c.num_tensors))
		o.Places = make([]library.Place, int(c.num_tensors))
	}
	tensors := unsafe.Slice(c.tensors, int(c.num_tensors))
	for i := range tensors {
		t := &tensors[i]
		if t.dims > maxDims || t.dims > 0 && t.shape == nil {
			return o, misuse("submit", "tensor %d: got no shape, or one with %d dimensions, want at most %d",
				i, uint32(t.dims), maxDims)
		}
		o.Spec.Tensors[i] = rank.TensorSpec{DType: uint32(t.dtype),
			Shape: unsafe.Slice((*int64)(t.shape), int(t.dims))}
		o.Places[i] = library.Place{In: t.input, Out: t.output, OutBytes: uint64(t.output_bytes)}
	}
	return o, nil
}

// maxDims is the maximum number of dimensions of a tensor.
const maxDims = 255

//export gohvdSubmit
func gohvdSubmit(c *C.hvd_op_t, nameBytes C.size_t, handle *C.hvd_handle_t) C.hvd_status_t {
	var one one
	o, err := read(c, nameBytes, &one)
	if err != nil {
		return status(err)
	}
	h, err := process.Submit(&o)
	*handle = C.hvd_handle_t(h)
	return status(err)
}

//export gohvdSubmitMany
func gohvdSubmitMany(ops *C.hvd_op_t, nameBytes *C.size_t, n C.size_t, handles *C.hvd_handle_t,
	submitted *C.size_t) C.hvd_status_t {
	names, to := unsafe.Slice(nameBytes, int(n)), unsafe.Slice(handles, int(n))
	all := unsafe.Slice(ops, int(n))
	for i := range all {
		if s := gohvdSubmit(&all[i], names[i], &to[i]); s != C.HVD_SUCCESS {
			*submitted = C.size_t(i)
			return s
		}
	}
	*submitted = n
	return C.HVD_SUCCESS
}

//export gohvdRun
func gohvdRun(c *C.hvd_op_t, nameBytes C.size_t, seconds C.double, handle *C.hvd_handle_t,
	result *C.hvd_result_t) C.hvd_status_t {
	limit, err := limitOf(seconds)
	if err == nil && limit != library.Forever && handle == nil {
		err = misuse("run", "got a time limit and no place for the handle")
	}
	if err != nil {
		return status(err)
	}
	var one one
	o, err := read(c, nameBytes, &one)
	if err != nil {
		return status(err)
	}
	var into *library.Result
	if result != nil {
		into = new(library.Result)
	}
	h, err := process.Run(&o, limit, into)
	if handle != nil {
		*handle = C.hvd_handle_t(h)
	}
	return finish(err, into, result)
}

//export gohvdWait
func gohvdWait(handle C.hvd_handle_t, seconds C.double, result *C.hvd_result_t) C.hvd_status_t {
	return wait((*library.Library).Wait, handle, seconds, result)
}

//export gohvdFinish
func gohvdFinish(handle C.hvd_handle_t, seconds C.double, result *C.hvd_result_t) C.hvd_status_t {
	return wait((*library.Library).Finish, handle, seconds, result)
}

// wait waits for a handle with Wait or Finish of the library.
func wait(how func(*library.Library, library.Handle, time.Duration, *library.Result) error,
	handle C.hvd_handle_t, seconds C.double, result *C.hvd_result_t) C.hvd_status_t {
	limit, err := limitOf(seconds)
	if err != nil {
		return status(err)
	}
	var into *library.Result
	if result != nil {
		into = new(library.Result)
	}
	return finish(how(process, library.Handle(handle), limit, into), into, result)
}

// finish gives the program the result r, or the error err. into is nil if the program wants no result.
func finish(err error, r *library.Result, into *C.hvd_result_t) C.hvd_status_t {
	if err != nil {
		return status(err)
	}
	if r == nil {
		return C.HVD_SUCCESS
	}
	*into = C.hvd_result_t{size: into.size, source: C.int32_t(r.Source), last_joined: C.int32_t(r.LastJoined),
		process_set: C.int32_t(r.Set)}
	n := len(r.Received)
	for _, o := range r.Outputs {
		n += len(o.Shape)
	}
	// One block holds the outputs, whether the library has allocated them, and the numbers.
	size := len(r.Outputs)*int(unsafe.Sizeof(C.hvd_output_t{})+unsafe.Sizeof(uintptr(0))) + 8*n
	if size == 0 {
		return C.HVD_SUCCESS
	}
	block := C.calloc(1, C.size_t(size))
	if block == nil {
		for _, o := range r.Outputs {
			if o.Made {
				memory.Free(o.Data)
			}
		}
		return status(fmt.Errorf("there is no memory for the description of a result"))
	}
	into.memory = block
	into.num_outputs, into.outputs = C.uint32_t(len(r.Outputs)), (*C.hvd_output_t)(block)
	outputs := unsafe.Slice(into.outputs, len(r.Outputs))
	at := unsafe.Add(block, len(outputs)*int(unsafe.Sizeof(C.hvd_output_t{})))
	made := unsafe.Slice((*unsafe.Pointer)(at), len(outputs))
	numbers := unsafe.Slice((*int64)(unsafe.Add(at, len(outputs)*int(unsafe.Sizeof(uintptr(0))))), n)
	put := func(values []int64) *C.int64_t {
		if len(values) == 0 {
			return nil
		}
		p := (*C.int64_t)(&numbers[0])
		numbers = numbers[copy(numbers, values):]
		return p
	}
	for i, o := range r.Outputs {
		data := unsafe.Pointer(unsafe.SliceData(o.Data))
		outputs[i] = C.hvd_output_t{data: data, bytes: C.uint64_t(len(o.Data)), shape: put(o.Shape),
			dims: C.uint32_t(len(o.Shape))}
		if o.Made {
			made[i] = data
		}
	}
	into.received, into.num_received = put(r.Received), C.uint32_t(len(r.Received))
	return C.HVD_SUCCESS
}

//export gohvdWaitAny
func gohvdWaitAny(handles *C.hvd_handle_t, n C.size_t, seconds C.double, index *C.size_t) C.hvd_status_t {
	limit, err := limitOf(seconds)
	if err != nil {
		return status(err)
	}
	i, err := process.WaitAny(unsafe.Slice((*library.Handle)(handles), int(n)), limit)
	*index = C.size_t(i)
	return status(err)
}

//export gohvdPoll
func gohvdPoll(handle C.hvd_handle_t, done *C.int32_t) C.hvd_status_t {
	is, err := process.Poll(library.Handle(handle))
	*done = 0
	if is {
		*done = 1
	}
	return status(err)
}

//export gohvdRelease
func gohvdRelease(handle C.hvd_handle_t) C.hvd_status_t {
	return status(process.Release(library.Handle(handle)))
}

//export gohvdNewGate
func gohvdNewGate(handle *C.hvd_handle_t) C.hvd_status_t {
	*handle = C.hvd_handle_t(process.NewGate())
	return C.HVD_SUCCESS
}

//export gohvdOpen
func gohvdOpen(handle C.hvd_handle_t) C.hvd_status_t {
	return status(process.Open(library.Handle(handle)))
}

//export gohvdAlloc
func gohvdAlloc(n C.uint64_t, to *unsafe.Pointer) C.hvd_status_t {
	if n == 0 || n > math.MaxInt64 {
		return status(misuse("alloc", "got %d bytes, want 1 to 2^63-1", uint64(n)))
	}
	b, err := arena.Alloc(int(n))
	if err == nil {
		allocated.add(b)
		*to = unsafe.Pointer(unsafe.SliceData(b))
	}
	return status(err)
}

//export gohvdFree
func gohvdFree(p unsafe.Pointer) C.hvd_status_t {
	b := allocated.take(p)
	if b == nil {
		return status(misuse("free", "got address %p, which hvd_alloc has not returned or which was freed", p))
	}
	return status(arena.Free(b))
}

//export gohvdAddProcessSet
func gohvdAddProcessSet(ranks *C.hvd_ranks_t, flags C.uint32_t, name *C.char, timeout C.double, id *C.int32_t,
	handle *C.hvd_handle_t) C.hvd_status_t {
	if flags&^C.HVD_MEMBERS_ONLY != 0 {
		return status(misuse("add process set", "got the flags %#x, want HVD_MEMBERS_ONLY or 0",
			uint32(flags)))
	}
	h := process.AddSet(ranksOf(ranks), flags != 0, stringOf(name), float64(timeout))
	if handle != nil {
		*handle = C.hvd_handle_t(h)
		return C.HVD_SUCCESS
	}
	var r library.Result
	err := process.Wait(h, library.Forever, &r)
	if err == nil && id != nil {
		*id = C.int32_t(r.Set)
	}
	return status(err)
}

//export gohvdRemoveProcessSet
func gohvdRemoveProcessSet(id C.int32_t, timeout C.double, handle *C.hvd_handle_t) C.hvd_status_t {
	return begun(process.RemoveSet(int(id), float64(timeout)), handle)
}

// list gives the program the first elements of a list, and its length.
func list[T ~int32 | ~uint32](all []T, err error, to *C.int32_t, capacity C.uint32_t,
	count *C.uint32_t) C.hvd_status_t {
	if err != nil {
		return status(err)
	}
	*count = C.uint32_t(len(all))
	copy(unsafe.Slice((*T)(unsafe.Pointer(to)), int(capacity)), all) // both types have 4 bytes
	return C.HVD_SUCCESS
}

//export gohvdProcessSets
func gohvdProcessSets(ids *C.int32_t, capacity C.uint32_t, count *C.uint32_t) C.hvd_status_t {
	all, err := process.Sets()
	return list(all, err, ids, capacity, count)
}

//export gohvdProcessSetRanks
func gohvdProcessSetRanks(id C.int32_t, ranks *C.int32_t, capacity C.uint32_t,
	count *C.uint32_t) C.hvd_status_t {
	all, err := process.SetRanks(int(id))
	return list(all, err, ranks, capacity, count)
}

//export gohvdElastic
func gohvdElastic(into *C.hvd_elastic_t) C.hvd_status_t {
	p := process.Progress()
	into.removed, into.generation = C.uint32_t(truth(p.Removed)), C.uint64_t(p.Generation)
	into.pending, into.changes = C.uint32_t(p.Pending), C.uint32_t(p.Changes)
	into.held, into.restore = C.uint32_t(p.Plan.Held), C.uint32_t(truth(p.Plan.Restore))
	into.missing, into.root = C.uint32_t(truth(p.Plan.Missing)), C.int32_t(p.Plan.Root)
	into.pairs = C.uint32_t(truth(p.Pairs))
	into.source, into.receiver = C.int32_t(p.Source), C.int32_t(p.Receiver)
	return C.HVD_SUCCESS
}

//export gohvdElasticJoin
func gohvdElasticJoin(flags C.uint32_t, handle *C.hvd_handle_t) C.hvd_status_t {
	return begun(process.JoinTraining(flags == C.HVD_LOOSE), handle)
}

//export gohvdElasticSynced
func gohvdElasticSynced(handle *C.hvd_handle_t) C.hvd_status_t {
	return begun(process.Synced(), handle)
}

//export gohvdElasticVote
func gohvdElasticVote(flags C.uint32_t, seconds C.double, handle *C.hvd_handle_t) C.hvd_status_t {
	limit, err := limitOf(seconds)
	if err != nil {
		return status(err)
	}
	about := commits.Changes
	switch {
	case flags&C.HVD_SAVED != 0:
		about = commits.Commit
	case flags&C.HVD_STEP != 0:
		about = commits.Step
	}
	h, err := process.Vote(about, elastic.Change(flags&(C.HVD_REMOVED|C.HVD_ADDED)), limit)
	if handle != nil {
		*handle = C.hvd_handle_t(h)
	}
	return status(err)
}

//export gohvdElasticEnd
func gohvdElasticEnd(training C.uint32_t, handle *C.hvd_handle_t) C.hvd_status_t {
	return begun(process.EndTraining(library.Outcome(training)), handle)
}

//export gohvdStartTimeline
func gohvdStartTimeline(path *C.char, markCycles C.int32_t) C.hvd_status_t {
	return status(process.StartTimeline(stringOf(path), markCycles != 0))
}

//export gohvdStopTimeline
func gohvdStopTimeline() C.hvd_status_t { return status(process.StopTimeline()) }

//export gohvdMarkStep
func gohvdMarkStep(number C.uint64_t) { process.MarkStep(uint64(number)) }

//export gohvdBeginRange
func gohvdBeginRange() C.uint64_t { return C.uint64_t(process.BeginRange()) }

//export gohvdEndRange
func gohvdEndRange(name *C.char, begun C.uint64_t) {
	process.EndRange(stringOf(name), time.Duration(min(begun, math.MaxInt64)))
}

//export gohvdMetrics
func gohvdMetrics(text **C.char) C.hvd_status_t {
	b, err := process.Metrics()
	return give(b, err, text)
}

//export gohvdDump
func gohvdDump(text **C.char) C.hvd_status_t {
	b, err := process.Dump()
	return give(b, err, text)
}

//export gohvdWhyNoDevices
func gohvdWhyNoDevices(text **C.char) C.hvd_status_t {
	why, err := process.WhyNoDevices()
	return give([]byte(why), err, text)
}

//export gohvdNextStall
func gohvdNextStall(text **C.char) C.hvd_status_t {
	b, err := process.NextStall()
	*text = nil
	if b == nil {
		return status(err)
	}
	return give(b, err, text)
}

//export gohvdStartNode
func gohvdStartNode(all **C.char, n C.uint32_t, handle *C.hvd_handle_t) C.hvd_status_t {
	settings, err := settingsOf("start", all, n)
	if err != nil {
		return status(err)
	}
	return begun(process.StartNode(settings), handle)
}

//export gohvdNode
func gohvdNode(into *C.hvd_node_t) C.hvd_status_t {
	n, err := process.Node("node")
	if err != nil {
		return status(err)
	}
	into.role, into.rank = C.uint32_t(n.Role()), C.int32_t(n.Rank())
	into.num_workers, into.num_servers = C.int32_t(n.NumWorkers()), C.int32_t(n.NumServers())
	return C.HVD_SUCCESS
}

//export gohvdServe
func gohvdServe(app C.int32_t, dtype C.uint32_t, handler *C.char, parameters *C.double,
	n C.uint32_t) C.hvd_status_t {
	started, err := process.Node("serve")
	if err != nil {
		return status(err)
	}
	var all []float64
	for _, p := range unsafe.Slice(parameters, int(n)) {
		all = append(all, float64(p))
	}
	return status(started.Serve(int(app), dtypeOf(dtype), stringOf(handler), all))
}

// dtypeOf converts the number of an element type, which may be unknown.
func dtypeOf(n C.uint32_t) tensor.DType { return tensor.DType(min(n, math.MaxUint8)) }

//export gohvdExchange
func gohvdExchange(x *C.hvd_exchange_t, handle *C.hvd_handle_t) C.hvd_status_t {
	const most = math.MaxInt64 / 8
	switch {
	case x.flags&^(C.HVD_PUSH|C.HVD_PULL|C.HVD_IN_SLICES) != 0:
		return status(misuse("exchange",
			"got the flags %#x, want HVD_PUSH, HVD_PULL or both, and perhaps HVD_IN_SLICES", uint32(x.flags)))
	case x.flags&C.HVD_IN_SLICES != 0 && handle == nil:
		return status(misuse("exchange", "got HVD_IN_SLICES and no place for the handle"))
	case x.num_keys > most || x.values_bytes > most || x.results_bytes > most:
		return status(misuse("exchange", "got memory that cannot exist"))
	case x.keys == nil && x.num_keys > 0, x.values == nil && x.values_bytes > 0,
		x.results == nil && x.results_bytes > 0:
		return status(misuse("exchange", "got a null pointer for the keys, the values or the results"))
	}
	h, err := process.Exchange(&node.Exchange{
		App: int(x.app), DType: dtypeOf(x.dtype),
		Push: x.flags&C.HVD_PUSH != 0, Pull: x.flags&C.HVD_PULL != 0,
		Keys:    unsafe.Slice((*uint64)(x.keys), int(x.num_keys)),
		Values:  unsafe.Slice((*byte)(x.values), int(x.values_bytes)),
		Results: unsafe.Slice((*byte)(x.results), int(x.results_bytes)),
		Command: int32(x.command), Priority: int32(x.priority),
	}, x.flags&C.HVD_IN_SLICES != 0)
	if err != nil {
		return status(err)
	}
	return begun(h, handle)
}

//export gohvdClock
func gohvdClock(handle *C.hvd_handle_t) C.hvd_status_t { return begun(process.Clock(), handle) }

//export gohvdBarrier
func gohvdBarrier(group C.int32_t, handle *C.hvd_handle_t) C.hvd_status_t {
	return begun(process.Barrier(int(group)), handle)
}

//export gohvdFinalize
func gohvdFinalize(barrier C.int32_t, handle *C.hvd_handle_t) C.hvd_status_t {
	return begun(process.Finalize(barrier != 0), handle)
}

//export gohvdFail
func gohvdFail(reason *C.char, handle *C.hvd_handle_t) C.hvd_status_t {
	text, err := failureOf("fail", reason)
	if err != nil {
		return status(err)
	}
	return begun(process.FailNode(text), handle)
}

//export gohvdVersion
func gohvdVersion() *C.char { return version }

// version is the version of gohvd. It is never freed.
var version = C.CString(config.Version())

func main() {}
