package view

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/timeline/report"
)

const (
	// liveWindow and maxLiveBytes limit what is kept of the operations of a running job: by time, and by the
	// sizes of the entries of all ranks (live.Entry.Size). If the analysis takes long, at least minLiveBytes
	// are kept.
	liveWindow   = time.Minute
	maxLiveBytes = 24 << 20
	minLiveBytes = 768 << 10
	// Versions are kept so that a page can load what belongs to one of them: at least minMoments, and at
	// most maxMoments if they do not have more than maxMomentOps operations together. maxPinned limits those
	// that are kept longer, because a page that does not follow the job any more may show them.
	minMoments, maxMoments, maxMomentOps = 4, 32, 200_000
	maxPinned                            = 8
	// maxStreams limits the pages that follow a job at a time. A browser opens at most six connections to a
	// host, and the pages need some for their data.
	maxStreams = 4
	// shareOfHost limits the time that the analysis takes: one of so many parts of the time of the host's
	// processors, and at most a tenth of one processor. hvdrun view runs on the host of the training.
	// maxRestTime is the time after an analysis, in which there is no other, above which fewer operations are
	// kept. It is half of viewInterval of cmd/hvdrun, the time between two states, so the analysis mostly
	// takes at most half of its limit. If minLiveBytes take longer, the page is later instead.
	shareOfHost = 100
	maxRestTime = 250 * time.Millisecond
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
	// Report has lines about what the processes did at the end of the job, or is "".
	Report string `json:"report"`
	// Problems says what is wrong at the moment, and Missing has the numbers of the processes for which
	// others wait, or which do not answer.
	Problems []Problem `json:"problems"`
	Missing  []int     `json:"missing"`
	// Timelines says which timelines the ranks write, or is "".
	Timelines string `json:"timelines"`
	// Epochs has a sentence for each time at which the ranks have changed, the newest first.
	Epochs []string `json:"epochs"`
	// Columns and Rows are the table of hvdrun top.
	Columns []string   `json:"columns"`
	Rows    [][]string `json:"rows"`
}

// Problem is a sentence about ranks or nodes that others wait for. Alarm says that it is a stall.
type Problem struct {
	Text  string `json:"text"`
	Alarm bool   `json:"alarm"`
}

// Live is a running job. It keeps its last operations and its last state while a page follows it.
type Live struct {
	title   string
	options report.Options
	// These fields are only for the caller of Update and Known: the number of the ranks, what they have
	// recorded, when one of them has answered last, whether something is not analysed yet, and when the next
	// analysis may begin.
	size     int
	ranks    map[int]*recorded
	answered time.Time
	stale    bool
	next     time.Time
	cost     time.Duration // the processor time of the last analyses, as a moving average
	room     int           // the sizes of the entries that are kept, at most

	mu       sync.Mutex
	state    State
	states   int      // the number of states so far
	moments  []moment // the oldest first, at least one
	pinned   []moment // the last ones of the pages that have gone, the oldest first
	streams  int
	changed  chan struct{} // closed and replaced when state, moments or streams changes
	restless time.Time     // when the last page went
}

// moment is a version of the operations of a running job.
type moment struct {
	version int
	run     *Run
}

// recorded has the last operations of a rank, when the rank has answered last, and when its last answer with
// operations came.
type recorded struct {
	*live.Records
	answered, grown time.Time
}

// NewLive returns a job of which nothing is known yet.
func NewLive(title string, options report.Options, size int) (*Live, error) {
	l := &Live{title: title, options: options, changed: make(chan struct{}), stale: true,
		room:  minLiveBytes, // rest adds more if the analysis is short
		ranks: make(map[int]*recorded)}
	return l, l.Update(size, State{Verdict: "Waiting for the first answer of the job."}, nil)
}

