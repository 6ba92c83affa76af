// Package launch starts the ranks of a job on this host and on others, or the nodes of a parameter server,
// supervises them, and reports how the job ended. It needs Linux. Its comments about ranks also hold for
// nodes.
//
// Invariants:
//
//  1. When Run has returned, no process of the job is alive, in any process group or session. There are two
//     exceptions: processes that the error of Run names, and processes on a host that was lost. The latter end
//     when their host has received nothing from the launcher for Options.Liveness. If SIGKILL kills the
//     launcher, an agent or a helper, the processes that it has started for the job end soon after.
//  2. If a rank failed, the job's status is not 0.
//  3. The output of the ranks takes bounded memory and delays no signal, whether or not it is read.
//  4. Once a rank has failed, a signal has arrived or all commands have ended, every wait of the supervision
//     has a deadline.
//
// Each rank has a helper process (see HelperMain). The helper is the subreaper of the rank, and reads a pipe
// from the launcher. If the pipe ends, the launcher is gone. The launcher is a subreaper too: if a helper is
// killed, its children become children of the launcher.
//
// Each host has an agent, which runs the helpers. On the launcher's own host the agent is part of the
// launcher's process. On another host the launcher starts it by a command such as ssh (see AgentMain).
// Launcher and agent communicate over a pipe, or over the standard input and output of the command (wire.go).
// The agent concludes that the launcher is gone when the connection ends or has been silent for too long.
package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/outfile"
)

// MaxRanks is the maximum of Options.NP.
const MaxRanks = 4096

// These exit statuses do not come from a rank.
const (
	statusNotExecutable = 126
	statusNotFound      = 127
	statusSignal        = 128 // the signal's number is added to it
)

