package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

const deadline = time.Minute

// TestMain runs the tests. If the first argument of the test binary selects another role, it runs hvdrun, a
// helper, an agent or a rank instead.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case launch.HelperArg:
			os.Exit(launch.HelperMain(os.Args[2:], os.Environ()))
		case launch.AgentArg:
			os.Exit(launch.AgentMain(os.Args[2:], os.Environ()))
		case mpiRankArg:
			os.Exit(mpiRankMain(os.Args[2:], os.Environ(), os.Stderr))
		case "hvdrun":
			testnet.NoNameServer()
			status := run(os.Args[2:], os.Environ(), os.Stdout, os.Stderr)
			if err := goleak.Find(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				status = 99
			}
			os.Exit(status)
		case "pretend":
			if err := pretend(os.Args[2]); err != nil {
				fmt.Println(err)
				os.Exit(9)
			}
			os.Exit(0)
		case "accuse":
			if err := accuse(); err != nil {
				fmt.Println(err)
				os.Exit(9)
			}
			os.Exit(1)
		}
	}
	// A shell may have started the tests in the background with SIGINT ignored. hvdrun would then ignore
	// SIGINT too.
	if signal.Ignored(syscall.SIGINT) {
		signal.Notify(make(chan os.Signal, 1), syscall.SIGINT)
	}
	os.Exit(m.Run())
}

