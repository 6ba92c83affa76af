package rendezvous

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

// Limits and waiting times of a root.
const (
	maxHandshakes    = 1024 // maximum number of connections that have not sent their request yet
	handshakeTimeout = 10 * time.Second
	// suspicionTime is how long the root waits after the first report of a failure, because the connection of
	// a dead rank may be about to end.
	suspicionTime = 300 * time.Millisecond
	probeTimeout  = 5 * time.Second // how long a new rank 0 waits for the answer of an older root
	windDown      = 2 * time.Second // how long a failed root continues to answer
	// lastRequest is how long a complete root that closes waits for requests on the connections that it has.
	// Without an answer, the process of such a request would think that rank 0 has died while the epoch was
	// forming.
	lastRequest = time.Second
	maxAnswered = 4096 // maximum number of answered processes that the root remembers
	maxAnswers  = 5    // maximum number of answers that a caller gets
)

type rootState uint8

const (
	forming rootState = iota
	complete
	failed
)

// root is rank 0's side of the rendezvous. It has a listener, a goroutine for each connection, and the state
// of the epoch.
type root struct {
	cfg   *JoinConfig
	log   *zap.Logger
	token []byte
	ln    net.Listener
	// spare takes up a descriptor. If the process runs out of descriptors, accept closes it, so that the root
	// can accept ranks, one at a time, and tell them that it has failed.
	spare      *os.File
	ctx        context.Context // ends when close is called
	stop       context.CancelFunc
	close      func() error
	wg         sync.WaitGroup
	handshakes *dial.Limiter
	refused    *zap.Logger

	changed     chan struct{} // gets an element when all ranks have joined or the root has failed; capacity 1
	allAnswered chan struct{} // closed when a failed root has sent the failure to every other rank

	start outcome // the result of the start: whether all ranks became ready after they got the table

	mu      sync.Mutex
	state   rootState
	callers map[*caller]struct{} // all open connections to the root
	// members has the connection of rank r at index r, or nil if rank r is missing. Element 0 is set when the
	// root is complete.
	members   []*caller
	missing   int
	gaveUp    map[int]bool  // ranks that gave up at their deadline; if r is complete, while r stood still
	full      bool          // whether all ranks have been members at the same time
	lastEpoch uint64        // greatest LastEpoch of all ranks that have ever joined this root
	epoch     uint64        // set when the root is complete
	records   []Record      // set when the root is complete
	own       net.Conn      // rank 0's end of its own connection as a member; set when the root is complete
	ring      bool          // members get only their neighbours' records; set when the root is complete
	table     []byte        // the frames for all members; set when the root is complete, unless ring is set
	failure   *RefusedError // set when the root has failed
	// answered has the nonces of processes. In a failed root, these processes have been sent the failure. In
	// a complete root, these processes are latecomers that have been logged.
	answered      map[process][]byte
	answeredRanks map[topo.Rank]struct{} // ranks that have received the failure
	ready         map[int]bool           // the ranks that are ready; set when the root is complete
	// tried maps host and rank to the result of the rank's try in Session.Agree. It is set when the root is
	// complete. triedRanks is the number of ranks in it.
	tried      map[string]map[int]*rendezvouspb.Status
	triedRanks int
	reports    []report      // failures that ranks have reported
	accounted  chan struct{} // gets an element when each rank is ready or has reported a failure
	// ranAt is when this process was last known to run, resumedAt when it last ran again after it had stood
	// still, and stood for how long it had (standstill).
	ranAt, resumedAt time.Time
	stood            time.Duration
}

