package rendezvous

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

// FailedError reports that ranks failed during a start, after the epoch was complete but before all ranks
// were ready. All ranks get the same FailedError.
type FailedError struct {
	Epoch uint64
	// Ranks has the ranks that failed, at least one. If one of two ranks failed but it is unknown which one,
	// Ranks has both.
	Ranks []topo.Rank
	// Reason describes the failure, as the root has observed it or as the failed rank has reported it.
	Reason string

	// Silent says that this rank has had no answer of rank 0 in time, and blames it for that alone. On a busy
	// machine, rank 0 may be alive.
	Silent bool

	hang bool // at the root: Ranks hang
}

func newFailure(rank int, reason string) *FailedError {
	return &FailedError{Ranks: []topo.Rank{topo.Rank(rank)}, Reason: reason}
}

func (e *FailedError) Error() string {
	names := make([]string, len(e.Ranks))
	for i, r := range e.Ranks {
		names[i] = fmt.Sprintf("rank %d", r)
	}
	return fmt.Sprintf("%s failed: %s", strings.Join(names, " or "), e.Reason)
}

// outcome is the result of the start of an epoch: whether all ranks have become ready.
type outcome struct {
	done chan struct{} // closed when the start has ended and err has its value
	err  *FailedError  // nil if all ranks are ready
}

func newOutcome() outcome { return outcome{done: make(chan struct{})} }

func (o *outcome) ended() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}

func (o *outcome) end(err *FailedError) {
	o.err = err
	close(o.done)
}

// wait waits until all ranks are ready, ranks have failed, or ctx ends. It returns nil if all ranks are
// ready, a *FailedError if ranks have failed, and the error of ctx if ctx has ended.
func (s *Session) wait(ctx context.Context) error {
	o := &s.member.start
	select {
	case <-o.done:
	case <-ctx.Done():
		if !o.ended() {
			return fmt.Errorf("rendezvous: waiting for the other ranks to be ready: %w", context.Cause(ctx))
		}
	}
	if o.err == nil {
		return nil
	}
	why := *o.err
	why.Epoch = s.Epoch
	return &why
}

// errReported is the cause with which the contexts of Watch end when another rank has reported a failure.
var errReported = fmt.Errorf("another rank has failed: %w", context.Canceled)

// Watch derives a context that ends if a rank fails before all ranks are ready. Its cause is the
// *FailedError, or an error that wraps context.Canceled if the root has not yet decided which ranks failed.
// In both cases the caller should call Fail. The caller must call stop when it no longer needs the derived
// context.
func (s *Session) Watch(ctx context.Context) (watched context.Context, stop func()) {
	watched, cancel := context.WithCancelCause(ctx)
	var watcher sync.WaitGroup
	if s.member != nil {
		watcher.Go(func() {
			start := &s.member.start
			select {
			case <-start.done:
				if start.err != nil {
					cancel(start.err)
				}
			case <-s.member.reported:
				cancel(errReported)
			case <-watched.Done():
			}
		})
	}
	return watched, func() {
		cancel(nil)
		watcher.Wait()
	}
}

// Ready tells the root that this rank is connected to all others, and waits until every rank has called
// Ready. If a rank fails first, all ranks return the same *FailedError. If ctx ends first, Ready returns the
// error of ctx. If a rank dies later, the engine detects that through its own connections.
func (s *Session) Ready(ctx context.Context) error {
	if s.member == nil {
		return nil
	}
	// If the connection is broken, listen ends with the reason, and wait returns this reason.
	_ = sendStatus(s.member.conn, &rendezvouspb.Status{Kind: rendezvouspb.Status_READY})
	return s.wait(ctx)
}

// failWait is how long Fail waits for the decision of a root that runs. The decision comes after
// suspicionTime. failWait is long, because the root may be on a busy machine. If the root's process ends, the
// connection ends, and Fail does not wait.
const failWait = 10 * time.Second

