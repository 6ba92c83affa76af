package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/rundir"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// Each hvdrun serves the state of its job on a Unix socket in a folder of package rundir. The folder has the
// mode 0700 and belongs to the user, so the kernel lets only this user and root connect. The server needs no
// SO_PEERCRED therefore, and the client knows that a process of its own user has made the socket. The server
// speaks HTTP: /about says which job it is, /states is a stream of states, /end is the last state, and
// /records has what a few ranks have recorded. /timeline starts or stops the timelines. It is the only
// request that changes something, and only this socket has it: a web page, of whatever origin, cannot reach
// it.
const (
	// xdgVariable is the variable on which the place of the runtime folder depends.
	xdgVariable = "XDG_RUNTIME_DIR"
	// socketName is the name of the socket in the folder of hvdrun's process.
	socketName = "job"
	// lookTime is how long processes may take to answer. With the interval of hvdrun top, 1 s, a stall is on
	// the screen 2 s after its warning, even if some ranks do not answer.
	lookTime = 700 * time.Millisecond
	// shared is how long a state is used for other readers, too.
	shared = 100 * time.Millisecond
	// leastInterval and mostInterval limit the time between two states of a stream.
	leastInterval = 100 * time.Millisecond
	mostInterval  = time.Hour
	// readerTime is how long a reader may take to read a state. If it takes longer, for example because it
	// was stopped, it must connect again.
	readerTime = 10 * time.Second
	// askTime is the longest time between two questions to the ranks while there is a reader. Rank 0 keeps
	// steps for 10 s after a question (watch.Observer.Steps), and a reader may read less often.
	askTime = 3 * time.Second
	// maxReaders is the maximum number of streams.
	maxReaders = 16
	// endTime is how long the end of hvdrun waits until readers have received the end of the job.
	endTime = 250 * time.Millisecond
	// everyParameter is the name of the parameter with the time between two states, in milliseconds.
	everyParameter = "every_ms"
	// keptSteps is the number of steps in the first state of a reader.
	keptSteps = 256
	// rankParameter is the name of the parameter with a rank and the first entry that is wanted
	// (joblink.Records). It may be given for at most maxRecorded ranks.
	rankParameter = "rank"
	maxRecorded   = 8
	// switchTime is how long ranks may take to start or to stop a timeline.
	switchTime = 10 * time.Second
	// maxSwitchBytes is the maximum length of a request to start or to stop the timelines.
	maxSwitchBytes = 8 << 10
	// These are the paths of the resources.
	aboutPath   = "/about"
	statesPath  = "/states"
	endPath     = "/end"
	recordsPath = "/records"
	// timelinePath is that of a request by POST.
	timelinePath = "/timeline"
)

// liveJob serves the state of a job to readers. It asks the processes only while there is a reader.
type liveJob struct {
	about   live.About
	nodes   *launch.Nodes // nil in a job of ranks
	elastic bool
	hosts   []string
	reports *reporter
	looks   chan func(known []string)
	ended   chan struct{} // closed when end is set

	mu      sync.Mutex
	end     *live.End
	readers int

	asking sync.Mutex // held while the processes are asked, and for the fields below
	last   *live.Job
	steps  []trace.Step // the last steps of the epoch, while there are readers
	epoch  uint64
}

// serveLive serves the state of the job to hvdrun top and view until finish is called with the end of the
// job. Then readers have a short time to read it, unless ctx ends. If the state cannot be served, the job
// runs without it, and folder is empty. Otherwise it has the socket.
func (r *runner) serveLive(j *job, reports *reporter,
	inquiry *launch.Inquiry) (finish func(ctx context.Context, e *live.End), folder string) {
	l := &liveJob{about: live.About{PID: os.Getpid(), Command: j.command, Started: time.Now().Round(0),
		Version: config.Version(), What: live.Ranks, Size: j.np}, nodes: j.nodes,
		elastic: j.elastic != nil, reports: reports,
		looks: make(chan func([]string)), ended: make(chan struct{})}
	inquiry.Looks = l.looks
	if j.nodes != nil {
		l.about.What = live.Nodes
	}
	folder, stop, err := r.listenLive(l, j)
	if err != nil {
		fmt.Fprintf(r.stderr, "hvdrun: warning: hvdrun top cannot show this job: %v\n", err)
		return func(context.Context, *live.End) {}, ""
	}
	return func(ctx context.Context, e *live.End) {
		l.mu.Lock()
		l.end = e
		l.mu.Unlock()
		close(l.ended)
		stop(ctx)
	}, folder
}

