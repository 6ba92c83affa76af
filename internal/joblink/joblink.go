// Package joblink connects the ranks of a job with their launcher while the job runs. The launcher asks all
// ranks questions. The ranks send answers. They also send reports for which the launcher has not asked, for
// example that a rank has failed.
//
// Launcher and ranks communicate through the launcher's store. Every rank is connected to this store as long
// as the job runs, no matter which ranks die. The launcher writes the list of open questions, and every rank
// watches that list. Answers and reports are queues that the launcher reads.
//
//  1. A rank needs only one waiting call for all questions. The launcher may ask several questions at a time,
//     and each question gets only its own answers.
//  2. Only the first answer of a rank to a question counts. If nobody waits for an answer any more, the launcher
//     drops it.
//  3. An epoch has one verdict: the first one that arrives. The verdict of a later epoch replaces it. The rank
//     that has reported it can take it back, and a rank that is said to be silent refutes that with a verdict
//     of its own. Then the first verdict of another rank counts. The same holds if the ranks that the first
//     one names have turned out to take part in the job (Doubt).
//  4. A rank that the launcher has started again may be blamed for the end of an earlier process of it. Such a
//     verdict does not count. Neither does a verdict of an epoch if all ranks have joined a later one, nor a
//     verdict that an epoch has not begun (Starting) if all ranks join it later.
//
// Every rank has the secret of the job and is trusted. Nothing prevents a rank from sending an answer in the
// name of another rank.
package joblink

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// These are the questions that the launcher asks.
const (
	// Dump asks for the dump of the rank's flight recorder.
	Dump = "dump"
	// Metrics asks for the rank's counters.
	Metrics = "metrics"
	// State asks for the rank's state, which is small enough to be asked for each second. The question is
	// this word, a blank, and the sequence number of the last step of which the launcher knows.
	State = "state"
	// Records asks for what the rank has recorded since it was last asked. The question is this word and, for
	// each rank that is asked, a blank, the rank, a colon and the number of the first entry that is wanted.
	Records = "records"
	// StartTimeline asks the rank to begin a timeline. The question is this word, a blank, a text that makes
	// the name of a file unique, a blank, and the path of rank 0's file, or nothing for the path of the
	// settings. StopTimeline asks it to end its timeline.
	StartTimeline = "start-timeline"
	StopTimeline  = "stop-timeline"
	// Node asks a node of a parameter server for its state. A node also sends it as a report, at its end and
	// when it sees another node fail.
	Node = "node"
)

// These are the kinds of reports, which ranks send without being asked.
const (
	// Stall is a report of rank 0. Its text says that tensors have waited for longer than the warning time.
	Stall = "stall"
	// Failure is a report of a rank whose job has failed. Its body has the form of an answer to Dump.
	Failure = "failure"
	// Exit is a report of hvdrun's process between mpirun and a rank, at the end of the rank's command. Its
	// text says how the command has failed. It is empty if the command has succeeded.
	Exit = "exit"
	// Begun is a report of rank 0: all ranks have joined an epoch, whose number is the text.
	Begun = "begun"
	// verdict is a report that contains a Verdict.
	verdict = "verdict"
	// process is a report of a rank that contains the number of its process.
	process = "process"
)

// VerdictTimeout is how long a rank tries to send its verdict, and how long the launcher waits for one. On a
// busy machine, either may be waiting for a processor. Without the verdict, the launcher takes the first rank
// that ends for the cause.
const VerdictTimeout = 1500 * time.Millisecond

const (
	// MaxBodyBytes is the maximum length of the body of an answer or a report.
	MaxBodyBytes = store.MaxValueBytes - maxHeadBytes
	// MaxReasonBytes is the maximum length of Verdict.Reason. ReportVerdict shortens a reason that is longer.
	MaxReasonBytes = 4 << 10

	maxHeadBytes = 1 << 10
	// maxReports is the maximum number of messages in a queue that the launcher has not read yet. It allows
	// several reports from each rank of the largest job.
	maxReports = 16 << 10
)

