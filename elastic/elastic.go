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
	"slices"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/commits"
	"github.com/gohvd/gohvd/internal/rank"
)

// ErrRemoved is returned by Run if this process is not a rank of the job any more, for example because its
// host is taken away. The process can end.
var ErrRemoved = rank.ErrRemoved

// errChanged makes the training function return, because the ranks of the job change.
var errChanged = errors.New("the ranks of the job change: return this error from the training function")

// State is the state of the training. All its methods are called by the goroutine that has called Run.
type State interface {
	// Save returns a copy of the state, which Run keeps in memory with the one before. It is called at each
	// commit, and at rank 0 before the first call of the training function.
	Save() ([]byte, error)
	// Restore sets the state to what Save has returned, perhaps at another rank. It must not keep data.
	Restore(data []byte) error
}

// Job is this process in an elastic job.
type Job struct {
	state   State
	commits commits.Job
	// granted is the last commit of which this rank knows that all ranks have saved it. saved is the next
	// one, if this rank has saved it.
	granted, saved []byte
	// live says that the last commit is a step, so that it is the present state. Then granted is nil.
	live bool
	// committed says that the last vote was about a commit. Then granted is the present state if the vote has
	// ended the training.
	committed bool
}

// Run joins the job, as hvd.Init does with opts, and calls train until it returns nil. Before each call, all
// ranks have the same state: that of rank 0 at first, and later that of the last commit. If train returns an
// error that wraps an *hvd.PeerError or comes from Commit or Check, Run joins the job again with the ranks
// that there are then. It returns any other error of train, and an error if the training fails three times in
// a row without a commit, each time within 60 s, though the ranks do not become fewer. When train has
// returned nil, the process is still a rank; hvd.Shutdown leaves the job. Before that, all ranks may call Run
// again, for another training without new processes.
//
// In a process that is started while others train, Run joins them at their next commit. So make the model
// before Run, and do not call hvd.Init before Run: the others would wait while the model is made.
//
// While Run runs in an elastic job, SIGTERM does not end the process: it leaves the job at the next commit,
// and Run returns ErrRemoved. A handler of the program for SIGTERM gets the signal too, and should not make
// the training fail.
//
// train may be called several times. In each call hvd.Rank and hvd.Size may differ from those before, and
// process sets and handles of an earlier call are gone.
//
// In a job that is not elastic, Run calls train once, with the state of rank 0. Commit and Check work there
// too, but the failure of a rank is an error of Run.
func Run(ctx context.Context, state State, train func(ctx context.Context, job *Job) error,
	opts ...hvd.InitOption) error {
	defer rank.LeaveOnSIGTERM()()
	j := &Job{state: state}
	for {
		err := j.join(ctx, opts)
		if err == nil {
			err = train(ctx, j)
		}
		switch {
		case err == nil:
			return j.commits.Done(ctx)
		case ctx.Err() != nil:
			return err
		case errors.Is(err, errChanged):
			err = nil
			if !j.live && !j.committed {
				j.granted, err = j.state.Save()
			}
			if err == nil {
				j.commits.Changed()
			}
		default:
			var peer *hvd.PeerError
			err = j.commits.Failed(err, errors.As(err, &peer) && !errors.Is(err, ErrRemoved))
		}
		if err != nil {
			return err
		}
		// The job has failed for this rank or all ranks leave this generation, so an error says nothing new.
		_ = hvd.Shutdown(ctx)
	}
}

// join joins the job and makes the state equal at all ranks.
func (j *Job) join(ctx context.Context, opts []hvd.InitOption) error {
	if err := hvd.Init(ctx, opts...); err != nil {
		return err
	}
	if err := j.sync(ctx); err != nil {
		return err
	}
	return j.commits.Synced(ctx, collectives{})
}

// sync makes the state of all ranks that of the commit with which they go on.
func (j *Job) sync(ctx context.Context) (err error) {
	plan, err := j.commits.Join(ctx, collectives{}, false)
	if err != nil {
		return err
	}
	if plan.Held == commits.Saved {
		j.granted, j.live = j.saved, false
	}
	j.saved = nil
	if plan.Held == commits.Present || j.live && plan.Missing && j.isSource(plan) {
		if j.granted, err = j.state.Save(); err != nil {
			return err
		}
	}
	if plan.Missing {
		if err := j.send(ctx, plan); err != nil {
			return err
		}
	}
	if j.live && plan.Held != commits.Nothing {
		j.granted = nil
		return nil
	}
	j.live = false
	if plan.Held != commits.Nothing && !plan.Restore {
		return nil
	}
	return j.state.Restore(j.granted)
}

