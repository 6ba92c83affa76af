package commits

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/rank"
)

// ranks are the numbers that all ranks pass, of which one is rank me.
type ranks struct {
	me  int
	all []int64
}

func (r ranks) Rank() int { return r.me }

func (r ranks) Allgather(context.Context, []int64) ([]int64, error) { return r.all, nil }

// holder is a rank with its numbers before a Join.
type holder struct {
	granted, saved int64
	loose          bool
}

// plans returns the plan and the state of each rank after a Join.
func plans(t *testing.T, all []holder) (plans []Plan, jobs []*Job) {
	var numbers []int64
	for _, h := range all {
		loose := int64(0)
		if h.loose {
			loose = 1
		}
		numbers = append(numbers, h.granted, h.saved, loose, 0, 0, 0)
	}
	for r, h := range all {
		j := &Job{granted: h.granted, saved: h.saved, failed: true}
		p, err := j.Join(t.Context(), ranks{me: r, all: numbers}, h.loose)
		if err != nil {
			t.Fatal(err)
		}
		plans, jobs = append(plans, p), append(jobs, j)
	}
	return plans, jobs
}

// TestJoin checks what the ranks do at the start of a generation, and the number of the commit that they have
// then.
func TestJoin(t *testing.T) {
	const restore = true
	for name, c := range map[string]struct {
		ranks  []holder
		want   []Plan
		number int64
	}{
		"alone at first": {[]holder{{}}, []Plan{{Held: Present}}, 1},
		"at first":       {[]holder{{}, {}}, []Plan{{Held: Present, Missing: true}, {Missing: true}}, 1},
		"all have it": {[]holder{{3, 0, false}, {3, 0, false}},
			[]Plan{{Held: Granted, Restore: restore}, {Held: Granted, Restore: restore}}, 3},
		"one saw the grant": {[]holder{{3, 4, false}, {4, 0, false}},
			[]Plan{{Held: Saved, Restore: restore}, {Held: Granted, Restore: restore}}, 4},
		"nobody saw the grant": {[]holder{{3, 4, false}, {3, 0, false}},
			[]Plan{{Held: Granted, Restore: restore}, {Held: Granted, Restore: restore}}, 3},
		"a new rank": {[]holder{{3, 0, false}, {}},
			[]Plan{{Held: Granted, Restore: restore, Missing: true}, {Missing: true}}, 4},
		"a new rank after the first commit": {[]holder{{1, 0, false}, {}},
			[]Plan{{Held: Granted, Restore: restore, Missing: true}, {Missing: true}}, 2},
		"a new rank is first": {[]holder{{}, {3, 0, false}},
			[]Plan{{Missing: true, Root: 1}, {Held: Granted, Restore: restore, Missing: true, Root: 1}}, 4},
		"one has kept a later state": {[]holder{{3, 0, false}, {4, 0, false}},
			[]Plan{{Restore: restore, Missing: true, Root: 1},
				{Held: Granted, Restore: restore, Missing: true, Root: 1}}, 5},
		"loose": {[]holder{{3, 0, true}, {3, 0, true}},
			[]Plan{{Held: Present, Restore: restore, Missing: true}, {Restore: restore, Missing: true}}, 4},
		"the second is loose": {[]holder{{2, 3, false}, {3, 0, true}},
			[]Plan{{Held: Saved, Restore: restore, Missing: true}, {Restore: restore, Missing: true}}, 4},
		"a new rank is before a loose one": {[]holder{{}, {3, 0, true}},
			[]Plan{{Missing: true, Root: 1}, {Held: Present, Restore: restore, Missing: true, Root: 1}}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			got, jobs := plans(t, c.ranks)
			for r, p := range got {
				if p != c.want[r] {
					t.Errorf("rank %d: got %+v, want %+v", r, p, c.want[r])
				}
				if err := jobs[r].Synced(t.Context(), ranks{me: r}); err != nil {
					t.Fatal(err)
				}
				if j := jobs[r]; j.granted != c.number || j.saved != 0 || j.failed {
					t.Errorf("rank %d: got %+v, want commit %d", r, j, c.number)
				}
			}
		})
	}
}