// Fail tells the other ranks that this rank cannot continue because of err, and returns the reason why the
// epoch has failed. The reason is err if this rank is the only cause, else a *FailedError. If all ranks were
// ready already, Fail returns err.
//
// suspects are the ranks that may be the cause. If this rank is the cause, the caller passes this rank; if
// the cause is unknown, the caller passes no suspects. If the epoch has failed already, err is not reported.
// If a rank has died, that rank is the cause, no matter what the others report. The first report makes the
// other ranks call Fail too (Watch). A rank that then reports nothing hangs, and is the cause unless a rank
// suspects itself. If rank 0 does not react to the report within answerGrace, rank 0 is the cause. The caller
// should keep its connections to the other ranks open until Fail has returned.
func (s *Session) Fail(err error, suspects ...topo.Rank) error {
	if s.member == nil {
		return err
	}
	own := !s.member.start.ended() // whether err may be the cause of the failure, and not a consequence
	select {
	case <-s.member.reported:
		own = own && !errors.Is(err, context.Canceled)
	default:
	}
	status := &rendezvouspb.Status{Kind: rendezvouspb.Status_FAILED, Text: cut(err.Error(), maxTextBytes)}
	for _, r := range suspects {
		status.Ranks = append(status.Ranks, int32(r))
	}
	_ = sendStatus(s.member.conn, status) // the error is ignored, because listen reports a broken connection
	if s.rank != 0 && !s.member.hears(answerGrace) {
		return &FailedError{Epoch: s.Epoch, Ranks: []topo.Rank{0}, Silent: true,
			Reason: fmt.Sprintf("it did not answer when rank %d gave up: %v", s.rank, err)}
	}
	ctx, cancel := context.WithTimeout(context.Background(), failWait)
	defer cancel()
	why, failed := errors.AsType[*FailedError](s.wait(ctx))
	if !failed || own && len(why.Ranks) == 1 && why.Ranks[0] == s.rank {
		return err
	}
	return why
}

// member is a rank's connection to the root of its epoch. It is used from the arrival of the table until all
// ranks are ready or the epoch has failed.
type member struct {
	conn     net.Conn
	start    outcome
	tries    *agreement
	reported chan struct{} // closed when the root knows that a rank has reported a failure
}

func newMember(conn net.Conn, in *bufio.Reader) *member {
	m := &member{conn, newOutcome(), newAgreement(), make(chan struct{})}
	go m.listen(in)
	return m
}

// hears reports whether the root answers within the time limit d to a report of a failure.
func (m *member) hears(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-m.reported:
	case <-m.start.done:
	case <-t.C:
		return m.start.ended()
	}
	return true
}

// close closes the connection and waits until listen has ended.
func (m *member) close() {
	_ = m.conn.Close() // ends listen, which closes the connection too
	<-m.start.done
}

// listen receives the root's answers until an answer contains the result of the start. Then it closes the
// connection.
func (m *member) listen(in *bufio.Reader) {
	err := m.receive(in)
	failed, answered := errors.AsType[*FailedError](err)
	if err != nil && !answered {
		failed = newFailure(0, hungUp(err))
	}
	_ = m.conn.Close() // no more data can arrive, so the error does not matter
	m.start.end(failed)
}

func (m *member) receive(in *bufio.Reader) error {
	for {
		a, err := readAnswer(in)
		if err != nil {
			return err
		}
		switch kind := a.GetKind(); {
		case kind == rendezvouspb.Answer_START:
			return nil
		case kind == rendezvouspb.Answer_FAILED && len(a.GetRanks()) > 0:
			return &FailedError{Ranks: decodeRanks(a.GetRanks()), Reason: a.GetText()}
		case kind == rendezvouspb.Answer_STOP || kind == rendezvouspb.Answer_TRIED:
			if err := m.tries.handle(a); err != nil {
				return err
			}
		case kind == rendezvouspb.Answer_REPORT:
			select {
			case <-m.reported:
				return fmt.Errorf("the root sent the answer %v twice", kind)
			default:
				close(m.reported)
			}
		default:
			return fmt.Errorf("the root sent an unknown answer: %v", a)
		}
	}
}

func readAnswer(in io.Reader) (*rendezvouspb.Answer, error) {
	a := new(rendezvouspb.Answer)
	body, err := dial.ReadFrame(in, maxAnswerBytes)
	if err == nil {
		err = proto.Unmarshal(body, a)
	}
	return a, err
}

// readStatus reads a message that a member sends after its request.
func readStatus(in io.Reader) (*rendezvouspb.Status, error) {
	s := new(rendezvouspb.Status)
	body, err := dial.ReadFrame(in, maxStatusBytes)
	if err != nil {
		return s, err
	}
	if err = proto.Unmarshal(body, s); err == nil && (s.GetKind() < rendezvouspb.Status_TIMEOUT ||
		s.GetKind() > rendezvouspb.Status_MOVED) {
		err = fmt.Errorf("got a status of the unknown kind %v", s.GetKind())
	}
	if err != nil {
		err = fmt.Errorf("reading a status: %w", err)
	}
	return s, err
}

