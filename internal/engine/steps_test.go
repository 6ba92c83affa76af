package engine_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
)

// In each step, another rank is 50 ms late. Rank 0 attributes the waiting to the step and to the rank, also
// if it is late itself. It keeps steps only while somebody asks for them.
func TestSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, late = 3, 50 * time.Millisecond
		c := start(t, n, nil)
		train := func(from, to uint64, late time.Duration) {
			c.each(func(r int) {
				for number := from; number < to; number++ {
					c.engines[r].Observer().MarkStep(100 + number)
					if int(number)%n == r {
						time.Sleep(late)
					}
					c.succeeds(c.allreduce(r, "x", make([]byte, 8)))
				}
			})
		}
		train(1, 4, late)
		if got := c.engines[0].Observer().Steps(0); len(got) > 0 {
			t.Errorf("got %+v, want no steps before somebody asked", got)
		}
		train(4, 10, late)
		got := c.engines[0].Observer().Steps(5)
		if len(got) != 3 { // the step in progress when somebody asked first is not complete
			t.Fatalf("got %+v, want the steps 6 to 8", got)
		}
		for i := range got {
			s, number := &got[i], uint64(6+i)
			want := make([]time.Duration, n)
			want[number%n] = late
			if s.Sequence != number || s.Number != 100+number || s.Time != late ||
				!slices.Equal(s.Held, want) {
				t.Errorf("got %+v, want step %d of 50 ms in which rank %d held up the others", *s, number,
					number%n)
			}
		}
		if got := c.engines[0].Observer().Steps(4); len(got) != 4 || got[0].Sequence != 5 {
			t.Errorf("got %+v, want the steps 5 to 8", got)
		}
		time.Sleep(11 * time.Second)
		train(10, 12, late)
		if got := c.engines[0].Observer().Steps(0); len(got) > 0 {
			t.Errorf("got %+v, want no steps after nobody asked for 11 s", got)
		}
		train(12, 400, 0)
		if got := c.engines[0].Observer().Steps(0); len(got) != 256 || got[255].Sequence != 398 {
			t.Errorf("got %d steps, want the last 256", len(got))
		}
		// The waiting counts for the step of the operation, also if rank 0 is late before it marks the step.
		c.engines[0].Observer().Steps(0)
		for number := uint64(400); number < 405; number++ {
			c.each(func(r int) {
				if r == 0 && number == 402 {
					time.Sleep(late)
				}
				c.engines[r].Observer().MarkStep(100 + number)
				c.succeeds(c.allreduce(r, "x", make([]byte, 8)))
			})
		}
		for _, s := range c.engines[0].Observer().Steps(398) {
			if want := s.Number == 502; want != (s.Held[0] == late) || !want && s.Held[0] != 0 {
				t.Errorf("got %+v, want that rank 0 held up the others for 50 ms only in step 502", s)
			}
		}
		// If two steps end in one turn, the waiting counts only for one of them.
		reduce := func(last int) {
			c.each(func(r int) {
				if r == last {
					time.Sleep(late)
				}
				c.succeeds(c.allreduce(r, "x", make([]byte, 8)))
			})
			synctest.Wait()
		}
		reduce(1)
		c.engines[0].Observer().MarkStep(505)
		c.engines[0].Observer().MarkStep(506)
		reduce(-1)
		got = c.engines[0].Observer().Steps(403)
		held := time.Duration(0)
		for _, s := range got {
			held += s.Held[1]
		}
		if len(got) != 2 || held != late {
			t.Errorf("got %+v, want 2 steps in which rank 1 held up the others for 50 ms together", got)
		}
		c.each(func(r int) { _ = c.engines[r].Shutdown(c.ctx, engine.Departure{}) })
	})
}
