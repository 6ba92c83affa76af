// Package launch starts the ranks of a job, on this host and on others, supervises them and tells how it went. It needs Linux.
//
// Invariants:
//
//  1. When Run has returned, no process of the job is alive, in whatever process group or session, except those it
//     names in its error, and those on a host that was lost, which are gone when that has heard nothing for Options.Liveness.
//     The same holds soon after the launcher, an agent or a helper was killed by SIGKILL.
//  2. The job's status is not 0 if a rank failed.
//  3. What the ranks print and whether anybody reads it takes bounded memory and delays no signal.
//  4. Every wait of the supervision has a deadline once a rank has failed, a signal came or all commands have ended.
//
// Each rank has a helper process (see HelperMain), which is its subreaper and holds a pipe from the launcher: the
// pipe's end tells it that the launcher is gone. The launcher is a subreaper in turn, for the orphans of a helper
// that was killed.
//
// Each host has an agent, which has the helpers. The launcher's own host has it in the launcher's process, and on another one the
// launcher starts it by a command such as ssh (see AgentMain). They speak over a pipe, or the command's standard input and output
// (wire.go). The end of its connection, or silence, tells the agent that the launcher is gone.
package launch

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/internal/joblink"
)

// MaxRanks bounds Options.NP.
const MaxRanks = 4096

// Exit statuses that are not a rank's.
const (
	statusNotExecutable = 126
	statusNotFound      = 127
	statusSignal        = 128 // plus the signal's number
)

// Options says what to run. Zero durations have the default.
type Options struct {
	// NP is the number of ranks, 1 to MaxRanks.
	NP int
	// Hosts have the ranks, in the order of Assign. None is this host, by its own name.
	Hosts []Host
	// Command is what each rank runs. Its first word is looked up in the ranks' PATH, on the host that it is to run on.
	Command []string
	// Env is the environment of the ranks, NAME=value; what places a rank in the job is added or replaced.
	Env []string
	// Set is added to Env or replaces it, NAME=value. It cannot set what places a rank in the job.
	Set []string

	// Verdict waits until ctx ends for what the surviving ranks say of those that failed; nil if they cannot say anything.
	Verdict func(ctx context.Context) (joblink.Verdict, error)
	// StoreAddrs are where the ranks reach the store, at least one. If the ranks are not all on this host each host tries them,
	// and one that works will do.
	StoreAddrs []netip.AddrPort
	// Secret is the text of the job's secret, which the ranks get in their environment, and TLS says that the store takes
	// connections by TLS alone.
	Secret string
	TLS    bool
	// TorchStore is where the ranks reach a TCPStore of PyTorch's protocol, through which their torch.distributed meets. If
	// there is none they are told nothing of it.
	TorchStore netip.AddrPort

	// Stdout and Stderr get the ranks' output and the report, written by one goroutine. If a Write hangs, a signal
	// or ctx lets Run return without it and the goroutine goes on; otherwise all is written when Run returns.
	Stdout, Stderr io.Writer
	// NoPrefix leaves out the [rank]<stdout>: in front of each line, Timestamp puts the time in front of it.
	NoPrefix, Timestamp bool
	// OutputDir, if not empty, gets the output as it is in rank.R/stdout and rank.R/stderr, R zero-padded.
	OutputDir string
	// Verbose tells on Stderr what the launcher does.
	Verbose bool

	// Signals are those that the launcher gets. SIGINT, SIGTERM and SIGHUP end the job, others are forwarded to the
	// ranks' process groups. A second one of the three kills the ranks, unless it is the first one again within half a second.
	Signals <-chan os.Signal

	// Inquiry, if not nil, has SIGQUIT print what the ranks are at, instead of passing it on.
	Inquiry *Inquiry

	// Reach, needed for other hosts, is the command that runs words on one: ssh for instance. Its first word is looked up in PATH. The
	// command's standard input and output must be those of what it runs, and it must end when that does.
	Reach func(host string, words []string) []string
	// AgentPath is the program that calls AgentMain on the other hosts.
	AgentPath string
	// Start is how long it may take until all hosts are ready: 30 s.
	Start time.Duration
	// Liveness is how long launcher and agent may hear nothing of each other: 10 s. Then the launcher takes the host for lost, and
	// the agent kills its ranks. It is 3 s at least.
	Liveness time.Duration

	// Notice is how long ranks may take to end by themselves after one has failed: 5 s.
	Notice time.Duration
	// Grace is how long ranks that were sent a signal may take to end before SIGKILL: 5 s.
	Grace time.Duration
	// Echo is how soon after a signal an equal one counts as the same: 500 ms, sooner than somebody has read that once more kills, and
	// presses the key.
	Echo time.Duration
	// Kill is how long processes that were sent SIGKILL may take to be gone: 5 s. After it the helpers are killed as
	// well, and as long again after that Run gives up.
	Kill time.Duration
}

