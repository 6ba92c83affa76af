package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

const (
	// maxTriedBytes is the maximum length of the text in which a rank describes its failure in Agree.
	// maxTriedRanks is the maximum number of failed ranks of its own host that a rank learns from Agree.
	maxTriedBytes = 512
	maxTriedRanks = 100
)

// errStopped is the cause with which Agree cancels the context of this rank's try when another rank of the
// host has failed.
var errStopped = errors.New("another rank of this host has failed")

// agreement has what one rank has learned from the root about the tries of all ranks in Agree.
type agreement struct {
	stopped chan struct{} // closed when another rank of this host has failed
	done    chan struct{} // closed when failed is set
	failed  map[topo.Rank]string
}

func newAgreement() *agreement {
	return &agreement{stopped: make(chan struct{}), done: make(chan struct{})}
}

// handle processes an answer of the root about the tries: STOP or TRIED. Only one goroutine calls it.
func (a *agreement) handle(answer *rendezvouspb.Answer) error {
	to := a.stopped
	if answer.GetKind() == rendezvouspb.Answer_TRIED {
		to = a.done
	}
	select {
	case <-to:
		return fmt.Errorf("the root sent the answer %v twice", answer.GetKind())
	default:
	}
	if to == a.done {
		a.failed = make(map[topo.Rank]string)
		for r, text := range answer.GetTried() {
			a.failed[topo.Rank(r)] = text
		}
	}
	close(to)
	return nil
}

// Agree runs try at all ranks of the job. try does something in which all ranks of a host (Record.HostID)
// must take part, such as sharing memory. When one try fails, the contexts of the others on the same host
// end, so that they do not wait for that rank. Errors that may pass, such as a refused connection, are
// usually caused by the failure of another rank. They count only if no rank of the host has failed for
// another reason.
//
// Agree returns when the tries have ended at all ranks. The map failed is empty if all of them succeeded. It
// maps each rank of this host whose try failed to the text of its error. For each other host on which a try
// failed, it has the lowest failed rank, with an empty text.
//
// All ranks of the job must call Agree once, before Ready. If a rank leaves the epoch, because it calls Fail
// or its process ends, the error is a *FailedError. If ctx ends first, the error is the error of ctx. In both
// cases failed is nil. In a job of one rank, Agree only runs try.
func (s *Session) Agree(ctx context.Context,
	try func(context.Context) error) (failed map[topo.Rank]string, err error) {
	if s.member == nil {
		if err := try(ctx); err != nil {
			failed = map[topo.Rank]string{s.rank: cut(err.Error(), maxTriedBytes)}
		}
		return failed, ctx.Err()
	}
	ctx, unwatch := s.Watch(ctx)
	defer unwatch()
	a := s.member.tries
	trying, stop := context.WithCancelCause(ctx)
	var stopper sync.WaitGroup
	stopper.Go(func() {
		select {
		case <-a.stopped:
			stop(errStopped)
		case <-trying.Done():
		}
	})
	err = try(trying)
	if errors.Is(context.Cause(trying), errStopped) && isConsequence(err) {
		err = errStopped
	}
	stop(nil)
	stopper.Wait()
	if ctx.Err() == nil {
		s.tried(err)
		select {
		case <-a.done:
			return a.failed, nil
		case <-ctx.Done():
		}
	}
	return nil, fmt.Errorf("rendezvous: waiting for the other ranks to agree: %w", context.Cause(ctx))
}

// tried sends the root the result of this rank's try: err, or success if err is nil.
func (s *Session) tried(err error) {
	status := &rendezvouspb.Status{Kind: rendezvouspb.Status_TRIED}
	switch {
	case errors.Is(err, errStopped):
	case err != nil:
		status.Text = cut(err.Error(), maxTriedBytes)
		status.MayPass = mayPass(err)
	}
	_ = sendStatus(s.member.conn, status) // if the connection is broken, listen returns the error
}

// mayPass reports whether err may have been caused by the end of another rank's try.
func mayPass(err error) bool { return dial.MayRecover(err) || errors.Is(err, syscall.ENOENT) }

// isConsequence is called with the error of a try that was told to stop. It reports whether the stop caused
// this error. Any other error is a failure of this rank itself. A failing rank can be told to stop before it
// has reported its failure: it closes its connections, and a peer that notices this may report it first.
func isConsequence(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, os.ErrDeadlineExceeded) ||
		err != nil && mayPass(err)
}

// noteTried records the result of a rank's attempt. At the first failure on a host, it tells the host's other
// ranks to stop. When all ranks of the job have reported, it sends them the result. The caller holds r.mu,
// and the state of r is complete.
func (r *root) noteTried(rank int, s *rendezvouspb.Status) {
	host := r.records[rank].HostID
	reports := r.tried[host]
	if reports == nil {
		reports = make(map[int]*rendezvouspb.Status)
		r.tried[host] = reports
	}
	if reports[rank] != nil {
		return
	}
	first := s.GetText() != "" && !hasFailed(reports)
	reports[rank] = s
	for other := range r.records {
		if first && other != rank && r.records[other].HostID == host {
			r.send(other, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_STOP})
		}
	}
	if r.triedRanks++; r.triedRanks == len(r.records) {
		r.sendOutcome()
	}
}

// sendOutcome sends all ranks the result of their tries. The caller holds r.mu.
func (r *root) sendOutcome() {
	causes := make(map[string]map[int32]string) // for each host with a failed try, the failed ranks
	for host, reports := range r.tried {
		if failed := causesOf(reports); len(failed) > 0 {
			causes[host] = failed
		}
	}
	for host, reports := range r.tried {
		tried := make(map[int32]string)
		for other, failed := range causes {
			if other != host {
				tried[slices.Min(slices.Collect(maps.Keys(failed)))] = ""
			}
		}
		maps.Copy(tried, causes[host])
		for rank := range reports {
			r.send(rank, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_TRIED, Tried: tried})
		}
	}
}

// causesOf returns the failed ranks of a host with the texts of their errors. If any failure is permanent, it
// returns only the ranks with permanent failures.
func causesOf(reports map[int]*rendezvouspb.Status) map[int32]string {
	failed := make(map[int32]string)
	for _, mayPass := range []bool{false, true} {
		for rank, report := range reports {
			if report.GetText() != "" && report.GetMayPass() == mayPass && len(failed) < maxTriedRanks {
				failed[int32(rank)] = cut(report.GetText(), maxTriedBytes)
			}
		}
		if len(failed) > 0 {
			break
		}
	}
	return failed
}

func hasFailed(reports map[int]*rendezvouspb.Status) bool {
	for _, s := range reports {
		if s.GetText() != "" {
			return true
		}
	}
	return false
}