// caller is a connection to the root.
type caller struct {
	conn net.Conn
	slot *dial.Slot   // counts this connection as a handshake; released when the request has arrived
	over net.Conn     // carries all messages: TLS over conn, or conn if there is no secret
	q    *joinRequest // the request, nil until it has been read
	// out is the queue of the answers to send. When it has the last answer, it is closed and finished is set.
	// A caller gets at most maxAnswers answers, which is the capacity, so sending to out does not block.
	out      chan []byte
	finished bool  // guarded by root.mu
	refused  bool  // whether the caller gets the failure as its answer; guarded by root.mu
	hangs    bool  // whether the caller is a rank that hangs; guarded by root.mu
	moving   bool  // whether the caller has been asked to listen elsewhere; guarded by root.mu
	moved    bool  // whether the caller has answered that; guarded by root.mu
	left     error // why the caller left a forming root; guarded by root.mu
}

// process identifies the process that sent a request. All calls of Join in a process have the same value.
type process struct {
	rank topo.Rank
	host string
	pid  int
}

func (q *joinRequest) process() process {
	return process{topo.Rank(q.GetRank()), q.record.Host, q.record.PID}
}

// joinAsRoot implements Join at rank 0.
func joinAsRoot(ctx context.Context, cfg *JoinConfig) (*Session, error) {
	r, err := openRoot(cfg)
	if err != nil {
		return nil, err
	}
	if err := r.form(ctx); err != nil {
		r.close() // the error of close is dropped, because it would hide err
		return nil, err
	}
	return &Session{Epoch: r.epoch, Records: r.records, ring: r.ring, root: r,
		member: newMember(r.own, bufio.NewReader(r.own))}, nil
}

// openRoot opens a listener and starts to answer requests. No process knows the address of the listener yet,
// with one exception: if an older root of this job had the same port, the store still contains this address.
func openRoot(cfg *JoinConfig) (*root, error) {
	ln, err := dial.Listen(net.JoinHostPort(cfg.ListenHost, "0"))
	if err != nil {
		return nil, fmt.Errorf("opening the root: %w", err)
	}
	spare, err := os.Open(os.DevNull)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening the root: %w", dial.ExplainLimit(err)), ln.Close())
	}
	r := &root{
		cfg: cfg, token: newToken(), ln: ln, spare: spare,
		log:           cfg.Log.With(zap.String("job", cfg.Job), zap.Stringer("root", ln.Addr())),
		handshakes:    dial.NewLimiter(max(maxHandshakes, 2*cfg.Size)),
		changed:       make(chan struct{}, 1),
		allAnswered:   make(chan struct{}),
		callers:       make(map[*caller]struct{}),
		members:       make([]*caller, cfg.Size),
		gaveUp:        make(map[int]bool),
		ready:         make(map[int]bool),
		accounted:     make(chan struct{}, 1),
		start:         newOutcome(),
		tried:         make(map[string]map[int]*rendezvouspb.Status),
		missing:       cfg.Size - 1,
		lastEpoch:     cfg.LastEpoch,
		answered:      make(map[process][]byte),
		answeredRanks: make(map[topo.Rank]struct{}),
		ranAt:         time.Now(),
	}
	r.refused = logs.Quiet(r.log)
	r.ctx, r.stop = context.WithCancel(context.Background())
	r.close = sync.OnceValue(r.closeOnce)
	r.wg.Go(r.accept)
	r.wg.Go(r.watchStandstill)
	return r, nil
}

// closeOnce closes everything except connections with an answer in flight, and waits until these answers are
// sent. A complete root also answers the processes that have just connected.
func (r *root) closeOnce() error {
	r.stop()
	err := r.ln.Close()
	_ = r.spare.Close() // fails if accept has closed it
	r.mu.Lock()
	if r.state == complete {
		r.conclude(newFailure(0, "rank 0 gave up during Init")) // does nothing if the start has ended
	}
	for g := range r.callers {
		switch {
		case g.finished:
		case r.state == complete: // it is in its handshake, because the members are finished
			g.conn.SetDeadline(time.Now().Add(lastRequest))
		default:
			g.conn.Close()
		}
	}
	r.mu.Unlock()
	r.wg.Wait()
	return err
}

