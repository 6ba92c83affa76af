package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/store"
)

const (
	// surveyTime is how long ranks may take to answer. It is short, so that a report is printed within 2 s
	// after the signal.
	surveyTime = 1500 * time.Millisecond
	// maxReportLines caps how many lines of a report are printed.
	maxReportLines = 120
	// maxFailureBytes caps the total packed size of the dumps that ranks send when their job has failed. A
	// dump that would exceed this limit is dropped.
	maxFailureBytes = 256 << 20
	// maxReported caps how many reported stalls are remembered.
	maxReported = 100_000
	// stallCause begins the reason of each report that a stall has triggered.
	stallCause = "a stall: "
)

// reporter makes reports about what the ranks are doing, for launch.Inquiry.
type reporter struct {
	ranks  *joblink.Launcher
	server *store.Server // serves the store to the ranks
	size   int
	dir    string        // folder for the dumps and the last report; empty if there is none
	period time.Duration // minimum time between two reports that stalls trigger

	alarms chan string
	cancel context.CancelFunc

	mu    sync.Mutex
	exits []exit // of the ranks that mpirun has started, in the order of their ends
	// failed gets an element when exits gets one that has failed.
	failed chan struct{}
	// failures has the last dump that each rank sent because its job had failed. With a parameter server, it
	// has the last state that each node sent.
	failures  map[int][]byte
	kept      int                      // total number of bytes in failures
	reported  map[stalled]map[int]wait // for each reported stall, the wait of each rank
	lastStall time.Time
}

// exit says how the command of a rank has failed. The text is empty if the command has succeeded.
type exit struct {
	rank topo.Rank
	text string
}

// stalled identifies a tensor in a report of a stall.
type stalled struct {
	set  topo.ProcessSetID
	name string
}

// wait identifies one wait of one rank for a tensor. The name of the tensor does not suffice, because the
// same name recurs in every step.
type wait struct {
	epoch     uint64
	submitted time.Duration // on the rank's clock
	seen      time.Time     // when a dump last contained the wait
}

// is reports whether w is the wait for the pending operation p in the snapshot d. d must be a snapshot of the
// rank that w belongs to.
func (w *wait) is(d *analysis.Snapshot, p *trace.Record) bool {
	return w.epoch == d.Epoch && w.submitted == p.Submitted
}

// newReporter starts a reporter. Until close is called, the reporter receives messages from the ranks through
// the store of the job.
func newReporter(kv *store.HashStore, server *store.Server, size int, dir string,
	period time.Duration) (*reporter, error) {
	r := &reporter{
		server: server, size: size, dir: dir, period: period,
		alarms: make(chan string, 1), failed: make(chan struct{}, 1), failures: make(map[int][]byte),
		reported: make(map[stalled]map[int]wait),
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	r.mu.Lock() // handleMessage uses r.ranks, which is set below
	defer r.mu.Unlock()
	var err error
	r.ranks, err = joblink.Listen(kv, size, func(rank int, what string, body []byte) {
		r.handleMessage(ctx, rank, what, body)
	})
	return r, err
}

// setRanks tells that an elastic job has begun a generation.
func (r *reporter) setRanks(generation uint64, size int) {
	r.ranks.SetRanks(generation, size)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.size, r.kept = size, 0
	clear(r.failures)
	clear(r.reported)
}

// count returns the number of ranks, which changes in an elastic job, or of nodes.
func (r *reporter) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.size
}

// close stops receiving messages. It returns when all messages that were received are handled.
func (r *reporter) close() {
	r.cancel()
	_ = r.ranks.Close() // a report shows errors of r.ranks, so this one is ignored
}

// verdict implements launch.Options.Verdict. If all ranks have ended, it closes the reporter when everything
// that they have sent has been received.
func (r *reporter) verdict(ctx context.Context, ended bool) (joblink.Verdict, error) {
	if ended {
		ctx, stop := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop()
		wg.Go(func() {
			if r.server.Idle(ctx) == nil {
				r.close()
			}
		})
	}
	return r.ranks.Verdict(ctx)
}

func (r *reporter) inquiry() *launch.Inquiry {
	return &launch.Inquiry{Survey: r.survey, Alarms: r.alarms, Epilogue: r.epilogue}
}