// hungUp returns the text for the failure of a rank whose connection to the root has ended with err.
func hungUp(err error) string {
	const text = "the process closed its connection during Init"
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) {
		return text
	}
	return fmt.Sprintf("%s: %v", text, err)
}

func sendStatus(conn net.Conn, s *rendezvouspb.Status) error {
	f, err := appendMessage(nil, s)
	if err != nil {
		return err
	}
	_, err = conn.Write(f)
	return err
}

func startAnswer(why *FailedError) *rendezvouspb.Answer {
	if why == nil {
		return &rendezvouspb.Answer{Kind: rendezvouspb.Answer_START}
	}
	return &rendezvouspb.Answer{Kind: rendezvouspb.Answer_FAILED, Text: cut(why.Reason, maxTextBytes),
		Ranks: encodeRanks(why.Ranks)}
}

// report is a rank's report of a failure.
type report struct {
	rank     int
	suspects []topo.Rank
	text     string
	unheard  bool // whether rank 0 did not run when the rank sent the report
}

// suspectsItself reports whether the rank has named itself as the only suspect.
func (p *report) suspectsItself() bool { return len(p.suspects) == 1 && int(p.suspects[0]) == p.rank }

// receive handles statuses of a member until its connection ends.
func (r *root) receive(g *caller) {
	for {
		s, err := readStatus(g.over)
		r.mu.Lock()
		if err == nil && r.state == forming && !g.mayBeforeTable(s) {
			err = fmt.Errorf("reading a status: got %v before all ranks have joined", s.GetKind())
		}
		if !g.finished { // ignore a caller that has received its last answer
			r.handleStatus(g, s, err)
		}
		r.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// handleStatus processes a status of g or, if err is not nil, the end of its connection. The caller holds
// r.mu, and g is a member.
func (r *root) handleStatus(g *caller, s *rendezvouspb.Status, err error) {
	rank := int(g.q.GetRank())
	if r.state == complete && err == nil {
		r.gaveUp[rank] = s.GetKind() == rendezvouspb.Status_TIMEOUT && r.stoodStill()
	}
	switch {
	case r.state == forming && (err != nil || s.GetKind() == rendezvouspb.Status_TIMEOUT):
		r.members[rank] = nil
		r.missing++
		if err != nil {
			close(g.out)
			g.finished = true
		} else {
			err = errors.New("its deadline has passed")
			r.gaveUp[rank] = true
			ranks, text := r.awaited()
			r.answer(g, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_MISSING, Text: text,
				Ranks: encodeRanks(ranks)})
		}
		g.left = fmt.Errorf("rank %d, %v, left before all ranks had joined: %w", rank, g.q.record, err)
	case r.state == forming:
		r.noteMoved(g, s)
	case err != nil:
		r.conclude(r.whyLeft(rank, err))
	case s.GetKind() == rendezvouspb.Status_READY:
		r.noteReady(rank)
	case s.GetKind() == rendezvouspb.Status_TRIED:
		r.noteTried(rank, s)
	case s.GetKind() == rendezvouspb.Status_FAILED:
		p := report{rank: rank, text: s.GetText(), unheard: r.stoodStill()}
		for _, suspect := range s.GetRanks() {
			if suspect >= 0 && int(suspect) < len(r.members) {
				p.suspects = append(p.suspects, topo.Rank(suspect))
			}
		}
		r.noteReport(p)
	}
}

// watchStandstill detects that this process was stopped during the start, until the start has ended.
func (r *root) watchStandstill() {
	t := time.NewTicker(answerGrace / 10)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			r.mu.Lock()
			r.stoodStill()
			r.mu.Unlock()
		case <-r.start.done:
			return
		case <-r.ctx.Done():
			return
		}
	}
}

// stoodStill reports whether this process did not run for answerGrace or longer, and has run again for less
// than answerGrace. The caller holds r.mu, and r is complete.
func (r *root) stoodStill() bool {
	now, grace := time.Now(), cmp.Or(r.cfg.grace, answerGrace)
	if now.Sub(r.ranAt) >= grace {
		r.resumedAt = now
	}
	r.ranAt = now
	return now.Sub(r.resumedAt) < grace
}

