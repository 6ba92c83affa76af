package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

// soon returns a context that ends after 300 ms. It is used for meetings that must fail.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// loopbackNames returns a resolver that resolves each name in want to a loopback address. For all other names
// it returns an error.
func loopbackNames(want ...string) func(context.Context, string) (string, error) {
	return func(_ context.Context, host string) (string, error) {
		for _, w := range want {
			if host == w {
				return loopback, nil
			}
		}
		return "", fmt.Errorf("resolving %q, want %q", host, want)
	}
}

// interfaces parses a list of network interfaces.
func interfaces(t *testing.T, list ...string) netif.Choice {
	t.Helper()
	c, err := netif.Parse(list)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func onLoopback(t *testing.T) netif.Choice { return interfaces(t, loopback) }

// slurmRanks returns the four ranks of a Slurm step. If hosts is 1, all ranks are on one host. If hosts is 2,
// two ranks are on each host.
func slurmRanks(t *testing.T, hosts int) (envs []*Env) {
	t.Helper()
	for r := range 4 {
		n := strconv.Itoa
		envs = append(envs, detect(t, slurmEnv.with("SLURM_PROCID", n(r), "SLURM_STEP_NUM_TASKS", "4",
			"SLURM_LOCALID", n(r%(4/hosts)), "SLURM_NODEID", n(r/(4/hosts)),
			"SLURM_STEP_NODELIST", fmt.Sprintf("node[1-%d]", hosts), "SLURM_STEP_TASKS_PER_NODE",
			fmt.Sprintf("%d(x%d)", 4/hosts, hosts))))
	}
	return envs
}

func TestSlurm(t *testing.T) {
	o := MeetOptions{Secret: parse(t, userSecret), Port: testnet.FreePort(t), Interfaces: onLoopback(t),
		resolver: loopbackNames("node1")}
	mustMeet(t, true, same(o), slurmRanks(t, 2)...)
	o.Port, o.Secret, o.Insecure = testnet.FreePort(t), secret.Secret{}, true
	mustMeet(t, false, same(o), slurmRanks(t, 2)...)
	// If all ranks are on one host, they must meet even if the host's name cannot be resolved and the chosen
	// interface does not exist.
	o.Port, o.resolver, o.Interfaces = testnet.FreePort(t), loopbackNames(), interfaces(t, "192.0.2.1")
	mustMeet(t, false, same(o), slurmRanks(t, 1)...)
	// If the user sets a host, the ranks must meet there instead of at the first host of the step.
	o = MeetOptions{Insecure: true, Port: testnet.FreePort(t), Interfaces: onLoopback(t), Host: "other",
		resolver: loopbackNames("other")}
	mustMeet(t, false, same(o), slurmRanks(t, 2)...)
}

// TestInterfaces chooses interfaces. If the name that the other ranks dial resolves to an address of a chosen
// interface, rank 0 must listen only on this address. Otherwise it must listen on all interfaces.
func TestInterfaces(t *testing.T) {
	meet := func(o MeetOptions, unnamed bool) (*Place, int, error) {
		o.Insecure, o.Port = true, testnet.FreePort(t)
		e := slurmRanks(t, 2)[0]
		if unnamed {
			e.host = "" // as on the main node of AWS Batch
		}
		m, err := e.Meet(testnet.Context(t), o)
		return m, o.Port, err
	}
	node1 := func(addr string, err error) func(context.Context, string) (string, error) {
		return func(_ context.Context, host string) (string, error) {
			if host != "node1" {
				t.Errorf("asked for %q, want node1", host)
			}
			return addr, err
		}
	}
	for name, c := range map[string]struct {
		o       MeetOptions
		onOther bool // rank 0 must also listen on other loopback addresses
	}{
		"none chosen": {MeetOptions{resolver: node1(loopback, nil)}, true},
		"chosen": {MeetOptions{Interfaces: interfaces(t, "203.0.113.1", "127.0.0.0/30"),
			resolver: node1(loopback, nil)}, false},
		"by the system's resolver": {MeetOptions{Interfaces: onLoopback(t), Host: loopback}, false},
		"no name":                  {MeetOptions{Interfaces: onLoopback(t)}, false},
		"another than the name's": {MeetOptions{Interfaces: onLoopback(t),
			resolver: node1("192.0.2.1", nil)}, true},
		"no address": {MeetOptions{Interfaces: onLoopback(t), resolver: node1("", errors.New("broken"))},
			true},
	} {
		t.Run(name, func(t *testing.T) {
			m, port, err := meet(c.o, name == "no name")
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if !listens(t, loopback, port) || listens(t, "127.0.0.2", port) != c.onOther {
				t.Errorf("want that rank 0 listens on %s, and on 127.0.0.2: %v", loopback, c.onOther)
			}
		})
	}
	m, _, err := meet(MeetOptions{Interfaces: interfaces(t, "203.0.113.0/24")}, false)
	testnet.WantError(t, err, "network interfaces 203.0.113.0/24: none is up on this host")
	if m != nil {
		t.Error("there is a meeting beside the error")
	}
}

// meetOne lets one rank of a job meet the others. Its place is closed when the test ends.
func meetOne(t *testing.T, e *Env, o MeetOptions) *Place {
	t.Helper()
	m, err := e.Meet(testnet.Context(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// listens reports whether a process listens on host and port.
func listens(t *testing.T, host string, port int) bool {
	t.Helper()
	conn, err := net.Dial("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err == nil {
		return conn.Close() == nil
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Error(err)
	}
	return false
}

func TestSlurmRankZeroElsewhere(t *testing.T) {
	env := slurmEnv.with("SLURM_PROCID", "0", "SLURM_NODEID", "1")
	_, err := detect(t, env).Meet(testnet.Context(t), MeetOptions{Insecure: true})
	testnet.WantError(t, err, "rank 0 is on node 1 of the Slurm step, want node 0")
	meetOne(t, detect(t, env), MeetOptions{Insecure: true, Host: "here", Interfaces: onLoopback(t),
		Port: testnet.FreePort(t), resolver: loopbackNames("here")})
}

func kubernetesRanks(t *testing.T) (envs []*Env) {
	t.Helper()
	for r := range 4 {
		n := strconv.Itoa(r)
		envs = append(envs, detect(t, kubernetesEnv.with("JOB_COMPLETION_INDEX", n, "HOSTNAME", "train-"+n,
			"HVD_SUBDOMAIN", "ranks")))
	}
	return envs
}

// TestKubernetes lets the lookup of the name of rank 0's pod fail at first, as if the pod had not started.
// All ranks must meet nevertheless, because the other ranks retry the lookup until it succeeds.
func TestKubernetes(t *testing.T) {
	var asked atomic.Int32
	o := MeetOptions{Secret: parse(t, userSecret), Port: testnet.FreePort(t), Interfaces: onLoopback(t)}
	o.resolver = func(ctx context.Context, host string) (string, error) {
		if asked.Add(1) < 7 {
			return "", &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
		}
		return loopbackNames("train-0.ranks")(ctx, host)
	}
	mustMeet(t, true, same(o), kubernetesRanks(t)...)
	if n := asked.Load(); n != 10 {
		t.Errorf("asked for names %d times, want 10", n)
	}
}

func TestSecretIsNeeded(t *testing.T) {
	torch := torchrunEnv.with("MASTER_ADDR", loopback, "MASTER_PORT", strconv.Itoa(testnet.FreePort(t)))
	for _, env := range []environment{
		slurmEnv, slurmEnv.with("SLURM_PROCID", "0", "SLURM_NODEID", "0"), kubernetesEnv, torch,
		torch.with("RANK", "0"),
		torch.with("TORCHELASTIC_USE_AGENT_STORE", "False"),
		plainEnv, plainEnv.with("RANK", "0"),
	} {
		e := detect(t, env)
		o := MeetOptions{Interfaces: onLoopback(t)}
		if _, err := e.Meet(testnet.Context(t), o); !errors.Is(err, ErrNoSecret) {
			t.Errorf("%s: got %v, want %v", e.Kind, err, ErrNoSecret)
		}
	}
}

// TestSecretDiffers checks that a rank with another secret, or without a secret, cannot meet the other ranks.
// Its error must give the reason and must not contain the secret.
func TestSecretDiffers(t *testing.T) {
	ours := parse(t, userSecret)
	for what, theirs := range map[string]secret.Secret{"another": parse(t, userSecret+"!"), "none": {}} {
		o := MeetOptions{Secret: ours, Insecure: true, Port: testnet.FreePort(t), Interfaces: onLoopback(t),
			resolver: loopbackNames("train-0.ranks")}
		envs := kubernetesRanks(t)
		meetOne(t, envs[0], o)
		o.Secret = theirs
		_, err := envs[1].Meet(testnet.Context(t), o)
		if !errors.Is(err, secret.ErrWrong) && !errors.Is(err, secret.ErrNeeded) {
			t.Errorf("%s: got %v", what, err)
		}
		testnet.WantError(t, err, "rank 1 of 4 (Kubernetes)")
		if strings.Contains(fmt.Sprint(err), userSecret) {
			t.Errorf("the error shows the secret: %v", err)
		}
	}
}

// TestAnotherJobsStore lets two jobs without secrets use the same port. The ranks of the second job must get
// an error. If a rank has connected to the store of the first job, its error must name the first job.
func TestAnotherJobsStore(t *testing.T) {
	o := MeetOptions{Insecure: true, Port: testnet.FreePort(t), Interfaces: onLoopback(t),
		resolver: loopbackNames("train-0.ranks", "eval-0.eval")}
	meetOne(t, kubernetesRanks(t)[0], o)
	eval := kubernetesEnv.with("JOB_COMPLETION_INDEX", "1", "HOSTNAME", "eval-1")
	_, err := detect(t, eval).Meet(testnet.Context(t), o)
	testnet.WantError(t, err, "train", "eval", "HVD_RENDEZVOUS_PORT")
	_, err = detect(t, eval.with("JOB_COMPLETION_INDEX", "0", "HOSTNAME", "eval-0")).Meet(testnet.Context(t),
		o)
	testnet.WantError(t, err, "HVD_RENDEZVOUS_PORT")
	if !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("got %v", err)
	}
	// A rank of the same job but with another size must be refused too.
	_, err = detect(t, kubernetesEnv.with("HVD_SUBDOMAIN", "ranks", "HVD_SIZE", "5")).Meet(testnet.Context(t),
		o)
	testnet.WantError(t, err, "of 4 ranks", "of 5 ranks")
}

// TestClose checks that Close calls the registered functions in reverse order, so that a server is closed
// before its store. It must call all of them even if one fails, and a second Close must call none.
func TestClose(t *testing.T) {
	p := new(Place)
	var order []int
	broken := errors.New("broken")
	for i := range 3 {
		p.onClose(func() error {
			order = append(order, i)
			if i == 1 {
				return broken
			}
			return nil
		})
	}
	if err := p.Close(); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if err := p.Close(); err != nil || !slices.Equal(order, []int{2, 1, 0}) {
		t.Errorf("got %v, closed in the order %v", err, order)
	}
}

func TestHvdrunsStore(t *testing.T) {
	s := parse(t, userSecret)
	server := serve(t, newStore(t), s)
	p, err := Dial(testnet.Context(t), server.Addr(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Store.Set(t.Context(), "x", nil); err != nil || p.Addr != server.Addr() || p.Secret.IsZero() {
		t.Errorf("got %v, %v", p, err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	_, err = detect(t, environment{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}).Meet(testnet.Context(t), MeetOptions{})
	testnet.WantError(t, err, "Meet does not connect to the store of hvdrun")
}

func TestAlone(t *testing.T) {
	for _, env := range []environment{
		{"HVD_SIZE": "1"},
		{"RANK": "0", "WORLD_SIZE": "1"},
		{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"},
		{"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
		{"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "77"},
		{"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"},
		kubernetesEnv.with("JOB_COMPLETION_INDEX", "0", "HOSTNAME", "train-0", "HVD_SIZE", "1"),
	} {
		e := detect(t, env)
		mustMeet(t, false, same(MeetOptions{}), e)
		if _, err := e.Meet(t.Context(), MeetOptions{}); !errors.Is(err, ErrMet) {
			t.Errorf("%s: the second meeting gives %v, want %v", e.Kind, err, ErrMet)
		}
		mustMeet(t, true, same(MeetOptions{Secret: parse(t, userSecret)}), detect(t, env))
	}
}

// openMPIRanks returns the four ranks of an Open MPI job on one host, and the session directory of the job,
// which it has created.
func openMPIRanks(t *testing.T) (envs []*Env, dir string) {
	t.Helper()
	dir = t.TempDir()
	for r := range 4 {
		n := strconv.Itoa(r)
		envs = append(envs, detect(t, openMPIEnv.with("OMPI_COMM_WORLD_RANK", n, "OMPI_COMM_WORLD_LOCAL_RANK",
			n, "PMIX_SERVER_TMPDIR", dir,
			"PMIX_NAMESPACE", "prterun-h-1@1/../x")))
	}
	return envs, dir
}

func TestTheFile(t *testing.T) {
	envs, dir := openMPIRanks(t)
	mustMeet(t, true, same(MeetOptions{}), envs...)
	if left, err := os.ReadDir(dir); len(left) > 0 || err != nil {
		t.Errorf("left in the directory: %v, %v", left, err)
	}

	envs, dir = openMPIRanks(t)
	m := meetOne(t, envs[0], MeetOptions{})
	left, err := os.ReadDir(dir)
	if len(left) != 1 || err != nil || left[0].Name() != "gohvd-prterun-h-1_1_.._x" {
		t.Fatalf("in the directory: %v, %v", left, err)
	}
	info, err := left[0].Info()
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("the file has mode %v, %v", info.Mode(), err)
	}
	// If mpirun has removed the file, Close must return no error.
	if err := os.Remove(filepath.Join(dir, left[0].Name())); err != nil {
		t.Error(err)
	}
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Error(err)
	}
}

func TestTheFileDoesNotCome(t *testing.T) {
	envs, _ := openMPIRanks(t)
	err := testnet.EventuallyError(t, func(ctx context.Context) error {
		_, err := envs[1].Meet(ctx, MeetOptions{})
		return err
	}, "rank 1 of 4", "waiting for rank 0 to write")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	_, err = detect(t, openMPIEnv.with("PMIX_SERVER_TMPDIR", "")).Meet(testnet.Context(t), MeetOptions{})
	testnet.WantError(t, err, "PMIX_SERVER_TMPDIR")
	_, err = detect(t, openMPIEnv.with("OMPI_COMM_WORLD_RANK", "0", "PMIX_SERVER_TMPDIR",
		filepath.Join(t.TempDir(), "gone"))).Meet(testnet.Context(t), MeetOptions{})
	testnet.WantError(t, err, "no such file")
}

// An earlier program may have left a file, whose store no longer exists. A rank that has read it must meet a
// rank 0 that comes later.
func TestTheFileOfAnEarlierProgram(t *testing.T) {
	envs, dir := openMPIRanks(t)
	asked := make(chan struct{}, 100)
	addr := testnet.FakeServer(t, func(net.Conn) { asked <- struct{}{} })
	_, word := secret.New()
	if err := writePrivate(filepath.Join(dir, "gohvd-"+fileName(envs[1].JobID)), addr+","+word); err != nil {
		t.Fatal(err)
	}
	met := make(chan error, 1)
	go func() {
		m, err := envs[1].Meet(testnet.Context(t), MeetOptions{})
		if err == nil {
			err = m.Close()
		}
		met <- err
	}()
	<-asked
	meetOne(t, envs[0], MeetOptions{})
	if err := <-met; err != nil {
		t.Error(err)
	}
}

// TestGivenToSome gives the secret of the user only to rank 0, or only to the other ranks. The other ranks
// must get an error that says so.
func TestGivenToSome(t *testing.T) {
	given := MeetOptions{Secret: parse(t, userSecret)}
	for first, part := range map[bool]string{true: "rank 0 was given a secret, but this rank was not",
		false: "this rank was given a secret, but rank 0 was not"} {
		envs, _ := openMPIRanks(t)
		options := map[bool]MeetOptions{first: given, !first: {}}
		meetOne(t, envs[0], options[true])
		_, err := envs[1].Meet(testnet.Context(t), options[false])
		testnet.WantError(t, err, part)
	}
}

// TestOpenMPIOnHosts runs Open MPI on several hosts, where the ranks do not know the host of rank 0. Meet
// must return an error, unless the user sets the host and the port.
func TestOpenMPIOnHosts(t *testing.T) {
	ranks := func() (envs []*Env) {
		for r := range 2 {
			envs = append(envs, detect(t, openMPIEnv.with("OMPI_COMM_WORLD_RANK", strconv.Itoa(r),
				"OMPI_COMM_WORLD_SIZE", "2",
				"OMPI_COMM_WORLD_LOCAL_RANK", "0", "OMPI_COMM_WORLD_LOCAL_SIZE", "1")))
		}
		return envs
	}
	for _, err := range meetAll(testnet.Context(t), true, same(MeetOptions{}), ranks()...) {
		testnet.WantError(t, err, "1 of 2 ranks are on this host", "hvdrun -H")
	}
	o := MeetOptions{Secret: parse(t, userSecret), Host: "first", Interfaces: onLoopback(t),
		resolver: loopbackNames("first")}
	for _, err := range meetAll(testnet.Context(t), true, same(o), ranks()...) {
		testnet.WantError(t, err, "HVD_RENDEZVOUS_PORT")
	}
	o.Port = testnet.FreePort(t)
	mustMeet(t, true, same(o), ranks()...)
}

func TestPrivateFiles(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	if err := writePrivate(path("good"), "text"); err != nil {
		t.Fatal(err)
	}
	if text, err := readPrivate(path("good")); text != "text" || err != nil {
		t.Errorf("got %q, %v", text, err)
	}
	// writePrivate must replace an existing file, even one with mode 0644, by a file that readPrivate
	// accepts.
	if err := errors.Join(os.WriteFile(path("old"), []byte("old"), 0o644), os.Chmod(path("old"), 0o644),
		writePrivate(path("old"), "new")); err != nil {
		t.Fatal(err)
	}
	if text, err := readPrivate(path("old")); text != "new" || err != nil {
		t.Errorf("got %q, %v", text, err)
	}
	if err := errors.Join(
		os.WriteFile(path("group"), nil, 0o600), os.Chmod(path("group"), 0o640),
		os.WriteFile(path("others"), nil, 0o600), os.Chmod(path("others"), 0o602),
		os.Mkdir(path("directory"), 0o700),
		unix.Mkfifo(path("pipe"), 0o600),
		os.Symlink(path("good"), path("link")),
		os.WriteFile(path("long"), make([]byte, maxPrivateBytes+1), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	for name, part := range map[string]string{
		"group": "want a file of mode 0600", "others": "want a file of mode 0600", "directory": "want a file",
		"pipe": "want a file",
		"link": "symbolic links", "long": "more than 4096 bytes",
	} {
		_, err := waitPrivate(testnet.Context(t), path(name), "")
		testnet.WantError(t, err, part, name)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(path("good"), 12345, -1); err != nil {
			t.Fatal(err)
		}
		_, err := readPrivate(path("good"))
		testnet.WantError(t, err, "belongs to user 12345")
	}
	// If the path is a directory, writePrivate must return an error and leave no temporary file behind.
	if err := writePrivate(path("directory"), "text"); err == nil {
		t.Error("replaced a directory")
	}
	if left, err := filepath.Glob(path(".gohvd-*")); len(left) > 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
}

func FuzzAnnouncement(f *testing.F) {
	f.Add("127.0.0.1:4711,given")
	f.Add("[::1]:1,0123456789abcdef")
	f.Add(":1,x")
	f.Add("h:65536,x")
	f.Add("h:0,x")
	f.Fuzz(func(t *testing.T, text string) {
		host, port, word, err := parseAnnouncement(text)
		if err != nil {
			if _, secretText, _ := strings.Cut(text, ","); len(secretText) > 8 &&
				strings.Contains(err.Error(), secretText) {
				t.Errorf("%q: the error shows the word: %v", text, err)
			}
			return
		}
		if host == "" || port < 1 || port > 65535 {
			t.Fatalf("%q gives %q, %d", text, host, port)
		}
		if h, p, w, err := parseAnnouncement(net.JoinHostPort(host, strconv.Itoa(port)) + "," +
			word); h != host || p != port || w != word || err != nil {
			t.Fatalf("%q gives %q, %d, %q, and written again %q, %d, %q, %v", text, host, port, word, h, p, w,
				err)
		}
	})
}

// torchRanks returns four workers of torchrun. If hosts is 1, all workers are on one host. If hosts is 2, two
// workers are on each host. The slice more holds names and values of further variables in turn.
func torchRanks(t *testing.T, hosts int, more ...string) (envs []*Env) {
	t.Helper()
	for r := range 4 {
		n := strconv.Itoa
		envs = append(envs, detect(t, torchrunEnv.with("RANK", n(r), "LOCAL_RANK", n(r%(4/hosts)),
			"LOCAL_WORLD_SIZE", n(4/hosts),
			"GROUP_RANK", n(r/(4/hosts)), "GROUP_WORLD_SIZE", n(hosts)).with(more...)))
	}
	return envs
}

func TestTorchrunsStore(t *testing.T) {
	h := newStore(t)
	port := serveTorch(t, h)
	o := MeetOptions{resolver: loopbackNames("head")}
	given := o
	given.Secret = parse(t, userSecret)
	insecure := o
	insecure.Insecure = true

	mustMeet(t, true, same(o), torchRanks(t, 1, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID", "one")...)
	mustMeet(t, true, same(given), torchRanks(t, 1, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID", "given")...)
	mustMeet(t, true, same(given), torchRanks(t, 2, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID", "hosts")...)
	// The next program may have another secret.
	next := o
	next.Secret = parse(t, userSecret+"2")
	mustMeet(t, true, same(next), torchRanks(t, 2, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID", "hosts")...)
	mustMeet(t, false, same(insecure), torchRanks(t, 2, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID",
		"insecure")...)
	// After a restart by torchrun, the ranks must be able to meet again in the same store, because each run
	// uses other keys.
	mustMeet(t, true, same(o), torchRanks(t, 1, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID", "one",
		"TORCHELASTIC_RESTART_COUNT", "3")...)

	// Any process can read the TCPStore. So it must contain only the name of the socket at which rank 0 hands
	// over the secret. The socket must be closed and the name be gone when the ranks have met.
	const shared = "/gohvd/shown/2/" + torchSecretKey
	m := meetOne(t, torchRanks(t, 1, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID", "shown")[0], o)
	word, err := h.Get(t.Context(), shared)
	name, ok := strings.CutPrefix(string(word), wordSocket)
	if err != nil || !ok || checkHandoverName(name) != nil {
		t.Errorf("the store has %q, %v, want the name of a socket", word, err)
	}
	if err := errors.Join(m.Met(t.Context()), m.Close()); err != nil {
		t.Error(err)
	}
	if _, there, err := h.TryGet(t.Context(), shared); there || err != nil {
		t.Errorf("the name of the socket is still in the store after the meeting (%v)", err)
	}
	if _, err := takeOver(t.Context(), name); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("taking over the secret after the meeting: got %v, want %v", err, syscall.ECONNREFUSED)
	}

	// A rank must refuse these values of the key, which another program may have written. A file of the user
	// whose contents everybody knows must not become the secret.
	for word, part := range map[string]string{
		"0123456789abcdef0123456789abcdef":            "or the name of a socket",
		"/proc/self/mountstats":                       "or the name of a socket",
		wordSocket + "/proc/self/mountstats":          "malformed name",
		wordSocket + "../../proc/self/mountstats0000": "malformed name",
		wordPrint + "0123456789abcdef":                "but this rank was not",
	} {
		if err := h.Set(t.Context(), "/gohvd/bad/2/"+torchSecretKey, []byte(word)); err != nil {
			t.Fatal(err)
		}
		_, err := torchRanks(t, 1, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID",
			"bad")[1].Meet(testnet.Context(t), o)
		testnet.WantError(t, err, part)
		if strings.Contains(fmt.Sprint(err), word) && strings.Contains(word, "0123") {
			t.Errorf("the error shows it: %v", err)
		}
	}
	if err := h.Set(t.Context(), "/gohvd/bad/2/"+torchSecretKey, []byte("none")); err != nil {
		t.Fatal(err)
	}
	if _, err := torchRanks(t, 1, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID",
		"bad")[1].Meet(testnet.Context(t), o); !errors.Is(err, ErrNoSecret) {
		t.Errorf("got %v, want %v", err, ErrNoSecret)
	}
	// If the ranks are not all on one host, a rank must refuse the name of a socket, which is on rank 0's
	// host.
	if err := h.Set(t.Context(), "/gohvd/bad/2/"+torchSecretKey, []byte(wordSocket+newHandoverName())); err != nil {
		t.Fatal(err)
	}
	_, err = torchRanks(t, 2, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID", "bad")[1].Meet(testnet.Context(t),
		insecure)
	testnet.WantError(t, err, "only 2 of 4 ranks")
}

// TestForgedInTorchrunsStore lets a process without the secret change a value in torchrun's TCPStore, such as
// the address of the root. The other ranks must get an error.
func TestForgedInTorchrunsStore(t *testing.T) {
	ctx := testnet.Context(t)
	h := newStore(t)
	port := serveTorch(t, h)
	o := MeetOptions{Secret: parse(t, userSecret), resolver: loopbackNames("head")}
	var met []*Place
	for _, e := range torchRanks(t, 2, "MASTER_PORT", port, "TORCHELASTIC_RUN_ID", "forged")[:2] {
		met = append(met, meetOne(t, e, o))
	}
	if err := met[0].Store.Set(ctx, "root", []byte("127.0.0.1:1")); err != nil {
		t.Fatal(err)
	}
	if got, err := met[1].Store.Get(ctx, "root"); string(got) != "127.0.0.1:1" || err != nil {
		t.Fatalf("got %q, %v", got, err)
	}
	if err := h.Set(ctx, "/gohvd/"+met[0].JobID+"/"+fingerprint(o.Secret)+"/root", []byte("127.0.0.1:6")); err != nil {
		t.Fatal(err)
	}
	got, err := met[1].Store.Get(ctx, "root")
	if !errors.Is(err, secret.ErrForged) {
		t.Errorf("got %q, %v, want ErrForged", got, err)
	}
}

// silentRank0 is a store in which a rank 0 that has ended has left a word.
type silentRank0 struct {
	store.Store
	word chan string
}

func (s silentRank0) Get(ctx context.Context, _ string) ([]byte, error) {
	select {
	case word := <-s.word:
		return []byte(word), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// If nobody hands over the secret until the time is over, the error says so, also if the time is over while
// the word is read again.
func TestTorchrunsRankZeroIsGone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := silentRank0{word: make(chan string)}
	go func() {
		defer cancel()
		s.word <- wordSocket + newHandoverName()
		s.word <- wordSocket + newHandoverName() // after the first one was of no use
	}()
	_, err := (&Env{Rank: 1, Size: 2, LocalSize: 2}).awaitTorchSecret(ctx, MeetOptions{}, new(Place), s)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "getting the secret from rank 0") {
		t.Errorf("got %v", err)
	}
}

// TestTorchrunWithoutStore covers a torchrun whose agent serves no TCPStore. Rank 0 must serve a store at
// MASTER_PORT, or at the port that the user sets, and the ranks must meet there.
func TestTorchrunWithoutStore(t *testing.T) {
	for _, hosts := range []int{1, 2} {
		port := testnet.FreePort(t)
		o := MeetOptions{Secret: parse(t, userSecret), Interfaces: onLoopback(t),
			resolver: loopbackNames("head")}
		mustMeet(t, true, same(o), torchRanks(t, hosts, "MASTER_PORT", strconv.Itoa(port),
			"TORCHELASTIC_USE_AGENT_STORE", "False")...)
		o.Port = testnet.FreePort(t)
		mustMeet(t, true, same(o), torchRanks(t, hosts, "MASTER_PORT", "1", "TORCHELASTIC_USE_AGENT_STORE",
			"False")...)
	}
}

// plainRanks returns n ranks of a job. Their environments have only PyTorch's variables, such as RANK and
// MASTER_ADDR, and the variables in the slice more.
func plainRanks(t *testing.T, n int, more ...string) (envs []*Env) {
	t.Helper()
	for r := range n {
		envs = append(envs, detect(t, plainEnv.with("RANK", strconv.Itoa(r), "WORLD_SIZE",
			strconv.Itoa(n)).with(more...)))
	}
	return envs
}

func TestPlain(t *testing.T) {
	at := func() []string { return []string{"MASTER_PORT", strconv.Itoa(testnet.FreePort(t))} }
	// If MASTER_ADDR is a loopback address, rank 0 must make the secret. If MASTER_ADDR is a host name, the
	// user must give a secret.
	mustMeet(t, true, same(MeetOptions{}), plainRanks(t, 3, append(at(), "MASTER_ADDR", "127.0.0.1")...)...)
	o := MeetOptions{Secret: parse(t, userSecret), Interfaces: onLoopback(t), resolver: loopbackNames("head")}
	mustMeet(t, true, same(o), plainRanks(t, 3, at()...)...)
	o.Secret, o.Insecure = secret.Secret{}, true
	mustMeet(t, false, same(o), plainRanks(t, 3, at()...)...)
	// The ranks must meet even if MASTER_ADDR is localhost at rank 0 and is the name of rank 0's host at the
	// other ranks.
	o.Secret, o.Insecure, o.Interfaces, o.resolver = parse(t, userSecret), false, netif.Choice{},
		func(_ context.Context, host string) (string, error) {
			return map[string]string{"head": "127.0.0.2", "localhost": loopback}[host], nil
		}
	from := at()
	mustMeet(t, true, same(o), append(plainRanks(t, 3, append(from, "MASTER_ADDR", "localhost")...)[:1],
		plainRanks(t, 3, from...)[1:]...)...)
	o.Secret, o.Insecure, o.Interfaces = secret.Secret{}, true, onLoopback(t)
	// If the user sets a host and a port, the ranks must use them instead of MASTER_ADDR and MASTER_PORT.
	o.Host, o.Port, o.resolver = "other", testnet.FreePort(t), loopbackNames("other")
	mustMeet(t, false, same(o), plainRanks(t, 3, "MASTER_PORT", "1")...)
}

// meetBoth lets the two ranks in envs meet, and returns their places.
func meetBoth(t *testing.T, envs []*Env) (met [2]*Place) {
	t.Helper()
	var errs [2]error
	var wg sync.WaitGroup
	for r, e := range envs {
		wg.Go(func() { met[r], errs[r] = e.Meet(testnet.Context(t), MeetOptions{}) })
	}
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	return met
}

func closeBoth(t *testing.T, met [2]*Place) {
	t.Helper()
	for _, m := range met {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestMasterPortIsGivenUp checks when MASTER_PORT becomes free. PyTorch in rank 0 may need it as soon as a
// rank returns from Met. So Met at rank 0 must close the server on this port, and Met at rank 1 must return
// only after that. The store in which the ranks have met must stay open.
func TestMasterPortIsGivenUp(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	met := meetBoth(t, plainRanks(t, 2, "MASTER_ADDR", "localhost", "MASTER_PORT", port))
	defer closeBoth(t, met)
	if err := met[1].atMet[0](soon(t)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("rank 1 goes on before rank 0 has given the port up: %v", err)
	}
	gone := make(chan error, 1)
	go func() {
		err := met[1].Met(testnet.Context(t))
		l, listenErr := net.Listen("tcp", net.JoinHostPort(loopback, port))
		if listenErr == nil {
			listenErr = l.Close()
		}
		gone <- errors.Join(err, listenErr)
	}()
	if err := met[0].Met(testnet.Context(t)); err != nil {
		t.Error(err)
	}
	if err := <-gone; err != nil {
		t.Error(err)
	}
	if _, err := met[1].Store.Add(testnet.Context(t), "n", 1); err != nil {
		t.Errorf("the store went away with the port: %v", err)
	}
}

// TestTorchWasHere lets PyTorch in rank 0 serve a TCPStore at MASTER_PORT. The ranks must meet through that
// store. They must leave no key in it, so that they can meet there again. A second job that uses the store at
// the same time must get an error.
func TestTorchWasHere(t *testing.T) {
	h := newStore(t)
	port := serveTorch(t, h)
	mustMeet(t, true, same(MeetOptions{}), torchRanks(t, 1, "MASTER_PORT", port,
		"TORCHELASTIC_USE_AGENT_STORE", "False")...)
	for range 2 {
		ranks := func() []*Env { return plainRanks(t, 2, "MASTER_ADDR", "localhost", "MASTER_PORT", port) }
		met := meetBoth(t, ranks())
		_, err := ranks()[0].Meet(testnet.Context(t), MeetOptions{})
		testnet.WantError(t, err, "another job, or another rank 0 of this job, uses port "+port)
		closeBoth(t, met)
	}
	if n, err := h.NumKeys(t.Context()); n != 0 || err != nil {
		t.Errorf("%d keys are left in PyTorch's store (%v)", n, err)
	}
}

// TestTorchOfAnEarlierProgram lets rank 1 find the TCPStore of an earlier program, which then ends. The ranks
// must meet.
func TestTorchOfAnEarlierProgram(t *testing.T) {
	h := store.NewHashStore(store.Limits{})
	server, err := c10d.Serve("127.0.0.1:0", h, c10d.Config{})
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(server.Addr())
	ranks := plainRanks(t, 2, "MASTER_ADDR", "localhost", "MASTER_PORT", port)
	var met [2]*Place
	var meeting sync.WaitGroup
	meet := func(r int) {
		var err error
		if met[r], err = ranks[r].Meet(testnet.Context(t), MeetOptions{}); err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	meeting.Go(func() { meet(1) })
	testnet.Eventually(t, "that rank 1 waits", func() bool { return h.Waits() == 1 })
	if err := errors.Join(server.Close(), h.Close()); err != nil {
		t.Error(err)
	}
	meet(0)
	meeting.Wait()
	if !t.Failed() {
		closeBoth(t, met)
	}
}

// TestMasterOutOfOrder runs rank 0 in Init while the other ranks are in PyTorch's init_process_group. Rank 0
// must log why they wait.
func TestMasterOutOfOrder(t *testing.T) {
	log, entries := testnet.Logs()
	port := strconv.Itoa(testnet.FreePort(t))
	ranks := plainRanks(t, 2, "MASTER_ADDR", "localhost", "MASTER_PORT", port)
	m := meetOne(t, ranks[0], MeetOptions{Log: log})
	torch, err := c10d.Dial(testnet.Context(t), net.JoinHostPort(loopback, port), c10d.Unknown)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := torch.CountWorker(testnet.Context(t)); err != nil {
		t.Error(err)
	}
	testnet.Eventually(t, "the reason", func() bool {
		return testnet.Logged(entries, "PyTorch of another rank", "in the same order")
	})
	if err := errors.Join(torch.Close(), m.Close()); err != nil {
		t.Error(err)
	}
	// If rank 0 is in init_process_group while the other ranks are in Init, the errors of the other ranks
	// must say why they have found no address.
	h := newStore(t)
	server, err := c10d.Serve("127.0.0.1:"+port, h, c10d.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	ctx, cancel := context.WithCancel(testnet.Context(t))
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := ranks[1].Meet(ctx, MeetOptions{})
		failed <- err
	}()
	testnet.Eventually(t, "that rank 1 waits", func() bool { return h.Waits() == 1 })
	cancel()
	testnet.WantError(t, <-failed, "rank 0 has published no address in the TCPStore at 127.0.0.1:"+port,
		"in the same order")
}

// TestMasterOfAnotherSize gives the ranks different values of WORLD_SIZE. They must not meet, and the error
// must name both values.
func TestMasterOfAnotherSize(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	meetOne(t, plainRanks(t, 3, "MASTER_ADDR", "localhost", "MASTER_PORT", port)[0], MeetOptions{})
	_, err := plainRanks(t, 2, "MASTER_ADDR", "localhost", "MASTER_PORT", port)[1].Meet(testnet.Context(t),
		MeetOptions{})
	testnet.WantError(t, err, "of 3 ranks", "of 2 ranks", "set the same WORLD_SIZE at all ranks")
}

// TestMasterPortIsTaken uses a MASTER_PORT on which a server listens that belongs neither to gohvd nor to
// PyTorch. Both ranks must get an error that says so, and that names the settings which are used.
func TestMasterPortIsTaken(t *testing.T) {
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		io.WriteString(conn, "220 mail.example.org\r\n")
		io.Copy(io.Discard, conn)
	})
	_, port, _ := net.SplitHostPort(addr)
	number, _ := strconv.Atoi(port)
	for _, c := range []struct {
		host, port string
		o          MeetOptions
	}{
		{"MASTER_ADDR", "MASTER_PORT", MeetOptions{}},
		{"HVD_RENDEZVOUS_HOST", "HVD_RENDEZVOUS_PORT", MeetOptions{Host: "localhost", Port: number}},
	} {
		for r, part := range []string{c.port + " is in use on this host, but not by a TCPStore",
			"no connection to rank 0 at " + c.host + " and " + c.port} {
			_, err := plainRanks(t, 2, c.host, "localhost", c.port, port)[r].Meet(testnet.Context(t), c.o)
			testnet.WantError(t, err, part, "the server answered \"220 mail\", so it is not a TCPStore")
		}
	}
}

// TestTorchrun lets ranks meet under the torchrun of Debian's PyTorch. With --standalone, rank 0 serves the
// store. Without it, torchrun's agent serves the store.
func TestTorchrun(t *testing.T) {
	testnet.NeedTorch(t)
	for secret, arg := range map[string][]string{
		"secret made":  testnet.Standalone(t),
		"secret given": {"--master_addr=127.0.0.1", "--master_port=" + strconv.Itoa(testnet.FreePort(t))},
	} {
		t.Run(secret, func(t *testing.T) {
			argv := append([]string{testnet.Python, "-m", "torch.distributed.run"}, arg...)
			// These options redirect only the output of rank 9, which does not exist. The default is to
			// redirect the output of all ranks, but that fails on Python 3.11.
			argv = append(argv, "--redirects=9:1", "--tee=9:1", "--monitor_interval=0.1")
			launch(t, Torchrun, 4, []string{rankVariable + "=once", bothSecrets[secret]},
				append(argv, "--nproc_per_node=4", "--no_python", testnet.Self(t))...)
		})
	}
}

// TestNobodyComes checks for each kind of launcher that Meet returns when ctx ends if the other ranks do not
// arrive.
func TestNobodyComes(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	o := MeetOptions{Insecure: true, Interfaces: onLoopback(t),
		resolver: func(context.Context, string) (string, error) { return loopback, nil }}
	o.Port = testnet.FreePort(t)
	for _, env := range []environment{
		torchrunEnv.with("MASTER_PORT", port),
		torchrunEnv.with("MASTER_PORT", port, "TORCHELASTIC_USE_AGENT_STORE", "False"),
		slurmEnv, kubernetesEnv, plainEnv,
	} {
		e := detect(t, env)
		_, err := e.Meet(soon(t), o)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v, want %v", e.Kind, err, context.DeadlineExceeded)
		}
	}
	if _, err := Dial(soon(t), net.JoinHostPort(loopback, port), secret.Secret{}); !errors.Is(err,
		context.DeadlineExceeded) {
		t.Errorf("hvdrun: got %v, want %v", err, context.DeadlineExceeded)
	}
	o.resolver = func(_ context.Context, host string) (string, error) {
		return "", &net.DNSError{Err: "no such host", Name: host}
	}
	testnet.EventuallyError(t, func(ctx context.Context) error {
		_, err := detect(t, kubernetesEnv).Meet(ctx, o)
		return err
	}, "resolving train-0.train", "no such host")
	o.resolver = func(context.Context, string) (string, error) { return "", errors.New("broken") }
	_, err := detect(t, kubernetesEnv).Meet(testnet.Context(t), o)
	testnet.WantError(t, err, "resolving train-0.train: broken")
}
