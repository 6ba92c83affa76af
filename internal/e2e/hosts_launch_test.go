package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
)

// enterHost is an agent command that enters a host's network namespace. Unlike ssh it needs no network.
const enterHost = "ip netns exec {host}"

// on returns a command prefix, which runs the rest of the command line on host h.
func on(t testing.TB, h *testnet.Host) []string {
	return h.Command(t.Context(), "env").Args
}

// list returns a value for --hosts that has the ranks of a layout on the hosts. The value contains the names
// of the hosts or, if byAddress is set, their addresses. Addresses are for tests in which the hosts cannot
// resolve names.
func list(hosts []*testnet.Host, l layout, byAddress bool) string {
	var words []string
	for i, h := range hosts {
		name := h.Name
		if byAddress {
			name = h.Addr.String()
		}
		words = append(words, fmt.Sprintf("%s:%d", name, l[i]))
	}
	return strings.Join(words, ",")
}

// processesOf returns the process ID and the command line of each process that has the word in its
// environment. It leaves out the test process.
func processesOf(t *testing.T, word string) (found []string) {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		env, err := os.ReadFile(p + "/environ")
		if err != nil || !bytes.Contains(env, []byte(word)) {
			continue
		}
		text, err := os.ReadFile(p + "/cmdline")
		if err == nil && len(text) > 0 {
			found = append(found, filepath.Base(p)+" "+string(bytes.ReplaceAll(text, []byte{0}, []byte(" "))))
		}
	}
	return found
}

// awaitNone waits until no process has the word in its environment. The test fails if this takes longer than
// the given time.
func awaitNone(t *testing.T, word string, within time.Duration) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(within); ; <-tick.C {
		left := processesOf(t, word)
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after %v these processes are left:\n%s", within, strings.Join(left, "\n"))
		}
	}
}

// mark returns an environment variable with a value that is unique for a job. A test finds the processes of
// the job by this variable.
func mark(t *testing.T) string {
	return fmt.Sprintf("GOHVD_E2E_MARK=%s-%d", t.Name(), time.Now().UnixNano())
}

// tellJob logs the output of hvdrun and its ranks if the test has failed.
func tellJob(t *testing.T, j *job) {
	if t.Failed() {
		t.Logf("output:\n%.4000s\nhvdrun said:\n%.4000s", j.out(), j.err())
	}
}

// hvdrun on one host starts ranks on several hosts. Operations give right results, and the ranks know their
// rank, local rank and cross rank.
func TestHvdrunOverHosts(t *testing.T) {
	for _, c := range []struct {
		layout layout
		tls    string
	}{{layout{2, 2}, "0"}, {layout{1, 1, 1}, "0"}, {layout{2, 2}, "1"}} {
		t.Run(fmt.Sprintf("%v/tls=%s", c.layout, c.tls), func(t *testing.T) {
			hosts := testnet.NewHosts(t, len(c.layout))
			m := mark(t)
			j := startHvdrun(t, on(t, hosts[0]), []string{"-H", list(hosts, c.layout, false), "--agent",
				enterHost}, "checked", secondsVariable+"=0.5", m, "HVD_TLS="+c.tls)
			if status := j.wait(); status != 0 || j.err() != "" {
				t.Errorf("hvdrun ended with status %d", status)
			}
			for r := range c.layout.size() {
				for _, want := range []string{c.layout.line(r), fmt.Sprintf("[%d]<stdout>:rounds ", r)} {
					if !strings.Contains(j.out(), want) {
						t.Errorf("rank %d did not say %q", r, want)
					}
				}
			}
			awaitNone(t, m, 0)
			tellJob(t, j)
		})
	}
}

var digitsResult = regexp.MustCompile(
	`(?m)^\[(\d)\]<stdout>:digits: ranks=4 epochs=\d+ test_accuracy=([0-9.]+) seconds=[0-9.]+ weights_sha256=([0-9a-f]{64})$`)

// buildDigits builds the program examples/digits and returns the path of the binary.
func buildDigits(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := testnet.Link(dir, "examples/digits"); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "digits")
}