// listenLive starts the server, whose socket is in the folder. stop waits for a short time until readers have
// the last state, or ctx ends.
func (r *runner) listenLive(l *liveJob, j *job) (folder string, stop func(ctx context.Context), err error) {
	if l.about.Host, err = os.Hostname(); err != nil {
		return "", nil, err
	}
	if j.elastic == nil && !r.mpi.on {
		l.hosts, _ = hostNames(j.hosts, j.nodes, j.np) // launch.Run returns the same error
	}
	dir, err := rundir.New(r.variable(xdgVariable))
	if err != nil {
		return "", nil, err
	}
	at, release, err := shortPath(dir.Path())
	if err != nil {
		return "", nil, errors.Join(err, dir.Close())
	}
	defer release()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: at, Net: "unix"})
	if err != nil {
		return "", nil, errors.Join(err, dir.Close())
	}
	listener.SetUnlinkOnClose(false) // dir.Close removes it
	if err := os.Chmod(at, 0o600); err != nil {
		return "", nil, errors.Join(err, listener.Close(), dir.Close())
	}
	server := &http.Server{Handler: l.handler(), ReadTimeout: readerTime, MaxHeaderBytes: 8 << 10,
		ErrorLog: zap.NewStdLog(r.logger())}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener) // returns when the server is closed
	}()
	return dir.Path(), func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, endTime)
		defer cancel()
		_ = server.Shutdown(ctx) // an error means that a reader did not read the end in time
		_ = server.Close()
		<-done
		_ = dir.Close()
	}, nil
}

// variable returns the value of a variable of the environment, or "".
func (r *runner) variable(name string) (value string) {
	for _, v := range r.env {
		if text, ok := strings.CutPrefix(v, name+"="); ok {
			value = text
		}
	}
	return value
}

// shortPath returns a path of the socket in a folder that fits into the address of a Unix socket, which has
// room for 107 bytes. It is valid until release is called.
func shortPath(folder string) (path string, release func(), err error) {
	d, err := os.Open(folder)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), socketName), func() { d.Close() }, nil
}

func (l *liveJob) handler() http.Handler {
	paths := http.NewServeMux()
	paths.HandleFunc("GET "+aboutPath, func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(&l.about) // fails only if the reader is gone
	})
	paths.HandleFunc("GET "+statesPath, l.stream)
	paths.HandleFunc("GET "+recordsPath, l.records)
	paths.HandleFunc("POST "+timelinePath, l.switchTimelines)
	paths.HandleFunc("GET "+endPath, func(w http.ResponseWriter, req *http.Request) {
		select {
		case <-l.ended:
			_ = json.NewEncoder(w).Encode(l.state()) // fails only if the reader is gone
		case <-req.Context().Done():
		}
	})
	return paths
}

// records sends the live.Records of ranks, as EncodeAnswers encodes them. It lacks ranks that have not
// answered.
func (l *liveJob) records(w http.ResponseWriter, req *http.Request) {
	question := joblink.Records
	var of []topo.Rank
	given := req.URL.Query()[rankParameter]
	for _, text := range given {
		rank, from := -1, uint64(0)
		if n, err := fmt.Sscanf(text, "%d:%d", &rank, &from); err != nil || n != 2 || len(given) > maxRecorded {
			http.Error(w, fmt.Sprintf("%s: got %d times, such as %.40q, want RANK:NUMBER at most %d times",
				rankParameter, len(given), text, maxRecorded), http.StatusBadRequest)
			return
		}
		if rank >= 0 && rank < l.reports.count() {
			question, of = fmt.Sprintf("%s %d:%d", question, rank, from), append(of, topo.Rank(rank))
		}
	}
	var answers map[int][]byte
	if l.nodes == nil && len(of) > 0 {
		ctx, cancel := context.WithTimeout(req.Context(), lookTime)
		defer cancel()
		answers, _, _ = l.reports.ranks.Ask(ctx, question, of...) // an error means that the job is over
	}
	_, _ = w.Write(live.EncodeAnswers(answers)) // fails only if the reader is gone
}

