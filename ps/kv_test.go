package ps

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/transport/faulty"
)

var full = flag.Bool("full", false, "run 10 million requests in TestRandom")

// kv runs a job whose servers have the handler that the function handler returns, and calls worker for each
// customer of each worker.
func kv[T Value](j job, handler func() Handler[T], worker func(po *Node, rank int, w *KVWorker[T])) {
	j.run(func(po *Node) {
		if po.Role() == Server {
			must(NewKVServer(po, handler()))
		}
		if po.Role() != Worker {
			return
		}
		var wg sync.WaitGroup
		for c := range max(j.customers, 1) {
			wg.Go(func() {
				n := po.Customers()[c]
				w := must(NewKVWorker[T](n))
				worker(n, n.Rank(), w)
			})
		}
		wg.Wait()
	})
}

// testKVApp is ps-lite's test_kv_app for one worker: pushes with at most ten in flight, a pull, and
// PushPulls.
func testKVApp(t *testing.T, rank int, w *KVWorker[float32]) {
	const num, repeat = 10000, 50
	keys, vals := make([]uint64, num), make([]float32, num)
	for i := range keys {
		keys[i] = MaxKey/num*uint64(i) + uint64(rank)
		vals[i] = float32(rand.IntN(1000))
	}
	var flying []*Request
	for range repeat {
		r := must(w.PushAsync(t.Context(), keys, vals))
		if flying = append(flying, r); len(flying) > 10 {
			wait(t, flying[0], nil)
			flying = flying[1:]
		}
	}
	for _, r := range flying {
		wait(t, r, nil)
	}
	check := func(got []float32, times float32) {
		for i, v := range got {
			if v != vals[i]*times {
				t.Errorf("key %d is %v, want %v", keys[i], v, vals[i]*times)
				return
			}
		}
		if len(got) != num {
			t.Errorf("got %d values, want %d", len(got), num)
		}
	}
	var got []float32
	noError(t, w.Pull(t.Context(), keys, &got))
	check(got, repeat)
	outs := make([]float32, num)
	for i := range repeat {
		noError(t, w.PushPull(t.Context(), keys, vals, &outs))
		check(outs, float32(repeat+i+1))
	}
}

func TestKVApp(t *testing.T) {
	kv(job{t: t, servers: 2, workers: 2}, Sum[float32], func(_ *Node, rank int, w *KVWorker[float32]) {
		testKVApp(t, rank, w)
	})
}

// TestSeveralCustomers is ps-lite's test_kv_app_multi_workers: two customers in each worker process.
func TestSeveralCustomers(t *testing.T) {
	var ranks sync.Map
	j := job{t: t, servers: 2, workers: 4, customers: 2}
	kv(j, Sum[float32], func(po *Node, rank int, w *KVWorker[float32]) {
		if _, twice := ranks.LoadOrStore(rank, true); twice {
			t.Errorf("two customers have the rank %d", rank)
		}
		testKVApp(t, rank, w)
		noError(t, po.Barrier(t.Context(), WorkerGroup))
	})
}

// TestPushAllocates counts what a push allocates, at the worker and the server together: 4 times, and 5 times
// with the race detector.
func TestPushAllocates(t *testing.T) {
	const most = 5
	kv(job{t: t, servers: 1, workers: 1}, Sum[float32], func(_ *Node, _ int, w *KVWorker[float32]) {
		keys, vals := []uint64{1}, []float32{1}
		if n := testing.AllocsPerRun(100, func() {
			noError(t, w.Push(t.Context(), keys, vals))
		}); n > most {
			t.Errorf("a push of a key makes %v allocations, want at most %d", n, most)
		}
	})
}

// TestLongPush pushes values that two goroutines copy, if the machine has a core for each node, and shorter
// values. Their numbers are near those at which the number of pieces changes.
func TestLongPush(t *testing.T) {
	kv(job{t: t, servers: 1, workers: 1}, Sum[int32], func(_ *Node, _ int, w *KVWorker[int32]) {
		const long, piece = longCopy / 4, copyPiece / 4
		for key, n := range []int{long - 1, long, long + 1, 3*long + piece - 1, 5 * long} {
			vals := make([]int32, n)
			for i := range vals {
				vals[i] = int32(i + 1)
			}
			keys := []uint64{uint64(key)}
			noError(t, w.Push(t.Context(), keys, vals))
			var got []int32
			noError(t, w.Pull(t.Context(), keys, &got))
			if !slices.Equal(got, vals) {
				t.Errorf("%d values were not stored as pushed", n)
			}
		}
	})
}

