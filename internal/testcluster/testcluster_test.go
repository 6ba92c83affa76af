package testcluster_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// i64 returns the bytes of the int64 elements v.
func i64(v ...int64) []byte { return bytes.Clone(tensor.Bytes(v)) }

// want fails the test if the elements of op's output are not v.
func want(r *testcluster.Rank, op *testcluster.Op, v ...int64) {
	if !bytes.Equal(op.Output, tensor.Bytes(v)) {
		r.Errorf("%v %q: got %v, want %v", op.Request.Kind, op.Request.Name, tensor.View[int64](op.Output), v)
	}
}

// backends is a Recorder that stores the backend of the operations of each process set.
type backends struct {
	mu   sync.Mutex
	used map[topo.ProcessSetID]message.Backend
}

// Record implements watch.Recorder.
func (b *backends) Record(op *trace.Operation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used[op.Records[0].Set] = op.Records[0].Backend
}

// TestBackendOfSet checks that a process set uses shared memory if all its members share memory, two levels
// if only some of them do, and TCP if none do.
func TestBackendOfSet(t *testing.T) {
	used := backends{used: make(map[topo.ProcessSetID]message.Backend)}
	testcluster.Run(t, testcluster.Options{Ranks: 4, Hosts: []string{"a", "a", "b", "b"},
		Sets:   [][]topo.Rank{{0, 1}, {2, 3}, {1, 2}, {3}},
		Config: func(cfg *engine.Config) { cfg.Recorder = &used },
	}, func(r *testcluster.Rank) {
		for set := range topo.ProcessSetID(5) {
			if !slices.Contains(r.Members(set), r.Rank) {
				continue
			}
			var sum int64
			for _, m := range r.Members(set) {
				sum += int64(m)
			}
			op := testcluster.Over(set, testcluster.Allreduce("x", tensor.Int64, nil, tensor.Sum,
				i64(int64(r.Rank))))
			r.Do(op)
			want(r, op, sum)
		}
	})
	for set, backend := range []message.Backend{message.Hier, message.SHM, message.SHM, message.TCP,
		message.SHM} {
		if got := used.used[topo.ProcessSetID(set)]; got != backend {
			t.Errorf("set %d used %v, want %v", set, got, backend)
		}
	}
}

// TestNewSetsOnTwoLevels adds and removes process sets whose members are on two hosts. Their operations run
// on two levels with lanes of their own, which are released when a set is removed.
func TestNewSetsOnTwoLevels(t *testing.T) {
	testcluster.Run(t, testcluster.Options{Ranks: 4, Hosts: []string{"a", "a", "b", "b"}},
		func(r *testcluster.Rank) {
			for _, members := range [][]topo.Rank{{0, 1, 2}, {1, 2, 3}, {0, 1, 2}, {0, 1, 3}} {
				added := testcluster.AddSet(members...)
				r.Do(added)
				set := added.Response.Set
				if slices.Contains(members, r.Rank) {
					var sum int64
					for _, m := range members {
						sum += int64(m)
					}
					reduced := testcluster.Over(set, testcluster.Allreduce("a", tensor.Int64,
						tensor.Shape{2}, tensor.Sum, i64(int64(r.Rank), 1)))
					copied := testcluster.Over(set, testcluster.Broadcast("b", tensor.Int64, nil, members[2],
						i64(int64(r.Rank))))
					r.Do(reduced, copied)
					want(r, reduced, sum, int64(len(members)))
					want(r, copied, int64(members[2]))
				}
				r.Do(testcluster.RemoveSet(set))
			}
		})
}

// TestVirtualTime checks that the time of an operation is exact in a synctest bubble. With a latency of 1 ms,
// a barrier must take 2 ms at rank 1. The request takes 1 ms to reach rank 0, and the grant takes 1 ms back.
func TestVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		testcluster.Run(t, testcluster.Options{Ranks: 2, Latency: time.Millisecond},
			func(r *testcluster.Rank) {
				began := time.Now()
				r.Do(testcluster.Barrier("b"))
				if took := time.Since(began); r.Rank == 1 && took != 2*time.Millisecond ||
					took > 2*time.Millisecond {
					r.Errorf("a barrier took %v, want 2ms at rank 1 and no more at rank 0", took)
				}
			})
	})
}

// TestFrames checks that OnFrame receives each frame of the negotiation as a whole.
func TestFrames(t *testing.T) {
	var (
		mu    sync.Mutex
		names []string
		up    message.Up
	)
	testcluster.Run(t, testcluster.Options{Ranks: 2, OnFrame: func(from, to topo.Rank, frame []byte) {
		mu.Lock()
		defer mu.Unlock()
		if from == 0 || message.IsProbe(frame) {
			return
		}
		if err := message.DecodeUp(frame, &up); err != nil {
			t.Errorf("rank %d to rank %d: %v", from, to, err)
		}
		for _, s := range up.Sets {
			for _, q := range s.Requests {
				names = append(names, q.Name)
			}
		}
	}}, func(r *testcluster.Rank) {
		for range 3 {
			r.Do(testcluster.Allreduce("x", tensor.Int64, nil, tensor.Sum, i64(1)))
		}
	})
	if !slices.Equal(names, []string{"x"}) {
		t.Errorf("requests in full for %v, want one for x", names)
	}
}

// recorder is a testing.TB that does not fail. It only records whether the test has failed and what was
// logged.
type recorder struct {
	testing.TB
	mu   sync.Mutex
	text []string
}

func (t *recorder) Helper() {}

func (t *recorder) Errorf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, fmt.Sprintf(format, args...))
}

// TestDeadline checks that the deadline ends an operation that would wait forever. The report must contain
// the stack of the goroutine that waits.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := &recorder{TB: t}
		began := time.Now()
		testcluster.Run(rec, testcluster.Options{Ranks: 3, Deadline: 7 * time.Second},
			func(r *testcluster.Rank) {
				if r.Rank != 2 {
					r.Do(testcluster.Barrier("b"))
				}
			})
		if took := time.Since(began); took != 7*time.Second {
			t.Errorf("the job ended after %v", took)
		}
		if len(rec.text) != 1 || !strings.Contains(rec.text[0], "the job has not ended after 7s") ||
			!strings.Contains(rec.text[0], "testcluster.(*Rank).Wait") {
			t.Errorf("the test failed with %q, want the stacks of a Wait and nothing else", rec.text)
		}
	})
}

// TestFatal checks that the waits of all other ranks end if one rank calls Fatalf.
func TestFatal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := &recorder{TB: t}
		began := time.Now()
		testcluster.Run(rec, testcluster.Options{Ranks: 3}, func(r *testcluster.Rank) {
			if r.Rank == 1 {
				r.Must(errors.New("broken"))
				t.Error("Must returned")
			}
			r.Do(testcluster.Barrier("b"))
		})
		if took := time.Since(began); took != 0 {
			t.Errorf("the job ended after %v", took)
		}
		if !slices.Equal(rec.text, []string{"rank 1: broken"}) {
			t.Errorf("the test failed with %q", rec.text)
		}
	})
}
