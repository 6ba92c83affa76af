// Package commits is what a process does between two generations of an elastic job: it agrees with the other
// ranks on the commit with which they go on, and decides whether the training goes on after it has failed. It
// knows commits only by their numbers. Package elastic keeps the states of programs in Go; programs in other
// languages keep theirs (internal/library).
//
// At the start of a generation a process joins its job, calls Join, does what the Plan says, and calls
// Synced. The training votes, with
// Ballot and Count. When it ends, the process calls Done, Changed or Failed. After the last
// two it leaves its job and begins again.
package commits

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/rank"
)

// maxVain is how often in a row the training may fail because of other ranks without a commit, each time
// within vainTime after Synced, if the ranks do not become fewer. Such failures are probably the program's
// own. Fewer ranks are another attempt, and there are only so many. Failures after a longer time may be
// preemptions between commits that are far apart; hvdrun counts them (--reset-limit).
const (
	maxVain  = 3
	vainTime = time.Minute
)

// Collectives are the operations by which the ranks agree.
type Collectives interface {
	// Rank returns the rank of this process.
	Rank() int
	// Allgather returns the numbers of all ranks in the order of the ranks. Each rank has the same number of
	// them.
	Allgather(ctx context.Context, numbers []int64) ([]int64, error)
}

// Job is this process in its job. The zero value has no commit. Its methods must not be called at the same
// time.
type Job struct {
	member *rank.Membership // nil if the job is not elastic
	// granted is the number of the last commit of which this rank knows that all ranks have saved it. saved
	// is that of the next one, if this rank has saved it. Other ranks may know that all have saved it.
	// Commits are numbered from 1; 0 means that there is none.
	granted, saved int64
	about          About     // of the last Ballot
	size           int       // the number of ranks that have joined the generation
	next           int64     // the number of the commit that all ranks have after Synced
	failed         bool      // the training has failed since the last Synced
	began          time.Time // when Synced was called if no Join or failure has followed, or the zero time
	stopped        time.Time // when the training has ended since the last Synced, or the zero time
	sources        []int     // the result of Sources
	vain           int       // how often it has failed since the last commit, or since there are so few ranks
	smallest       int       // the smallest number of ranks since the last commit, or 0
	failure        error     // the newest one
	over           error     // the result of Join when it has failed too often
}

// Held says which state a rank has.
type Held int

const (
	// Nothing says that the rank must get the state.
	Nothing Held = iota
	// Granted says that the rank has the commit. If it has saved a later one, that one is void.
	Granted
	// Saved says that the rank has the commit, and that it is the last one that it has saved. It did not know
	// that all ranks have saved it.
	Saved
	// Present says that there is no commit, and that the others get the present state of this rank.
	Present
)

// Plan says what a rank does at the start of a generation, so that all ranks have the same state.
type Plan struct {
	Held Held
	// Restore says that the rank must set its state to its commit, even if it then gets another one, because
	// the training has failed.
	Restore bool
	// Missing says that some rank does not have the commit. Then rank Root sends it to them.
	Missing bool
	Root    int
}

// Values of a rank that Join compares.
const (
	holdsGranted = iota
	holdsSaved
	isLoose
	pastTrainings // how many trainings have returned in the process
	failures      // vain
	fewest        // smallest
	numValues
)