// TestValuesPerKey checks several values per key, with the same number for all keys and with lens, over three
// servers, in every form of the calls, and that several lists share keys.
func TestValuesPerKey(t *testing.T) {
	keys := []uint64{1, 5, MaxKey / 3, MaxKey/3 + 7, MaxKey - 9}
	kv(job{t: t, servers: 3, workers: 1}, Sum[int64], func(_ *Node, _ int, w *KVWorker[int64]) {
		vals := []int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
		called := make(chan error, 10)
		noError(t, w.Push(t.Context(), keys, vals, Priority(3), Callback(func(err error) { called <- err })))
		if len(called) != 1 {
			t.Error("Wait has returned before the callback was called")
		}
		noError(t, w.Push(t.Context(), keys[1:3], []int64{100, 200, 300, 400}, ZeroCopy()))
		var got []int64
		var lens []int32
		noError(t, w.Pull(t.Context(), keys, &got, OutLens(&lens)))
		if want := []int64{1, 2, 103, 204, 305, 406, 7, 8, 9, 10}; !slices.Equal(got, want) ||
			!slices.Equal(lens, []int32{2, 2, 2, 2, 2}) {
			t.Errorf("got %v with lens %v, want %v", got, lens, want)
		}
		other := []uint64{0, 2, 3, MaxKey / 2}
		noError(t, w.PushPull(t.Context(), other, vals[:6], &[]int64{}, Lens([]int32{3, 0, 1, 2}),
			ZeroCopy()))
		all := []uint64{0, 1, 2, 3, MaxKey / 3, MaxKey / 2}
		into := make([]int64, 10)
		noError(t, w.Pull(t.Context(), all, &into, OutLens(&lens)))
		if want := []int64{1, 2, 3, 1, 2, 4, 305, 406, 5, 6}; !slices.Equal(into, want) ||
			!slices.Equal(lens, []int32{3, 2, 0, 1, 2, 2}) {
			t.Errorf("got %v with lens %v, want %v", into, lens, want)
		}
		noError(t, w.Push(t.Context(), nil, nil))
		testnet.WantError(t, w.Pull(t.Context(), []uint64{}, &into),
			"the keys have 0 values, but the slice for them has the length 10")
		// Mistakes of the caller.
		push := func(keys []uint64, vals []int64, opts ...PushOption) error {
			return w.Push(t.Context(), keys, vals, opts...)
		}
		testnet.WantError(t, push([]uint64{3, 3}, vals[:2]),
			"ps: push of 2 keys: key 1 is 3 and follows key 3",
			"sorted and unique")
		testnet.WantError(t, push([]uint64{3, 2}, vals[:2]), "key 1 is 2 and follows key 3")
		testnet.WantError(t, push(keys, vals[:7]), "7 values do not fit 5 keys")
		testnet.WantError(t, push(nil, vals), "10 values do not fit 0 keys")
		testnet.WantError(t, push([]uint64{MaxKey}, vals), "key 0 is 18446744073709551615, want less than")
		testnet.WantError(t, push(keys, vals, Lens([]int32{1})),
			"Lens gives 1 values for 1 keys, want 10 and 5")
		testnet.WantError(t, push(keys[:1], vals, Lens([]int32{-1})), "key 0 has -1 values")
		testnet.WantError(t, push(keys, vals[:5]), "has 2 values here, got 1")
		testnet.WantError(t, push(other, vals[:4]), "values here, got 1")
		testnet.WantError(t, push([]uint64{1, 77}, vals[:2]), "key 1 has 2 values here, got 1")
		testnet.WantError(t, w.Pull(t.Context(), []uint64{77}, &got), "server 0: there is no key 77 here")
		testnet.WantError(t, w.Pull(t.Context(), keys, nil), "the pointer to the slice for the values is nil")
	})
}

// TestKeysAreNamed checks that keys are sent once, and that a server asks for keys that it has forgotten.
func TestKeysAreNamed(t *testing.T) {
	const num = 10000
	keys := make([]uint64, num)
	for i := range keys {
		keys[i] = uint64(i)
	}
	server := make(chan *KVServer[uint8], 1)
	job{t: t, servers: 2, workers: 1}.run(func(po *Node) {
		if po.Role() == Server {
			s := must(NewKVServer(po, Sum[uint8]()))
			if po.Rank() == 0 {
				server <- s
			}
		}
		if po.Role() != Worker {
			return
		}
		w := must(NewKVWorker[uint8](po))
		vals := slices.Repeat([]uint8{1}, num)
		push := func() int {
			before, _ := po.Traffic()
			noError(t, w.Push(t.Context(), keys, vals))
			after, _ := po.Traffic()
			return int(after - before)
		}
		if n := push(); n < num*9 {
			t.Errorf("the first push sent %d bytes", n)
		}
		if n := push(); n > num+1000 {
			t.Errorf("the second push sent %d bytes, want about %d", n, num)
		}
		s := <-server
		s.c.handling.Lock()
		clear(s.lists)
		s.c.handling.Unlock()
		if n := push(); n < num*9 {
			t.Errorf("the push after the server had forgotten the keys sent %d bytes", n)
		}
		if n := push(); n > num+1000 {
			t.Errorf("the next push sent %d bytes, want about %d", n, num)
		}
		var got []uint8
		if noError(t, w.Pull(t.Context(), keys, &got)); !slices.Equal(got, slices.Repeat([]uint8{4}, num)) {
			t.Errorf("the values are not 4 after 4 pushes of 1")
		}
	})
}

