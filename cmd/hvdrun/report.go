package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/store"
)

const (
	// surveyTime is how long the ranks have to answer: with it a report is there within 2 s of the signal.
	surveyTime = 1500 * time.Millisecond
	// maxReportLines bounds what is printed of a report.
	maxReportLines = 120
	// maxFailureBytes bounds the dumps that are kept of ranks whose job has failed, packed. Those of later ranks are left out.
	maxFailureBytes = 256 << 20
	// maxTold bounds what is remembered of stalls.
	maxTold = 100_000
	// stallCause begins the cause of a report that a stall leads to.
	stallCause = "a stall: "
)

// reporter makes reports of what the ranks are at, for launch.Inquiry.
type reporter struct {
	ranks  *joblink.Launcher
	size   int
	dir    string        // for the dumps and the last report; empty for none
	period time.Duration // a stall leads to a report at most so often

	alarms chan string
	cancel context.CancelFunc

	mu        sync.Mutex
	failures  map[int][]byte           // the last dump of each rank whose job has failed
	kept      int                      // their length
	told      map[stalled]map[int]wait // by rank
	lastStall time.Time
}

// stalled is a tensor that a report of a stall has.
type stalled struct {
	set  uint32
	name string
}

// wait is one of a rank for a tensor. Names come again each step, so the name alone does not tell a stall from the next.
type wait struct {
	epoch     uint64
	submitted time.Duration // by the rank's clock
	seen      time.Time     // when a dump had it last
}

// is reports whether it is the wait of d, which is its rank's, for p.
func (w *wait) is(d *analysis.Snapshot, p *analysis.Record) bool {
	return w.epoch == d.Epoch && w.submitted == p.Submitted
}

// newReporter starts to listen to the ranks of a job, at its store, until close.
func newReporter(kv *store.HashStore, size int, dir string, period time.Duration) (*reporter, error) {
	r := &reporter{
		size: size, dir: dir, period: period,
		alarms: make(chan string, 1), failures: make(map[int][]byte), told: make(map[stalled]map[int]wait),
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	r.mu.Lock() // hear looks at ranks
	defer r.mu.Unlock()
	var err error
	r.ranks, err = joblink.Listen(kv, size, func(rank int, what string, body []byte) { r.hear(ctx, rank, what, body) })
	return r, err
}

// close returns when all that has come was heard.
func (r *reporter) close() {
	r.cancel()
	_ = r.ranks.Close() // text tells what went wrong
}

func (r *reporter) inquiry() *launch.Inquiry {
	return &launch.Inquiry{Survey: r.survey, Alarms: r.alarms, Epilogue: r.epilogue}
}

// hear takes what a rank volunteers. It may have to ask the ranks, as a survey does.
func (r *reporter) hear(ctx context.Context, rank int, what string, body []byte) {
	switch what {
	case joblink.Stall:
		s, err := recorder.DecodeStall(body)
		if err != nil || !r.isNews(ctx, stalled{s.Set, s.Name}) {
			return
		}
		r.mu.Lock()
		r.lastStall = time.Now()
		if key := (stalled{s.Set, s.Name}); r.told[key] == nil && len(r.told) < maxTold {
			r.told[key] = make(map[int]wait) // also if no rank that waits answers
		}
		r.mu.Unlock()
		select {
		case r.alarms <- stallCause + s.Text:
		default: // one is waiting to be asked about
		}
	case joblink.Failure:
		r.mu.Lock()
		defer r.mu.Unlock()
		if rank < r.size && r.kept-len(r.failures[rank])+len(body) <= maxFailureBytes {
			r.kept += len(body) - len(r.failures[rank])
			r.failures[rank] = body
		}
	}
}

// isNews reports whether a stall is to lead to a report: one that no report has, unless it comes too soon after another. Rank 0 tells of a
// stall again each period. Whether it is the one that was reported only the ranks know.
func (r *reporter) isNews(ctx context.Context, s stalled) bool {
	r.mu.Lock()
	soon := !r.lastStall.IsZero() && time.Since(r.lastStall) < r.period
	waits, told := r.told[s]
	var seen time.Time
	for _, w := range waits {
		if w.seen.After(seen) {
			seen = w.seen
		}
	}
	r.mu.Unlock()
	switch {
	case soon:
		return false
	case !told:
		return true
	case time.Since(seen) < r.period/2: // a stall has waited for a period, so this one was seen
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, surveyTime)
	defer cancel()
	answers, _, _ := r.ranks.Ask(ctx, joblink.Dump) // text tells what is wrong with the store
	dumps, _ := r.decode(answers, nil)
	return r.waitsAnew(s, dumps)
}

// waitsAnew reports whether ranks wait for s, but not since what was reported. It notes which waits that were reported go on.
func (r *reporter) waitsAnew(s stalled, dumps []*analysis.Snapshot) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, waits, goesOn := time.Now(), false, false
	for _, d := range dumps {
		for i := range d.Pending {
			p := &d.Pending[i]
			key := stalled{p.Set, p.Name}
			w, told := r.told[key][d.Rank]
			same := told && w.is(d, p)
			if same {
				w.seen = now
				r.told[key][d.Rank] = w
			}
			if key == s {
				// What stalls has waited for a period. What has not is of a later step: the stall is over meanwhile.
				waits, goesOn = waits || d.At-p.Submitted >= r.period/2, goesOn || same
			}
		}
	}
	return waits && !goesOn
}

