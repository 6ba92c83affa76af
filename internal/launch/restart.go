package launch

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/outfile"
)

const (
	// minRestartDelay is the time between the end of a rank's command and its restart. A rank that fails only
	// because another one has failed may end first, and in this time the launcher may hear of the cause. If
	// the command ends within steadyTime, again and again, the time doubles with each end, up to
	// maxRestartDelay.
	minRestartDelay = 100 * time.Millisecond
	maxRestartDelay = 10 * time.Second
	steadyTime      = 10 * time.Second
	// maxRestartLines caps how many restarts are printed at the end of the job.
	maxRestartLines = 50
)

// Restart describes that a rank was started again.
type Restart struct {
	Rank int
	// Exit describes how the rank had ended, and At is the time of the restart, by the clock of this host.
	Exit Exit
	At   time.Time
}

// pending reports whether the rank's command has ended and is to be started again.
func (k *rank) pending() bool { return !k.again.IsZero() }

// mayRestart reports whether rank k, whose command has failed, is to be started again. The scheduler is never
// started again, and without it, no other node can return.
func (j *job) mayRestart(k *rank) bool {
	return j.o.Nodes != nil && k.number != 0 && k.restarts < j.o.Nodes.Restarts && j.phase == running &&
		!j.ranks[0].ended && !k.conn.over
}

// watchHung starts a goroutine that waits for ranks that have failed without ending.
func (j *job) watchHung() {
	if j.o.Hung == nil || j.o.Nodes == nil || j.o.Nodes.Restarts == 0 {
		return
	}
	ctx := j.supervision
	j.watchers.Go(func() {
		for {
			ranks, v := j.o.Hung(ctx)
			if ranks == nil || !j.inbox.post(func() { j.handleHung(ranks, v) }) {
				return
			}
		}
	})
}

// handleHung handles ranks that, according to the verdict v, have failed without ending. It kills those that
// are to be started again. Otherwise the job has failed, also if a process has ended with status 0, because
// it has not left the job before. A process that was started after v is not meant.
func (j *job) handleHung(ranks []int, v joblink.Verdict) {
	why := logs.Escape(v.Reason)
	for _, r := range ranks {
		k := j.ranks[r]
		switch {
		case k.hung != "" || k.started.After(v.At) || j.failed || j.phase != running:
		case k.ended && (k.pending() || k.exit.Status() != 0): // it is handled already
		case !k.ended && j.mayRestart(k):
			k.hung, k.killed = why, time.Now()
			j.console.note("%s: %s; killing it", k.title, k.hung)
			index := slices.Index(k.conn.ranks, k)
			j.agents.send(k.conn, order{Kill: &index})
		default:
			if !k.ended {
				k.hung = why
			}
			j.fail(k)
		}
	}
}

// awaitsHung reports whether rank k, whose command has ended, may have failed because of a rank that hangs.
// The launcher does not start k again before Hung has decided about that rank.
func (j *job) awaitsHung(k *rank) bool {
	return j.o.Accused != nil && slices.ContainsFunc(j.o.Accused(), func(r int) bool {
		return r != k.number && r < len(j.ranks) && !j.ranks[r].ended
	})
}

// planRestart decides when rank k is started again.
func (j *job) planRestart(k *rank) {
	k.killed = time.Time{}
	if k.exit.At.Sub(k.started) >= steadyTime {
		k.delay = 0
	}
	k.delay = min(max(minRestartDelay, 2*k.delay), maxRestartDelay)
	k.again = time.Now().Add(k.delay)
	j.console.note("%s: %s; starting it again in %v (restart %d of %d)", k.title, k.exit.Describe(), k.delay,
		k.restarts+1, j.o.Nodes.Restarts)
}