// TestSlicer checks that the option SliceBy decides which server gets which keys.
func TestSlicer(t *testing.T) {
	var got [2]atomic.Int32 // number of keys, by server
	job{t: t, servers: 2, workers: 1}.run(func(n *Node) {
		switch n.Role() {
		case Server:
			handler := func(meta KVMeta, data KVPairs[uint8], s *KVServer[uint8]) {
				got[n.Rank()].Store(int32(len(data.Keys)))
				noError(t, s.Respond(meta, KVPairs[uint8]{}))
			}
			must(NewKVServer(n, KVHandler[uint8](handler)))
		case Worker:
			push := func(app int, bounds ...int) error {
				w, err := NewKVWorker[uint8](n, App(app), SliceBy(func([]uint64, []Range) ([]int, error) {
					return bounds, nil
				}))
				if err != nil {
					return err
				}
				return w.Push(t.Context(), []uint64{1, 2, 3}, []uint8{1, 1, 1})
			}
			noError(t, push(0, 0, 1, 3))
			if got[0].Load() != 1 || got[1].Load() != 2 {
				t.Errorf("the servers got %d and %d keys, want 1 and 2", got[0].Load(), got[1].Load())
			}
			testnet.WantError(t, push(1, 0, 2, 1),
				"the slicer returned the bounds [0 2 1] for 3 keys and 2 servers")
		}
	})
}

// TestLateAnswers checks a handler that answers when all workers have pushed, from other goroutines.
func TestLateAnswers(t *testing.T) {
	const workers = 3
	var answers sync.WaitGroup
	handler := func() Handler[float64] {
		var sum float64
		var waiting []KVMeta
		return KVHandler[float64](func(meta KVMeta, data KVPairs[float64], s *KVServer[float64]) {
			if meta.Cmd != 7 || !slices.Equal(data.Keys, []uint64{4}) {
				t.Errorf("got command %d for keys %v", meta.Cmd, data.Keys)
			}
			sum += data.Vals[0]
			if waiting = append(waiting, meta); len(waiting) < workers {
				return
			}
			answer, all := KVPairs[float64]{Keys: data.Keys, Vals: []float64{sum}}, waiting
			waiting = nil
			for _, m := range all {
				answers.Go(func() {
					if err := s.Respond(m, KVPairs[float64]{Vals: []float64{1, 2},
						Lens: []int32{1}}); err == nil {
						t.Error("values that do not fit were sent")
					}
					noError(t, s.Respond(m, answer))
					if s.Respond(m, answer) == nil || s.Fail(m, context.Canceled) == nil {
						t.Error("a second answer is no error")
					}
				})
			}
		})
	}
	j := job{t: t, servers: 1, workers: workers}
	kv(j, handler, func(_ *Node, rank int, w *KVWorker[float64]) {
		for i := range 20 {
			var got []float64
			noError(t, w.PushPull(t.Context(), []uint64{4}, []float64{float64(rank + 1)}, &got, Cmd(7)))
			if want := float64((i + 1) * workers * (workers + 1) / 2); len(got) != 1 || got[0] != want {
				t.Errorf("got %v, want %v", got, want)
			}
		}
	})
	answers.Wait()
}

// TestErrorText checks that a worker gets the error of a handler whose text is not UTF-8.
func TestErrorText(t *testing.T) {
	kv(job{t: t, servers: 1, workers: 1}, func() Handler[float32] {
		return KVHandler[float32](func(meta KVMeta, _ KVPairs[float32], s *KVServer[float32]) {
			noError(t, s.Fail(meta, errors.New("a\xffb")))
		})
	}, func(_ *Node, _ int, w *KVWorker[float32]) {
		err := w.Push(t.Context(), []uint64{1}, []float32{1})
		if remote, ok := errors.AsType[*RemoteError](err); !ok || remote.Text != "a\uFFFDb" {
			t.Errorf("got %v, want the error of the handler", err)
		}
	})
}

// TestPullsInPlace pulls large values while another worker pushes to them. Each pull must see each push as a
// whole, although the worker reads the memory of the server.
func TestPullsInPlace(t *testing.T) {
	const n, pushes = 1 << 18, 300
	h := Sum[float32]().(*builtIn[float32])
	var pushed sync.WaitGroup
	pushed.Add(1)
	over := make(chan struct{})
	kv(job{t: t, servers: 1, workers: 2}, func() Handler[float32] { return h }, func(_ *Node, rank int,
		w *KVWorker[float32]) {
		keys := []uint64{5}
		if rank == 0 {
			ones := slices.Repeat([]float32{1}, n)
			for i := range pushes {
				r, err := w.PushAsync(t.Context(), keys, ones)
				if wait(t, r, err); i == 0 {
					pushed.Done()
				}
			}
			close(over)
			return
		}
		pushed.Wait()
		last, seen := float32(0), 0
		for done := false; !done; {
			select {
			case <-over:
				done = true // one more
			default:
			}
			var got [2][]float32
			var flying [2]*Request
			for i := range flying {
				flying[i] = must(w.PullAsync(t.Context(), keys, &got[i]))
			}
			for i, r := range flying {
				wait(t, r, nil)
				first := got[i][0]
				if j := slices.IndexFunc(got[i], func(v float32) bool { return v != first }); j >= 0 {
					t.Errorf("the values are %v and %v", first, got[i][j])
					return
				}
				if first < last {
					t.Errorf("a pull got %v after another one got %v", first, last)
				}
				if first > last {
					seen++
				}
				last = first
			}
		}
		if last != pushes {
			t.Errorf("got %v, want %d", last, pushes)
		}
		t.Logf("%d values were seen", seen)
	})
	c := h.store.entries[5].chunk
	if _, ok := arena.Find(c.vals); !ok || len(c.old) > 5 {
		t.Errorf("the values are in the arena: %v; %d further versions", ok, len(c.old))
	}
}

