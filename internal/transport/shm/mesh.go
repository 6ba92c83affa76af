package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Mesh is one rank's end of the channels of an epoch. It implements Sharer.
type Mesh struct {
	log      *zap.Logger
	rank     topo.Rank
	size     int
	under    transport.Mesh
	group    []topo.Rank // in ascending order, including this rank
	groups   []topo.Rank // by rank, the lowest rank of its group
	unshared exclusion   // the ranks that are the reason why this host shares no memory
	peers    []*peer     // the ranks of the group except this rank
	index    int         // index of this rank in the group
	leads    bool        // this rank is the leader of the group, and there are other ranks
	// linked holds the peers with a link: at the leader all peers, at any other rank the leader.
	linked []*peer
	// byRank[r] is the peer with rank r. It is nil if rank r is not a peer.
	byRank []*peer

	control *shmem.Segment // this rank's control segment; control and waker are nil if there are no peers
	// reserved holds the segments that were made for Epoch.Reserve and are not shared yet. It is guarded by
	// mu.
	reserved map[transport.Lane]*shmem.Segment
	waker    *waker
	wg       sync.WaitGroup
	unwatch  func() // makes package arena stop calling offer and withdraw
	// unshareable has the IDs of the arena chunks that this rank could not share. It is nil if there has been
	// none. Nothing changes a map in place: a changed copy replaces it while package arena holds its lock.
	unshareable atomic.Pointer[map[uint32]bool]

	// parked is true from Park until Unpark. notifyPoller is the function that was passed to OnNotify.
	parked       atomic.Bool
	notifyPoller atomic.Pointer[func()]
	// deferNotify is set by OnNotify. Then Send does not notify the peer, because NotifyPeers will.
	deferNotify atomic.Bool
	// reachesOut is set when a Control channel of the mesh underneath is in use.
	reachesOut atomic.Bool

	// lanes holds the lanes in use. Nothing changes a map in place: a goroutine that holds mu stores a
	// changed copy. isClosed has the same value as closed, for goroutines that do not hold mu.
	lanes    atomic.Pointer[map[transport.Lane]*lane]
	isClosed atomic.Bool

	// mu is locked before the locks of conns and outboxes. It is never held together with the lock of package
	// arena.
	mu sync.Mutex
	// changed is closed when the state that calls of await check may have changed. It is nil if no goroutine
	// waits.
	changed  chan struct{}
	released transport.LaneSet
	closed   bool
	closing  chan struct{} // closed when Close is called
	ended    chan struct{} // closed when Close is done
}

func newMesh(e *Endpoint, ep *Epoch) *Mesh {
	m := &Mesh{
		log: e.log, rank: ep.Rank, size: len(ep.Hosts), under: ep.Under, group: []topo.Rank{ep.Rank},
		byRank: make([]*peer, len(ep.Hosts)), closing: make(chan struct{}), ended: make(chan struct{}),
	}
	m.lanes.Store(&map[transport.Lane]*lane{})
	m.reserved = make(map[transport.Lane]*shmem.Segment)
	return m
}

// begin starts the goroutines that run until Close.
func (m *Mesh) begin() error {
	if len(m.peers) == 0 {
		return nil
	}
	for _, p := range m.linked {
		if err := p.uc.SetDeadline(time.Time{}); err != nil { // remove the deadline of the handshake
			return fmt.Errorf("shm: connect: %w", err)
		}
	}
	m.wg.Go(func() { m.waker.watch(m.wakeAll) })
	for _, p := range m.linked {
		m.wg.Go(func() { p.send(m) })
		m.wg.Go(func() { p.receive(m) })
	}
	m.unwatch = arena.Watch(m.offer, m.withdraw)
	return nil
}

// Group implements Sharer.
func (m *Mesh) Group() []topo.Rank { return slices.Clone(m.group) }

// Groups implements Sharer.
func (m *Mesh) Groups() []topo.Rank { return slices.Clone(m.groups) }

// UnsharedReason implements Sharer.
func (m *Mesh) UnsharedReason() string { return m.unshared.String() }

// UnsharedRanks implements Sharer.
func (m *Mesh) UnsharedRanks() []topo.Rank { return slices.Clone(m.unshared.ranks) }

// peer returns the peer with the given rank, or nil if there is no such peer.
func (m *Mesh) peer(rank topo.Rank) *peer {
	if rank < 0 || int(rank) >= len(m.byRank) {
		return nil
	}
	return m.byRank[rank]
}

// byIndex returns the peer with the given index in the group, or nil if there is no such peer.
func (m *Mesh) byIndex(index int) *peer {
	if index >= len(m.group) {
		return nil
	}
	return m.peer(m.group[index])
}