// accuse runs as a rank without an engine. It sends a verdict that blames rank 1, in the same way as an
// engine.
func accuse() error {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	addr := net.JoinHostPort(os.Getenv("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
		os.Getenv("HOROVOD_GLOO_RENDEZVOUS_PORT"))
	key, err := secret.Parse(os.Getenv("HVD_SECRET"))
	if err != nil {
		return err
	}
	kv, err := store.Dial(ctx, addr, store.Config{Secret: key})
	if err != nil {
		return err
	}
	err = joblink.New(kv, 0).ReportVerdict(ctx, joblink.Verdict{Epoch: 1, Ranks: []topo.Rank{1},
		Reason: "connection reset"})
	return errors.Join(err, kv.Close())
}

// hvdrun returns a command that runs this test binary as hvdrun. The command is killed after deadline.
func hvdrun(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self := testnet.Self(t)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	cmd := exec.CommandContext(ctx, self, append([]string{"hvdrun"}, args...)...)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Second
	// If the test fails, the job must have ended before the test removes the folders in which it writes.
	t.Cleanup(func() {
		if cancel(); cmd.Process != nil {
			_ = cmd.Wait() // fails if the test has waited
		}
	})
	return cmd
}

// output runs hvdrun and returns its standard output, its standard error and its exit status.
func output(t *testing.T, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	cmd := hvdrun(t, args...)
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	var exit *exec.ExitError
	if e := cmd.Run(); e != nil && !errors.As(e, &exit) {
		t.Fatal(e)
	}
	return out.String(), err.String(), cmd.ProcessState.ExitCode()
}

// TestWrongUsage runs hvdrun with wrong command lines. Each must end with exit status 2 and one line of
// explanation, and must start nothing.
func TestWrongUsage(t *testing.T) {
	started := filepath.Join(t.TempDir(), "started")
	touch := []string{"touch", started}
	check := func(want string, args ...string) {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			stdout, stderr, status := output(t, args...)
			if status != 2 || stdout != "" {
				t.Errorf("got exit status %d and %q on stdout, want 2 and nothing", status, stdout)
			}
			lines := strings.Split(strings.TrimSpace(stderr), "\n")
			if len(lines) != 2 || !strings.HasPrefix(lines[0], "hvdrun: ") ||
				!strings.Contains(lines[0], want) || lines[1] != "Try 'hvdrun --help'." {
				t.Errorf("got %q on stderr, want a line with %q and a hint", stderr, want)
			}
		})
	}
	for _, c := range []struct{ flags, want string }{ // each with a command
		{"-np 0", `-np: got "0"`},
		{"-np x", `-np: got "x"`},
		{"-np=-1", `-np: got "-1"`},
		{"-n 1000000", "1 to 4096"},
		{"-np 2 --no-such-flag", "no-such-flag"},
		{"-np 2 -q", "'q'"},
		{"-np 2 -x =1", `-x: got "=1"`},
		{"-np 2 -x HOROVOD_RANK=1", "got HOROVOD_RANK, which the launcher itself sets"},
		{"--servers 2", "--workers is missing: a job with a parameter server"},
		{"--workers 2", "--servers is missing: a job with a parameter server"},
		{"--servers 0 --workers 2", `--servers: got "0", want a number from 1 to 4096`},
		{"--servers 5000 --workers 2", `--servers: got "5000", want a number from 1 to 4096`},
		{"--servers 2 --workers 4094", "got 4097 nodes with the scheduler, want at most 4096"},
		{"--servers 1 --workers 2 -np 3", "--num-proc cannot be used with --servers and --workers"},
		{"--servers 1 --workers 2 -H h1:1,h2:1", "got 1 servers and 2 workers, but the hosts have only 2 slots"},
		{"-np 2 --restarts 1",
			"--restarts requires --servers and --workers: for ranks, give --min-np (docs/elastic.md)"},
		{"--mpi -np 2 --restarts 1", "--restarts requires --servers and --workers"},
		{"--servers 1 --workers 1 --restarts -1", `--restarts: got "-1", want a number from 0 to 4096`},
		{"--servers 1 --workers 1 --restarts 1 -x HVD_STALENESS=0", "--restarts cannot be used with HVD_STALENESS"},
		{"--servers 1 --workers 1 -x DMLC_ROLE=worker", "got DMLC_ROLE, which the launcher itself sets"},
		{"--servers 2 --workers 1 -x PORT=8080", "got PORT, which the launcher itself sets"},
		{"-np 2 --start-timeout soon", `--start-timeout: got "soon", want a number of seconds`},
		{"-np 2 --start-timeout=", `--start-timeout: got "", want a number of seconds`},
		{"-np 2 --fusion-threshold-mb -1", `--fusion-threshold-mb: got "-1", want a number of MiB`},
		{"-np 2 --cache-capacity=x", `--cache-capacity: got "x", want a whole number`},
		{"-np 2 --deterministic=x", `--deterministic: got "x", want the flag without a value`},
		{"-np 2 -x HOROVOD_CACHE_CAPACITY=x", `HOROVOD_CACHE_CAPACITY from flag -x: got "x"`},
		{"-np 2 -x HOROVOD_CPU_OPERATIONS=ccl", "which gohvd does not have"},
		{"-np 2 --cache-capasity 7", "unknown flag: --cache-capasity; did you mean --cache-capacity?"},
		{"-np 2 --config-file no/such.yaml", "no/such.yaml"},
		{"-np 2 --config-file=", "want the path of one settings file"},
		{"-np 2 --config-file a --config-file b", `--config-file: got "b", want the path of one settings file`},
		{"-np 5 -H h1:2,h2:2", "got 5 ranks, but the hosts have only 4 slots (h1 has 2, h2 has 2)"},
		{"-np 3 -H localhost:2", "got 3 ranks, but the hosts have only 2 slots"},
		{"-H h1:65536,h1", "with which host h1 has 65537 slots"},
		{"-H h1:2, h2:2",
			`--hosts: got "h1:2,", which is followed by "h2:2" instead of a command: put commas and no blanks`},
		{"-np 4 --hosts=h1:2 h2:2", "between hosts, as in h1:2,h2:2"},
		{"-H h1:x", `--hosts: got "h1:x"`},
		{"--hosts=", "--hosts: got an empty value"},
		{"-H h1:4000,h2:4000", "got 8000 slots on all hosts, want at most 4096 ranks"},
		{"-np 2 -hostfile no/such/file", "--hostfile: open no/such/file"},
		{"-np 2 --hostfile=", "--hostfile: got an empty value"},
		{"-H h1 -hostfile f", "--hosts and --hostfile cannot be used together"},
		{"-H h1 -p 0", "--ssh-port: got 0, want 1 to 65535"},
		{"-H h1 -p x", `--ssh-port: got "x"`},
		{"-H h1 -p 22 --agent rsh", "apply only to ssh, which --agent replaces"},
		{"-H h1 -i f --agent rsh", "apply only to ssh, which --agent replaces"},
		{"-H h1 --remote-hvdrun=", "--remote-hvdrun: got an empty value"},
		{"-H h1 --torch-store 127.0.0.1:0", `--torch-store: got "127.0.0.1:0", want an address at which other hosts`},
		{"-H h1 --network-interfaces nothing0", "nothing0"},
		{"-np 2 --min-np 3", `--min-np: got "3", want a number from 1 to 2, the value of -np`},
		{"-np 2 --min-np 0", `--min-np: got "0"`},
		{"-np 2 --min-np 1 --max-np 1", `--max-np: got "1", want a number from 2, the value of -np`},
		{"-np 2 --max-np 2", "--max-num-proc is for elastic jobs: give --min-np or --host-discovery-script too"},
		{"-np 2 --min-np 1 --spares -1", "--spares: got -1"},
		{"-np 2 --min-np 1 --slots-per-host 4", "--slots-per-host is for the hosts of --host-discovery-script"},
		{"-np 2 --min-np 1 --torch-store 127.0.0.1:0", "--torch-store cannot be used in an elastic job"},
		{"-np 2 --min-np 1 --max-np 4000 --spares 97", "--spares: got 97, want a number from 0 to 96"},
		{"-np 2 --spares 1", "--spares is for elastic jobs"},
		{"-np 2 --min-np 1 --blacklist rack", `--blacklist: got "rack", want slot or host`},
		{"-np 2 --min-np 1 --blacklist-cooldown-range 9", "want two numbers of seconds, as in 10,100"},
		{"-np 2 --min-np 1 --blacklist_cooldown_range 9 3",
			`--blacklist-cooldown-range: got "9,3", want a first number that is at most the second one`},
		{"-np 2 --min-np 1 --blacklist-cooldown-range 9,3", "want a first number that is at most the second one"},
		{"-np 2 --min-np 1 --reset-limit -2", "--reset-limit: got -2"},
		{"-np 2 -H h1:2 --host-discovery-script s",
			"--host-discovery-script cannot be used together with --hosts or --hostfile"},
		{"-np 3 --min-np 1 -H h1,h2", "-np: got 3, but the hosts have 2 slots"},
		{"-np 0 --min-np 1", `-np: got "0", want a number from 1`},
		{"-np 1 --min-np 1 -H h1:0", `--hosts: got "h1:0"`},
		{"-np 2 --host-discovery-script s --slots-per-host 0", "--slots-per-host: got 0, want 1 to"},
		{"--servers 1 --workers 1 --min-np 1", "--min-num-proc cannot be used with --servers and --workers"},
		{"--nproc_per_node=2", "--nproc_per_node is a flag of torchrun: use -np N, or on several hosts -H h1:N,h2:N"},
		{"-np 2 --rdzv-endpoint h:1", "--rdzv-endpoint is a flag of torchrun: leave it out"},
		{"-np 2 -m train", "-m is a flag of torchrun: use python3 -m MODULE"},
		{"-np 2 -host h1,h2", "--host is a flag of mpirun: use -H h1:N,h2:N"},
		{"-np 2 --bind-to socket", `--bind-to: got "socket", want none, core or numa`},
		{"-np 2 --bind-to core --thread-affinity 0,1",
			"HVD_BIND_TO (--bind-to) is core and HOROVOD_THREAD_AFFINITY (--thread-affinity) is set: use one of them"},
		{"-np 2 --min-np 1 --bind-to core", "--bind-to core cannot be used in an elastic job"},
		{"-np 2 -mca pml ob1", "--mca is a flag of mpirun: put it into --mpi-args, with --mpi"},
		{"-ppn 2", "--ppn is a flag of mpirun: use -H h1:N,h2:N"},
		{"-N 2", "-N is a flag of mpirun: use -H h1:N,h2:N"},
		{"-np 2 --jsrun", "--jsrun: hvdrun does not run jsrun"},
		{"-np 2 --mpi-args -v", "--mpi-args requires --mpi"},
		{"--mpi --servers 1 --workers 1", "--servers cannot be used with --mpi"},
		{"--torus-allreduce", "--torus-allreduce: this version has no torus algorithm"},
	} {
		check(c.want, append(strings.Fields(c.flags), touch...)...)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "number of ranks is missing"},
		{touch, "number of ranks is missing"},
		{[]string{"-np", "2"}, "command is missing"},
		{[]string{"-np", "2", "--"}, "command is missing"},
		{[]string{"-np"}, "needs an argument"},
		{[]string{"--servers", "2", "--workers", "3"},
			"the command is missing: hvdrun --servers 2 --workers 3 command"},
		{append([]string{"-H", "h1:2 h2:2"}, touch...),
			`--hosts: got "h1:2 h2:2", want commas between hosts, as in h1:2,h2:2`},
		{append([]string{"-H", "h1", "--agent", " "}, touch...), "--agent: got an empty value"},
		{append([]string{"--servers", "1", "--workers", "1", "--host-discovery-script", "echo localhost:3"}, touch...),
			"a job with a parameter server cannot be elastic"},
	} {
		check(c.want, c.args...)
	}
	if _, err := os.Stat(started); err == nil {
		t.Error("a command was started")
	}
}

