// Package launch starts the ranks of a job on this host, supervises them and tells how it went. It needs Linux.
//
// Invariants:
//
//  1. When Run has returned, no process of the job is alive, in whatever process group or session, except those it
//     names in its error. The same holds soon after the launcher or a helper was killed by SIGKILL.
//  2. The job's status is not 0 if a rank failed.
//  3. What the ranks print and whether anybody reads it takes bounded memory and delays no signal.
//  4. Every wait of the supervision has a deadline once a rank has failed, a signal came or all commands have ended.
//
// Each rank has a helper process (see HelperMain), which is its subreaper and holds a pipe from the launcher: the
// pipe's end tells it that the launcher is gone. The launcher is a subreaper in turn, for the orphans of a helper
// that was killed.
package launch

import (
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

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/verdict"
	"github.com/gohvd/gohvd/topo"
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
	// Command is what each rank runs. Its first word is looked up in the launcher's PATH.
	Command []string
	// Env is the environment of the ranks, NAME=value; what places a rank in the job is added or replaced.
	Env []string
	// Set is added to Env or replaces it, NAME=value. It cannot set what places a rank in the job.
	Set []string

	// Store is the job's store in this process and StoreAddr where ranks reach it. The caller closes it after Run.
	Store     verdict.Reader
	StoreAddr netip.AddrPort
	// Secret is the text of the job's secret, which the ranks get in their environment.
	Secret string
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
	// ranks' process groups.
	Signals <-chan os.Signal

	// Notice is how long ranks may take to end by themselves after one has failed: 5 s.
	Notice time.Duration
	// Grace is how long ranks that were sent a signal may take to end before SIGKILL: 5 s.
	Grace time.Duration
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
	Status  int // as a shell gives it: 127 for not found, 126 for not executable
	Err     error
}

func (e *CommandError) Error() string { return fmt.Sprintf("launch: command %q: %v", e.Command, e.Err) }

func (e *CommandError) Unwrap() error { return e.Err }

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
	Verdict *verdict.Verdict
}

// Exit is how one rank ended.
type Exit struct {
	// PID is the command's process; 0 if its helper was killed before it could tell.
	PID int
	// Code is the exit status; Signal, if not 0, is what killed the command instead.
	Code   int
	Signal syscall.Signal
	// Sent is the last signal by which the launcher had asked it to end, or 0.
	Sent syscall.Signal
	// Lost says that the helper was killed; its command died with it.
	Lost bool
	// At is when it ended.
	At time.Time
	// Stderr is its last lines on standard error, at most 20.
	Stderr []string
}

// Status is e as a shell gives it.
func (e Exit) Status() int {
	if e.Signal != 0 {
		return statusSignal + int(e.Signal)
	}
	return e.Code
}

// Run runs the job and reports a failure on o.Stderr. The result is that of the ranks; the error says that some could not be
// started (*OptionError, *CommandError), that the launcher itself failed, or ctx's cause when ctx has ended the job,
// as a SIGTERM would have. All that was started is gone in either case, but for processes named in the error.
//
// The calling process must start no other child during Run: Run waits for all of them, and makes the process a subreaper for
// good (prctl(2)). Its executable must call HelperMain. Each rank costs a helper process, four file
// descriptors and three goroutines.
func Run(ctx context.Context, o Options) (Result, error) {
	o.Notice = orDefault(o.Notice)
	o.Grace = orDefault(o.Grace)
	o.Kill = orDefault(o.Kill)
	if o.NP < 1 || o.NP > MaxRanks {
		return Result{}, &OptionError{fmt.Sprintf("number of ranks: got %d, want 1 to %d", o.NP, MaxRanks)}
	}
	if len(o.Command) == 0 || o.Command[0] == "" {
		return Result{}, &OptionError{"command: got none, want a program to run"}
	}
	host, err := os.Hostname()
	if err != nil {
		return Result{}, fmt.Errorf("launch: name of this host: %w", err)
	}
	var id [16]byte
	rand.Read(id[:]) // never fails
	j := &job{
		o:       o,
		host:    host,
		id:      hex.EncodeToString(id[:]),
		events:  make(chan event, maxEvents*o.NP),
		settled: make(chan struct{}),
	}
	if j.env, err = merge(without(o.Env, torchVariables(0, &o)), o.Set, rankVariables(0, &o, j.host, j.id)); err != nil {
		return Result{}, err
	}
	if j.path, err = exec.LookPath(o.Command[0]); err != nil {
		var lookup *exec.Error
		if errors.As(err, &lookup) {
			err = lookup.Err // the rest is said by CommandError
		}
		return Result{}, newCommandError(o.Command[0], err)
	}
	return j.run(ctx)
}

