//go:build nccl && cgo

package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/nccl"
	"github.com/gohvd/gohvd/ops/tcp"
)

// TestSlowAbort checks that an operation that has failed gives its buffers back when the device no longer
// writes to them, or else says that they must not be used. Rank 1's work goes on for a second after the abort
// and then writes to the output.
func TestSlowAbort(t *testing.T) {
	gaveUp := errors.New("the caller gave up")
	for name, timeout := range map[string]time.Duration{"in time": time.Minute, "too late": 100 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("STANDIN_NCCL_FAULT", "slow:1:2")
			if timeout < time.Second { // the test reads a buffer that is in use
				t.Setenv("STANDIN_CUDA_UNORDERED", "1")
			}
			all := cluster(t, 2)
			for _, m := range all {
				m.library.EndTimeout = timeout
			}
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancelAfterLaunch(t, all, func() { cancel(gaveUp) })()
			each(all, func(m *member) {
				buf := m.upload(tensor.Bytes(floats(m.me, 10)))
				m.check(m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
					Tensors: []ops.Tensor{{In: buf, Out: buf}}}))
				err := ops.Run(ctx, m.backend, ops.Operation{Kind: message.Allreduce, DType: tensor.Float32,
					Op: tensor.Sum, Device: &ops.DevicePart{Devices: m.devices, Order: m.order},
					Scaling: ops.Scaling{Pre: 1, Post: 1},
					Tensors: []ops.Tensor{{In: buf, Out: buf}}})
				if err == nil {
					t.Errorf("rank %d: the operation has not failed", m.me)
				}
				if m.me == 0 {
					return
				}
				before := m.download(buf)
				_, inUse := errors.AsType[*ops.InUseError](err)
				if late := timeout < time.Second; inUse != late {
					t.Errorf("got %v, says that the buffers are in use: %v, want %v", err, inUse, late)
				}
				if inUse {
					testnet.WantError(t, err, "device 1 may still use the buffers of the operation, which must not be used again",
						"NCCL has not ended its work 100ms after its communicator was aborted")
					testnet.WantError(t, m.library.Close(), "device 1: its work has not ended in 100ms")
				}
				m.library.EndTimeout = time.Minute
				testnet.Eventually(t, "the work on the device ends", func() bool {
					return slices.Max(m.download(buf)) == 0x5a
				})
				if !inUse && !slices.Equal(m.download(buf), before) {
					t.Error("the buffer was written after it was given back")
				}
			})
		})
	}
}

// cancelAfterLaunch calls cancel when all members have launched their second allreduce, so that a test
// depends on no time. The caller must call the returned function at the end.
func cancelAfterLaunch(t *testing.T, all []*member, cancel func()) (stop func()) {
	calls := testcuda.Calls(t)
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for calls("ncclAllReduce") < 2*len(all) {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
		cancel()
	})
	return func() {
		close(ended)
		wg.Wait()
	}
}

// follower is an ops.Follower that gets the results.
type follower chan error

func (follower) Launched() {}

func (f follower) Ended(err error) { f <- err }

