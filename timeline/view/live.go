package view

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/timeline/report"
)

const (
	// liveWindow and maxLiveBytes limit what is kept of the operations of a running job: by time, and by the
	// sizes of the entries of all ranks (live.Entry.Size).
	liveWindow   = time.Minute
	maxLiveBytes = 24 << 20
	// Versions are kept so that a page can load what belongs to one of them: at least minMoments, and at
	// most maxMoments if they do not have more than maxMomentOps operations together.
	minMoments, maxMoments, maxMomentOps = 4, 32, 200_000
	// maxStreams limits the pages that follow a job at a time.
	maxStreams = 8
	// streamTime is how long a page may take to read a state. If it takes longer, it must connect again.
	streamTime = 10 * time.Second
	// restTime is for how long a job is still followed after the last page has gone, so that a page that is
	// loaded again misses nothing.
	restTime = 3 * time.Second
)

// State is what the page shows of a running job beside the Report. Texts are escaped.
type State struct {
	// Run is the name of the run in requests for the data of this state. The Server sets it.
	Run string `json:"run"`
	// Verdict says who has held up the others in the last seconds, or how the job has ended. Alarm says that
	// it has failed, and Ended that it has ended.
	Verdict string `json:"verdict"`
	Alarm   bool   `json:"alarm"`
	Ended   bool   `json:"ended"`
	// Problems says what is wrong at the moment, and Missing has the numbers of the processes for which
	// others wait, or which do not answer.
	Problems []Problem `json:"problems"`
	Missing  []int     `json:"missing"`
	// Columns and Rows are the table of hvdrun top.
	Columns []string   `json:"columns"`
	Rows    [][]string `json:"rows"`
}

// Problem is a sentence about ranks or nodes that others wait for. Alarm says that it is a stall.
type Problem struct {
	Text  string `json:"text"`
	Alarm bool   `json:"alarm"`
}

// Live is a running job. It keeps its last operations and states while a page follows it.
type Live struct {
	title   string
	options report.Options
	ranks   map[int]*live.Records // only for the caller of Update and Known

	mu       sync.Mutex
	moments  []moment // the oldest first, at least one
	streams  int
	changed  chan struct{} // closed and replaced when moments or streams changes
	restless time.Time     // when the last page went
}

// moment is a version of a running job: its state, and its operations.
type moment struct {
	version int
	state   State
	run     *Run
}

// NewLive returns a job of which nothing is known yet.
func NewLive(title string, options report.Options, size int) (*Live, error) {
	l := &Live{title: title, options: options, changed: make(chan struct{}),
		ranks: make(map[int]*live.Records)}
	return l, l.Update(size, State{Verdict: "Waiting for the first answer of the job."}, nil)
}

// at returns a version of the job, or nil if it is not kept. Version 0 is the newest one.
func (l *Live) at(version int) (*Run, int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if version == 0 {
		version = l.moments[len(l.moments)-1].version
	}
	for _, m := range l.moments {
		if m.version == version {
			return m.run, version
		}
	}
	return nil, 0
}