// stream sends a state at once and after each interval, and the last one when the job has ended.
func (l *liveJob) stream(w http.ResponseWriter, req *http.Request) {
	every := time.Second
	if text := req.FormValue(everyParameter); text != "" {
		ms, err := strconv.ParseUint(text, 10, 32)
		every = time.Duration(ms) * time.Millisecond
		if err != nil || every < leastInterval || every > mostInterval {
			http.Error(w, fmt.Sprintf("%s: got %.40q, want a number from %d to %d", everyParameter, text,
				leastInterval.Milliseconds(), mostInterval.Milliseconds()), http.StatusBadRequest)
			return
		}
	}
	l.mu.Lock()
	full := l.readers >= maxReaders
	if !full {
		l.readers++
	}
	l.mu.Unlock()
	if full {
		http.Error(w, fmt.Sprintf("%d programs read the state of this job already", maxReaders),
			http.StatusServiceUnavailable)
		return
	}
	defer func() {
		l.mu.Lock()
		l.readers--
		l.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/x-ndjson")
	control := http.NewResponseController(w)
	next := time.NewTicker(every)
	defer next.Stop()
	ask := time.NewTicker(askTime)
	defer ask.Stop()
	var epoch, known uint64 // the last step that the reader knows
	for {
		j := l.state()
		if j.End == nil {
			j, epoch, known = since(j, epoch, known)
		}
		if control.SetWriteDeadline(time.Now().Add(readerTime)) != nil ||
			json.NewEncoder(w).Encode(j) != nil || control.Flush() != nil || j.End != nil {
			return
		}
		ask.Reset(askTime)
		for waits := true; waits; {
			select {
			case <-ask.C:
				l.state()
				continue
			case <-next.C:
			case <-l.ended:
			case <-req.Context().Done():
				return
			}
			waits = false
		}
	}
}

// since returns the state without the steps that the reader knows, and what the reader knows then.
func since(j *live.Job, epoch, known uint64) (*live.Job, uint64, uint64) {
	if now := j.Processes[0].Epoch; now != epoch {
		epoch, known = now, 0
	}
	few := *j
	few.Steps = slices.DeleteFunc(slices.Clone(j.Steps), func(s trace.Step) bool {
		return s.Sequence <= known
	})
	if n := len(few.Steps); n > 0 {
		known = few.Steps[n-1].Sequence
	}
	return &few, epoch, known
}

// state returns the state of the job. Readers at the same time share one question to the processes, so it
// does not end with the request of one of them.
func (l *liveJob) state() *live.Job {
	l.asking.Lock()
	defer l.asking.Unlock()
	now := time.Now()
	if l.last == nil || now.Sub(l.last.Time) > shared {
		ctx, cancel := context.WithTimeout(context.Background(), lookTime)
		defer cancel()
		asked := make(chan *live.Job, 1)
		go func() { asked <- l.ask(ctx, now) }()
		select {
		case l.last = <-asked:
		case <-l.ended:
			cancel()
			<-asked
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end != nil {
		return &live.Job{About: l.about, Time: time.Now(), End: l.end}
	}
	return l.last
}

// ask asks all processes for their state.
func (l *liveJob) ask(ctx context.Context, now time.Time) *live.Job {
	about := l.about
	about.Size = l.reports.count()
	if l.nodes != nil {
		answers, missing, _ := l.reports.ranks.Ask(ctx, joblink.Node) // an error means that the job is over
		var names []string
		for i := range about.Size {
			names = append(names, l.nodes.Name(i))
		}
		return live.OfNodes(about, now, (&nodeReporter{l.reports, l.nodes}).read(answers), names, l.hosts,
			l.known(missing))
	}
	last := uint64(0)
	if n := len(l.steps); n > 0 {
		last = l.steps[n-1].Sequence
	}
	answers, missing, _ := l.reports.ranks.Ask(ctx, fmt.Sprintf("%s %d", joblink.State, last))
	ranks := make(map[int]*live.Rank)
	var known []string
	if !l.elastic { // there, the launcher knows the processes by their slots
		known = l.known(missing)
	}
	for r, text := range answers {
		k, err := live.DecodeRank(text)
		if err == nil && k.Snapshot.Rank != r {
			err = fmt.Errorf("malformed state of a rank: it is that of rank %d", k.Snapshot.Rank)
		}
		if err == nil {
			ranks[r] = k
			continue
		}
		for len(known) <= r {
			known = append(known, "")
		}
		known[r] = err.Error()
	}
	// The ranks may have changed since they were asked. The new ones must not be shown with the old number.
	if n := l.reports.count(); ranks[0] != nil && ranks[0].Snapshot.Size == n {
		about.Size = n
	}
	j := live.OfRanks(about, now, ranks, l.hosts, known)
	if zero := ranks[0]; zero != nil {
		if epoch := zero.Snapshot.Epoch; epoch != l.epoch {
			l.epoch, l.steps = epoch, nil
		}
		l.steps = append(l.steps, zero.Steps...)
		l.steps = slices.Clone(l.steps[max(len(l.steps)-keptSteps, 0):])
	}
	j.Steps = l.steps
	return j
}

// known returns what the launcher knows about the processes, or nil if all of them have answered or the
// supervisor does not run any more.
func (l *liveJob) known(missing []int) []string {
	if len(missing) == 0 {
		return nil
	}
	answer := make(chan []string, 1)
	ctx, cancel := context.WithTimeout(context.Background(), shared)
	defer cancel()
	select {
	case l.looks <- func(known []string) { answer <- slices.Clone(known) }:
		return <-answer
	case <-ctx.Done():
	case <-l.ended:
	}
	return nil
}

// endOf says how a job has ended. err is the error of launch.Run.
func endOf(result launch.Result, err error, nodes *launch.Nodes) *live.End {
	end := &live.End{Status: result.Status, Text: "all " + processesOf(nodes) + " ended with status 0"}
	switch {
	case err != nil:
		end.Status, end.Text = cmp.Or(result.Status, statusFailure), err.Error()
	case len(result.Roots) > 0:
		root := result.Ranks[result.Roots[0]]
		end.Text = root.Title + ": " + root.Describe()
		if v := result.Verdict; v != nil && v.Reason != "" {
			end.Text += "; " + v.Reason
		}
	case result.Signal == unix.SIGPIPE:
		end.Text = "nobody reads the output of hvdrun any more"
	case result.Signal != 0:
		end.Text = fmt.Sprintf("a signal has ended it: %v", result.Signal)
	case result.Status != 0:
		end.Text = "a " + processesOf(nodes)[:4] + " has failed"
	}
	return end
}

// processesOf returns what the processes of a job are.
func processesOf(nodes *launch.Nodes) string {
	if nodes != nil {
		return live.Nodes
	}
	return live.Ranks
}