// isSource reports whether this rank sends its state to others.
func (j *Job) isSource(plan commits.Plan) bool {
	if from := j.commits.Sources(); from != nil {
		return slices.Contains(from, hvd.Rank())
	}
	return plan.Root == hvd.Rank()
}

// send sends the commit to the ranks that do not have it. The others send and receive nothing, unless most
// ranks lack it.
func (j *Job) send(ctx context.Context, plan commits.Plan) error {
	if from := j.commits.Sources(); from != nil {
		return j.exchange(ctx, from)
	}
	length, err := hvd.Broadcast(ctx, []int64{int64(len(j.granted))}, plan.Root, hvd.Name("elastic.length"))
	if err != nil {
		return err
	}
	data := j.granted
	if int64(len(data)) != length[0] {
		data = make([]byte, length[0])
	}
	data, err = hvd.Broadcast(ctx, data, plan.Root, hvd.Name("elastic.state"))
	if err == nil && plan.Held == commits.Nothing {
		j.granted = data
	}
	return err
}

// exchange sends the commit from the rank from[r] to each rank r for which this is not -1.
func (j *Job) exchange(ctx context.Context, from []int) error {
	me := hvd.Rank()
	var out []byte
	splits := make([]int, len(from))
	for r, source := range from {
		if source != me {
			continue
		}
		splits[r] = len(j.granted)
		if out == nil {
			out = j.granted
		} else {
			out = slices.Concat(out, j.granted)
		}
	}
	in, _, err := hvd.Alltoall(ctx, out, splits, hvd.Name("elastic.state"))
	if err == nil && from[me] >= 0 {
		j.granted = in
	}
	return err
}

// Commit saves the state, which must be the same at all ranks, and waits until all ranks have saved it. So
// every rank must call it equally often. If the ranks of the job change, it returns an error that the
// training function must return. If a rank dies later, the training goes on with the state of the last
// commit.
//
// While a rank is in hvd.Join, Commit and Check return an error, because that rank saves nothing. If the
// ranks make different numbers of steps, they join at the end of an epoch, get the state of the rank that has
// joined last by hvd.Broadcast, and then commit.
func (j *Job) Commit(ctx context.Context) (err error) {
	if j.live {
		return errors.New("elastic: Commit after Step: the state at the last step is the commit already, so a program " +
			"calls only Step, and Check between steps")
	}
	if j.saved, err = j.state.Save(); err != nil {
		return err
	}
	changed, err := j.vote(ctx, commits.Commit)
	if err != nil {
		return err
	}
	j.granted, j.saved, j.live = j.saved, nil, false
	return changed
}

// Step waits until all ranks have called it, and then calls apply, which changes the state by a step, usually
// by gradients that all ranks have reduced. A program whose state changes only in apply needs no Commit: if
// ranks die, at most the step in progress is made again, and no rank goes back. If some rank has called apply
// for a step, all ranks that go on have the state after it. So apply must change the state in the same way at
// all ranks, and nothing else may change it after the first Step: such a change would be lost at some ranks
// and kept at others. Like Commit, every rank must call Step equally often, and it returns an error that the
// training function must return. Then apply was called unless a rank has failed. Once a program has called
// Step, Commit is an error. Step fails with HOROVOD_ENABLE_ASYNC_COMPLETION, with which a rank does not know
// whether it has the results of its operations.
func (j *Job) Step(ctx context.Context, apply func()) error {
	if err := j.commits.CheckStep(); err != nil {
		return err
	}
	changed, err := j.vote(ctx, commits.Step)
	if err != nil {
		return err
	}
	j.commits.Stepped()
	j.granted, j.live = nil, true
	apply()
	return changed
}

// Check is like Commit, but saves nothing. If the ranks only change by plan, nothing is lost either.
func (j *Job) Check(ctx context.Context) error {
	changed, err := j.vote(ctx, commits.Changes)
	if err != nil {
		return err
	}
	return changed
}

// vote waits for all ranks, and returns errChanged in changed if the ranks of the job change.
func (j *Job) vote(ctx context.Context, about commits.About) (changed, err error) {
	number := []int64{j.commits.Ballot(about, 0)}
	all, err := hvd.Allreduce(ctx, number, hvd.Op(hvd.Sum), hvd.Name("elastic.vote"))
	if err != nil {
		return nil, err
	}
	changes, err := j.commits.Count(all[0])
	j.committed = err == nil && about == commits.Commit
	if changes != 0 {
		changed = errChanged
	}
	return changed, err
}

// collectives has the operations of this process by which the ranks agree.
type collectives struct{}

func (collectives) Rank() int { return hvd.Rank() }

func (collectives) Allgather(ctx context.Context, numbers []int64) ([]int64, error) {
	return hvd.Allgather(ctx, numbers, hvd.Name("elastic.commits"))
}