// form publishes the root, waits for all ranks, and completes the epoch.
func (r *root) form(ctx context.Context) error {
	epoch, err := r.draw(ctx, r.cfg.LastEpoch)
	if err != nil {
		return err
	}
	addr, hosts, err := rootHosts(r.ln)
	if err != nil {
		return err
	}
	value, err := proto.Marshal(&rendezvouspb.Root{
		Attempt: epoch, Token: r.token, Addr: addr, Hosts: hosts,
		Host: r.cfg.Self.Host, Pid: int64(r.cfg.Self.PID),
	})
	if err != nil {
		return err
	}
	if err := r.publish(ctx, value); err != nil {
		return err
	}
	r.log.Debug("rendezvous: root is open", zap.Uint64("attempt", epoch))

	wctx, stop := context.WithCancel(ctx)
	var watcher sync.WaitGroup
	lost := make(chan error, 1)
	watcher.Go(func() {
		if err := r.watch(wctx, value); err != nil {
			lost <- err
		}
	})
	defer watcher.Wait()
	defer stop()
	for {
		select {
		case <-r.changed:
		case err := <-lost:
			if ctx.Err() == nil {
				// The process that serves the store may have ended because it has waited for the same ranks.
				return r.giveUp(r.waitError(err))
			}
			continue // the call to the store failed because ctx ended
		case <-ctx.Done():
			return r.giveUp(r.waitError(ctx.Err()))
		}
		lastEpoch, full, failure := r.progress()
		if failure != nil {
			r.log.Error("rendezvous: root failed", zap.Error(failure))
			t := time.NewTimer(windDown)
			defer t.Stop()
			select {
			case <-r.allAnswered:
			case <-t.C:
			case <-ctx.Done():
			}
			return failure
		}
		if full && epoch <= lastEpoch {
			if epoch, err = r.draw(ctx, lastEpoch); err != nil {
				return r.giveUp(err)
			}
		}
		if err := r.moveSelf(); err != nil {
			return r.giveUp(err)
		}
		// While this goroutine called the store, a rank may have left, or joined with an even greater epoch.
		if ok, err := r.complete(epoch); err != nil {
			return r.giveUp(err)
		} else if ok {
			r.log.Info("rendezvous: epoch is complete", zap.Uint64("epoch", epoch))
			return nil
		}
	}
}

// draw increments the counter of the job in the store until it is greater than the parameter above, and
// returns the new value. No number is drawn twice, because each number is a result of Add.
func (r *root) draw(ctx context.Context, above uint64) (uint64, error) {
	delta := int64(1)
	for {
		n, err := r.cfg.Store.Add(ctx, r.cfg.epochKey(), delta)
		if err != nil {
			return 0, err
		}
		if n > int64(above) {
			return uint64(n), nil
		}
		delta = int64(above) - n + 1
	}
}

// publish writes value to the root key of the store. If the store has an older root, publish first waits
// until outlive allows this process to replace it.
func (r *root) publish(ctx context.Context, value []byte) error {
	c := &client{cfg: r.cfg, nonce: newToken()}
	var expected []byte
	for {
		actual, swapped, err := r.cfg.Store.CompareAndSet(ctx, r.cfg.rootKey(), expected, value)
		if err != nil || swapped {
			return err
		}
		if actual != nil {
			if err := r.outlive(ctx, c, actual); err != nil {
				return err
			}
		}
		expected = actual
	}
}