// checkDigits checks the output of four ranks of the program examples/digits. All ranks must have the same
// weights and an accuracy of at least 0.95.
func checkDigits(t *testing.T, output string) {
	t.Helper()
	seen, hashes := make(map[string]bool), make(map[string]bool)
	for _, f := range digitsResult.FindAllStringSubmatch(output, -1) {
		seen[f[1]], hashes[f[3]] = true, true
		if accuracy, err := strconv.ParseFloat(f[2], 64); err != nil || accuracy < 0.95 {
			t.Errorf("rank %s: accuracy %v, want at least 0.95", f[1], accuracy)
		}
	}
	if len(seen) != 4 || len(hashes) != 1 {
		t.Errorf("%d ranks have printed a result and %d different weights, want 4 and 1", len(seen),
			len(hashes))
	}
}

// A rank on one host is killed. All other ranks fail, and the report names the rank and its host.
func TestKillOverHosts(t *testing.T) {
	hosts := testnet.NewHosts(t, 2)
	j := startHvdrun(t, on(t, hosts[0]), []string{"-H", list(hosts, layout{2, 2}, false), "--agent", enterHost}, "mixed")
	pids := j.ready(4)
	send(t, pids[3], unix.SIGKILL)
	j.ends(137)
	testnet.WantText(t, j.err(), "Root cause (found by the surviving ranks)", "  rank 3: killed by SIGKILL",
		"    host: "+hosts[1].Name+"\n")
	if n := strings.Count(j.out(), "error "); n != 3 {
		t.Errorf("%d ranks report an error, want 3", n)
	}
	tellJob(t, j)
}

// The store's host has several addresses. The ranks on all hosts use the address of this host on the route
// between the hosts. The ranks on the store's own host use it too, so that the others can reach them.
func TestAddressBetweenTheHosts(t *testing.T) {
	hosts := testnet.NewHosts(t, 2)
	// The kernel lists this address before the address on the route between the hosts.
	add := hosts[0].Command(t.Context(), "ip", "address", "add", "192.168.77.1/24", "dev", "lo")
	if out, err := add.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	command := append(on(t, hosts[0]), hvdrunPath, "-H", list(hosts, layout{1, 1}, true), "--agent", "ip netns exec "+
		hosts[1].Name+" env AT={host}")
	j := startCommand(t, append(command, "sh", "-c", "echo at $HOROVOD_GLOO_RENDEZVOUS_ADDR"))
	j.ends(0)
	for r := range hosts {
		if want := fmt.Sprintf("[%d]<stdout>:at %s\n", r, hosts[0].Addr); !strings.Contains(j.out(), want) {
			t.Errorf("rank %d did not say %q", r, want)
		}
	}
	tellJob(t, j)
}

// hvdrun starts a job on several hosts. It serves a TCPStore for torch.distributed only if it has the flag
// --torch-store.
func TestTorchStoreOverHosts(t *testing.T) {
	hosts := testnet.NewHosts(t, 2)
	script := `echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR; ` +
		`[ -z "$MASTER_ADDR" ] || exec bash -c "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT"`
	for _, c := range []struct {
		flags []string
		want  []string
	}{
		{nil, []string{"", "", ""}},
		{[]string{"--torch-store", hosts[0].Addr.String() + ":0"}, []string{"0 3 0 2 0 2 10.77.0.1",
			"1 3 1 2 0 2 10.77.0.1", "2 3 0 1 1 2 10.77.0.1"}},
	} {
		command := append(on(t, hosts[0]), hvdrunPath, "-np", "3", "-H", list(hosts, layout{2, 2}, false), "--agent",
			enterHost)
		j := startCommand(t, append(append(command, c.flags...), "sh", "-c", script))
		if status := j.wait(); status != 0 {
			t.Errorf("%v: hvdrun ended with status %d", c.flags, status)
		}
		for r, text := range c.want {
			if want := fmt.Sprintf("[%d]<stdout>:%s\n", r, text); !strings.Contains(j.out(), want) {
				t.Errorf("%v: rank %d did not say %q", c.flags, r, text)
			}
		}
		tellJob(t, j)
	}
}

const (
	sshd     = "/usr/sbin/sshd"
	sshdPort = "2222"
)