// OptionError says which option cannot be used. Nothing was started.
type OptionError struct{ Text string }

func (e *OptionError) Error() string { return "launch: " + e.Text }

// CommandError says that the command could not be started. No rank runs.
type CommandError struct {
	Command string
	Host    string // empty if all ranks are on this one
	Status  int    // as a shell gives it: 127 for not found, 126 for not executable
	Err     error
}

func (e *CommandError) Error() string {
	if e.Host != "" {
		return fmt.Sprintf("launch: command %q on host %s: %v", e.Command, e.Host, e.Err)
	}
	return fmt.Sprintf("launch: command %q: %v", e.Command, e.Err)
}

func (e *CommandError) Unwrap() error { return e.Err }

// HostError says that no ranks could be started on a host. No rank runs.
type HostError struct {
	Host string
	Err  error
}

func (e *HostError) Error() string { return fmt.Sprintf("launch: host %s: %v", e.Host, e.Err) }

func (e *HostError) Unwrap() error { return e.Err }

func newCommandError(command string, err error) *CommandError {
	status := statusNotExecutable
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		status = statusNotFound
	}
	return &CommandError{Command: command, Status: status, Err: err}
}

// Result is how the job ended.
type Result struct {
	// Status is the exit status for the launcher: the root cause's (128+n for signal n), 128+n if signal n ended the
	// job before any rank failed, else 0.
	Status int
	// Signal is the one that ended the job before any rank failed, or 0.
	Signal syscall.Signal
	// Ranks is how each rank ended.
	Ranks []Exit
	// Roots are the ranks that caused the failure: those that the survivors' verdict names, or the one that failed
	// first. Empty if none failed.
	Roots []int
	// Verdict is the survivors' finding; nil if they left none or none failed.
	Verdict *joblink.Verdict
}

// Exit is how one rank ended.
type Exit struct {
	// Host is where it ran.
	Host string
	// PID is the command's process; 0 if its helper was killed before it could tell.
	PID int
	// Code is the exit status; Signal, if not 0, is what killed the command instead.
	Code   int
	Signal syscall.Signal
	// Sent is the last signal by which the launcher had asked it to end, or 0.
	Sent syscall.Signal
	// Lost says that the helper was killed; its command died with it. Or its host was lost, for the reason Why: then nothing is
	// known of the command, and Signal is SIGKILL all the same.
	Lost bool
	Why  string
	// At is when it ended by this host's clock, or when its host was last heard.
	At time.Time
	// Stderr is its last lines on standard error, at most 20.
	Stderr []string
}

// Status returns e as a shell gives it.
func (e Exit) Status() int {
	if e.Signal != 0 {
		return statusSignal + int(e.Signal)
	}
	return e.Code
}