// outlive decides whether this process may replace an older root. The parameter value is the older root as
// encoded in the store. It returns nil if the older root does not answer, or has an epoch that this process
// knows. If the epoch of the older root is still running, outlive waits until the root is gone. If the older
// root is forming, outlive returns an error, because then the job has two ranks 0.
func (r *root) outlive(ctx context.Context, c *client, value []byte) error {
	old, err := decodeRoot(value)
	if err != nil {
		r.log.Warn("rendezvous: replacing a malformed root in the store", zap.Error(err))
		return nil
	}
	var wait dial.Backoff
	var late *completeError // the last answer of the running root, nil before the first answer
	for {
		pctx, cancel := context.WithTimeout(ctx, probeTimeout)
		s, err := c.ask(pctx, pctx, old)
		cancel()
		if err == nil {
			s.Close() // the error of Close is dropped, because it would hide the error below
		}
		running, ok := errors.AsType[*completeError](err)
		switch {
		case err == nil:
			// The nonce of this call is new, so this call cannot have joined the older root.
			return fmt.Errorf("the root of an earlier epoch at %s broke the protocol: it accepted a query as if this process had joined it", old.GetAddr())
		case ok && running.epoch > r.cfg.LastEpoch:
			if late == nil {
				r.log.Warn("rendezvous: waiting for an older root to close",
					zap.String("older", old.GetAddr()), zap.Uint64("epoch", running.epoch))
			}
			late = running
		case ctx.Err() != nil && late == nil:
			return err
		case ctx.Err() != nil: // ctx ended during the probe, so the previous answer still holds
		case !ok && isAnswer(err) && !errors.Is(err, errStale), isVersion(err):
			return err
		default:
			return nil
		}
		dial.Pause(ctx, wait.Next(), nil)
		if ctx.Err() != nil {
			return lateError(ctx, late, old)
		}
	}
}

// lateError returns the error of a new rank 0 whose ctx has ended while it waited for the end of a running
// epoch.
func lateError(ctx context.Context, running *completeError, old *rendezvouspb.Root) error {
	return fmt.Errorf("waiting for the running epoch to end: %w: %w", refuse(Late,
		"epoch %d is complete, and its rank 0 is pid %d on host %q with its root at %s",
		running.epoch, old.GetPid(), old.GetHost(), old.GetAddr()), ctx.Err())
}

// watch waits until another root replaces this root in the store, and then fails this root. It returns an
// error if the store is lost, because then ranks cannot find the root.
func (r *root) watch(ctx context.Context, value []byte) error {
	newer, err := r.cfg.Store.Watch(ctx, r.cfg.rootKey(), value)
	if err != nil {
		return err
	}
	by := "a malformed root"
	if other, err := decodeRoot(newer); err == nil {
		by = fmt.Sprintf("pid %d on host %q with its root at %s", other.GetPid(), other.GetHost(),
			other.GetAddr())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail(refuse(DuplicateRank, "rank 0 joined twice: %v was replaced by %s", r.cfg.Self, by))
	return nil
}

func (r *root) progress() (lastEpoch uint64, full bool, failure *RefusedError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lastEpoch, r.missing == 0, r.failure
}

// waitError returns the error of rank 0 if it stops to wait because of err before all ranks have joined.
func (r *root) waitError(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	ranks, text := r.awaited()
	return &WaitError{ranks, "waiting for " + text, err}
}

// awaited returns the ranks for which the root waits, and a text that lists them. These are the ranks that
// have never joined. If there are none, they are the ranks that do not yet listen where the root has asked
// them to, or else the ranks that joined and then gave up. If these have given up although all ranks had
// joined, they waited for rank 0, which has not completed the epoch. If the process of rank 0 has just run
// again after it was stopped for long, it is what the ranks wait for: it has not read what they have sent
// meanwhile. The caller holds r.mu.
func (r *root) awaited() (ranks []topo.Rank, text string) {
	var missing []topo.Rank
	for i := range r.members[1:] {
		switch rank := topo.Rank(i + 1); {
		case r.members[rank] != nil:
		case r.gaveUp[int(rank)]:
			missing = append(missing, rank)
		default:
			ranks = append(ranks, rank)
		}
	}
	if d := r.standstill(); d >= 3*r.grace() { // on a busy machine, a process may wait for a processor
		text = fmt.Sprintf("rank 0, whose process did not run for %.1f s", d.Seconds())
		if ranks != nil {
			text += fmt.Sprintf(" (%s had not joined)", topo.FormatRanks(ranks))
		}
		return []topo.Rank{0}, text
	}
	moving, text := r.moving()
	switch {
	case ranks != nil:
		return ranks, topo.FormatRanks(ranks)
	case moving != nil:
		return moving, text
	case r.full:
		return []topo.Rank{0}, "rank 0 to complete the epoch"
	}
	return missing, topo.FormatRanks(missing) + " to come back"
}

// disagreement returns an error that names every term that differs between the ranks, or nil if all terms
// agree. All ranks must have joined, and the caller holds r.mu.
func (r *root) disagreement() *RefusedError {
	terms := make([]map[string]string, len(r.members))
	terms[0] = r.cfg.Terms
	for rank := 1; rank < len(r.members); rank++ {
		terms[rank] = r.members[rank].q.GetTerms()
	}
	names := make(map[string]string)
	for _, t := range terms {
		maps.Copy(names, t)
	}
	var differ []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		var values []string // the distinct values, in the order of the ranks
		at := make(map[string][]int)
		for rank := range terms {
			value, known := terms[rank][name]
			switch {
			case !known:
				value = "unknown"
			case value == "":
				value = "not set"
			}
			if at[value] == nil {
				values = append(values, value)
			}
			at[value] = append(at[value], rank)
		}
		if len(values) == 1 {
			continue
		}
		for i, value := range values {
			values[i] = fmt.Sprintf("%s at %s", value, topo.FormatRanks(at[value]))
		}
		differ = append(differ, fmt.Sprintf("%s is %s", name, strings.Join(values, ", ")))
	}
	if differ == nil {
		return nil
	}
	return refuse(TermsDiffer, "settings that must be the same at all ranks differ: %s",
		strings.Join(differ, "; "))
}