// whyLeft returns the failure of an epoch in which the connection of a rank has ended with err. If the rank
// has given up while the process of rank 0 was stopped, it has left because rank 0 did not answer. Then rank
// 0 is the cause, unless the rank has named itself. The caller holds r.mu, and r is complete.
func (r *root) whyLeft(rank int, err error) *FailedError {
	if i := slices.IndexFunc(r.reports, func(p report) bool { return p.rank == rank }); i >= 0 {
		switch p := r.reports[i]; {
		case p.suspectsItself():
			return newFailure(rank, p.text)
		case p.unheard:
			return newFailure(0, fmt.Sprintf("it did not answer when rank %d gave up: %s", rank, p.text))
		}
	}
	if r.gaveUp[rank] {
		return newFailure(0, fmt.Sprintf("it did not answer when the time limit of Init passed at rank %d", rank))
	}
	return newFailure(rank, hungUp(err))
}

// noteReady records that rank is ready. When all ranks are ready and none has reported a failure, it ends the
// start. The caller holds r.mu.
func (r *root) noteReady(rank int) {
	r.ready[rank] = true
	if len(r.ready) == len(r.members) && r.reports == nil {
		r.conclude(nil)
	}
	r.account()
}

// noteReport records that a rank cannot continue. Only the first report of each rank counts. After the first
// report of any rank, the root makes the other ranks report too, and waits for suspicionTime: if a rank has
// died, its connection to the root ends in that time and shows who died. Then it waits for reports until
// answerGrace after the first one: a rank that hangs reports nothing, but others may be on busy machines. The
// caller holds r.mu, and r is complete.
func (r *root) noteReport(p report) {
	if r.start.ended() || r.ctx.Err() != nil || slices.ContainsFunc(r.reports, func(q report) bool {
		return q.rank == p.rank
	}) {
		return
	}
	r.reports = append(r.reports, p)
	r.account()
	if len(r.reports) > 1 {
		return
	}
	for rank := range r.members {
		r.send(rank, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_REPORT})
	}
	r.wg.Go(func() {
		suspicion := cmp.Or(r.cfg.suspicion, suspicionTime)
		r.pause(suspicion, nil)
		r.pause(cmp.Or(r.cfg.grace, answerGrace)-suspicion, r.accounted)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.conclude(r.judge())
	})
}

// pause waits for d, or until early is closed, the start has ended or the root is closed.
func (r *root) pause(d time.Duration, early <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-early:
	case <-r.start.done:
	case <-r.ctx.Done():
	}
}

// account signals r.accounted when each rank is ready or has reported a failure. The caller holds r.mu.
func (r *root) account() {
	silent := len(r.members) - len(r.ready)
	for _, p := range r.reports {
		if !r.ready[p.rank] {
			silent--
		}
	}
	if silent == 0 {
		select {
		case r.accounted <- struct{}{}:
		default: // it has been signalled already
		}
	}
}

// judge decides which ranks have caused a failure if no rank has died. If a rank has named itself, this rank
// is the cause. Otherwise the cause is among the suspects in the first report or, if it has none, among all
// ranks. Those of them that are not ready and have not reported a failure hang, and are the cause. If none of
// them hangs, the suspects are the cause or, if there are none, the rank that sent the first report. The
// caller holds r.mu.
func (r *root) judge() *FailedError {
	first := r.reports[0]
	reported := make(map[int]bool)
	for _, p := range r.reports {
		if p.suspectsItself() {
			return newFailure(p.rank, p.text)
		}
		reported[p.rank] = true
	}
	why := &FailedError{Reason: fmt.Sprintf("it was not ready when rank %d gave up: %s", first.rank, first.text)}
	for rank := range r.members {
		if !r.ready[rank] && !reported[rank] && (first.suspects == nil ||
			slices.Contains(first.suspects, topo.Rank(rank))) {
			why.Ranks = append(why.Ranks, topo.Rank(rank))
		}
	}
	switch {
	case why.Ranks != nil:
		why.hang = true
		return why
	case first.suspects != nil:
		return &FailedError{Ranks: first.suspects, Reason: first.text}
	}
	return newFailure(first.rank, first.text)
}

// conclude ends the start and sends the result to all members. The result is why, which is nil if all ranks
// are ready. If the start has ended already, conclude does nothing. The caller holds r.mu, and r is complete.
func (r *root) conclude(why *FailedError) {
	if r.start.ended() {
		return
	}
	r.start.end(why)
	for rank, m := range r.members {
		if m != nil && !m.finished {
			m.hangs = why != nil && why.hang && slices.Contains(why.Ranks, topo.Rank(rank))
			r.answer(m, startAnswer(why))
		}
	}
}
