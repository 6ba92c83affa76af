package exec

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// unwatched is the observer of a rank without a timeline.
type unwatched struct{}

func (unwatched) Since() time.Duration { return 1 }

func (unwatched) Watched() bool { return false }

func (unwatched) Ended(*Work, error) {}

// unfinished is a backend that is in the middle of an operation. The operation waits for a rank that does not
// take part in it. It ends only when its context ends.
type unfinished struct {
	ops.Backend
	ended bool
}

func (b *unfinished) Start(ops.Operation) error { return nil }

func (b *unfinished) Step(ctx context.Context, _ bool) (ops.Progress, error) {
	<-ctx.Done()
	b.ended = true
	return ops.Waiting, context.Cause(ctx)
}

// If the epoch ends after an operation was started but before the lane executes it, the lane first ends the
// operation at the backend and then reports the results of the tensors. The order matters because peers may
// read the tensors until the backend has ended the operation.
func TestStartedWorkIsEndedBeforeItsAnswer(t *testing.T) {
	b := new(unfinished)
	m, err := ops.NewManager(
		ops.Registry{{ID: message.SHM, New: func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) {
			return b, nil
		}}},
		topo.Global, []topo.Rank{0, 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	l := &Lane{
		claimed: true, spawned: true, cfg: &Config{Observer: unwatched{}, Finished: func(*Work, error) {}},
	}
	l.machine = machine{set: controller.Global(2), manager: m, cfg: l.cfg}
	l.changed.L = &l.mu
	var answer error
	buf := make([]byte, 8)
	e := &tensorqueue.Entry{Input: buf, Output: buf, Done: func(err error) {
		if answer = err; !b.ended {
			t.Error("the tensor was answered before the backend had ended the operation")
		}
	}}
	e.Request = message.Request{Kind: message.Allreduce, Name: "x"}
	if err := tensorqueue.New().Add(e); err != nil {
		t.Fatal(err)
	}
	g := &controller.Grant{Backend: message.SHM, Responses: []*message.Response{{
		Kind: message.Allreduce, Name: "x", DType: tensor.Int64, Op: tensor.Sum, Shape: tensor.Shape{1},
		Prescale: 1, Postscale: 1,
	}}}
	ctx, cancel := context.WithCancelCause(t.Context())
	verdict := errors.New("rank 1 failed")
	// Create the state in which a lane can be at the end of an epoch.
	w := &Work{Grant: g, Entries: []*tensorqueue.Entry{e}}
	if err := l.machine.start(w); err != nil {
		t.Fatal(err)
	}
	l.unclaim(w)
	l.End(verdict)
	cancel(verdict)
	l.run(ctx)
	if !errors.Is(answer, verdict) {
		t.Errorf("answered with %v, want %v", answer, verdict)
	}
}

// broken is a backend that has lost a peer.
type broken struct{ ops.Backend }

func (broken) Start(ops.Operation) error { return nil }

func (broken) Step(context.Context, bool) (ops.Progress, error) {
	return ops.Waiting, errors.New("the peer is gone")
}

// If an operation on copies in host memory fails, another operation can get their memory only after the
// verdict, because until then other ranks may read it.
func TestCopiesStayUntilTheVerdict(t *testing.T) {
	m, err := ops.NewManager(
		ops.Registry{{ID: message.SHM, New: func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) {
			return broken{}, nil
		}}},
		topo.Global, []topo.Rank{0, 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	l := &Lane{
		claimed: true, spawned: true, cfg: &Config{Observer: unwatched{}, Devices: new(cuda.Devices)},
	}
	l.machine = machine{set: controller.Global(2), manager: m, cfg: l.cfg}
	l.changed.L = &l.mu
	onDevice, inHostMemory := make([]byte, 8), make([]byte, 4096)
	e := &tensorqueue.Entry{Input: inHostMemory[:8], Output: inHostMemory[:8], Done: func(error) {}}
	e.Request = message.Request{Kind: message.Broadcast, Name: "x"}
	if err := tensorqueue.New().Add(e); err != nil {
		t.Fatal(err)
	}
	w := &Work{
		Grant: &controller.Grant{Backend: message.SHM, Responses: []*message.Response{{
			Kind: message.Broadcast, Name: "x", DType: tensor.Int64, Shape: tensor.Shape{1},
			Devices: []tensor.Device{tensor.CUDA(0), tensor.CUDA(1)},
		}}},
		Entries: []*tensorqueue.Entry{e},
		inHost: inHost{memory: inHostMemory, inputs: []cuda.Copy{{From: onDevice}},
			outputs: []cuda.Copy{{To: onDevice}}, of: []int{0}},
	}
	if err := l.machine.start(w); err != nil {
		t.Fatal(err)
	}
	l.unclaim(w)
	l.cfg.Finished = func(*Work, error) {
		if w.inHost.memory == nil {
			t.Error("the copies were released before the verdict")
		}
		l.End(errors.New("rank 1 failed"))
	}
	l.run(t.Context())
	if w.inHost.memory != nil || &e.Input[0] != &onDevice[0] || &e.Output[0] != &onDevice[0] {
		t.Error("the copies were not released")
	}
}

// refusing is a backend that records the operation that it gets, and fails with its Err.
type refusing struct {
	ops.Backend
	got ops.DevicePart
}

func (b *refusing) Start(op ops.Operation) error {
	b.got = *op.Device
	return b.got.Err
}

// If a rank cannot run an operation on devices, the lane tells this to the backend, because the operations
// after it wait for it there.
func TestBackendLearnsOfRefusalOnDevices(t *testing.T) {
	b := new(refusing)
	m, err := ops.NewManager(
		ops.Registry{{ID: message.NCCL, Devices: true,
			New: func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) { return b, nil }}},
		topo.Global, []topo.Rank{0}, 0)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &Config{Observer: unwatched{}, MaxDeviceBytes: 7}
	l := &machine{set: controller.Global(1), manager: m, cfg: cfg}
	g := &controller.Grant{Backend: message.NCCL, Responses: []*message.Response{{
		Kind: message.Allgather, Name: "x", DType: tensor.Int64, Shape: tensor.Shape{0}, FirstDims: []int64{1},
		Devices: []tensor.Device{tensor.CUDA(0)},
	}}}
	buf := make([]byte, 8)
	err = l.start(&Work{Grant: g, Entries: []*tensorqueue.Entry{{Input: buf, Output: buf}}, Order: 3})
	if err == nil || b.got.Err != err || b.got.Order != 3 || b.got.Devices == nil {
		t.Errorf("got %v, and the backend got %+v", err, b.got)
	}
}

// While the lane has executed operations but has not reported their results, the loop can claim it with
// claim(false), but not with claim(true), which is for a barrier. While the lane executes an operation, both
// calls fail.
func TestClaimInOrder(t *testing.T) {
	l := &Lane{cfg: &Config{Observer: unwatched{}}, spawned: true}
	l.machine.cfg = l.cfg
	l.changed.L = &l.mu
	l.Push(&Work{})
	if w, err := l.next(); w == nil || err != nil {
		t.Fatalf("got %v and error %v, want the work", w, err)
	}
	claim := func(inOrder bool) bool {
		claimed := l.claim(inOrder)
		if claimed {
			l.unclaim(nil)
		}
		return claimed
	}
	if claim(false) || claim(true) {
		t.Error("the lane was claimed while it executes an operation")
	}
	l.executed()
	if claim(true) || !claim(false) {
		t.Error("while the lane answers: claim(true) succeeded, or claim(false) failed")
	}
	l.claim(false)
	g := &controller.Grant{Responses: []*message.Response{{Kind: message.Allreduce}}}
	l.machine.finish(&Work{Grant: g}, nil)
	l.unclaim(nil)
	if claim(true) {
		t.Error("claim(true) succeeded after the loop has answered its operation and before the lane has answered its own")
	}
	l.End(nil)
	l.next()
	l.closing = false
	if !claim(true) {
		t.Error("claim(true) failed after the lane has answered its operations")
	}
}

// When an operation that was launched has ended on its device, its time limit has no effect any more.
func TestLimitOfEndedOperation(t *testing.T) {
	l := &Lane{spawned: true, cfg: &Config{Finished: func(*Work, error) {}}, inFlight: 2}
	l.changed.L = &l.mu
	for _, err := range []error{nil, errors.New("no memory")} {
		w := &Work{finished: true} // its entries have completed
		l.setLimit(w, limit{"x", time.Second, time.Second})
		l.ended(w, err)
		if due := l.Expire(time.Hour, time.Second, func(name string, _ time.Duration) {
			t.Errorf("ended with %v: %q is late", err, name)
		}); due != controller.Never {
			t.Errorf("ended with %v: it is due in %v", err, due)
		}
	}
}

// failing is a backend whose operations fail with err.
type failing struct {
	ops.Backend
	err error
}

func (f failing) Step(context.Context, bool) (ops.Progress, error) { return ops.Waiting, f.err }

// If a device may still use the buffers of an operation that has failed, the error of the tensor says so,
// besides the verdict.
func TestFailedWhileInUse(t *testing.T) {
	for err, want := range map[error]string{
		errors.New("no memory"): "rank 2 failed",
		fmt.Errorf("no memory; %w", &ops.InUseError{Err: errors.New("device 1 is busy")}): "rank 2 failed; device 1 is busy",
	} {
		l := &Lane{spawned: true, cfg: &Config{Observer: unwatched{}}}
		l.machine.cfg = l.cfg
		l.changed.L = &l.mu
		var got error
		e := &tensorqueue.Entry{Request: message.Request{Kind: message.Allreduce, Name: "x"},
			Done: func(err error) { got = err }}
		if err := tensorqueue.New().Add(e); err != nil {
			t.Fatal(err)
		}
		l.machine.execution.backend = failing{err: err}
		l.todo = []*Work{{Grant: &controller.Grant{Responses: []*message.Response{{Kind: message.Allreduce}}},
			Entries: []*tensorqueue.Entry{e}, started: true}}
		l.cfg.Finished = func(*Work, error) { l.End(errors.New("rank 2 failed")) }
		l.run(t.Context())
		if got == nil || !strings.HasSuffix(got.Error(), want) {
			t.Errorf("%v: got %v, want an error that ends with %q", err, got, want)
		}
		if !errors.As(got, new(*ops.InUseError)) && strings.Contains(want, "busy") {
			t.Errorf("%v: got %v, which is no *ops.InUseError", err, got)
		}
	}
}

// launching is a backend whose operations go on on a device until the test ends them.
type launching struct {
	ops.Backend
	next      ops.Follower
	followers chan ops.Follower
}

func (b *launching) Start(op ops.Operation) error {
	b.next = op.Device.Follower
	return nil
}

func (b *launching) Step(context.Context, bool) (ops.Progress, error) {
	b.followers <- b.next
	return ops.Launched, nil
}

func (b *launching) Close() {}

// TestInFlight checks that a lane starts an operation before those on devices before it have ended, but a
// barrier only afterwards, and that operations that fail in flight end with the verdict.
func TestInFlight(t *testing.T) {
	b := &launching{followers: make(chan ops.Follower, 2)}
	answers := make(chan string, 8)
	var l *Lane
	x := New(Config{Observer: unwatched{}, Pin: func() {}, MaxResultBytes: 1 << 20,
		Finished: func(_ *Work, err error) {
			if err != nil {
				l.End(errors.New("rank 1 failed"))
			}
		},
		Backends: ops.Registry{{ID: message.NCCL, Lists: ops.Always, Devices: true,
			New: func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) { return b, nil }}}})
	l, err := x.NewLane(controller.Global(1), 0)
	if err != nil {
		t.Fatal(err)
	}
	push := func(name string, kind message.Kind) {
		buf := make([]byte, 8)
		e := &tensorqueue.Entry{Input: buf, Output: buf, Done: func(err error) {
			answers <- fmt.Sprint(name, " ", err)
		}}
		e.Request = message.Request{Kind: kind, Name: name}
		if err := tensorqueue.New().Add(e); err != nil {
			t.Fatal(err)
		}
		r := &message.Response{Kind: kind, Name: name, DType: tensor.Int64, Op: tensor.Sum,
			Shape: tensor.Shape{1}, Prescale: 1, Postscale: 1}
		if kind.MovesData() {
			r.Devices = []tensor.Device{tensor.CUDA(0)}
		}
		l.Push(&Work{Grant: &controller.Grant{Backend: message.NCCL, Responses: []*message.Response{r}},
			Entries: []*tensorqueue.Entry{e}})
	}
	want := func(want string) {
		t.Helper()
		if got := <-answers; !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	push("a", message.Allreduce)
	push("b", message.Allreduce)
	push("barrier", message.Barrier)
	first, second := <-b.followers, <-b.followers
	second.Ended(nil)
	want("b <nil>")
	if l.claim(true) {
		t.Error("the loop has claimed the lane for a barrier while an operation is in flight")
	}
	first.Ended(nil)
	want("a <nil>")
	want("barrier <nil>")

	push("c", message.Allreduce)
	push("d", message.Allreduce)
	first, second = <-b.followers, <-b.followers
	first.Ended(errors.New("the peer is gone"))
	want(`c hvd: allreduce "c": rank 1 failed`)
	second.Ended(errors.New("after an earlier failure"))
	want(`d hvd: allreduce "d": rank 1 failed`)
	x.Wait()
}