// Join agrees with the other ranks on the commit with which they go on: the newest one of which any of them
// knows that all ranks had saved it. If there is none, they go on with the present state of the first rank.
//
// loose says that this rank has a state, but none of its commits, because the program has replaced it by
// another state. Then all ranks get the state of the first rank that has one.
//
// Ranks in which different numbers of trainings have returned do not have states of the same training. They
// may meet if a rank fails when a training returns. Then Join returns an error at all of them.
func (j *Job) Join(ctx context.Context, c Collectives, loose bool) (p Plan, err error) {
	j.member, j.began = rank.ProcessMembership(), time.Time{}
	if j.member != nil {
		if err := j.member.BeginTraining(ctx); err != nil {
			return p, err
		}
	}
	mine := make([]int64, numValues)
	mine[holdsGranted], mine[holdsSaved] = j.granted, j.saved
	mine[failures], mine[fewest] = int64(j.vain), int64(j.smallest)
	if loose {
		mine[isLoose] = 1
	}
	if j.member != nil {
		mine[pastTrainings] = int64(j.member.PastTrainings())
	}
	all, err := c.Allgather(ctx, mine)
	if err != nil {
		return p, err
	}
	j.size = len(all) / numValues
	newest, anyLoose := int64(0), false
	for r := range j.size {
		if here, first := all[r*numValues+pastTrainings], all[pastTrainings]; here != first {
			return p, fmt.Errorf("elastic: %d trainings have returned at rank 0, and %d at rank %d, so they cannot train "+
				"together: a rank has failed while a training returned", first, here, r)
		}
	}
	for at := all; len(at) > 0; at = at[numValues:] {
		newest, anyLoose = max(newest, at[holdsGranted]), anyLoose || at[isLoose] == 1
	}
	if err := j.mayGoOn(all, newest); err != nil {
		return p, err
	}
	// holds reports whether a rank can send the state to the others.
	holds := func(at []int64) bool {
		if anyLoose {
			return at[holdsGranted] > 0 || at[isLoose] == 1
		}
		return at[holdsGranted] == newest || at[holdsSaved] == newest
	}
	var have, lack []int
	for r := range len(all) / numValues {
		if holds(all[r*numValues:]) {
			have = append(have, r)
		} else {
			lack = append(lack, r)
		}
	}
	p.Root, p.Missing = have[0], len(lack) > 0
	j.sources = nil
	if newest > 0 && !anyLoose {
		j.sources = sources(have, lack)
	}
	isRoot := p.Root == c.Rank()
	p.Missing = len(all) > numValues && (p.Missing || anyLoose || newest == 0)
	switch {
	case newest == 0 && isRoot, anyLoose && isRoot && loose:
		p.Held = Present
	case newest == 0, anyLoose && !isRoot, !holds(mine):
	case j.saved == newest:
		p.Held, j.granted = Saved, newest
	default:
		p.Held = Granted
	}
	p.Restore = j.failed && (j.granted > 0 || loose)
	j.saved, j.next = 0, max(newest, 1)
	if p.Missing && newest > 0 {
		j.next++ // what the ranks have got may differ from what the root has saved
	}
	return p, nil
}

// mayGoOn returns an error at all ranks if the training has failed too often since the commit newest. all are
// the values of all ranks. Those of ranks that do not know of the commit are about the time before it, and
// new ranks have seen no failure.
func (j *Job) mayGoOn(all []int64, newest int64) error {
	j.vain, j.smallest = 0, 0
	for at := all; len(at) > 0; at = at[numValues:] {
		if at[holdsGranted] != newest {
			continue
		}
		j.vain = max(j.vain, int(at[failures]))
		if n := int(at[fewest]); j.smallest == 0 || n > 0 && n < j.smallest {
			j.smallest = n
		}
	}
	if j.smallest == 0 || j.size < j.smallest {
		j.smallest, j.vain = j.size, 0
	}
	if j.vain < maxVain {
		return nil
	}
	if j.failure == nil {
		j.failure = errors.New("at other ranks, before this one joined them")
	}
	j.over = fmt.Errorf("elastic: the training has failed %d times in a row without a commit, each time within %v s, "+
		"with %d ranks: %w", j.vain, vainTime.Seconds(), j.size, j.failure)
	return j.over
}

// sources returns from which rank each rank gets the state, for Sources.
func sources(have, lack []int) []int {
	if len(lack) == 0 || len(lack) > len(have) {
		return nil
	}
	from := make([]int, len(have)+len(lack))
	for _, r := range have {
		from[r] = -1
	}
	for i, r := range lack {
		from[r] = have[i*len(have)/len(lack)]
	}
	return from
}

// Sources returns from which rank each rank gets the state according to the last Plan, or -1 if it has the
// state. The sources are spread over the ranks that have it, and no rank sends it to two ranks. If Sources
// returns nil, no rank lacks the state, or the root must send it to all ranks, because fewer ranks have it
// than lack it, or because it is not that of a commit.
func (j *Job) Sources() []int { return j.sources }

// Synced tells that all ranks have done what the Plan of Join says. They have the same commit now.
func (j *Job) Synced(ctx context.Context, c Collectives) error {
	j.granted, j.failed, j.began = j.next, false, time.Now()
	e := joblink.MemberEvent{Kind: joblink.Synced}
	if !j.stopped.IsZero() {
		e.Stopped = time.Since(j.stopped)
	}
	j.stopped = time.Time{}
	if j.member == nil {
		return nil
	}
	j.member.Synced()
	if c.Rank() != 0 {
		return nil
	}
	e.Generation = j.member.Generation()
	return j.member.Tell(ctx, e)
}

// About is what a vote is about. All ranks must vote about the same.
type About int

const (
	// Changes is a vote only about the changes of the ranks.
	Changes About = iota
	// Commit says that this rank has saved its next commit.
	Commit
	// Step says that this rank makes its next step if the vote succeeds (Stepped).
	Step
)