// cancelRestarts makes the launcher start no rank again that has ended before. It returns the first of these
// ranks, or nil if there is none.
func (j *job) cancelRestarts() (first *rank) {
	for _, k := range j.ranks {
		if !k.pending() {
			continue
		}
		k.again = time.Time{}
		k.exit.Restarting = true
		if first == nil || k.exit.At.Before(first.exit.At) {
			first = k
		}
	}
	return first
}

// nextRestart returns when restartDue is to be called, or the zero time if no rank is to be started again.
func (j *job) nextRestart() (next time.Time) {
	for _, k := range j.ranks {
		var at time.Time
		switch {
		case k.pending() && (k.gone || time.Since(k.again) < 0):
			at = k.again
		case k.pending():
			at = k.again.Add(j.vanishTime())
		case !k.killed.IsZero():
			at = k.killed.Add(j.vanishTime())
		default:
			continue
		}
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	return next
}

// restartDue starts the ranks again whose time has come. A rank whose processes do not disappear has failed.
// nextRestart returns when it is to be called.
func (j *job) restartDue() {
	for _, k := range j.ranks {
		switch late := time.Since(k.again); {
		case !k.killed.IsZero() && time.Since(k.killed) >= j.vanishTime():
			k.killed = time.Time{}
			j.fail(k)
			j.endIfOver()
		case !k.pending() || late < 0:
		case k.gone && j.awaitsHung(k):
			k.again = time.Now().Add(minRestartDelay)
		case k.gone:
			j.restart(k)
		case late >= j.vanishTime():
			j.fail(k)
			j.endIfOver()
		}
	}
}

// vanishTime returns how long the processes of a rank that is to be started again may take to disappear. On a
// busy machine that takes longer, and a job that goes on is better than one that has failed.
func (j *job) vanishTime() time.Duration { return 6 * j.o.Kill }

// restart orders the agent to start rank k again.
func (j *job) restart(k *rank) {
	if j.o.Restarted != nil {
		j.o.Restarted(k.number)
	}
	exit := k.exit
	exit.Title = k.title
	j.restarts = append(j.restarts, Restart{k.number, exit, time.Now()})
	k.restarts++
	k.again, k.started, k.ended, k.gone = time.Time{}, time.Now(), false, false
	k.hung = ""
	k.exit = Exit{Host: k.exit.Host}
	var streams [2]*stream
	for i, old := range k.streams {
		streams[i] = old.next()
	}
	k.streams = streams
	index := slices.Index(k.conn.ranks, k)
	j.agents.send(k.conn, order{Start: &index, streams: streams[:]})
}

// next returns the stream of the process that follows the one of s. It waits until s has ended, and continues
// the file.
func (s *stream) next() *stream {
	n := &stream{console: s.console, err: s.err, prefix: s.prefix, timestamp: s.timestamp, path: s.path,
		before: s, done: make(chan struct{})}
	if s.tail != nil {
		n.tail = new(tail)
	}
	return n
}

// awaitEnd waits until the stream has ended. It returns false if the stream was not opened, because the
// connection to the agent has ended.
func (s *stream) awaitEnd() bool {
	if s.unused != nil {
		select {
		case <-s.done:
			return true
		case <-s.unused:
			if !s.opened.Load() {
				return false
			}
		}
	}
	<-s.done
	return true
}

// follow waits until the stream before s has ended, and then opens the file of s again to append to it.
func (s *stream) follow() {
	if s.before == nil {
		return
	}
	if s.before.awaitEnd() {
		s.fileErr = s.before.fileErr
	}
	s.before = nil
	if s.path == "" {
		return
	}
	file, err := outfile.Append(s.path)
	if err == nil {
		s.file = file
	}
	s.fileErr = cmp.Or(s.fileErr, err)
}

// restarted returns the part of a sentence that says how often rank k was restarted, or "" if it was not.
func (k *rank) restarted() string {
	switch k.restarts {
	case 0:
		return ""
	case 1:
		return ", after a restart"
	}
	return fmt.Sprintf(", after %d restarts", k.restarts)
}