// handleMessage handles a message that a rank sent without being asked: about a stall or about a failed job.
// It may block, because it may have to ask all ranks for dumps.
func (r *reporter) handleMessage(ctx context.Context, rank int, what string, body []byte) {
	switch what {
	case joblink.Stall:
		s, err := recorder.DecodeStall(body)
		if err != nil || !r.isNews(ctx, stalled{s.Set, s.Name}) {
			return
		}
		r.mu.Lock()
		r.lastStall = time.Now()
		if key := (stalled{s.Set, s.Name}); r.reported[key] == nil && len(r.reported) < maxReported {
			r.reported[key] = make(map[int]wait) // reported even if no waiting rank answers
		}
		r.mu.Unlock()
		select {
		case r.alarms <- stallCause + s.Text:
		default: // an alarm is already pending, so drop this one
		}
	case joblink.Exit:
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.exits) < r.size {
			r.exits = append(r.exits, exit{topo.Rank(rank), logs.Plain(string(body))})
		}
		if len(body) > 0 {
			select {
			case r.failed <- struct{}{}:
			default: // the launcher has not read the last one yet
			}
		}
	case joblink.Begun:
		if epoch, err := strconv.ParseUint(string(body), 10, 64); err == nil {
			r.begin(epoch)
		}
	case joblink.Failure, joblink.Node:
		r.mu.Lock()
		defer r.mu.Unlock()
		if rank < r.size && r.kept-len(r.failures[rank])+len(body) <= maxFailureBytes {
			r.kept += len(body) - len(r.failures[rank])
			r.failures[rank] = body
		}
	}
}

// begin drops what ranks have sent about failures of earlier epochs, because all ranks have joined an epoch.
func (r *reporter) begin(epoch uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ranks.Begin(epoch)
	maps.DeleteFunc(r.failures, func(_ int, body []byte) bool {
		d, err := recorder.Decode(body)
		old := err != nil || d.Epoch < epoch
		if old {
			r.kept -= len(body)
		}
		return old
	})
}

// isNews reports whether a message about the stall s should trigger a report. It should not if the last
// report about a stall is less than r.period ago, or if s was reported before. Rank 0 repeats its message
// about a stall in each period. If a stall of the same tensor was reported before, isNews asks the ranks for
// dumps to find out whether s is still that stall.
func (r *reporter) isNews(ctx context.Context, s stalled) bool {
	r.mu.Lock()
	soon := !r.lastStall.IsZero() && time.Since(r.lastStall) < r.period
	waits, known := r.reported[s]
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
	case !known:
		return true
	case time.Since(seen) < r.period/2: // a recent dump has shown it, so it is the same stall
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, surveyTime)
	defer cancel()
	answers, _, _ := r.ranks.Ask(ctx, joblink.Dump) // the method survey reports errors of the store
	dumps, _ := r.decode(answers, r.count(), nil)
	return r.newWait(s, dumps)
}

// newWait reports whether dumps show that s is a new stall: a rank waits for s, and no wait for s in dumps
// has been reported. newWait also records which reported waits continue.
func (r *reporter) newWait(s stalled, dumps []*analysis.Snapshot) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, waits, continues := time.Now(), false, false
	for _, d := range dumps {
		for i := range d.Pending {
			p := &d.Pending[i]
			key := stalled{p.Set, p.Name}
			w, known := r.reported[key][d.Rank]
			same := known && w.is(d, p)
			if same {
				w.seen = now
				r.reported[key][d.Rank] = w
			}
			if key == s {
				// A wait in a stall is about as long as a period. A wait of less than half a period belongs
				// to a later step, so the stall has ended meanwhile.
				waits, continues = waits || d.At-p.Submitted >= r.period/2, continues || same
			}
		}
	}
	return waits && !continues
}

// markReported records that a report about a stall has shown the waits in dumps. The caller holds r.mu.
func (r *reporter) markReported(dumps []*analysis.Snapshot) {
	now := time.Now()
	for _, d := range dumps {
		for i := range d.Pending {
			p := &d.Pending[i]
			key := stalled{p.Set, p.Name}
			if r.reported[key] == nil {
				if len(r.reported) >= maxReported {
					clear(r.reported)
				}
				r.reported[key] = make(map[int]wait)
			}
			r.reported[key][d.Rank] = wait{d.Epoch, p.Submitted, now}
		}
	}
}

