package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/internal/serve"
	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/topo"
)

const (
	// proofTimeout is how long a connection has to prove the key and to say what it wants.
	proofTimeout = 10 * time.Second
	// tellTimeout bounds the sending of one frame.
	tellTimeout = 2 * time.Second
	// ringDoorway bounds the connections to a ring listener that have not proven the key.
	ringDoorway = 64
)

// patience is that of a rank. Tests have less.
type patience struct {
	// gone is how long nobody listens at an address until nobody will: a root listens before its id is known, and a rank
	// before its address is.
	gone time.Duration
	// suspicion is how long a rank that lost a neighbour waits to be told by a root who is lost: the connections of a rank
	// that dies end all at once, and those of its neighbours soon after.
	suspicion time.Duration
	// verdict is how long a rank that told a root of its failure waits for the answer.
	verdict time.Duration
}

var defaultPatience = patience{gone: 5 * time.Second, suspicion: 200 * time.Millisecond, verdict: 2 * time.Second}

// joiner is a call of Join.
type joiner struct {
	cfg      Config
	patience patience
	me       peer
	ids      []meeting
	list     [32]byte
	key      secret.Secret // of the ring
	root     int           // whose block this rank is in
	block    block
	sent     atomic.Int64 // messages

	ctx    context.Context // ends with the caller's, a root's verdict, or the loss of a root
	cancel context.CancelCauseFunc
	roots  []*rootLink // the first is this rank's own
	wg     sync.WaitGroup

	ring    *Ring
	refused chan *RefusedError // capacity 1: what a root has said first
	claimed atomic.Bool        // the place of prev
	prev    chan net.Conn
}

// rootLink is a connection to a root.
type rootLink struct {
	conn     net.Conn
	addr     string
	next     chan peer     // capacity 1
	complete chan struct{} // closed
}

// Join meets the other ranks of the job and returns once all of those that share a root with this one have the records of
// all ranks. ids are the same list on all ranks, one for every root, and not more than there are ranks.
//
// It does not return without the others before ctx ends, so give ctx a deadline. Contradictions between ranks, and the loss
// of one, end it at once at all ranks that have reported, with the same *RefusedError; so does the end of the root. If all
// is well, the owner of a root may close it when Wait says so, or, if there is one root only, when its own Join has returned.
//
// A rank opens a listener, one connection to its root, one more if it is the first of its block and there are several roots,
// and one to the next rank. It sends a report, then hello, welcome and size-1 pieces, and that it is done.
func Join(ctx context.Context, ids []ID, cfg Config) (*Ring, error) {
	j := &joiner{cfg: cfg.fill(), patience: defaultPatience, refused: make(chan *RefusedError, 1)}
	ring, err := j.run(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("bootstrap: join as rank %d of %d: %w", cfg.Rank, cfg.Size, err)
	}
	return ring, nil
}

func (j *joiner) run(ctx context.Context, ids []ID) (*Ring, error) {
	began := time.Now()
	if err := j.check(ids); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	j.ctx, j.cancel = context.WithCancelCause(ctx)
	defer j.cancel(nil)
	err := j.join()
	if err != nil {
		err = j.settle(ctx, err)
	}
	for _, c := range j.roots {
		c.conn.Close()
	}
	j.wg.Wait()
	if err != nil {
		if j.ring != nil {
			j.ring.Close() // its error would only hide err
		}
		return nil, err
	}
	j.ring.sent += int(j.sent.Load())
	j.cfg.Log.Debug("bootstrap: joined", zap.Int32("rank", int32(j.me.rank)), zap.Int("size", j.cfg.Size),
		zap.Int("messages", j.ring.sent), zap.Duration("took", time.Since(began)))
	return j.ring, nil
}

func (j *joiner) check(ids []ID) (err error) {
	if err := j.cfg.check(); err != nil {
		return err
	}
	size := j.cfg.Size
	if len(ids) < 1 || len(ids) > size {
		return fmt.Errorf("%d ids, want 1 to one per rank: %d", len(ids), size)
	}
	j.me = peer{rank: j.cfg.Rank, pid: j.cfg.Self.PID, host: j.cfg.Self.Host}
	if j.ids, j.list, j.key, err = meetings(ids); err != nil {
		return err
	}
	if j.inRange() {
		j.root = rootOf(int(j.me.rank), len(ids), size)
	}
	j.block = blockOf(j.root, len(ids), size)
	return nil
}

