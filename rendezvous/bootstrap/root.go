package bootstrap

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/internal/serve"
)

// errClosed is why a root has not completed that was closed before.
var errClosed = errors.New("it was closed")

// limits are those of a root. Tests have smaller ones.
type limits struct {
	linger   time.Duration // how long a root that has completed or failed goes on answering
	farewell time.Duration // for a rank to take its last answer and to leave
	doorway  int           // connections that have not proven the key
	proof    time.Duration // for a connection to prove the key and to report
}

var defaultLimits = limits{linger: 30 * time.Second, farewell: 2 * time.Second, doorway: 1024, proof: proofTimeout}

// Root collects the reports of its ranks and tells each where the next one is. It has a goroutine or two per connection, all
// of which end with Close.
type Root struct {
	log    *zap.Logger
	limits limits
	door   *door
	server *serve.Listener
	addr   string
	stop   context.CancelCauseFunc
	ended  chan struct{} // closed when nothing of the root is left
	err    error         // of closing the listener; once ended

	decided chan struct{} // closed when the root has completed or failed
	quiet   chan struct{} // closed when the root is closing and nobody is being answered

	mu       sync.Mutex
	job      *report        // the first: what all others are held against
	block    block          // of job
	members  map[int]*guest // by rank
	expected []int          // ranks, once there is a job
	undone   int            // of expected
	complete bool           // once decided
	failure  *RefusedError  // once decided, if not complete
	talking  int            // guests that are being answered
	closing  bool
}

// guest is a connection whose report was read.
type guest struct {
	peer
	done bool
	// out is what to send, closed behind the last of it. Nobody gets more than one next and one verdict, so sending
	// does not wait.
	out chan []byte
}

// NewID opens a root and makes the id with which ranks find it. The root takes the ranks of one job. It ends by itself some
// 30 s after it has completed or failed, in which it answers those who are late, at the latest when ctx or cfg.Timeout
// ends. Whoever waits when it ends is told why. To have it end earlier, Close it; Wait tells when nobody needs it any more.
func NewID(ctx context.Context, cfg Config) (ID, *Root, error) {
	id, r, err := open(ctx, cfg.fill(), defaultLimits)
	if err != nil {
		return ID{}, nil, fmt.Errorf("bootstrap: new id: %w", err)
	}
	return id, r, nil
}

func open(ctx context.Context, cfg Config, l limits) (ID, *Root, error) {
	if err := ctx.Err(); err != nil {
		return ID{}, nil, err
	}
	if err := cfg.checkListenHost(); err != nil {
		return ID{}, nil, err
	}
	host := cfg.ListenHost
	if host == "" {
		host = "127.0.0.1"
	}
	var key [keyBytes]byte
	rand.Read(key[:]) // never fails
	proof, err := secretOf(key, cfg.Encrypt)
	if err != nil {
		return ID{}, nil, err
	}
	r := &Root{
		log: cfg.Log, limits: l,
		door:  &door{key: proof, magic: rootMagic, way: serve.NewDoorway(l.doorway), timeout: l.proof},
		ended: make(chan struct{}), decided: make(chan struct{}), quiet: make(chan struct{}),
		members: make(map[int]*guest),
	}
	// Nobody comes in before the id is made: the key is in it.
	r.server, err = serve.Listen(net.JoinHostPort(host, "0"), "bootstrap: root", MaxSize+1+l.doorway, cfg.Log,
		func(_ context.Context, conn net.Conn) error { return r.handle(conn) })
	if err != nil {
		return ID{}, nil, err
	}
	r.addr = r.server.Addr()
	addr, err := netip.ParseAddrPort(r.addr)
	var id ID
	if err == nil {
		id, err = newID(addr, key, cfg.Encrypt)
	}
	if err != nil {
		r.server.Close() // its error would only hide err
		return ID{}, nil, err
	}
	rctx, stop := context.WithCancelCause(ctx)
	r.stop = stop
	go r.run(rctx, cfg.Timeout)
	return id, r, nil
}

// Addr is the address that r listens on.
func (r *Root) Addr() string { return r.addr }

