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
	for _, p := range m.linked {
		if p.uc != nil {
			errs = append(errs, p.uc.Close())
		}
	}
	if m.waker != nil {
		errs = append(errs, m.waker.close())
	}
	errs = append(errs, m.freeControl())
	m.peers, m.linked, m.leads, m.waker, m.control = nil, nil, false, nil, nil
	return errors.Join(errs...)
}

// setup connects the leader of a group, its lowest rank, with the other ranks, and exchanges descriptors.
type setup struct {
	m     *Mesh
	e     *Endpoint
	ep    *Epoch
	group []topo.Rank

	// own is the layout of this rank's control segment, and theirs that of the control segments of its
	// peers, except for the sizes of their rings.
	own, theirs controlLayout

	mu      sync.Mutex
	claimed bool // the leader has connected to this rank
}

// exchange exchanges descriptors with the leader, or, at the leader, with all peers. It returns when this is
// done, when it has failed for a peer, or when ctx has ended. It does not close a connection whose handshake
// is complete, because the peer would take the end of the connection as the death of this rank.
func (s *setup) exchange(ctx context.Context) (err error) {
	s.m.index = slices.Index(s.group, s.ep.Rank)
	s.m.leads = s.m.index == 0
	peers, none := make([]peer, len(s.group)), &map[uint32]chunk{}
	for i, r := range s.group {
		if i == s.m.index {
			continue
		}
		p := &peers[i]
		p.rank, p.index = r, i
		p.arenas.Store(none)
		if s.m.leads || i == 0 {
			p.link = new(link)
			p.outbox.filled.L = &p.outbox.mu
			s.m.linked = append(s.m.linked, p)
		}
		s.m.peers = append(s.m.peers, p)
	}
	s.own, s.theirs = controlLayout{len(s.m.linked), s.e.cfg.RingBytes}, controlLayout{size: 1}
	if !s.m.leads {
		s.theirs.size = len(s.m.peers)
	}
	control, err := shmem.Create("gohvd-control", int64(s.own.bytes()))
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
	results := make(chan error, len(s.m.linked)+1) // accept may fail too
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() { err = errors.Join(err, s.e.Close()) }() // close the listener, so that accept returns
	defer cancel()
	if s.m.leads {
		for _, p := range s.m.linked {
			wg.Go(func() { results <- s.dial(ctx, p) })
		}
	} else {
		wg.Go(func() { s.accept(ctx, &wg, results) })
	}
	for range s.m.linked {
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

// dial connects the leader to the peer p. Then it does the handshake and exchanges descriptors.
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

// accept accepts connections until the listener is closed, because other processes than the leader may
// connect. It starts a goroutine in wg for each connection.
func (s *setup) accept(ctx context.Context, wg *sync.WaitGroup, results chan<- error) {
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
		wg.Go(func() { s.receive(ctx, uc, results) })
	}
}

// receive does the handshake with a process that has connected. If the handshake fails, receive only logs a
// warning and closes the connection, because the process may be a stranger.
func (s *setup) receive(ctx context.Context, uc *net.UnixConn, results chan<- error) {
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
	p := s.m.linked[0]
	if err := acceptHandshake(uc, s.ep, &s.e.offer, p.rank); err != nil {
		refuse(err)
		return
	}
	s.mu.Lock()
	twice := s.claimed
	s.claimed = true
	s.mu.Unlock()
	if twice {
		refuse(fmt.Errorf("rank %d is already connected", p.rank))
		return
	}
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
	msg := message{kind: controlMessage, size: uint64(s.own.ringBytes), from: uint32(s.m.index)}
	defer func() { msg.close() }()
	for _, fd := range []int{s.m.control.FD(), s.m.waker.fd} {
		f, err := duplicate(fd)
		if err != nil {
			return err
		}
		msg.files = append(msg.files, f)
	}
	return s.m.write(p, []message{msg})
}

func (s *setup) receiveDescriptors(p *peer) error {
	messages, err := newReader(p.uc, len(s.group)).read()
	if err != nil {
		return err
	}
	defer closeAll(messages)
	msg := &messages[0]
	ringBytes := msg.size
	if len(messages) > 1 || msg.kind != controlMessage || int(msg.from) != p.index || msg.to != nil ||
		ringBytes < minRingBytes || ringBytes > maxRingBytes || ringBytes&(ringBytes-1) != 0 {
		return fmt.Errorf("%w: got %d messages, the first with kind %d, index %d and ring size %d, want one with kind %d, index %d and a power of two from %d to %d",
			errBreach, len(messages), msg.kind, msg.from, ringBytes, controlMessage, p.index, minRingBytes,
			maxRingBytes)
	}
	eventfd := msg.files[1].fd
	if err := checkEventfd(eventfd); err != nil {
		return err
	}
	other := controlLayout{s.theirs.size, int(ringBytes)}
	seg, err := shmem.Map(msg.files[0].fd)
	if err == nil && len(seg.Bytes()) < other.bytes() {
		err = errors.Join(fmt.Errorf("%w: got a control segment of %d bytes, want at least %d", errBreach,
			len(seg.Bytes()), other.bytes()), seg.Close())
	}
	if err != nil {
		return err
	}
	msg.files = msg.files[:1] // the peer keeps the eventfd
	p.control = seg
	p.waker = peerWaker{eventfd, word32(seg.Bytes(), parkedAt)}
	mine, its := 0, 0
	if s.m.leads {
		mine = p.index - 1
	} else {
		its = s.m.index - 1
	}
	p.conn = newConn(s.m.waker, &s.m.deferNotify, p, s.own.slotOf(s.m.control.Bytes(), mine),
		other.slotOf(seg.Bytes(), its))
	return nil
}