// backendOf returns the backend of a process set that has only rank 0. Each device has two streams.
func backendOf(t *testing.T, l *nccl.Library, set topo.ProcessSetID) ops.Backend {
	t.Helper()
	b, err := l.Register(nccl.Config{Streams: 2, StartTimeout: time.Minute,
		Host: tcp.Register(mem.New(1).Mesh(0), tcp.Config{})}).New(set, []topo.Rank{0}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestAbortOfAllSets checks that a failure aborts the communicators of all process sets at once. Up to NCCL
// 2.21, ncclCommAbort waits for the work of all communicators on the device, so it does not return before the
// others are aborted too.
func TestAbortOfAllSets(t *testing.T) {
	defer time.AfterFunc(3*time.Minute, func() {
		panic("TestAbortOfAllSets: for 3 minutes, an operation has waited for the abort of another one")
	}).Stop() // the test cannot end by itself then: CUDA would wait for the operation when memory is freed
	t.Setenv("STANDIN_NCCL_VERSION", "22105")
	t.Setenv("STANDIN_NCCL_FAULT", "hang:0:1")
	l := load(t, 1)
	l.EndTimeout = 5 * time.Second
	d, err := l.CUDA.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	gaveUp := errors.New("the caller gave up")
	ctx, cancel := context.WithCancelCause(t.Context())
	var backends []ops.Backend
	ended := make(chan error, 2)
	for set := range 2 {
		b := backendOf(t, l, topo.ProcessSetID(set))
		backends = append(backends, b)
		buf, err := d.Alloc(8)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Free(buf)
		of := ctx
		if set == 1 {
			of = t.Context() // it learns of the failure only by the abort
		}
		err = b.Start(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
			Scaling: ops.Scaling{Pre: 1, Post: 1}, Tensors: []ops.Tensor{{In: buf, Out: buf}},
			Device: &ops.DevicePart{Devices: []tensor.Device{tensor.CUDA(0)}, Order: uint64(set),
				Follower: follower(ended)}})
		if err != nil {
			t.Fatal(err)
		}
		if p, err := b.Step(of, true); p != ops.Launched || err != nil {
			t.Fatalf("got %v and %v, want Launched", p, err)
		}
	}
	cancel(gaveUp)
	for range 2 {
		if err := <-ended; !errors.Is(err, gaveUp) || errors.As(err, new(*ops.InUseError)) {
			t.Errorf("got %v, want only %v", err, gaveUp)
		}
	}
	for _, b := range backends {
		b.Close()
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestCloseWithWork checks that Close does not free memory of a device if one of its streams still has work.
// It would wait for this work.
func TestCloseWithWork(t *testing.T) {
	const device = 5 // no other test uses it, because memory of it is not freed
	l := load(t, device+1)
	d, err := l.CUDA.Device(device)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := d.Alloc(8)
	if err != nil {
		t.Fatal(err)
	}
	held := filepath.Join(t.TempDir(), "held")
	ended := make(chan error, 2)
	for set := range 2 {
		b := backendOf(t, l, topo.ProcessSetID(set))
		defer b.Close()
		if set == 1 {
			t.Setenv("STANDIN_CUDA_HOLD", held)
		}
		// Two tensors need the memory that Close frees.
		err := b.Start(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
			Scaling: ops.Scaling{Pre: 1, Post: 1},
			Tensors: []ops.Tensor{{In: buf[:4], Out: buf[:4]}, {In: buf[4:], Out: buf[4:]}},
			Device: &ops.DevicePart{Devices: []tensor.Device{tensor.CUDA(device)}, Order: uint64(set),
				Follower: follower(ended)}})
		if err != nil {
			t.Fatal(err)
		}
		if p, err := b.Step(t.Context(), true); p != ops.Launched || err != nil {
			t.Fatalf("got %v and %v, want Launched", p, err)
		}
		if set == 0 {
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
		}
	}
	l.EndTimeout = 100 * time.Millisecond
	l.Fail(errors.New("the job has failed"))
	if _, inUse := errors.AsType[*ops.InUseError](<-ended); !inUse {
		t.Error("the operation has ended")
	}
	closed := make(chan error, 1)
	go func() { closed <- l.Close() }()
	select {
	case err := <-closed:
		testnet.WantError(t, err, "device 5: its work has not ended in 100ms")
	case <-time.After(time.Minute):
		t.Error("Close waits for the work")
	}
	testnet.WriteFile(t, held, "")
	if err := d.Free(buf); err != nil { // waits for the work
		t.Error(err)
	}
}

// TestConnectTimeout checks that the ranks do not wait without limit if NCCL cannot connect them.
func TestConnectTimeout(t *testing.T) {
	t.Setenv("STANDIN_NCCL_FAULT", "init:1")
	t.Setenv("STANDIN_NCCL_INIT_SECONDS", "3") // Close waits for it
	all := clusterOf(t, 2, 200*time.Millisecond)
	each(all, func(m *member) {
		buf := m.upload(tensor.Bytes(floats(m.me, 10)))
		err := m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
			Tensors: []ops.Tensor{{In: buf, Out: buf}}})
		testnet.WantError(t, err, "ops/nccl: allreduce: NCCL has not connected the ranks in 200ms "+
			"(HOROVOD_GLOO_TIMEOUT_SECONDS): NCCL_SOCKET_IFNAME selects the network interface")
		if unknown, ok := errors.AsType[*ops.UnknownRankError](err); !ok || len(unknown.Ranks) != 2 {
			t.Errorf("rank %d: got %v, want an error that suspects both ranks", m.me, err)
		}
	})
}

