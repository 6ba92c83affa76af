package library

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/internal/commits"
	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
)

// training is this process in an elastic job. The states of the training are in the program.
type training struct {
	member *rank.Membership // set by the first Init of an elastic job

	using   sync.Mutex // held by a call that uses commits
	commits commits.Job

	mu       sync.Mutex
	progress Progress
	notice   func() // makes SIGTERM have its usual effect again; nil if it has
	rejoins  bool   // the training goes on after the next Shutdown and Init
}

// Progress is what the program must know of an elastic job. Plan and the next fields are the result of the
// last JoinTraining, and Changes is that of the last Vote. They are the same at all ranks, apart from
// Plan.Held, Plan.Restore, Source and Receiver.
type Progress struct {
	Generation uint64         // of which this process is a rank; 0 if the job is not elastic
	Pending    elastic.Change // how the launcher has changed the ranks since then
	Removed    bool           // Init has failed because this process is not a rank any more
	Plan       commits.Plan
	// Pairs says that ranks that have the state can send it to those that lack it, each to one, and not only
	// the root to all (Sources of commits.Job). Source is the rank that sends it to this rank, and Receiver
	// the one to which this rank sends it, or -1.
	Pairs            bool
	Source, Receiver int
	Changes          elastic.Change
}

// Outcome is how the training has ended in this process.
type Outcome int

const (
	// Done says that it has returned.
	Done Outcome = iota
	// Changed says that it has ended because of the changes of a Vote, and that the program has saved its
	// state.
	Changed
	// Failed says that it has failed because other ranks have.
	Failed
	// Abandoned says that it has failed because of an error of the program.
	Abandoned
)

// Progress returns the progress of this process in an elastic job.
func (l *Library) Progress() Progress {
	t := &l.training
	t.mu.Lock()
	p := t.progress
	t.mu.Unlock()
	if m := rank.ProcessMembership(); m != nil {
		p.Generation = m.Generation()
		if p.Generation > 0 && m.Pending() != nil {
			p.Pending = m.Pending().Change
		}
	}
	return p
}

// note changes the progress of the training.
func (t *training) note(change func(*Progress)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&t.progress)
}

// newcomer is this process before it becomes a rank of an elastic job that trains already.
type newcomer struct {
	options InitOptions
	rank    rank.Rank // only with the expected place
	ctx     context.Context
	cancel  context.CancelFunc
}

// expect makes this process a newcomer. The caller holds l.changing.
func (l *Library) expect(o *InitOptions) error {
	ctx, cancel := context.WithCancel(context.Background())
	place, err := l.training.member.Expected(ctx)
	if err != nil {
		cancel()
		return err
	}
	n := &newcomer{options: *o, rank: rank.Rank{Place: place}, ctx: ctx, cancel: cancel}
	n.options.Sets = nil // the other ranks have none any more
	l.newcomer.Store(n)
	return nil
}

// enter makes a newcomer a rank when the other ranks commit. Shutdown ends the wait.
func (l *Library) enter() error {
	l.changing.Lock()
	defer l.changing.Unlock()
	n := l.newcomer.Load()
	if n == nil {
		return nil
	}
	err := l.join(n.ctx, &n.options, false)
	if err == nil {
		l.newcomer.Store(nil)
		n.cancel()
	}
	return err
}

// startTraining starts f, which uses the commits of this process.
func (l *Library) startTraining(op string, f func(t *training, c collectives) error) Handle {
	return l.start(func(*Result) error { return l.train(op, f) })
}

func (l *Library) train(op string, f func(t *training, c collectives) error) error {
	r, err := l.current(op)
	if err != nil {
		return err
	}
	if !l.training.using.TryLock() {
		return errInProgress(op)
	}
	defer l.training.using.Unlock()
	return f(&l.training, collectives{l, r})
}

// JoinTraining agrees with the other ranks on the commit with which they go on (commits.Job.Join). A newcomer
// becomes a rank first.
func (l *Library) JoinTraining(loose bool) Handle {
	return l.start(func(*Result) error {
		if l.Rank() != nil {
			l.training.takeNotice()
		}
		if err := l.enter(); err != nil {
			return err
		}
		return l.train("elastic join", func(t *training, c collectives) error {
			plan, err := t.commits.Join(context.Background(), c, loose)
			if err == nil {
				from, me := t.commits.Sources(), c.Rank()
				t.note(func(p *Progress) {
					p.Plan, p.Changes = plan, 0
					p.Pairs, p.Source, p.Receiver = from != nil, -1, slices.Index(from, me)
					if p.Pairs {
						p.Source = from[me]
					}
				})
			}
			return err
		})
	})
}

// Synced tells that all ranks have done what the plan says.
func (l *Library) Synced() Handle {
	return l.startTraining("elastic synced", func(t *training, c collectives) error {
		return t.commits.Synced(context.Background(), c)
	})
}