// sshHosts returns n hosts and runs an sshd on all of them except the first. The result command is a prefix
// that runs hvdrun on the first host. The result flags makes hvdrun reach the other hosts by ssh. If ssh is
// not installed, sshHosts skips the test.
func sshHosts(t testing.TB, n int) (hosts []*testnet.Host, command, flags []string) {
	t.Helper()
	testnet.NeedHosts(t)
	for _, program := range []string{sshd, "ssh", "ssh-keygen"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatalf("%v; CI installs openssh-server and openssh-client", err)
			}
			t.Skipf("%v; it is in Debian's packages openssh-server and openssh-client", err)
		}
	}
	hosts = testnet.NewHosts(t, n)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, text string) {
		testnet.WriteFile(t, at(name), text)
	}
	for _, key := range []string{"host", "user"} {
		if out, err := exec.CommandContext(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
			at(key)).CombinedOutput(); err != nil {
			t.Fatalf("ssh-keygen: %v\n%s", err, out)
		}
	}
	public := testnet.ReadFile(t, at("host.pub"))
	var known strings.Builder
	for _, h := range hosts {
		fmt.Fprintf(&known, "[%s]:%s %s", h.Addr, sshdPort, public)
	}
	write("known_hosts", known.String())
	write("ssh_config", "UserKnownHostsFile "+at("known_hosts")+
		"\nGlobalKnownHostsFile none\nStrictHostKeyChecking yes\nUser root\n")
	write("sshd_config", "Port "+sshdPort+"\nHostKey "+at("host")+"\nAuthorizedKeysFile "+at("user.pub")+
		"\nPermitRootLogin yes\nUsePAM no\nStrictModes no\nPidFile none\n")
	for _, h := range hosts[1:] {
		// Each host has mounts of its own, so that this mount does not hide the machine's /run.
		cmd := h.Command(t.Context(), "sh", "-c", `mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec "$@"`,
			"sh", sshd, "-D", "-e", "-f", at("sshd_config"))
		// Standard error is a file. A pipe would stay open, because ssh sessions may outlive sshd.
		said, err := os.OpenFile(at("said"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer said.Close()
		cmd.Stderr = said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
			if text, err := os.ReadFile(at("said")); t.Failed() {
				t.Logf("sshd said:\n%.4000s (error %v)", text, err)
			}
		})
		awaitPort(t, hosts[0], net.JoinHostPort(h.Addr.String(), sshdPort))
	}
	// ssh ignores HOME: it reads the configuration of the user in the home directory that the password file
	// names, and then /etc/ssh/ssh_config. So the test mounts its own configuration over /etc/ssh/ssh_config.
	command = append(on(t, hosts[0]), "sh", "-c", `mount --bind "$0" /etc/ssh/ssh_config && exec "$@"`,
		at("ssh_config"))
	return hosts, command, []string{"--ssh-port", sshdPort, "--ssh-identity-file", at("user")}
}

// awaitPort waits until the host can connect to addr. The test fails if this takes longer than 20 s.
func awaitPort(t testing.TB, from *testnet.Host, addr string) {
	t.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	const script = `until (exec 3<>"/dev/tcp/$0/$1") 2>/dev/null; do sleep 0.02; done`
	if out, err := from.Command(ctx, "bash", "-c", script, host, port).CombinedOutput(); err != nil {
		t.Fatalf("waiting for %s: %v\n%s", addr, err, out)
	}
}

// The program examples/digits trains on two hosts, and hvdrun reaches them by ssh. Afterwards no process of
// the job is left.
func TestDigitsOverSSH(t *testing.T) {
	hosts, command, flags := sshHosts(t, 2)
	digits := buildDigits(t)
	m := mark(t)
	command = append(command, hvdrunPath, "-H", list(hosts, layout{2, 2}, true))
	j := startCommand(t, append(append(command, flags...), digits), m)
	if status := j.wait(); status != 0 || j.err() != "" {
		t.Errorf("hvdrun ended with status %d", status)
	}
	checkDigits(t, j.out())
	awaitNone(t, m, 0)
	tellJob(t, j)
}

// hvdrun is killed. The ranks that it has started by ssh end too.
func TestHvdrunIsKilledOverSSH(t *testing.T) {
	hosts, command, flags := sshHosts(t, 3)
	m := mark(t)
	j := startHvdrun(t, command, append(flags, "-H", list(hosts, layout{1, 1, 1}, true)), "small", m)
	j.ready(3)
	if err := j.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	j.wait()
	awaitNone(t, m, 30*time.Second)
}

