package exec

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Work is a grant and the tensors of this rank that the grant names. The tensors are in the order of the
// grant's responses. The caller of StartInTurn or Push has set the exported fields, except Begun, Marks and
// Refused.
type Work struct {
	Grant   *controller.Grant
	Entries []*tensorqueue.Entry
	// Absent is set if this rank has joined. In this case it has no tensors and contributes neutral elements.
	Absent bool
	// Order is the number of the operation among those of this rank on devices.
	Order uint64
	// Granted and Begun are the times at which the work was granted and begun, counted from the engine's
	// start. If a timeline is on, Marks are the activities of the work so far.
	Granted, Begun time.Duration
	Marks          []Mark
	// Arrivals are the times at which the members' requests arrived at rank 0, ordered by tensor, then by
	// member. It is empty if the times are unknown.
	Arrivals []time.Duration
	// Refused holds an error for each tensor that fails while the operation completes for the other tensors.
	// A tensor fails if the ranks disagreed about it, or if this rank cannot store its result. Refused is
	// empty, or has one element for each entry.
	Refused []error

	// inHost has copies of the tensors if they are on devices and the backend needs them in host memory.
	inHost inHost
	// started is set if the operation was started and so must be finished. failed is set if the operation has
	// ended with an error. This error is reported for the tensors when the verdict is known.
	started, failed bool
	// cause is the error of an operation that has failed on a device after its launch.
	cause error
	// limit is the time limit if the entries have completed before the end of the operation. The lane's mutex
	// guards it.
	limit limit
	// on executes the work.
	on *machine
	// finished is set if the results of the tensors were reported, perhaps before the end of the operation.
	finished bool
	watching Observer // nil unless a timeline is on
}

// Mark is the beginning of an activity. The activity ends at the next mark.
type Mark struct {
	Activity ops.Activity
	At       time.Duration
}

// Reset makes w ready for another grant.
func (w *Work) Reset() {
	clear(w.Entries)
	clear(w.Refused)
	*w = Work{Entries: w.Entries[:0], Refused: w.Refused[:0], Marks: w.Marks[:0], Arrivals: w.Arrivals[:0]}
}

// begin records that w begins at the given time, or at the time of its grant if that is later.
func (w *Work) begin(at time.Duration, o Observer) {
	w.Begun, w.Marks = max(at, w.Granted), w.Marks[:0]
	w.watching = nil
	if o.Watched() {
		w.watching = o
	}
	for _, e := range w.Entries {
		e.Times.Begun.Store(int64(w.Begun))
	}
}

// enter records that an activity of w begins, if a timeline is on.
func (w *Work) enter(a ops.Activity) {
	if w.watching != nil {
		w.Marks = append(w.Marks, Mark{a, w.watching.Since()})
	}
}

// refuse makes tensor i end with err. The operation continues for the other tensors.
func (w *Work) refuse(i int, err error) {
	for len(w.Refused) < len(w.Entries) {
		w.Refused = append(w.Refused, nil)
	}
	w.Refused[i] = err
}

// follower is a Work as an ops.Follower.
type follower Work

func (f *follower) Launched() { f.on.launched((*Work)(f)) }

func (f *follower) Ended(err error) { f.on.ended((*Work)(f), err) }

// overtakes reports whether w may begin before the operations in flight have ended.
func (w *Work) overtakes() bool { return w.failed || w.Grant.Responses[0].Kind.MovesData() }

// OnDevices reports whether the backend gets the tensors of w on CUDA devices.
func (w *Work) OnDevices() bool {
	return w.Grant.Responses[0].Devices != nil && w.Grant.Backend == message.NCCL
}

// copied reports whether the tensors of w are on CUDA devices, but the backend gets them in host memory.
func (w *Work) copied() bool {
	return w.Grant.Responses[0].Devices != nil && w.Grant.Backend != message.NCCL
}

// allocates reports whether the program is to allocate an output of w on a device. The thread that does it
// gets another device and stream, and may wait for a lock of the program, which the program holds perhaps
// while it waits for w. So it must be neither the one that waits for w nor the one that runs the loop.
func (w *Work) allocates() bool {
	return w.OnDevices() && slices.ContainsFunc(w.Entries, func(e *tensorqueue.Entry) bool {
		return e.Allocate != nil && e.Output == nil
	})
}

// inHost has copies in host memory of the tensors of an operation.
type inHost struct {
	memory []byte
	device int
	// inputs has a copy from each input on the device, or from each part of an input. outputs has a copy to
	// each output or part of it, and of is the index of its entry.
	inputs, outputs []cuda.Copy
	of              []int
	// made are outputs that the program has allocated on the device when their sizes were known.
	made []madeOutput
}

// madeOutput is an output on a device, and a copy of it in host memory.
type madeOutput struct {
	entry        int
	memory, made []byte
}

// buffers calls f for the buffers of each tensor of w, with the index of its entry.
func (w *Work) buffers(f func(i int, in, out *[]byte)) {
	for i, e := range w.Entries {
		if len(e.Parts) == 0 {
			f(i, &e.Input, &e.Output)
		}
		for k := range e.Parts {
			f(i, &e.Parts[k].Input, &e.Parts[k].Output)
		}
	}
}