// Options describes the job to run. If a duration is 0, its default applies.
type Options struct {
	// NP is the number of ranks, from 1 to MaxRanks.
	NP int
	// Nodes makes the processes of the job the nodes of a parameter server. Then NP is Nodes.Count(). If it
	// is nil, the processes are ranks.
	Nodes *Nodes
	// Elastic makes the job elastic, if it is not nil.
	Elastic *Elastic
	// Starter is the title of Command if Command is a launcher, such as mpirun, that starts the ranks itself.
	// Then NP is 1, Command gets no variables that say which rank it is, and the verdict may name any rank.
	// A launcher may end with status 0 although a rank has failed, so the job has also failed if Verdict
	// returns a verdict then. If SIGKILL kills the process of Run, Command gets SIGTERM and the time Grace
	// before it is killed too. If Starter is empty, each rank runs Command.
	Starter string
	// Failed delivers a value when a rank that Starter has started has failed. Then Starter must end, and is
	// killed if it does not, as ranks must end when a rank has failed.
	Failed <-chan struct{}
	// Hosts are the hosts that run the ranks. Assign places the ranks on them in this order. If Hosts is
	// empty, all ranks run on this host, under its own name.
	Hosts []Host
	// Command is the command that each rank runs. Its first word is looked up on the rank's host, in the PATH
	// of the ranks.
	Command []string
	// Env is the environment of the ranks, as NAME=value. Run adds or replaces the variables that tell a rank
	// its number, the number of ranks, and the like.
	Env []string
	// Set holds variables, as NAME=value, that are added to Env. A variable in Set replaces the variable with
	// the same name in Env. Set must not contain variables that Run itself adds.
	Set []string

	// Restarted is called before a rank is started again (Nodes.Restarts). It must not block. It may be nil.
	Restarted func(rank int)
	// Hung waits until ranks have failed without ending, and returns them with the verdict that names them.
	// If ctx ends, it returns nil. Accused returns the ranks about which Hung has not decided yet; it does
	// not block. Run calls both only with Nodes.Restarts, because otherwise the ranks that fail because of
	// such a rank end the job.
	Hung    func(ctx context.Context) (ranks []int, v joblink.Verdict)
	Accused func() []int
	// Verdict waits for the verdict of the surviving ranks about the ranks that failed. It returns an error
	// if ctx ends first, and may return one earlier if all ranks have ended and have sent no verdict. The
	// field is nil if there cannot be a verdict.
	Verdict func(ctx context.Context, ended bool) (joblink.Verdict, error)
	// StoreAddrs holds the addresses, at least one, at which ranks reach the store. If some ranks run on
	// other hosts, each host tries all addresses and uses one that works.
	StoreAddrs []netip.AddrPort
	// Secret is the text of the job's secret, which the ranks receive in their environment.
	Secret string
	// TorchStore is the address of a server for the protocol of PyTorch's TCPStore. The torch.distributed
	// processes of the ranks meet there. If the address is not valid, Run does not set the variables for
	// torch.distributed.
	TorchStore netip.AddrPort

	// BindTo says to what each rank is bound on its host, within the CPUs that the agent may use. If it is
	// empty, ranks are not bound. It cannot be used with Nodes, Elastic and Starter.
	BindTo binding.Unit

	// Stdout and Stderr receive the output of the ranks. Stderr also receives the report. One goroutine
	// writes to both. When Run returns, all output is written. There is one exception: if a Write hangs, a
	// signal or the end of ctx makes Run return, and the goroutine remains. If one of them is a pipe that
	// nobody reads any more, the job ends as after SIGTERM, and Result.Signal is SIGPIPE, unless a signal
	// arrives within Echo. Other errors of a Write do not end the job; Run returns the first.
	Stdout, Stderr io.Writer
	// NoPrefix leaves out the prefix of each line, which is [0]<stdout>: for the standard output of rank 0,
	// and [server 0]<stdout>: for that of a node.
	// Timestamp puts the time before each line.
	NoPrefix, Timestamp bool
	// OutputDir is a directory for copies of the unchanged output, or empty for no copies. Rank R writes to
	// rank.R/stdout and rank.R/stderr, where R is padded with zeros. Nodes write to folders such as
	// scheduler, server.0 and worker.12.
	OutputDir string
	// Verbose makes the launcher log on Stderr what it does.
	Verbose bool

	// Signals delivers the signals that are sent to the launcher. SIGINT, SIGTERM and SIGHUP end the job.
	// Other signals are forwarded to the process groups of the ranks. If a second signal arrives that ends
	// the job, the launcher kills the ranks. An equal signal within Echo after the first does not count as a
	// second one.
	Signals <-chan os.Signal

	// Inquiry makes the launcher print a report on the ranks when SIGQUIT arrives. If it is nil, SIGQUIT is
	// forwarded to the ranks.
	Inquiry *Inquiry

	// Reach returns a command, such as an ssh command, that runs a program on another host. The first element
	// of words is the program, and the rest are its arguments. Reach is needed if ranks run on other hosts.
	// The first word of the command is looked up in PATH. The command must connect its standard input and
	// output to the standard input and output of the program, and must end when the program ends.
	Reach func(host string, words []string) []string
	// AgentPath is the path, on the other hosts, of the program that calls AgentMain.
	AgentPath string
	// Start is the time limit for all hosts to get ready to start their ranks. In an elastic job it holds for
	// each host. The default is 30 s.
	Start time.Duration
	// Liveness is how long the launcher and an agent may receive nothing from each other. After that the
	// launcher considers the host lost, and the agent kills its ranks. The default is 10 s. It must be at
	// least 3 s.
	Liveness time.Duration

	// Notice is how long the other ranks may take to end by themselves after a rank has failed. The default
	// is 5 s.
	Notice time.Duration
	// Grace is how long ranks may take to end after a signal. Then the launcher sends them SIGKILL. The
	// default is 5 s.
	Grace time.Duration
	// Echo is the time after a signal during which an equal signal counts as the same signal. The default is
	// 500 ms. In so short a time no user can read that a second signal kills the ranks and press the key
	// again.
	Echo time.Duration
	// Kill is how long processes may take to disappear after SIGKILL. After this time the launcher kills the
	// helpers as well, and waits for the same time again. If processes are left then, Run gives up. The
	// default is 5 s.
	Kill time.Duration
}

// OptionError reports that an option is not valid. Run has started nothing.
type OptionError struct{ Text string }

func (e *OptionError) Error() string { return "launch: " + e.Text }

// CommandError reports that a command could not be started. No rank is running.
type CommandError struct {
	Command string
	Host    string // host of the rank; empty if all ranks run on this host
	Status  int    // exit status that a shell would return: 127 for not found, 126 for not executable
	Err     error
}

func (e *CommandError) Error() string {
	if e.Host != "" {
		return fmt.Sprintf("launch: command %q on host %s: %v", e.Command, e.Host, e.Err)
	}
	return fmt.Sprintf("launch: command %q: %v", e.Command, e.Err)
}

func (e *CommandError) Unwrap() error { return e.Err }

// HostError reports that ranks could not be started on a host. No rank is running.
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