// These are the keys in the store.
const (
	keyQuestions = "joblink/questions" // list of open questions; this key exists only if a launcher listens
	keyAnswers   = "joblink/answers"   // queue of answers and verdicts
	keyReports   = "joblink/reports"   // queue of reports
)

// ErrNoLauncher is returned by Report and ReportVerdict if no launcher listens. For example, nothing listens
// to a job whose store is served by "hvdrun store".
var ErrNoLauncher = errors.New("no launcher is listening to this job")

// Link is a rank's connection to its launcher.
type Link interface {
	// Report sends a report of at most MaxBodyBytes to the launcher. It does not wait until the launcher has
	// read the report.
	Report(ctx context.Context, what string, body []byte) error
	// ReportVerdict tells the launcher which ranks have failed.
	ReportVerdict(ctx context.Context, v Verdict) error
	// Introduce tells the launcher the number of this process, with which verdicts distinguish it from other
	// processes that have or have had the same rank.
	Introduce(ctx context.Context, process uint64) error
	// HasListener reports whether a launcher listens.
	HasListener(ctx context.Context) (bool, error)
	// Answer answers the launcher's questions. It returns nil when ctx ends, and an error when the connection
	// is lost. It calls handle for one question at a time, and sends the result to the launcher. If handle
	// returns nil or more than MaxBodyBytes bytes, the launcher learns that this rank has no answer.
	Answer(ctx context.Context, handle func(what string) []byte) error
}

// Verdict says which ranks have failed. Their failure ended an epoch.
type Verdict struct {
	// Epoch is the epoch that failed.
	Epoch uint64 `json:"epoch"`
	// Ranks holds the failed ranks, at least one.
	Ranks []topo.Rank `json:"ranks"`
	// Generation is the generation of an elastic job whose ranks are meant, or 0. The link sets it.
	Generation uint64 `json:"generation,omitempty"`
	// Starting says that the epoch had not begun yet. In an elastic job, a rank may have left such an epoch
	// only because the launcher has begun another generation.
	Starting bool `json:"starting,omitempty"`
	// Process is the number that the process of the failed rank has given to Introduce. It is 0 if the
	// verdict is about whichever process has the rank: others wait for it, or ranks of this job are not
	// started again.
	Process uint64 `json:"process,omitempty"`
	// Over takes back an earlier verdict of the same rank about these ranks: they have not failed after all.
	Over bool `json:"over,omitempty"`
	// Silent says that the ranks have failed only because they did not answer in time. On a busy machine they
	// may be alive.
	Silent bool `json:"silent,omitempty"`
	// Reason explains the failure to users. It is UTF-8 with at most MaxReasonBytes bytes.
	Reason string `json:"reason"`
	// At is when the launcher received the verdict. Ranks leave it empty.
	At time.Time `json:"-"`
}

// question is an element of the list of open questions.
type question struct {
	ID   uint64 `json:"id"`
	What string `json:"what"`
	// Of has the ranks that are asked. The others send no answer. It is empty if all are asked.
	Of []topo.Rank `json:"of,omitempty"`
}

// asks reports whether a rank is asked.
func (q *question) asks(rank int) bool {
	return len(q.Of) == 0 || slices.Contains(q.Of, topo.Rank(rank))
}

// New returns the link of a rank. kv is a client of the launcher's store. The caller must close kv.
func New(kv store.Store, rank int) Link { return &link{kv: kv, rank: rank} }

// NewOf returns the link of a rank of a generation of an elastic job.
func NewOf(generation uint64, kv store.Store, rank int) Link { return &link{kv, rank, generation} }

type link struct {
	kv         store.Store
	rank       int
	generation uint64
}

// NewOfPart returns the link of a rank of a job that has only some of the launcher's processes. numbers has
// the number that the launcher has given to each rank of the job. The link only reports verdicts: it leaves
// questions unanswered, because the launcher would take the operations for those of one job of all processes.
func NewOfPart(kv store.Store, numbers []int, rank int) Link {
	return &part{link{kv: kv, rank: numbers[rank]}, numbers}
}