// survey asks all ranks for their dumps and returns a report about them.
func (r *reporter) survey(ctx context.Context, why string, known []string) string {
	ctx, cancel := context.WithTimeout(ctx, surveyTime)
	defer cancel()
	begun := time.Now()
	answers, _, err := r.ranks.Ask(ctx, joblink.Dump)
	size := r.count()
	dumps, absent := r.decode(answers, size, known)
	r.mu.Lock()
	if strings.HasPrefix(why, stallCause) { // only a report about a stall suppresses later reports about it
		r.markReported(dumps)
	}
	r.mu.Unlock()
	title := fmt.Sprintf("%s: %d of %d ranks answered, in %v", logs.Plain(why), len(dumps), size,
		time.Since(begun).Round(time.Millisecond))
	return r.text(title, analysis.Analyse(dumps, size, absent), dumps, errors.Join(err, r.ranks.Err()))
}

// epilogue returns a report about the dumps that ranks sent when their job failed, or "" if it has not failed
// or the dumps give no information. culprits holds the ranks that caused the failure, or is nil if they are
// not known.
func (r *reporter) epilogue(known []string, culprits []int, failed bool) string {
	r.close()
	if !failed {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	dumps, absent := r.decode(r.failures, r.size, known)
	f := analysis.Analyse(dumps, r.size, absent)
	f.Blame(culprits)
	if !f.HasEntries() {
		return ""
	}
	return r.text(fmt.Sprintf("what the ranks did when the job failed, from %d of %d ranks", len(dumps),
		r.size), f, dumps, r.ranks.Err())
}

// keepEpilogue returns a function that returns the last text of an Inquiry's Epilogue without the lines
// around it, or "". It may be called at any time.
func keepEpilogue(i *launch.Inquiry) func() string {
	var kept atomic.Value
	epilogue := i.Epilogue
	i.Epilogue = func(known []string, culprits []int, failed bool) string {
		text := epilogue(known, culprits, failed)
		kept.Store(strings.Trim(text, "-\n"))
		return text
	}
	return func() string {
		text, _ := kept.Load().(string)
		return text
	}
}

// decode decodes the dumps of size ranks in bodies. For each rank whose dump is missing, the result absent
// has the text from known about its process. If the dump of a rank cannot be decoded, absent has the error.
func (r *reporter) decode(bodies map[int][]byte, size int,
	known []string) (dumps []*analysis.Snapshot, absent map[int]string) {
	absent = make(map[int]string, len(known))
	for rank, what := range known {
		absent[rank] = what
	}
	for rank := range size {
		body, is := bodies[rank]
		if !is {
			continue
		}
		d, err := recorder.Decode(body)
		if err != nil {
			absent[rank] = "cannot decode its dump: " + err.Error()
			continue
		}
		dumps = append(dumps, d)
	}
	return dumps, absent
}

// text returns the report to print. If there is a folder for dumps, text also writes the whole report there.
func (r *reporter) text(title string, f *analysis.Findings, dumps []*analysis.Snapshot, err error) string {
	full := "hvdrun: " + title + "\n" + f.Text()
	if r.dir != "" {
		err = errors.Join(err, r.write(full, f, dumps))
	}
	return r.framed(full, err)
}

// framed returns a report as it is printed: cut to maxReportLines lines, and with a warning if err is not
// nil.
func (r *reporter) framed(full string, err error) string {
	rule := strings.Repeat("-", 72) + "\n"
	lines := strings.SplitAfter(full, "\n")
	if more := len(lines) - maxReportLines; more > 0 {
		full = strings.Join(lines[:maxReportLines], "") +
			fmt.Sprintf("... (%d further lines are not shown)\n", more)
	}
	switch {
	case err != nil:
		full += "hvdrun: warning: report: " + logs.Plain(err.Error()) + "\n"
	case r.dir != "":
		full += "The report and the dumps are in " + r.dir + "\n"
	}
	return rule + full + rule
}

// write writes a report, as text and as JSON, to the folder for dumps. It also writes the dumps of the report
// there.
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
