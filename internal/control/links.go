// Package control moves the control frames of a rank: it opens the control connections, splits what arrives
// into frames, sends frames to rank 0, to a leader or to other ranks, and measures the offset of the rank's
// clock. It also has the collectives of lock-step over these connections. It does not interpret the frames of
// the negotiation.
package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// leadersAbove is the greatest size of a job in which every rank has a control connection to rank 0.
const leadersAbove = 64

// Leaders returns for each rank the rank that passes on its frames to rank 0: the lowest rank of its host, or
// the rank itself if it has a control connection to rank 0. It returns nil if all ranks have one, because
// there are at most above ranks (0 selects 64), or because each host but that of rank 0 has only one rank.
// hosts has the host of each rank. The result is the same at all ranks.
func Leaders(hosts []string, size, above int) []topo.Rank {
	if size <= cmp.Or(above, leadersAbove) || len(hosts) != size {
		return nil
	}
	first := map[string]topo.Rank{}
	leaders := make([]topo.Rank, size)
	behind := false
	for i, host := range hosts {
		r := topo.Rank(i)
		if leader, found := first[host]; found && host != hosts[0] {
			leaders[i], behind = leader, true
			continue
		}
		first[host], leaders[i] = r, r
	}
	if !behind {
		return nil
	}
	return leaders
}

// Config has the parameters of Open.
type Config struct {
	Rank topo.Rank
	Size int
	// Leaders is the result of Leaders.
	Leaders []topo.Rank
	Mesh    transport.Mesh
	// Sent is called before each frame is sent. If the peer is parked, it must be notified later.
	Sent func()
}

// Links are the control connections of a rank: to rank 0 or to the leader, and at rank 0 and at leaders those
// to other ranks. Only the goroutine that runs turns of the loop may call the methods, except Flush and
// Drain.
type Links struct {
	cfg Config
	all []*link
	// routes has by rank the link over which this rank reaches it, or nil.
	routes []*link
	polled []*frames // the received frames of each link
	unread bool      // whether polled has bytes that Receive has not seen
	// addressed is memory for frames to leaders.
	addressed []byte
}

// Open opens the control connections: at rank 0 those to ranks without a leader, at a rank with a leader the
// one to the leader, and at any other rank the one to rank 0 and those to the ranks that it leads.
func Open(ctx context.Context, cfg Config) (*Links, error) {
	l := &Links{cfg: cfg}
	peers := l.peers()
	l.all = make([]*link, len(peers))
	errs := make([]error, len(peers))
	var wg sync.WaitGroup
	for i, p := range peers {
		wg.Go(func() {
			conn, err := cfg.Mesh.Conn(ctx, transport.Control, p)
			l.all[i], errs[i] = &link{peer: p, conn: conn}, err
		})
	}
	wg.Wait()
	l.setRoutes()
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("engine: rank %d: opening the control connections: %w", cfg.Rank, err)
	}
	for _, k := range l.all {
		l.polled = append(l.polled, &frames{peer: k.peer, conn: k.conn})
	}
	return l, nil
}

// peers returns the ranks to which this rank has control connections.
func (l *Links) peers() (peers []topo.Rank) {
	if l.cfg.Rank != 0 {
		return append([]topo.Rank{l.Upstream()}, l.Led()[1:]...)
	}
	for i := 1; i < l.cfg.Size; i++ {
		if r := topo.Rank(i); l.leader(r) == r {
			peers = append(peers, r)
		}
	}
	return peers
}

// setRoutes determines over which link this rank reaches each other rank.
func (l *Links) setRoutes() {
	l.routes = make([]*link, l.cfg.Size)
	for _, k := range l.all {
		l.routes[k.peer] = k
	}
	for f, leader := range l.cfg.Leaders {
		if r := topo.Rank(f); l.cfg.Rank == 0 && leader != r {
			l.routes[r] = l.routes[leader]
			l.routes[r].leads = true
		}
	}
}

// Upstream returns the rank to which this rank sends its frames: its leader or rank 0.
func (l *Links) Upstream() topo.Rank {
	if leader := l.leader(l.cfg.Rank); leader != l.cfg.Rank {
		return leader
	}
	return 0
}

