// Package elastic lets training go on when ranks die, leave or are added. hvdrun starts such a job with
// --min-np or --host-discovery-script (docs/elastic.md).
//
//	err := elastic.Run(ctx, state, func(ctx context.Context, job *elastic.Job) error {
//		for ; model.step < steps; model.step++ {
//			// compute gradients, and average them with hvd.Allreduce
//			if err := job.Commit(ctx); err != nil {
//				return err
//			}
//		}
//		return nil
//	})
//
// If a rank dies, the operations of the others fail with an *hvd.PeerError. When the training function
// returns it, Run joins the remaining ranks again, sets the state to that of the last commit, and calls the
// function again. The processes stay alive. A new process becomes a rank at a commit, and gets the state from
// the others.
package elastic

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/rank"
)

// ErrRemoved is returned by Run if this process is not a rank of the job any more, for example because its
// host is taken away. The process can end.
var ErrRemoved = rank.ErrRemoved

// errChanged makes the training function return, because the ranks of the job change.
var errChanged = errors.New("the ranks of the job change: return this error from the training function")

// maxVain is how often in a row the training may fail because of other ranks without a commit.
const maxVain = 3

// State is the state of the training. All its methods are called by the goroutine that has called Run.
type State interface {
	// Save returns a copy of the state. Run does not change it.
	Save() ([]byte, error)
	// Restore sets the state to what Save has returned, perhaps at another rank. It must not keep data.
	Restore(data []byte) error
}

// commit is a saved state. Commits are numbered from 1; 0 means that there is none.
type commit struct {
	number int64
	data   []byte
}

// Job is this process in an elastic job.
type Job struct {
	state  State
	member *rank.Membership // nil if the job is not elastic
	// granted is the last commit of which this rank knows that all ranks have saved it. saved is the next
	// one, if there is one. Other ranks may know that all have saved it.
	granted, saved commit
}

// Run joins the job, as hvd.Init does with opts, and calls train until it returns nil. Before each call, all
// ranks have the same state: that of rank 0 at first, and later that of the last commit. If train returns an
// error that wraps an *hvd.PeerError or comes from Commit or Check, Run joins the job again with the ranks
// that there are then. It returns any other error of train, and an error if the training fails three times in
// a row without a commit. When train has returned nil, the process is still a rank; hvd.Shutdown leaves the
// job.
//
// In a job that is not elastic, Run calls train once.
func Run(ctx context.Context, state State, train func(ctx context.Context, job *Job) error,
	opts ...hvd.InitOption) error {
	j := &Job{state: state}
	restore := false
	for vain, last := 0, int64(0); ; {
		err := j.join(ctx, restore, opts)
		if err == nil {
			err = train(ctx, j)
		}
		var peer *hvd.PeerError
		switch changed := errors.Is(err, errChanged); {
		case err == nil:
			return j.tell(ctx, joblink.MemberEvent{Kind: joblink.Done})
		case j.member == nil || !changed && !errors.As(err, &peer) || errors.Is(err, ErrRemoved) ||
			ctx.Err() != nil:
			return err
		case changed:
			restore, vain = false, 0
			err = j.keep()
		case j.granted.number == last && vain+1 == maxVain:
			return fmt.Errorf("elastic: the training has failed %d times in a row without a commit: %w", maxVain, err)
		default:
			if j.granted.number != last {
				vain = 0
			}
			restore, err, vain = true, nil, vain+1
		}
		if err != nil {
			return err
		}
		last = j.granted.number
		// The job has failed for this rank or all ranks leave this generation, so an error says nothing new.
		_ = hvd.Shutdown(ctx)
	}
}

// join joins the job and makes the state equal at all ranks.
func (j *Job) join(ctx context.Context, restore bool, opts []hvd.InitOption) error {
	if err := hvd.Init(ctx, opts...); err != nil {
		return err
	}
	j.member = rank.ProcessMembership()
	if err := j.sync(ctx, restore); err != nil {
		return err
	}
	if j.member == nil || hvd.Rank() != 0 {
		return nil
	}
	return j.tell(ctx, joblink.MemberEvent{Kind: joblink.Synced, Generation: j.member.Generation()})
}

