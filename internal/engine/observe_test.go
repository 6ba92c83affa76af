package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/tensorqueue"
)

// log is a Recorder and a Timeline that keeps everything it receives.
type log struct {
	mu      sync.Mutex
	ops     []trace.Operation
	cycles  int
	offsets []trace.Offset
	tunings []message.Tuning
	aligned func() // called after each offset is recorded, unless it is nil
}

func (l *log) Record(op *trace.Operation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := *op
	o.Records, o.Activities = slices.Clone(op.Records), slices.Clone(op.Activities)
	o.Arrivals = slices.Clone(op.Arrivals)
	l.ops = append(l.ops, o)
}

func (l *log) Cycle(time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cycles++
}

func (l *log) Span(trace.Span) {}

func (l *log) Step(time.Duration, uint64) {}

func (l *log) Tuned(_ time.Duration, v *message.Tuning) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tunings = append(l.tunings, *v)
}

func (l *log) Offset(o trace.Offset) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.offsets = append(l.offsets, o)
	if l.aligned != nil {
		l.aligned()
	}
}

// operations returns the records in the order in which the operations ended.
func (l *log) operations() []trace.Operation {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.ops)
}

// Every tensor is recorded before its result is reported. The times in each record are in order. Each
// operation has the same number at all ranks.
func TestOperationsAreTold(t *testing.T) {
	const n, steps = 3, 30
	recorded := func(t *testing.T, lockstep bool) {
		recorders, timelines, others := make([]log, n), make([]log, n), make([]log, n)
		c := startOn(t, mem.New(n), n, func(cfg *engine.Config) {
			cfg.Lockstep = lockstep
			cfg.Recorder = &recorders[cfg.Rank]
		})
		c.each(func(r int) {
			c.engines[r].Observer().Watch(&timelines[r])
			c.engines[r].Observer().Watch(&others[r])
		})
		c.each(func(r int) {
			for step := range steps {
				entries := []*tensorqueue.Entry{sum("a", make([]byte, 80)), sum("b", make([]byte, 8)), {
					Request: message.Request{Kind: message.Barrier, Name: fmt.Sprint("barrier", step)},
				}}
				if step == 7 {
					entries = append(entries, sum("mismatch", make([]byte, 8*(r+1))))
				}
				done := c.submit(r, entries...)
				refused := 0
				for range entries {
					var mismatch *engine.MismatchError
					if err := c.wait(done); errors.As(err, &mismatch) {
						refused++
					} else if err != nil {
						t.Error(err)
						return
					}
				}
				if want := len(entries) - 3; refused != want {
					t.Errorf("%d refused, want %d", refused, want)
				}
				// Records are made before results are reported, so every tensor with a result must have a
				// record.
				seen := 0
				for _, op := range recorders[r].operations() {
					seen += len(op.Records)
				}
				if want := 3*(step+1) + min(step/7, 1); seen != want {
					t.Errorf("rank %d received records of %d tensors, want %d", r, seen, want)
					return
				}
			}
		})
		type key struct {
			name string
			i    int
		}
		numbers := make(map[key]uint64)
		for r := range n {
			times := make(map[string]int)
			for _, op := range recorders[r].operations() {
				checkOperation(t, r, &op)
				for i := range op.Records {
					tensor := &op.Records[i]
					k := key{tensor.Name, times[tensor.Name]}
					times[tensor.Name]++
					if r == 0 {
						numbers[k] = tensor.Number
					} else if numbers[k] != tensor.Number {
						t.Errorf("%v is in operation %d at rank 0 and in %d at rank %d", k, numbers[k],
							tensor.Number, r)
					}
					if cached := k.i > 0; tensor.Cached != cached {
						t.Errorf("rank %d: %v is cached: %v", r, k, tensor.Cached)
					}
					if refused := tensor.Name == "mismatch"; tensor.Refused != refused {
						t.Errorf("rank %d: %v is refused with %q", r, k, tensor.Error)
					}
					want := 0
					if r == 0 {
						want = n
					}
					if k.i > 2 && (len(op.ArrivalsOf(i)) != want || slices.Contains(op.ArrivalsOf(i), 0)) {
						t.Errorf("rank %d: %v has arrivals %v, want %d", r, k, op.ArrivalsOf(i), want)
					}
				}
			}
			if times["a"] != steps || times["b"] != steps {
				t.Errorf("rank %d received records of %v", r, times)
			}
			if len(timelines[r].operations()) == 0 || timelines[r].cycles == 0 {
				t.Errorf("rank %d: the timeline received records of %d operations and %d cycles", r,
					len(timelines[r].ops), timelines[r].cycles)
			}
			st := c.engines[r].Stats()
			if st.CacheHits != 2*(steps-1) || st.CacheMisses != steps+3 || st.Refused != 1 ||
				st.Negotiation.Count() != 3*steps+1 ||
				st.InFlight != 0 || st.Size != n || st.Rank != r {
				t.Errorf("rank %d: stats are %+v", r, st)
			}
		}
		// Several timelines can be on. One that is switched off receives nothing more.
		c.each(func(r int) {
			n := len(timelines[r].operations())
			c.engines[r].Observer().Unwatch(&timelines[r])
			c.succeeds(c.submit(r, sum("later", make([]byte, 8))))
			off, on := timelines[r].operations(), others[r].operations()
			if len(off) != n || len(on) != n+1 || on[n].Records[0].Name != "later" {
				t.Errorf("rank %d: the timeline that is off received %d further operations, the other one %d, want 0 and 1",
					r, len(off)-n, len(on)-n)
			}
		})
		c.shutdown()
	}
	both(t, recorded)
}

