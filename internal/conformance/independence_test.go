package conformance

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
)

// The operations of a process set take exactly the same time whether another set is idle, works, or waits for
// a rank. Two ranks are members of both sets, and one of them is the lowest rank of the second set. The
// coordinator is a member of neither set or of both. (In lock-step the times would differ, because all ranks
// take part in each cycle.)
func TestProcessSetsAreIndependent(t *testing.T) {
	for _, sets := range [][][]topo.Rank{
		{{1, 2, 3}, {2, 3, 4}},
		{{0, 2, 3}, {0, 2, 3, 4}},
	} {
		t.Run(fmt.Sprint(sets), func(t *testing.T) {
			idle := timesOf(t, sets, nil)
			if n := len(sets[0]) * len(fixedSequence()); len(idle) != n {
				t.Fatalf("%d times %v, want %d", len(idle), idle, n)
			}
			for name, other := range map[string]func(r *testcluster.Rank, stop <-chan struct{}){
				"busy":       busy,
				"stuck":      stuck,
				"manyGrants": manyGrants,
			} {
				if got := timesOf(t, sets, other); !slices.Equal(got, idle) {
					t.Errorf("while the other set is %s operations end after\n%v, while it is idle after\n%v",
						name, got, idle)
				}
			}
		})
	}
}

// fixedSequence returns operations of every kind. Names occur more than once, so that some requests are in
// the cache.
func fixedSequence() []*job {
	var jobs []*job
	for i := range 12 {
		float := reduction{dt: tensor.Float32, op: tensor.Sum, pre: 1, post: 1}
		moved := reduction{dt: tensor.Int16, pre: 1, post: 1}
		all := []what{
			{kind: message.Allreduce, reduction: float}, {kind: message.Allgather, reduction: moved},
			{kind: message.Reducescatter, reduction: float}, {kind: message.Broadcast, reduction: moved},
			{kind: message.Alltoall, reduction: moved}, {kind: message.Barrier},
		}
		w := all[i%len(all)]
		jobs = append(jobs, &job{what: w, name: w.kind.String(), elements: 3000, seed: uint64(i)})
	}
	return jobs
}

// timesOf runs the fixed sequence on set 1 and, at the same time, the function other on set 2. Connections
// have a latency of 1 ms. timesOf returns how long after the beginning each operation of set 1 ended, rank by
// rank. The test fails if the function other ends before the sequence.
func timesOf(t *testing.T, sets [][]topo.Rank,
	other func(r *testcluster.Rank, stop <-chan struct{})) []time.Duration {
	const ranks = 5
	var (
		times [ranks][]time.Duration
		ended [ranks]time.Duration // the times at which the ranks of the other set ended
	)
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		// waits until d has passed in fake time
		at := func(d time.Duration) { time.Sleep(time.Until(began.Add(d))) }
		jobs := fixedSequence()
		for _, j := range jobs {
			j.set, j.members = 1, sets[0]
		}
		stop := make(chan struct{})
		var left atomic.Int64
		left.Store(int64(len(sets[0])))
		testcluster.Run(t, testcluster.Options{Ranks: ranks, Latency: time.Millisecond, Sets: sets},
			func(r *testcluster.Rank) {
				at(100 * time.Millisecond) // all ranks are connected by this time
				var work sync.WaitGroup
				if other != nil && slices.Contains(sets[1], r.Rank) {
					work.Go(func() {
						other(r, stop)
						ended[r.Rank] = time.Since(began)
					})
				}
				defer work.Wait()
				if !slices.Contains(sets[0], r.Rank) {
					return
				}
				defer func() {
					if left.Add(-1) == 0 {
						close(stop)
					}
				}()
				at(120 * time.Millisecond) // the other set is working by this time
				for _, j := range jobs {
					op := j.submission(r)
					r.Do(op)
					times[r.Rank] = append(times[r.Rank], time.Since(began))
					r.Must(j.check(r, op))
				}
			})
	})
	all := slices.Concat(times[:]...)
	if other != nil && slices.Max(ended[:]) <= slices.Max(all) {
		t.Errorf("the other set was done after %v, this one after %v: they did not work at the same time",
			slices.Max(ended[:]), slices.Max(all))
	}
	return all
}

// busy runs allreduces one after the other.
func busy(r *testcluster.Rank, _ <-chan struct{}) {
	for i := range 100 {
		op := testcluster.Allreduce(fmt.Sprint("x", i%7), tensor.Int64, tensor.Shape{10}, tensor.Sum,
			make([]byte, 80))
		r.Do(testcluster.Over(2, op))
	}
}

// manyGrants submits many alltoalls at the same time. Because alltoalls cannot be fused, many grants are
// unfinished at the same time.
func manyGrants(r *testcluster.Rank, _ <-chan struct{}) {
	rows := int64(100 * len(r.Members(2)))
	for range 5 {
		var ops []*testcluster.Op
		for i := range 20 {
			op := testcluster.Alltoall(fmt.Sprint("x", i), tensor.Int64, tensor.Shape{rows}, nil,
				make([]byte, 8*rows))
			ops = append(ops, testcluster.Over(2, op))
		}
		r.Do(ops...)
	}
}

// stuck waits at a barrier for the last rank of the set. That rank enters the barrier only when the fixed
// sequence on the other set has ended.
func stuck(r *testcluster.Rank, stop <-chan struct{}) {
	if members := r.Members(2); r.Rank == members[len(members)-1] {
		<-stop
	}
	r.Do(testcluster.Over(2, testcluster.Barrier("b")))
}