// TestFormsOfTheCommandLine checks that all ways to write a flag have the same effect, and that flags after
// the command belong to the command and not to hvdrun.
func TestFormsOfTheCommandLine(t *testing.T) {
	echo := []string{"sh", "-c", `echo "$A $*"`, "-np", "7", "--num_proc=8", "-v", "--", "x"}
	for _, c := range []struct {
		flags []string
		want  string // value of the variable A at the ranks
	}{
		{[]string{"-np", "2"}, ""},
		{[]string{"-np=2"}, ""},
		{[]string{"--np", "2"}, ""},
		{[]string{"--np=2"}, ""},
		{[]string{"-n", "2"}, ""},
		{[]string{"-n2"}, ""},
		{[]string{"--num-proc", "2"}, ""},
		{[]string{"--num_proc", "2"}, ""},
		{[]string{"--num_proc=2", "--tag_output"}, ""},
		{[]string{"-np", "2", "--"}, ""},
		{[]string{"-x", "A=1,2", "-np", "2"}, "1,2"},
		{[]string{"-np", "2", "-xA=1", "-x", "PATH"}, "1"},
		{[]string{"-np", "3", "-x", "A=-np", "-np", "2"}, "-np"},
		{[]string{"-np", "2", "--min-np", "2", "--max-np=2"}, ""},
		{[]string{"-hosts", "localhost:2"}, ""},
	} {
		t.Run(strings.Join(c.flags, " "), func(t *testing.T) {
			stdout, stderr, status := output(t, append(slices.Clone(c.flags), echo...)...)
			lines := strings.Split(stdout, "\n")
			slices.Sort(lines)
			args := " 7 --num_proc=8 -v -- x" // without -np, which is $0 of the shell
			want := []string{"", "[0]<stdout>:" + c.want + args, "[1]<stdout>:" + c.want + args}
			if status != 0 || !slices.Equal(lines, want) {
				t.Errorf("got exit status %d, %q and %q, want 0 and %q", status, stdout, stderr, want)
			}
		})
	}
}

