package shm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// errNoPeer reports that a rank is not in the group. Calls that need a rank other than this one also return
// it for this rank.
var errNoPeer = errors.New("the rank shares no memory with this rank")

// lane holds the memory that the ranks share for a lane, and the errors of the lane.
type lane struct {
	// err is the error of Abort, Release or Close, or nil. gone has one element for each rank of the group:
	// an error if that rank is lost, else nil.
	err  atomic.Pointer[error]
	gone []atomic.Pointer[error]

	// own, sharing and theirs are guarded by the Mesh's mu. sharing is set when Share is called.
	own     *shmem.Segment
	sharing bool
	theirs  []chunk // segment of each rank of the group; zero until the segment or an error has arrived
}

// fail makes the lane fail with err. If the lane has failed already, the error that has precedence stays. The
// caller holds mu.
func (l *lane) fail(err error) {
	if old := l.err.Load(); old == nil || err == transport.ErrReleased || err == transport.ErrClosed &&
		*old != transport.ErrReleased {
		l.err.Store(&err)
	}
}

// close unmaps the lane's segments.
func (l *lane) close() error {
	var errs []error
	if l.own != nil {
		errs = append(errs, l.own.Close())
	}
	for _, c := range l.theirs {
		if c.seg != nil {
			errs = append(errs, c.seg.Close())
		}
	}
	return errors.Join(errs...)
}

// lane returns the lane with the number id. If the lane is not in use yet, lane creates it. If the lane was
// released or the mesh is closed, it returns an error. The caller holds mu.
func (m *Mesh) lane(id transport.Lane) (*lane, error) {
	lanes := *m.lanes.Load()
	if l := lanes[id]; l != nil {
		return l, nil
	}
	if m.released.Has(id) {
		return nil, transport.ErrReleased
	}
	if m.closed {
		return nil, transport.ErrClosed
	}
	l := &lane{gone: make([]atomic.Pointer[error], len(m.group)), theirs: make([]chunk, len(m.group))}
	for _, p := range m.peers {
		if gone := p.gone.Load(); gone != nil {
			l.lose(p, id, gone)
		}
	}
	lanes = maps.Clone(lanes)
	lanes[id] = l
	m.lanes.Store(&lanes)
	return l, nil
}

// lose records why p is lost.
func (l *lane) lose(p *peer, id transport.Lane, why *loss) {
	err := why.peerError(id)
	l.gone[p.index].Store(&err)
}

