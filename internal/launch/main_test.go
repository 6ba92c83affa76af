package launch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestMain runs the tests. The first argument of the test binary can select another role. Then TestMain runs
// a launcher, a helper, an agent or a rank instead.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case launch.HelperArg:
			os.Exit(launch.HelperMain(os.Args[2:], os.Environ()))
		case launch.AgentArg:
			os.Exit(launch.AgentMain(os.Args[2:], os.Environ()))
		case "launcher":
			testnet.NoNameServer()
			os.Exit(launcher(os.Args[2]))
		case "fake agent":
			os.Exit(fakeAgent(os.Args[2]))
		case "rank":
			os.Exit(rankProgram(os.Args[2]))
		}
	}
	// A shell may have started the tests in the background with SIGINT ignored. The launcher would then
	// ignore SIGINT too.
	if signal.Ignored(syscall.SIGINT) {
		signal.Notify(make(chan os.Signal, 1), syscall.SIGINT)
	}
	os.Exit(m.Run())
}

// spec tells the launcher process of a test which job to run. If a field is zero, the default of package
// launch applies.
type spec struct {
	NP                                   int
	Command, Set                         []string
	NoticeMS, GraceMS, KillMS, TimeoutMS int
	EchoMS                               int
	OutputDir, Verdict, ResultFile       string
	NoPrefix, Timestamp, Verbose         bool
	// OldVerdict says that the verdict is an hour old.
	OldVerdict bool
	// Inquire gives the job an Inquiry. Its survey lasts until no rank is left to ask.
	Inquire bool
	// Hosts is a list of hosts. Reach is the command that runs an agent on one of these hosts. In the
	// command, {host} stands for the name of the host, and {mark} for the variable that marks the processes
	// of the test.
	Hosts               string
	Reach               []string
	TorchStore          string
	StoreAddrs          []string // addresses of the store; STORE in the text stands for the real address
	StartMS, LivenessMS int
	// Servers, Workers and Restarts describe nodes of a parameter server. NP is the number of ranks if
	// Servers is 0.
	Servers, Workers, Restarts int
	Elastic                    *elasticSpec
	// wrap, if not empty, is a command that runs the launcher. The launcher's command line is appended to it.
	wrap   []string
	dir    string   // working directory of the launcher
	stdout *os.File // standard output of the launcher; if nil, the buffer run.stdout
}

const lostByLauncher = 99 // exit status if the launcher has leaked a goroutine

// verdict returns the verdict that the test has chosen, because the ranks in these tests never send one.
func (s *spec) verdict(ctx context.Context, ended bool) (v joblink.Verdict, err error) {
	if s.Verdict == "" {
		if !ended {
			<-ctx.Done()
		}
		return v, errors.New("no verdict")
	}
	v.At = time.Now()
	if s.OldVerdict {
		v.At = v.At.Add(-time.Hour)
	}
	err = json.Unmarshal([]byte(s.Verdict), &v)
	return v, err
}

// launcher runs a job with launch.Run, as hvdrun does. It returns the exit status.
func launcher(text string) int {
	var s spec
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)
	ctx := context.Background()
	if s.TimeoutMS > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(s.TimeoutMS)*time.Millisecond)
		defer cancel()
	}
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	hosts := several{addrs: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:4711")}, close: func() error {
		return nil
	}}
	err := error(nil)
	if s.Hosts != "" {
		hosts, err = severalHosts(&s)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	var inquiry *launch.Inquiry
	if s.Inquire {
		alarms := make(chan string, 1)
		alarms <- "an alarm"
		inquiry = &launch.Inquiry{
			Alarms: alarms,
			Survey: func(ctx context.Context, why string, known []string) string {
				fmt.Fprintf(os.Stderr, "asked for %s: %q\n", why, known)
				if why == "SIGQUIT" {
					alarms <- "an alarm meanwhile"
					<-ctx.Done()
				}
				return "surveyed for " + why + "\n"
			},
			Epilogue: func(known []string, _ []int, failed bool) string {
				if !failed {
					return fmt.Sprintf("end %q\n", known)
				}
				return fmt.Sprintf("epilogue %q\n", known)
			},
		}
	}
	var nodes *launch.Nodes
	if s.Servers > 0 {
		nodes = &launch.Nodes{Servers: s.Servers, Workers: s.Workers, Restarts: s.Restarts,
			Root: netip.MustParseAddrPort("127.0.0.1:9")}
		s.NP = nodes.Count()
	}
	e, stop := s.Elastic.options()
	defer stop()
	res, err := launch.Run(ctx, launch.Options{
		Inquiry: inquiry, Nodes: nodes, Elastic: e,
		TorchStore: hosts.torch, Hosts: hosts.list, StoreAddrs: hosts.addrs, Secret: hosts.secret,
		AgentPath: self(), Reach: hosts.reach,
		Start: ms(s.StartMS), Liveness: ms(s.LivenessMS),
		NP: s.NP, Command: s.Command, Env: os.Environ(), Set: s.Set,
		Verdict: s.verdict,
		Stdout:  os.Stdout, Stderr: os.Stderr,
		NoPrefix: s.NoPrefix, Timestamp: s.Timestamp, OutputDir: s.OutputDir, Verbose: s.Verbose,
		Signals: signals, Notice: ms(s.NoticeMS), Grace: ms(s.GraceMS), Kill: ms(s.KillMS),
		Echo: ms(s.EchoMS),
	})
	if err := hosts.close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if s.ResultFile != "" {
		text, _ := json.Marshal(res)
		if err := os.WriteFile(s.ResultFile, text, 0o600); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	status := res.Status
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		var command *launch.CommandError
		switch {
		case errors.As(err, &command):
			status = command.Status
		case status == 0:
			status = 1
		}
	}
	// If a Write hangs, Run leaves one goroutine behind, as its documentation says. In all other cases there
	// must be no leak.
	if err == nil || !strings.Contains(err.Error(), "standard error was not read") {
		signal.Stop(signals)
		stop()
		if leak := goleak.Find(); leak != nil {
			fmt.Fprintln(os.Stderr, leak)
			return lostByLauncher
		}
	}
	return status
}