// Wait returns nil when all ranks of r have the records of all ranks, and else why it has come to nothing: a *RefusedError,
// or the error of ctx.
func (r *Root) Wait(ctx context.Context) error {
	select {
	case <-r.decided:
	case <-ctx.Done():
		return fmt.Errorf("bootstrap: waiting for the root at %s: %w", r.addr, ctx.Err())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failure != nil {
		return fmt.Errorf("bootstrap: root at %s: %w", r.addr, r.failure)
	}
	return nil
}

// Close ends r. If it has not completed, the ranks that wait at it fail. It waits for their answers to be taken, for at most
// 2 s, and for the goroutines of r. Later calls return what the first did.
func (r *Root) Close() error {
	r.stop(errClosed)
	<-r.ended
	return r.err
}

// run ends the root when its time has come.
func (r *Root) run(ctx context.Context, timeout time.Duration) {
	defer close(r.ended)
	defer r.stop(nil)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("its time of %v is over", timeout))
	defer cancel()
	select {
	case <-r.decided:
	case <-ctx.Done():
		r.end(context.Cause(ctx))
	}
	linger := time.NewTimer(r.limits.linger)
	defer linger.Stop()
	select {
	case <-linger.C:
	case <-ctx.Done():
	}
	r.mu.Lock()
	r.closing = true
	if r.talking == 0 {
		close(r.quiet)
	}
	r.mu.Unlock()
	<-r.quiet // what is said last is bounded by farewell
	r.err = r.server.Close()
}

func (r *Root) end(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail(&RefusedError{RootEnded, fmt.Sprintf("the root at %s ended: %v; %s", r.addr, why, r.awaited())})
}

// awaited names the ranks that are waited for, the first 16 of them. r is locked.
func (r *Root) awaited() string {
	if r.job == nil {
		return "no rank had reported"
	}
	var absent, busy []int
	for _, rank := range r.expected {
		switch m := r.members[rank]; {
		case m == nil:
			absent = append(absent, rank)
		case !m.done:
			busy = append(busy, rank)
		}
	}
	if len(absent) > 0 {
		return ranks(absent) + " had not reported"
	}
	return ranks(busy) + " had not gathered the records"
}

// ranks names the first 16.
func ranks(list []int) string {
	var b strings.Builder
	b.WriteString("rank")
	if len(list) > 1 {
		b.WriteString("s")
	}
	for i, rank := range list[:min(len(list), 16)] {
		if i > 0 {
			b.WriteString(",")
		}
		fmt.Fprintf(&b, " %d", rank)
	}
	if len(list) > 16 {
		fmt.Fprintf(&b, " and %d more", len(list)-16)
	}
	return b.String()
}

// handle serves a connection. The error is for the log.
func (r *Root) handle(conn net.Conn) error {
	conn, body, err := r.door.meet(conn)
	if err != nil {
		return err
	}
	q, err := decodeReport(body)
	if err != nil {
		return fmt.Errorf("reading a report: %w", err)
	}
	g := &guest{peer: q.peer, out: make(chan []byte, 2)}
	if !r.admit(g, &q) {
		return errClosed
	}
	var hearing sync.WaitGroup
	hearing.Go(func() { r.hear(g, conn) })
	err = r.tell(g, conn)
	// The rank closes the connection when it has its answer. To close it first, with something unread, could cost it.
	conn.SetReadDeadline(time.Now().Add(r.limits.farewell))
	hearing.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.talking--
	if r.closing && r.talking == 0 {
		close(r.quiet)
	}
	if err == nil {
		err = io.EOF // nothing to log
	}
	return err
}

// tell sends g what there is to say until there is no more.
func (r *Root) tell(g *guest, conn net.Conn) (err error) {
	for f := range g.out {
		if err != nil {
			continue
		}
		conn.SetWriteDeadline(time.Now().Add(r.limits.farewell))
		if _, err = conn.Write(f); err != nil {
			err = fmt.Errorf("answering %v: %w", g.peer, err)
			conn.Close() // so that hear notices, and with it the root
		}
	}
	return err
}

// hear takes what g says until it leaves.
func (r *Root) hear(g *guest, conn net.Conn) {
	for {
		err := r.hearOne(g, conn)
		if err == nil {
			continue
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.members[int(g.rank)] == g {
			r.fail(&RefusedError{RankLost, fmt.Sprintf("%v went away before all ranks had met: %v", g.peer, err)})
		}
		return
	}
}

func (r *Root) hearOne(g *guest, conn net.Conn) error {
	body, err := frame.Read(conn, maxControlBytes)
	if err != nil {
		return err
	}
	k, d, err := decode(body, kindDone, kindFailure)
	if err != nil {
		return err
	}
	var why *RefusedError
	if k == kindFailure {
		why, err = d.failure()
	} else {
		err = d.end()
	}
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.members[int(g.rank)] != g || r.isDecided(): // it was refused, or has not heard the verdict yet
	case why != nil:
		if why.Reason == GaveUp {
			why.Text += "; " + r.awaited()
		}
		r.fail(why)
	case !g.done:
		g.done = true
		if r.undone--; r.undone == 0 {
			r.log.Debug("bootstrap: root has completed", zap.String("root", r.addr), zap.Int("size", r.job.size),
				zap.Int("ranks", len(r.expected)))
			r.complete = true
			r.decide(encodePlain(kindComplete))
		}
	}
	return nil
}

