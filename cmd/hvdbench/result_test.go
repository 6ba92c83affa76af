package main

import (
	"math"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
)

func TestQuantiles(t *testing.T) {
	var r result
	r.setTimes([][]float64{{40, 10, 30, 20}}, ofRank0, 1)
	if r.min != 10 || r.max != 40 || r.mean != 25 || r.p50 != 25 || math.Abs(r.p99-39.7) > 1e-9 {
		t.Errorf("of 10 20 30 40: %+v", r)
	}
	r.setTimes([][]float64{{7}}, ofRank0, 1)
	if r.p50 != 7 || r.p99 != 7 {
		t.Errorf("of one 7: %+v", r)
	}
}

func TestCombine(t *testing.T) {
	byRank := [][]float64{{1, 5}, {3, 1}, {2, 6}}
	for how, want := range map[average][2]float64{ofRank0: {1, 5}, ofMean: {2, 4}, ofMin: {1, 1},
		ofMax: {3, 6}} {
		if got := combine(byRank, how); math.Abs(got[0]-want[0])+math.Abs(got[1]-want[1]) > 1e-9 {
			t.Errorf("average %d: got %v, want %v", how, got, want)
		}
	}
	for _, c := range []struct {
		kind  message.Kind
		touch bool
		want  average
	}{{message.Allreduce, false, ofMean}, {message.Allreduce, true, ofMin}, {message.Broadcast, true,
		ofMax}} {
		if got := byKind.resolve(c.kind, c.touch); got != c.want {
			t.Errorf("%v, touched %v: average %d, want %d", c.kind, c.touch, got, c.want)
		}
	}
	if got := ofRank0.resolve(message.Broadcast, true); got != ofRank0 {
		t.Errorf("rank 0 became %d", got)
	}
}

func TestBusFactor(t *testing.T) {
	for kind, want := range map[message.Kind]float64{
		message.Allreduce: 1.5, message.Allgather: 0.75, message.Reducescatter: 0.75, message.Alltoall: 0.75,
		message.Broadcast: 1, message.Barrier: 0,
	} {
		if got := busFactor(kind, 4); got != want {
			t.Errorf("%v of 4 ranks: %v, want %v", kind, got, want)
		}
	}
}

// TestCallsFillTheTime checks how many calls are timed. They fill o.seconds, but there are at least 20 and at
// most 20000. If 20 calls would take longer than o.maxSeconds, there are as many calls as fit into that time,
// but at least 5, or 3 for sizes above 64 MiB. bench_run in bench/peers/bench.h has the same rule.
func TestCallsFillTheTime(t *testing.T) {
	for _, c := range []struct {
		seconds  float64
		numBytes int64
		micros   float64
		want     int
	}{
		{0.4, 4, 1, 20000}, {0.4, 4, 100, 4000}, {0.4, 1 << 20, 1000, 400}, {0.8, 16 << 20, 80000, 20},
		{0.8, 64 << 20, 200000, 15},
		{0.8, 64 << 20, 1000000, 5}, {0.8, 256 << 20, 900000, 3}, {0.8, 256 << 20, 5000000, 3},
	} {
		o := options{seconds: c.seconds, maxSeconds: 3}
		if got := o.calls(c.numBytes, c.micros); got != c.want {
			t.Errorf("%v s of %d bytes in %v us: %d calls, want %d", c.seconds, c.numBytes, c.micros, got,
				c.want)
		}
	}
	for numBytes, want := range map[int64]int{64 << 10: 50, 64<<10 + 1: 6, 4 << 20: 6, 4<<20 + 1: 2,
		64<<20 + 1: 1} {
		if got := warmUps(numBytes); got != want {
			t.Errorf("%d bytes: %d untimed calls, want %d", numBytes, got, want)
		}
	}
}
