package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// About describes the job, as the file of the lowest rank does.
type About struct {
	// Version is the version of gohvd, and Command the command line of the program. Settings has the settings
	// that were given a value, without secrets. They are empty for files of older versions.
	Version  string            `json:"version"`
	Command  []string          `json:"command"`
	Settings map[string]string `json:"settings"`
	// Hosts has the hosts of the ranks with files, in the order of these ranks.
	Hosts []string `json:"hosts"`
	// Sets has the process sets other than 0 that are in a file, in ascending order. It has at most maxSets.
	Sets []ProcessSet `json:"process_sets"`
}

// ProcessSet is a process set with its members.
type ProcessSet struct {
	ID    topo.ProcessSetID `json:"id"`
	Ranks []topo.Rank       `json:"ranks"`
}

// Pending is an operation that was pending when timelines ended, because the job had failed or because the
// timelines were stopped.
type Pending struct {
	Tensor string            `json:"tensor"`
	Kind   string            `json:"kind"`
	Set    topo.ProcessSetID `json:"set"`
	// Waiting has the ranks at which it was pending. Missing has the members of its set that had not
	// submitted it, as far as the members are known and have files. Unknown has those of them whose files do
	// not say, for example because the process was killed.
	Waiting []int `json:"ranks_waiting"`
	Missing []int `json:"ranks_missing"`
	Unknown []int `json:"ranks_unknown"`
	// Granted says that all ranks had submitted it. Then Missing is empty.
	Granted bool `json:"granted"`
	// WaitedUS is how long it had been pending at the rank where it was longest.
	WaitedUS float64 `json:"waited_us"`
}

// pendingOp is an operation that was pending at a rank when its file ended. Times are in ns.
type pendingOp struct {
	tensor, kind  string
	set           topo.ProcessSetID
	submitted, at stamp
	granted       bool
}

// last returns the last segment of a rank.
func (r *rankFiles) last() *source { return r.segments[len(r.segments)-1] }

// Setting returns the value that the job had for a setting, or "" if it had the default or its files do not
// say.
func (j *Job) Setting(name string) string { return j.ranks[0].last().about.Settings[name] }

// about describes the job.
func (j *Job) about() About {
	first := j.ranks[0].last().about
	a := About{Version: first.Version, Command: append([]string{}, first.Command...),
		Settings: make(map[string]string), Hosts: []string{}, Sets: []ProcessSet{}}
	maps.Copy(a.Settings, first.Settings)
	known := make(map[topo.ProcessSetID]bool)
	for _, r := range j.ranks {
		a.Hosts = append(a.Hosts, r.host())
		for i := range r.segments { // from the last one, because earlier ones may have removed sets
			for _, s := range r.segments[len(r.segments)-1-i].about.Sets {
				if !known[s.ID] && len(a.Sets) < maxSets {
					known[s.ID] = true
					a.Sets = append(a.Sets, s)
				}
			}
		}
	}
	slices.SortFunc(a.Sets, func(a, b ProcessSet) int { return cmp.Compare(a.ID, b.ID) })
	return a
}

// pending returns the operations that were pending when the timelines ended. The one that had been pending
// for longest is the first.
func (r *Report) pending(c *collection) []Pending {
	all, ranks := []Pending{}, c.job.ranks
	var submissions []time.Duration // the last submission of each of them
	for _, s := range c.streams {
		f := s.files
		for _, op := range f.last().pending {
			submitted := s.reference(op.submitted)
			if c.pending[pendingKey{op.tensor, op.set}].succeeded[f.rank] > submitted {
				continue // it ended while the timeline was stopped
			}
			i := slices.IndexFunc(all, func(p Pending) bool {
				return p.Tensor == op.tensor && p.Set == op.set
			})
			if i < 0 {
				i = len(all)
				submissions = append(submissions, submitted)
				all = append(all, Pending{Tensor: op.tensor, Kind: op.kind, Set: op.set, Missing: []int{},
					Unknown: []int{}})
			}
			p := &all[i]
			p.Waiting, p.Granted = append(p.Waiting, f.rank), p.Granted || op.granted
			submissions[i] = max(submissions[i], submitted)
			p.WaitedUS = max(p.WaitedUS, micros(op.at-op.submitted))
		}
	}
	for i := range all {
		p := &all[i]
		// The ranks stop their timelines at different moments, so another rank's file may have the grant.
		times := c.pending[pendingKey{p.Tensor, p.Set}].granted
		p.Granted = p.Granted || slices.ContainsFunc(ranks, func(f *rankFiles) bool {
			return f.clock.known && times[f.rank] > submissions[i]+c.clockErr
		})
		if !p.Granted {
			for _, f := range ranks {
				switch {
				case slices.Contains(p.Waiting, f.rank) || !r.member(p.Set, f.rank):
				case f.last().ended:
					p.Missing = append(p.Missing, f.rank)
				default:
					p.Unknown = append(p.Unknown, f.rank)
				}
			}
		}
	}
	slices.SortStableFunc(all, func(a, b Pending) int { return cmp.Compare(b.WaitedUS, a.WaitedUS) })
	return all
}

// member reports whether a rank is known to be a member of a process set.
func (r *Report) member(id topo.ProcessSetID, rank int) bool {
	return id == topo.Global || slices.ContainsFunc(r.Job.Sets, func(s ProcessSet) bool {
		return s.ID == id && slices.Contains(s.Ranks, topo.Rank(rank))
	})
}

// describe returns a sentence about a pending operation.
func (p *Pending) describe() string {
	text := fmt.Sprintf("%s %q", p.Kind, p.Tensor)
	if p.Set != topo.Global {
		text += fmt.Sprintf(" of set %d", p.Set)
	}
	text += fmt.Sprintf(": %s had waited for %s", topo.FormatRanks(p.Waiting), duration(p.WaitedUS))
	switch {
	case p.Granted:
		return text + "; all ranks had submitted it"
	case len(p.Missing) > 0:
		text += fmt.Sprintf("; %s had not submitted it", topo.FormatRanks(p.Missing))
	}
	if len(p.Unknown) > 0 {
		text += fmt.Sprintf("; it is not known whether %s had", topo.FormatRanks(p.Unknown))
	}
	return text
}