// Result describes how the job ended.
type Result struct {
	// Status is the exit status for the launcher. If a rank failed, it is the status of the root cause (128+n
	// for signal n), or 1 if that is 0. If signal n ended the job before any rank failed, it is 128+n.
	// Otherwise it is 0.
	Status int
	// Signal is the signal that ended the job before any rank failed, or 0 if there was none. SIGPIPE says
	// that the output was not read any more.
	Signal syscall.Signal
	// Ranks describes for each rank how it ended.
	Ranks []Exit
	// Roots are the ranks that caused the failure. These are the ranks that the verdict of the survivors
	// names. If there is no verdict, Roots contains the rank that failed first. If no rank failed, Roots is
	// empty.
	Roots []int
	// Verdict is the verdict of the surviving ranks. It is nil if there is no verdict or if no rank failed.
	Verdict *joblink.Verdict
	// Restarts are the restarts of ranks, in their order.
	Restarts []Restart
}

// Exit describes how a rank ended. If the rank was started again, it describes its last process. For the slot
// of an elastic job that is the root cause, it describes the process that was.
type Exit struct {
	// Title is the name of the process in reports, such as rank 3, server 1 or, in an elastic job, h1:3.
	Title string
	// Host is the host on which the rank ran.
	Host string
	// PID is the process ID of the command. It is 0 if the helper was killed before it reported the ID,
	// or if the command could not be started again.
	PID int
	// Code is the exit status of the command. It is 0 if Signal is not 0, because then that signal killed the
	// command.
	Code   int
	Signal syscall.Signal
	// Sent is the last signal that the launcher sent to ask the command to end, or 0.
	Sent syscall.Signal
	// Lost is set if the launcher cannot know how the command ended. There are two reasons. If the helper was
	// killed, and the command with it, Why is empty. If the host was lost, Why contains the reason. In both
	// cases Signal is SIGKILL. If the command of a later process could not be started, Why contains the
	// reason, and Code is the exit status that a shell would return.
	Lost bool
	Why  string
	// Restarting is set if the rank was to be started again when the job ended for another reason.
	Restarting bool
	// At is the time at which the command ended, by the clock of this host. If the host was lost, At is the
	// time at which the launcher last received something from it.
	At time.Time
	// Stderr holds the last lines that the command wrote to standard error, at most 20.
	Stderr []string
}

// Status returns the exit status that a shell reports for e: Code, or 128+n if signal n killed the command.
func (e Exit) Status() int {
	if e.Signal != 0 {
		return statusSignal + int(e.Signal)
	}
	return e.Code
}

// Run runs the job and reports a failure on o.Stderr. The result describes the ranks. The error is not nil if
// some ranks could not be started (*OptionError, *CommandError, *HostError), if the launcher itself failed,
// or if ctx ended the job. If ctx ends, the job ends in the same way as after SIGTERM, and the error wraps
// the cause of ctx. After any error, no process of the job is left except the processes that the error names.
//
// The calling process must not start any other child during Run, because Run waits for all children. Run
// makes the process a subreaper for the rest of its life (prctl(2)), and SIGPIPE does not kill it any more.
// The executable of the process must call HelperMain and AgentMain. Each rank needs two goroutines. A rank on
// this host also needs a helper process, four file descriptors and three more goroutines. Each other host
// needs the command that reaches its agent, three file descriptors and seven goroutines.
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
	if o.Nodes != nil {
		if err := o.Nodes.check(&o); err != nil {
			return Result{}, err
		}
	}
	if o.BindTo == binding.None {
		o.BindTo = ""
	}
	if o.BindTo != "" && (o.Nodes != nil || o.Elastic != nil || o.Starter != "") {
		return Result{}, &OptionError{"BindTo: only ranks that the launcher itself starts once can be bound"}
	}
	if len(o.Command) == 0 || o.Command[0] == "" {
		return Result{}, &OptionError{"command: got none, want a program to run"}
	}
	catchSIGPIPE()
	self, err := os.Hostname()
	if err != nil {
		return Result{}, fmt.Errorf("launch: get the name of this host: %w", err)
	}
	var places []Assignment
	if o.Elastic == nil {
		if places, err = o.assign(self); err != nil {
			return Result{}, err
		}
	} else {
		c := &o.Elastic.Config
		c.Start, c.Notice, c.Random = o.NP, o.Notice, mathrand.Float64
		if len(o.Hosts) == 0 && o.Elastic.Discovery == nil {
			o.Hosts = []Host{{Name: self, Slots: max(o.NP, c.Max) + c.Spares}}
		}
		c.Max = cmp.Or(c.Max, MaxRanks)
	}
	s, err := newSpec(&o, places)
	if err != nil {
		return Result{}, err
	}
	return newJob(s).run(ctx)
}