// TestSpares checks that this host has slots for the ranks and the spares, and that hvdrun warns if the given
// hosts have not.
func TestSpares(t *testing.T) {
	const warning = "hvdrun: warning: --spares 2: the hosts have 3 slots for up to 2 ranks, so the number of spares is 1\n"
	for _, c := range []struct {
		flags     []string
		processes int
		warns     bool
	}{
		{[]string{"-np", "2", "--min-np", "1", "--max-np", "4", "--spares", "1"}, 5, false},
		{[]string{"-np", "2", "--min-np", "1", "--max-np", "3"}, 3, false},
		{[]string{"-np", "2", "--min-np", "1", "-H", "localhost:3", "--spares", "2"}, 3, true},
	} {
		stdout, stderr, status := output(t, append(c.flags, "echo", "begins")...)
		if status != 0 || strings.Count(stdout, "begins\n") != c.processes ||
			strings.Contains(stderr, warning) != c.warns {
			t.Errorf("%q: got exit status %d, %q and %q, want %d processes, and a warning: %t", c.flags, status, stdout,
				stderr, c.processes, c.warns)
		}
	}
}

// TestTCP checks that --tcp sets the variable of NCCL, and that a value that the user sets takes precedence.
func TestTCP(t *testing.T) {
	for _, c := range []struct {
		flags []string
		want  string
	}{
		{nil, "\n"},
		{[]string{"--tcp"}, "1\n"},
		{[]string{"--tcp=false"}, "\n"},
		{[]string{"--tcp", "-x", "NCCL_IB_DISABLE=0"}, "0\n"},
	} {
		args := append([]string{"-np", "1", "--tag-output=false"}, c.flags...)
		stdout, stderr, status := output(t, append(args, "sh", "-c", "echo $NCCL_IB_DISABLE$OMPI_MCA_btl")...)
		if status != 0 || stderr != "" || stdout != c.want {
			t.Errorf("%q: got exit status %d, %q and %q, want %q", c.flags, status, stdout, stderr, c.want)
		}
	}
}