// Vote waits for all ranks, as Run waits for an operation. In a vote for a step, this rank makes the step if
// the vote succeeds and the ranks do not change.
func (l *Library) Vote(about commits.About, asked elastic.Change, limit time.Duration) (Handle, error) {
	const op = "elastic vote"
	r, err := l.current(op)
	if err != nil {
		return 0, err
	}
	t := &l.training
	if !t.using.TryLock() {
		return 0, errInProgress(op)
	}
	if about == commits.Step {
		if err := t.commits.CheckStep(); err != nil {
			t.using.Unlock()
			return 0, err
		}
	}
	v := &vote{training: t, about: about, numbers: [2]int64{t.commits.Ballot(about, asked)}}
	s := rank.Spec{Kind: uint32(message.Allreduce), Name: "elastic.vote", ReduceOp: uint32(tensor.Sum)}
	if v.call, err = l.begin(collectives{l, r}.operation(s, v.numbers[:1], v.numbers[1:])); err != nil {
		t.using.Unlock()
		return 0, err
	}
	if !await(v, limit) {
		v.execution.NotifyLater()
		return l.handles.add(v), ErrPending
	}
	return 0, l.finish(v, nil, false)
}

// vote is the operation of a Vote.
type vote struct {
	*call
	training *training
	about    commits.About
	numbers  [2]int64 // the one of this rank, and the result
}

func (v *vote) take(*Result) error {
	defer v.training.using.Unlock()
	if v.err != nil {
		return v.err
	}
	changes, err := v.training.commits.Count(v.numbers[1])
	if err == nil && v.about == commits.Step && changes == 0 {
		v.training.commits.Stepped()
	}
	v.training.note(func(p *Progress) { p.Changes = changes })
	return err
}

func errInProgress(op string) error {
	return &engine.UsageError{Op: op, Err: errors.New("another such call is in progress")}
}

// EndTraining tells how the training has ended. After Changed and Failed the program leaves the job and joins
// it again, unless there is an error.
func (l *Library) EndTraining(o Outcome) Handle {
	// After Abandoned, a vote may be in progress. In a newcomer, the training has not begun.
	if o == Abandoned || l.newcomer.Load() != nil {
		return l.start(func(*Result) error {
			l.training.stopNotice()
			return nil
		})
	}
	return l.startTraining("elastic end", func(t *training, c collectives) error {
		err := t.end(o, c)
		if err == nil && (o == Changed || o == Failed) {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.rejoins = true
			return nil
		}
		t.stopNotice()
		return err
	})
}

func (t *training) end(o Outcome, c collectives) error {
	switch o {
	case Done:
		return t.commits.Done(context.Background())
	case Changed:
		t.commits.Changed()
		return nil
	}
	if err := t.commits.Over(); err != nil {
		return err
	}
	err := whyOver(c.rank)
	if err == nil {
		return &engine.UsageError{Op: "elastic end", Err: errors.New("the job is not over")}
	}
	_, ofRanks := errors.AsType[*engine.PeerError](err)
	return t.commits.Failed(err, ofRanks)
}

// takeNotice makes SIGTERM make this process leave.
func (t *training) takeNotice() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rejoins = false
	if t.notice == nil {
		t.notice = rank.LeaveOnSIGTERM()
	}
}

// stopNotice makes SIGTERM have its usual effect again.
func (t *training) stopNotice() {
	t.mu.Lock()
	stop := t.notice
	t.notice, t.rejoins = nil, false
	t.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// left is called when this process has left its job.
func (t *training) left() {
	t.mu.Lock()
	rejoins := t.rejoins
	t.mu.Unlock()
	if !rejoins {
		t.stopNotice()
	}
}

// overLimit is how long the job may go on after an operation has failed because of other ranks.
const overLimit = 10 * time.Second

// whyOver waits until the job is over, which is soon after an operation has failed because of other ranks,
// and returns the reason. It returns nil if the job goes on.
func whyOver(r *rank.Rank) error {
	if r.Engine != nil {
		limit := time.NewTimer(overLimit)
		defer limit.Stop()
		select {
		case <-r.Engine.Ended():
		case <-limit.C:
		}
	}
	return r.Check()
}

// collectives has the operations of this process by which the ranks agree.
type collectives struct {
	library *Library
	rank    *rank.Rank
}

func (c collectives) Rank() int { return c.rank.Place.Rank }

func (c collectives) Allgather(_ context.Context, numbers []int64) ([]int64, error) {
	all := make([]int64, len(numbers)*c.rank.Place.Size)
	s := rank.Spec{Kind: uint32(message.Allgather), Name: "elastic.commits"}
	_, err := c.library.Run(c.operation(s, numbers, all), Forever, nil)
	return all, err
}

// operation returns the operation s on numbers.
func (c collectives) operation(s rank.Spec, in, out []int64) *Op {
	s.DType, s.Prescale, s.Postscale = uint32(tensor.Int64), 1, 1
	s.Tensors = []rank.TensorSpec{{Shape: tensor.Shape{int64(len(in))}}}
	place := Place{In: unsafe.Pointer(&in[0]), Out: unsafe.Pointer(&out[0]), OutBytes: uint64(8 * len(out))}
	return &Op{Spec: s, Places: []Place{place}}
}