type part struct {
	link
	numbers []int
}

func (p *part) HasListener(context.Context) (bool, error) { return false, nil }

func (p *part) Report(context.Context, string, []byte) error { return ErrNoLauncher }

func (p *part) ReportVerdict(ctx context.Context, v Verdict) error {
	v.Reason += fmt.Sprintf(" (%s in the job of hvdrun's %s)", topo.FormatRanks(v.Ranks),
		topo.FormatRanks(slices.Sorted(slices.Values(p.numbers))))
	v.Ranks = slices.Clone(v.Ranks)
	for i, r := range v.Ranks {
		v.Ranks[i] = topo.Rank(p.numbers[r])
	}
	return p.link.ReportVerdict(ctx, v)
}

func (p *part) Answer(ctx context.Context, _ func(what string) []byte) error {
	<-ctx.Done()
	return nil
}

func (l *link) failed(what string, err error) error {
	if err != nil {
		err = fmt.Errorf("joblink: rank %d: %s: %w", l.rank, what, err)
	}
	return err
}

func (l *link) HasListener(ctx context.Context) (bool, error) {
	listens, err := l.kv.Check(ctx, keyQuestions)
	return listens, l.failed("asking whether a launcher is listening", err)
}

func (l *link) Report(ctx context.Context, what string, body []byte) error {
	return l.failed("reporting to the launcher",
		l.send(ctx, keyReports, l.message(what, body)))
}

func (l *link) ReportVerdict(ctx context.Context, v Verdict) error {
	if len(v.Reason) > MaxReasonBytes {
		v.Reason = v.Reason[:MaxReasonBytes]
	}
	v.Reason, v.Generation = strings.ToValidUTF8(v.Reason, ""), l.generation
	body, err := json.Marshal(v)
	if err == nil {
		_, err = decodeVerdict(body)
	}
	if err == nil {
		err = l.send(ctx, keyAnswers, l.message(verdict, body))
	}
	return l.failed("reporting the failed ranks to the launcher", err)
}

func (l *link) Introduce(ctx context.Context, number uint64) error {
	err := l.send(ctx, keyAnswers, l.message(process, strconv.AppendUint(nil, number, 10)))
	return l.failed("introducing this process to the launcher", err)
}

// message returns a message of this rank that is not an answer.
func (l *link) message(what string, body []byte) message {
	return message{Rank: l.rank, Generation: l.generation, What: what, Has: true, body: body}
}

func (l *link) send(ctx context.Context, queue string, m message) error {
	text, err := m.encode()
	if err != nil {
		return err
	}
	listens, err := l.kv.Check(ctx, keyQuestions)
	if err != nil {
		return err
	}
	if !listens {
		return ErrNoLauncher
	}
	n, err := l.kv.QueueLen(ctx, queue)
	if err == nil && n >= maxReports {
		err = fmt.Errorf("the launcher has %d unread reports, want fewer than %d", n, maxReports)
	}
	if err != nil {
		return err
	}
	return l.kv.Push(ctx, queue, text)
}

func (l *link) Answer(ctx context.Context, handle func(what string) []byte) error {
	return l.failed("answering the launcher", unlessOver(ctx, l.answer(ctx, handle)))
}

func (l *link) answer(ctx context.Context, handle func(what string) []byte) error {
	var list []byte
	var err error
	for last := uint64(0); ; {
		if list, err = l.kv.Watch(ctx, keyQuestions, list); err != nil {
			return err
		}
		questions, err := decodeQuestions(list)
		if err != nil {
			return err
		}
		for _, q := range questions {
			if q.ID <= last {
				continue
			}
			last = q.ID
			if !q.asks(l.rank) {
				continue
			}
			if err := l.reply(ctx, q.ID, handle(q.What)); err != nil {
				return err
			}
		}
	}
}