func TestStatusOfTheJob(t *testing.T) {
	for _, c := range []struct {
		args []string
		want int
	}{
		{[]string{"true"}, 0},
		{[]string{"sh", "-c", "exit 3"}, 3},
		{[]string{"sh", "-c", "kill -9 $$"}, 137},
		{[]string{"no-such-program"}, 127},
		{[]string{os.TempDir()}, 126},
		{[]string{"completion"}, 127}, // launches a command named completion, which does not exist
		{[]string{"--", "completion"}, 127},
		{[]string{"--", "help"}, 127},
		{[]string{"config"}, 127},
	} {
		if _, stderr, status := output(t, append([]string{"-np", "2"}, c.args...)...); status != c.want ||
			c.want >= 126 && c.want <= 127 && !strings.Contains(stderr, c.args[len(c.args)-1]) {
			t.Errorf("%q: got exit status %d and %q, want %d", c.args, status, stderr, c.want)
		}
	}
}

func TestFlagsReachTheRanks(t *testing.T) {
	dir := t.TempDir()
	stdout, stderr, status := output(t, "-np", "1", "--start-timeout", "2.5", "--output-filename", dir,
		"--tag-output=false", "--verbose",
		"sh", "-c", "echo $HOROVOD_GLOO_TIMEOUT_SECONDS")
	if status != 0 || stdout != "2.5\n" {
		t.Errorf("got exit status %d and %q, want 0 and 2.5", status, stdout)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "rank.0", "stdout")); err != nil || string(got) != "2.5\n" {
		t.Errorf("got %q and error %v in the file, want 2.5", got, err)
	}
	if !strings.Contains(stderr, "hvdrun: rank 0: started as process ") {
		t.Errorf("got %q, want what hvdrun does", stderr)
	}
	if stdout, _, _ := output(t, "-np", "1", "--prefix-output-with-timestamp", "echo",
		"x"); !strings.HasSuffix(stdout, " "+time.Now().Format("2006")+"[0]<stdout>:x\n") {
		t.Errorf("got %q, want the time in front", stdout)
	}
}

