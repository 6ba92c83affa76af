package ps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
)

// maxOutstanding is the maximum number of requests of a customer that have not completed.
const maxOutstanding = 1 << 16

// customerKey identifies a customer in its process.
type customerKey struct{ app, id int }

// customer sends the requests of an app and receives the responses, and handles the requests of others. It
// tracks the requests that are not answered. Requests of others are handled one at a time.
type customer struct {
	po  *postoffice
	key customerKey
	// request handles a request of another node, which it must answer. The lock handling is locked.
	request  func(from van.Process, m *van.Message)
	handling sync.Mutex
	// gone is called when a process has died or left. It may be nil.
	gone func()
	// replicas has the ranges of keys that this server has, by Header.range. It is nil in a job without
	// replicas.
	replicas map[int32]*replica

	mu        sync.Mutex
	timestamp int64     // number of requests so far
	completed int64     // all requests up to this number have completed, at least
	answers   []answers // of pushes and pulls, by rank of the server
	rerouting bool      // a goroutine sends parts to other servers
	pending   map[int64]*Request
	callbacks []*Request // requests whose callback is to be called
	calling   bool       // a goroutine calls callbacks
	uncalled  int        // number of requests that are answered and whose callback has not returned
	ended     error      // reason why no further request is sent
}

// answers counts the responses of a server to pushes and pulls. time is the sum of the times from the calls
// to the responses.
type answers struct {
	count uint64
	time  time.Duration
}

// Request is a request in flight, to one node or several. Its methods are safe for concurrent use.
type Request struct {
	c         *customer
	timestamp int64
	callback  func(error)
	// of says what the request is about.
	of subject
	// event is the push or pull, unless it is another request.
	event event

	// over is set when the request has completed and its callback has returned. done is closed then. It is
	// nil before somebody waits, and guarded by c.mu.
	over atomic.Bool
	done chan struct{}

	// told says that the program knows whether the request has failed.
	told atomic.Bool

	// The following fields are guarded by c.mu until the request has completed.
	parts    []part
	answered int
	accepted time.Duration // when the last part was in a queue; 0 if there is none yet
	deadline time.Time     // zero if there is none
	err      error
}

// subject is what a request is about: a push or pull, or the request of a SimpleApp.
type subject interface {
	// String describes the request in errors.
	String() string
	// finish is called with the responses when all have arrived, before the callback.
	finish(parts []part) error
	// completed is called with the error of the request, if any, before the callback.
	completed(err error)
	// keysOf returns the keys in the range of the server with a rank. It returns nil unless the request is a
	// push or pull.
	keysOf(rank int) []uint64
}

// part is the part of a request that goes to one node.
type part struct {
	to       int
	m        *van.Message // the request, before it is sent
	response *van.Message // nil before it has arrived
	// home is the range in which the keys are, as in Header.range. It is 0 unless the request is a push or
	// pull.
	home int32
	// again makes the request once more for another server that has the range. It is nil if there is none.
	again func(to int) *van.Message

	// sent is set before the part is sent, so the response may arrive from then on. inFlight is set when the
	// van has accepted the part for the process via. From then on van.Answered must be called once. If the
	// response arrives before inFlight is set, it sets via.
	sent, inFlight, answered bool
	via                      van.Process

	// attempt counts how often the part was sent, and settled is the attempt that was answered with moved.
	attempt, settled int
	// reading is the number of attempts whose message the van may still read.
	reading *atomic.Int32
	// homeless is since when the part has had no server: when the last one that had it ended, or when the
	// first one that did not was asked. While sent is not set, it is to be sent to another one, at the time
	// due. moved counts the answers moved since a server has ended.
	homeless, due time.Time
	moved         int
}

// newCustomer returns a customer. The caller sets request and passes the customer to postoffice.add.
func newCustomer(po *postoffice, app, id int) (*customer, error) {
	if app < 0 || app > math.MaxInt32 {
		return nil, &UsageError{fmt.Errorf("the app has the number %d, want 0 to %d", app, math.MaxInt32)}
	}
	return &customer{po: po, key: customerKey{app, id}, pending: make(map[int64]*Request),
		answers: make([]answers, po.cfg.NumServers)}, nil
}