// kinds has what a rank adds to the first two numbers of a vote. A rank that has joined adds nothing to both.
// These are the corners of a square, so ranks that vote about different things never have the sum of ranks
// that all vote about the same.
var kinds = [...]int64{Changes: 1, Commit: 1 | 1<<secondShift, Step: 1 << secondShift}

// Ballot returns the number of this rank in a vote, which is an operation that gives all ranks the sum of
// their numbers. All ranks must vote equally often. asked is what the program takes for changes in a job that
// is not elastic, or 0.
func (j *Job) Ballot(about About, asked elastic.Change) int64 {
	if j.member != nil {
		asked = j.Pending()
	}
	j.about = about
	number := kinds[about]
	if about == Commit {
		j.saved = j.granted + 1
	}
	if asked&elastic.Removed != 0 {
		number |= 1 << removedShift
	}
	if asked&elastic.Added != 0 {
		number |= 1 << addedShift
	}
	return number
}

// The sum of a vote has four numbers of ranks: two that tell what the ranks have voted about (kinds), and
// those that know of either change.
const (
	countMask    = 1<<16 - 1
	secondShift  = 16
	kindMask     = 1<<32 - 1
	removedShift = 32
	addedShift   = 48
)

// Count takes the result of a vote. If this rank had saved a commit, all ranks have saved it now. The result
// of Count is not 0 if the launcher has changed the ranks, and then the training must end at all ranks. It
// returns an error if not all ranks have done the same.
func (j *Job) Count(sum int64) (elastic.Change, error) {
	got, kind := sum&kindMask, kinds[j.about]
	voted := max(got&countMask, got>>secondShift)
	if got == voted*kind && voted < int64(j.size) {
		return 0, fmt.Errorf("elastic: %d of %d ranks have voted: a rank that has joined (hvd.Join) saves no "+
			"commit, so commit only after the join has returned", voted, j.size)
	}
	if got != voted*kind {
		return 0, errors.New("elastic: the ranks have voted about different things: all must commit, all must make a " +
			"step, or all must only check for changes")
	}
	if j.saved != 0 {
		j.granted, j.saved, j.vain, j.smallest = j.saved, 0, 0, j.size
	}
	var changes elastic.Change
	if sum>>removedShift&countMask != 0 {
		changes |= elastic.Removed
	}
	if sum>>addedShift&countMask != 0 {
		changes |= elastic.Added
	}
	return changes, nil
}

// Pending returns how the launcher has changed the ranks since this process joined, or 0.
func (j *Job) Pending() elastic.Change {
	if j.member == nil {
		return 0
	}
	if r := j.member.Pending(); r != nil {
		return r.Change
	}
	return 0
}

// CheckStep returns an error if this rank cannot vote for steps.
func (j *Job) CheckStep() error {
	if j.member != nil && j.member.CompletesAsync() {
		return &engine.UsageError{Op: "elastic step", Err: errors.New("a step needs the results of its operations: " +
			"unset HOROVOD_ENABLE_ASYNC_COMPLETION, or make commits in place of steps")}
	}
	return nil
}

// Stepped tells that all ranks have voted that they have what they need for the next step of the training,
// and that this rank makes the step. Its state after that is the next commit, so it needs no copy of it. If
// this rank fails before other ranks have learned of the vote, they are at the commit before, and make the
// step again. Otherwise they get the state from this rank.
func (j *Job) Stepped() {
	j.granted++
	j.vain, j.smallest = 0, j.size
}

// Changed tells that the training has ended because of the changes of a vote, and that this rank has saved
// its present state. This state is the next commit.
func (j *Job) Changed() {
	j.granted++
	j.vain, j.smallest = 0, 0
	j.stop()
}

// stop notes that the training goes on in the next generation.
func (j *Job) stop() {
	if j.stopped.IsZero() {
		j.stopped = time.Now()
	}
	if j.member != nil {
		j.member.GoOn()
	}
}

// Over returns the error of Join if the training has failed too often.
func (j *Job) Over() error { return j.over }

// Failed tells that the training, Join or Synced has failed. ofRanks says that the reason is that ranks have
// failed. It returns nil if the process should begin again, or the error with which it should end. If the
// training has failed too often, the next Join fails.
func (j *Job) Failed(err error, ofRanks bool) error {
	if j.over != nil {
		return j.over
	}
	if j.member == nil || !ofRanks {
		return err
	}
	j.vain++
	if !j.began.IsZero() && time.Since(j.began) >= vainTime {
		j.vain = 0
	}
	j.failed, j.failure, j.began = true, err, time.Time{}
	j.stop()
	return nil
}

// Done tells the launcher that the training has returned in this process.
func (j *Job) Done(ctx context.Context) error {
	if j.member == nil {
		return nil
	}
	return j.member.EndTraining(ctx)
}