// Led returns this rank and the ranks whose frames it passes on.
func (l *Links) Led() []topo.Rank {
	led := []topo.Rank{l.cfg.Rank}
	for i, leader := range l.cfg.Leaders {
		if r := topo.Rank(i); r != l.cfg.Rank && leader == l.cfg.Rank {
			led = append(led, r)
		}
	}
	return led
}

// leader returns the rank that passes on the frames of rank r.
func (l *Links) leader(r topo.Rank) topo.Rank {
	if l.cfg.Leaders == nil {
		return r
	}
	return l.cfg.Leaders[r]
}

// Leads reports whether the rank leader passes on the frames of all the given ranks.
func (l *Links) Leads(leader topo.Rank, ranks []topo.Rank) bool {
	return !slices.ContainsFunc(ranks, func(r topo.Rank) bool {
		return int(r) >= l.cfg.Size || l.leader(r) != leader
	})
}

// Poll reads once from the connections, without blocking, until one of them has received something. It
// reports whether something has arrived for Receive.
func (l *Links) Poll() bool {
	for _, f := range l.polled {
		if f.fill() {
			l.unread = true
			return true
		}
	}
	return false
}

// Unread reports whether something has arrived that Receive has not handled.
func (l *Links) Unread() bool { return l.unread }

// Receive calls handle with the frames that have arrived, and with the ends of connections. It returns the
// first error of handle. Frames are valid until handle returns. If one peer has sent many frames, Receive
// leaves some of them; then Unread reports true.
func (l *Links) Receive(handle func(ev Event) error) error {
	l.unread = false
	for _, f := range l.polled {
		for n := 0; ; n++ {
			if n == framesPerTurn {
				l.unread = true
				break
			}
			ev, ok := f.next()
			if !ok {
				break
			}
			if err := handle(ev); err != nil {
				return err
			}
		}
	}
	return nil
}

// send sends a frame over a link.
func (l *Links) send(k *link, frame []byte) error {
	l.cfg.Sent()
	return k.send(frame)
}

// Up sends a frame to rank 0 or to the leader. If the error is neither ErrBacklog nor ErrTooLarge, reading
// from the connection returns the same error, after the frames that arrived before it.
func (l *Links) Up(frame []byte) error { return l.send(l.all[0], frame) }

// ToMember sends a frame to a rank that this rank leads. The errors are those of Up.
func (l *Links) ToMember(r topo.Rank, frame []byte) error { return l.send(l.routes[r], frame) }

// Down sends a frame from rank 0 to another rank. On error, it also returns the rank that is at fault.
func (l *Links) Down(to topo.Rank, frame []byte) (failed topo.Rank, err error) {
	k := l.routes[to]
	k.to = append(k.to, to)
	return l.sendOver(k, frame)
}

// Downs sends a frame from rank 0 to other ranks. A leader gets it once for all its ranks. On error, Downs
// appends the rank that is at fault to failed.
func (l *Links) Downs(to []topo.Rank, frame []byte, failed []Event) []Event {
	for _, r := range to {
		if r != 0 {
			l.routes[r].to = append(l.routes[r].to, r)
		}
	}
	for _, k := range l.all {
		if len(k.to) == 0 {
			continue
		}
		if r, err := l.sendOver(k, frame); err != nil {
			failed = append(failed, Event{From: r, Err: err})
		}
	}
	return failed
}

// sendOver sends a frame from rank 0 to the ranks in k.to. On error, it also returns the rank that is at
// fault.
func (l *Links) sendOver(k *link, frame []byte) (failed topo.Rank, err error) {
	if k.leads {
		l.addressed = message.AppendAddressed(l.addressed[:0], k.to, frame)
		frame = l.addressed
	}
	k.to = k.to[:0]
	switch err = l.send(k, frame); {
	case errors.Is(err, ErrTooLarge):
		return 0, err
	case errors.Is(err, ErrBacklog):
		return k.peer, err
	}
	return 0, nil // reading from the connection returns any other error (see Up)
}

// Drain keeps reading the connections after the loop has ended, so that peers can send their backlog. It
// blocks until the mesh is closed.
func (l *Links) Drain() {
	var draining sync.WaitGroup
	for _, k := range l.all {
		draining.Go(func() { _, _ = io.Copy(io.Discard, k.conn) }) // returns when the mesh is closed
	}
	draining.Wait()
}

// Flush blocks until all queued frames have left this process.
func (l *Links) Flush() {
	for _, k := range l.all {
		_ = k.flush() // the peer may be gone
	}
}
