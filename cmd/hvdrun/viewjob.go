package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/live/table"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/timeline/view"
)

// viewInterval is the time between two states of the page. With it, the page mostly shows an operation less
// than a second after its end.
const viewInterval = 500 * time.Millisecond

// isJob reports whether the arguments of hvdrun view name a running job: there are none, or the only one is a
// number and no file.
func isJob(args []string) bool {
	if len(args) != 1 {
		return len(args) == 0
	}
	_, err := strconv.ParseUint(args[0], 10, 31)
	_, none := os.Stat(args[0])
	return err == nil && none != nil
}

// viewJob serves the page of a running job.
func (r *runner) viewJob(ctx context.Context, given *viewFlags, args []string) error {
	if given.export != "" {
		return usagef("view: --export: got a running job, want FILE")
	}
	j, err := r.chooseJob(viewCommand, args)
	if err != nil || j == nil {
		return err
	}
	about, err := j.about()
	if err != nil {
		return fmt.Errorf("view: hvdrun (process %d) does not answer: %w", j.pid, err)
	}
	l, err := newLive(about)
	if err != nil {
		return err
	}
	listener, err := listenPage(given.addr)
	if err != nil {
		return err
	}
	defer listener.Close() // Serve closes it too
	newServer := func(addr string) *view.Server { return view.NewLiveServer(l, addr) }
	return r.servePage(ctx, given, listener, newServer, func(ctx context.Context) { followJob(ctx, j, l) })
}

// closeTime is how long the end of hvdrun --view waits until open pages have received the end of the job,
// with an analysis of what was recorded.
const closeTime = 5 * time.Second

// viewOwn serves the page of the job that hvdrun runs, if --view asks for it. The socket of the job is in the
// folder. done is called after the end of the job, and waits for a short time until open pages show it, or
// ctx ends.
func (r *runner) viewOwn(j *job, folder string) (done func(ctx context.Context), err error) {
	if r.viewAddr == "" {
		return func(context.Context) {}, nil
	}
	if folder == "" {
		return nil, errors.New("--view: the page needs the socket that hvdrun could not open")
	}
	own := &jobAddress{folder, os.Getpid()}
	about, err := own.about()
	if err != nil {
		return nil, fmt.Errorf("--view: %w", err)
	}
	l, err := newLive(about)
	if err != nil {
		return nil, err
	}
	listener, err := listenPage(r.viewAddr)
	if err != nil {
		return nil, err
	}
	server := r.announce(r.stderr, r.viewAddr, listener,
		func(addr string) *view.Server { return view.NewLiveServer(l, addr) })
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := server.Serve(ctx, listener); err != nil {
			fmt.Fprintf(r.stderr, "hvdrun: warning: --view: %v\n", err)
		}
	})
	followed := make(chan struct{})
	running.Go(func() {
		defer close(followed)
		followJob(ctx, own, l)
	})
	return func(waiting context.Context) {
		limit, cancel := context.WithTimeout(waiting, closeTime)
		defer cancel()
		select {
		case <-followed:
			l.Followed(limit)
		case <-limit.Done():
		}
		stop()
		running.Wait()
	}, nil
}

// newLive returns the page's data of a job.
func newLive(about *live.About) (*view.Live, error) {
	title := fmt.Sprintf("job %d: %s", about.PID, logs.Plain(fmt.Sprint(about.Command)))
	return view.NewLive(title, defaultOptions(), sizeOf(about))
}

// sizeOf returns the number of ranks of a job.
func sizeOf(about *live.About) int {
	if about.What == live.Nodes {
		return 0
	}
	return about.Size
}