// Err implements Sharer.
func (m *Mesh) Err(id transport.Lane, rank topo.Rank) error {
	l := (*m.lanes.Load())[id]
	if l == nil {
		var err error
		m.mu.Lock()
		l, err = m.lane(id)
		m.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if err := l.err.Load(); err != nil {
		return *err
	}
	if rank == m.rank {
		return nil
	}
	p := m.peer(rank)
	if p == nil {
		return errNoPeer
	}
	if err := l.gone[p.index].Load(); err != nil {
		return *err
	}
	return nil
}

// Share implements Sharer.
func (m *Mesh) Share(id transport.Lane, numBytes int64, peers []topo.Rank) ([]byte, error) {
	to, recipients, err := m.beginShare(id, peers)
	if err != nil {
		return nil, fmt.Errorf("shm: share lane %d: %w", id, err)
	}
	seg, err := m.segment(id, numBytes)
	m.mu.Lock()
	defer m.mu.Unlock()
	l, laneErr := m.lane(id)
	if laneErr == nil {
		if e := l.err.Load(); e != nil {
			laneErr = *e
		}
	}
	var f *file
	if err == nil && laneErr == nil && recipients > 0 {
		f, err = duplicate(seg.FD())
	}
	if err = errors.Join(laneErr, err); err != nil {
		if l != nil {
			l.sharing = false
		}
		if seg != nil {
			err = errors.Join(err, seg.Close())
		}
		return nil, fmt.Errorf("shm: share lane %d: %w", id, err)
	}
	l.own = seg
	if recipients > 0 {
		m.post(message{kind: shareMessage, id: uint32(id), size: uint64(len(seg.Bytes())), to: to,
			files: []*file{f}})
	}
	return seg.Bytes(), nil
}

// segment returns a segment for a lane. This is the segment that was reserved for the lane if it has at least
// numBytes bytes. Otherwise segment makes a new one. The caller must not hold mu, because making a segment
// takes a long time.
func (m *Mesh) segment(id transport.Lane, numBytes int64) (*shmem.Segment, error) {
	m.mu.Lock()
	seg := m.reserved[id]
	if seg != nil && int64(len(seg.Bytes())) >= numBytes {
		delete(m.reserved, id)
		m.mu.Unlock()
		return seg, nil
	}
	m.mu.Unlock()
	return shmem.Create(laneName(id), numBytes)
}

func laneName(id transport.Lane) string { return fmt.Sprintf("gohvd-lane-%d", id) }

// beginShare checks and records a call of Share. It returns the set of the ranks that get the segment, which
// is nil if all ranks of the group do, and the number of those that are not this rank. If Share was called
// for the lane before, it returns an error.
func (m *Mesh) beginShare(id transport.Lane, ranks []topo.Rank) (to rankSet, recipients int, err error) {
	to = newRankSet(len(m.group))
	for _, r := range ranks {
		if r == m.rank {
			continue
		}
		p := m.peer(r)
		if p == nil {
			return nil, 0, fmt.Errorf("rank %d: %w", r, errNoPeer)
		}
		if !to.has(p.index) {
			to.add(p.index)
			recipients++
		}
	}
	if recipients == len(m.peers) {
		to = nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l, err := m.lane(id)
	if err != nil {
		return nil, 0, err
	}
	if e := l.err.Load(); e != nil {
		return nil, 0, *e
	}
	if l.sharing {
		return nil, 0, errors.New("this rank has already shared its memory for the lane")
	}
	l.sharing = true
	return to, recipients, nil
}

// shared handles a shareMessage. It maps the segment that a peer shares for a lane. If the message violates
// the protocol, shared returns an error.
func (m *Mesh) shared(p *peer, id transport.Lane, msg *message) error {
	seg, err := mapSegment(msg.files[0].fd, msg.size)
	if errors.Is(err, errBreach) {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l, none := m.lane(id)
	if none != nil { // this rank has released the lane or closed the mesh
		if seg != nil {
			return seg.Close()
		}
		return nil
	}
	var breach error
	switch {
	case l.theirs[p.index] != (chunk{}):
		breach = fmt.Errorf("%w: got a second segment for lane %d, want one for each lane", errBreach, id)
	case p.shares >= maxShares:
		breach = fmt.Errorf("%w: got a segment for lane %d after segments for %d other lanes, want at most %d lanes",
			errBreach, id, p.shares, maxShares)
	}
	if breach != nil {
		if seg != nil {
			_ = seg.Close() // the error is ignored, because the violation of the protocol is reported
		}
		return breach
	}
	p.shares++
	l.theirs[p.index] = chunk{seg, err}
	m.notify()
	return nil
}

// Peer implements Sharer.
func (m *Mesh) Peer(ctx context.Context, id transport.Lane, rank topo.Rank) ([]byte, error) {
	p := m.peer(rank)
	if p == nil && rank != m.rank {
		return nil, fmt.Errorf("shm: get the segment of rank %d for lane %d: %w", rank, id, errNoPeer)
	}
	var b []byte
	err := m.await(ctx, func() (bool, error) {
		l, err := m.lane(id)
		if err != nil {
			return false, err
		}
		if e := l.err.Load(); e != nil {
			return false, *e
		}
		if p == nil {
			if l.own == nil {
				return false, errors.New("this rank has not yet shared its memory for the lane")
			}
			b = l.own.Bytes()
			return true, nil
		}
		if c := l.theirs[p.index]; c != (chunk{}) {
			if c.err == nil {
				b = c.seg.Bytes()
			}
			return true, c.err
		}
		if e := l.gone[p.index].Load(); e != nil {
			return false, *e
		}
		return false, m.leaderGone(id)
	})
	if err != nil {
		return nil, fmt.Errorf("shm: get the segment of rank %d for lane %d: %w", rank, id, err)
	}
	return b, nil
}

// offer shares an arena chunk of this process with all peers. If that needs a descriptor and this process has
// none left, Find does not find tensors in the chunk. offer and withdraw only queue messages, because package
// arena holds its lock while it calls them.
func (m *Mesh) offer(c arena.Chunk) {
	// Seal the chunk before a peer gets a descriptor, because peers must not write to the chunk.
	err := c.Segment.Seal()
	var f *file
	if err == nil {
		f, err = duplicate(c.Segment.FD())
	}
	if err != nil {
		m.log.Warn(fmt.Sprintf("shm: cannot share arena chunk %d, so other ranks get copies of its tensors until the ranks connect again: %v",
			c.ID, dial.ExplainLimit(err)))
		ids := map[uint32]bool{c.ID: true}
		if old := m.unshareable.Load(); old != nil {
			maps.Copy(ids, *old)
		}
		m.unshareable.Store(&ids)
		return
	}
	m.post(message{kind: arenaMessage, id: c.ID, size: uint64(len(c.Segment.Bytes())), files: []*file{f}})
}

// withdraw tells all peers that an arena chunk of this process is no longer shared.
func (m *Mesh) withdraw(id uint32) {
	if old := m.unshareable.Load(); old != nil && (*old)[id] {
		ids := maps.Clone(*old)
		delete(ids, id)
		m.unshareable.Store(&ids)
		return
	}
	m.post(message{kind: dropMessage, id: id})
}

// Find implements Sharer.
func (m *Mesh) Find(b []byte) (arena.Ref, bool) {
	at, ok := arena.Find(b)
	if ids := m.unshareable.Load(); ids != nil && (*ids)[at.Chunk] {
		return arena.Ref{}, false
	}
	return at, ok
}

// leaderGone returns an error for the lane if the leader, another rank, has gone. Then no more segments can
// arrive from any rank.
func (m *Mesh) leaderGone(id transport.Lane) error {
	if m.leads || len(m.linked) == 0 {
		return nil
	}
	gone := m.linked[0].gone.Load()
	if gone == nil {
		return nil
	}
	if gone.blamed != m.group[0] {
		return gone.peerError(id)
	}
	return &transport.PeerError{Peer: m.group[0], Lane: id,
		Err: fmt.Errorf("it passes on the memory of the other ranks of its host: %w", gone.err)}
}