// await calls check with mu held, first at once and then after each change, until check returns true or an
// error. If ctx ends first, await returns ctx.Err().
func (m *Mesh) await(ctx context.Context, check func() (bool, error)) error {
	for {
		m.mu.Lock()
		ok, err := check()
		if ok || err != nil {
			m.mu.Unlock()
			return err
		}
		if m.changed == nil {
			m.changed = make(chan struct{})
		}
		changed := m.changed
		m.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// notify makes every pending call of await call its check again. The caller holds mu.
func (m *Mesh) notify() {
	if m.changed != nil {
		close(m.changed)
		m.changed = nil
	}
}

func (m *Mesh) announce() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.notify()
}

// wakeAll wakes every parked goroutine, so that it checks whether it still has to wait. The waker calls
// wakeAll.
func (m *Mesh) wakeAll() {
	for _, p := range m.linked {
		p.conn.wake()
	}
	m.announce()
	m.wakePoller()
}

// wakePoller notifies the polling goroutine if it is parked.
func (m *Mesh) wakePoller() {
	if f := m.notifyPoller.Load(); f != nil && m.parked.Load() {
		(*f)()
	}
}

// loss is why a peer is lost. blamed is the rank that has caused it: the peer, or the rank that lacks a
// resource to share memory with the peer. err does not name blamed.
type loss struct {
	blamed topo.Rank
	err    error
}

func (l *loss) peerError(id transport.Lane) error {
	return &transport.PeerError{Peer: l.blamed, Lane: id, Err: l.err}
}

// lose records that a peer has gone or has violated the protocol, or that this rank lacks a resource to share
// memory with it. err is the reason. In the last case, the peer may live and the control channel to it works.
func (m *Mesh) lose(p *peer, err error) {
	l := &loss{p.rank, err}
	gone := message{kind: goneMessage, from: uint32(p.index)}
	lacks := dial.LacksResource(err)
	if lacks {
		var errno unix.Errno
		errors.As(err, &errno)
		gone.size = uint64(errno)
		l = &loss{m.rank, fmt.Errorf("it cannot share memory with rank %d: %w", p.rank, dial.ExplainLimit(err))}
	}
	if m.record(p, l) {
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			m.log.Warn(fmt.Sprintf("shm: lost the connection to rank %d: %v", p.rank, dial.ExplainLimit(err)))
		}
		if m.leads {
			m.pass(&gone)
		}
	}
	if p.link != nil && !lacks {
		p.conn.lose(err)
	}
	m.wakePoller()
}

// record records the loss of a peer, unless the peer was lost before or the mesh is closed.
func (m *Mesh) record(p *peer, l *loss) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || !p.gone.CompareAndSwap(nil, l) {
		return false
	}
	for id, lane := range *m.lanes.Load() {
		lane.lose(p, id, l)
	}
	m.notify()
	return true
}

// Conn implements transport.Mesh.
func (m *Mesh) Conn(ctx context.Context, id transport.Lane, rank topo.Rank) (transport.Conn, error) {
	p := m.peer(rank)
	if id == transport.Control && (p == nil || p.link == nil) {
		m.reachesOut.Store(true)
	}
	if id != transport.Control || p == nil || p.link == nil {
		return m.under.Conn(ctx, id, rank)
	}
	err := m.await(ctx, func() (bool, error) {
		switch cause := p.conn.cause.Load(); {
		case m.closed:
			return false, transport.ErrClosed
		case cause != nil:
			return false, *cause
		case m.rank < rank:
			if !p.conn.taken.Load() {
				p.conn.open()
			}
			return true, nil
		case p.conn.isOpen():
			return true, nil
		}
		if gone := p.gone.Load(); gone != nil {
			return false, gone.peerError(id)
		}
		return false, nil
	})
	if err == nil {
		p.conn.taken.Store(true)
		return p.conn, nil
	}
	if err == ctx.Err() {
		err = fmt.Errorf("shm: connect lane %d to rank %d: %w", id, rank, err)
	}
	return nil, err
}

// Abort implements transport.Mesh.
func (m *Mesh) Abort(id transport.Lane, err error) {
	if err == nil {
		panic("shm: bug: Abort was called without an error")
	}
	m.mu.Lock()
	l, none := m.lane(id)
	if none == nil && !m.closed {
		l.fail(err)
		m.notify()
	}
	m.mu.Unlock()
	if id == transport.Control {
		for _, p := range m.linked {
			p.conn.fail(err)
		}
		m.announce() // wake the calls of Conn, which then return err
		m.wakePoller()
	}
	m.under.Abort(id, err)
}