// TestNodes checks the environment of the nodes of a parameter server, which variables of other launchers do
// not change, and their files.
func TestNodes(t *testing.T) {
	dir := t.TempDir()
	const script = `test -z "$HOROVOD_RANK$MASTER_PORT" && test "$HVD_SIZE" = 1 && ` +
		`echo "$DMLC_ROLE $DMLC_RANK $DMLC_NUM_SERVER $DMLC_NUM_WORKER $DMLC_PS_ROOT_URI"`
	cmd := hvdrun(t, "--servers", "2", "--workers", "1", "--output-filename", dir, "sh", "-c", script)
	cmd.Env = append(cmd.Env, "HOROVOD_RANK=3", "HOROVOD_SIZE=4", "DMLC_ROLE=worker", "DMLC_RANK=7")
	got, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("got error %v", err)
	}
	for name, want := range map[string]string{"scheduler": "scheduler 0", "server 0": "server 0",
		"server 1": "server 1", "worker 0": "worker 0"} {
		want += " 2 1 127.0.0.1\n"
		if line := "[" + name + "]<stdout>:" + want; !strings.Contains(string(got), line) {
			t.Errorf("got %q, want %q in it", got, line)
		}
		file := filepath.Join(dir, strings.ReplaceAll(name, " ", "."), "stdout")
		if text, err := os.ReadFile(file); err != nil || string(text) != want {
			t.Errorf("%s: got %q and error %v, want %q", file, text, err, want)
		}
	}
}

// TestRestarts checks that a node that is started again has the environment that it had before, with a time
// for which nodes wait for its return, which a user can change.
func TestRestarts(t *testing.T) {
	for _, c := range []struct{ recovery, want string }{{"", "60"}, {"HVD_RECOVERY_SECONDS=7", "7"}} {
		t.Chdir(t.TempDir())
		const script = `echo $DMLC_ROLE $DMLC_RANK waits $HVD_RECOVERY_SECONDS
case $DMLC_ROLE in scheduler) until [ -e finished ]; do sleep 0.01; done;;
worker) if [ $DMLC_RANK = 1 ]; then [ -e failed ] || { echo >failed; exit 3; }; echo >finished; fi;; esac`
		cmd := hvdrun(t, "--servers", "1", "--workers", "2", "--restarts", "1", "sh", "-c", script)
		cmd.Env = append(cmd.Env, c.recovery)
		got, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("got error %v", err)
		}
		for want, n := range map[string]int{"[worker 1]<stdout>:worker 1 waits " + c.want + "\n": 2,
			"[server 0]<stdout>:server 0 waits " + c.want + "\n":                             1,
			"hvdrun: worker 1: exit status 3; starting it again in 100ms (restart 1 of 1)\n": 1} {
			if strings.Count(string(got), want) != n {
				t.Errorf("got %q, want %d times %q in it", got, n, want)
			}
		}
	}
}

// TestReservedPort checks that nobody gets a reserved port by chance, and that a process can listen on it.
func TestReservedPort(t *testing.T) {
	for _, several := range []bool{false, true} {
		reservedPort(t, several)
	}
}