// Ranks that are in different trainings all learn it.
func TestJoinOfDifferentTrainings(t *testing.T) {
	for me := range 2 {
		c := ranks{me: me, all: []int64{0, 0, 0, 1, 0, 0, 7, 0, 0, 0, 0, 0}}
		_, err := new(Job).Join(t.Context(), c, false)
		if err == nil || !strings.Contains(err.Error(), "1 trainings have returned at rank 0, and 0 at rank 1") {
			t.Errorf("rank %d: got error %v, want one that names the numbers of trainings", me, err)
		}
	}
}

// A step of which only one rank has learned is not lost: the others get the state from that rank. One of
// which no rank has learned is made again.
func TestSteps(t *testing.T) {
	for seen, want := range map[bool][]Plan{
		true: {{Held: Nothing, Restore: true, Missing: true, Root: 1},
			{Held: Granted, Restore: true, Missing: true, Root: 1}},
		false: {{Held: Granted, Restore: true}, {Held: Granted, Restore: true}},
	} {
		jobs := [2]Job{{granted: 6, size: 2}, {granted: 6, size: 2}}
		sum := jobs[0].Ballot(Step, 0) + jobs[1].Ballot(Step, 0)
		if seen {
			if _, err := jobs[1].Count(sum); err != nil {
				t.Fatal(err)
			}
			jobs[1].Stepped()
		}
		got, _ := plans(t, []holder{{granted: jobs[0].granted}, {granted: jobs[1].granted}})
		if !slices.Equal(got, want) {
			t.Errorf("a rank has learned of the step: %t: got %+v, want %+v", seen, got, want)
		}
	}
}

// Ranks that lack the state get it from different ones. If most lack it, all get it from the first.
func TestSources(t *testing.T) {
	has, lacks := holder{granted: 3}, holder{}
	for name, c := range map[string]struct {
		ranks []holder
		want  []int
	}{
		"one lacks it":  {[]holder{has, has, has, lacks}, []int{-1, -1, -1, 0}},
		"half lack it":  {[]holder{lacks, has, lacks, has}, []int{1, -1, 3, -1}},
		"spread":        {[]holder{has, has, has, has, lacks, lacks}, []int{-1, -1, -1, -1, 0, 2}},
		"all have it":   {[]holder{has, has}, nil},
		"most lack it":  {[]holder{has, lacks, lacks}, nil},
		"no commit":     {[]holder{lacks, lacks}, nil},
		"another state": {[]holder{{granted: 3, loose: true}, has}, nil},
	} {
		_, jobs := plans(t, c.ranks)
		for r, j := range jobs {
			if got := j.Sources(); !slices.Equal(got, c.want) {
				t.Errorf("%s: rank %d: got %v, want %v", name, r, got, c.want)
			}
		}
	}
}

// A commit that was saved and not granted does not take the place of a later one with the same number.
func TestCommitThatWasNotGranted(t *testing.T) {
	j := &Job{granted: 1}
	if j.Ballot(Commit, 0); j.saved != 2 {
		t.Fatalf("got %+v, want commit 2 saved", j)
	}
	alone := ranks{all: []int64{1, 2, 0, 0, 0, 0}}
	for range 2 { // the second time, the next generation has also failed
		if p, err := j.Join(t.Context(), alone, false); err != nil || p.Held != Granted || j.saved != 0 {
			t.Fatalf("got %+v, %v and %+v, want the first commit", p, err, j)
		}
	}
	if err := j.Synced(t.Context(), alone); err != nil {
		t.Fatal(err)
	}
	if changes, err := j.Count(j.Ballot(Commit, elastic.Added)); err != nil || changes != elastic.Added {
		t.Fatalf("got %v, want the change that the program has asked for", changes)
	}
	if j.Changed(); j.granted != 3 || j.saved != 0 {
		t.Errorf("got %+v, want commit 3", j)
	}
}