// TestVersions checks which pulls are read in place, and that a push does not change what is read.
func TestVersions(t *testing.T) {
	const each = van.SharedBytes / 4
	h := Sum[float32]().(*builtIn[float32])
	s, v := h.store, van.New(van.Config{}, nil)
	list := func(keys ...uint64) *resolved {
		r, err := s.resolve(&serverList{keys: keys}, true, nil, len(keys)*each)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	pull := func(r *resolved) *van.Message {
		m := van.Make()
		s.answerPull(v, 9, r, m)
		return m
	}
	all := list(1, 2, 3)
	c := all.runs[0].chunk
	other := list(0)
	for _, r := range []*resolved{other, list(1, 2)} {
		if m := pull(r); &m.Data[0][0] != &r.runs[0].chunk.vals[0] {
			t.Error("the values are copied")
		} else {
			m.Drop()
		}
	}
	for _, r := range []*resolved{list(3), list(0, 1, 2, 3)} {
		if m := pull(r); m.Free != nil || len(m.Data[0]) != r.total*4 {
			t.Errorf("%d values are read in place", r.total)
		}
	}
	one := tensor.Bytes(slices.Repeat([]float32{1}, 3*each))
	var reading []*van.Message
	for i := range 3 {
		reading = append(reading, pull(all), pull(all))
		s.push(all, one, false)
		for _, vals := range []struct {
			got  []byte
			want int
		}{{c.vals, i + 1}, {reading[0].Data[0], 0}, {reading[2*i].Data[0], i}} {
			f := tensor.View[float32](vals.got)
			if f[0] != float32(vals.want) || f[3*each-1] != f[0] || len(f) != 3*each {
				t.Errorf("after push %d: got %v and %v, want %d", i+1, f[0], f[3*each-1], vals.want)
			}
		}
	}
	for _, m := range reading {
		m.Drop()
	}
	for range 5 {
		m := pull(all)
		s.push(all, one, true)
		m.Drop()
	}
	if len(c.old) != 3 || len(other.runs[0].chunk.old) != 0 {
		t.Errorf("got %d and %d further versions, want 3 and 0", len(c.old), len(other.runs[0].chunk.old))
	}
}

// TestCallbackOfFailedCall checks that the callback of a push is called only if PushAsync returns no error.
func TestCallbackOfFailedCall(t *testing.T) {
	held := make(chan struct{})
	j := job{t: t, servers: 1, workers: 1, settings: map[string]string{"DMLC_PS_WATER_MARK": "1"}}
	hold := func() Handler[int8] {
		return KVHandler[int8](func(meta KVMeta, _ KVPairs[int8], s *KVServer[int8]) {
			<-held
			noError(t, s.Respond(meta, KVPairs[int8]{}))
		})
	}
	kv(j, hold, func(po *Node, _ int, w *KVWorker[int8]) {
		var calls atomic.Int32
		count := Callback(func(error) { calls.Add(1) })
		r, err := w.PushAsync(t.Context(), []uint64{1}, []int8{1}, count)
		noError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = w.PushAsync(ctx, []uint64{1}, []int8{1}, count)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a push that waits for room has the error %v", err)
		}
		_, err = w.PushAsync(t.Context(), []uint64{1, 1}, []int8{1, 1}, count)
		testnet.WantError(t, err, "sorted and unique")
		close(held)
		wait(t, r, nil)
		noError(t, po.Finalize(t.Context())) // waits for callbacks
		_, err = w.PushAsync(t.Context(), []uint64{1}, []int8{1}, count)
		if !errors.Is(err, ErrFinalized) {
			t.Errorf("a push after Finalize has the error %v", err)
		}
		if n := calls.Load(); n != 1 {
			t.Errorf("callbacks were called %d times, want once", n)
		}
	})
}

