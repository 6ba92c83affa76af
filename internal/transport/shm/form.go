package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/topo"
)

// form connects this rank with the other ranks of its host, unless unshared is set. If this fails at
// one of these ranks, none of them shares memory, and form sets unshared. It returns the result of
// Epoch.Agree.
func (m *Mesh) form(ctx context.Context, e *Endpoint, ep *Epoch) (failed map[topo.Rank]string, err error) {
	s := &setup{m: m, e: e, ep: ep}
	for r, h := range ep.Hosts {
		if h == ep.Hosts[ep.Rank] {
			s.group = append(s.group, topo.Rank(r))
		}
	}
	failed, err = ep.Agree(ctx, func(ctx context.Context) error {
		if len(m.unshared.ranks) > 0 || len(s.group) == 1 {
			return nil
		}
		return dial.ExplainLimit(s.exchange(ctx))
	})
	for _, r := range s.group {
		if text, ok := failed[r]; ok {
			m.unshared.add(r, text)
		}
	}
	if err != nil || len(m.unshared.ranks) > 0 {
		return failed, errors.Join(err, m.dissolve())
	}
	m.group = s.group
	for _, p := range m.peers {
		m.byRank[p.rank] = p
	}
	return failed, nil
}

// dissolve frees everything that the setup has created.
func (m *Mesh) dissolve() error {
	var errs []error
	for _, p := range m.peers {
		if p.uc != nil {
			errs = append(errs, p.uc.Close())
		}
	}
	if m.waker != nil {
		errs = append(errs, m.waker.close())
	}
	errs = append(errs, m.freeControl())
	m.peers, m.waker, m.control = nil, nil, nil
	return errors.Join(errs...)
}

// setup connects a rank with the other ranks of its group and exchanges descriptors.
type setup struct {
	m     *Mesh
	e     *Endpoint
	ep    *Epoch
	group []topo.Rank
	index int // index of this rank in the group

	layout controlLayout
	peers  []*peer // by rank; nil for this rank and for ranks outside of the group

	mu      sync.Mutex
	claimed map[topo.Rank]bool
}

// exchange exchanges descriptors with all peers. It returns when this is done, when it has failed for a peer,
// or when ctx has ended. It does not close a connection whose handshake is complete, because the peer would
// take the end of the connection as the death of this rank.
func (s *setup) exchange(ctx context.Context) (err error) {
	s.layout = controlLayout{len(s.group), s.e.cfg.RingBytes}
	s.index = slices.Index(s.group, s.ep.Rank)
	s.peers = make([]*peer, len(s.ep.Hosts))
	s.claimed = make(map[topo.Rank]bool)
	// dialers[r] is the offer of rank r if rank r dials this rank, else nil.
	dialers := make([]*Offer, len(s.ep.Hosts))
	for i, r := range s.group {
		if i == s.index {
			continue
		}
		p := &peer{rank: r, index: i}
		p.outbox.filled.L = &p.outbox.mu
		p.arenas.Store(&map[uint32]chunk{})
		s.peers[r] = p
		s.m.peers = append(s.m.peers, p)
		if i < s.index {
			dialers[r] = &s.ep.Offers[r]
		}
	}
	control, err := shmem.Create("gohvd-control", int64(s.layout.bytes()))
	if err != nil {
		return err
	}
	s.m.control = control
	for id, numBytes := range s.ep.Reserve {
		seg, err := shmem.Create(laneName(id), numBytes)
		if err != nil {
			return err
		}
		s.m.reserved[id] = seg
	}
	if s.m.waker, err = newWaker(word32(control.Bytes(), parkedAt)); err != nil {
		return err
	}

	ctx, cancel := context.WithCancel(ctx)
	results := make(chan error, len(s.group))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() { err = errors.Join(err, s.e.Close()) }() // close the listener, so that accept returns
	defer cancel()
	wg.Go(func() { s.accept(ctx, &wg, dialers, results) })
	for i, r := range s.group {
		if i > s.index {
			wg.Go(func() { results <- s.dial(ctx, s.peers[r]) })
		}
	}
	for range len(s.group) - 1 {
		select {
		case err := <-results:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// dial connects to the peer p, which has a higher rank. Then it does the handshake and exchanges descriptors.
func (s *setup) dial(ctx context.Context, p *peer) error {
	var d net.Dialer
	nc, err := d.DialContext(ctx, network, s.ep.Offers[p.rank].Socket)
	if err != nil {
		return fmt.Errorf("connect to rank %d: %w", p.rank, err)
	}
	uc := nc.(*net.UnixConn)
	p.uc = uc
	defer interrupt(ctx, uc)()
	if err := dialHandshake(uc, s.ep, &s.e.offer, p.rank); err != nil {
		return fmt.Errorf("handshake with rank %d: %w", p.rank, err)
	}
	return s.exchangeDescriptors(p)
}

// interrupt makes calls on uc fail when ctx ends. The caller must call the function end, which stops this.
func interrupt(ctx context.Context, uc *net.UnixConn) (end func()) {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		_ = uc.SetDeadline(time.Unix(1, 0)) // fails only if uc is closed, and then the calls fail anyway
	})
	return func() {
		if !stop() {
			<-done
		}
	}
}

// accept accepts connections from the lower ranks until the listener is closed. It starts a goroutine in wg
// for each connection.
func (s *setup) accept(ctx context.Context, wg *sync.WaitGroup, dialers []*Offer, results chan<- error) {
	for {
		uc, err := s.e.ln.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Accept fails if the process has run out of descriptors or memory. Then this rank cannot share
			// memory.
			results <- fmt.Errorf("accept a connection: %w", err)
			return
		}
		wg.Go(func() { s.receive(ctx, uc, dialers, results) })
	}
}

