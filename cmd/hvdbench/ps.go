package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/ps"
)

// psShape is a case of the benchmark of the parameter server: a number of keys with len values each.
type psShape struct{ keys, len int }

// psShapes are the cases in their order.
var psShapes = []psShape{{1, 1}, {64, 1}, {64, 16}, {1024, 64}, {1, 1024}, {1, 16384}, {1, 262144}, {16,
	65536},
	{4, 1048576}, {1000000, 1}}

const (
	// psSeconds is the default time for each case.
	psSeconds = 0.5
	// psLeast and psMost bound the number of calls of a case, and psFlying is how many pushes zpush8 has in
	// flight.
	psLeast, psMost, psFlying = 10, 20000, 8
)

// psHead is the first line of the table.
const psHead = "peer,op,workers,servers,keys,bytes,iters,median_us,min_us"

// psBench measures the pushes and pulls of a worker.
type psBench struct {
	node    *ps.Node
	w       *ps.KVWorker[float32]
	out     io.Writer
	seconds float64
}

// measurePS takes part in a job with a parameter server, in the role that DMLC_ROLE says. The worker with
// rank 0 prints a table with a line for each case and operation. Each time is that of one operation or, for
// zpush8, of eight that are in flight together.
func measurePS(ctx context.Context, seconds float64, out io.Writer) error {
	node, err := ps.Join(ctx, ps.Config{})
	if err != nil {
		return err
	}
	defer node.Close() // does nothing after Finalize
	switch node.Role() {
	case ps.Server:
		_, err = ps.NewKVServer(node, ps.Sum[float32]())
	case ps.Worker:
		b := &psBench{node: node, out: out, seconds: cmp.Or(seconds, psSeconds)}
		if b.w, err = ps.NewKVWorker[float32](node); err == nil {
			err = b.run(ctx)
		}
	}
	if err != nil {
		return err
	}
	return node.Finalize(ctx)
}

// run measures all cases.
func (b *psBench) run(ctx context.Context) error {
	if b.node.Rank() == 0 {
		fmt.Fprintln(b.out, psHead)
	}
	for i, s := range psShapes {
		if err := b.shape(ctx, i, s); err != nil {
			return fmt.Errorf("%d keys of %d values: %w", s.keys, s.len, err)
		}
	}
	return nil
}

// psKeys returns n keys of a worker for a case. They are spread over all keys that there are, and no other
// worker or case has one of them.
func psKeys(rank, index, n int) []uint64 {
	const block = 1 << 16 // more than there are workers and cases
	keys := make([]uint64, n)
	for i := range keys {
		spread := ps.MaxKey / uint64(n+1) * uint64(i+1)
		keys[i] = spread/block*block + uint64(rank*len(psShapes)+index)
	}
	return keys
}

// shape measures a case. The keys are spread over all servers, and each worker has keys of its own.
func (b *psBench) shape(ctx context.Context, index int, s psShape) error {
	keys := psKeys(b.node.Rank(), index, s.keys)
	vals, err := hvd.Alloc[float32](s.keys * s.len)
	if err != nil {
		return err
	}
	for i := range vals {
		vals[i] = 1
	}
	var got []float32
	pushes := 0
	push := func() error {
		pushes++
		return b.w.Push(ctx, keys, vals)
	}
	pull := func() error {
		got = got[:0]
		return b.w.Pull(ctx, keys, &got)
	}
	zpush := func() error {
		pushes++
		return b.w.Push(ctx, keys, vals, ps.ZeroCopy())
	}
	flying := func() error {
		var all [psFlying]*ps.Request
		for i := range all {
			r, err := b.w.PushAsync(ctx, keys, vals, ps.ZeroCopy())
			if err != nil {
				return err
			}
			all[i] = r
		}
		pushes += psFlying
		for _, r := range all {
			if err := r.Wait(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	if err := push(); err != nil {
		return err
	}
	for _, op := range []struct {
		name string
		once func() error
	}{{"push", push}, {"pull", pull}, {"zpush", zpush}, {"zpush8", flying}} {
		if err := b.time(op.name, s, op.once); err != nil {
			return fmt.Errorf("%s: %w", op.name, err)
		}
	}
	if err := pull(); err != nil {
		return err
	}
	if err := hvd.Free(vals); err != nil {
		return err
	}
	for i, v := range got {
		// Above 2^24 a float32 does not count further.
		if want := min(float32(pushes), 1<<24); v != want {
			return fmt.Errorf("the value %d is %v after %d pushes of 1", i, v, pushes)
		}
	}
	return nil
}

// time measures an operation and prints a line about it.
func (b *psBench) time(name string, s psShape, once func() error) error {
	for range 3 {
		if err := once(); err != nil {
			return err
		}
	}
	var times []float64 // in microseconds
	for begin := time.Now(); len(times) < psLeast || time.Since(begin).Seconds() < b.seconds; {
		start := time.Now()
		if err := once(); err != nil {
			return err
		}
		if times = append(times, float64(time.Since(start))/1e3); len(times) == psMost {
			break
		}
	}
	if b.node.Rank() != 0 {
		return nil
	}
	_, err := fmt.Fprintf(b.out, "gohvd,%s,%d,%d,%d,%d,%s\n", name, b.node.NumWorkers(), b.node.NumServers(),
		s.keys, 4*s.keys*s.len, psTimes(times))
	return err
}

// psTimes sorts the times of a case and returns their number, median and minimum as columns of the table.
func psTimes(micros []float64) string {
	slices.Sort(micros)
	return fmt.Sprintf("%d,%.2f,%.2f", len(micros), quantile(micros, 0.5), micros[0])
}