func orDefault(d time.Duration) time.Duration {
	if d == 0 {
		return 5 * time.Second
	}
	return d
}

// rankVariables places rank r in the job.
func rankVariables(r int, o *Options, host, id string) []string {
	rank, size := strconv.Itoa(r), strconv.Itoa(o.NP)
	return []string{
		"HOROVOD_RANK=" + rank,
		"HOROVOD_SIZE=" + size,
		"HOROVOD_LOCAL_RANK=" + rank,
		"HOROVOD_LOCAL_SIZE=" + size,
		"HOROVOD_CROSS_RANK=0",
		"HOROVOD_CROSS_SIZE=1",
		"HOROVOD_HOSTNAME=" + host,
		"HOROVOD_GLOO_RENDEZVOUS_ADDR=" + o.StoreAddr.Addr().String(),
		"HOROVOD_GLOO_RENDEZVOUS_PORT=" + strconv.Itoa(int(o.StoreAddr.Port())),
		"HVD_JOB_ID=" + id,
		"HVD_SECRET=" + o.Secret,
	}
}

// without is env without the variables that vars name.
func without(env, vars []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.ContainsFunc(vars, func(other string) bool { return strings.HasPrefix(other, name+"=") })
	})
}

// torchVariables are what torch.distributed wants of a launcher. A user who sets one of them has another meeting place in
// mind, and keeps it.
func torchVariables(r int, o *Options) (vars []string) {
	if !o.TorchStore.IsValid() {
		return nil
	}
	rank, size := strconv.Itoa(r), strconv.Itoa(o.NP)
	for _, v := range []string{
		"MASTER_ADDR=" + o.TorchStore.Addr().String(),
		"MASTER_PORT=" + strconv.Itoa(int(o.TorchStore.Port())),
		"RANK=" + rank,
		"WORLD_SIZE=" + size,
		"LOCAL_RANK=" + rank,
		"LOCAL_WORLD_SIZE=" + size,
		"GROUP_RANK=0",
		"GROUP_WORLD_SIZE=1",
		// The store is there already, so that rank 0 need not serve one.
		"TORCHELASTIC_USE_AGENT_STORE=True",
		"TORCHELASTIC_RESTART_COUNT=0",
	} {
		name, _, _ := strings.Cut(v, "=")
		if !slices.ContainsFunc(o.Set, func(set string) bool { return strings.HasPrefix(set, name+"=") }) {
			vars = append(vars, v)
		}
	}
	return vars
}

// merge is the environment of all ranks: inherited, without what set and placing name, then set. Of equal names in set
// the last counts.
func merge(inherited, set, placing []string) ([]string, error) {
	values := make(map[string]string, len(set)+1)
	names := []string{"PYTHONUNBUFFERED"} // output is prefixed line by line, so it should come line by line
	values[names[0]] = "1"
	reserved := make(map[string]bool, len(placing))
	for _, v := range placing {
		name, _, _ := strings.Cut(v, "=")
		reserved[name] = true
	}
	for _, v := range set {
		name, value, ok := strings.Cut(v, "=")
		switch {
		case !ok || name == "" || strings.Contains(v, "\x00"):
			return nil, &OptionError{fmt.Sprintf("environment: got %q, want NAME=value", v)}
		case reserved[name]:
			return nil, &OptionError{fmt.Sprintf("environment: %s is set by the launcher itself", name)}
		}
		if _, ok := values[name]; !ok {
			names = append(names, name)
		}
		values[name] = value
	}
	env := make([]string, 0, len(inherited)+len(names)+len(placing))
	for _, v := range inherited {
		name, _, _ := strings.Cut(v, "=")
		if _, ok := values[name]; !ok && !reserved[name] {
			env = append(env, v)
		}
	}
	for _, name := range names {
		env = append(env, name+"="+values[name])
	}
	return env, nil
}