// TestCloseAlone checks that Close does not wait without limit for a rank that does not close.
func TestCloseAlone(t *testing.T) {
	all := cluster(t, 2)
	allreduce := func(m *member) {
		buf := m.upload(tensor.Bytes(floats(m.me, 10)))
		m.check(m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
			Tensors: []ops.Tensor{{In: buf, Out: buf}}}))
	}
	each(all, allreduce)
	all[0].library.EndTimeout = 100 * time.Millisecond
	all[0].backend.Close()
}

// TestCloseAfterFailure checks that Close does not wait for the other ranks if the job has failed.
func TestCloseAfterFailure(t *testing.T) {
	all := cluster(t, 2)
	each(all, func(m *member) {
		buf := m.upload(tensor.Bytes(floats(m.me, 10)))
		m.check(m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
			Tensors: []ops.Tensor{{In: buf, Out: buf}}}))
	})
	all[0].library.EndTimeout = time.Hour
	all[0].library.Fail(errors.New("rank 1 failed"))
	all[0].backend.Close()
}

// TestContexts checks that a communicator is ended without a context on another device than its own, whether
// it is destroyed or aborted. Each way runs in a process of its own, because contexts are never given back.
func TestContexts(t *testing.T) {
	const variable = "END_OF_COMMUNICATOR"
	if way := os.Getenv(variable); way != "" {
		l := load(t, 2)
		b := backendOf(t, l, 0)
		err := ops.Run(t.Context(), b, ops.Operation{Kind: message.Allreduce, DType: tensor.Float32,
			Op: tensor.Sum, Scaling: ops.Scaling{Pre: 1, Post: 1}, Tensors: []ops.Tensor{{}},
			Device: &ops.DevicePart{Devices: []tensor.Device{tensor.CUDA(1)}}})
		if err != nil {
			t.Error(err)
		}
		if way == "abort" {
			l.Fail(errors.New("the job has failed"))
		}
		b.Close()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		return
	}
	for _, way := range []string{"destroy", "abort"} {
		calls := testcuda.Calls(t)
		cmd := exec.Command(os.Args[0], "-test.run", "TestContexts$")
		cmd.Env = append(os.Environ(), variable+"="+way)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", way, err, out)
		}
		if calls("context 0") != 0 || calls("context 1") != 1 {
			t.Errorf("%s: got %d contexts on device 0 and %d on device 1, want 0 and 1", way,
				calls("context 0"), calls("context 1"))
		}
	}
}

// TestBufferGrows checks that a larger buffer for packed tensors frees no memory, because that would wait for
// all other work of the device.
func TestBufferGrows(t *testing.T) {
	m := cluster(t, 1)[0]
	calls := testcuda.Calls(t)
	for _, n := range []int{1000, 1 << 20, 2 << 20} {
		one, two := m.alloc(n), m.alloc(n)
		m.check(m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Uint8, Op: tensor.Max,
			Tensors: []ops.Tensor{{In: one, Out: one}, {In: two, Out: two}}}))
	}
	if n := calls("cudaFree"); n != 0 {
		t.Errorf("the operations have freed memory %d times", n)
	}
}

// TestBufferWithoutRoom checks that the buffer for packed tensors grows to the size that is needed if the
// device has no room for twice its former size.
func TestBufferWithoutRoom(t *testing.T) {
	const mib = 1 << 20
	t.Setenv("STANDIN_CUDA_MEMORY_BYTES", fmt.Sprint((6+4+6+1)*mib))
	m := cluster(t, 1)[0]
	one, two := m.alloc(2*mib), m.alloc(4*mib)
	for _, n := range []int{2 * mib, 4 * mib} {
		m.check(m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Uint8, Op: tensor.Max,
			Tensors: []ops.Tensor{{In: one, Out: one}, {In: two[:n], Out: two[:n]}}}))
	}
}

// TestReserved checks that the buffer for fused tensors exists before the program takes the rest of the
// memory, and that the error of an operation that needs more says what to do.
func TestReserved(t *testing.T) {
	const mib = 1 << 20
	t.Setenv("STANDIN_CUDA_MEMORY_BYTES", fmt.Sprint((4+4+8)*mib+mib/2))
	fusionBytes = 4 * mib
	defer func() { fusionBytes = 0 }()
	m := cluster(t, 1)[0]
	one, two := m.alloc(2*mib), m.alloc(2*mib)
	reduce := func(a, b []byte) error {
		return m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Uint8, Op: tensor.Max,
			Tensors: []ops.Tensor{{In: a, Out: a}, {In: b, Out: b}}})
	}
	m.check(reduce(one[:4], two[:4]))
	rest := m.alloc(8 * mib)
	m.check(reduce(one, two))
	testnet.WantError(t, reduce(one, rest), "10485760 bytes on device 0, for the tensors of a launch")
}

