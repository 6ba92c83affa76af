//go:build mpi

package mpi

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	empi "github.com/emer/empi/mpi"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
)

// These tests run in every process of an MPI job, in the same order (TestWithMPI).

// job is the world of the tests.
var job *world

func TestMain(m *testing.M) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	given := os.Getenv("INITIALIZED") != ""
	if given {
		runtime.LockOSThread() // the thread that initializes MPI must finalize it
		if err := empi.InitThreadSafe(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	o := Options{SingleThread: os.Getenv("SINGLE_THREAD") != "", KeepThreads: os.Getenv("KEEP_THREADS") != ""}
	alone := os.Getenv("ALONE") != ""
	if alone {
		// MPI_COMM_SELF has this handle in Open MPI, or the other one in MPICH.
		o.Comm = new(int32(1))
		if strings.HasPrefix(libraryVersion(), "MPICH") {
			o.Comm = new(int32(0x44000001))
		}
	}
	w, err := Join(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	job = w.(*world)
	code := m.Run()
	// TestWithMPI sets GOMAXPROCS to 1.
	if n := runtime.GOMAXPROCS(0); o.KeepThreads != (n == 1) {
		fmt.Fprintf(os.Stderr, "got GOMAXPROCS %d\n", n)
		code = 1
	}
	if _, err := Join(ctx, Options{Comm: new(int32(0))}); err == nil || alone && w.Size() != 1 {
		fmt.Fprintf(os.Stderr, "got %d ranks and error %v from another communicator\n", w.Size(), err)
		code = 1
	}
	if err := w.Leave(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	var want error
	if !given {
		want = ErrFinalized
	}
	if _, err := Join(ctx, o); !errors.Is(err, want) {
		fmt.Fprintf(os.Stderr, "Join after Leave: got error %v, want %v\n", err, want)
		code = 1
	}
	if given {
		// MPI is still initialized, so the program can use it.
		if err := w.Broadcast(ctx, make([]byte, 8)); err != nil || !empi.IsOn() {
			fmt.Fprintln(os.Stderr, "Leave has finalized the MPI of the program:", err)
			code = 1
		}
		empi.Finalize()
	}
	os.Exit(code)
}

// open makes the backend of a process set with a limit on the elements of an MPI call. It returns nil if this
// rank is not a member.
func open(t *testing.T, ranks []topo.Rank, limit int64, steps bool) (*opstest.Blocking, int) {
	me := slices.Index(ranks, topo.Rank(job.Rank()))
	if me < 0 {
		return nil, me
	}
	b, err := job.Register(false, true).New(1, ranks, me)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	err = job.await(ctx, "making the process set", func() error {
		b.(*backend).comm.setLimit(limit)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return &opstest.Blocking{Backend: b, Steps: steps}, me
}

// cases calls f with process sets of all ranks and of every second rank, with small and large calls, and with
// steps that wait or do not wait.
func cases(t *testing.T, f func(t *testing.T, b *opstest.Blocking, n, me int)) {
	var even []topo.Rank
	for r := 0; r < job.Size(); r += 2 {
		even = append(even, topo.Rank(r))
	}
	for _, ranks := range [][]topo.Rank{topo.UpTo(job.Size()), even} {
		for _, limit := range []int64{1 << 30, 10} {
			for _, steps := range []bool{false, true} {
				t.Run(fmt.Sprintf("ranks=%v/limit=%d/steps=%v", ranks, limit, steps), func(t *testing.T) {
					if b, me := open(t, ranks, limit, steps); b != nil {
						f(t, b, len(ranks), me)
					}
				})
			}
		}
	}
}

var ctx = context.Background()

// Random operations have the results of a sequential reference.
func TestAtRandom(t *testing.T) {
	cases(t, func(t *testing.T, b *opstest.Blocking, n, me int) {
		x := opstest.Random{
			Seed: 1, Rounds: 200, // each process has the same seed
			Kinds: []message.Kind{message.Allreduce, message.Reduce, message.Reducescatter, message.Allgather,
				message.Broadcast, message.Alltoall, message.Gather, message.Scatter},
			Reductions: opstest.Reductions(), WideHalves: true, Sizes: []int{1, 7, 100, 1000},
		}
		if err := x.Run(ctx, b, me, n); err != nil {
			t.Fatal(err)
		}
	})
}

// An allreduce with the arguments of the one before it starts a persistent request. When no more of these may
// be made, the last one serves later allreduces with its arguments. A reduce in the same buffer changes
// nothing.
func TestRepeatedAllreduce(t *testing.T) {
	b, me := open(t, topo.UpTo(job.Size()), 1<<30, false)
	n, c := job.Size(), b.Backend.(*backend).comm.c
	if c.left == 0 && os.Getenv("CI") == "" {
		t.Skip("this MPI library has no persistent collectives, unlike Open MPI 4 and MPICH 4")
	}
	none := c.repeat
	c.left = 6
	for i, s := range []struct {
		dt     tensor.DType
		op     tensor.ReduceOp
		count  int
		starts bool // whether it starts a persistent request
	}{
		{tensor.Int32, tensor.Sum, 7, false},
		{tensor.Int32, tensor.Sum, 7, true},
		{tensor.Int32, tensor.Sum, 7, true},
		{tensor.Int32, tensor.Sum, 8, false},
		{tensor.Int32, tensor.Sum, 8, true},
		{tensor.Float32, tensor.Sum, 8, false},
		{tensor.Float16, tensor.Sum, 8, true}, // MPI reduces float32
		{tensor.Float32, tensor.Max, 8, false},
		{tensor.Float32, tensor.Max, 8, true},
		{tensor.Float32, tensor.Sum, 2000, false}, // uses another buffer
		{tensor.Float16, tensor.Sum, 2000, false}, // uses another buffer
		{tensor.Float32, tensor.Max, 8, true},
		{tensor.Float32, tensor.Sum, 1024, false},
		{tensor.Float16, tensor.Sum, 1024, true},
		{tensor.Uint8, tensor.Sum, 1, false},
		{tensor.Uint8, tensor.Sum, 1, true}, // makes the last one
		{tensor.Int8, tensor.Sum, 1, false},
		{tensor.Int8, tensor.Sum, 1, false},
		{tensor.Uint8, tensor.Sum, 1, true},
	} {
		one := make([]byte, 8)
		other := ops.Tensor{In: one, Out: one}
		if err := b.Reduce(ctx, message.NoAlgorithm, tensor.Int64, tensor.Max, 0, other); err != nil {
			t.Fatal(err)
		}
		result := n
		if s.op == tensor.Sum {
			result = n * (n + 1) / 2
		}
		buf := opstest.Encode(s.dt, slices.Repeat([]float64{float64(me + 1)}, s.count))
		want := opstest.Encode(s.dt, slices.Repeat([]float64{float64(result)}, s.count))
		if err := b.Allreduce(ctx, message.NoAlgorithm, s.dt, s.op, buf); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(buf, want) {
			t.Fatalf("%d: allreduce %v %v of %d elements: got %x, want %x", i, s.op, s.dt, s.count, buf, want)
		}
		// MPI sets a completed request to MPI_REQUEST_NULL unless it is persistent.
		if starts := *c.requests == c.repeat && c.repeat != none; starts != s.starts {
			t.Errorf("%d: started a persistent request: %v, want %v", i, starts, s.starts)
		}
	}
	if c.left != 0 {
		t.Errorf("%d more persistent requests may be made, want 0", c.left)
	}
}

// A NaN of any rank is in the minimum and the maximum, and -0 is less than +0.
func TestExtremesOfFloats(t *testing.T) {
	cases(t, func(t *testing.T, b *opstest.Blocking, n, me int) {
		for _, op := range []tensor.ReduceOp{tensor.Min, tensor.Max} {
			mine := []float32{1, 0, float32(me)}
			if me == n-1 {
				mine[0] = float32(math.NaN())
			}
			if me%2 == 1 {
				mine[1] = float32(math.Copysign(0, -1))
			}
			wide := []float64{float64(mine[0]), float64(mine[1]), float64(mine[2])}
			if err := errors.Join(
				b.Allreduce(ctx, message.NoAlgorithm, tensor.Float32, op, tensor.Bytes(mine)),
				b.Allreduce(ctx, message.NoAlgorithm, tensor.Float64, op, tensor.Bytes(wide))); err != nil {
				t.Fatal(err)
			}
			last := float64(n - 1)
			if op == tensor.Min {
				last = 0
			}
			negative := op == tensor.Min && n > 1
			for _, got := range [][]float64{wide, {float64(mine[0]), float64(mine[1]), float64(mine[2])}} {
				if !math.IsNaN(got[0]) || math.Signbit(got[1]) != negative || got[2] != last {
					t.Errorf("%v: got %v, want NaN, 0 (negative %v) and %v", op, got, negative, last)
				}
			}
		}
	})
}

// A gather fails if the head of any frame is malformed.
func TestMalformedHead(t *testing.T) {
	n := job.Size()
	c := &collectives{comm: job.comm, kind: gather, heads: make([]byte, n*headBytes),
		frames: make([][]byte, n)}
	binary.LittleEndian.PutUint32(c.heads, frameBytes+1)
	var p *transport.PeerError
	if err := c.findRests(); job.Rank() == 0 && (!errors.As(err, &p) || p.Peer != 0) {
		t.Errorf("got error %v, want one that names rank 0", err)
	}
}

// The collectives of the negotiation combine vectors, and pass frames of any length.
func TestCollectives(t *testing.T) {
	c := job.Collectives()
	n, me := job.Size(), job.Rank()
	await := func() [][]byte {
		t.Helper()
		for {
			if frames, done, err := c.Test(); done || err != nil {
				if err != nil {
					t.Fatal(err)
				}
				return frames
			}
			runtime.Gosched()
		}
	}
	frame := func(r, length int) []byte { return bytes.Repeat([]byte{byte(r + 1)}, length) }
	for _, length := range []int{0, 1, headBytes - lengthSize, headBytes - lengthSize + 1, 100000} {
		and, or := []uint64{^uint64(1 << me), 7}, []uint64{1 << me}
		c.AndOr(and, or)
		await()
		if all := uint64(1)<<n - 1; and[0] != ^all || and[1] != 7 || or[0] != all {
			t.Fatalf("got %x and %x", and, or)
		}
		c.Gather(frame(me, length*me))
		frames := await()
		for r, f := range frames {
			if !bytes.Equal(f, frame(r, length*r)) {
				t.Fatalf("length %d: got %d bytes from rank %d", length, len(f), r)
			}
		}
		if me == 0 && len(frames) != n || me > 0 && frames != nil {
			t.Fatalf("got %d frames", len(frames))
		}
		var own []byte
		if me == 0 {
			own = frame(0, length)
		}
		c.Broadcast(own)
		if frames := await(); len(frames) != 1 || !bytes.Equal(frames[0], frame(0, length)) {
			t.Fatalf("broadcast of %d bytes: got %d frames", length, len(frames))
		}
	}
}

// Vectors that grow with each process set leave little memory behind that stays pinned.
func TestVectorsGrow(t *testing.T) {
	c := job.Collectives().(*collectives)
	const most = 500
	left, last := 0, (*uint64)(nil)
	for n := 1; n <= most; n++ {
		for c.AndOr(make([]uint64, n), make([]uint64, n)); !c.Poll(); {
			runtime.Gosched()
		}
		if _, _, err := c.Test(); err != nil {
			t.Fatal(err)
		}
		if now := &c.vectors[0]; now != last {
			left, last = left+cap(c.vectors), now
		}
	}
	if left > 8*most {
		t.Errorf("got %d words in all vectors, want at most %d for vectors of %d words", left, 8*most, 2*most)
	}
}

// Operations of two process sets run at the same time, in any order. That is also so if they make and start
// persistent requests.
func TestSetsDoNotBlockEachOther(t *testing.T) {
	a, _ := open(t, topo.UpTo(job.Size()), 1<<30, false)
	b, me := open(t, topo.UpTo(job.Size()), 1<<30, false)
	first, second := a, b
	if me%2 == 1 {
		first, second = b, a
	}
	for range 3 {
		one, two := []int64{1}, []int64{1}
		for _, s := range []struct {
			b   *opstest.Blocking
			buf []int64
		}{{first, one}, {second, two}} {
			buf := tensor.Bytes(s.buf)
			if err := s.b.Start(ops.Operation{Kind: message.Allreduce, DType: tensor.Int64, Op: tensor.Sum,
				Tensors: []ops.Tensor{{In: buf, Out: buf}}}); err != nil {
				t.Fatal(err)
			}
		}
		// If a call of MPI blocked when Start was called, a later Step begins the operation. So both are
		// stepped in turn, as the engine does: a rank that only waited for the first one might never begin
		// the second one, for which another rank waits.
		for running := []*opstest.Blocking{first, second}; len(running) > 0; {
			running = slices.DeleteFunc(running, func(b *opstest.Blocking) bool {
				p, err := b.Step(ctx, false)
				if err != nil {
					t.Fatal(err)
				}
				return p == ops.Finished
			})
			runtime.Gosched()
		}
		if n := int64(job.Size()); one[0] != n || two[0] != n {
			t.Errorf("got %d and %d, want %d", one[0], two[0], n)
		}
	}
}

// A Go program can still recover from a nil pointer, because MPI has no handler for the signal.
func TestSignalsBelongToGo(t *testing.T) {
	defer func() {
		if _, ok := recover().(runtime.Error); !ok {
			t.Error("got no runtime error")
		}
	}()
	var p *int
	*p = 1
}

// A signal for which MPICH has a handler does not end the process if it arrives while a goroutine runs.
func TestSignalsOnGoroutines(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for range 100 {
		if err := unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGUSR1); err != nil {
			t.Fatal(err)
		}
	}
}

// In deterministic mode, the backend refuses sums and products of floats. It always refuses Adasum.
func TestPlan(t *testing.T) {
	for _, c := range []struct {
		deterministic bool
		dt            tensor.DType
		op            tensor.ReduceOp
		refused       bool
	}{
		{false, tensor.Float32, tensor.Sum, false}, {true, tensor.Float32, tensor.Sum, true},
		{true, tensor.Float16, tensor.Product, true}, {true, tensor.Float32, tensor.Max, false},
		{true, tensor.Int32, tensor.Sum, false}, {false, tensor.Float32, tensor.Adasum, true},
		{true, tensor.Float32, tensor.Average, true},
	} {
		r := &message.Response{Kind: message.Allreduce, DType: c.dt, Op: c.op}
		_, err := planner{c.deterministic}.plan(nil, r, 8, nil)
		if (err != nil) != c.refused {
			t.Errorf("%+v: got error %v", c, err)
		}
	}
}

// An operation allocates nothing, except an alltoall, which allocates its result.
func TestAllocations(t *testing.T) {
	b, _ := open(t, topo.UpTo(job.Size()), 1<<30, false)
	buf := make([]byte, 1024)
	one := []ops.Tensor{{In: buf, Out: buf}}
	op := ops.Operation{Kind: message.Allreduce, DType: tensor.Float16, Op: tensor.Sum, Tensors: one}
	if n := testing.AllocsPerRun(100, func() {
		if err := ops.Run(ctx, b.Backend, op); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("an allreduce allocates %v times", n)
	}
}

// A rank naps only if no call has moved data for a while, and then for a small part of that time.
func TestNaps(t *testing.T) {
	var n naps
	now := time.Now()
	for i, c := range []struct{ pause, call, want time.Duration }{
		{call: time.Microsecond},
		{call: eagerTime - time.Microsecond}, // moves data
		{pause: eagerTime - time.Microsecond},
		{pause: time.Microsecond, want: eagerTime / napsPerWait},
		{pause: 3 * eagerTime, want: 4 * eagerTime / napsPerWait},
		{call: workingCall},
		{pause: eagerTime - time.Microsecond},
		{pause: time.Second, want: longestNap},
	} {
		now = now.Add(c.pause + c.call)
		if got := n.after(now, c.call); got != c.want {
			t.Errorf("call %d: got a nap of %v, want %v", i, got, c.want)
		}
	}
}

// An error names the peer at fault if MPI tells it, and otherwise all ranks of the operation. No error names
// only this rank.
func TestErrorsNameRanks(t *testing.T) {
	n, me := job.Size(), job.Rank()
	switch {
	case n == 1:
		t.Skip("a single rank has no peers")
	case !job.own:
		t.Skip("the program has chosen that an error ends it")
	}
	last := n - 1
	fail := func(c comm, begin func() error) error {
		t.Helper()
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		tester := newTester(c)
		err := job.start(tester, begin)
		if err == nil {
			_, err = job.wait(ctx, tester, &shmem.Yielder{Stay: true})
		}
		return err
	}
	// MPI keeps the communicators, because it may still use them after an error.
	pair, all := newComm(topo.UpTo(job.Size()), 7), newComm(topo.UpTo(job.Size()), 8)
	job.change(7, func() error { return errors.Join(job.comm.sub(pair), job.comm.sub(all)) })
	small, large := pinned(t, 8), pinned(t, 64)

	// The last rank receives more than it expects from rank 0.
	var err error
	switch me {
	case 0:
		err = fail(pair, func() error { return pair.send(large, last) })
	case last:
		err = fail(pair, func() error { return pair.receive(small, 0) })
	}
	if p, ok := errors.AsType[*transport.PeerError](err); me == last && (!ok || p.Peer != 0) {
		t.Errorf("got error %v, want a *PeerError for rank 0", err)
	}

	// The other ranks expect less than rank 0 broadcasts.
	buf := small
	if me == 0 {
		buf = large
	}
	err = fail(all, func() error { return all.broadcast(buf, 0) })
	if me > 0 {
		u, ok := errors.AsType[*ops.UnknownRankError](err)
		if !ok || !slices.Equal(u.Ranks, topo.UpTo(job.Size())) ||
			!strings.Contains(err.Error(), "MPI does not tell which rank has failed") {
			t.Errorf("got error %v, want an *UnknownRankError for ranks %v", err, topo.UpTo(job.Size()))
		}
	}
}

// pinned returns memory that stays pinned.
func pinned(t *testing.T, n int) []byte {
	buf := make([]byte, n)
	pins := new(runtime.Pinner)
	t.Cleanup(pins.Unpin)
	pin(pins, buf)
	return buf
}

// failureVariable is set in the job of TestFailure.
const failureVariable = "TEST_FAILURE"

// A rank whose peers do not take part gets the error of its context. Afterwards every use of MPI fails at
// once.
func TestFailure(t *testing.T) {
	if os.Getenv(failureVariable) == "" {
		t.Skip("MPI cannot be used any more after a failure, so this test has a job of its own")
	}
	b, me := open(t, topo.UpTo(job.Size()), 1<<30, false)
	other, _ := open(t, topo.UpTo(job.Size()), 1<<30, false)
	if me > 0 {
		select {} // mpirun ends this process when rank 0 has ended
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 100*time.Millisecond, errors.New("the verdict"))
	defer cancel()
	buf := make([]byte, 8)
	err := b.Allreduce(ctx, message.NoAlgorithm, tensor.Int64, tensor.Sum, buf)
	if want := "ops/mpi: allreduce: the verdict"; err == nil || err.Error() != want {
		t.Errorf("got error %v, want %q", err, want)
	}
	for _, b := range []*opstest.Blocking{b, other} {
		if err := b.Broadcast(context.Background(), message.NoAlgorithm, 0, buf); err == nil {
			t.Error("an operation after the failure has succeeded")
		}
	}
	if err := job.Leave(context.Background()); err == nil {
		t.Error("Leave has succeeded after the failure")
	}
	exitAfterFailure(t)
}

// exitAfterFailure ends this process, and says whether the failure was handled.
func exitAfterFailure(t *testing.T) {
	if !t.Failed() {
		fmt.Println("the failure was handled")
	}
	os.Exit(3)
}

// If MPI fails after an operation and a collective of the negotiation have begun, each of them ends with the
// error of this failure, although earlier operations have completed. Afterwards nobody calls MPI.
func TestFailureElsewhere(t *testing.T) {
	if os.Getenv(failureVariable) == "" {
		t.Skip("MPI cannot be used any more after a failure, so this test has a job of its own")
	}
	b, me := open(t, topo.UpTo(job.Size()), 1<<30, false)
	buf := make([]byte, 8)
	if err := b.Allreduce(ctx, message.NoAlgorithm, tensor.Int64, tensor.Sum, buf); err != nil {
		t.Fatal(err)
	}
	c := job.Collectives()
	for c.Gather(make([]byte, 2*headBytes)); !c.Poll(); {
		runtime.Gosched()
	}
	if me > 0 {
		select {} // mpirun ends this process when rank 0 has ended
	}
	if err := b.Start(ops.Operation{Kind: message.Allreduce, DType: tensor.Int64, Op: tensor.Sum,
		Tensors: []ops.Tensor{{In: buf, Out: buf}}}); err != nil {
		t.Fatal(err)
	}
	failed := errors.New("an operation of another set has failed")
	job.Fail(failed)
	if p, err := b.Step(ctx, false); p != ops.Waiting || !errors.Is(err, failed) {
		t.Errorf("got progress %v and error %v, want %v and %v", p, err, ops.Waiting, failed)
	}
	if _, done, err := c.Test(); done || !errors.Is(err, failed) {
		t.Errorf("the gather is done: %v, with error %v, want false and %v", done, err, failed)
	}
	err := job.do(func() error { return errors.New("MPI was called") })
	if !errors.Is(err, failed) {
		t.Errorf("got error %v, want %v", err, failed)
	}
	// The runtime panics if nothing refers any more to the Pinner of memory that is still pinned.
	runtime.GC()
	ran := make(chan struct{})
	runtime.SetFinalizer(new([64]byte), func(*[64]byte) { close(ran) }) // runs after those of the first GC
	runtime.GC()
	select {
	case <-ran:
	case <-ctx.Done():
		t.Error("no finalizer has run")
	}
	exitAfterFailure(t)
}

// While a communicator is made, no call waits for it. Operations and collectives of the negotiation begin
// afterwards.
func TestNothingWaitsForCommunicator(t *testing.T) {
	b, me := open(t, topo.UpTo(job.Size()), 1<<30, false)
	made := make(chan struct{})
	job.change(2, func() error { <-made; return nil }) // as MPI_Comm_create_group does
	added, err := job.Register(false, true).New(2, topo.UpTo(job.Size()), me)
	if err != nil {
		t.Fatal(err)
	}
	defer added.Close()
	backends := []ops.Backend{b, added}
	sums := [][]int64{{1}, {1}}
	for i, b := range backends {
		buf := tensor.Bytes(sums[i])
		if err := b.Start(ops.Operation{Kind: message.Allreduce, DType: tensor.Int64, Op: tensor.Sum,
			Tensors: []ops.Tensor{{In: buf, Out: buf}}}); err != nil {
			t.Fatal(err)
		}
		if p, err := b.Step(ctx, false); p != ops.Waiting || err != nil {
			t.Fatalf("got progress %v and error %v, want %v", p, err, ops.Waiting)
		}
	}
	c, or := job.Collectives(), []uint64{1 << me}
	c.AndOr([]uint64{1}, or)
	if _, done, err := c.Test(); done || err != nil {
		t.Fatalf("the collective is done: %v, with error %v, want false", done, err)
	}
	close(made)
	for i, b := range backends {
		if p, err := b.Step(ctx, true); p != ops.Finished || err != nil || sums[i][0] != int64(job.Size()) {
			t.Errorf("got progress %v, error %v and sum %d, want %d", p, err, sums[i][0], job.Size())
		}
	}
	for done := false; !done && err == nil; _, done, err = c.Test() {
	}
	if all := uint64(1)<<job.Size() - 1; err != nil || or[0] != all {
		t.Errorf("got error %v and vector %x, want %x", err, or, all)
	}
}

// If a member does not take part in making a process set, the operations that wait for it end with their
// context.
func TestFailureToMakeSet(t *testing.T) {
	if os.Getenv(failureVariable) == "" {
		t.Skip("MPI cannot be used any more after a failure, so this test has a job of its own")
	}
	b, me := open(t, topo.UpTo(job.Size()), 1<<30, false)
	if me > 0 {
		select {} // mpirun ends this process when rank 0 has ended
	}
	added, err := job.Register(false, true).New(2, topo.UpTo(job.Size()), me)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []*opstest.Blocking{b, {Backend: added}} {
		ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		if err := b.Broadcast(ctx, message.NoAlgorithm, 0, make([]byte, 1<<20)); err == nil {
			t.Error("an operation has succeeded, but rank 1 has not taken part")
		}
	}
	added.Close()
	if err := job.Leave(context.Background()); err == nil {
		t.Error("Leave has succeeded after the failure")
	}
	exitAfterFailure(t)
}

// If a communicator cannot be freed, Leave reports it.
func TestFailureToFree(t *testing.T) {
	if os.Getenv(failureVariable) == "" {
		t.Skip("MPI cannot be used any more after a failure, so this test has a job of its own")
	}
	if !job.own {
		t.Skip("the program has chosen that an error ends it")
	}
	// The backend has no communicator.
	b := &backend{world: job, comm: newComm(topo.UpTo(job.Size()), 1), kept: new(runtime.Pinner)}
	b.Close()
	if err := job.Leave(ctx); err == nil || !strings.Contains(err.Error(), "process set 1: MPI_Comm_free: ") {
		t.Errorf("got error %v, want that of MPI_Comm_free", err)
	}
	exitAfterFailure(t)
}
