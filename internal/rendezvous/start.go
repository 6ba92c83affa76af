package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

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

// Leave tells the root that this rank leaves the epoch because of why, unless all ranks are ready. It reports
// whether they are: then the others consider this rank a part of the epoch, and its death a failure. If they
// are not, the epoch fails at all ranks. A root that does not answer within answerGrace hangs, so the ranks
// are not ready.
func (s *Session) Leave(why string) (ready bool) {
	if s.member == nil {
		return true
	}
	// If the connection is broken, listen ends the start.
	_ = sendStatus(s.member.conn, &rendezvouspb.Status{Kind: rendezvouspb.Status_LEAVES,
		Text: cut(why, maxTextBytes)})
	ctx, cancel := context.WithTimeout(context.Background(), answerGrace)
	defer cancel()
	return s.wait(ctx) == nil
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