func checkOperation(t *testing.T, rank int, op *trace.Operation) {
	t.Helper()
	whole := &op.Records[0]
	at := whole.Begun
	for _, a := range op.Activities {
		if a.Name == "" || a.Begun < at || a.End < a.Begun || a.End > whole.Ended {
			t.Errorf("rank %d: operation %d from %v to %v has %+v", rank, whole.Number, whole.Begun, whole.Ended,
				op.Activities)
		}
		at = a.End
	}
	if whole.Kind == message.Allreduce && !whole.Refused && len(op.Activities) == 0 && whole.Number > 20 {
		t.Errorf("rank %d: operation %d has no activities, although a timeline is on", rank, whole.Number)
	}
	for i := range op.Records {
		x := &op.Records[i]
		if !(0 < x.Submitted && x.Submitted <= x.Sent && x.Sent <= x.Granted && x.Granted <= x.Begun &&
			x.Begun <= x.Ended) {
			t.Errorf("rank %d: %s was submitted at %v, sent at %v, granted at %v, begun at %v, ended at %v",
				rank, x.Name, x.Submitted, x.Sent, x.Granted, x.Begun, x.Ended)
		}
		if x.Kind == message.Allreduce && (x.DType != tensor.Int64 || x.Bytes != x.Shape[0]*8) {
			t.Errorf("rank %d: %s is %v%v of %d bytes", rank, x.Name, x.DType, x.Shape, x.Bytes)
		}
	}
}

// While an operation waits for another rank, Pending returns it, at first without and later with the time at
// which its request was sent. Pending does not return operations that have ended.
func TestPending(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
		first := c.allreduce(0, "w", make([]byte, 16))
		for {
			p := c.engines[0].Pending()
			if len(p) != 1 || p[0].Name != "w" || p[0].Kind != message.Allreduce || p[0].Submitted <= 0 ||
				p[0].Granted != 0 || p[0].Begun != 0 {
				t.Fatalf("pending are %+v", p)
			}
			if p[0].Sent >= p[0].Submitted {
				break
			}
			if err := c.ctx.Err(); err != nil {
				t.Fatal("it is not sent")
			}
		}
		if p := c.engines[1].Pending(); len(p) != 0 {
			t.Errorf("at rank 1 are pending %+v", p)
		}
		second := c.allreduce(1, "w", make([]byte, 16))
		if err := errors.Join(c.wait(first), c.wait(second)); err != nil {
			t.Error(err)
		}
		if p := c.engines[0].Pending(); len(p) != 0 {
			t.Errorf("in the end are pending %+v", p)
		}
		c.shutdown()
	})
}

// looker is a Recorder. It calls Pending when an operation has ended but before its results are reported, and
// stores what Pending returns.
type looker struct {
	engine atomic.Pointer[engine.Engine]
	saw    []trace.Record
}

func (l *looker) Record(*trace.Operation) {
	if e := l.engine.Load(); e != nil {
		l.saw = append(l.saw, e.Pending()...)
	}
}