// tell remembers what a report of a stall has. r is locked.
func (r *reporter) tell(dumps []*analysis.Snapshot) {
	now := time.Now()
	for _, d := range dumps {
		for i := range d.Pending {
			p := &d.Pending[i]
			key := stalled{p.Set, p.Name}
			if r.told[key] == nil {
				if len(r.told) >= maxTold {
					clear(r.told)
				}
				r.told[key] = make(map[int]wait)
			}
			r.told[key][d.Rank] = wait{d.Epoch, p.Submitted, now}
		}
	}
}

// survey asks all ranks, and makes a report of their answers.
func (r *reporter) survey(ctx context.Context, why string, known []string) string {
	ctx, cancel := context.WithTimeout(ctx, surveyTime)
	defer cancel()
	begun := time.Now()
	answers, _, err := r.ranks.Ask(ctx, joblink.Dump)
	dumps, absent := r.decode(answers, known)
	r.mu.Lock()
	if strings.HasPrefix(why, stallCause) { // another report is no reason to leave that of a stall out
		r.tell(dumps)
	}
	r.mu.Unlock()
	title := fmt.Sprintf("%s: %d of %d ranks answered, in %v", analysis.Plain(why), len(dumps), r.size, time.Since(begun).Round(time.Millisecond))
	return r.text(title, analysis.Analyse(dumps, r.size, absent), dumps, errors.Join(err, r.ranks.Err()))
}

// epilogue makes a report of what the ranks have left behind when their job failed; empty if it would say nothing. culprits are
// the ranks that are to blame, if that is known.
func (r *reporter) epilogue(known []string, culprits []int) string {
	r.close()
	r.mu.Lock()
	defer r.mu.Unlock()
	dumps, absent := r.decode(r.failures, known)
	f := analysis.Analyse(dumps, r.size, absent)
	f.Blame(culprits)
	if !f.Says() {
		return ""
	}
	return r.text(fmt.Sprintf("what the ranks were at when the job failed, as %d of %d tell", len(dumps), r.size), f, dumps, r.ranks.Err())
}

// decode unpacks dumps. absent is what is known of each rank.
func (r *reporter) decode(bodies map[int][]byte, known []string) (dumps []*analysis.Snapshot, absent map[int]string) {
	absent = make(map[int]string, len(known))
	for rank, what := range known {
		absent[rank] = what
	}
	for rank := range r.size {
		body, is := bodies[rank]
		if !is {
			continue
		}
		d, err := recorder.Decode(body)
		if err == nil && (d.Rank != rank || d.Size != r.size) {
			err = fmt.Errorf("it is of rank %d of %d", d.Rank, d.Size)
		}
		if err != nil {
			absent[rank] = "its dump cannot be read: " + err.Error()
			continue
		}
		dumps = append(dumps, d)
	}
	return dumps, absent
}

// text returns what is printed of a report, and leaves it in the folder for dumps.
func (r *reporter) text(title string, f *analysis.Findings, dumps []*analysis.Snapshot, err error) string {
	rule := strings.Repeat("-", 72) + "\n"
	full := "hvdrun: " + title + "\n" + f.Text()
	if r.dir != "" {
		err = errors.Join(err, r.write(full, f, dumps))
	}
	lines := strings.SplitAfter(full, "\n")
	if more := len(lines) - maxReportLines; more > 0 {
		full = strings.Join(lines[:maxReportLines], "") + fmt.Sprintf("... and %d more lines\n", more)
	}
	switch {
	case err != nil:
		full += "hvdrun: warning: the report: " + analysis.Plain(err.Error()) + "\n"
	case r.dir != "":
		full += "The report and the dumps of the ranks are in " + r.dir + "\n"
	}
	return rule + full + rule
}

// write leaves a report and what it was made of in the folder for dumps.
func (r *reporter) write(text string, f *analysis.Findings, dumps []*analysis.Snapshot) error {
	found, err := json.MarshalIndent(f, "", " ")
	if err != nil {
		return err
	}
	if _, err := recorder.WriteText(r.dir, "report.txt", []byte(text)); err != nil {
		return err
	}
	if _, err := recorder.WriteText(r.dir, "report.json", append(found, '\n')); err != nil {
		return err
	}
	for _, d := range dumps {
		if _, err := recorder.WriteFile(r.dir, d); err != nil {
			return err
		}
	}
	return nil
}