// complete completes the epoch and sets its number to the parameter epoch. If a rank is missing, or a rank
// has seen this or a greater number, or has to listen on another address first, complete returns false. If
// ranks contradict each other, complete fails the root.
func (r *root) complete(epoch uint64) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != forming || r.missing > 0 || epoch <= r.lastEpoch || !r.moveMembers() {
		return false, nil
	}
	records := make([]Record, len(r.members))
	records[0] = r.cfg.Self
	for rank := 1; rank < len(r.members); rank++ {
		records[rank] = r.members[rank].q.record
	}
	why := r.disagreement()
	if why == nil {
		why = deviceTwice(records)
	}
	if why != nil {
		r.fail(why)
		return false, nil
	}
	r.epoch, r.records, r.ring = epoch, records, len(records) > max(r.cfg.RingAbove, 2)
	if !r.ring {
		r.table = r.tableOf(0) // the same for all ranks
	}
	r.decide(complete)
	r.admitSelf()
	return true, nil
}

// admitSelf makes rank 0 a member of its own root. The connection is a pipe, and r.own becomes rank 0's end
// of the pipe. The caller holds r.mu, and r is complete.
func (r *root) admitSelf() {
	var conn net.Conn
	r.own, conn = net.Pipe()
	g := &caller{conn: conn, over: conn, q: &joinRequest{record: r.cfg.Self},
		out: make(chan []byte, maxAnswers)}
	r.members[0], r.callers[g] = g, struct{}{}
	r.wg.Go(func() {
		_ = r.converse(g) // the error is ignored, because calls of the Session return it
		conn.Close()
		r.mu.Lock()
		delete(r.callers, g)
		r.mu.Unlock()
	})
}

// tableOf returns the frames that a member gets when the epoch is complete.
func (r *root) tableOf(rank int) []byte {
	if r.table != nil {
		return r.table
	}
	// Encoding cannot fail, because all texts are UTF-8.
	table, _ := appendMessage(nil, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_TABLE, Epoch: r.epoch,
		Ring: r.ring})
	for _, i := range sentWith(rank, len(r.records), r.ring) {
		table, _ = appendMessage(table, recordToProto(&r.records[i]))
	}
	return table
}