// at returns a version of the job, or nil if it is not kept. Version 0 is the newest one.
func (l *Live) at(version int) (*Run, int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if version == 0 {
		version = l.moments[len(l.moments)-1].version
	}
	for _, m := range slices.Concat(l.pinned, l.moments) {
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
				l.forget()
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

// forget drops all versions except the last one and those that pages may still show.
func (l *Live) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.moments = slices.Clone(l.moments[len(l.moments)-1:])
}

// Known returns the number of the first entry of a rank that is not known yet.
func (l *Live) Known(rank int) uint64 {
	if r := l.ranks[rank]; r != nil {
		return r.Next()
	}
	return 0
}

// Update adds a state of a job of the given number of ranks, and what ranks have recorded since Known. If the
// last analysis has taken long, the operations are shown by a later call, at the latest at the end of the
// job. Only one goroutine may call Update and Known.
func (l *Live) Update(size int, s State, all map[int]*live.Records) error {
	begun := time.Now()
	l.stale = l.stale || size != l.size
	l.size = size
	if s.Ended {
		l.room = maxLiveBytes // because this is the last analysis
	}
	before := processorTime()
	l.add(all, begun)
	var run *Run
	if l.stale && (s.Ended || !begun.Before(l.next)) {
		known := make([]*live.Records, 0, len(l.ranks))
		for _, r := range l.ranks {
			known = append(known, r.Records)
		}
		var err error
		if run, err = Read(report.OfRecords(size, known), l.options, l.title); err != nil {
			return fmt.Errorf("analyse the operations of a running job: %w", err)
		}
		run.live, l.stale = true, false
		l.rest(processorTime() - before)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if run != nil {
		l.append(run)
	}
	l.state, l.states = s, l.states+1
	l.signal()
	return nil
}

// processorTime returns the processor time of this process, which contains what it does beside the analysis,
// such as answers to pages. An analysis takes more time than that if it waits for a processor, which says
// nothing about its cost.
func processorTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		panic("view: " + err.Error()) // each Linux has this clock
	}
	return time.Duration(t.Nano())
}

// rest sets when the next analysis may begin, after one that took some processor time, and how much it may
// have to analyse. The last ones count too, because one may take much longer by chance.
func (l *Live) rest(took time.Duration) {
	if l.cost == 0 {
		l.cost = took
	}
	l.cost += (took - l.cost) / 4
	rest := l.cost * time.Duration(max(shareOfHost/runtime.GOMAXPROCS(0), 10)-1)
	l.next = time.Now().Add(rest)
	switch size := l.bytes(); {
	case rest > maxRestTime:
		l.room = max(int(float64(size)*float64(maxRestTime)/float64(rest)), minLiveBytes)
	case rest < maxRestTime/2:
		l.room = min(l.room+l.room/4, maxLiveBytes)
	}
}

// bytes returns the size of the entries that are kept.
func (l *Live) bytes() (size int) {
	for _, r := range l.ranks {
		for i := range r.Entries {
			size += r.Entries[i].Size()
		}
	}
	return size
}

// append adds a version, and drops those for which there is no room. The caller holds mu.
func (l *Live) append(run *Run) {
	version := 1
	if n := len(l.moments); n > 0 {
		version += l.moments[n-1].version
	}
	l.moments = append(l.moments, moment{version, run})
	ops, n := int64(0), 0
	for i := range l.moments {
		m := l.moments[len(l.moments)-1-i]
		if ops += m.run.report.Operations; i < minMoments || i < maxMoments && ops <= maxMomentOps {
			n++
		}
	}
	l.moments = slices.Clone(l.moments[len(l.moments)-n:])
}