// TestListsAreForgotten checks that a worker forgets the oldest lists of keys, and counts the bytes of the
// others.
func TestListsAreForgotten(t *testing.T) {
	var lists keyLists
	one := func([]uint64) ([]int, error) { return []int{0, 1}, nil }
	for key := range uint64(2 * maxLists) {
		if _, err := lists.get([]uint64{key}, one); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(lists.order); n != maxLists || len(lists.lists) != n || lists.bytes != n*keyBytes ||
		lists.order[0].keys[0] != maxLists {
		t.Errorf("%d lists with %d bytes are left, want the last %d", n, lists.bytes, maxLists)
	}
}

// TestPlacesAreBounded checks that a server forgets where the values of lists are if these take too much
// memory, and counts that memory right.
func TestPlacesAreBounded(t *testing.T) {
	s, lists := Sum[int8]().(*builtIn[int8]).store, newServerLists()
	lists.mostPlaces = 100_000 // two lists of 2000 runs, which take 48,000 bytes or a little more
	var even, odd, both []uint64
	for k := range uint64(1000) {
		even, odd, both = append(even, 2*k), append(odd, 2*k+1), append(both, 2*k, 2*k+1)
	}
	for number, keys := range [][]uint64{even, odd, both, both, both, both} {
		list := &serverList{keys: keys}
		lists.addList(uint64(number), list)
		if _, err := s.resolve(list, true, nil, len(keys)); err != nil {
			t.Fatal(err)
		}
		size := 0
		for _, l := range lists.lists {
			if l.resolved != nil {
				size += cap(l.resolved.runs)*24 + cap(l.resolved.lens)*4
			}
		}
		if size > lists.mostPlaces || size != lists.places || list.resolved == nil {
			t.Errorf("list %d: the places have %d bytes, want %d, at most %d", number, size, lists.places,
				lists.mostPlaces)
		}
	}
	for number := range uint64(maxLists) {
		lists.addList(100+number, &serverList{})
	}
	if lists.places != 0 {
		t.Errorf("%d bytes of lists that are forgotten count", lists.places)
	}
}

// TestVersionsAreFreed checks that the memory of values is freed when nothing refers to them.
func TestVersionsAreFreed(t *testing.T) {
	s := Sum[float32]().(*builtIn[float32]).store
	// 65 MiB have a chunk of the arena of their own.
	r, err := s.resolve(&serverList{keys: []uint64{1}}, true, nil, 65<<18)
	if err != nil {
		t.Fatal(err)
	}
	b, m := r.runs[0].chunk.vals, van.Make()
	s.answerPull(nil, 9, r, m)
	if _, ok := arena.Find(b); !ok {
		t.Fatal("the values are not in the arena")
	}
	runtime.GC()
	if _, ok := arena.Find(b); !ok {
		t.Fatal("the values are free while they are read")
	}
	m.Drop()
	testnet.Eventually(t, "the values are free", func() bool {
		runtime.GC()
		_, ok := arena.Find(b)
		return !ok
	})
}

// TestTypes checks the error if worker and server have different types, and the types of all sums.
func TestTypes(t *testing.T) {
	job{t: t, servers: 1, workers: 1}.run(func(po *Node) {
		if po.Role() == Server {
			for app, err := range []error{
				server(po, 0, Sum[uint8]()), server(po, 1, Sum[int16]()), server(po, 2, Sum[half.Float16]()),
				server(po, 3, Sum[half.BFloat16]()), server(po, 4, Sum[int32]()),
			} {
				if err != nil {
					t.Errorf("app %d: %v", app, err)
				}
			}
			if _, err := NewKVWorker[int8](po); err == nil {
				t.Error("a server has a KVWorker")
			}
		}
		if po.Role() == Worker {
			sumOf(t, po, 0, []uint8{200, 100}, []uint8{144, 200})
			sumOf(t, po, 1, []int16{-3, 4}, []int16{-6, 8})
			sumOf(t, po, 2, []half.Float16{half.Float16FromFloat32(1.5)},
				[]half.Float16{half.Float16FromFloat32(3)})
			sumOf(t, po, 3, []half.BFloat16{half.BFloat16FromFloat32(-2)},
				[]half.BFloat16{half.BFloat16FromFloat32(-4)})
			w := must(NewKVWorker[float32](po, App(4)))
			testnet.WantError(t, w.Push(t.Context(), []uint64{1}, []float32{1}),
				"the worker has values of type FLOAT, the server of type INT32")
		}
	})
}

// TestSharedHandler checks that two servers with the same handler share its values.
func TestSharedHandler(t *testing.T) {
	const pushes = 1000
	shared := Sum[int64]()
	job{t: t, servers: 1, workers: 2}.run(func(po *Node) {
		if po.Role() == Server {
			for app := range 2 {
				noError(t, server(po, app, shared))
			}
		}
		if po.Role() != Worker {
			return
		}
		w := must(NewKVWorker[int64](po, App(po.Rank())))
		var all []*Request
		for i := range pushes {
			all = append(all, must(w.PushAsync(t.Context(), []uint64{1, 2 + uint64(i%100)}, []int64{1, 1})))
		}
		for _, r := range all {
			wait(t, r, nil)
		}
		noError(t, po.Barrier(t.Context(), WorkerGroup))
		var got []int64
		noError(t, w.Pull(t.Context(), []uint64{1, 2}, &got))
		if want := []int64{2 * pushes, 2 * pushes / 100}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

func server[T Value](po *Node, app int, h Handler[T]) error {
	_, err := NewKVServer(po, h, App(app))
	return err
}

// sumOf pushes vals twice and compares what is pulled with want.
func sumOf[T Value](t *testing.T, po *Node, app int, vals, want []T) {
	w := must(NewKVWorker[T](po, App(app)))
	var got []T
	for range 2 {
		noError(t, w.PushPull(t.Context(), []uint64{3}, vals, &got))
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("app %d: got %v, want %v", app, got, want)
	}
}

// TestOptimizers compares the built-in optimizers with their formulas.
func TestOptimizers(t *testing.T) {
	const rate, beta, beta2, eps = 0.1, 0.9, 0.99, 1e-8
	var m, v, s float64
	for name, c := range map[string]struct {
		f64  func() Handler[float64]
		f16  func() Handler[half.BFloat16]
		step func(w, g float64, step int) float64
	}{
		"sgd": {func() Handler[float64] { return SGD[float64](rate) },
			func() Handler[half.BFloat16] { return SGD[half.BFloat16](rate) },
			func(w, g float64, _ int) float64 { return w - rate*g }},
		"momentum": {func() Handler[float64] { return Momentum[float64](rate, beta) },
			func() Handler[half.BFloat16] { return Momentum[half.BFloat16](rate, beta) },
			func(w, g float64, _ int) float64 { m = beta*m + g; return w - rate*m }},
		"adagrad": {func() Handler[float64] { return Adagrad[float64](rate, eps) },
			func() Handler[half.BFloat16] { return Adagrad[half.BFloat16](rate, eps) },
			func(w, g float64, _ int) float64 { s += g * g; return w - rate*g/(math.Sqrt(s)+eps) }},
		"adam": {func() Handler[float64] { return Adam[float64](rate, beta, beta2, eps) },
			func() Handler[half.BFloat16] { return Adam[half.BFloat16](rate, beta, beta2, eps) },
			func(w, g float64, step int) float64 {
				m, v = beta*m+(1-beta)*g, beta2*v+(1-beta2)*g*g
				return w - rate*m/(1-math.Pow(beta, float64(step)))/(math.Sqrt(v/(1-math.Pow(beta2,
					float64(step))))+eps)
			}},
	} {
		m, v, s = 0, 0, 0
		want := []float64{3}
		for step := range 10 {
			want = append(want, c.step(want[step], math.Sin(float64(step)), step+1))
		}
		kv(job{t: t, servers: 1, workers: 1}, c.f64, func(_ *Node, _ int, w *KVWorker[float64]) {
			follow(t, name, w, func(f float64) float64 { return f }, func(f float64) float64 { return f },
				want, 1e-12)
		})
		kv(job{t: t, servers: 1, workers: 1}, c.f16, func(_ *Node, _ int, w *KVWorker[half.BFloat16]) {
			follow(t, name, w, func(f float64) half.BFloat16 { return half.BFloat16FromFloat32(float32(f)) },
				func(h half.BFloat16) float64 { return float64(h.Float32()) }, want, 0.05)
		})
	}
}

// follow pushes gradients and compares the values with want. Another key in between has fewer steps.
func follow[T Value](t *testing.T, name string, w *KVWorker[T], from func(float64) T, to func(T) float64,
	want []float64, most float64) {
	noError(t, w.Push(t.Context(), []uint64{1, 2, 3}, []T{from(3), from(3), from(3)}, Cmd(InitCmd)))
	for step := range 10 {
		g := from(math.Sin(float64(step)))
		noError(t, w.Push(t.Context(), []uint64{1, 3}, []T{g, g}))
		var got []T
		noError(t, w.Pull(t.Context(), []uint64{1, 2, 3}, &got))
		if t.Failed() {
			return
		}
		for i, w := range []float64{want[step+1], 3, want[step+1]} {
			if diff := math.Abs(to(got[i]) - w); diff > most {
				t.Errorf("%s: key %d is %v after %d steps, want %v", name, i+1, to(got[i]), step+1, w)
			}
		}
	}
}

// Test130Workers checks ids that do not fit a byte.
func Test130Workers(t *testing.T) {
	const workers = 130
	j := job{t: t, servers: 2, workers: workers, settings: map[string]string{"HVD_FLIGHT_RECORDER": "0"}}
	kv(j, Sum[int32], func(po *Node, _ int, w *KVWorker[int32]) {
		keys := []uint64{1, 2, MaxKey - 5}
		for range 5 {
			noError(t, w.Push(t.Context(), keys, []int32{1, 10, 100}))
		}
		noError(t, po.Barrier(t.Context(), WorkerGroup))
		var got []int32
		noError(t, w.Pull(t.Context(), keys, &got))
		if want := []int32{5 * workers, 50 * workers, 500 * workers}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

// lossy returns faults that drop 10% of the messages, duplicate 5%, reorder 20% and delay the stream at 1%.
// They cut the stream between a worker and a server at one message of 2000, but not that with the scheduler,
// which may have only heartbeats.
func lossy(seed uint64) func(from, to van.Process, m *van.Message, deliver func(*van.Message) error) error {
	var mu sync.Mutex
	streams := make(map[[2]van.Process]*faulty.Messages[*van.Message])
	clone := func(m *van.Message) *van.Message {
		c := m.Clone()
		c.Header = proto.CloneOf(m.Header)
		return c
	}
	return func(from, to van.Process, m *van.Message, deliver func(*van.Message) error) error {
		mu.Lock()
		f := streams[[2]van.Process{from, to}]
		if f == nil {
			f = &faulty.Messages[*van.Message]{Drop: 0.1, Duplicate: 0.05, Reorder: 0.2, Depth: 8,
				Delay: 0.01, CutLength: 29, Clone: clone}
			if from.ID != van.SchedulerID && to.ID != van.SchedulerID {
				f.Cut = 0.0005
			}
			f.Seed(seed + uint64(from.ID)<<32 + uint64(to.ID))
			streams[[2]van.Process{from, to}] = f
		}
		mu.Unlock()
		return f.Pass(m, deliver)
	}
}

// TestRandom makes random pushes and pulls of 64 keys while messages are dropped, duplicated, reordered and
// delayed, and connections are cut for a while. The sums must be exact, and the memory must not grow with the
// number of requests.
func TestRandom(t *testing.T) {
	const workers, batch, space = 4, 64, 4096
	requests := 50_000
	switch {
	case *full:
		requests = 10_000_000
	case testing.Short():
		requests = 20_000
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	var total [space]atomic.Int64 // what was pushed, by key
	j := job{t: t, servers: 2, workers: workers, faults: lossy(seed), settings: map[string]string{
		"PS_RESEND": "1", "PS_RESEND_TIMEOUT": "10"}}
	if *full {
		j.limit = 6 * time.Hour
	}
	var before, after runtime.MemStats
	kv(j, Sum[float64], func(po *Node, rank int, w *KVWorker[float64]) {
		random := rand.New(rand.NewPCG(seed, uint64(rank)))
		all, ones := make([]uint64, space), make([]float64, space)
		for i := range all {
			all[i] = MaxKey / space * uint64(i)
		}
		noError(t, w.Push(t.Context(), all, ones))
		var flying []*Request
		step := func(n int) {
			for range n {
				keys, vals := make([]uint64, 0, batch), make([]float64, batch)
				at := random.IntN(space - batch*8)
				for i := range batch {
					at += 1 + random.IntN(7)
					keys = append(keys, all[at])
					vals[i] = float64(random.IntN(1000))
				}
				var r *Request
				var err error
				var out []float64
				switch random.IntN(3) {
				case 0:
					r, err = w.PullAsync(t.Context(), keys, &out)
				case 1:
					r, err = w.PushPullAsync(t.Context(), keys, vals, &out)
				default:
					r, err = w.PushAsync(t.Context(), keys, vals, ZeroCopy())
				}
				if err != nil {
					t.Error(err)
					return
				}
				if strings.HasPrefix(r.of.String(), "push") {
					for i, k := range keys {
						total[k/(MaxKey/space)].Add(int64(vals[i]))
					}
				}
				if flying = append(flying, r); len(flying) > 800 {
					wait(t, flying[0], nil)
					flying = flying[1:]
				}
			}
			for _, r := range flying {
				wait(t, r, nil)
			}
			flying = nil
		}
		barrier := func() { noError(t, po.Barrier(t.Context(), WorkerGroup)) }
		measure := func(m *runtime.MemStats) {
			if barrier(); rank == 0 {
				runtime.GC()
				runtime.ReadMemStats(m)
			}
			barrier()
		}
		step(requests / workers / 4)
		measure(&before)
		step(requests / workers * 3 / 4)
		measure(&after)
		var got []float64
		noError(t, w.Pull(t.Context(), all, &got))
		for i, v := range got {
			if want := float64(total[i].Load()); v != want {
				t.Errorf("key %d is %v, want %v", i, v, want)
			}
		}
	})
	t.Logf("heap %d KiB after a quarter, %d KiB at the end", before.HeapAlloc>>10, after.HeapAlloc>>10)
	if after.HeapAlloc > before.HeapAlloc+16<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before.HeapAlloc, after.HeapAlloc)
	}
}

// TestFailedRequestIsDropped checks that a server drops a request whose keys it has asked for, if the request
// has failed at the worker in the meantime.
func TestFailedRequestIsDropped(t *testing.T) {
	asks, failed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	faults := func(_, _ van.Process, m *van.Message, deliver func(*van.Message) error) error {
		if m.Header.WantKeys && !m.Header.Request {
			once.Do(func() { close(asks) })
			<-failed
		}
		return deliver(m)
	}
	j := job{t: t, servers: 1, workers: 1, faults: faults}
	j.run(func(po *Node) {
		if po.Role() == Server {
			s := must(NewKVServer(po, Sum[uint8]()))
			<-asks
			testnet.Eventually(t, "the server drops the request", func() bool {
				s.c.handling.Lock()
				defer s.c.handling.Unlock()
				return len(s.parked) == 0
			})
		}
		if po.Role() == Worker {
			w := must(NewKVWorker[uint8](po))
			list, err := w.lists.get([]uint64{1}, func([]uint64) ([]int, error) { return []int{0, 1}, nil })
			if err != nil {
				t.Error(err)
				return
			}
			w.lists.first(list, 0, false) // as if the keys had been sent
			r := must(w.PushAsync(t.Context(), []uint64{1}, []uint8{1}))
			<-asks
			w.c.complete(r, errTimeout)
			close(failed)
			testnet.WantError(t, r.Wait(t.Context()), errTimeout.Error())
		}
	})
}

// TestParkedBytes checks that the values of requests that wait for keys are bounded, and that they are not
// counted any more when the worker has gone. Lists of keys of workers that have gone are forgotten too.
func TestParkedBytes(t *testing.T) {
	job{t: t, servers: 1, workers: 1}.run(func(po *Node) {
		if po.Role() != Server {
			return
		}
		s := must(NewKVServer(po, Sum[float32]()))
		s.c.handling.Lock()
		defer s.c.handling.Unlock()
		vals, stranger := make([]byte, 4<<20), van.Process{ID: van.WorkerID(1)}
		push := func(handle func(van.Process, *van.Message), timestamp int64) {
			h := &pspb.Header{Push: true, KeyList: 1, Timestamp: timestamp,
				Frames: []*pspb.Frame{{}, {Type: pspb.DataType_FLOAT}, {}}}
			handle(stranger, &van.Message{Header: h, Data: [][]byte{nil, vals, nil}})
		}
		for i := range 100 {
			push(s.dispatch, int64(i))
			push(s.dispatch, int64(i)) // replaces the first one
		}
		if want := maxHeldBytes/len(vals) - 1; len(s.parked) != want || s.parkedBytes < want*len(vals) {
			t.Errorf("%d requests with %d bytes wait, want %d", len(s.parked), s.parkedBytes, want)
		}
		s.lists[senderKey{process: van.Process{ID: van.WorkerID(2)}}] = newServerLists()
		s.c.lost(stranger.ID, van.ErrLeft)
		push(s.handle, 0)
		if len(s.parked)+len(s.lists) > 0 || s.parkedBytes != 0 {
			t.Errorf("%d requests with %d bytes, and %d lists, are kept for workers that have gone",
				len(s.parked), s.parkedBytes, len(s.lists))
		}
	})
}

// TestMessageOfAGoneWorker checks that a server handles no message of a worker that has gone, although the
// message arrived before, and keeps nothing of that worker.
func TestMessageOfAGoneWorker(t *testing.T) {
	job{t: t, servers: 1, workers: 1}.run(func(po *Node) {
		if po.Role() != Server {
			return
		}
		s := must(NewKVServer(po, KVHandler[float32](func(KVMeta, KVPairs[float32], *KVServer[float32]) {
			t.Error("a request is handled")
		})))
		gone := van.Process{ID: van.WorkerID(0)} // another process has its place now
		s.c.handling.Lock()
		defer s.c.handling.Unlock()
		for _, keys := range [][]byte{nil, make([]byte, 8)} {
			h := &pspb.Header{Push: true, KeyList: 1,
				Frames: []*pspb.Frame{{}, {Type: pspb.DataType_FLOAT}, {}}}
			s.handle(gone, &van.Message{Header: h, Data: [][]byte{keys, make([]byte, 4), nil}})
		}
		if len(s.parked)+len(s.lists) > 0 {
			t.Errorf("the server keeps %d requests and %d lists", len(s.parked), len(s.lists))
		}
	})
}

// arenaBytes allocates n bytes in the arena for the duration of a test.
func arenaBytes(t *testing.T, n int) []byte {
	t.Helper()
	b, err := arena.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { noError(t, arena.Free(b)) })
	return b
}

// TestPushOfAWorkerThatHasLeft checks that a server that was busy while a worker left drops a later ZPush of
// this worker, whose values are in the memory of the worker, which may have changed since.
func TestPushOfAWorkerThatHasLeft(t *testing.T) {
	vals := arenaBytes(t, 4*van.SharedBytes)
	handled, serves, left := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var second atomic.Bool
	var pushes int
	handler := KVHandler[uint8](func(meta KVMeta, _ KVPairs[uint8], _ *KVServer[uint8]) {
		if pushes++; pushes > 1 {
			t.Errorf("push %d is handled", meta.Timestamp)
			return
		}
		close(handled)
		<-left
	})
	job{t: t, servers: 1, workers: 1, leave: true}.run(func(po *Node) {
		switch {
		case po.Role() == Scheduler:
			<-left
			return
		case po.Role() == Server:
			s := must(NewKVServer(po, handler))
			requests := 0
			s.c.handling.Lock()
			s.c.request = func(from van.Process, m *van.Message) {
				s.handle(from, m)
				requests++
				second.Store(requests == 2)
			}
			s.c.handling.Unlock()
			close(serves)
			<-left
			testnet.Eventually(t, "the second push has arrived", second.Load)
			return
		}
		defer close(left)
		<-serves
		w := must(NewKVWorker[uint8](po))
		var last *Request
		for range 2 {
			last = must(w.PushAsync(t.Context(), []uint64{1}, vals, ZeroCopy()))
		}
		<-handled
		last.Done() // sends it now
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		po.van.Stop(ctx)
		clear(vals)
	})
}

// TestPullTooLong checks that a server refuses a pull whose values no message can have, before it allocates
// memory for them.
func TestPullTooLong(t *testing.T) {
	po := &postoffice{}
	po.set.PS.Staleness = config.Unset
	po.van = van.New(van.Config{Role: van.Server, Customers: 1, Rank: -1}, router{po})
	s := Sum[float32]().(*builtIn[float32]).store
	for key := range uint64(3) {
		s.entries[key] = entry{chunk: new(chunk), n: 1 << 28}
	}
	list := &serverList{keys: []uint64{0, 1, 2}}
	const want = "the values have 3221225472 bytes, want at most 2147483647 from one server"
	_, err := s.request(&customer{po: po}, &KVMeta{Pull: true}, list, nil, 0, nil)
	testnet.WantError(t, err, want)
	m := &van.Message{Header: &pspb.Header{Pull: true}}
	_, _, err = (&replica{store: s}).request(van.Process{}, m, list, nil, 0)
	testnet.WantError(t, err, want)
}
