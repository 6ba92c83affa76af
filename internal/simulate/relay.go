package simulate

import (
	"bytes"
	"slices"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// relay is an alternative to controller.Combiner. It bundles the frames of its ranks, and does not interpret
// them, except that it recognizes heartbeats, verdicts and byes by their type. It holds a frame until all
// ranks have sent one, and at most for the time hold, because it does not know which ranks will send one.
// Equal frames share a part.
type relay struct {
	ranks  []topo.Rank
	hold   time.Duration
	now    time.Duration
	sent   []time.Duration // by rank: when a frame was last sent to it
	gone   []bool
	held   []message.Part
	at     [][]time.Duration
	have   []bool // whether the rank has a frame in held
	due    time.Duration
	failed bool
}

func newRelay(ranks []topo.Rank, hold time.Duration) *relay {
	n := len(ranks)
	return &relay{ranks: ranks, hold: hold, sent: make([]time.Duration, n), gone: make([]bool, n),
		have: make([]bool, n), due: controller.Never}
}

func (r *relay) Tick(now time.Duration) { r.now = now }

func (r *relay) index(k topo.Rank) int { return slices.Index(r.ranks, k) }

func (r *relay) Up(from topo.Rank, frame []byte) {
	i := r.index(from)
	hold := r.hold
	if frame[0] == byte(message.UpHeartbeat) {
		hold = 200 * time.Millisecond
	}
	r.due = min(r.due, r.now+hold)
	r.have[i] = true
	for k := len(r.held) - 1; k >= 0; k-- {
		p := &r.held[k]
		if bytes.Equal(p.Frame, frame) && !slices.Contains(p.Ranks, from) {
			p.Ranks, r.at[k] = append(p.Ranks, from), append(r.at[k], r.now)
			return
		}
		if slices.Contains(p.Ranks, from) {
			break // a frame must not overtake an earlier one of the same rank
		}
	}
	r.held = append(r.held, message.Part{Ranks: []topo.Rank{from}, Frame: slices.Clone(frame)})
	r.at = append(r.at, []time.Duration{r.now})
}

func (r *relay) Lost(k topo.Rank, reason string) {
	r.gone[r.index(k)] = true
	frame, err := message.AppendUp(nil, &message.Up{Type: message.UpLost, Suspect: k, Reason: reason})
	if err == nil {
		r.Up(r.ranks[0], frame)
		r.due = r.now
	}
}

func (r *relay) Down(to []topo.Rank, d *message.Down) {
	for _, k := range to {
		r.sent[r.index(k)] = r.now
	}
	r.failed = r.failed || d.Type == message.DownFail
}

func (r *relay) Ready() (parts []message.Part, quiet []topo.Rank) {
	if len(r.held) > 0 && (r.now >= r.due || !slices.Contains(r.have, false)) {
		for i := range r.held {
			for _, at := range r.at[i] {
				r.held[i].Held = append(r.held[i].Held, uint32((r.now-at)/time.Microsecond))
			}
		}
		parts, r.held, r.at, r.due = r.held, nil, nil, controller.Never
		clear(r.have)
	}
	for i, k := range r.ranks {
		if i > 0 && !r.gone[i] && !r.failed && r.now-r.sent[i] >= time.Second {
			r.sent[i] = r.now
			quiet = append(quiet, k)
		}
	}
	return parts, quiet
}

func (r *relay) Advance() {}

func (r *relay) Fail() []topo.Rank {
	if r.failed {
		return nil
	}
	r.failed = true
	return r.ranks[1:]
}

func (r *relay) Next() time.Duration {
	next := r.due
	for i := range r.ranks {
		if i > 0 && !r.gone[i] && !r.failed {
			next = min(next, r.sent[i]+time.Second)
		}
	}
	return next
}