func (j *joiner) inRange() bool { return j.me.rank >= 0 && int(j.me.rank) < j.cfg.Size }

// at is the rank so many places on.
func (j *joiner) at(places int) topo.Rank {
	return topo.Rank((int(j.me.rank) + places + j.cfg.Size) % j.cfg.Size)
}

// join does what there is to do, and ends with j.ctx.
func (j *joiner) join() error {
	if !j.inRange() {
		return j.denounce()
	}
	dial.Pause(j.ctx, j.block.stagger(int(j.me.rank)), nil)
	own, err := j.reach(j.root)
	if err != nil {
		return err
	}
	if err := j.openRing(own); err != nil {
		return err
	}
	if err := j.report(own, j.root); err != nil {
		return err
	}
	if k := len(j.ids); k > 1 && int(j.me.rank) == j.block.first {
		before := (j.root + k - 1) % k
		other, err := j.reach(before)
		if err != nil {
			return err
		}
		if err := j.report(other, before); err != nil {
			return err
		}
	}
	if err := j.connect(own); err != nil {
		return err
	}
	if err := j.collect(); err != nil {
		return err
	}
	for _, c := range j.roots {
		if err := j.send(c.conn, encodePlain(kindDone)); err != nil {
			return fmt.Errorf("reporting to the root at %s: %w", c.addr, err)
		}
	}
	for _, c := range j.roots {
		select {
		case <-c.complete:
		case <-j.ctx.Done():
			return fmt.Errorf("waiting for the other ranks of the root at %s to finish: %w", c.addr, context.Cause(j.ctx))
		}
	}
	return nil
}

// denounce tells a root that this rank is out of range: others would wait for a rank that is here under a wrong number.
func (j *joiner) denounce() error {
	err := fmt.Errorf("rank %d is out of range, want 0 to %d", j.me.rank, j.cfg.Size-1)
	j.cfg.Log.Error("bootstrap: cannot join, telling the root", zap.Error(err))
	own, failed := j.reach(0)
	if failed == nil {
		failed = j.report(own, 0)
	}
	if failed == nil {
		<-j.ctx.Done() // the root refuses
		failed = context.Cause(j.ctx)
	}
	return fmt.Errorf("%w (and the root could not be told: %w)", err, failed)
}

// reach connects to root i and begins to listen to it.
func (j *joiner) reach(i int) (*rootLink, error) {
	m := j.ids[i]
	conn, err := j.greet(m.addr, m.key, rootMagic)
	if err != nil {
		return nil, fmt.Errorf("reaching the root at %s: %w", m.addr, err)
	}
	c := &rootLink{conn: conn, addr: m.addr, next: make(chan peer, 1), complete: make(chan struct{})}
	j.roots = append(j.roots, c)
	j.wg.Go(func() { j.listen(c) })
	return c, nil
}

// greet connects to addr and tries again while that may help.
func (j *joiner) greet(addr string, key secret.Secret, magic string) (conn net.Conn, err error) {
	var refused time.Time // since when
	err = dial.Retry(j.ctx, func() (err error) {
		conn, err = dial.Greet(j.ctx, addr, key, magic, protocolVersion)
		switch {
		case !errors.Is(err, syscall.ECONNREFUSED):
			refused = time.Time{}
		case refused.IsZero():
			refused = time.Now()
		case time.Since(refused) > j.patience.gone:
			return fmt.Errorf("nobody listens there any more: %v", err) // not wrapped: this does not pass
		}
		return err
	})
	return conn, err
}

func (j *joiner) report(c *rootLink, i int) error {
	q := report{peer: j.me, size: j.cfg.Size, root: i, roots: len(j.ids), ids: j.list}
	if err := j.send(c.conn, encodeReport(q)); err != nil {
		return fmt.Errorf("reporting to the root at %s: %w", c.addr, err)
	}
	return nil
}

func (j *joiner) send(conn net.Conn, f []byte) error {
	j.sent.Add(1)
	conn.SetWriteDeadline(time.Now().Add(tellTimeout))
	_, err := conn.Write(f)
	return errors.Join(err, conn.SetWriteDeadline(time.Time{}))
}