// assign places the ranks on o.Hosts. It adds this host if there is none, or if only the scheduler of a
// parameter server runs here, and removes hosts without nodes.
func (o *Options) assign(self string) (places []Assignment, err error) {
	if len(o.Hosts) == 0 {
		o.Hosts = []Host{{Name: self, Slots: o.NP}}
	}
	if o.Nodes != nil {
		o.Hosts, places, err = AssignNodes(o.Hosts, o.Nodes, self)
	} else {
		places, err = Assign(o.Hosts, o.NP)
	}
	if err != nil {
		return nil, &OptionError{err.Error()}
	}
	return places, nil
}

// rank is the supervisor's state of one rank, or of one slot of an elastic job. Only the supervisor's
// goroutine uses it.
type rank struct {
	number  int
	title   string // name of the process in messages, such as rank 3 or server 1
	conn    *agentConn
	streams [2]*stream // of the newest process

	exit  Exit // of the newest process
	ended bool // the command has ended and exit is complete
	gone  bool // the helper has ended too

	started  time.Time     // when the newest process was started
	restarts int           // how often the rank was started again
	delay    time.Duration // time between the last end and the restart
	again    time.Time     // when the rank is to be started again, or the zero time
	hung     string        // why the newest process has failed without ending, or ""
	killed   time.Time     // when the launcher has killed that process because of this, until it has ended

	// The fields below are for elastic jobs.
	member elastic.Member // the newest process
	waits  bool           // the process member is to be started
	told   elastic.Member // the newest process of whose end the machine knows
	opened bool           // a process was started, so the streams are in use
	// cause is the end of the process because of which the job has failed, or nil. exit may be that of a
	// later one.
	cause *ending
}

// outcome returns how the rank has ended, as the result of the job says.
func (k *rank) outcome() Exit {
	if k.cause != nil {
		return k.cause.exit
	}
	return k.exit
}

// lastLines returns the last lines on standard error of the process of outcome. It is called when the streams
// have ended.
func (k *rank) lastLines() []string {
	if k.cause != nil {
		return k.cause.tail.lines
	}
	return k.streams[1].tail.lines
}

// create makes the file with the given name in a folder of the folder dir.
func (s *stream) create(dir, folder, name string) error {
	dir, err := outfile.Folder(dir, 0o777)
	if err != nil {
		return err
	}
	if dir, err = outfile.Folder(filepath.Join(dir, folder), 0o777); err != nil {
		return err
	}
	s.path = filepath.Join(dir, name)
	s.file, err = outfile.Create(s.path, 0o666)
	return err
}

// makeRanks creates the state of each rank, the output files of the ranks, and the connections to their
// hosts.
func (j *job) makeRanks() error {
	for _, h := range j.o.Hosts[:j.spec.hosts] {
		j.agents.add(h.Name)
	}
	for r, p := range j.spec.places {
		k := &rank{number: r, title: fmt.Sprintf("rank %d", r), conn: j.agents.conns[p.Host],
			exit: Exit{Host: j.o.Hosts[p.Host].Name}}
		switch {
		case j.o.Nodes != nil:
			k.title = j.o.Nodes.Name(r)
		case j.o.Starter != "":
			k.title = j.o.Starter
		}
		k.conn.ranks, j.ranks = append(k.conn.ranks, k), append(j.ranks, k)
		label, folder := strconv.Itoa(r), fmt.Sprintf("rank.%0*d", len(strconv.Itoa(j.o.NP-1)), r)
		if j.o.Nodes != nil {
			label, folder = k.title, strings.ReplaceAll(k.title, " ", ".")
		}
		k.makeStreams(j.o, j.console, label)
		if err := k.createFiles(j.o.OutputDir, folder); err != nil {
			return err
		}
		k.conn.streams = append(k.conn.streams, k.streams[:]...)
	}
	return nil
}

// makeStreams makes the streams of the first process of k. label is the name of the process in the prefix of
// its lines.
func (k *rank) makeStreams(o *Options, c *console, label string) {
	for i, name := range [2]string{"stdout", "stderr"} {
		s := &stream{console: c, err: i == 1, timestamp: o.Timestamp, done: make(chan struct{})}
		k.streams[i] = s
		if !o.NoPrefix {
			s.prefix = fmt.Sprintf("[%s]<%s>:", label, name)
		}
		if s.err {
			s.tail = new(tail)
		}
	}
}

// createFiles creates the output files of the streams of k in a folder of the folder dir, unless dir is
// empty. On an error, it closes them.
func (k *rank) createFiles(dir, folder string) error {
	if dir == "" {
		return nil
	}
	for i, name := range [2]string{"stdout", "stderr"} {
		if err := k.streams[i].create(dir, folder, name); err != nil {
			for _, s := range k.streams {
				s.file.Close() // it may be nil
				s.file = nil
			}
			return fmt.Errorf("launch: create the output files: %w", err)
		}
	}
	return nil
}