func reservedPort(t *testing.T, several bool) {
	root, release, err := reservePort(several)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	// A socket without SO_REUSEADDR gets the port only if no other socket has it.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	at := &unix.SockaddrInet4{Addr: root.Addr().As4(), Port: int(root.Port())}
	if err := unix.Bind(fd, at); err != unix.EADDRINUSE {
		t.Errorf("bind to the reserved port: got error %v, want %v", err, unix.EADDRINUSE)
	}
	listen := root.String()
	if several {
		listen = fmt.Sprintf(":%d", root.Port())
	}
	l, err := net.Listen("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", root.Port()))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestHelp(t *testing.T) {
	stdout, stderr, status := output(t, "--help")
	if status != 0 || stderr != "" {
		t.Errorf("got exit status %d and %q on stderr, want 0 and nothing", status, stderr)
	}
	if n := strings.Count(stdout, "\n  hvdrun -np "); n != 3 {
		t.Errorf("got %d lines that show hvdrun -np, want the usage and two examples", n)
	}
	text := strings.Join(strings.Fields(stdout), " ") // with each line break replaced by a blank
	for _, s := range config.Settings() {
		if !strings.Contains(text, s.Name) || !strings.Contains(text, s.Doc) ||
			!strings.Contains(text, s.Fallback()) {
			t.Errorf("%s, its description or its default is missing", s.Name)
		}
		for _, f := range s.Flags {
			if shown := strings.Contains(text, " --"+f.Name+" "); shown != (f.Instead == "") {
				t.Errorf("--%s: shown: %v, deprecated: %v", f.Name, shown, f.Instead != "")
			}
		}
	}
	if strings.Contains(stdout, launch.HelperArg) || strings.Contains(stdout, launch.AgentArg) {
		t.Error("the argument of a helper or an agent is shown")
	}
	for _, flag := range []string{"-v", "--version"} {
		if stdout, _, status := output(t, flag); status != 0 || !strings.HasPrefix(stdout, "hvdrun ") ||
			strings.Count(stdout, "\n") != 1 {
			t.Errorf("%s: got exit status %d and %q, want the version", flag, status, stdout)
		}
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if stdout, _, status := output(t, "completion", shell); status != 0 ||
			!strings.Contains(stdout, "hvdrun") {
			t.Errorf("%s: got exit status %d and %.80q, want a script", shell, status, stdout)
		}
	}
	if stdout, _, status := output(t, "__complete", "--num"); status != 0 ||
		!strings.Contains(stdout, "--num-proc") {
		t.Errorf("got exit status %d and %q, want the flag", status, stdout)
	}
	if stdout, _, status := output(t, "__complete", "--servers", "2", "--work"); status != 0 ||
		!strings.Contains(stdout, "--workers") {
		t.Errorf("got exit status %d and %q, want the flag", status, stdout)
	}
	if stdout, _, status := output(t, "__complete", "--servers", "2", "--rest"); status != 0 ||
		!strings.Contains(stdout, "--restarts") {
		t.Errorf("got exit status %d and %q, want the flag", status, stdout)
	}
	if stdout, _, status := output(t, "__complete", "config", "--cache"); status != 0 ||
		!strings.Contains(stdout, "--cache-capacity") {
		t.Errorf("got exit status %d and %q, want the setting's flag", status, stdout)
	}
	// A hint may not suggest another name of a flag.
	if _, stderr, status := output(t, "--min-mp"); status != 2 ||
		stderr != "hvdrun: unknown flag: --min-mp\nTry 'hvdrun --help'.\n" {
		t.Errorf("got exit status %d and %q, want no such flag suggested", status, stderr)
	}
}

// TestVerdictInTheStore checks that the root cause is the rank that the verdict in the store names, even if
// the rank that sent the verdict ends first.
func TestVerdictInTheStore(t *testing.T) {
	self := testnet.Self(t)
	_, stderr, status := output(t, "-np", "2", "sh", "-c",
		`if [ $HOROVOD_RANK = 0 ]; then exec "`+self+
			`" accuse; fi; trap 'kill -9 $$' TERM; while :; do sleep 0.01; done`)
	if status != 137 {
		t.Errorf("got exit status %d, want the accused rank's 137", status)
	}
	if want := "Root cause (found by the surviving ranks): connection reset\n  rank 1: killed by SIGKILL"; !strings.Contains(stderr, want) {
		t.Errorf("got %s, want %q", stderr, want)
	}
}

func TestInterrupt(t *testing.T) {
	cmd := hvdrun(t, "-np", "2", "sh", "-c",
		"trap 'echo bye; exit 0' INT; echo ready; while :; do sleep 0.01; done")
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var out []byte
	interrupted := false
	for buf := make([]byte, 4096); ; {
		n, err := pipe.Read(buf)
		out = append(out, buf[:n]...)
		if !interrupted && bytes.Count(out, []byte("ready")) == 2 {
			interrupted = true
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
		}
		if err != nil {
			break
		}
	}
	cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 130 || bytes.Count(out, []byte("bye")) != 2 {
		t.Errorf("got exit status %d and %q, want 130 and a bye from each rank", got, out)
	}
}

