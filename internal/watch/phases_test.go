package watch

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

// The phases of random operations, which overlap and end in another order than they began, are those that a
// look at each moment gives. With more operations than pieces, the sum is still the time that has passed.
func TestPhases(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var p phases
		n, moments := 1+rng.IntN(40), make(map[time.Duration]trace.Phase)
		if seed%4 == 0 {
			n = 3000
		}
		now := time.Duration(0)
		for range n {
			now += time.Duration(rng.IntN(20))
			submitted := max(now-time.Duration(rng.IntN(30)), 1)
			granted := submitted + time.Duration(rng.IntN(10))
			begun := granted + time.Duration(rng.IntN(10))
			p.operation(submitted, granted, begun, now)
			for at := submitted; at < now; at++ {
				is := trace.Waiting
				if at >= begun {
					is = trace.Communicating
				} else if at >= granted {
					is = trace.Queued
				}
				moments[at] = max(moments[at], is)
			}
		}
		now += 5
		var want [trace.NumPhases]time.Duration
		for at := range now {
			want[moments[at]]++
		}
		got, total := p.until(now), time.Duration(0)
		for _, d := range got {
			total += d
		}
		if total != now || got != want {
			t.Fatalf("seed %d: got %v, want %v, in sum %v", seed, got, want, now)
		}
	}
}

// The phases of a pending operation never become shorter again, even if many other operations end before it.
func TestPhasesOfPending(t *testing.T) {
	var p phases
	var last [trace.NumPhases]time.Duration
	for now := time.Duration(10); now < 100_000; now += 10 {
		p.operation(now-5, now-4, now-3, now-2)
		if now%5000 == 0 {
			p.operation(1, 0, 0, now)
			got := p.until(now)
			for i := range got {
				if got[i] < last[i] {
					t.Fatalf("at %d: got %v after %v", now, got, last)
				}
			}
			last = got
		}
	}
	if last[trace.Computing] > 66_000 { // of 70,000 without the pending operation
		t.Errorf("got %v, want that the pending operation counts as far as the pieces go", last)
	}
}
