package exec

import (
	"errors"
	"testing"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// recording is a backend that records the operation that it is to start.
type recording struct {
	ops.Backend
	op ops.Operation
}

func (b *recording) Start(op ops.Operation) error {
	b.op = op
	return nil
}

// newMachine returns the machine of rank 0 of 2 with the backend, which takes lists or not.
func newMachine(t *testing.T, b *recording, lists func(message.Kind, message.Algorithm) bool) *machine {
	x := New(Config{Observer: unwatched{}, Pin: func() {}, Backends: ops.Registry{{
		ID: message.TCP, Lists: lists,
		New: func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) { return b, nil },
	}}})
	l, err := x.NewLane(controller.Global(2), 0)
	if err != nil {
		t.Fatal(err)
	}
	return &l.machine
}

// A backend that takes lists reads the tensor of a reducescatter where it is and writes the result to the
// output, so there is no copy of the whole tensor.
func TestReducescatterReadsTheTensor(t *testing.T) {
	for _, lists := range []bool{true, false} {
		b := new(recording)
		m := newMachine(t, b, func(message.Kind, message.Algorithm) bool { return lists })
		e := &tensorqueue.Entry{Input: make([]byte, 8), Output: make([]byte, 4)}
		r := &message.Response{Kind: message.Reducescatter, DType: tensor.Int32, Op: tensor.Average,
			Shape: tensor.Shape{2}, Prescale: 1, Postscale: 1}
		g := &controller.Grant{Backend: message.TCP, Responses: []*message.Response{r}}
		if err := m.start(&Work{Grant: g, Entries: []*tensorqueue.Entry{e}}); err != nil {
			t.Fatal(err)
		}
		reads := &b.op.Buf[0] == &e.Input[0]
		writes := len(b.op.Result) == 4 && &b.op.Result[0] == &e.Output[0]
		if scales := b.op.Scaling.Divisor == 2; reads != lists || writes != lists || scales != lists {
			t.Errorf("lists %t: the backend reads the input: %t, writes the output: %t, scales: %t", lists, reads,
				writes, scales)
		}
	}
}

// A turn executes a large allgather or broadcast only if no tensor has to be copied or allocated first,
// because no heartbeat leaves the rank during the first step.
func TestFirstStepOfATurnIsShort(t *testing.T) {
	m := newMachine(t, new(recording), ops.Always)
	for _, numBytes := range []int64{maxDriveBytes, maxDriveBytes + 1} {
		for _, test := range []struct {
			kind          message.Kind
			root          topo.Rank
			inPlace, fits bool
		}{
			{message.Allgather, 0, true, true},
			{message.Allgather, 0, false, false},
			{message.Broadcast, 0, true, true},
			{message.Broadcast, 0, false, false},
			{message.Broadcast, 1, false, true},
		} {
			r := &message.Response{Kind: test.kind, DType: tensor.Uint8, Op: tensor.Sum, Root: test.root,
				Shape: tensor.Shape{numBytes / 2}, FirstDims: []int64{numBytes / 2, numBytes - numBytes/2}}
			if test.kind == message.Broadcast {
				r.Shape = tensor.Shape{numBytes}
			}
			w := &Work{Grant: &controller.Grant{Backend: message.TCP, Responses: []*message.Response{r}},
				Entries: []*tensorqueue.Entry{{InPlace: test.inPlace}}}
			if got, want := m.fitsInTurn(w, true), test.fits || numBytes == maxDriveBytes; got != want {
				t.Errorf("%v of %d bytes, root %d, in place %t: got %t, want %t", test.kind, numBytes, test.root,
					test.inPlace, got, want)
			}
		}
	}
}

// The limit of the cgroup is for host memory, so a result on a device may be larger, unless it is copied.
func TestResultsOnDevicesHaveTheirOwnLimit(t *testing.T) {
	cfg := &Config{MaxResultBytes: 10, MaxDeviceBytes: 20}
	for numBytes, fits := range map[int64][2]bool{10: {true, true}, 11: {false, true}, 21: {false, false}} {
		for i, onDevice := range []bool{false, true} {
			if err := cfg.checkResult(message.Allgather, onDevice, numBytes); (err == nil) != fits[i] {
				t.Errorf("%d bytes, on a device %t: got error %v", numBytes, onDevice, err)
			}
		}
	}
}

// A group of several element types runs on the first backend that can run all of them.
func TestPlanOfSeveralTypes(t *testing.T) {
	without := func(id message.Backend, refused tensor.DType) ops.Registration {
		return ops.Registration{ID: id, Plan: func(_ []topo.Rank, r *message.Response, _ int64,
			_ *message.Tuning) (message.Algorithm, error) {
			if r.DType == refused {
				return message.NoAlgorithm, errors.New("not this type")
			}
			return message.Direct, nil
		}}
	}
	group := &message.Response{Kind: message.Allreduce,
		Parts: message.Parts{}.Append(tensor.Float32, tensor.Shape{2}).Append(tensor.Int32, tensor.Shape{2})}
	all := ops.Registry{without(message.MPI, tensor.Float32), without(message.SHM, tensor.Int32),
		without(message.TCP, tensor.Float64)}
	if got, _, err := planTypes(all, nil, group, 16, nil); got != message.TCP || err != nil {
		t.Errorf("got backend %v and error %v, want %v", got, err, message.TCP)
	}
	if got, _, err := planTypes(all[:2], nil, group, 16, nil); err == nil {
		t.Errorf("got backend %v, want an error, because none can run both types", got)
	}
}