// If an operation was granted, Pending also returns the number of the grant and the backend.
func TestPendingInAnOperation(t *testing.T) {
	var l looker
	c := start(t, 2, func(cfg *engine.Config) {
		if cfg.Rank == 0 {
			cfg.Recorder = &l
		}
	})
	l.engine.Store(c.engines[0])
	for range 2 {
		c.each(func(r int) {
			c.succeeds(c.allreduce(r, "w", make([]byte, 16)))
		})
	}
	c.shutdown()
	if len(l.saw) != 2 {
		t.Fatalf("saw %+v", l.saw)
	}
	for i, p := range l.saw {
		if p.Number != uint64(i+1) || p.Backend != message.TCP ||
			!(0 < p.Sent && p.Sent <= p.Granted && p.Granted <= p.Begun) {
			t.Errorf("operation %d was pending as %+v", i+1, p)
		}
	}
}

// If the ranks read different clocks, the reported error of a measured offset is at least as large as the
// actual error. If they read the same clock, the offset is exact.
func TestClocks(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		for _, same := range []bool{false, true} {
			const n = 3
			logs := make([]log, n)
			c := start(t, n, func(cfg *engine.Config) {
				cfg.Lockstep = lockstep
				if !same {
					cfg.ClockDomain = fmt.Sprint(cfg.Rank)
				}
				// Start the engines at different times, so that their clocks differ.
				<-time.After(time.Duration(cfg.Rank) * 20 * time.Millisecond)
			})
			c.each(func(r int) {
				e := c.engines[r]
				aligned := make(chan struct{})
				logs[r].aligned = sync.OnceFunc(func() { close(aligned) })
				e.Observer().Watch(&logs[r])
				select {
				case <-aligned:
				case <-c.ctx.Done():
					t.Errorf("rank %d: no measurement of the clock", r)
				}
				o, _ := e.Observer().Offset()
				// All engines use the clock of this process, so the true offset is known.
				truth := e.Clock().Start.Sub(c.engines[0].Clock().Start)
				off := (o.Offset - truth).Abs()
				if exact := same || r == 0; exact != (o.Error == 0) || !exact && off > o.Error ||
					exact && off > time.Millisecond {
					t.Errorf("rank %d, one domain: %v: the clock is %v off by %v, within %v", r, same,
						o.Offset, off, o.Error)
				}
			})
			c.shutdown()
		}
	})
}

// If an operation ends because the job fails, Stats.Failed counts it.
func TestFailedOperationsAreTold(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		const n = 3
		logs := make([]log, n)
		c := start(t, n, func(cfg *engine.Config) { cfg.Lockstep, cfg.Recorder = lockstep, &logs[cfg.Rank] })
		waits := c.allreduce(0, "waits", make([]byte, 8))
		c.engines[2].Close()
		if err := c.wait(waits); err == nil {
			t.Error("it succeeded")
		}
		if st := c.engines[0].Stats(); st.Failed != 1 {
			t.Errorf("%d failed, want 1", st.Failed)
		}
		c.each(func(r int) { c.engines[r].Close() })
	})
}

// If the ranks disagree about a tensor, Stats counts the tensor once as refused and does not count its bytes.
// If an operation ends because of a shutdown, Stats counts it once as failed.
func TestCounts(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep, cfg.FusionThresholdBytes = lockstep, 64 })
		c.each(func(r int) {
			var mismatch *engine.MismatchError
			if err := c.wait(c.allreduce(r, "bad", make([]byte, 8+8*r))); !errors.As(err, &mismatch) {
				t.Errorf("got %v, want a mismatch", err)
			}
			c.succeeds(c.allreduce(r, "large", make([]byte, 800)))
		})
		left := c.allreduce(0, "left", make([]byte, 8))
		// Ignore errors: a Shutdown fails if rank 1 leaves first.
		c.each(func(r int) { _ = c.engines[r].Shutdown(c.ctx, engine.Departure{}) })
		if err := c.wait(left); !errors.Is(err, engine.ErrShutDown) {
			t.Errorf("got error %v, want ErrShutDown", err)
		}
		for r := range 2 {
			st := c.engines[r].Stats()
			if st.Refused != 1 || st.Failed != uint64(1-r) || st.FusionResponses != 1 ||
				st.FusedBytes != 64 || len(st.Moved) != 1 ||
				st.Moved[0].Bytes != 800 || len(st.Operations) != 1 || st.Operations[0].Tensors != 1 {
				t.Errorf("rank %d: %+v", r, st)
			}
		}
	})
}