// deviceTwice returns an error if two ranks of a host have the same Device, unless both have SharesDevice
// set. The error names the first two such ranks. If there are none, deviceTwice returns nil.
func deviceTwice(records []Record) *RefusedError {
	type device struct{ host, name string }
	owner := make(map[device]int)
	for rank, r := range records {
		d := device{r.HostID, r.Device}
		first, taken := owner[d]
		switch {
		case r.Device == "":
		case !taken:
			owner[d] = rank
		case !r.SharesDevice || !records[first].SharesDevice:
			return refuse(DuplicateDevice,
				"rank %d (%v) and rank %d (%v) both use device %q, want one rank per device unless both share it",
				first, records[first], rank, r, r.Device)
		}
	}
	return nil
}

// giveUp fails the root because rank 0 cannot continue, and returns the reason. The reason is err. If err
// says that there are too many open files, the reason also has the limit of file descriptors.
func (r *root) giveUp(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	reason := GaveUp
	if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
		reason, err = RootFailed, dial.ExplainLimit(err)
	}
	why := refuse(reason, "rank 0 gave up: %v", err)
	why.Awaited = Awaited(err)
	r.fail(why)
	return err
}

// fail changes the state of the root from forming to failed. If the root is complete or failed already, fail
// does nothing. The caller holds r.mu.
func (r *root) fail(why *RefusedError) {
	if r.state != forming {
		return
	}
	r.failure = why
	r.decide(failed)
	r.signal()
}

// decide sets the final state of the root, complete or failed, and sends it to the members. The caller holds
// r.mu.
func (r *root) decide(s rootState) {
	r.state = s
	for rank, m := range r.members {
		if m == nil {
			continue
		}
		if s == failed {
			r.outcome(m)
		} else {
			m.out <- r.tableOf(rank)
		}
	}
}

func (r *root) signal() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func (r *root) accept() {
	var wait dial.Backoff
	for {
		conn, err := r.ln.Accept()
		if err != nil {
			if r.ctx.Err() != nil {
				return
			}
			if dial.IsExhausted(err) {
				_ = r.giveUp(err)   // form returns this error
				_ = r.spare.Close() // fails if it is closed already
			} else {
				r.log.Error("rendezvous: root: accepting a connection failed", zap.Error(err))
			}
			dial.Pause(r.ctx, wait.Next(), nil)
			continue
		}
		wait = 0
		// The slot is acquired here and not in the goroutine of the connection, so that connections get slots
		// in the order in which they were accepted.
		g := &caller{conn: conn, out: make(chan []byte, maxAnswers), slot: r.handshakes.Acquire(conn)}
		r.mu.Lock()
		switch {
		case r.ctx.Err() == nil:
			conn.SetDeadline(time.Now().Add(handshakeTimeout))
		case r.state == complete:
			conn.SetDeadline(time.Now().Add(lastRequest))
		default:
			conn.Close()
		}
		r.callers[g] = struct{}{}
		r.mu.Unlock()
		r.wg.Go(func() {
			if err := r.serve(g); err != nil && r.ctx.Err() == nil {
				r.refused.Warn("rendezvous: root closed a connection",
					zap.Stringer("peer", conn.RemoteAddr()), zap.Error(err))
			}
			conn.Close()
			r.mu.Lock()
			delete(r.callers, g)
			r.mu.Unlock()
		})
		r.handshakes.Settle()
	}
}

// serve reads the request of g and answers it. serve's caller logs the error.
func (r *root) serve(g *caller) error {
	err := r.handshake(g)
	if !g.slot.Release() {
		return dial.ErrEvicted
	}
	if err != nil {
		if errors.Is(err, io.EOF) {
			return nil // the peer only probed the port
		}
		return err
	}
	if member := r.admit(g); !member {
		return r.sendAnswers(g)
	}
	return r.converse(g)
}