// Release implements transport.Mesh. It unmaps the lane's segments, so it must not be called while an
// operation uses them.
func (m *Mesh) Release(id transport.Lane) {
	if id == transport.Control {
		m.Abort(id, transport.ErrControl)
		return
	}
	m.mu.Lock()
	l := m.release(id)
	m.mu.Unlock()
	if l != nil {
		if err := l.close(); err != nil {
			m.log.Warn(err.Error())
		}
	}
	m.under.Release(id)
}

// release marks a lane as released. If the lane was in use, release returns it. The caller holds mu.
func (m *Mesh) release(id transport.Lane) *lane {
	if m.closed || m.released.Has(id) {
		return nil
	}
	m.released.Add(id)
	old := *m.lanes.Load()
	l := old[id]
	if l == nil {
		return nil
	}
	l.fail(transport.ErrReleased)
	lanes := make(map[transport.Lane]*lane, len(old))
	for other, o := range old {
		if other != id {
			lanes[other] = o
		}
	}
	m.lanes.Store(&lanes)
	for _, p := range m.peers {
		if l.theirs[p.index] != (chunk{}) {
			p.shares--
		}
	}
	m.notify()
	return l
}

// Close implements transport.Mesh.
func (m *Mesh) Close() error {
	m.mu.Lock()
	again := m.closed
	m.closed = true
	m.isClosed.Store(true)
	for _, l := range *m.lanes.Load() {
		l.fail(transport.ErrClosed)
	}
	m.notify()
	m.mu.Unlock()
	if again {
		<-m.ended
		return nil
	}
	close(m.closing)
	defer close(m.ended)
	if m.unwatch != nil {
		m.unwatch()
	}
	for _, p := range m.linked {
		p.conn.fail(transport.ErrClosed)
		p.outbox.close()
	}
	m.wakePoller()
	var errs []error
	for _, p := range m.linked {
		errs = append(errs, p.uc.Close())
	}
	if m.waker != nil {
		errs = append(errs, m.waker.close())
	}
	m.wg.Wait()
	errs = append(errs, m.under.Close(), m.unmap())
	return errors.Join(errs...)
}

// unmap frees all memory, and the descriptors of the peers. It is called when no goroutine uses them any
// more.
func (m *Mesh) unmap() error {
	var errs []error
	for _, l := range *m.lanes.Load() {
		errs = append(errs, l.close())
	}
	for _, p := range m.peers {
		for _, c := range *p.arenas.Load() {
			if c.seg != nil {
				errs = append(errs, c.seg.Close())
			}
		}
		for _, s := range p.stale {
			errs = append(errs, s.Close())
		}
	}
	errs = append(errs, m.freeControl())
	return errors.Join(errs...)
}

// freeControl frees the control segments and the eventfds of the peers. It may be called after any step of
// form has failed.
func (m *Mesh) freeControl() error {
	var errs []error
	for _, p := range m.linked {
		if p.control != nil {
			errs = append(errs, p.control.Close(), unix.Close(p.waker.fd))
		}
	}
	if m.waker != nil {
		m.waker.forget()
	}
	if m.control != nil {
		errs = append(errs, m.control.Close())
	}
	for _, seg := range m.reserved {
		errs = append(errs, seg.Close())
	}
	return errors.Join(errs...)
}

// OnNotify implements transport.Poller.
func (m *Mesh) OnNotify(notify func()) {
	m.notifyPoller.Store(&notify)
	m.deferNotify.Store(true)
	m.under.OnNotify(notify)
}

// NotifyPeers implements transport.Poller.
func (m *Mesh) NotifyPeers() {
	for _, p := range m.linked {
		p.conn.notify()
	}
	if m.reachesOut.Load() {
		m.under.NotifyPeers()
	}
}

// Park implements transport.Poller. It considers only the Conns that Mesh.Conn has returned.
func (m *Mesh) Park() bool {
	if !m.parked.Swap(true) && m.waker != nil {
		m.waker.park()
	}
	for _, p := range m.linked {
		if p.conn.taken.Load() && p.conn.waiting() {
			m.Unpark()
			return false
		}
	}
	if m.reachesOut.Load() && !m.under.Park() {
		m.Unpark()
		return false
	}
	return true
}

// Unpark implements transport.Poller.
func (m *Mesh) Unpark() {
	if m.parked.Swap(false) && m.waker != nil {
		m.waker.unpark()
	}
	if m.reachesOut.Load() {
		m.under.Unpark()
	}
}

// EntersKernel implements transport.Poller.
func (m *Mesh) EntersKernel() bool { return m.reachesOut.Load() }