// Run runs the job and reports a failure on o.Stderr. The result is that of the ranks; the error says that some could not be
// started (*OptionError, *CommandError, *HostError), that the launcher itself failed, or ctx's cause when ctx has ended the job,
// as a SIGTERM would have. All that was started is gone in either case, but for processes named in the error.
//
// The calling process must start no other child during Run: Run waits for all of them, and makes the process a subreaper for
// good (prctl(2)). Its executable must call HelperMain and AgentMain. Each rank costs two goroutines and, on this host, a helper
// process, four file descriptors and three goroutines more; each other host an agent's command, three file descriptors and
// seven goroutines.
func Run(ctx context.Context, o Options) (Result, error) {
	o.Notice = cmp.Or(o.Notice, 5*time.Second)
	o.Grace = cmp.Or(o.Grace, 5*time.Second)
	o.Kill = cmp.Or(o.Kill, 5*time.Second)
	o.Echo = cmp.Or(o.Echo, 500*time.Millisecond)
	o.Start = cmp.Or(o.Start, 30*time.Second)
	o.Liveness = max(cmp.Or(o.Liveness, 10*time.Second), minLiveness)
	if o.NP < 1 || o.NP > MaxRanks {
		return Result{}, &OptionError{fmt.Sprintf("number of ranks: got %d, want 1 to %d", o.NP, MaxRanks)}
	}
	if len(o.Command) == 0 || o.Command[0] == "" {
		return Result{}, &OptionError{"command: got none, want a program to run"}
	}
	if len(o.Hosts) == 0 {
		host, err := os.Hostname()
		if err != nil {
			return Result{}, fmt.Errorf("launch: name of this host: %w", err)
		}
		o.Hosts = []Host{{Name: host, Slots: o.NP}}
	}
	places, err := Assign(o.Hosts, o.NP)
	if err != nil {
		return Result{}, &OptionError{err.Error()}
	}
	var id [16]byte
	rand.Read(id[:]) // never fails
	j := &job{
		o: o, places: places, hosts: places[o.NP-1].Host + 1, id: hex.EncodeToString(id[:]), policy: endAll,
		events: make(chan func()), done: make(chan struct{}), surveyed: make(chan struct{}, 1),
	}
	j.several = j.hosts > 1 || !IsThisHost(o.Hosts[0].Name)
	placing := slices.Concat(j.rankVariables(0), storeVariables(netip.AddrPort{}))
	if j.env, err = merge(without(o.Env, j.torchVariables(0)), o.Set, placing); err != nil {
		return Result{}, err
	}
	return j.run(ctx)
}

// rankVariables place rank r in the job.
func (j *job) rankVariables(r int) []string {
	p := j.places[r]
	return []string{
		"HOROVOD_RANK=" + strconv.Itoa(p.Rank),
		"HOROVOD_SIZE=" + strconv.Itoa(p.Size),
		"HOROVOD_LOCAL_RANK=" + strconv.Itoa(p.LocalRank),
		"HOROVOD_LOCAL_SIZE=" + strconv.Itoa(p.LocalSize),
		"HOROVOD_CROSS_RANK=" + strconv.Itoa(p.CrossRank),
		"HOROVOD_CROSS_SIZE=" + strconv.Itoa(p.CrossSize),
		"HOROVOD_HOSTNAME=" + j.o.Hosts[p.Host].Name,
		"HVD_JOB_ID=" + j.id,
		"HVD_SECRET=" + j.o.Secret,
	}
}

// storeVariables say where the job's store is.
func storeVariables(addr netip.AddrPort) []string {
	return []string{
		"HOROVOD_GLOO_RENDEZVOUS_ADDR=" + addr.Addr().String(),
		"HOROVOD_GLOO_RENDEZVOUS_PORT=" + strconv.Itoa(int(addr.Port())),
	}
}

// nameOf returns the name of a variable, NAME=value.
func nameOf(v string) string {
	name, _, _ := strings.Cut(v, "=")
	return name
}

// has reports whether a variable with a name is among vars.
func has(vars []string, name string) bool {
	return slices.ContainsFunc(vars, func(v string) bool { return nameOf(v) == name })
}

// without returns env without the variables that vars name.
func without(env, vars []string) []string {
	named := make(map[string]bool, len(vars)) // there may be thousands, as in a pod of a large cluster
	for _, v := range vars {
		named[nameOf(v)] = true
	}
	return slices.DeleteFunc(slices.Clone(env), func(v string) bool { return named[nameOf(v)] })
}

// torchVariables returns what torch.distributed wants of a launcher. A user who sets one of them has another meeting place in
// mind, and keeps it.
func (j *job) torchVariables(r int) []string {
	addr, p := j.o.TorchStore, j.places[r]
	if !addr.IsValid() {
		return nil
	}
	return without([]string{
		"MASTER_ADDR=" + addr.Addr().String(),
		"MASTER_PORT=" + strconv.Itoa(int(addr.Port())),
		"RANK=" + strconv.Itoa(p.Rank),
		"WORLD_SIZE=" + strconv.Itoa(p.Size),
		"LOCAL_RANK=" + strconv.Itoa(p.LocalRank),
		"LOCAL_WORLD_SIZE=" + strconv.Itoa(p.LocalSize),
		"GROUP_RANK=" + strconv.Itoa(p.Host),
		"GROUP_WORLD_SIZE=" + strconv.Itoa(j.hosts),
		// The store is there already, so that rank 0 need not serve one.
		"TORCHELASTIC_USE_AGENT_STORE=True",
		"TORCHELASTIC_RESTART_COUNT=0",
	}, j.o.Set)
}