func (l *link) reply(ctx context.Context, question uint64, body []byte) error {
	m := message{Rank: l.rank, Generation: l.generation, Question: question, Has: body != nil, body: body}
	text, err := m.encode()
	if err == nil {
		if err = l.kv.Push(ctx, keyAnswers, text); !errors.Is(err, store.ErrLimit) {
			return err
		}
	}
	// The answer is too long, or the store has no room for it. A message without a body says that this rank
	// has no answer.
	m.Has, m.body = false, nil
	if text, err = m.encode(); err != nil {
		return err
	}
	if err = l.kv.Push(ctx, keyAnswers, text); errors.Is(err, store.ErrLimit) {
		return nil
	}
	return err
}

// unlessOver returns nil if ctx has ended, because then the end of ctx has caused err. Otherwise it returns
// err.
func unlessOver(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// Launcher is the launcher's end of the links to the ranks of a job.
type Launcher struct {
	kv     *store.HashStore
	cancel context.CancelFunc
	wg     sync.WaitGroup
	ended  chan struct{} // closed when the launcher has stopped reading answers; the field err is the reason

	mu         sync.Mutex
	err        error
	last       uint64
	ranks      int
	generation uint64 // of an elastic job, or 0
	// onVerdict, if not nil, is called with each verdict, which is not kept, and with the rank that has
	// reported it.
	onVerdict func(v Verdict, by topo.Rank)
	open      []*inquiry
	// verdicts has those of one epoch, at most one of each rank, in the order in which they have arrived. The
	// first one counts.
	verdicts []accusation
	begun    uint64        // the newest epoch that all ranks have joined
	decided  chan struct{} // closed when verdicts has an element
	news     chan struct{} // closed when the first element of verdicts changes
	// newest has the number of the newest process of each rank that was started again. It is 0 if that
	// process has not introduced itself yet.
	newest map[int]uint64
}

// accusation is a verdict and the rank that has reported it.
type accusation struct {
	Verdict
	by      int
	doubted bool // the ranks of the verdict have turned out to take part in the job
}

// inquiry is a question together with the answers for which the launcher waits.
type inquiry struct {
	question
	pending map[int]bool // the ranks that have not answered yet
	answers map[int][]byte
	done    chan struct{} // closed when pending is empty
}

// Listen receives answers, verdicts and reports from the ranks of a job through the store kv, until Close is
// called. It calls handle with each report, in one goroutine, but not with answers or verdicts. handle may
// call Ask.
func Listen(kv *store.HashStore, ranks int,
	handle func(rank int, what string, body []byte)) (*Launcher, error) {
	l := &Launcher{kv: kv, ranks: ranks, ended: make(chan struct{}), decided: make(chan struct{}),
		news: make(chan struct{}), newest: make(map[int]uint64)}
	if err := l.publish(); err != nil {
		return nil, fmt.Errorf("joblink: listen: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.wg.Go(func() {
		defer close(l.ended)
		l.note(l.read(ctx, keyAnswers, l.take))
	})
	l.wg.Go(func() {
		l.note(l.read(ctx, keyReports, func(m message) {
			if l.isCurrent(m) {
				handle(m.Rank, m.What, m.body)
			}
		}))
	})
	return l, nil
}

// Close stops receiving messages. It first processes the messages that are already in the queues. If the
// store had an error, Close returns it.
func (l *Launcher) Close() error {
	l.cancel()
	l.wg.Wait()
	return l.Err()
}

// Err returns the error that made the launcher stop receiving messages. While the launcher receives messages,
// and after a Close without an error, Err returns nil.
func (l *Launcher) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

func (l *Launcher) note(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil && l.err == nil {
		l.err = fmt.Errorf("joblink: receiving from the ranks: %w", err)
	}
}

// read calls the function take with each message of a queue until ctx ends, and then with the remaining
// messages in the queue. It drops malformed messages.
func (l *Launcher) read(ctx context.Context, queue string, take func(message)) error {
	for {
		b, err := l.kv.Pop(ctx, queue)
		if err != nil && ctx.Err() != nil {
			var more bool
			if b, more, err = l.kv.TryPop(context.WithoutCancel(ctx), queue); !more {
				return err
			}
		}
		if err != nil {
			return err
		}
		if m, err := decodeMessage(b); err == nil {
			take(m)
		}
	}
}

// take processes an answer, a verdict or the number of a process.
func (l *Launcher) take(m message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch m.What {
	case verdict:
		v, err := decodeVerdict(m.body)
		switch {
		case l.onVerdict != nil:
			if err == nil && !v.Over {
				l.onVerdict(v, topo.Rank(m.Rank))
			}
		case err != nil || !l.isPossible(v, m.Rank) || l.isOld(v):
		case v.Over:
			l.forget(func(a accusation) bool { return a.by == m.Rank && slices.Equal(a.Ranks, v.Ranks) })
		default:
			l.accuse(v, m.Rank)
		}
		return
	case process:
		if number, err := strconv.ParseUint(string(m.body), 10, 64); err == nil && l.isRestarted(m.Rank) {
			l.newest[m.Rank] = number
		}
		return
	}
	for _, q := range l.open {
		if q.ID != m.Question || !q.pending[m.Rank] || m.Generation != l.generation {
			continue
		}
		delete(q.pending, m.Rank)
		if m.Has {
			q.answers[m.Rank] = m.body
		}
		if len(q.pending) == 0 {
			close(q.done)
		}
	}
}

// OnVerdict makes the launcher call handle with each verdict from now on, instead of keeping it, and with the
// rank of v.Generation that has reported it. handle must not block. It is for elastic jobs, which go on after
// a verdict.
func (l *Launcher) OnVerdict(handle func(v Verdict, by topo.Rank)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.onVerdict = handle
}

// SetRanks tells that an elastic job has begun a generation with the given number of ranks. From then on, the
// launcher drops answers and reports of earlier generations. The open questions are for the new ranks.
func (l *Launcher) SetRanks(generation uint64, ranks int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.generation, l.ranks = generation, ranks
	for _, q := range l.open {
		if len(q.Of) == 0 && len(q.pending) > 0 {
			q.pending = setOf(ranks)
			clear(q.answers)
		}
	}
}

// setOf returns the set of the first n ranks.
func setOf(n int) map[int]bool {
	set := make(map[int]bool, n)
	for r := range n {
		set[r] = true
	}
	return set
}

// isCurrent reports whether m is of the newest generation.
func (l *Launcher) isCurrent(m message) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return m.Generation == l.generation
}

