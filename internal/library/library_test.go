package library

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/rank"
)

// goMemory provides memory of Go.
var goMemory = Memory{
	Alloc: func(n int) ([]byte, error) {
		if n > 1<<20 {
			return nil, errors.New("there is no memory")
		}
		return make([]byte, n), nil
	},
	Free: func([]byte) {},
}

// initialized returns a library for each of n ranks of a job.
func initialized(t *testing.T, n int) (all []*Library) {
	method := "file://" + filepath.Join(t.TempDir(), "job")
	var inits []Handle
	for r := range n {
		l := New(nil, goMemory)
		all = append(all, l)
		inits = append(inits, l.Init(InitOptions{Settings: map[string]string{"HVD_INIT_METHOD": method,
			"HOROVOD_RANK": fmt.Sprint(r), "HOROVOD_SIZE": fmt.Sprint(n)}}))
	}
	for r, l := range all {
		if err := l.Wait(inits[r], Forever, nil); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// sum returns an allreduce of x, which is in place if out is set.
func sum(name string, x []float32, out bool) *Op {
	p := Place{In: unsafe.Pointer(&x[0])}
	if out {
		p.Out, p.OutBytes = p.In, uint64(4*len(x))
	}
	return &Op{Places: []Place{p}, Spec: rank.Spec{Kind: 1, DType: 9, ReduceOp: 2, Name: name, Prescale: 1,
		Postscale: 1, Tensors: []rank.TensorSpec{{Shape: []int64{int64(len(x))}}}}}
}

// TestRangeOfEarlierEpoch ends a range in another epoch than that in which it began.
func TestRangeOfEarlierEpoch(t *testing.T) {
	l, dir := New(nil, goMemory), t.TempDir()
	wait := func(h Handle) {
		t.Helper()
		if err := l.Wait(h, time.Minute, nil); err != nil {
			t.Fatal(err)
		}
	}
	o := InitOptions{Settings: map[string]string{"HOROVOD_TIMELINE": filepath.Join(dir, "t.json")}}
	wait(l.Init(o))
	begun, up := l.BeginRange(), l.Rank().Engine.Observer().Since()
	wait(l.Shutdown("", false))
	wait(l.Init(o))
	for l.Rank().Engine.Observer().Since() <= up { // so that the time would be one of this epoch
		runtime.Gosched()
	}
	l.EndRange("earlier", begun)
	l.EndRange("later", l.BeginRange())
	wait(l.Shutdown("", false))
	text, err := os.ReadFile(filepath.Join(dir, "t.epoch2.json"))
	if err != nil || strings.Contains(string(text), "earlier") || !strings.Contains(string(text), "later") {
		t.Errorf("got %s, %v, want only the range that began later", text, err)
	}
}

// TestFailedShutdown fails a rank whose Shutdown waits for the other rank, which goes on.
func TestFailedShutdown(t *testing.T) {
	all := initialized(t, 2)
	first := all[0].Shutdown("", false)
	for all[0].changing.TryLock() { // the first Shutdown has not begun
		all[0].changing.Unlock()
		time.Sleep(time.Millisecond)
	}
	for _, h := range []Handle{all[0].Shutdown("the program has failed", true), first} {
		if err := all[0].Wait(h, time.Minute, nil); err == nil || errors.Is(err, ErrPending) {
			t.Errorf("got %v, want an error", err)
		}
	}
	err := all[1].Wait(all[1].Shutdown("", false), time.Minute, nil)
	if err == nil || !strings.Contains(err.Error(), "rank 0 failed: the program has failed") {
		t.Errorf("rank 1 got %v, want an error that says that rank 0 has failed and why", err)
	}
}

// TestFailedShutdownEndsInit fails a process whose Init begins while a failed Shutdown is in progress. A
// later Init gets another sidecar.
func TestFailedShutdownEndsInit(t *testing.T) {
	l := newLibrary(t, hvdd(t))
	end := l.joining.stop() // as a Shutdown that waits for l.changing, which Init gets first
	for _, sidecar := range []string{"", "spawn"} {
		h := l.Init(InitOptions{Settings: map[string]string{"HVD_INIT_METHOD": "file://" + filepath.Join(t.TempDir(), "job"),
			"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "HVD_SIDECAR": sidecar}})
		if err := l.Wait(h, time.Minute, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("sidecar %q: got %v, want context.Canceled", sidecar, err)
		}
	}
	end()
	must(t, l, l.Init(InitOptions{Settings: map[string]string{"HVD_SIZE": "1", "HVD_SIDECAR": "spawn"}}))
	must(t, l, l.Shutdown("", false))
}

// TestFailedInitEndsID checks that the store of a unique id ends after the Init by the id has failed.
func TestFailedInitEndsID(t *testing.T) {
	l := New(nil, goMemory)
	l.lateTime = 0
	id, err := l.NewUniqueID(InitOptions{})
	if err != nil {
		t.Fatal(err)
	}
	h := l.Init(InitOptions{Settings: map[string]string{"HVD_UNIQUE_ID": id, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2",
		"HOROVOD_GLOO_TIMEOUT_SECONDS": "0.5"}})
	if err := l.Wait(h, time.Minute, nil); err == nil || errors.Is(err, ErrPending) {
		t.Fatalf("got %v, want an error", err)
	}
	select {
	case <-l.made.served:
	case <-time.After(time.Minute):
		t.Error("the store is still served")
	}
}

// TestAbandonDuringVote checks that SIGTERM has its usual effect again after an error of the program that has
// ended the wait for a vote.
func TestAbandonDuringVote(t *testing.T) {
	l, usual := initialized(t, 1)[0], false
	l.training.notice = func() { usual = true }
	l.training.using.Lock() // as a vote in progress holds it
	if err := l.Wait(l.EndTraining(Abandoned), Forever, nil); err != nil || !usual {
		t.Errorf("got %v and usual effect %t, want true", err, usual)
	}
	l.training.using.Unlock()
	if err := l.Wait(l.Shutdown("", false), Forever, nil); err != nil {
		t.Error(err)
	}
}

// TestCheckAfterFailure checks that an operation ends because of a failed rank only when Check knows that.
func TestCheckAfterFailure(t *testing.T) {
	all := initialized(t, 2)
	x := make([][1]float32, 3000)
	handles := make([]Handle, len(x))
	for i := range x {
		h, err := all[0].Submit(sum(fmt.Sprint("x", i), x[i][:], true))
		if err != nil {
			t.Fatal(err)
		}
		handles[i] = h
	}
	failed := all[1].Shutdown("the program has failed", true)
	if _, err := all[0].WaitAny(handles, time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := all[0].Check(); err == nil {
		t.Error("an operation has ended, and Check says that the job runs")
	}
	for i, l := range all {
		h := failed
		if i == 0 {
			h = l.Shutdown("", false)
		}
		if err := l.Wait(h, time.Minute, nil); errors.Is(err, ErrPending) {
			t.Error(err)
		}
	}
}

// TestThreads submits operations from many goroutines and waits for them in every way, in pairs of
// goroutines that wait for the same handles.
func TestThreads(t *testing.T) {
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			all := initialized(t, n)
			var wg sync.WaitGroup
			for r, l := range all {
				for g := range 8 {
					wg.Go(func() { work(t, l, r, g, n) })
				}
			}
			wg.Wait()
			var ends []Handle
			for _, l := range all {
				ends = append(ends, l.Shutdown("", false), l.Shutdown("", false))
			}
			for i, h := range ends {
				if err := all[i/2].Wait(h, Forever, nil); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// work submits operations at rank r of n and waits for them. g is the number of the goroutine.
func work(t *testing.T, l *Library, r, g, n int) {
	x := make([]float32, 1+g*100)
	for i := range 15 {
		name := fmt.Sprintf("g%d.%d", g, i%3)
		for k := range x {
			x[k] = 1
		}
		h, err := l.Submit(sum(name, x, i%2 == 0))
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
			return
		}
		var result Result
		got := func(err error) {
			if err != nil {
				t.Errorf("rank %d, %s: %v", r, name, err)
				return
			}
			out := result.Outputs[0].Data
			if v := *(*float32)(unsafe.Pointer(&out[len(out)-4])); v != float32(n) {
				t.Errorf("got %v", v)
			}
		}
		switch i % 5 {
		case 0:
			got(l.Wait(h, Forever, &result))
		case 1:
			for {
				err := l.Wait(h, 20*time.Microsecond, &result)
				if errors.Is(err, ErrPending) {
					continue
				}
				got(err)
				break
			}
		case 2:
			for {
				done, err := l.Poll(h)
				if err != nil {
					t.Error(err)
					return
				}
				if done {
					break
				}
			}
			got(l.Wait(h, 0, &result))
		case 3:
			y := make([]float32, 10)
			h2, err := l.Submit(sum(name+"second", y, true))
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := l.WaitAny([]Handle{h2, h}, Forever); err != nil {
				t.Error(err)
			}
			// Two goroutines wait for h.
			errs := make(chan error, 2)
			for range 2 {
				go func() { errs <- l.Wait(h, Forever, nil) }()
			}
			a, b := <-errs, <-errs
			if (a == nil) == (b == nil) {
				t.Errorf("two waits got %v and %v", a, b)
			}
			if err := l.Wait(h2, Forever, nil); err != nil {
				t.Error(err)
			}
		case 4:
			waiting := make(chan error, 1)
			go func() { waiting <- l.Wait(h, Forever, nil) }()
			err := l.Release(h)
			w := <-waiting
			if (err == nil) == (w == nil) {
				t.Errorf("release got %v, wait got %v", err, w)
			}
			// The name becomes free.
			for {
				h, err := l.Submit(sum(name, x, true))
				if err == nil {
					if err := l.Wait(h, Forever, nil); err != nil {
						t.Error(err)
					}
					break
				}
				time.Sleep(time.Microsecond)
			}
		}
	}
}

// TestFinish checks that Finish uses up the handles of what has succeeded, and only these.
func TestFinish(t *testing.T) {
	l := New(nil, goMemory)
	good, bad := new(task), new(task)
	h, failed := l.handles.add(good), l.handles.add(bad)
	if err := l.Finish(h, 0, nil); !errors.Is(err, ErrPending) {
		t.Errorf("got %v, want ErrPending", err)
	}
	reason := errors.New("reason")
	good.complete(nil)
	bad.complete(reason)
	if err := l.Finish(h, Forever, nil); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := l.Finish(h, Forever, nil); !errors.Is(err, ErrHandle) {
			t.Errorf("got %v, want ErrHandle", err)
		}
		if err := l.Finish(failed, Forever, nil); err != reason {
			t.Errorf("got %v, want %v", err, reason)
		}
	}
	if err := l.Wait(failed, 0, nil); err != reason {
		t.Errorf("got %v, want %v", err, reason)
	}
	if err := l.Wait(failed, 0, nil); !errors.Is(err, ErrHandle) {
		t.Errorf("got %v, want ErrHandle", err)
	}
}

// TestHandles checks the handles of a slot that was used 2^32 times, and errors about handles.
func TestHandles(t *testing.T) {
	l := New(nil, goMemory)
	l.handles.slots, l.handles.free = []slot{{generation: math.MaxUint32}}, []uint32{0}
	done := new(task)
	done.complete(nil)
	h := l.handles.add(done)
	if h == 0 {
		t.Error("got handle 0, which is no handle")
	}
	if err := l.Release(h); err != nil {
		t.Error(err)
	}
	for _, err := range []error{l.Release(h), l.Wait(h, 0, nil)} {
		if !errors.Is(err, ErrHandle) || !strings.Contains(err.Error(), fmt.Sprintf("handle %d ", h)) {
			t.Errorf("got %v, want an error that names handle %d", err, h)
		}
	}
}

// TestReleasedGate releases a gate that was not opened. A wait for it ends, and no goroutine stays behind.
func TestReleasedGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(nil, goMemory)
		h := l.NewGate()
		waited := make(chan error)
		go func() { waited <- l.Wait(h, Forever, nil) }()
		synctest.Wait()
		if err := l.Release(h); err != nil {
			t.Fatal(err)
		}
		if err := <-waited; !errors.Is(err, ErrHandle) {
			t.Errorf("got %v from the wait, want an error about the handle", err)
		}
		if err := l.Open(h); !errors.Is(err, ErrHandle) {
			t.Errorf("got %v, want an error about the handle", err)
		}
	})
}

// driven is a pending that counts how often a wait drives the engine, and how often one notifies it.
type driven struct {
	task
	drives, notifications int
}

func (d *driven) drive(time.Time, func() bool) { d.drives++ }

func (d *driven) notify() { d.notifications++ }

// TestWaitForManyHandles waits for more handles than reflect.Select takes cases.
func TestWaitForManyHandles(t *testing.T) {
	l := New(nil, goMemory)
	handles := make([]Handle, 140_000)
	for i := range handles {
		handles[i] = l.NewGate()
	}
	if _, err := l.WaitAny(handles, time.Millisecond); !errors.Is(err, ErrPending) {
		t.Errorf("got %v, want ErrPending", err)
	}
	last := len(handles) - 1
	go func() { _ = l.Open(handles[last]) }()
	if i, err := l.WaitAny(handles, Forever); i != last || err != nil {
		t.Errorf("got handle %d, %v, want %d", i, err, last)
	}
}

// TestWaitWithGate checks that a wait for a gate leaves it to the engine to make progress, and that any other
// wait drives the engine.
func TestWaitWithGate(t *testing.T) {
	l := New(nil, goMemory)
	for _, hasGate := range []bool{false, true} {
		d := new(driven)
		handles := []Handle{l.handles.add(d)}
		if hasGate {
			handles = append(handles, l.NewGate())
		}
		if _, err := l.WaitAny(handles, time.Millisecond); !errors.Is(err, ErrPending) {
			t.Errorf("got %v, want ErrPending", err)
		}
		// A wait notifies at its end. With a gate it also does so at its begin, because it may have no end.
		want := driven{drives: 1, notifications: 1}
		if hasGate {
			want = driven{drives: 0, notifications: 2}
		}
		if d.drives != want.drives || d.notifications != want.notifications {
			t.Errorf("gate %v: the wait drove %d times and notified %d times, want %d and %d", hasGate,
				d.drives, d.notifications, want.drives, want.notifications)
		}
	}
}