// fake describes what a fake agent does. It greets the launcher, accepts the launcher's streams, sends the
// notices, and exits with status 7.
type fake struct {
	Notices []string // each notice is JSON
	Print   string   // what the agent sends as the output of rank 0
	Lives   bool     // the agent stays alive, answers pings and carries out no order
}

func (f fake) reach() []string {
	return []string{"env", "AT={host}", self(), "fake agent", string(must(json.Marshal(f)))}
}

func fakeAgent(text string) int {
	var f fake
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	fmt.Print("\x00hvdrun host agent\x00\x00\x00\x00\x06")
	config := yamux.DefaultConfig()
	config.LogOutput = io.Discard
	s := must(yamux.Server(struct {
		io.Reader
		io.WriteCloser
	}{os.Stdin, os.Stdout}, config))
	control := must(s.Accept())
	out := must(s.Accept())
	must(s.Accept()) // accept the stream of standard error, which the launcher opens before it reads
	fmt.Fprint(out, f.Print)
	for _, n := range f.Notices {
		must(control.Write(dial.SealFrame(append(dial.NewFrame(len(n)), n...))))
	}
	if f.Lives {
		signal.Ignore(unix.SIGINT, unix.SIGTERM)
		select {}
	}
	fmt.Fprintln(os.Stderr, "bad line")
	return 7
}

// rankProgram runs a rank in tests that cannot use a shell script, and returns its exit status.
func rankProgram(do string) int {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals)
	switch do {
	case "obey": // ends at the first signal that is not one of the Go runtime's own
		fmt.Println("ready")
		for s := range signals {
			if s != unix.SIGURG && s != unix.SIGCHLD {
				fmt.Println("got", unix.SignalName(s.(syscall.Signal)))
				return 0
			}
		}
	case "tidy": // cleans up until some time after its parent has ended
		parent := os.Getppid()
		fmt.Println("ready")
		for s := range signals {
			if s == unix.SIGTERM {
				break
			}
		}
		for tick := time.NewTicker(20 * time.Millisecond); os.Getppid() == parent; {
			<-tick.C
		}
		<-time.After(50 * time.Millisecond)
		fmt.Println("clean")
		return 0
	case "ignore":
		fmt.Println("ready")
		select {}
	case "stray": // leaves its process group and ignores signals
		if err := unix.Setpgid(0, must(unix.Getpgid(os.Getppid()))); err != nil {
			fmt.Println(err)
			return 2
		}
		fmt.Println("ready")
		for s := range signals {
			if s == unix.SIGINT {
				fmt.Println("got SIGINT")
			}
		}
	case "flood": // prints long lines of one letter
		letter := string(rune('a' + must(strconv.Atoi(os.Getenv("HOROVOD_RANK")))))
		for range floodLines {
			fmt.Println(strings.Repeat(letter, floodBytes))
		}
		return 0
	}
	fmt.Println("unknown part", do)
	return 2
}