// isPossible reports whether v is about ranks of the job and by is one of them. The caller holds l.mu.
func (l *Launcher) isPossible(v Verdict, by int) bool {
	return by >= 0 && by < l.ranks && len(v.Ranks) <= l.ranks && int(slices.Max(v.Ranks)) < l.ranks
}

// isOld reports whether v is about an earlier process of a rank that was started again. The caller holds
// l.mu.
func (l *Launcher) isOld(v Verdict) bool {
	return slices.ContainsFunc(v.Ranks, func(r topo.Rank) bool {
		return l.isRestarted(int(r)) && v.Process != 0 && l.newest[int(r)] != v.Process
	})
}

// isRestarted reports whether the rank was started again. The caller holds l.mu.
func (l *Launcher) isRestarted(rank int) bool {
	_, is := l.newest[rank]
	return is
}

// Restarted is called when the process of a rank has ended, before the rank is started again. From then on,
// verdicts about the rank count only if they are about the new process.
func (l *Launcher) Restarted(rank int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.newest[rank] = 0
	l.forget(func(a accusation) bool { return slices.Contains(a.Ranks, topo.Rank(rank)) })
}

// Begin is called when all ranks have joined an epoch. So they have survived the failures of earlier epochs,
// and of attempts to join this one, whose verdicts do not count any more.
func (l *Launcher) Begin(epoch uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun = max(l.begun, epoch)
	l.forget(func(a accusation) bool { return a.Epoch < l.begun || a.Starting && a.Epoch == l.begun })
}