// merge returns the environment of all ranks: inherited, without what set and placing name, then set. Of equal names in set
// the last counts.
func merge(inherited, set, placing []string) ([]string, error) {
	env := without(inherited, placing)
	// Output is prefixed line by line, so it should come line by line.
	for _, v := range append([]string{"PYTHONUNBUFFERED=1"}, set...) {
		switch name := nameOf(v); {
		case name == "" || !strings.Contains(v, "=") || strings.Contains(v, "\x00"):
			return nil, &OptionError{fmt.Sprintf("environment: got %q, want NAME=value", v)}
		case has(placing, name):
			return nil, &OptionError{fmt.Sprintf("environment: %s is set by the launcher itself", name)}
		}
		env = append(without(env, []string{v}), v)
	}
	return env, nil
}

// lookPath finds a program in the PATH of env, if its name has no slash.
func lookPath(file string, env []string) (string, error) {
	err := error(exec.ErrNotFound)
	candidates := []string{file}
	if !strings.Contains(file, "/") {
		candidates = nil
		for _, dir := range filepath.SplitList(valueOf(env, "PATH")) {
			// What a relative one names depends on where a rank happens to be.
			if filepath.IsAbs(dir) {
				candidates = append(candidates, filepath.Join(dir, file))
			}
		}
	}
	for _, c := range candidates {
		var path string
		if path, err = exec.LookPath(c); err == nil {
			return path, nil
		}
		if lookup, ok := errors.AsType[*exec.Error](err); ok {
			err = lookup.Err // the rest is said by who reports it
		}
	}
	if len(candidates) != 1 || candidates[0] != file {
		err = exec.ErrNotFound
	}
	return "", err
}

// valueOf returns the last value of a variable in env.
func valueOf(env []string, name string) (value string) {
	for _, v := range env {
		if text, ok := strings.CutPrefix(v, name+"="); ok {
			value = text
		}
	}
	return value
}

// rank is one rank, for the supervisor, whose goroutine it belongs to.
type rank struct {
	number  int
	conn    *agentConn
	streams [2]*stream

	exit  Exit
	ended bool // exit is known
	gone  bool // so is the helper's end
}

// makeRanks makes the ranks with the files of their output, and the connections to their hosts.
func (j *job) makeRanks() error {
	for _, h := range j.o.Hosts[:j.hosts] {
		c := &agentConn{host: h.Name, local: IsThisHost(h.Name), orders: make(chan order, maxOrders)}
		if !c.local {
			c.liveness = j.o.Liveness
		}
		j.conns = append(j.conns, c)
	}
	j.waiting, j.open = j.hosts, j.hosts
	for r, p := range j.places {
		k := &rank{number: r, conn: j.conns[p.Host], exit: Exit{Host: j.o.Hosts[p.Host].Name}}
		k.conn.ranks, j.ranks = append(k.conn.ranks, k), append(j.ranks, k)
		dir := filepath.Join(j.o.OutputDir, fmt.Sprintf("rank.%0*d", len(strconv.Itoa(j.o.NP-1)), r))
		for i, name := range [2]string{"stdout", "stderr"} {
			s := &stream{console: j.console, err: i == 1, timestamp: j.o.Timestamp}
			k.streams[i] = s
			if !j.o.NoPrefix {
				s.prefix = fmt.Sprintf("[%d]<%s>:", r, name)
			}
			if s.err {
				s.tail = new(tail)
			}
			if j.o.OutputDir == "" {
				continue
			}
			err := os.MkdirAll(dir, 0o777)
			if err == nil {
				s.file, err = os.Create(filepath.Join(dir, name))
			}
			if err != nil {
				return fmt.Errorf("launch: output files: %w", err)
			}
		}
	}
	return nil
}