// signal wakes all that wait for a change. The caller holds mu.
func (l *Live) signal() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// add adds the entries of ranks that came at a time, and forgets those that are too old or have no room. If
// entries are missing because a rank had no room for them, it forgets all that is older, at all ranks. If
// they are missing because the rank was not asked, the rank begins again. Only the last epoch is kept.
func (l *Live) add(all map[int]*live.Records, now time.Time) {
	window, missing := liveWindow, time.Duration(-1)
	for _, r := range all {
		if !l.newest(r.Epoch) {
			continue
		}
		old, grows := l.ranks[r.Rank], len(r.Entries) > 0
		n := &recorded{r, now, now}
		switch {
		case old != nil && old.Next() == r.First:
			if !grows {
				n.grown = old.grown
			}
			r.First, r.Entries = old.First, slices.Concat(old.Entries, r.Entries)
		case old != nil && grows && old.answered.Equal(l.answered):
			missing = max(missing, at(&r.Entries[len(r.Entries)-1])-at(&r.Entries[0]))
		}
		l.ranks[r.Rank] = n
		l.stale = l.stale || grows || old == nil
	}
	if missing >= 0 {
		window = min(window, missing)
	}
	if len(all) > 0 {
		l.answered = now
	}
	l.limit(window)
}

// newest reports whether an epoch is the last one, and forgets those before it.
func (l *Live) newest(epoch uint64) bool {
	for rank, r := range l.ranks {
		switch {
		case r.Epoch > epoch:
			return false
		case r.Epoch < epoch:
			delete(l.ranks, rank)
		}
	}
	return true
}

// limit forgets the entries of all ranks that are older than a time, counted back from the newest entry of
// any rank, and the oldest ones if there is no room. It forgets a rank that has none, and has not answered
// for liveWindow.
func (l *Live) limit(window time.Duration) {
	var newest time.Time
	for _, r := range l.ranks {
		if r.grown.After(newest) {
			newest = r.grown
		}
	}
	// The clocks of the ranks may differ. So the age of a rank's newest entry is the time since it came.
	age := func(r *recorded, i int) time.Duration {
		return newest.Sub(r.grown) + at(&r.Entries[len(r.Entries)-1]) - at(&r.Entries[i])
	}
	size, oldest := l.bytes(), time.Duration(0)
	for _, r := range l.ranks {
		if len(r.Entries) > 0 {
			oldest = max(oldest, age(r, 0))
		}
	}
	if size > l.room {
		window = min(window, time.Duration(float64(oldest)*float64(l.room)/float64(size)))
	}
	for rank, r := range l.ranks {
		n := 0
		for n < len(r.Entries) && age(r, n) > window {
			n++
		}
		r.First, r.Entries, l.stale = r.First+uint64(n), r.Entries[n:], l.stale || n > 0
		if len(r.Entries) == 0 && l.answered.Sub(r.answered) > liveWindow {
			delete(l.ranks, rank)
			l.stale = true
		}
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
	// These are the last two versions that were sent. The page may show the first of them, because it loads
	// the data of a version before it shows it.
	var shown [2]moment
	defer func() {
		l.mu.Lock()
		l.pin(shown[:])
		l.streams--
		l.restless = time.Now()
		l.signal()
		l.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "text/event-stream")
	control := http.NewResponseController(w)
	for sent := 0; ; {
		l.mu.Lock()
		state, number, m, changed := l.state, l.states, l.moments[len(l.moments)-1], l.changed
		l.mu.Unlock()
		if number != sent {
			sent = number
			if m.version != shown[1].version {
				shown = [2]moment{shown[1], m}
			}
			state.Run = runOf(m.version)
			text, err := json.Marshal(&state)
			if err == nil {
				err = control.SetWriteDeadline(time.Now().Add(streamTime))
			}
			if err == nil {
				_, err = fmt.Fprintf(w, "data: %s\n\n", text)
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

// pin keeps versions that a page may show after it has gone. The caller holds mu.
func (l *Live) pin(shown []moment) {
	for _, m := range shown {
		if m.run != nil {
			l.pinned = append(slices.DeleteFunc(l.pinned,
				func(p moment) bool { return p.version == m.version }), m)
		}
	}
	l.pinned = slices.Clone(l.pinned[max(len(l.pinned)-maxPinned, 0):])
}