// admit takes g in or refuses it, and puts what it is to be told in its out. It reports false if r is closing and g gets no
// answer.
func (r *Root) admit(g *guest, q *report) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closing {
		return false
	}
	r.talking++
	if !r.isDecided() && (r.job == nil || len(r.members) < len(r.expected)) {
		if why := r.contradiction(q); why != nil {
			r.fail(why)
		} else {
			r.join(g)
			return true
		}
	}
	why := r.failure
	if why == nil {
		// Also when they are still at their ring: a job that has met is not undone by one process too many.
		why = &RefusedError{Late, fmt.Sprintf("%v came late: all %d ranks of the root at %s have reported without it",
			g.peer, len(r.expected), r.addr)}
	}
	r.log.Warn("bootstrap: root refuses a rank", zap.String("root", r.addr), zap.Stringer("peer", g.peer), zap.Error(why))
	g.out <- encodeFailure(why)
	close(g.out)
	return true
}

// contradiction is what is wrong with q. The first report that is all right says what the job is. r is locked.
func (r *Root) contradiction(q *report) *RefusedError {
	if job := r.job; job != nil {
		switch {
		case q.size != job.size:
			return &RefusedError{SizeMismatch, fmt.Sprintf("%v has size %d, want %d as %v has", q.peer, q.size, job.size, job.peer)}
		case q.ids != job.ids || q.root != job.root:
			return &RefusedError{IDMismatch, fmt.Sprintf("%v has %d ids, this root's being number %d, want the list of %v: %d, number %d",
				q.peer, q.roots, q.root, job.peer, job.roots, job.root)}
		}
	}
	if q.rank < 0 || int(q.rank) >= q.size {
		return &RefusedError{RankOutOfRange, fmt.Sprintf("%v is out of range, want 0 to %d", q.peer, q.size-1)}
	}
	b := blockOf(q.root, q.roots, q.size)
	if !b.has(int(q.rank)) && int(q.rank) != b.end%q.size {
		return &RefusedError{RankOutOfRange, fmt.Sprintf("%v is out of range of root %d of %d, want %d to %d or %d",
			q.peer, q.root, q.roots, b.first, b.end-1, b.end%q.size)}
	}
	if r.job == nil {
		return r.begin(q, b)
	}
	if first := r.members[int(q.rank)]; first != nil {
		return &RefusedError{DuplicateRank, fmt.Sprintf("rank %d is there twice: %v at %s and %v at %s",
			q.rank, first.peer, first.addr, q.peer, q.addr)}
	}
	return nil
}

// begin has q say what the job is.
func (r *Root) begin(q *report, b block) *RefusedError {
	r.job, r.block = q, b
	for rank := b.first; rank < b.end; rank++ {
		r.expected = append(r.expected, rank)
	}
	if next := b.end % q.size; !b.has(next) {
		r.expected = append(r.expected, next)
	}
	r.undone = len(r.expected)
	return nil
}

// join takes g in. r is locked.
func (r *Root) join(g *guest) {
	rank, size := int(g.rank), r.job.size
	r.members[rank] = g
	r.log.Debug("bootstrap: rank has reported", zap.String("root", r.addr), zap.Stringer("peer", g.peer),
		zap.Int("missing", len(r.expected)-len(r.members)))
	r.introduce(rank)
	if before := (rank + size - 1) % size; before != rank {
		r.introduce(before)
	}
}

// introduce tells rank who is next, if it is of this block and both are there. r is locked.
func (r *Root) introduce(rank int) {
	m, next := r.members[rank], r.members[(rank+1)%r.job.size]
	if m != nil && next != nil && r.block.has(rank) {
		m.out <- encodeNext(next.peer)
	}
}

func (r *Root) isDecided() bool { return r.complete || r.failure != nil }

// fail ends the root for all, if it is not decided yet. r is locked.
func (r *Root) fail(why *RefusedError) {
	if r.isDecided() {
		return
	}
	r.log.Error("bootstrap: root failed", zap.String("root", r.addr), zap.Error(why))
	r.failure = why
	r.decide(encodeFailure(why))
}

// decide tells all members. r is locked and the verdict is set.
func (r *Root) decide(verdict []byte) {
	for _, m := range r.members {
		m.out <- verdict
		close(m.out)
	}
	close(r.decided)
}