// listen takes what a root says until its verdict.
func (j *joiner) listen(c *rootLink) {
	for {
		body, err := frame.Read(c.conn, maxControlBytes)
		if err == io.EOF {
			err = errors.New("it closed the connection")
		}
		if err == nil {
			var over bool
			if over, err = j.hear(c, body); over {
				return
			}
		}
		if err != nil {
			j.cancel(fmt.Errorf("the root at %s is lost: %w", c.addr, err))
			return
		}
	}
}

func (j *joiner) hear(c *rootLink, body []byte) (over bool, err error) {
	k, d, err := decode(body, kindNext, kindComplete, kindFailure)
	if err != nil {
		return false, err
	}
	switch k {
	case kindNext:
		p := d.peer()
		if err := d.end(); err != nil {
			return false, err
		}
		select {
		case c.next <- p:
			return false, nil
		default:
			return false, errors.New("it named the next rank twice")
		}
	case kindComplete:
		if err := d.end(); err != nil {
			return false, err
		}
		close(c.complete)
		return true, nil
	default:
		why, err := d.failure()
		if err != nil {
			return false, err
		}
		j.cancel(why)
		select {
		case j.refused <- why:
		default:
		}
		return true, nil
	}
}

// openRing opens the listener for the rank before this one, on the address from which the root is reached.
func (j *joiner) openRing(own *rootLink) (err error) {
	j.ring = &Ring{rank: int(j.me.rank), size: j.cfg.Size}
	j.ring.close = sync.OnceValue(j.ring.closeOnce)
	if j.cfg.Size == 1 {
		return nil
	}
	host := j.cfg.ListenHost
	if host == "" {
		if host, _, err = net.SplitHostPort(own.conn.LocalAddr().String()); err != nil {
			return fmt.Errorf("choosing an address for the ring: %w", err)
		}
	}
	j.prev = make(chan net.Conn, 1)
	d := &door{key: j.key, magic: ringMagic, way: serve.NewDoorway(ringDoorway), timeout: proofTimeout}
	j.ring.listener, err = serve.Listen(net.JoinHostPort(host, "0"), "bootstrap: ring", 2*ringDoorway, j.cfg.Log,
		func(ctx context.Context, conn net.Conn) error { return j.greeted(ctx, d, conn) })
	if err != nil {
		return fmt.Errorf("opening the ring: %w", err)
	}
	j.me.addr = j.ring.listener.Addr()
	return nil
}

// greeted takes a connection to the ring listener. The one from the rank before lives as long as the ring.
func (j *joiner) greeted(ctx context.Context, d *door, conn net.Conn) error {
	conn, body, err := d.meet(conn)
	if err != nil {
		return err
	}
	h, err := decodeHello(body)
	if err != nil {
		return fmt.Errorf("reading a hello: %w", err)
	}
	if want := (hello{j.at(-1), j.me.rank, j.cfg.Size}); h != want || !j.claimed.CompareAndSwap(false, true) {
		err := &RefusedError{RankLost, fmt.Sprintf("%v was dialed by rank %d of %d for rank %d, want rank %d of %d, once",
			j.me, h.from, h.size, h.to, want.from, want.size)}
		return errors.Join(err, j.send(conn, encodeFailure(err)))
	}
	if err := j.send(conn, encodePlain(kindWelcome)); err != nil {
		return fmt.Errorf("welcoming rank %d: %w", h.from, err)
	}
	j.prev <- conn
	<-ctx.Done()
	return nil
}

// connect makes the two links of the ring.
func (j *joiner) connect(own *rootLink) error {
	if j.cfg.Size == 1 {
		return nil
	}
	var next peer
	select {
	case next = <-own.next:
	case <-j.ctx.Done():
		return fmt.Errorf("waiting for rank %d to report to the root at %s: %w", j.at(1), own.addr, context.Cause(j.ctx))
	}
	if next.rank != j.at(1) {
		return fmt.Errorf("the root at %s named %v as the next one, want rank %d", own.addr, next, j.at(1))
	}
	conn, err := j.greetNext(next)
	if err != nil {
		return fmt.Errorf("connecting to %v at %s: %w", next, next.addr, err)
	}
	j.ring.next = newLink(conn)
	select {
	case conn := <-j.prev:
		j.ring.prev = newLink(conn)
	case <-j.ctx.Done():
		return fmt.Errorf("waiting for rank %d to connect: %w", j.at(-1), context.Cause(j.ctx))
	}
	return nil
}