// TestIgnoredSignalsStayIgnored checks that hvdrun, its ranks and its commands ignore SIGHUP if it is ignored
// when hvdrun starts, as under nohup.
func TestIgnoredSignalsStayIgnored(t *testing.T) {
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	ignoring := func(args ...string) *exec.Cmd {
		cmd := hvdrun(t, args...)
		cmd.Path, cmd.Args = shell, append([]string{"sh", "-c", `trap "" HUP; kill -HUP $$; exec "$@"`, "sh"},
			cmd.Args...)
		return cmd
	}
	out, err := ignoring("-np", "2", "sh", "-c", `kill -HUP $PPID $$; echo alive`).Output()
	if err != nil || strings.Count(string(out), "<stdout>:alive\n") != 2 {
		t.Errorf("got %q and error %v, want both ranks alive", out, err)
	}
	agent := filepath.Join(t.TempDir(), "agent")
	testnet.WriteScript(t, agent, "#!/bin/sh\nkill -HUP $PPID\n")
	out, _ = ignoring("doctor", "--agent", agent, "-H", "h1").CombinedOutput() // the status depends on this host
	if !strings.Contains(string(out), "h1") {
		t.Errorf("got %q, want the findings of hvdrun doctor", out)
	}
}

// TestJobInAJob runs hvdrun in a rank of another hvdrun. The inner hvdrun must run a job of its own.
func TestJobInAJob(t *testing.T) {
	self := testnet.Self(t)
	stdout, stderr, status := output(t, "-np", "1", self, "hvdrun", "-np", "2", "sh", "-c",
		"echo $HOROVOD_SIZE $HOROVOD_RANK")
	if status != 0 || !strings.Contains(stdout, "[0]<stdout>:[1]<stdout>:2 1\n") ||
		!strings.Contains(stdout, "[0]<stdout>:[0]<stdout>:2 0\n") {
		t.Errorf("got exit status %d, %q and %q", status, stdout, stderr)
	}
}

// TestRewrite checks that rewrite converts command lines to the form that pflag can parse.
func TestRewrite(t *testing.T) {
	flags := new(runner).command().Flags()
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"-np", "--np"},
		{"-np 2", "--np 2"},
		{"-np 2 a -np 3", "--np 2 -- a -np 3"},
		{"-np 2 -- a", "--np 2 -- a"},
		{"-x -np -np=2 a", "-x -np --np=2 -- a"},
		{"-n2 a", "-n2 -- a"},
		{"-vn 2 a", "-vn 2 -- a"},
		{"--verbose a", "--verbose -- a"},
		{"--output_filename d a", "--output_filename d -- a"},
		{"--unknown a", "--unknown -- a"},
		{"- a", "-- - a"},
		{"-cb", "--cb"},
		{"-prefix-timestamp -np=2 a -cb", "--prefix-timestamp --np=2 -- a -cb"},
		{"--deterministic a", "--deterministic -- a"},
		{"--cycle_time_ms 2 a", "--cycle_time_ms 2 -- a"},
		{"config", "config"},
		{"config -np 2 --json a --b", "config --np 2 --json -- a --b"},
		{"-np 2 config", "--np 2 -- config"},
		{"completion bash", "completion bash"},
		{"--verbose completion", "--verbose -- completion"},
	} {
		if got := strings.Join(rewrite(strings.Fields(c.in), flags), " "); got != c.want {
			t.Errorf("%q: got %q, want %q", c.in, got, c.want)
		}
	}
}

// TestForeignFlags checks that hvdrun rejects each flag in foreignFlags with its advice. None of these flags
// may also be a flag of hvdrun, because then hvdrun would never print the advice.
func TestForeignFlags(t *testing.T) {
	flags := new(runner).command().Flags()
	for _, f := range foreignFlags {
		for _, name := range f.names {
			known, arg := flags.Lookup(name), "-"+name
			if len(name) == 1 {
				known = flags.ShorthandLookup(name)
			}
			if known != nil {
				t.Errorf("%s is a flag of hvdrun's own", name)
			}
			want := arg + " is a flag of " + f.program + ": " + f.instead
			if _, stderr, status := output(t, arg); status != 2 || !strings.Contains(stderr, want) {
				t.Errorf("%s: got exit status %d and %q, want %q", arg, status, stderr, want)
			}
		}
	}
}
