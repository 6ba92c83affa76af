package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

const (
	// maxTriedBytes bounds the text of a rank's failure in Agree. maxTriedRanks bounds how many failed ranks
	// of a host are named.
	maxTriedBytes = 512
	maxTriedRanks = 100
)

// errStopped ends a rank's try in Agree when another rank of its host fails.
var errStopped = errors.New("another rank of this host has failed")

// agreement is what a rank learns about the try of its host.
type agreement struct {
	stopped chan struct{} // closed when another rank has failed
	done    chan struct{} // closed when failed is set
	failed  map[topo.Rank]string
}

func newAgreement() *agreement {
	return &agreement{stopped: make(chan struct{}), done: make(chan struct{})}
}

// handle processes an answer of the root. One goroutine calls it.
func (a *agreement) handle(answer *rendezvouspb.Answer) error {
	to := a.stopped
	if answer.GetKind() == rendezvouspb.Answer_TRIED {
		to = a.done
	}
	select {
	case <-to:
		return fmt.Errorf("the root sent %v twice", answer.GetKind())
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

// Agree makes all ranks of this rank's host (Record.HostID) try something that takes all of them, such as
// sharing memory. It returns at each of them which ranks failed, and how. When a rank fails, the ctx of the
// other tries ends, so that they do not wait for it. A failure that may pass, such as a refused connection,
// counts only if no rank failed in another way, because then another rank is the cause.
//
// All ranks of the host call it, once, before Ready. If a rank fails for good, or ctx ends, there is no
// outcome: the error is a *FailedError, or that of ctx.
func (s *Session) Agree(ctx context.Context,
	try func(context.Context) error) (failed map[topo.Rank]string, err error) {
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
	return nil, fmt.Errorf("rendezvous: waiting for the ranks of this host to agree: %w", context.Cause(ctx))
}

// tried tells the root how the try of this rank has ended.
func (s *Session) tried(err error) {
	status := &rendezvouspb.Status{Kind: rendezvouspb.Status_TRIED}
	switch {
	case errors.Is(err, errStopped):
	case err != nil:
		status.Text = cut(err.Error(), maxTriedBytes)
		status.MayPass = mayPass(err)
	}
	_ = sendStatus(s.member.conn, status) // listen returns the error of a broken connection
}

// mayPass reports whether a try may have failed because the try of another rank had ended.
func mayPass(err error) bool { return dial.MayRecover(err) || errors.Is(err, syscall.ENOENT) }

// isConsequence reports whether a try that was told to stop failed because of that. A rank with a failure of
// its own may be told to stop before it has reported the failure, because its peers notice that it has closed
// its connections.
func isConsequence(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, os.ErrDeadlineExceeded) ||
		err != nil && mayPass(err)
}

// noteTried records how the try of a rank has ended. The first failure on a host stops its other ranks. They
// get the outcome when all have reported. r is locked and complete.
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
	size := 0
	for other := range r.records {
		if r.records[other].HostID != host {
			continue
		}
		size++
		if first && other != rank {
			r.sendTried(other, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_STOP})
		}
	}
	if len(reports) < size {
		return
	}
	outcome := &rendezvouspb.Answer{Kind: rendezvouspb.Answer_TRIED, Tried: make(map[int32]string)}
	for _, mayPass := range []bool{false, true} {
		for rank, report := range reports {
			if report.GetText() != "" && report.GetMayPass() == mayPass &&
				len(outcome.Tried) < maxTriedRanks {
				outcome.Tried[int32(rank)] = cut(report.GetText(), maxTriedBytes)
			}
		}
		if len(outcome.Tried) > 0 {
			break
		}
	}
	for rank := range reports {
		r.sendTried(rank, outcome)
	}
}

func hasFailed(reports map[int]*rendezvouspb.Status) bool {
	for _, s := range reports {
		if s.GetText() != "" {
			return true
		}
	}
	return false
}

// sendTried sends a rank an answer about the try of its host. r is locked.
func (r *root) sendTried(rank int, a *rendezvouspb.Answer) {
	if m := r.members[rank]; !m.finished {
		if frame, err := appendMessage(nil, a); err == nil { // no error, because all texts are UTF-8
			m.out <- frame
		}
	}
}