// The training may fail for no other reason than the failure of ranks.
func TestFailed(t *testing.T) {
	died := errors.New("rank 1 has failed")
	if err := new(Job).Failed(died, true); !errors.Is(err, died) {
		t.Errorf("got %v in a job that is not elastic, want the error", err)
	}
	j := &Job{member: new(rank.Membership)}
	if err := j.Failed(died, false); !errors.Is(err, died) {
		t.Errorf("got %v for an error of the program, want it", err)
	}
}

// The training may fail three times in a row, and more often if the ranks become fewer each time, or if it
// has gone on for a minute before.
func TestFailedTooOften(t *testing.T) {
	died := errors.New("rank 1 has failed")
	for name, c := range map[string]struct {
		// commit or another event, or the number of ranks that join, first and after each failure
		events []int
		want   bool
	}{
		"as many ranks":       {[]int{4, 4, 4, 4}, false},
		"twice":               {[]int{4, 4, 4}, true},
		"fewer each time":     {[]int{8, 7, 6, 5, 4}, true},
		"fewer, then as many": {[]int{4, 3, 2, 2, 2, 2}, false},
		"more in between":     {[]int{4, 3, 2, 3, 2, 3}, false},
		"a commit":            {[]int{4, 4, 4, commit, 4, 4}, true},
		"a check":             {[]int{4, 4, 4, check, 4}, false},
		"a change":            {[]int{4, 4, 4, change, 4, 4}, true},
		"a minute each time":  {[]int{4, minute, 4, minute, 4, minute, 4, minute, 4}, true},
		"a minute once":       {[]int{4, 4, 4, minute, 4, 4, 4, 4}, false},
		"only Init fails":     {[]int{4, minute, initFails, initFails, initFails, initFails, 4}, false},
	} {
		t.Run(name, func(t *testing.T) {
			j := &Job{}
			join := func(size int) error {
				c := alike{size: size}
				_, err := j.Join(t.Context(), c, false)
				if err == nil {
					err = j.Synced(t.Context(), c)
				}
				j.member = new(rank.Membership)
				return err
			}
			err := join(c.events[0])
			for _, e := range c.events[1:] {
				if err != nil {
					t.Fatal(err)
				}
				switch e {
				case commit:
					_, err = j.Count(j.Ballot(Commit, 0) * int64(j.size))
				case check:
					_, err = j.Count(j.Ballot(Changes, 0) * int64(j.size))
				case minute:
					j.began = j.began.Add(-time.Minute)
				case initFails:
					err = j.Failed(died, true)
				case change:
					j.Changed()
					err = join(5)
				default:
					if err = j.Failed(died, true); err == nil {
						err = join(e)
					}
				}
			}
			if (err == nil) != c.want ||
				err != nil && (!errors.Is(err, died) || j.Failed(died, true) != err) {
				t.Errorf("got %v, want success: %t", err, c.want)
			}
		})
	}
}

const (
	commit = -1 - iota
	check
	change
	minute // passes
	initFails
)

// alike are ranks that all pass the same numbers.
type alike struct {
	ranks
	size int
}

func (a alike) Allgather(_ context.Context, numbers []int64) ([]int64, error) {
	return slices.Repeat(numbers, a.size), nil
}

// All ranks give up at the same time, also those that have counted fewer failures by their clocks or were
// added. The count of a rank that does not know of the newest commit has no effect.
func TestFailedTooOftenAtSomeRank(t *testing.T) {
	for name, c := range map[string]struct {
		all  []int64
		want bool
	}{
		"a slower clock":     {[]int64{4, 0, 0, 0, 2, 3, 4, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0}, false},
		"more ranks before":  {[]int64{4, 0, 0, 0, 0, 4, 4, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0}, false},
		"fewer ranks":        {[]int64{4, 0, 0, 0, 2, 4, 4, 0, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0}, true},
		"before a commit":    {[]int64{4, 0, 0, 0, 1, 3, 3, 4, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0}, true},
		"before all commits": {[]int64{0, 0, 0, 0, 2, 3, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0}, false},
	} {
		for me := range 3 {
			at := c.all[me*numValues:]
			j := &Job{granted: at[holdsGranted], saved: at[holdsSaved], vain: int(at[failures]),
				smallest: int(at[fewest])}
			_, err := j.Join(t.Context(), ranks{me: me, all: c.all}, false)
			if (err == nil) != c.want || j.Over() != err {
				t.Errorf("%s: rank %d: got error %v, want success: %t", name, me, err, c.want)
			}
		}
	}
}