// receive does the handshake with a process that has connected. If the handshake fails, receive only logs a
// warning and closes the connection, because the process may be a stranger.
func (s *setup) receive(ctx context.Context, uc *net.UnixConn, dialers []*Offer, results chan<- error) {
	refuse := func(err error) {
		if ctx.Err() == nil {
			s.e.log.Warn("shm: refused a connection", zap.Error(err))
		}
		_ = uc.Close() // the error is ignored, because the connection is not used any more
	}
	if err := uc.SetDeadline(time.Now().Add(s.e.cfg.HandshakeTimeout)); err != nil {
		refuse(err)
		return
	}
	defer interrupt(ctx, uc)()
	from, err := acceptHandshake(uc, s.ep, &s.e.offer, dialers)
	if err != nil {
		refuse(err)
		return
	}
	s.mu.Lock()
	twice := s.claimed[from]
	s.claimed[from] = true
	s.mu.Unlock()
	if twice {
		refuse(fmt.Errorf("rank %d is already connected", from))
		return
	}
	p := s.peers[from]
	p.uc = uc
	results <- s.exchangeDescriptors(p)
}

// exchangeDescriptors exchanges descriptors with a peer whose handshake is complete.
func (s *setup) exchangeDescriptors(p *peer) error {
	if err := s.sendDescriptors(p); err != nil {
		return fmt.Errorf("send descriptors to rank %d: %w", p.rank, err)
	}
	if err := s.receiveDescriptors(p); err != nil {
		return fmt.Errorf("receive descriptors from rank %d: %w", p.rank, err)
	}
	return nil
}

func (s *setup) sendDescriptors(p *peer) error {
	var fds []int
	for _, fd := range []int{s.m.control.FD(), s.m.waker.fd} {
		dup, err := duplicate(fd)
		if err != nil {
			closeAll(fds)
			return err
		}
		fds = append(fds, dup)
	}
	msg := message{controlMessage, uint32(s.index), uint64(s.layout.ringBytes), fds}
	return msg.write(p.uc)
}

func (s *setup) receiveDescriptors(p *peer) error {
	msg, err := readMessage(p.uc)
	if err != nil {
		return err
	}
	ringBytes := msg.size
	if msg.kind != controlMessage || int(msg.id) != p.index || ringBytes < minRingBytes ||
		ringBytes > maxRingBytes || ringBytes&(ringBytes-1) != 0 {
		msg.close()
		return fmt.Errorf("%w: got a message with kind %d, index %d and ring size %d, want kind %d, index %d and a power of two from %d to %d",
			errBreach, msg.kind, msg.id, ringBytes, controlMessage, p.index, minRingBytes, maxRingBytes)
	}
	eventfd := msg.fds[1]
	if err := checkEventfd(eventfd); err != nil {
		msg.close()
		return err
	}
	other := controlLayout{len(s.group), int(ringBytes)}
	seg, err := shmem.Map(msg.fds[0])
	closeAll(msg.fds[:1])
	if err == nil && len(seg.Bytes()) < other.bytes() {
		err = errors.Join(fmt.Errorf("%w: got a control segment of %d bytes, want at least %d", errBreach,
			len(seg.Bytes()), other.bytes()), seg.Close())
	}
	if err != nil {
		closeAll([]int{eventfd})
		return err
	}
	p.control = seg
	p.waker = peerWaker{eventfd, word32(seg.Bytes(), parkedAt)}
	p.conn = newConn(s.m.waker, &s.m.deferNotify, p, s.m.control.Bytes(), seg.Bytes(), s.index, s.layout,
		other)
	return nil
}