// If a group is one request, Stats counts each tensor of the group, and counts the bytes by element type. In
// the record of the group, Parts is the number of its tensors.
func TestGroupsAreTold(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		logs := make([]log, 2)
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep, cfg.Recorder = lockstep, &logs[cfg.Rank] })
		c.each(func(r int) {
			for _, types := range [][]tensor.DType{{tensor.Int64, tensor.Int64},
				{tensor.Int64, tensor.Int8, tensor.Int64}} {
				c.succeeds(c.submit(r, group(types...)))
			}
		})
		c.each(func(r int) {
			var mismatch *engine.MismatchError
			if err := c.wait(c.submit(r, group([]tensor.DType{tensor.Int8, tensor.Uint8}[r],
				tensor.Int8))); !errors.As(err, &mismatch) {
				t.Errorf("got %v, want a mismatch", err)
			}
		})
		left := c.submit(0, group(tensor.Int64, tensor.Int8))
		// Ignore errors: a Shutdown fails if rank 1 leaves first.
		c.each(func(r int) { _ = c.engines[r].Shutdown(c.ctx, engine.Departure{}) })
		if err := c.wait(left); !errors.Is(err, engine.ErrShutDown) {
			t.Errorf("got error %v, want ErrShutDown", err)
		}
		for r := range logs {
			st := c.engines[r].Stats()
			moved := make(map[string]uint64)
			for _, m := range st.Moved {
				moved[fmt.Sprint(m.DType)] = m.Bytes
			}
			if len(moved) != 2 || moved["int64"] != 4*80 || moved["int8"] != 10 || st.FusedTensors != 5 ||
				st.FusionResponses != 2 ||
				st.FusedBytes != 4*80+10 || len(st.Operations) != 1 || st.Operations[0].Tensors != 5 ||
				st.Refused != 2 || st.Failed != uint64(2-2*r) {
				t.Errorf("rank %d: %+v", r, st)
			}
			ops := logs[r].operations()
			if len(ops) != 3 {
				t.Errorf("rank %d received records of %d operations, want 3", r, len(ops))
				continue
			}
			for i, want := range []trace.Record{
				{DType: tensor.Int64, Shape: tensor.Shape{20}, Bytes: 160, Parts: 2},
				{DType: tensor.Invalid, Shape: tensor.Shape{30}, Bytes: 170, Parts: 3},
			} {
				if got := ops[i].Records[0]; len(ops[i].Records) != 1 || got.Name != "g" ||
					got.DType != want.DType || !got.Shape.Equal(want.Shape) ||
					got.Bytes != want.Bytes || got.Parts != want.Parts {
					t.Errorf("rank %d received %+v, want %+v", r, got, want)
				}
			}
		}
	})
}

// group returns an entry that sums a group of tensors in place as one request. The group has a tensor of ten
// elements of each given type.
func group(types ...tensor.DType) *tensorqueue.Entry {
	e := &tensorqueue.Entry{Request: message.Request{
		Kind: message.Allreduce, Name: "g", Shape: tensor.Shape{int64(10 * len(types))}, Op: tensor.Sum,
		Prescale: 1, Postscale: 1,
	}}
	for _, dt := range types {
		buf := make([]byte, 10*dt.Size())
		e.Parts = append(e.Parts, tensorqueue.Part{Input: buf, Output: buf})
		e.Request.Parts = e.Request.Parts.Append(dt, tensor.Shape{10})
	}
	e.Request.DType = e.Request.Parts.DType()
	return e
}

// If the caller changes the shape slice of a request after the operation has ended, the recorded shape does
// not change, because a Recorder may keep it.
func TestShapesAreTheirOwn(t *testing.T) {
	logs := make([]log, 2)
	c := start(t, 2, func(cfg *engine.Config) { cfg.Recorder = &logs[cfg.Rank] })
	for range 2 {
		c.each(func(r int) {
			dims := tensor.Shape{2}
			x := sum("x", make([]byte, 16))
			x.Request.Shape = dims
			y := gather("y", allocate)
			y.Request.Shape = slices.Clone(y.Request.Shape)
			done := c.submit(r, x, y)
			if err := errors.Join(c.wait(done), c.wait(done)); err != nil {
				t.Error(err)
			}
			dims[0], y.Request.Shape[0] = 99, 99
		})
	}
	c.shutdown()
	for r := range logs {
		for _, op := range logs[r].operations() {
			for _, x := range op.Records {
				if len(x.Shape) == 0 || x.Shape[0] == 99 || x.Shape[0] == 0 {
					t.Errorf("rank %d: %s has shape %v", r, x.Name, x.Shape)
				}
			}
		}
	}
}