// Watched waits until a page follows the job. Then it returns a context that ends when none has followed it
// for a few seconds. The error is that of ctx.
func (l *Live) Watched(ctx context.Context) (context.Context, context.CancelFunc, error) {
	for {
		l.mu.Lock()
		n, changed := l.streams, l.changed
		l.mu.Unlock()
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		if n > 0 {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	watched, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		for {
			l.mu.Lock()
			n, changed, rest := l.streams, l.changed, time.Until(l.restless.Add(restTime))
			l.mu.Unlock()
			if n > 0 {
				rest = time.Hour
			} else if rest <= 0 {
				return
			}
			select {
			case <-changed:
			case <-time.After(rest):
			case <-watched.Done():
				return
			}
		}
	}()
	return watched, cancel, nil
}

// Followed waits until no page follows the job any more, or ctx ends.
func (l *Live) Followed(ctx context.Context) {
	for {
		l.mu.Lock()
		n, changed := l.streams, l.changed
		l.mu.Unlock()
		if n == 0 {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// Known returns the number of the first entry of a rank that is not known yet.
func (l *Live) Known(rank int) uint64 {
	if r := l.ranks[rank]; r != nil {
		return r.Next()
	}
	return 0
}

// Update adds a state of a job of the given number of ranks, and what ranks have recorded since Known. Only
// one goroutine may call Update and Known.
func (l *Live) Update(size int, s State, all map[int]*live.Records) error {
	for _, r := range all {
		l.add(r)
	}
	l.limit()
	known := make([]*live.Records, 0, len(l.ranks))
	for _, r := range l.ranks {
		known = append(known, r)
	}
	run, err := Read(report.OfRecords(size, known), l.options, l.title)
	if err != nil {
		return fmt.Errorf("analyse the operations of a running job: %w", err)
	}
	run.live = true
	l.mu.Lock()
	defer l.mu.Unlock()
	version := 1
	if n := len(l.moments); n > 0 {
		version += l.moments[n-1].version
	}
	l.moments = append(l.moments, moment{version, s, run})
	ops, n := int64(0), 0
	for i := range l.moments {
		m := l.moments[len(l.moments)-1-i]
		if ops += m.run.report.Operations; i < minMoments || i < maxMoments && ops <= maxMomentOps {
			n++
		}
	}
	l.moments = slices.Clone(l.moments[len(l.moments)-n:])
	l.signal()
	return nil
}

// signal wakes all that wait for a change. The caller holds mu.
func (l *Live) signal() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// add adds entries to those of a rank. If some in between are missing, or the epoch is another one, it
// forgets the earlier ones.
func (l *Live) add(r *live.Records) {
	old := l.ranks[r.Rank]
	if old != nil && old.Epoch == r.Epoch && old.Next() == r.First {
		r.First, r.Entries = old.First, slices.Concat(old.Entries, r.Entries)
	}
	for rank, other := range l.ranks {
		switch {
		case other.Epoch < r.Epoch:
			delete(l.ranks, rank)
		case other.Epoch > r.Epoch:
			return
		}
	}
	l.ranks[r.Rank] = r
}

// limit forgets the oldest entries. All ranks keep those of the same time.
func (l *Live) limit() {
	size, longest := 0, time.Duration(0)
	for _, r := range l.ranks {
		for i := range r.Entries {
			size += r.Entries[i].Size()
		}
		if n := len(r.Entries); n > 0 {
			longest = max(longest, at(&r.Entries[n-1])-at(&r.Entries[0]))
		}
	}
	window := liveWindow
	if size > maxLiveBytes {
		window = min(window, time.Duration(float64(longest)*float64(maxLiveBytes)/float64(size)))
	}
	for _, r := range l.ranks {
		n := 0
		for n < len(r.Entries) && at(&r.Entries[len(r.Entries)-1])-at(&r.Entries[n]) > window {
			n++
		}
		r.First, r.Entries = r.First+uint64(n), r.Entries[n:]
	}
}

// at returns the time of an entry.
func at(e *live.Entry) time.Duration {
	switch {
	case e.Operation != nil:
		return e.Operation.Records[0].Ended
	case e.Span != nil:
		return e.Span.End
	case e.Step != nil:
		return e.Step.At
	}
	return 0
}

// stream sends each new state to a page, as server-sent events. A page that reads slowly misses states.
func (l *Live) stream(w http.ResponseWriter, r *http.Request, runOf func(version int) string) {
	l.mu.Lock()
	full := l.streams >= maxStreams
	if !full {
		l.streams++
		l.signal()
	}
	l.mu.Unlock()
	if full {
		http.Error(w, fmt.Sprintf("%d pages follow this job already", maxStreams), http.StatusServiceUnavailable)
		return
	}
	defer func() {
		l.mu.Lock()
		l.streams--
		l.restless = time.Now()
		l.signal()
		l.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "text/event-stream")
	control := http.NewResponseController(w)
	for sent := 0; ; {
		l.mu.Lock()
		m, changed := l.moments[len(l.moments)-1], l.changed
		l.mu.Unlock()
		if m.version != sent {
			sent = m.version
			m.state.Run = runOf(m.version)
			state, err := json.Marshal(&m.state)
			if err == nil {
				err = control.SetWriteDeadline(time.Now().Add(streamTime))
			}
			if err == nil {
				_, err = fmt.Fprintf(w, "data: %s\n\n", state)
			}
			if cmp.Or(err, control.Flush()) != nil {
				return // the page is gone, or does not read
			}
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}