// followJob passes the states of a job to its page until the job or ctx ends. It reads them only while a page
// is open; otherwise it only waits for the end.
func followJob(ctx context.Context, j *jobAddress, l *view.Live) {
	var history table.History
	var next time.Time // when the ranks may be asked for records again
	var failed error   // why operations are missing
	size, ended := 0, false
	show := func(u update, all map[int]*live.Records) {
		s := table.States{Note: u.note, At: time.Now()}
		if u.job != nil {
			s, ended = history.Add(u.job), u.job.End != nil
			size = cmp.Or(sizeOf(&u.job.About), size)
		}
		state := stateOf(&s)
		if failed != nil && !ended {
			state.Problems = append(state.Problems, view.Problem{Text: fmt.Sprintf(
				"The timeline lacks operations: %s.", logs.Plain(failed.Error()))})
		}
		_ = l.Update(size, state, all) // fails only if a file cannot be read, and there is none
	}
	over, stop := context.WithCancel(ctx)
	defer stop()
	end := make(chan *live.Job, 1)
	go func() {
		defer stop()
		end <- j.end(ctx)
	}()
	for {
		watched, cancel, err := l.Watched(over)
		if err != nil {
			break
		}
		j.follow(watched, viewInterval, func(u update) bool {
			var all map[int]*live.Records
			if u.job != nil && u.job.End == nil && !time.Now().Before(next) {
				all, failed = j.records(watched, recordedRanks(u.job, l))
				next = nextQuestion(next, time.Now(), all)
				if failed != nil {
					next = time.Now().Add(askTime)
				}
			}
			show(u, all)
			return true
		})
		cancel()
		if ended {
			return
		}
	}
	if last := <-end; last != nil {
		show(update{job: last}, nil)
	}
}

// recordTime is about how long an entry, or a record of a tensor, keeps a processor of this host busy: at the
// rank that sends it, in hvdrun, and where it is decoded. shareOfHost says which part of the host's
// processors that may take: one of so many.
const (
	recordTime  = 1200 * time.Nanosecond
	shareOfHost = 100
)

// nextQuestion returns when the ranks may be asked for records again after an answer that came now. They
// could have been asked at the time next. Since states come at intervals, they were asked later. Then the
// following question comes earlier: the answer to a late question has more records, so otherwise one late
// question would make all following ones late.
func nextQuestion(next, now time.Time, all map[int]*live.Records) time.Time {
	if least := now.Add(-viewInterval); next.Before(least) {
		next = least
	}
	return next.Add(restAfter(all))
}

// restAfter returns for how long the ranks are not asked again after they have sent records. The processors
// of the host belong to the training.
func restAfter(all map[int]*live.Records) time.Duration {
	n := 0
	for _, r := range all {
		for i := range r.Entries {
			n++
			if o := r.Entries[i].Operation; o != nil {
				n += len(o.Records) - 1
			}
		}
	}
	return time.Duration(n) * recordTime * shareOfHost / time.Duration(runtime.GOMAXPROCS(0))
}

// recordedRanks returns the first entries that are wanted of the ranks whose operations the page shows: rank
// 0, which knows how late all ranks were, and those that have held up all others longest.
func recordedRanks(j *live.Job, l *view.Live) map[int]uint64 {
	order := slices.Clone(j.Processes)
	slices.SortStableFunc(order[min(len(order), 1):], func(a, b live.Process) int {
		return cmp.Compare(b.Held, a.Held)
	})
	from := make(map[int]uint64)
	for i := range order[:min(len(order), maxRecorded)] {
		if p := &order[i]; p.Answered && j.What == live.Ranks {
			from[p.Rank] = l.Known(p.Rank)
		}
	}
	return from
}

// stateOf returns what the page shows beside the report.
func stateOf(s *table.States) view.State {
	v := s.Verdict()
	state := view.State{Verdict: v.Text, Alarm: v.Style == table.Alarm,
		Ended: s.Now != nil && s.Now.End != nil}
	for _, p := range s.Problems() {
		state.Problems = append(state.Problems, view.Problem{Text: p.Text, Alarm: p.Style == table.Alarm})
	}
	if state.Ended {
		state.Report = s.Now.End.Report
	}
	if s.Now != nil {
		for _, p := range s.Now.Problems {
			state.Missing = append(state.Missing, p.Missing...)
		}
	}
	state.Timelines = s.Timelines()
	for _, e := range s.Epochs {
		state.Epochs = append(state.Epochs, e.Text())
	}
	state.Columns, state.Rows = s.Cells()
	return state
}