// start sends the parts of r. If a part cannot be sent, for example because ctx ends or the time limit passes
// while the queue is full, the request fails, and start returns the error. It owns the messages in any case.
// If it returns an error, the callback is not called.
func (c *customer) start(ctx context.Context, r *Request) error {
	r.c = c
	if limit := c.po.set.OperationTimeout; limit > 0 {
		r.deadline = time.Now().Add(limit)
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, r.deadline, errTimeout)
		defer cancel()
	}
	c.mu.Lock()
	err := c.ended
	if n := len(c.pending) + c.uncalled; err == nil && n >= maxOutstanding {
		err = fmt.Errorf("%d requests have not completed, want at most %d", n, maxOutstanding)
	}
	if c.advance(); err == nil && c.timestamp-c.completed >= maxOutstanding && c.po.set.PS.Replicas > 0 {
		// The servers remember which pushes were applied since then.
		err = fmt.Errorf("request %d has not completed, and %d later ones have been made, want at most %d",
			c.completed+1, c.timestamp-c.completed-1, maxOutstanding)
	}
	if err != nil {
		c.mu.Unlock()
		for _, p := range r.parts {
			p.m.Drop()
		}
		err = fmt.Errorf("ps: %s: %w", r.of, err)
		r.told.Store(true)
		r.of.completed(err)
		return err
	}
	c.timestamp++
	r.timestamp = c.timestamp
	c.pending[r.timestamp] = r
	c.po.wg.Add(1)
	c.mu.Unlock()
	if len(r.parts) == 0 {
		c.complete(r, nil)
		return nil
	}
	for i := range r.parts {
		if err := c.send(ctx, r, &r.parts[i], r.parts[i].m); err != nil {
			for _, p := range r.parts[i+1:] {
				p.m.Drop()
			}
			c.mu.Lock()
			failed := c.pending[r.timestamp] != r
			if !failed {
				r.callback = nil
			}
			c.mu.Unlock()
			if failed && r.callback != nil {
				return nil // the callback gets the error
			}
			r.told.Store(true)
			c.complete(r, err)
			return fmt.Errorf("ps: %s: %w", r.of, public(err))
		}
	}
	return nil
}

// advance sets completed to what has completed. The caller holds mu.
func (c *customer) advance() {
	for c.completed < c.timestamp && c.pending[c.completed+1] == nil {
		c.completed++
	}
}

// send sends the message m, which is one part of a request, unless the request has failed already.
func (c *customer) send(ctx context.Context, r *Request, p *part, m *van.Message) error {
	h := m.Header
	h.Request, h.Timestamp, h.AppId, h.CustomerId = true, r.timestamp, int32(c.key.app), int32(c.key.id)
	h.Range = p.home
	if p.again != nil {
		reading := p.reading
		reading.Add(1)
		m.Free = func() { reading.Add(-1) }
	}
	c.mu.Lock()
	m.Prompt = r.callback != nil
	c.advance()
	h.Completed = c.completed
	p.m = nil
	sent := c.pending[r.timestamp] == r
	p.sent = sent
	p.attempt++
	attempt, to := p.attempt, p.to
	c.mu.Unlock()
	if !sent {
		m.Drop()
		return nil
	}
	via, err := c.po.van.Request(ctx, to, m)
	c.mu.Lock()
	if lost := p.attempt != attempt || !p.sent; lost || err != nil {
		settled := p.settled >= attempt
		if err != nil && !lost && p.again != nil && ctx.Err() == nil && c.pending[r.timestamp] == r &&
			!errors.As(err, new(*van.LimitError)) {
			c.unroute(p)
			lost = true
		}
		c.mu.Unlock()
		switch {
		case err != nil && !lost:
			return err
		case err == nil && !settled:
			c.po.van.Answered(via)
		}
		return nil
	}
	p.inFlight = true
	if !p.answered {
		p.via = via
	}
	over := c.pending[r.timestamp] != r
	if !over {
		r.accepted = c.po.observer.now()
	}
	failed := over && !p.answered
	c.mu.Unlock()
	if failed {
		c.po.van.Answered(via)
	}
	return nil
}