// accuse adds the verdict v of a rank, unless v is of an earlier epoch, the rank has reported another one, or
// v says that a rank is silent that has blamed others. The caller holds l.mu.
func (l *Launcher) accuse(v Verdict, by int) {
	a := accusation{Verdict: v, by: by}
	// A process that was started after another program of the same job does not know the epochs of that
	// program, so if it cannot join, its verdict has the number of an earlier one.
	if v.Epoch < l.begun && !v.Starting || v.Epoch < first(l.verdicts).Epoch {
		return
	}
	l.forget(func(b accusation) bool { return b.doubted || b.Epoch < v.Epoch || a.refutes(b) })
	if slices.ContainsFunc(l.verdicts, func(b accusation) bool { return b.by == by || b.refutes(a) }) {
		return
	}
	a.At = time.Now()
	l.set(append(l.verdicts, a))
}

// refutes reports whether b says that the rank which has reported a is silent, although that rank has blamed
// others in the same epoch.
func (a accusation) refutes(b accusation) bool {
	by := topo.Rank(a.by)
	return b.Silent && a.Epoch == b.Epoch && slices.Contains(b.Ranks, by) && !slices.Contains(a.Ranks, by)
}

// forget drops the verdicts for which drop returns true. The caller holds l.mu.
func (l *Launcher) forget(drop func(accusation) bool) {
	l.set(slices.DeleteFunc(slices.Clone(l.verdicts), drop))
}

// set sets the verdicts to all. The caller holds l.mu.
func (l *Launcher) set(all []accusation) {
	before, now := first(l.verdicts), first(all)
	switch l.verdicts = all; {
	case before.Ranks == nil && now.Ranks != nil:
		close(l.decided)
	case before.Ranks != nil && now.Ranks == nil:
		l.decided = make(chan struct{})
	}
	if !now.At.Equal(before.At) {
		close(l.news)
		l.news = make(chan struct{})
	}
}

// first returns the first one of all, or the zero value if there is none.
func first(all []accusation) (a accusation) {
	if len(all) > 0 {
		a = all[0]
	}
	return a
}

// Verdict waits until a rank has reported a verdict, and returns it.
func (l *Launcher) Verdict(ctx context.Context) (Verdict, error) {
	for over := false; ; {
		l.mu.Lock()
		now, decided, err := first(l.verdicts), l.decided, l.err
		l.mu.Unlock()
		switch {
		case now.Ranks != nil:
			return now.Verdict, nil
		case over:
			return Verdict{}, fmt.Errorf("joblink: waiting for a verdict: the launcher has stopped receiving: %w",
				cmp.Or(err, store.ErrClosed))
		}
		select {
		case <-decided:
		case <-l.ended:
			over = true
		case <-ctx.Done():
			return Verdict{}, fmt.Errorf("joblink: waiting for a verdict: %w", ctx.Err())
		}
	}
}

// Doubt is called if the ranks that v names turn out to take part in the job. Then the verdict of another
// rank, or else the next one, replaces v.
func (l *Launcher) Doubt(v Verdict) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := first(l.verdicts); now.Ranks == nil || !now.At.Equal(v.At) {
		return
	}
	if len(l.verdicts) > 1 {
		l.set(slices.Clone(l.verdicts[1:]))
	} else {
		l.verdicts[0].doubted = true
	}
}

// Accused returns the ranks that the verdict names, unless it is doubted.
func (l *Launcher) Accused() []topo.Rank {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := first(l.verdicts); !now.doubted {
		return now.Ranks
	}
	return nil
}

// Accusation waits until there is a verdict that is not doubted, and returns it. It returns false if ctx ends
// first, or the launcher has stopped receiving.
func (l *Launcher) Accusation(ctx context.Context) (Verdict, bool) {
	for {
		l.mu.Lock()
		now, news := first(l.verdicts), l.news
		l.mu.Unlock()
		if now.Ranks != nil && !now.doubted {
			return now.Verdict, ctx.Err() == nil
		}
		select {
		case <-news:
		case <-l.ended:
			return Verdict{}, false
		case <-ctx.Done():
			return Verdict{}, false
		}
	}
}