// A host loses its link in the middle of a job. The ranks on the other hosts name ranks of this host. hvdrun
// ends before the deadline and names the host. The processes on the lost host end too.
func TestLinkDownUnderHvdrun(t *testing.T) {
	const (
		liveness = 3 * time.Second
		deadline = 40 * time.Second // hvdrun gives the other ranks 10 s to notice the loss and to end
	)
	t.Parallel()
	hosts, command, flags := sshHosts(t, 2)
	m := mark(t)
	j := startHvdrun(t, command, append(flags, "-H", list(hosts, layout{2, 2}, true)), "mixed",
		fmt.Sprintf("HVD_LIVENESS_SECONDS=%v", liveness.Seconds()), m)
	j.ready(4)
	hosts[1].SetLink(false)
	cut := time.Now()
	status := j.wait()
	took := time.Since(cut)
	t.Logf("hvdrun ended after %v", took.Round(time.Millisecond))
	if status == 0 || took > deadline {
		t.Errorf("hvdrun ended with status %d after %v, want a failure within %v", status, took, deadline)
	}
	for _, r := range []int{0, 1} {
		if want := regexp.MustCompile(fmt.Sprintf(`\[%d\]<stdout>:error .*ranks? (2|3)`,
			r)); !want.MatchString(j.out()) {
			t.Errorf("rank %d does not name ranks 2 or 3", r)
		}
	}
	testnet.WantText(t, j.err(), "lost host "+hosts[1].Addr.String()+": received nothing from the other end for 3s",
		"  rank 2: ", "  rank 3: ")
	// The processes on the lost host have also received nothing for the liveness limit, and end by
	// themselves.
	awaitNone(t, m, deadline)
	tellJob(t, j)
}

// hvdrun cannot start its agent on a host. hvdrun's error names the host and the cause.
func TestHostsOutOfReach(t *testing.T) {
	hosts, command, flags := sshHosts(t, 2)
	for _, c := range []struct {
		name, host string
		flags      []string
		want       string
	}{
		{"wrong name", "no-such-host.invalid", nil,
			"host no-such-host.invalid: ssh: exit status 255: ssh: Could not resolve hostname no-such-host.invalid"},
		{"no sshd", hosts[1].Addr.String(), []string{"--ssh-port", "2223", "--start-timeout", "4"},
			"exit status 255: ssh: connect to host"},
		{"nobody there", "10.77.0.250", []string{"--start-timeout", "1"}, "host 10.77.0.250: "},
		{"another key", hosts[1].Addr.String(), []string{"--ssh-identity-file", "/dev/null"},
			"Permission denied"},
		{"no hvdrun", hosts[1].Addr.String(), []string{"--remote-hvdrun", "/no such/hvdrun"},
			"found no hvdrun at /no such/hvdrun on that host: give its path with --remote-hvdrun"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := startHvdrun(t, command, append(append(flags[:len(flags):len(flags)], "-H", c.host),
				c.flags...), "checked")
			status := j.wait()
			if status != 1 || !strings.Contains(j.err(), c.want) {
				t.Errorf("hvdrun ended with status %d and does not say %q", status, c.want)
			}
			tellJob(t, j)
		})
	}
}

// TestHostThatStartsLate runs hvdrun while another host cannot be reached yet. It must try again until the
// host can be reached.
func TestHostThatStartsLate(t *testing.T) {
	hosts, command, flags := sshHosts(t, 2)
	// ssh says on standard error that it could not connect.
	config, err := os.OpenFile(command[len(command)-1], os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer config.Close()
	if _, err := config.WriteString("LogLevel DEBUG1\n"); err != nil {
		t.Fatal(err)
	}
	route := func(change string) {
		t.Helper()
		if out, err := hosts[0].Command(t.Context(), "ip", "route", change, "unreachable",
			hosts[1].Addr.String()).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	route("add")
	command = append(append(command, hvdrunPath), flags...)
	j := startCommand(t, append(command, "-H", hosts[1].Addr.String(), "--start-timeout", "120", "true"))
	j.untilError("ssh has failed to connect", func(text string) bool {
		return strings.Contains(text, "No route to host")
	})
	route("del")
	j.ends(0)
	tellJob(t, j)
}