// receive handles a message of another node.
func (c *customer) receive(from van.Process, m *van.Message) {
	switch h := m.Header; {
	case h.Replica != nil:
		c.replica(from, m)
	case h.Request:
		if r := c.replicas[h.Range]; r != nil && (h.Push || h.Pull) {
			r.awaitRoom()
		}
		c.handling.Lock()
		defer c.handling.Unlock()
		c.request(from, m)
	default:
		c.response(from, m)
	}
}

// handle handles a request that has waited for the customer.
func (c *customer) handle(from van.Process, m *van.Message) {
	if m.Header.Replica != nil {
		c.replica(from, m)
		return
	}
	c.request(from, m)
}

// replica passes a message of another server to the replica that it is about.
func (c *customer) replica(from van.Process, m *van.Message) {
	switch r := c.replicas[m.Header.Range]; {
	case r != nil:
		r.receive(from, m)
	case m.Header.Request:
		c.po.refuse(from, m, fmt.Errorf("app %d has no replica of the range %d here", c.key.app,
			m.Header.Range-1))
	default:
		m.Release()
	}
}

// news tells the replicas that processes or connections have changed.
func (c *customer) news() {
	for _, r := range c.replicas {
		r.news()
	}
}

// response handles a response.
func (c *customer) response(from van.Process, m *van.Message) {
	c.mu.Lock()
	r := c.pending[m.Header.Timestamp]
	i := -1
	if r != nil {
		i = slices.IndexFunc(r.parts, func(p part) bool {
			return p.to == from.ID && p.home == m.Header.Range && p.sent && !p.answered
		})
	}
	if m.Header.WantKeys {
		c.mu.Unlock()
		if i < 0 {
			r = nil
		}
		c.sendKeys(r, from, m)
		return
	}
	if i < 0 {
		c.mu.Unlock()
		m.Release() // the request has failed, or the peer has answered twice
		return
	}
	p, text := &r.parts[i], m.Header.Error // another call may release m when mu is unlocked
	if m.Header.Moved && p.again != nil {
		p.settled = p.attempt
		if p.moved++; p.moved > 1 { // the other server of the range has not answered either
			p.due = time.Now().Add(min(reroutePause<<min(p.moved-2, 10), maxReroutePause))
		}
		c.unroute(p)
		c.mu.Unlock()
		c.po.van.Answered(from)
		m.Release()
		return
	}
	p.answered, p.response, p.via = true, m, from
	if p.home > 0 {
		c.po.primaries[p.home-1].Store(int32(from.ID))
		a := &c.answers[van.Rank(from.ID)]
		a.count++
		a.time += c.po.observer.now() - r.event.begun
	}
	r.answered++
	all := r.answered == len(r.parts)
	c.mu.Unlock()
	c.po.van.Answered(from)
	switch {
	case text != "":
		c.complete(r, &RemoteError{NodeID(from.ID), text})
	case all:
		c.complete(r, nil)
	}
}

// sendKeys sends the keys of a request to a server that does not know them, which m says. This answers m, so
// it does not wait. If the request has failed, r is nil, and sendKeys sends no keys, so that the server drops
// the request.
func (c *customer) sendKeys(r *Request, from van.Process, m *van.Message) {
	h := m.Header
	keys := &van.Message{Header: &pspb.Header{Request: true, WantKeys: true, Timestamp: h.Timestamp,
		AppId: h.AppId, CustomerId: h.CustomerId, Range: h.Range, KeyList: h.KeyList}}
	if r != nil && h.Range > 0 {
		keys.Data = [][]byte{bytesOfKeys(r.of.keysOf(int(h.Range) - 1))}
	}
	m.Release()
	c.po.sendAnswer(from, keys)
}