// Ask asks the ranks in the parameter of, or all if there are none, and waits until they have answered or ctx
// ends. answers[r] is the answer of rank r. missing holds, in ascending order, those that have not answered
// or have no answer. err is an error of the store; the end of ctx is not an error. If err is not nil, Ask
// also returns the answers that it has received so far.
//
// Ask holds all answers in memory, each of at most MaxBodyBytes.
func (l *Launcher) Ask(ctx context.Context, what string, of ...topo.Rank) (answers map[int][]byte,
	missing []int, err error) {
	q := &inquiry{question: question{What: what, Of: of}, answers: make(map[int][]byte),
		done: make(chan struct{})}
	l.mu.Lock()
	q.pending = setOf(l.ranks)
	maps.DeleteFunc(q.pending, func(r int, _ bool) bool {
		return !q.asks(r)
	})
	l.last++
	q.ID = l.last
	l.open = append(l.open, q)
	err = l.publish()
	l.mu.Unlock()
	if err == nil {
		select {
		case <-q.done:
		case <-ctx.Done():
		case <-l.ended:
			err = l.Err()
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = slices.DeleteFunc(l.open, func(other *inquiry) bool { return other == q })
	if err = errors.Join(unlessOver(ctx, err), l.publish()); err != nil {
		err = fmt.Errorf("joblink: asking the ranks for %.64q: %w", what, err)
	}
	for r := range l.ranks {
		if _, ok := q.answers[r]; !ok && q.asks(r) {
			missing = append(missing, r)
		}
	}
	return q.answers, missing, err
}

// publish writes the list of open questions to the store. The caller must hold l.mu, unless no other
// goroutine uses l yet.
func (l *Launcher) publish() error {
	list := []question{}
	for _, q := range l.open {
		list = append(list, q.question)
	}
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	return l.kv.Set(context.Background(), keyQuestions, text)
}

func decodeQuestions(text []byte) ([]question, error) {
	var list []question
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("malformed list of questions: %w", err)
	}
	return list, nil
}

func decodeVerdict(text []byte) (Verdict, error) {
	var v Verdict
	if err := json.Unmarshal(text, &v); err != nil {
		return Verdict{}, fmt.Errorf("malformed verdict: %w", err)
	}
	if len(v.Ranks) == 0 {
		return Verdict{}, errors.New("malformed verdict: it names no rank")
	}
	if r := slices.Min(v.Ranks); r < 0 || len(v.Reason) > MaxReasonBytes {
		return Verdict{}, fmt.Errorf("malformed verdict: got rank %d and a reason of %d bytes, want no negative rank and at most %d bytes",
			r, len(v.Reason), MaxReasonBytes)
	}
	return v, nil
}

// message is an answer to a question. If Question is 0, it is a report. It is encoded as a line of JSON
// followed by the body.
type message struct {
	Rank       int    `json:"rank"`
	Generation uint64 `json:"generation,omitempty"` // of an elastic job, or 0
	Question   uint64 `json:"question"`
	What       string `json:"what"`
	Has        bool   `json:"has"` // whether the message has a body, which may be empty
	body       []byte
}

func (m *message) encode() ([]byte, error) {
	head, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(head) >= maxHeadBytes || len(m.body) > MaxBodyBytes {
		return nil, fmt.Errorf("message %.64[2]q: got a body of %[1]d bytes, want at most %[3]d", len(m.body), m.What,
			MaxBodyBytes)
	}
	return append(append(head, '\n'), m.body...), nil
}

func decodeMessage(b []byte) (m message, err error) {
	head, body, ok := bytes.Cut(b, []byte("\n"))
	if !ok {
		return m, fmt.Errorf("malformed message of %d bytes: it has no header line", len(b))
	}
	if err := json.Unmarshal(head, &m); err != nil {
		return m, fmt.Errorf("malformed message: %w", err)
	}
	m.body = body
	return m, nil
}