// TestNonblocking checks the error if a variable of NCCL makes communicators nonblocking.
func TestNonblocking(t *testing.T) {
	t.Setenv("NCCL_COMM_BLOCKING", "0")
	m := cluster(t, 1)[0]
	buf := m.alloc(4)
	testnet.WantError(t, m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
		Tensors: []ops.Tensor{{In: buf, Out: buf}}}), "unset NCCL_COMM_BLOCKING")
}

// TestRefusedOrder checks that an operation fails if this rank cannot run one that comes before it, even of
// another process set, instead of waiting for it.
func TestRefusedOrder(t *testing.T) {
	all := cluster(t, 1)
	m, refusal := all[0], errors.New("the rank cannot run it")
	other := backendOf(t, m.library, 1)
	defer other.Close()
	op := ops.Operation{Kind: message.Broadcast, Device: &ops.DevicePart{Devices: m.devices, Err: refusal}}
	if err := other.Start(op); !errors.Is(err, refusal) {
		t.Errorf("got %v, want %v", err, refusal)
	}
	m.order = 1
	buf := m.alloc(4)
	err := m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
		Tensors: []ops.Tensor{{In: buf, Out: buf}}})
	testnet.WantError(t, err, "after an earlier failure: ops/nccl: broadcast: the rank cannot run it")
}

// TestParts checks that the parts of an operation follow each other on the device, without a wait for the end
// of each, and that the last one ends after all of them.
func TestParts(t *testing.T) {
	m := cluster(t, 1)[0]
	t.Setenv("STANDIN_CUDA_DELAY_US", "3000000")
	slow, err := m.device.NewStream()
	m.check(err)
	end, err := m.device.NewEvent()
	m.check(err)
	t.Setenv("STANDIN_CUDA_DELAY_US", "200")
	one, two := m.alloc(40), m.upload(tensor.Bytes(floats(1, 10)))
	three := m.upload(tensor.Bytes(floats(2, 10)))
	m.check(end.Record(slow))
	op := ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
		Device:  &ops.DevicePart{More: true, Ready: []*cuda.Event{end}},
		Tensors: []ops.Tensor{{In: two, Out: one}, {In: three, Out: three}}}
	m.check(m.run(op))
	if done, err := end.Query(); done || err != nil {
		t.Errorf("the first part has waited for the device: %v", err)
	}
	m.order--
	op.Device.More, op.Tensors = false, []ops.Tensor{{In: one, Out: one}, {In: two, Out: two}}
	m.check(m.run(op))
	if done, err := end.Query(); !done || err != nil {
		t.Errorf("the operation has not waited for the device: %v", err)
	}
	m.equal("the first part", one, floats(1, 10))
	m.equal("the first part", three, floats(2, 10))
	m.check(slow.Close())
	m.check(end.Close())
}

// TestStepDoesNotBlock checks that an operation runs only in calls of Step that may wait.
func TestStepDoesNotBlock(t *testing.T) {
	m := cluster(t, 1)[0]
	buf := m.upload(tensor.Bytes(floats(0, 10)))
	if err := m.backend.Start(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
		Device: &ops.DevicePart{Devices: m.devices}, Scaling: ops.Scaling{Pre: 2, Post: 1},
		Tensors: []ops.Tensor{{In: buf, Out: buf}}}); err != nil {
		t.Fatal(err)
	}
	if p, err := m.backend.Step(t.Context(), false); p != ops.Blocked || err != nil {
		t.Errorf("without waiting: got %v and %v, want Blocked", p, err)
	}
	m.equal("before", buf, floats(0, 10))
	if p, err := m.backend.Step(t.Context(), true); p != ops.Finished || err != nil {
		t.Errorf("got %v and %v, want Finished", p, err)
	}
	if got := tensor.View[float32](m.download(buf)); got[1] != 2*floats(0, 10)[1] {
		t.Errorf("got %v, want twice %v", got, floats(0, 10))
	}
}
