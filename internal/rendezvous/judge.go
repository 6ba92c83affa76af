package rendezvous

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

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
	case s.GetKind() == rendezvouspb.Status_LEAVES:
		r.conclude(newFailure(rank, s.GetText()))
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
// than answerGrace. The caller holds r.mu.
func (r *root) stoodStill() bool { return r.standstill() > 0 }

// standstill returns for how long this process did not run, or 0 if stoodStill returns false. The caller
// holds r.mu.
func (r *root) standstill() time.Duration {
	now, grace := time.Now(), r.grace()
	if d := now.Sub(r.ranAt); d >= grace {
		r.stood, r.resumedAt = d, now
	}
	r.ranAt = now
	if now.Sub(r.resumedAt) < grace {
		return r.stood
	}
	return 0
}

func (r *root) grace() time.Duration { return cmp.Or(r.cfg.grace, answerGrace) }

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
		r.pause(r.grace()-suspicion, r.accounted)
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