// A vote counts only if all ranks have voted and have done the same. It has the changes of all ranks.
func TestVotes(t *testing.T) {
	type ballot struct {
		about About
		asked elastic.Change
	}
	for name, c := range map[string]struct {
		ballots []ballot
		want    elastic.Change
		failure string
	}{
		"all save":       {[]ballot{{Commit, 0}, {Commit, 0}, {Commit, 0}}, 0, ""},
		"none saves":     {[]ballot{{Changes, elastic.Removed}, {}, {}}, elastic.Removed, ""},
		"steps":          {[]ballot{{Step, 0}, {Step, elastic.Added}, {Step, 0}}, elastic.Added, ""},
		"both changes":   {[]ballot{{Commit, elastic.Removed}, {Commit, elastic.Added}, {Commit, elastic.Added}}, 3, ""},
		"one has joined": {[]ballot{{Commit, 0}, {Commit, 0}}, 0, "2 of 3 ranks have voted"},
		"joined, steps":  {[]ballot{{Step, 0}, {Step, 0}}, 0, "2 of 3 ranks have voted"},
		"joined, checks": {[]ballot{{Changes, 0}}, 0, "1 of 3 ranks have voted"},
		"one does not":   {[]ballot{{Commit, 0}, {Commit, 0}, {}}, 0, "different things"},
		"one steps":      {[]ballot{{Changes, 0}, {Step, 0}, {Changes, 0}}, 0, "different things"},
		"one checks":     {[]ballot{{Step, 0}, {Changes, 0}, {Step, 0}}, 0, "different things"},
		"check, step":    {[]ballot{{Step, 0}, {Changes, 0}}, 0, "different things"},
	} {
		t.Run(name, func(t *testing.T) {
			j, sum := Job{size: 3, granted: 5}, int64(0)
			for i, b := range c.ballots {
				other := Job{granted: 5}
				if i == 0 {
					sum += j.Ballot(b.about, b.asked)
				} else {
					sum += other.Ballot(b.about, b.asked)
				}
			}
			changes, err := j.Count(sum)
			if c.failure != "" {
				if err == nil || !strings.Contains(err.Error(), c.failure) || j.granted != 5 {
					t.Errorf("got %v and commit %d, want %q", err, j.granted, c.failure)
				}
				return
			}
			if err != nil || changes != c.want {
				t.Errorf("got %v, %v, want %v", changes, err, c.want)
			}
		})
	}
}

// Ranks that have joined no generation, as in a job that is not elastic, may vote too.
func TestVotesBeforeTheJoin(t *testing.T) {
	for _, about := range []About{Changes, Commit, Step} {
		var j, other Job
		sum := j.Ballot(about, elastic.Added) + other.Ballot(about, 0)
		if changes, err := j.Count(sum); err != nil || changes != elastic.Added {
			t.Errorf("about %d: got %v, %v, want %v", about, changes, err, elastic.Added)
		}
	}
}

// Ranks that vote about different things all learn it, whatever the number of ranks.
func TestMixedVotes(t *testing.T) {
	for n := 1; n <= 6; n++ {
		for mix := range 1 << (2 * n) { // two bits for each rank: what it votes about, or 3 if it has joined
			jobs, sum, same := make([]Job, n), int64(0), true
			for r := range jobs {
				jobs[r].size = n
				about := About(mix >> (2 * r) & 3)
				same = same && about == About(mix&3)
				if about <= Step {
					sum += jobs[r].Ballot(about, 0)
				}
			}
			for r := range jobs {
				if mix>>(2*r)&3 == 3 {
					continue
				}
				if _, err := jobs[r].Count(sum); (err == nil) != same {
					t.Fatalf("%d ranks vote %b: got error %v at rank %d", n, mix, err, r)
				}
			}
		}
	}
}