const (
	floodLines = 20
	floodBytes = 150_000
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func self() string { return must(os.Executable()) }

// deadline is how long each wait in the tests may take.
const deadline = time.Minute

// buffer collects the output of a process. The test may read it while package exec writes to it.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// run is a running launcher process.
type run struct {
	t              *testing.T
	cmd            *exec.Cmd
	mark           string
	stdout, stderr buffer
	result         string
	over           bool // wait has found that no process of the job is left
}

// markVariable is set in the environment of every process of a job. Its value identifies the job.
const markVariable = "LAUNCH_TEST_MARK"

func start(t *testing.T, s spec) *run {
	t.Helper()
	r := &run{t: t, mark: fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano())}
	r.result = filepath.Join(t.TempDir(), "result")
	s.ResultFile = r.result
	if s.NP == 0 {
		s.NP = 1
	}
	for i, w := range s.Reach {
		s.Reach[i] = strings.ReplaceAll(w, "{mark}", markVariable+"="+r.mark)
	}
	argv := append(s.wrap, self(), "launcher", string(must(json.Marshal(s))))
	r.cmd = exec.Command(argv[0], argv[1:]...)
	// By default the race detector makes each process sleep for a second before it exits. The setting in
	// GORACE turns this off.
	r.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"), markVariable+"="+r.mark,
		"HOROVOD_RANK=77", "HVD_JOB_ID=stale", "HOROVOD_SIZE=78", "RANK=9")
	r.cmd.Stdout, r.cmd.Stderr = &r.stdout, &r.stderr
	r.cmd.Dir = s.dir
	if s.stdout != nil {
		r.cmd.Stdout = s.stdout
	}
	r.cmd.WaitDelay = deadline
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if r.cmd.ProcessState == nil {
			r.cmd.Process.Kill()
			r.cmd.Wait()
		}
		if !r.over {
			for _, p := range r.processes() {
				unix.Kill(p.pid, unix.SIGKILL)
			}
		}
		if t.Failed() {
			t.Logf("stdout:\n%.4000s\nstderr:\n%.4000s", r.stdout.String(), r.stderr.String())
		}
	})
	return r
}

// wait waits for the launcher and returns its exit status. If a process of the job is still alive then, the
// test fails.
func (r *run) wait() int {
	r.t.Helper()
	// SIGABRT makes the launcher print its stacks.
	late := time.AfterFunc(deadline, func() { r.cmd.Process.Signal(unix.SIGABRT) })
	defer late.Stop()
	r.cmd.Wait()
	left := r.processes()
	r.over = len(left) == 0
	if len(left) > 0 {
		r.t.Errorf("left running: %v", left)
	}
	return r.cmd.ProcessState.ExitCode()
}

// ends waits for the launcher, which must end with the given exit status.
func (r *run) ends(status int) {
	r.t.Helper()
	if got := r.wait(); got != status {
		r.t.Errorf("got exit status %d, want %d", got, status)
	}
}

// says checks that the output in b contains all texts.
func (r *run) says(b *buffer, texts ...string) {
	r.t.Helper()
	for _, text := range texts {
		if !strings.Contains(b.String(), text) {
			r.t.Errorf("got %q, want %q in it", b.String(), text)
		}
	}
}

// outcome returns the Result of the job. It may be called only after wait.
func (r *run) outcome() (res launch.Result) {
	r.t.Helper()
	text, err := os.ReadFile(r.result)
	if err == nil {
		err = json.Unmarshal(text, &res)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return res
}

func (r *run) signal(s syscall.Signal) {
	r.t.Helper()
	if err := r.cmd.Process.Signal(s); err != nil {
		r.t.Fatal(err)
	}
}

func (r *run) await(what string, ok func() bool) {
	r.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(deadline); !ok(); <-tick.C {
		if time.Now().After(end) {
			r.t.Fatalf("%s: not within %v; processes: %v", what, deadline, r.processes())
		}
	}
}

// awaitOutput waits until the output in b contains text at least n times.
func (r *run) awaitOutput(b *buffer, text string, n int) {
	r.t.Helper()
	r.await(fmt.Sprintf("%d times %q", n, text), func() bool { return strings.Count(b.String(), text) >= n })
}

type process struct {
	pid     int
	command string
	rank    string
}

func (p process) String() string { return fmt.Sprintf("%d %s", p.pid, p.command) }

func (p process) isAgent() bool { return strings.Contains(p.command, launch.AgentArg) }

func (p process) isHelper() bool { return strings.Contains(p.command, launch.HelperArg) }

// processes returns the live processes of the job, except the launcher.
func (r *run) processes() []process {
	var found []process
	entries, err := os.ReadDir("/proc")
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == r.cmd.Process.Pid {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err != nil || !bytes.Contains(env, []byte(markVariable+"="+r.mark+"\x00")) {
			continue
		}
		p := process{pid: pid}
		for _, v := range strings.Split(string(env), "\x00") {
			if rank, ok := strings.CutPrefix(v, "HOROVOD_RANK="); ok {
				p.rank = rank
			}
		}
		line, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		p.command = strings.ReplaceAll(strings.TrimRight(string(line), "\x00"), "\x00", " ")
		found = append(found, p)
	}
	return found
}

// helper waits for the helper of a rank and returns its process ID.
func (r *run) helper(rank string) (pid int) {
	r.t.Helper()
	r.await("helper of rank "+rank, func() bool {
		for _, p := range r.processes() {
			if p.isHelper() && p.rank == rank {
				pid = p.pid
			}
		}
		return pid != 0
	})
	return pid
}

func sh(script string) []string { return []string{"sh", "-c", script} }