// rank is one rank and its helper.
type rank struct {
	helper  int      // process id
	orders  *os.File // to the helper; closing it ends the rank
	reports *os.File // from the helper
	streams [2]*stream

	// The rest belongs to the supervising goroutine.
	exit  Exit
	ended bool // exit is known
	gone  bool // so is the helper's end
}

// openFiles creates the files of all ranks before any is started.
func (j *job) openFiles() ([][2]*os.File, error) {
	files := make([][2]*os.File, j.o.NP)
	if j.o.OutputDir == "" {
		return files, nil
	}
	width := len(strconv.Itoa(j.o.NP - 1))
	for r := range files {
		dir := filepath.Join(j.o.OutputDir, fmt.Sprintf("rank.%0*d", width, r))
		err := os.MkdirAll(dir, 0o777)
		for i, name := range [2]string{"stdout", "stderr"} {
			if err == nil {
				files[r][i], err = os.Create(filepath.Join(dir, name))
			}
		}
		if err != nil {
			closeFiles(files)
			return nil, fmt.Errorf("launch: output files: %w", err)
		}
	}
	return files, nil
}

func closeFiles(files [][2]*os.File) {
	for _, pair := range files {
		for _, f := range pair {
			f.Close() // nothing was written; nil is refused
		}
	}
}

// pipe returns a pipe's reading and writing end. mine is the one that stays here, non-blocking; the other blocks,
// as programs expect. Neither is inherited unless it is passed on.
func pipe(readingIsMine bool) (mine *os.File, theirs int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, 0, os.NewSyscallError("pipe2", err)
	}
	here, there := p[0], p[1]
	if !readingIsMine {
		here, there = there, here
	}
	if err := unix.SetNonblock(here, true); err != nil {
		unix.Close(here)
		unix.Close(there)
		return nil, 0, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(here), "pipe"), there, nil
}

// start starts the helper of rank r. On an error nothing is left of it. family.mu is held.
func (j *job) start(r int, null *os.File, files [2]*os.File) (_ *rank, err error) {
	var mine []*os.File
	var theirs []uintptr
	defer func() {
		for _, fd := range theirs {
			unix.Close(int(fd))
		}
		if err != nil {
			for _, f := range mine {
				f.Close()
			}
		}
	}()
	// In the order of the helper's descriptors from 1 on.
	for _, reading := range []bool{true, true, false, true} {
		f, fd, err := pipe(reading)
		if err != nil {
			return nil, err
		}
		mine, theirs = append(mine, f), append(theirs, uintptr(fd))
	}
	argv := append([]string{"hvdrun", HelperArg, j.path}, j.o.Command...)
	pid, _, err := syscall.StartProcess("/proc/self/exe", argv, &syscall.ProcAttr{
		Env:   slices.Concat(j.env, torchVariables(r, &j.o), rankVariables(r, &j.o, j.host, j.id)),
		Files: append([]uintptr{null.Fd()}, theirs...),
		// A group of its own keeps it from signals meant for the launcher's.
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return nil, os.NewSyscallError("start process", err)
	}
	k := &rank{helper: pid, orders: mine[2], reports: mine[3]}
	for i, name := range [2]string{"stdout", "stderr"} {
		s := &stream{pipe: mine[i], console: j.console, err: i == 1, timestamp: j.o.Timestamp, file: files[i]}
		if !j.o.NoPrefix {
			s.prefix = fmt.Sprintf("[%d]<%s>:", r, name)
		}
		if s.err {
			s.tail = new(tail)
		}
		k.streams[i] = s
	}
	return k, nil
}

// named reports whether v names rank r.
func named(v *verdict.Verdict, r int) bool {
	return v != nil && slices.Contains(v.Ranks, topo.Rank(r))
}