// converse receives statuses from the member g and sends it answers, until g has its last answer.
func (r *root) converse(g *caller) error {
	var receiving sync.WaitGroup
	receiving.Go(func() { r.receive(g) })
	err := r.sendAnswers(g)
	// The rank closes the connection when it has its last answer. If the root closed the connection first
	// while statuses were unread, the kernel would reset the connection and the answer could be lost. A rank
	// that hangs does not close it.
	wait := answerTimeout
	r.mu.Lock()
	if g.hangs {
		wait = 0
	}
	r.mu.Unlock()
	g.conn.SetReadDeadline(time.Now().Add(wait))
	receiving.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(err, g.left)
}

// sendAnswers sends g the answers from the channel g.out, until g.out is closed.
func (r *root) sendAnswers(g *caller) (err error) {
	for answer := range g.out {
		if err != nil {
			continue
		}
		g.conn.SetWriteDeadline(time.Now().Add(answerTimeout))
		if _, err = g.over.Write(answer); err != nil {
			err = fmt.Errorf("sending an answer to rank %d, %v: %w", g.q.GetRank(), g.q.record, err)
			g.conn.Close() // makes receive end
		}
	}
	if err == nil {
		r.noteAnswered(g)
	}
	return err
}

// handshake reads the request of g. accept and closeOnce set the deadline.
func (r *root) handshake(g *caller) error {
	var err error
	if g.over, err = r.cfg.Secret.Encrypted().Accept(g.conn, rootMagic); err != nil {
		return err
	}
	version, err := dial.ReadGreeting(g.over, rootMagic)
	if err != nil {
		return err
	}
	if _, err := g.over.Write(dial.Greeting(rootMagic, rootVersion)); err != nil {
		return err
	}
	if version != rootVersion {
		return &dial.VersionError{Got: version, Want: rootVersion}
	}
	body, err := dial.ReadFrame(g.over, maxJoinRequestBytes)
	if err != nil {
		return fmt.Errorf("reading the request: %w", err)
	}
	g.q, err = decodeJoinRequest(body)
	if err != nil {
		return fmt.Errorf("reading the request: %w", err)
	}
	g.conn.SetDeadline(time.Time{})
	return nil
}

// admit makes g a member, which gets its answer later, or refuses g with an answer. It reports whether g is a
// member.
func (r *root) admit(g *caller) (member bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !bytes.Equal(g.q.GetToken(), r.token) {
		r.answer(g, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_STALE})
		return false
	}
	if r.state == forming {
		if why := r.contradiction(g.q); why != nil {
			r.fail(why)
			r.outcome(g)
			return false
		}
	}
	rank := int(g.q.GetRank())
	switch {
	case r.state == forming:
	case r.state == complete && rank > 0 && rank < len(r.members) &&
		bytes.Equal(r.members[rank].q.GetNonce(), g.q.GetNonce()):
		// The nonce shows that a call of Join asks again, because its connection broke before the table
		// arrived.
		if old := r.members[rank]; !old.finished {
			old.conn.Close()
			close(old.out)
			old.finished = true
		}
		r.members[rank] = g
		g.out <- r.tableOf(rank)
		if hasFailed(r.tried[r.records[rank].HostID]) {
			r.send(rank, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_STOP})
		}
		if r.reports != nil {
			r.send(rank, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_REPORT})
		}
		if r.start.ended() {
			r.answer(g, startAnswer(r.start.err))
		}
		return true
	default:
		r.verdict(g)
		return false
	}
	if old := r.members[rank]; old != nil {
		// The nonce shows that the same call of Join has dialed again, so its first connection is broken.
		old.conn.Close()
		close(old.out)
		old.finished = true
	} else {
		r.missing--
	}
	r.members[rank] = g
	delete(r.gaveUp, rank)
	r.lastEpoch = max(r.lastEpoch, g.q.GetLastEpoch())
	r.log.Debug("rendezvous: rank has joined", zap.Int("peer", rank), zap.Stringer("process", g.q.record),
		zap.Int("missing", r.missing))
	if r.missing == 0 {
		r.full = true
		r.signal()
	}
	return true
}