// complete ends a request because all responses have arrived, or because of an error. Only the first call has
// an effect.
func (c *customer) complete(r *Request, err error) {
	c.mu.Lock()
	if c.pending[r.timestamp] != r {
		c.mu.Unlock()
		return
	}
	delete(c.pending, r.timestamp)
	var unanswered []van.Process
	for i := range r.parts {
		if p := &r.parts[i]; p.inFlight && !p.answered {
			unanswered = append(unanswered, p.via)
		}
	}
	c.mu.Unlock()
	for _, to := range unanswered {
		c.po.van.Answered(to)
	}
	if err == nil {
		err = r.of.finish(r.parts)
	}
	for i := range r.parts {
		if m := r.parts[i].response; m != nil {
			m.Release()
			r.parts[i].response = nil
		}
	}
	if err != nil {
		r.err = fmt.Errorf("ps: %s: %w", r.of, public(err))
	}
	r.of.completed(r.err)
	if r.callback == nil {
		c.over(r)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.uncalled++
	c.callbacks = append(c.callbacks, r)
	if !c.calling {
		c.calling = true
		c.po.wg.Go(c.call)
	}
}

// call calls callbacks in the order in which the requests were answered, until there are no more.
func (c *customer) call() {
	for {
		c.mu.Lock()
		if len(c.callbacks) == 0 {
			c.calling = false
			c.mu.Unlock()
			c.po.van.Flush() // what the callbacks have sent
			return
		}
		r := c.callbacks[0]
		c.callbacks = c.callbacks[1:]
		c.mu.Unlock()
		r.callback(r.err)
		c.over(r)
		c.mu.Lock()
		c.uncalled--
		c.mu.Unlock()
	}
}

// over records that a request has completed and its callback has returned.
func (c *customer) over(r *Request) {
	c.mu.Lock()
	r.over.Store(true)
	if r.done != nil {
		close(r.done)
	}
	c.mu.Unlock()
	c.po.wg.Done()
}

// failIf fails the requests for which the function why returns an error. why is called with mu locked.
func (c *customer) failIf(why func(*Request) error) {
	errs := make(map[*Request]error)
	c.mu.Lock()
	for r := range maps.Values(c.pending) {
		if err := why(r); err != nil {
			errs[r] = err
		}
	}
	c.mu.Unlock()
	for r, err := range errs {
		c.complete(r, err)
	}
}

// lost fails the requests that a node will not answer, or sends them to the other server of their range.
func (c *customer) lost(id int, err error) {
	if c.gone != nil {
		c.gone()
	}
	c.failIf(func(r *Request) error {
		for i := range r.parts {
			switch p := &r.parts[i]; {
			case p.to != id || !p.sent || p.answered:
			case p.again == nil:
				return err
			default:
				p.moved, p.due, p.homeless = 0, time.Time{}, time.Time{}
				c.unroute(p)
			}
		}
		return nil
	})
}

const (
	// reroutePause is the time between two attempts to find servers for parts of requests.
	reroutePause = 20 * time.Millisecond
	// maxReroutePause is the maximum time for which a part waits after an answer moved. The time begins with
	// reroutePause and doubles, because the whole part is sent each time.
	maxReroutePause = 500 * time.Millisecond
)

// unroute makes the customer send a part again, because the server to which it was sent has ended, or does
// not answer for the range. The request has not completed. The caller holds mu.
func (c *customer) unroute(p *part) {
	p.sent, p.inFlight = false, false
	if p.homeless.IsZero() {
		p.homeless = time.Now()
	}
	if !c.rerouting {
		c.rerouting = true
		c.po.wg.Go(c.reroute)
	}
}

// reroute sends the parts that have lost their servers to other ones, until there are none.
func (c *customer) reroute() {
	type homeless struct {
		r *Request
		p *part
	}
	for {
		var all []homeless
		failed := c.po.van.Err() != nil // then no part waits any longer
		c.mu.Lock()
		c.rerouting = false
		now := time.Now()
		for _, r := range c.pending {
			for i := range r.parts {
				p := &r.parts[i]
				if p.sent || p.homeless.IsZero() {
					continue
				}
				c.rerouting = true
				if failed || !now.Before(p.due) {
					all = append(all, homeless{r, p})
				}
			}
		}
		over := !c.rerouting
		c.mu.Unlock()
		if over {
			return
		}
		slices.SortFunc(all, func(a, b homeless) int { return cmp.Compare(a.r.timestamp, b.r.timestamp) })
		for _, h := range all {
			if err := c.sendAgain(h.r, h.p); err != nil {
				c.complete(h.r, err)
			}
		}
		dial.Pause(context.Background(), reroutePause, c.po.van.Done())
	}
}

// sendAgain sends a part to the server of its range that is not known not to answer. It returns an error if
// there has been none for too long.
func (c *customer) sendAgain(r *Request, p *part) error {
	v, home := c.po.van, int(p.home)-1
	if err := v.Err(); err != nil {
		return err
	}
	first := van.ServerID(home)
	limit := p.homeless.Add(c.po.cfg.HeartbeatTimeout + customerWait)
	late := &NodeError{Node: NodeID(first), Err: fmt.Errorf("no server has answered for its keys for %v",
		c.po.cfg.HeartbeatTimeout+customerWait)}
	// The end of a connection does not count: the news that a server has returned may still be on the way.
	if other := c.po.otherServer(home, first); v.Ended(v.Current(first)) && v.Ended(v.Current(other)) {
		err := v.Gone(first)
		late.Err = fmt.Errorf("%w, and so is %s, which has the same keys", err, van.Name(other))
		// With Resend, the message that one has ended may overtake the one that the other has returned.
		if !c.po.cfg.Resend {
			return late
		}
	}
	if time.Now().After(limit) {
		return late
	}
	to := c.po.route(home, c.po.otherServer(home, p.to))
	if p.reading.Load() > 0 {
		to = 0 // later: the request may complete only when nothing reads the values
	}
	c.mu.Lock()
	if to == 0 || c.pending[r.timestamp] != r {
		c.mu.Unlock()
		return nil
	}
	p.to = to
	c.mu.Unlock()
	cause := error(late)
	if !r.deadline.IsZero() && r.deadline.Before(limit) {
		limit, cause = r.deadline, errTimeout
	}
	ctx, cancel := context.WithDeadlineCause(context.Background(), limit, cause)
	defer cancel()
	return c.send(ctx, r, p, p.again(to))
}

// errTimeout is the reason why a request has failed if HVD_OPERATION_TIMEOUT_SECONDS have passed.
var errTimeout = errors.New("no answer within HVD_OPERATION_TIMEOUT_SECONDS")

// tick fails the requests whose time limit has passed.
func (c *customer) tick(now time.Time) {
	for _, r := range c.replicas {
		r.tick(now)
	}
	c.failIf(func(r *Request) error {
		if r.deadline.IsZero() || now.Before(r.deadline) {
			return nil
		}
		for _, p := range r.parts {
			if !p.answered {
				return fmt.Errorf("%w: %s has not answered", errTimeout, van.Name(p.to))
			}
		}
		return errTimeout
	})
}

// closeReplicas makes the customer answer no further pushes and pulls of replicas.
func (c *customer) closeReplicas() {
	for _, r := range c.replicas {
		r.close()
	}
}

// failAll fails all requests, also later ones.
func (c *customer) failAll(err error) {
	for _, r := range c.replicas {
		r.release()
	}
	c.mu.Lock()
	c.ended = err
	c.mu.Unlock()
	c.failIf(func(*Request) error { return err })
}

// Timestamp returns the number of the request among those of its customer, counted from 1.
func (r *Request) Timestamp() int64 { return r.timestamp }

// Done returns a channel that is closed when the request has completed and its callback has returned.
func (r *Request) Done() <-chan struct{} {
	r.told.Store(true)
	return r.completion()
}

// completion returns the channel that Done returns.
func (r *Request) completion() <-chan struct{} {
	r.c.po.van.Flush()
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if r.done == nil {
		r.done = make(chan struct{})
		if r.over.Load() {
			close(r.done)
		}
	}
	return r.done
}

// Wait waits until the request has completed and its callback has returned, and returns its error. If ctx
// ends first, Wait returns its error, and the request continues. A callback must not call Wait, because
// callbacks of a customer are called one at a time.
func (r *Request) Wait(ctx context.Context) error {
	if r.over.Load() {
		return r.result()
	}
	done := r.completion()
	if ctx.Err() == nil {
		r.c.po.van.Poll(&r.over)
	}
	if r.over.Load() {
		return r.result()
	}
	select {
	case <-done:
		return r.result()
	case <-ctx.Done():
		return fmt.Errorf("ps: wait for %s: %w", r.of, context.Cause(ctx))
	}
}

// result returns the error of the request, which has completed, to the program.
func (r *Request) result() error {
	r.told.Store(true)
	return r.err
}

// NumResponses returns the number of nodes that have answered.
func (r *Request) NumResponses() int {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	return r.answered
}
