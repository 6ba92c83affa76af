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

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

const (
	// leadersAbove is the greatest size of a job in which every rank has a control connection to rank 0.
	leadersAbove = 64
	// levelsAbove is the greatest number of other hosts whose leaders all have a control connection to rank
	// 0.
	levelsAbove = 64
	// groupMost is the greatest size of a group of leaders.
	groupMost = 16
)

// Leaders returns the leaders of a job of more than above ranks (0 selects 64). hosts has the host of each
// rank. The leader of a host is its lowest rank. The ranks of rank 0's host have no leader. If there are more
// than levels other hosts (0 selects 64, or above if that is greater), their leaders have leaders, in groups
// of at most 16, or of at most levels if that is given. The result is the same at all ranks. It is nil if
// every rank has a connection to rank 0.
func Leaders(hosts []string, size, above, levels int) topo.Leaders {
	above = cmp.Or(above, leadersAbove)
	if size <= above || len(hosts) != size {
		return nil
	}
	leaders, behind := topo.HostLeaders(hosts)
	if len(behind) > cmp.Or(levels, max(above, levelsAbove)) {
		leaders.Group(behind, max(2, cmp.Or(levels, groupMost)))
	}
	for r, leader := range leaders {
		if leader != topo.Rank(r) {
			return leaders
		}
	}
	return nil
}

// Config has the parameters of Open.
type Config struct {
	Rank topo.Rank
	Size int
	// Leaders is the result of Leaders.
	Leaders topo.Leaders
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
	// routes has by rank the link over which this rank reaches it, or nil. It is empty if this rank sends
	// frames only to rank 0 or to its leader.
	routes []*link
	polled []*frames // the received frames of each link
	unread bool      // whether polled has bytes that Receive has not seen
	// addressed is memory for frames to leaders.
	addressed []byte
}

// Open opens the control connections: to the leader or to rank 0, and to the ranks of which this rank is the
// leader. At rank 0 it opens those to ranks without a leader.
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
		peers = append(peers, l.Upstream())
	}
	for i := 1; i < l.cfg.Size; i++ {
		if r := topo.Rank(i); r != l.cfg.Rank && l.cfg.Leaders.Upstream(r) == l.cfg.Rank {
			peers = append(peers, r)
		}
	}
	return peers
}

// setRoutes determines over which link this rank reaches each other rank.
func (l *Links) setRoutes() {
	if l.cfg.Rank != 0 && len(l.all) == 1 {
		return
	}
	l.routes = make([]*link, l.cfg.Size)
	for _, k := range l.all {
		l.routes[k.peer] = k
	}
	for f := range l.cfg.Leaders {
		r := topo.Rank(f)
		if hop := l.cfg.Leaders.Hop(l.cfg.Rank, r); hop != r && l.cfg.Leaders.Upstream(hop) == l.cfg.Rank {
			l.routes[r] = l.routes[hop]
			l.routes[r].behind++
		}
	}
}

// Upstream returns the rank to which this rank sends its frames: its leader or rank 0.
func (l *Links) Upstream() topo.Rank { return l.cfg.Leaders.Upstream(l.cfg.Rank) }

// Leads reports whether the frames of all the given ranks, except its own, pass through the rank leader.
func (l *Links) Leads(leader topo.Rank, ranks []topo.Rank) bool {
	return !slices.ContainsFunc(ranks, func(r topo.Rank) bool {
		return int(r) >= l.cfg.Size || r != leader && !l.cfg.Leaders.Lead(leader, r)
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
		f.short = false // Poll may have read before the frames of other peers arrived
	}
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
			if f.drained() {
				break // the next poll finds what arrives from now on
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

// Up sends a frame to rank 0 or to the leader. Unless the error is ErrBacklog, ErrTooLarge or a lack of
// resources (dial.LacksResource), reading from the connection returns the same error, after the frames that
// arrived before it.
func (l *Links) Up(frame []byte) error { return l.send(l.all[0], frame) }

// Down sends a frame from rank 0 to another rank. On error, it also returns the rank that is at fault.
func (l *Links) Down(to topo.Rank, frame []byte) (failed topo.Rank, err error) {
	k := l.routes[to]
	k.to = append(k.to, to)
	return l.sendOver(k, frame)
}

// DownAll sends a frame from rank 0 to all ranks, at rank 0, or to all ranks behind this rank, at a leader.
// It does the same as Downs, but its cost does not depend on the number of ranks.
func (l *Links) DownAll(frame []byte, failed []Event) []Event {
	for _, k := range l.all {
		k.every = l.cfg.Rank == 0 || k.peer != l.Upstream()
	}
	return l.sendDowns(frame, failed)
}

// Downs sends a frame from rank 0 to other ranks, at rank 0 or at a leader that passes it on. A leader gets
// it once for all ranks behind it. On error, Downs appends the rank that is at fault to failed.
func (l *Links) Downs(to []topo.Rank, frame []byte, failed []Event) []Event {
	for _, r := range to {
		if r != l.cfg.Rank {
			l.routes[r].to = append(l.routes[r].to, r)
		}
	}
	return l.sendDowns(frame, failed)
}

func (l *Links) sendDowns(frame []byte, failed []Event) []Event {
	for _, k := range l.all {
		if len(k.to) == 0 && !k.every {
			continue
		}
		if r, err := l.sendOver(k, frame); err != nil {
			failed = append(failed, Event{From: r, Err: err})
		}
	}
	return failed
}

// sendOver sends a frame to the ranks in k.to, or to all that k reaches if k.every is set. On error, it also
// returns the rank that is at fault: the peer, or this rank if the frame is too large or it lacks resources.
func (l *Links) sendOver(k *link, frame []byte) (failed topo.Rank, err error) {
	if k.behind > 0 {
		to := k.to
		if len(to) == 1+k.behind {
			to = nil // all of them
		}
		l.addressed = message.AppendAddressed(l.addressed[:0], to, frame)
		frame = l.addressed
	}
	k.to, k.every = k.to[:0], false
	switch err = l.send(k, frame); {
	case errors.Is(err, ErrTooLarge) || dial.LacksResource(err):
		return l.cfg.Rank, err
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