// contradiction returns an error if q contradicts the configuration of rank 0 or the request of another rank,
// else nil. The caller holds r.mu, and r is forming.
func (r *root) contradiction(q *joinRequest) *RefusedError {
	rank, size := q.GetRank(), q.GetSize()
	switch {
	case q.GetJob() != r.cfg.Job:
		return refuse(WrongJob, "the job is %q at rank %d, but %q at rank 0", q.GetJob(), rank, r.cfg.Job)
	case rank == 0:
		return refuse(DuplicateRank, "rank 0 joined twice: %v and %v", r.cfg.Self, q.record)
	case size != int64(r.cfg.Size):
		return refuse(SizeMismatch, "the job size is %d at rank %d, but %d at rank 0", size, rank, r.cfg.Size)
	}
	if err := checkRank(int64(rank), r.cfg.Size); err != nil {
		return refuse(RankOutOfRange, "%v: %v", q.record, err)
	}
	if m := r.members[rank]; m != nil && !bytes.Equal(m.q.GetNonce(), q.GetNonce()) {
		return refuse(DuplicateRank, "rank %d joined twice: %v and %v", rank, m.q.record, q.record)
	}
	return nil
}

// verdict answers g, which is not a member, if the root is complete or failed. The caller holds r.mu.
func (r *root) verdict(g *caller) {
	nonce, known := r.answered[g.q.process()]
	switch {
	case r.state == failed && known && !bytes.Equal(nonce, g.q.GetNonce()):
		// This process was sent the failure before, and the nonce shows that this is a new call of Join. (A
		// request with the old nonce comes from the same call, which has not received the failure.)
		r.answer(g, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_STALE})
		return
	case r.state == failed:
		r.outcome(g)
		return
	}
	if !known && g.q.GetLastEpoch() < r.epoch {
		r.remember(g.q)
		r.log.Warn("rendezvous: a process joined too late: the epoch is complete",
			zap.Uint64("epoch", r.epoch),
			zap.Int32("peer", g.q.GetRank()), zap.Stringer("process", g.q.record))
	}
	r.answer(g, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_COMPLETE, Epoch: r.epoch})
}

// outcome answers g with the failure. The caller holds r.mu, and r is failed.
func (r *root) outcome(g *caller) {
	g.refused = true
	g.hangs = g.moving
	// The process is remembered before the answer is sent, because it may join again as soon as it has the
	// answer.
	r.remember(g.q)
	r.answer(g, refusalAnswer(r.failure))
}

// send sends a member an answer that is not its last one. The caller holds r.mu.
func (r *root) send(rank int, a *rendezvouspb.Answer) {
	if m := r.members[rank]; !m.finished {
		if frame, err := appendMessage(nil, a); err == nil { // never fails, as all texts are UTF-8
			m.out <- frame
		}
	}
}

// answer sends g its last answer. The caller holds r.mu.
func (r *root) answer(g *caller, a *rendezvouspb.Answer) {
	if frame, err := appendMessage(nil, a); err == nil { // never fails, as all texts are UTF-8
		g.out <- frame
	}
	close(g.out)
	g.finished = true
}

// noteAnswered adds the rank of g to r.answeredRanks if the answer that g got was the failure.
func (r *root) noteAnswered(g *caller) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !g.refused {
		return
	}
	if rank := topo.Rank(g.q.GetRank()); rank > 0 && int(rank) < r.cfg.Size {
		if _, known := r.answeredRanks[rank]; !known {
			r.answeredRanks[rank] = struct{}{}
			if len(r.answeredRanks) == r.cfg.Size-1 {
				close(r.allAnswered)
			}
		}
	}
}

// remember adds the process that sent q to r.answered. The caller holds r.mu.
func (r *root) remember(q *joinRequest) {
	if len(r.answered) < maxAnswered {
		r.answered[q.process()] = q.GetNonce()
	}
}