func (j *joiner) greetNext(next peer) (net.Conn, error) {
	conn, err := j.greet(next.addr, j.key, ringMagic)
	if err != nil {
		return nil, err
	}
	if err := j.welcomed(conn, next); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// welcomed says hello. It is not tried again: the place may have been given to a connection that broke.
func (j *joiner) welcomed(conn net.Conn, next peer) error {
	if err := j.send(conn, encodeHello(hello{j.me.rank, next.rank, j.cfg.Size})); err != nil {
		return err
	}
	stop := context.AfterFunc(j.ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	body, err := frame.Read(conn, maxControlBytes)
	if err != nil {
		return fmt.Errorf("waiting for a welcome: %w", err)
	}
	k, d, err := decode(body, kindWelcome, kindFailure)
	if err != nil {
		return err
	}
	if k == kindFailure {
		why, err := d.failure()
		if err != nil {
			return err
		}
		return why
	}
	if err := d.end(); err != nil {
		return err
	}
	if !stop() {
		return context.Cause(j.ctx)
	}
	return nil
}

// collect gathers the records of all ranks and checks them against each other.
func (j *joiner) collect() error {
	all, err := j.ring.gather(j.ctx, encodeRecord(&j.cfg.Self, j.cfg.ShareDevices))
	if err != nil {
		return fmt.Errorf("gathering the records: %w", err)
	}
	records, share := make([]Record, len(all)), make([]bool, len(all))
	for rank, b := range all {
		if records[rank], share[rank], err = decodeRecord(b); err != nil {
			return fmt.Errorf("record of rank %d: %w", rank, err)
		}
	}
	j.ring.records = records
	return checkDevices(records, share)
}

// checkDevices finds the first two ranks that claim one device. All ranks have the same records, so all find the same.
func checkDevices(records []Record, share []bool) error {
	type device struct{ host, name string }
	owner := make(map[device]int)
	for rank, r := range records {
		if r.Device == "" {
			continue
		}
		d := device{r.HostHash, r.Device}
		first, taken := owner[d]
		if !taken {
			owner[d] = rank
			continue
		}
		if !share[rank] || !share[first] {
			return &RefusedError{DuplicateDevice, fmt.Sprintf(
				"rank %d (pid %d on host %q) and rank %d (pid %d on host %q) both use device %q, want one rank per device unless both share it",
				first, records[first].PID, records[first].Host, rank, r.PID, r.Host, r.Device)}
		}
	}
	return nil
}

// settle says why the join failed with err, once the roots know it and have had the time to say better. caller is the
// context that Join was given.
func (j *joiner) settle(caller context.Context, err error) error {
	if verdict, ok := j.verdict(); ok {
		j.tell(verdict)
		return verdict
	}
	if caller.Err() == nil && j.ctx.Err() != nil {
		err = context.Cause(j.ctx) // a root is lost, and err comes of that
	}
	why, refused := errors.AsType[*RefusedError](err)
	switch {
	case caller.Err() != nil:
		if len(j.roots) == 0 {
			return err
		}
		j.tell(&RefusedError{GaveUp, fmt.Sprintf("%v gave up: %v", j.me, err)})
		verdict := time.NewTimer(j.patience.verdict)
		defer verdict.Stop()
		select {
		case why := <-j.refused: // which names the ranks that are missing
			return fmt.Errorf("%w (%s)", err, why.Text)
		case <-verdict.C:
			return err
		}
	case !refused:
		dial.Pause(j.ctx, j.patience.suspicion, nil)
		if verdict, ok := j.verdict(); ok {
			j.tell(verdict)
			return verdict
		}
		why = &RefusedError{RankLost, fmt.Sprintf("%v failed: %v", j.me, err)}
	}
	if len(j.roots) == 0 {
		return err
	}
	j.tell(why)
	dial.Pause(j.ctx, j.patience.verdict, nil)
	if verdict, ok := j.verdict(); ok {
		return verdict
	}
	return err
}

// verdict is that of a root, if it has one.
func (j *joiner) verdict() (*RefusedError, bool) {
	return errors.AsType[*RefusedError](context.Cause(j.ctx))
}

// tell tells all roots why this rank fails. The one that said so itself has decided and does not mind.
func (j *joiner) tell(why *RefusedError) {
	for _, c := range j.roots {
		if err := j.send(c.conn, encodeFailure(why)); err != nil {
			j.cfg.Log.Debug("bootstrap: a root could not be told of a failure", zap.String("root", c.addr), zap.Error(err))
		}
	}
}
