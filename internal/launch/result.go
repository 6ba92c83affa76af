package launch

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/topo"
)

// result returns the Result of the job, but without the last lines on standard error, which conclude adds.
func (j *job) result() Result {
	res := Result{Restarts: j.restarts}
	for _, k := range j.ranks {
		e := k.outcome()
		e.Title = k.title
		res.Ranks = append(res.Ranks, e)
	}
	switch {
	case j.asked && !j.failed:
		res.Signal = j.signal
		if res.Signal == 0 { // ctx ended the job
			res.Signal = unix.SIGTERM
		}
		res.Status = statusSignal + int(res.Signal)
	case j.failed && j.o.Elastic != nil:
		res.Status = 1
		if j.first >= 0 {
			res.Roots = []int{j.first}
			if e := res.Ranks[j.first]; !e.Lost {
				res.Status = max(e.Status(), 1)
			}
		}
	case j.failed:
		j.settleVerdict(true)
		if !j.survived() {
			res.Verdict = j.verdict
		}
		first := -1
		if j.o.Nodes != nil && j.o.Nodes.Restarts > 0 { // earlier failures did not end the job
			first = j.first
		}
		if j.o.Starter != "" {
			res.Roots, res.Status = []int{0}, max(res.Ranks[0].Status(), 1)
		} else {
			res.Roots, res.Status = judge(res.Ranks, res.Verdict, first)
		}
	}
	return res
}

// settleVerdict reads the verdict. It is called before the launcher asks the processes to end, and at the
// latest when all have ended. A later verdict would name a process that has ended because it was asked to.
func (j *job) settleVerdict(ended bool) {
	if j.o.Verdict == nil || j.settled {
		return
	}
	j.settled = true
	// Only a job that has failed without a verdict waits for so long, if some ranks still run.
	ctx, cancel := context.WithTimeout(context.Background(), joblink.VerdictTimeout)
	defer cancel()
	v, err := j.o.Verdict(ctx, ended)
	if err != nil {
		j.console.verbosef("cannot read the verdict of the %s: %v", j.o.processes(), err)
		return
	}
	j.verdict = &v
}

// survived reports whether the nodes of a parameter server have survived the failure that the verdict names.
// Then the verdict does not explain why the job has failed: its nodes were to be started again, or they have
// ended with status 0, and the job went on for more than Options.Notice before a node failed. With restarts,
// a node that somebody has killed explains the end of the job itself. Ranks may need longer than
// Options.Notice to end after a failure. If all of them join the next epoch, there is no verdict any more
// (joblink.Begun).
func (j *job) survived() bool {
	if j.o.Nodes == nil || j.verdict == nil {
		return false
	}
	is := func(again bool) bool {
		return slices.ContainsFunc(j.ranks, func(k *rank) bool {
			return named(j.verdict, k.number) && k.exit.Restarting == again
		})
	}
	if is(true) && !is(false) {
		return true
	}
	if j.o.Nodes.Restarts > 0 && !named(j.verdict, j.first) {
		if e := j.ranks[j.first].exit; e.Signal == unix.SIGKILL && e.Sent == 0 && !e.Lost {
			return true
		}
	}
	return j.failedAt.Sub(j.verdict.At) > j.o.Notice &&
		!slices.ContainsFunc(j.ranks, func(k *rank) bool {
			return named(j.verdict, k.number) && k.exit.Status() != 0
		})
}

// judge returns the ranks that caused the failure, and the exit status of the job. At least one rank in exits
// must have failed. v may be nil. first is the rank whose failure has ended the job, or -1 if the earliest
// failure has.
func judge(exits []Exit, v *joblink.Verdict, first int) (roots []int, status int) {
	var failures []int
	for r, e := range exits {
		if named(v, r) {
			roots = append(roots, r)
		}
		if e.Status() != 0 {
			failures = append(failures, r)
		}
	}
	// A rank that the launcher asked to end did not fail first, even if it ended before all other failed
	// ranks.
	order := func(r int) int {
		switch {
		case r == first:
			return 0
		case exits[r].Sent == 0:
			return 1
		}
		return 2
	}
	slices.SortStableFunc(failures, func(a, b int) int {
		return cmp.Or(cmp.Compare(order(a), order(b)), exits[a].At.Compare(exits[b].At))
	})
	if roots == nil {
		return failures[:1], exits[failures[0]].Status()
	}
	if i := slices.IndexFunc(failures, func(r int) bool { return slices.Contains(roots, r) }); i >= 0 {
		return roots, exits[failures[i]].Status()
	}
	return roots, 1 // the roots ended with status 0, although other ranks still waited for them
}

// named reports whether v names rank r. v may be nil.
func named(v *joblink.Verdict, r int) bool {
	return v != nil && slices.Contains(v.Ranks, topo.Rank(r))
}

// culprits returns the ranks in r.Roots if the verdict of the survivors names them. Otherwise it returns nil.
func (r Result) culprits() []int {
	if len(r.Roots) == 0 || !named(r.Verdict, r.Roots[0]) {
		return nil
	}
	return r.Roots
}

// Describe returns a clause that says how the rank ended, such as "exit status 3".
func (e Exit) Describe() string {
	switch {
	case e.Why != "":
		return e.Why
	case e.Lost:
		return "its helper process was killed, and the command with it"
	case e.Signal == 0 && e.Sent == 0:
		return fmt.Sprintf("exit status %d", e.Code)
	case e.Signal == 0:
		return fmt.Sprintf("exit status %d after %s from hvdrun", e.Code, unix.SignalName(e.Sent))
	case e.Signal == e.Sent:
		return fmt.Sprintf("killed by %s from hvdrun", unix.SignalName(e.Signal))
	case e.Signal == unix.SIGKILL:
		return "killed by SIGKILL, which hvdrun did not send (perhaps the kernel's out-of-memory killer did)"
	}
	return "killed by " + unix.SignalName(e.Signal)
}