func (j *Job) tell(ctx context.Context, e joblink.MemberEvent) error {
	if j.member == nil {
		return nil
	}
	return j.member.Tell(ctx, e)
}

// keep makes the present state, which is equal at all ranks, a commit, so that new ranks can get it.
func (j *Job) keep() error {
	data, err := j.state.Save()
	j.granted = commit{j.granted.number + 1, data}
	return err
}

// sync makes the state of all ranks that of the newest commit that any of them knows to be saved at all
// ranks. If there is none, it makes it that of rank 0. A rank that has this commit only restores it if
// restore is set.
func (j *Job) sync(ctx context.Context, restore bool) error {
	numbers, err := hvd.Allgather(ctx, []int64{j.granted.number}, hvd.Name("elastic.commits"))
	if err != nil {
		return err
	}
	newest := slices.Max(numbers)
	j.settle(newest)
	root := slices.Index(numbers, newest)
	if newest == 0 {
		if newest = 1; hvd.Rank() == root {
			if err := j.keep(); err != nil {
				return err
			}
		}
	}
	has := int64(0)
	if j.granted.number == newest {
		has = 1
	}
	all, err := hvd.Allreduce(ctx, []int64{has}, hvd.Op(hvd.Min), hvd.Name("elastic.has"))
	if err != nil {
		return err
	}
	if all[0] == 0 {
		if err := j.send(ctx, root, newest); err != nil {
			return err
		}
	}
	if has == 1 && !restore {
		return nil
	}
	return j.state.Restore(j.granted.data)
}

// settle makes the saved commit the granted one if another rank knows that all ranks have saved it. Otherwise
// it forgets it, because a later commit will have its number.
func (j *Job) settle(newest int64) {
	if j.granted.number < newest && j.saved.number == newest {
		j.granted = j.saved
	}
	j.saved = commit{}
}

// send sends the commit of the rank root to the ranks that do not have it.
func (j *Job) send(ctx context.Context, root int, number int64) error {
	length, err := hvd.Broadcast(ctx, []int64{int64(len(j.granted.data))}, root, hvd.Name("elastic.length"))
	if err != nil {
		return err
	}
	data := j.granted.data
	if j.granted.number != number {
		data = make([]byte, length[0])
	}
	if data, err = hvd.Broadcast(ctx, data, root, hvd.Name("elastic.state")); err != nil {
		return err
	}
	if j.granted.number != number {
		j.granted = commit{number, data}
	}
	return nil
}

// Commit saves the state, which must be the same at all ranks, and waits until all ranks have saved it. So
// every rank must call it equally often. If the ranks of the job change, it returns an error that the
// training function must return. If a rank dies later, the training goes on with the state of the last
// commit.
func (j *Job) Commit(ctx context.Context) error {
	data, err := j.state.Save()
	if err != nil {
		return err
	}
	j.saved = commit{j.granted.number + 1, data}
	changed, err := j.vote(ctx)
	if err != nil {
		return err
	}
	j.granted, j.saved = j.saved, commit{}
	return changed
}

// Check is like Commit, but saves nothing. If the ranks only change by plan, nothing is lost either.
func (j *Job) Check(ctx context.Context) error {
	changed, err := j.vote(ctx)
	if err != nil {
		return err
	}
	return changed
}

// vote waits for all ranks, and returns errChanged in changed if any of them knows of a later generation.
func (j *Job) vote(ctx context.Context) (changed, err error) {
	pending := int64(0)
	if j.member != nil && j.member.Pending() != nil {
		pending = 1
	}
	any, err := hvd.Allreduce(ctx, []int64{pending}, hvd.Op(hvd.Max), hvd.Name("elastic.vote"))
	if err == nil && any[0] > 0 {
		changed = errChanged
	}
	return changed, err
}
